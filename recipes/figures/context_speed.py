"""Plain decoding after long texts against short ones, as a table: milliseconds per token and the
share of the speed after the shortest text.

    python recipes/figures/context_speed.py MODEL BOOK.txt [--quantize int8] [--kv-cache int8]
        [--lengths 100 4000 16000] [--rounds 8]

Each text is the beginning of the book, of so many tokens. All are read first; then they are
continued in turn, 12 tokens at a time, so that a change of the machine's speed meets all alike.
Every figure is a median over rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import draftproof as dp

STEP = 12
"""Tokens of a text in each turn."""


def begun(engine: dp.Engine, prompt: list[int], rounds: int) -> tuple[Iterator[object], float]:
    """A text after its second token, and the seconds to its first."""
    stream = engine.stream(
        prompt, max_new_tokens=STEP * rounds + 4, sampling=dp.Sampling(stop_tokens=())
    )
    start = time.perf_counter()
    next(stream)
    first = time.perf_counter() - start
    next(stream)
    return stream, first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("book", type=Path, help="a text file of at least as many tokens")
    parser.add_argument("--quantize", choices=("int8", "int4"))
    parser.add_argument("--kv-cache", choices=("int8",))
    parser.add_argument("--lengths", type=int, nargs="+", default=[100, 4000, 16000])
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    options = {name: value for name, value in (("quantize", args.quantize),
                                               ("kv_cache", args.kv_cache)) if value}
    engine = dp.load(args.model, drafter="none", **options)
    assert engine.codec is not None
    tokens = engine.codec.encode(args.book.read_text(encoding="utf-8"))
    if len(tokens) < max(args.lengths):
        parser.error(f"the book has {len(tokens)} tokens; {max(args.lengths)} are needed")
    texts = {length: begun(engine, tokens[:length], args.rounds) for length in args.lengths}
    taken: dict[int, list[float]] = {length: [] for length in args.lengths}
    for _ in range(args.rounds):
        for length, (stream, _) in texts.items():
            start = time.perf_counter()
            for _ in range(STEP):
                next(stream)
            taken[length].append((time.perf_counter() - start) / STEP)
    print("| tokens before | first token, s | ms per token | share of the speed |\n"
          "|---|---|---|---|")
    for length, (_, first) in texts.items():
        shares = [a / b for a, b in zip(taken[args.lengths[0]], taken[length], strict=True)]
        print(f"| {length:,} | {first:.1f} | {1e3 * statistics.median(taken[length]):.1f} "
              f"| {statistics.median(shares):.2f} |")


if __name__ == "__main__":
    main()
