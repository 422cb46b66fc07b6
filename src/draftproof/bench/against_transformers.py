"""Our decoding against transformers' ``generate``, same weights, same prompts, in turn in one process.

    python -m draftproof.bench.against_transformers [--model demo] [--assistant-model demo-draft] [--new-tokens N]

Greedy; texts are compared first. Seconds per new token, prefill included; medians over prompts and rounds, and the
ratio prompt by prompt, so that a change of the machine's speed hits all alike.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

import draftproof as dp
from draftproof.decoding.engine import Engine
from draftproof.target.loading import load_model

PROMPTS = (
    "Once upon a time, there was a little girl named Lily. She",
    "Tom and his dog were playing in the park when",
    "One day, a small bird fell from its nest.",
    "The sun was hot, and Mia wanted to",
)

Writer = Callable[[list[int]], list[int]]


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--assistant-model", default="demo-draft")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    plain = dp.load(options.model, drafter="none")
    drafted = dp.load(options.model, assistant_model=options.assistant_model)
    assert plain.codec is not None, "the model needs a tokenizer for the prompts"
    prompts = [plain.codec.encode(text) for text in PROMPTS]
    ways = {
        "transformers generate": _transformers(options.model, options.new_tokens),
        "transformers assisted": _transformers(options.model, options.new_tokens, options.assistant_model),
        "plain": _ours(plain, options.new_tokens),
        "draft model": _ours(drafted, options.new_tokens),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    texts: dict[str, list[list[int]]] = {way: [] for way in ways}
    for way in ways.values():
        way(prompts[0])
    for _ in range(options.rounds):
        for prompt in prompts:
            for name, write in ways.items():
                start = time.perf_counter()
                tokens = write(prompt)
                seconds[name].append((time.perf_counter() - start) / len(tokens))
                texts[name].append(tokens)
    _print(seconds, texts)


def _ours(engine: Engine, new_tokens: int) -> Writer:
    return lambda prompt: engine.generate([prompt], max_new_tokens=new_tokens, sampling=dp.Sampling())[0].tokens


def _transformers(name: str, new_tokens: int, assistant: str | None = None) -> Writer:
    """transformers' own `generate`, assisted by a draft model if given."""
    model = load_model(name)
    extra = {"assistant_model": load_model(assistant)} if assistant else {}

    def write(prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, **extra)
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens

    return write


def _print(seconds: dict[str, list[float]], texts: dict[str, list[list[int]]]) -> None:
    table = Table(title=f"greedy, {torch.get_num_threads()} threads, median of {len(seconds['plain'])}", title_justify="left")
    for column in ("", "ms/token", "tokens/s", "against generate", "same text as plain"):
        table.add_column(column, justify="left" if not column else "right")
    base = seconds["transformers generate"]
    for name, values in seconds.items():
        ratios = [theirs / ours for ours, theirs in zip(values, base, strict=True)]
        same = sum(mine == theirs for mine, theirs in zip(texts[name], texts["plain"], strict=True))
        table.add_row(
            name,
            f"{1000 * statistics.median(values):.2f}",
            f"{1 / statistics.median(values):.0f}",
            f"{statistics.median(ratios):.2f}x",
            f"{same}/{len(values)}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
