"""Tokens per second while other programs use the same cores, as a table:

    python recipes/figures/busy.py FILE.gguf [--quantized MODEL] [--llama-bench PATH]
        [--new-tokens 32] [--rounds 3] [--json FILE]

Each engine writes on an idle machine, then next to one and next to two processes that never sleep.
The engines take turns, so that all of them run under the same conditions. FILE is decoded plainly
and with the default drafter; so is MODEL, a folder or hub id, in 8 bits (int8). Speeds are medians,
timed after the prompt has been read; next to each is its share of the speed on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from gguf_speed import llama, ours

import draftproof as dp

PROMPT = "def quicksort(items):\n    "
BUSY = (0, 1, 2)


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Run `count` processes that never sleep."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(0.1 * bool(count))
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def speed(engine: dp.Engine, new_tokens: int) -> float:
    return ours(engine, PROMPT, new_tokens)[1]


def engines(args: argparse.Namespace) -> dict[str, Callable[[], float]]:
    """The measurements by name; each returns tokens per second."""
    measured = dict[str, Callable[[], float]]()
    models = [(str(args.file), args.file.stem, {})]
    if args.quantized:
        models.append((args.quantized, f"{Path(args.quantized).name} int8", {"quantize": "int8"}))
    for model, name, settings in models:
        for drafter, mode in (({"drafter": "none"}, "plain"), ({}, "speculating")):
            engine = dp.load(model, **settings, **drafter)
            speed(engine, args.new_tokens)                                  # warms up
            measured[f"{name}, {mode}"] = partial(speed, engine, args.new_tokens)
    if args.llama_bench:
        measured[f"{args.file.stem}, llama.cpp"] = partial(
            llama, args.llama_bench, args.file, args.new_tokens
        )
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--quantized", help="a model to decode in 8 bits")
    parser.add_argument("--llama-bench", help="the program llama-bench of llama.cpp")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file for every number")
    args = parser.parse_args()
    measured = engines(args)
    speeds: dict[str, list[list[float]]] = {name: [[] for _ in BUSY] for name in measured}
    for _ in range(args.rounds):
        for count in BUSY:
            with busy(count):
                for name, measure in measured.items():
                    speeds[name][count].append(measure())
    print(f"{'tokens/s (share of idle)':40} {'idle':>8} {'1 busy':>15} {'2 busy':>15}")
    for name, values in speeds.items():
        idle, *busy_speeds = map(statistics.median, values)
        cells = (f"{value:8.1f} ({value / idle:.2f})" for value in busy_speeds)
        print(f"{name:40} {idle:8.1f}", *cells)
    if args.json:
        args.json.write_text(json.dumps(speeds, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
