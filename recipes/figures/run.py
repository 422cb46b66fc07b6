"""The measurements behind the figures of docs/: ``python recipes/figures/run.py NAME [options]``.

NAME is never_slower, repeats or heads; ``run.py NAME --help`` lists its options. All take --model
(demo, a folder, a hub id), print one table and write every number to --json FILE.
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


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """Sum over sum, and its 95 % percentile bootstrap interval over the pairs."""
    def of_sums(one: Any, other: Any, axis: int = -1) -> Any:
        return np.sum(one, axis=axis) / np.sum(other, axis=axis)

    data, value = (np.asarray(ours), np.asarray(theirs)), sum(ours) / sum(theirs)
    if len(ours) < 2:
        return value, value, value
    found = bootstrap(data, of_sums, paired=True, vectorized=True, method="percentile",
                      rng=np.random.default_rng(0)).confidence_interval
    return value, float(found.low), float(found.high)


def told(value: tuple[float, float, float]) -> str:
    return "{:.3f} ({:.3f}–{:.3f})".format(*value)


def show(title: str, rows: Sequence[Row]) -> None:
    """A table with the rows' keys as columns; those with an underscore are for the JSON alone."""
    threads = f"{torch.get_num_threads()} threads"
    table = Table(title=f"{title}, {threads}", title_justify="left", box=SIMPLE_HEAD,
                  padding=(0, 1, 0, 0), pad_edge=False)
    shown = [name for name in rows[0] if not name.startswith("_")] if rows else []
    for place, name in enumerate(shown):
        justify: Any = "right" if place else "left"
        table.add_column(name.replace("/", "/\n"), justify=justify, no_wrap=True)
    for row in rows:
        table.add_row(*("" if value is None else f"{value:.3g}" if isinstance(value, float)
                        else told(value) if isinstance(value, tuple) else str(value)
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
    parser.add_argument("--dtype", help="of the model; its own without it")
    parser.add_argument("--threads", type=int, help="of torch")
    parser.add_argument("--json", type=Path, help="every number")
    module.options(parser)
    given = parser.parse_args(sys.argv[2:])
    if given.threads:
        torch.set_num_threads(given.threads)
    rows = module.run(given)
    show(f"{name.replace('_', ' ')}: {given.model}", rows)
    if given.json is not None:
        given.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
