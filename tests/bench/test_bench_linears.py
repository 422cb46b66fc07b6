"""Linear layers side by side: every way multiplies the same, and where ours are not there, that is said."""

from __future__ import annotations

import json
from itertools import count

import pytest
import torch

from draftproof.bench import linears
from draftproof.bench.figures import Interval
from draftproof.bench.linears import OURS, TORCH, layers, measure

needs_ours = pytest.mark.skipif(not linears.kinds(), reason="our kernels do not run here")


@needs_ours
@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
@pytest.mark.parametrize("rows", [1, 5, 13])
def test_every_way_multiplies_the_same(kind: str, rows: int) -> None:
    if kind not in linears.kinds():
        pytest.skip("this processor has no such product")
    dice = torch.Generator().manual_seed(rows)
    weight, text = (torch.randn(*shape, generator=dice).bfloat16() for shape in ((96, 64), (rows, 64)))
    made = layers(kind, weight)
    wanted = text.float() @ weight.float().t()
    for way, layer in made.items():
        assert float((layer(text).float() - wanted).norm() / wanted.norm()) < linears.OFF, way
    natives = {way: getattr(layer, "native", None) is not None for way, layer in made.items()}
    assert natives == {way: way == OURS for way in made}


@needs_ours
def test_lines_of_every_number_of_rows() -> None:
    """By a clock that takes a second each time it is asked: all are as quick."""
    ticks = count()
    found = measure("int8", 64, 32, (1, 3), repeats=3, span=10_000, clock=lambda: float(next(ticks)))
    assert [line.rows for line in found] == [1, 3] and next(ticks) == 2 * 3 * 2 * 2
    for line in found:
        assert line.milliseconds == dict.fromkeys(line.milliseconds, 1000.0) and len(line.milliseconds) == 2
        assert {line.growth, *line.ratios.values()} == {Interval(1.0, 1.0, 1.0)} and len(line.ratios) == 1


@needs_ours
def test_a_wrong_product_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(kind: str, weight: torch.Tensor) -> dict[str, linears.Layer]:
        return {**layers(kind, weight), TORCH: lambda rows: torch.zeros(len(rows), len(weight))}

    monkeypatch.setattr(linears, "layers", broken)
    with pytest.raises(AssertionError, match="the product by torch is off by 1"):
        measure(linears.kinds()[0], 64, 32, (1,), repeats=1, span=1)


@needs_ours
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_the_command_tells_all(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], form: list[str]) -> None:
    monkeypatch.setattr(linears, "SIZES", ((64, 32), (32, 64)))
    monkeypatch.setattr(linears, "SPAN", 1)
    monkeypatch.setattr("sys.argv", ["linears", "--repeats", "2", *form])
    linears.main()
    told = capsys.readouterr().out
    if form:
        found = json.loads(told)
        assert len(found) == len(linears.kinds()) * len(linears.SIZES) * len(linears.ROWS)
        assert found[0]["growth"]["median"] == 1.0 and found[0]["ratios"].keys() == {"torch"}
    else:
        assert all(f"{kind} weights from memory" in told for kind in linears.kinds()) and "64 × 32" in told


def test_without_kernels_of_ours_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "kernels", lambda: None)
    monkeypatch.setattr("sys.argv", ["linears"])
    with pytest.raises(SystemExit, match="our kernels do not run here"):
        linears.main()
