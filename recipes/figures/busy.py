"""Tokens per second while other programs are busy on the same cores, as a table:

    python recipes/figures/busy.py FILE.gguf [--quantized MODEL] [--llama-bench PATH]
        [--new-tokens 32] [--rounds 3] [--json FILE]

Each engine writes on an idle machine, then beside one and beside two processes that never sleep,
in turn, so that all see the same machine. FILE is decoded plainly and with the default drafter;
MODEL, a folder or hub id, likewise in 8 bits (int8). Speeds are medians, timed after the prompt is
read; next to each is the share that is left of the speed on an idle machine.
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
    """So many processes that never sleep."""
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
    """What is measured, by name: each returns tokens per second."""
    measured = dict[str, Callable[[], float]]()
    options = [(str(args.file), args.file.stem, {})]
    if args.quantized:
        options.append((args.quantized, f"{Path(args.quantized).name} int8", {"quantize": "int8"}))
    for model, name, given in options:
        for drafter, how in (({"drafter": "none"}, "plain"), ({}, "speculating")):
            engine = dp.load(model, **given, **drafter)
            speed(engine, args.new_tokens)                                  # warms it up
            measured[f"{name}, {how}"] = partial(speed, engine, args.new_tokens)
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
    parser.add_argument("--llama-bench", help="the program of llama.cpp")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="every number")
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
        idle, *beside = map(statistics.median, values)
        print(f"{name:40} {idle:8.1f}", *(f"{value:8.1f} ({value / idle:.2f})" for value in beside))
    if args.json:
        args.json.write_text(json.dumps(speeds, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
