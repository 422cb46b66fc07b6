"""Tokens per round of draft heads, by the exact rule and by typical acceptance; reads no clock.

With a fixed number of draft tokens the numbers are the same wherever the same logits are computed.
Typical acceptance writes another distribution: its mean total variation per token stands beside it.
`sweep` is the same for beam sizes of a recurrent drafter, with speed-ups over plain decoding.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from run import Row

import draftproof as dp
from draftproof.bench.workloads import GENERAL, STORIES, read_questions
from draftproof.engine.load import HEADS
from draftproof.engine.stats import RoundStats
from draftproof.model.loading import resolve


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--heads", nargs="+", default=["medusa", "redrafter"], help="or folders")
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 12, 16, 32])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    _common(parser)


def sweep_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--head", default="redrafter", help="name or folder")
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--lengths", type=int, nargs="+", default=[3, 5])
    parser.add_argument("--nodes", type=int, nargs="+", default=[3, 5, 8, 12, 16, 24])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.0)
    _common(parser)


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=Path, help='JSONL rows with a "prompt"')
    parser.add_argument("--new-tokens", type=int, default=128)


def _start(given: argparse.Namespace) -> tuple[Any, list[str]]:
    file = given.prompts or (STORIES if given.model == "demo" else GENERAL)
    plain = dp.load(given.model, drafter="none", dtype=given.dtype)
    return plain, [str(one.prompt) for one in read_questions(file, lambda row: row["prompt"])]


def run(given: argparse.Namespace) -> list[Row]:
    plain, prompts = _start(given)

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


def sweep(given: argparse.Namespace) -> list[Row]:
    plain, prompts = _start(given)
    head = dp.read_head(resolve(HEADS.get(given.head, given.head)), plain.target)
    engines = {None: plain}
    for width in given.widths:
        for length in given.lengths:
            for size in sorted({min(n, width + width * width * (length - 1)) for n in given.nodes}):
                if size >= length:
                    drafter = dp.ReDrafter(head, plain.target, width=width, length=length)
                    engines[width, length, size] = dp.Engine(
                        plain.target, drafter, codec=plain.codec, budget=size,
                        stop_tokens=plain.stop_tokens)
    sampling = dp.Sampling(temperature=given.temperature, seed=1, max_new_tokens=given.new_tokens)
    seconds, stats = dict.fromkeys(engines, 0.0), {key: RoundStats() for key in engines}
    same = dict.fromkeys(engines, 0)
    for place, prompt in enumerate(prompts * given.rounds):
        order, texts = list(engines), {}
        for key in order[place % len(order) :] + order[: place % len(order)]:
            start = time.perf_counter()
            done = engines[key].generate([prompt], sampling=sampling)[0]
            seconds[key] += time.perf_counter() - start
            texts[key] = done.tokens
            stats[key].add(done.stats)
        same = {key: same[key] + (texts[key] == texts[None]) for key in engines}
    texts_of_each = len(prompts) * given.rounds
    return [{"width": key[0], "length": key[1], "nodes": key[2],
             "tokens/round": stats[key].tokens_per_round, "speed-up": seconds[None] / seconds[key],
             "same text": f"{same[key]}/{texts_of_each}"} for key in engines if key is not None]
