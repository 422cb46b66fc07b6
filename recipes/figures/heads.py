"""Tokens per round of draft heads, with the exact rule and with typical acceptance.

Nothing is timed: with a fixed number of draft tokens the numbers are the same wherever the same
logits are computed. Typical acceptance changes the distribution; its mean total variation per token
is printed next to it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from run import Row

import draftproof as dp
from draftproof.bench.workloads import GENERAL, STORIES, read_prompts
from draftproof.engine.named_drafters import HEADS
from draftproof.model.loading import resolve
from draftproof.requests.stats import RoundStats


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--heads", nargs="+", default=["medusa", "redrafter"],
                        help="names or folders")
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 12, 16, 32])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--prompts", type=Path, help='JSONL file whose rows have a "prompt"')
    parser.add_argument("--new-tokens", type=int, default=128)


def run(args: argparse.Namespace) -> list[Row]:
    file = args.prompts or (STORIES if args.model == "demo" else GENERAL)
    prompts = [str(prompt) for prompt in read_prompts(file)]
    plain = dp.load(args.model, drafter="none", dtype=args.dtype)

    def written(
        drafter: dp.Drafter, size: int, temperature: float, lossy: bool
    ) -> tuple[Any, list[Any]]:
        engine = dp.Engine(plain.target, drafter, codec=plain.codec, budget=size, lossy=lossy,
                           stop_tokens=plain.stop_tokens)
        sampling = [dp.Sampling(temperature=temperature, seed=place, max_new_tokens=args.new_tokens)
                    for place in range(len(prompts))]
        completions = engine.generate(prompts, sampling=sampling, batch_size=1)
        total = RoundStats()
        for completion in completions:
            total.add(completion.stats)
        return total, [completion.tokens for completion in completions]

    rows = list[Row]()
    for temperature in args.temperatures:
        wanted = written(dp.Plain(), 0, temperature, False)[1]
        for name in args.heads:
            head = dp.read_head(resolve(HEADS.get(name, name)), plain.target)
            drafter = head.drafter(plain.target)
            for size in args.nodes:
                exact, texts = written(drafter, size, temperature, False)
                loose = written(drafter, size, temperature, True)[0] if temperature else None
                same = sum(a == b for a, b in zip(texts, wanted, strict=True))
                rows.append({
                    "heads": name, "T": temperature, "draft tokens": size,
                    "exact": exact.tokens_per_round,
                    "typical": loose and loose.tokens_per_round,
                    "distance": loose and loose.distance_per_token,
                    "same text": f"{same}/{len(texts)}"})
    return rows

