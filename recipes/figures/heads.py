"""Tokens per round of draft heads, by the exact rule and by typical acceptance; reads no clock.

With a fixed number of draft tokens the numbers are the same wherever the same logits are computed.
Typical acceptance writes another distribution: its mean total variation per token stands beside it.
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
    parser.add_argument("--heads", nargs="+", default=["medusa", "redrafter"], help="or folders")
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 12, 16, 32])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--prompts", type=Path, help='JSONL rows with a "prompt"')
    parser.add_argument("--new-tokens", type=int, default=128)


def run(given: argparse.Namespace) -> list[Row]:
    file = given.prompts or (STORIES if given.model == "demo" else GENERAL)
    prompts = [str(one) for one in read_prompts(file)]
    plain = dp.load(given.model, drafter="none", dtype=given.dtype)

    def written(drafter: dp.Drafter, size: int, heat: float, lossy: bool) -> tuple[Any, list[Any]]:
        engine = dp.Engine(plain.target, drafter, codec=plain.codec, budget=size, lossy=lossy,
                           stop_tokens=plain.stop_tokens)
        sampling = [dp.Sampling(temperature=heat, seed=place, max_new_tokens=given.new_tokens)
                    for place in range(len(prompts))]
        done = engine.generate(prompts, sampling=sampling, batch_size=1)
        total = RoundStats()
        for one in done:
            total.add(one.stats)
        return total, [one.tokens for one in done]

    found = list[Row]()
    for heat in given.temperatures:
        wanted = written(dp.Plain(), 0, heat, False)[1]
        for name in given.heads:
            head = dp.read_head(resolve(HEADS.get(name, name)), plain.target)
            drafter = head.drafter(plain.target)
            for size in given.nodes:
                exact, texts = written(drafter, size, heat, False)
                loose = written(drafter, size, heat, True)[0] if heat else None
                same = sum(a == b for a, b in zip(texts, wanted, strict=True))
                found.append({
                    "heads": name, "T": heat, "draft tokens": size, "exact": exact.tokens_per_round,
                    "typical": loose and loose.tokens_per_round,
                    "distance": loose and loose.distance_per_token,
                    "same text": f"{same}/{len(texts)}"})
    return found

