"""Run a measurement for the figures of docs/: ``python recipes/figures/run.py NAME [options]``.

NAME is never_slower, repeats or heads; ``run.py NAME --help`` lists its options. All take --model
(demo, a folder or a hub id), print a table and write every number to --json FILE.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from scipy.stats import bootstrap

NAMES = ("never_slower", "repeats", "heads")
Row = dict[str, Any]


def ratio(
    numerators: Sequence[float], denominators: Sequence[float]
) -> tuple[float, float, float]:
    """Sum over sum, and the 95 % percentile bootstrap interval of that over the pairs."""
    def of_sums(above: Any, below: Any, axis: int = -1) -> Any:
        return np.sum(above, axis=axis) / np.sum(below, axis=axis)

    data = np.asarray(numerators), np.asarray(denominators)
    value = sum(numerators) / sum(denominators)
    if len(numerators) < 2:
        return value, value, value
    interval = bootstrap(data, of_sums, paired=True, vectorized=True, method="percentile",
                         rng=np.random.default_rng(0)).confidence_interval
    return value, float(interval.low), float(interval.high)


def with_interval(value: tuple[float, float, float]) -> str:
    return "{:.3f} ({:.3f}–{:.3f})".format(*value)


def show(title: str, rows: Sequence[Row]) -> None:
    """Print the rows; keys that begin with an underscore are only for the JSON file."""
    threads = f"{torch.get_num_threads()} threads"
    table = Table(title=f"{title}, {threads}", title_justify="left", box=SIMPLE_HEAD,
                  padding=(0, 1, 0, 0), pad_edge=False)
    shown = [name for name in rows[0] if not name.startswith("_")] if rows else []
    for place, name in enumerate(shown):
        justify: Any = "right" if place else "left"
        table.add_column(name.replace("/", "/\n"), justify=justify, no_wrap=True)
    for row in rows:
        table.add_row(*("" if value is None else f"{value:.3g}" if isinstance(value, float)
                        else with_interval(value) if isinstance(value, tuple) else str(value)
                        for value in map(row.get, shown)))
    Console(highlight=False).print(table)


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in NAMES:
        raise SystemExit(f"{__doc__}\nnames: {', '.join(NAMES)}")
    name = sys.argv[1]
    module = importlib.import_module(name)
    parser = argparse.ArgumentParser(prog=f"run.py {name}", description=module.__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", help="of the model; default: as dp.load chooses")
    parser.add_argument("--threads", type=int, help="number of threads of torch")
    parser.add_argument("--json", type=Path, help="file for every number")
    module.options(parser)
    args = parser.parse_args(sys.argv[2:])
    if args.threads:
        torch.set_num_threads(args.threads)
    rows = module.run(args)
    show(f"{name.replace('_', ' ')}: {args.model}", rows)
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
