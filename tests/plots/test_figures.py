"""Figures are drawn in every format, in light and dark, and refused before the work."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest

from draftproof.bench import plot as bench_plot
from draftproof.bench.measure import PLAIN, Setting
from draftproof.bench.report import Figures, Interval
from draftproof.errors import BadInput
from draftproof.plan import plot as plan_plot
from draftproof.plan.machine import Size, by_figures
from draftproof.plan.planner import Plan, PlanConfig, Prediction
from draftproof.plots.style import check_plot_file, short_name, theme_of
from draftproof.training import plot as training_plot

LOG: list[dict[str, Any]] = [
    {"step": step, "loss": 20 / step}
    | ({"held_out": {"loss": 20 / step, "tokens_per_round": 1 + step / 40}} if step % 10 == 0
       else {})
    for step in range(1, 41)
]


def figures(setting: Setting) -> list[Figures]:
    plain = Figures(PLAIN, setting, 4, 4, None, 30.0, Interval(1.0), 1.0, None, [], 0.1)
    fast = Figures("/some/folder/heads+suffix", setting, 4, 3, (1, 2), 60.0,
                   Interval(2.0, 1.8, 2.3), 2.5, 0.6, [0.6], None)
    return [plain, fast]


def a_plan() -> Plan:
    machine = by_figures("a100", "m", 2e12, 3e14, Size(1e9, 5e8), {})
    rows = [Prediction(name, batch, warm, 3, 2.0, 50.0, up, up - 0.1, up + 0.1, [0.5], 1e9, None)
            for warm in (0.0, 0.7) for batch in (1, 8) for name, up in (("none", 1.0), ("a", 1.6))]
    return Plan("/models/m", PlanConfig((1, 8), (0.0, 0.7)), machine, 4, rows, {})


def texts_of(file: Path) -> str:
    """An SVG whose texts are texts."""
    return file.read_text("utf-8")


@pytest.fixture(autouse=True)
def _texts_stay_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib

    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")


def test_a_measurement_shows_every_method_with_its_interval(tmp_path: Path) -> None:
    both = [*figures(Setting(1, 0.0)), *figures(Setting(8, 0.7))]
    bench_plot.plot(both, tmp_path / "b.svg", "model, 4 prompts")
    texts = texts_of(tmp_path / "b.svg")
    for words in ("model, 4 prompts", "greedy, batch 1", "T = 0.7, batch 8", "heads+suffix",
                  "2.00×, 60 tokens/s, 3/4 same text", bench_plot.AXIS):
        assert words in texts
    assert "/some/folder" not in texts


def test_a_plan_shows_predictions_and_costs(tmp_path: Path) -> None:
    plan_plot.plot(a_plan(), tmp_path / "p.svg")
    texts = texts_of(tmp_path / "p.svg")
    for words in ("m on a100 (calculated, not measured)", "T = 0.7", "1.60", "batch 8",
                  "milliseconds", "draft tokens per row"):
        assert words in texts


def test_line_end_labels_do_not_overlap() -> None:
    places = plan_plot._apart([(10.0, "a"), (10.1, "b"), (2.0, "c")])
    assert min(abs(item - other) for item in places for other in places if item is not other) > 0.5


def test_training_is_drawn_as_picture_and_as_text(tmp_path: Path) -> None:
    training_plot.plot(LOG, tmp_path / "c.svg")
    texts = texts_of(tmp_path / "c.svg")
    assert "held-out text" in texts and "2.00" in texts and "step" in texts
    text = training_plot.as_text(LOG)
    assert max(map(len, text.splitlines())) <= 80
    for words in ("held-out loss", "tokens per round", "2.00", "1.25", "0.50", "step 10"):
        assert words in text
    assert training_plot.as_text(LOG[:15]) == ""
    training_plot.plot(LOG[:5], tmp_path / "none.png")              # nothing was evaluated yet
    assert not (tmp_path / "none.png").exists()


def test_a_flat_curve_is_a_line() -> None:
    lines = training_plot.columns_of("loss", [(1, 2.0), (2, 2.0)], 3)
    assert "▁▁▁▁" in lines[-2] and not math.isnan(float(lines[1].split()[0]))


def test_the_name_decides_theme_and_format(tmp_path: Path) -> None:
    dark, light = theme_of(Path("a-dark.png")), theme_of(Path("a.png"))
    assert dark.background < light.background                       # as hexadecimal numbers
    for name in ("a.png", "a-dark.pdf"):
        bench_plot.plot(figures(Setting(1, 0.0)), tmp_path / name, "m")
        assert (tmp_path / name).stat().st_size > 1000
    assert not list(tmp_path.glob(".part*"))


def test_unsupported_plot_files_are_refused_up_front(monkeypatch: pytest.MonkeyPatch) -> None:
    check_plot_file(None)
    with pytest.raises(BadInput, match=r"\.png, \.svg, \.pdf"):
        check_plot_file(Path("speed.gif"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match="pip install matplotlib"):
        check_plot_file(Path("speed.png"))


def test_plot_labels_shorten_long_names_and_drop_parent_folders() -> None:
    assert short_name("/a/b/heads/") == "heads"
    assert len(short_name("prompt-lookup+suffix+token-recycling")) <= 26
