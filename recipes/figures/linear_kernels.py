"""How fast the linear kernels of each level read weights from memory, in GB/s:

    python recipes/figures/linear_kernels.py [--threads N] [--outputs 9728] [--inputs 896]
        [--repeats 5]

Copies of a layer that no cache holds (400 MB) are read in turn; the fastest twentieth of the calls
counts, so that other programs disturb little. In 4 bits, steps, bases and scales (a seventh more)
are not counted as weights.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator

import torch
from rich.console import Console
from rich.table import Table

from draftproof.native.build import able, opened
from draftproof.native.kernels import Kernels
from draftproof.native.structures import BLOCK, GROUP, Native, interleaved, linear, nibbles, rounded

ROWS = (1, 2, 4, 8, 16)
SPAN = 400_000_000


def layers(bits: int, outputs: int, inputs: int) -> Iterator[tuple[Native, object]]:
    """Copies of a layer, each with the tensors it reads."""
    scale, step = rounded(torch.rand(outputs)), torch.full((outputs, -(-inputs // GROUP)), 17)
    scales = torch.rand(outputs, -(-inputs // BLOCK))
    makers: dict[int, Callable[[], tuple[Native, object]]] = {
        16: lambda: _kept(interleaved(torch.randn(outputs, inputs).bfloat16(), 2),
                          lambda w: linear(w, None, None, inputs, outputs)),
        8: lambda: _kept(
            interleaved(torch.randint(0, 255, (outputs, inputs), dtype=torch.uint8), 4),
            lambda w: linear(w, scale, None, inputs, outputs),
        ),
        4: lambda: _kept(
            nibbles(torch.randint(0, 15, (outputs, inputs)), step, step - 17, scales),
            lambda both: linear(*both, None, inputs, outputs),
        ),
    }
    for _ in range(-(-SPAN * 8 // (outputs * inputs * bits))):
        layer, held = makers[bits]()
        yield layer, (held, scale)


def _kept(held: object, make: Callable[..., Native]) -> tuple[Native, object]:
    return make(held), held


def measure(
    found: Kernels, copies: list[tuple[Native, object]], rows: int, inputs: int, repeats: int
) -> float:
    """Seconds for one layer."""
    states, seconds = torch.randn(rows, inputs).bfloat16(), list[float]()
    for _ in range(repeats):
        for layer, _held in copies:
            start = time.perf_counter()
            found.multiply(layer, states)
            seconds.append(time.perf_counter() - start)
    return sorted(seconds)[len(seconds) // 20]


def main() -> None:
    """Measure all builds and print a table."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--outputs", type=int, default=9728)
    parser.add_argument("--inputs", type=int, default=896)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    title = f"GB/s, {options.outputs} × {options.inputs}, {options.threads} threads"
    table = Table(title=title, title_justify="left")
    for name in ("bits", "build", *(f"{rows} rows" for rows in ROWS), "T(8)/T(1)"):
        table.add_column(name, justify="right")
    for bits in (16, 8, 4):
        copies = list(layers(bits, options.outputs, options.inputs))
        for build in able():
            found = Kernels(opened(build))
            times = [measure(found, copies, rows, options.inputs, options.repeats) for rows in ROWS]
            size = options.outputs * options.inputs * bits / 8e9
            speeds = (f"{size / seconds:.1f}" for seconds in times)
            table.add_row(str(bits), build, *speeds, f"{times[ROWS.index(8)] / times[0]:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
