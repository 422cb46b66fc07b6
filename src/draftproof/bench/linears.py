"""Linear layers by our kernels against torch's own: what the claims about large targets and 8 bits rest on.

    python -m draftproof.bench.linears [--repeats N] [--threads N] [--json]

Of each size many copies take turns, more than any cache holds, so that weights come from memory, as they do in a large model.
In each repeat every number of rows is multiplied in every way in turn, the order turning; ratios are taken within a repeat.
Figures are medians over repeats, with 95 % percentile bootstrap intervals. In 8 bits ours makes a scale
per token as it goes, and torch's own leaves activations in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from typing import TypeVar

import torch
import torch.nn.functional as F
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

from draftproof.bench.figures import Interval, interval
from draftproof.bench.measure import Clock
from draftproof.model.packed_linear import PackedLinear
from draftproof.model.quantized_linear import Int8Linear
from draftproof.native.kernels import kernels

Layer = Callable[[Tensor], Tensor]
T = TypeVar("T")

SIZES = ((896, 4864), (4864, 896), (9728, 896), (2048, 11008), (11008, 2048))
"""Outputs and inputs: of models of half a billion and of three billion parameters."""
ROWS = (1, 2, 5, 9, 12, 16, 40, 128)
"""Tokens read together; the first is what others are compared with."""
SPAN = 200 << 20
"""Bytes of the copies that take turns in each way."""
OURS, TORCH = "ours", "torch"
NONE = "linears: our kernels do not run here; they want Linux, a C compiler, and a processor with AVX512-BF16, VNNI or AMX"
OFF = 0.03
"""How far products may be off, as a part of their size: 8 bits are."""


@dataclass(frozen=True)
class Line:
    """What came of one size and number of rows.

    milliseconds: by way. ratios: ours over each other way. growth: ours over ours for the first number of rows.
    """

    weights: str
    outputs: int
    inputs: int
    rows: int
    milliseconds: dict[str, float]
    ratios: dict[str, Interval]
    growth: Interval


def kinds() -> list[str]:
    """The weights that our kernels multiply here."""
    found = kernels()
    if found is None:
        return []
    return [name for name, there in (("bfloat16", found.bf16), ("int8", found.int8)) if there]


def layers(kind: str, weight: Tensor) -> dict[str, Layer]:
    """A layer in each way, with a weight of its own."""
    if kind == "int8":
        codes, scale = _codes(weight)
        makers = {OURS: Int8Linear(weight)}
        return {**makers, TORCH: lambda rows: torch.ops.aten._weight_int8pack_mm(rows, codes, scale)}
    linear, own = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta"), weight.clone()
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return {OURS: PackedLinear(linear), TORCH: lambda rows: F.linear(rows, own)}


@torch.inference_mode()
def measure(
    kind: str,
    outputs: int,
    inputs: int,
    rows: Sequence[int] = ROWS,
    *,
    repeats: int,
    span: int,
    clock: Clock = time.perf_counter,
) -> list[Line]:
    """Every number of rows in every way, with at least `span` bytes of copies; the products are compared first."""
    dice = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=dice).bfloat16()
    texts = {count: torch.randn(count, inputs, generator=dice).bfloat16() for count in rows}
    size = weight.numel() * (1 if kind == "int8" else 2)
    copies = [layers(kind, weight) for _ in range(-(-span // size))]
    turns = {way: cycle([some[way] for some in copies]) for way in copies[0]}
    for way, turn in turns.items():
        for text in texts.values():
            _check(way, next(turn)(text), F.linear(text.float(), weight.float()))
    seconds: dict[tuple[str, int], list[float]] = {(way, count): [] for way in turns for count in rows}
    for repeat in range(repeats):
        for count, text in _turned(list(texts.items()), repeat):
            for way in _turned(list(turns), repeat + count):
                layer, start = next(turns[way]), clock()
                layer(text)
                seconds[way, count].append(clock() - start)
    return [
        Line(
            kind, outputs, inputs, count,
            {way: 1000 * statistics.median(seconds[way, count]) for way in turns},
            {way: _over(seconds[OURS, count], seconds[way, count]) for way in turns if way != OURS},
            _over(seconds[OURS, count], seconds[OURS, rows[0]]),
        )
        for count in rows
    ]  # fmt: skip


def _codes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """As `Int8Linear` rounds them, with a scale per output."""
    scale = weight.abs().amax(1).float().clamp(min=1e-30) / 127
    return (weight / scale[:, None]).round_().to(torch.int8), scale.to(weight.dtype)


def _check(way: str, product: Tensor, truth: Tensor) -> None:
    off = float((product.float() - truth).norm() / truth.norm())
    if not off < OFF:
        raise AssertionError(f"the product by {way} is off by {off:.3f} of its size")


def _turned(things: list[T], by: int) -> list[T]:
    start = by % len(things)
    return [*things[start:], *things[:start]]


def _over(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    return interval([one / other for one, other in zip(ours, theirs, strict=True)])


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--threads", type=int, help="of torch; the machine's default without it")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not kinds():
        raise SystemExit(NONE)
    if options.repeats < 1:
        parser.error("--repeats must be at least 1")
    if options.threads:
        torch.set_num_threads(options.threads)
    wanted = [(kind, *size) for kind in kinds() for size in SIZES]
    bar = track(wanted, "linear layers", console=Console(stderr=True), transient=True)
    found = [line for size in bar for line in measure(*size, repeats=options.repeats, span=SPAN)]
    print(json.dumps([asdict(line) for line in found], indent=1)) if options.json else _print(found)


def _print(found: Sequence[Line]) -> None:
    for kind in dict.fromkeys(line.weights for line in found):
        title = f"{kind} weights from memory, {torch.get_num_threads()} threads"
        table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=0, pad_edge=False)
        for name in ("outputs ×\ninputs", "rows", *(f"{way},\nms" for way in (OURS, TORCH))):
            table.add_column(name, justify="right", vertical="bottom")
        for name in (f"ours over\n{TORCH} (95 %)", f"ours over\n{ROWS[0]} row (95 %)"):
            table.add_column(name, justify="right", vertical="bottom")
        for line in (line for line in found if line.weights == kind):
            times = [f"{one:.2f}" for one in line.milliseconds.values()]
            growth = _told(line.growth) if line.rows != ROWS[0] else ""
            ratios = [_told(line.ratios[TORCH]), growth]
            size = f"{line.outputs} × {line.inputs}"
            table.add_row(size, str(line.rows), *times, *ratios, end_section=line.rows == ROWS[-1])
        Console(highlight=False).print(table)


def _told(ratio: Interval) -> str:
    return f"{ratio.median:.2f}" + (f" ({ratio.bounds})" if ratio.bounds else "")


if __name__ == "__main__":
    main()
