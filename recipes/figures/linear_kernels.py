"""How fast the linear kernels of each build read weights from memory, in GB/s, and a plain sum:

    python recipes/figures/linear_kernels.py [--threads N] [--outputs 8960] [--inputs 1536]
        [--formats BF16 Q4_K ...] [--rows 1 4 8 64 512] [--repeats 5]

Copies of a layer, 400 MB together so that no cache holds them, are read in turn. The 5th percentile
of the times counts, so that other programs disturb little. INT8 is the layout with a scale per
output; the others are the block formats of GGUF files, and their scales count as bytes that are
read. With many rows the arithmetic limits the speed, not memory: the last column is billions of
multiplications per second with the last number of rows.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from draftproof.gguf.types import BLOCK_SIZES
from draftproof.native.build import able, opened
from draftproof.native.formats import FORMATS, STRIP
from draftproof.native.kernels import Kernels
from draftproof.native.pages import enlarge
from draftproof.native.structures import Native, block_linear, interleaved, linear, pad_to_strip

SPAN = 400_000_000


def layer_of(format: str, outputs: int, inputs: int) -> tuple[Callable[[Tensor], Native], Tensor]:
    """A function that makes a layer from a copy of the weights, and the weights."""
    if format == "BF16":
        weight = interleaved(torch.randn(outputs, inputs).bfloat16(), 2)
        return lambda copy: linear(copy, None, None, inputs, outputs), weight
    if format == "INT8":
        scale = pad_to_strip(torch.rand(outputs))
        weight = interleaved(torch.randint(0, 255, (outputs, inputs), dtype=torch.uint8), 4)
        return lambda copy: linear(copy, scale, None, inputs, outputs), weight
    size = BLOCK_SIZES[format]
    shape = (-(-outputs // STRIP), inputs // size.weights, STRIP * size.nbytes)
    records = torch.randint(0, 64, shape, dtype=torch.uint8)        # no scale is NaN
    return lambda copy: block_linear(format, copy, None, inputs, outputs), records


def plain_sum(repeats: int) -> float:
    """GB/s of torch's sum of a tensor in large pages."""
    numbers = enlarge(torch.empty(SPAN // 8, dtype=torch.int64)).fill_(1)
    seconds = list[float]()
    for _ in range(repeats):
        start = time.perf_counter()
        numbers.sum()
        seconds.append(time.perf_counter() - start)
    return numbers.nbytes / min(seconds) / 1e9


def measure(libraries: list[Kernels], layers: list[Native], rows: int, repeats: int) -> list[float]:
    """Seconds per layer for each library; they take turns, so that a change of the machine's speed
    affects all alike."""
    states = torch.randn(rows, layers[0].size).bfloat16()
    seconds: list[list[float]] = [[] for _ in libraries]
    for _ in range(repeats):
        for library, times in zip(libraries, seconds, strict=True):
            for layer in layers[: max(2, 512 // rows)]:
                start = time.perf_counter()
                library.multiply(layer, states)
                times.append(time.perf_counter() - start)
    return [sorted(times)[len(times) // 20] for times in seconds]


def main() -> None:
    """Measure all builds and print a table."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--outputs", type=int, default=8960)
    parser.add_argument("--inputs", type=int, default=1536)
    parser.add_argument("--formats", nargs="+", default=["BF16", "INT8", *FORMATS])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 8, 64, 512])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    title = (f"GB/s, {options.outputs} × {options.inputs}, {options.threads} threads; "
             f"a plain sum reads {plain_sum(options.repeats):.1f} GB/s")
    table = Table(title=title, title_justify="left")
    for name in ("weights", "build", *(f"{rows} rows" for rows in options.rows), "G products/s"):
        table.add_column(name, justify="right")
    libraries = [Kernels(opened(build)) for build in able()]
    for format in options.formats:
        make, weight = layer_of(format, options.outputs, options.inputs)
        copies = [enlarge(torch.empty_like(weight)).copy_(weight)
                  for _ in range(max(2, SPAN // weight.nbytes))]
        layers = [make(copy) for copy in copies]
        times_by_rows = [measure(libraries, layers, rows, options.repeats)
                         for rows in options.rows]
        for build, *times in zip(able(), *times_by_rows, strict=True):
            speeds = (f"{weight.nbytes / seconds / 1e9:.1f}" for seconds in times)
            products = options.rows[-1] * options.outputs * options.inputs / times[-1] / 1e9
            table.add_row(format, build, *speeds, f"{products:.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
