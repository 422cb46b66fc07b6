"""Time per token relative to plain decoding, with drafts that help and with drafts that do not.

Plain decoding, a fixed number of draft tokens and the adaptive budget complete the same prompts in
one process. They take turns, and in each turn write until they have SLICE more tokens per row, so
that a change of the machine's speed affects all of them alike. Ratios are sums of seconds over all
prompts; intervals are bootstrapped over prompts. "cold" cases make a new engine for every text; in
the others the adaptive budget has learned nothing when a case begins, and keeps what it learns.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from itertools import cycle
from typing import Any, NamedTuple

import torch
from run import Row, ratio

import draftproof as dp
from draftproof.bench.workloads import GENERAL, STORIES, read_prompts

SLICE, FIXED, SHORT, LONG = 2, 5, 8, 640
"""Tokens of a turn, of a fixed draft, of a short text, and of a long prompt."""
CLOCKS = (time.perf_counter, time.process_time)


class Wrong(dp.Drafter):
    """Drafts that are hardly ever right. random: vary with position. seconds: time per draft."""

    name, max_draft_tokens = "wrong", 7

    def __init__(self, vocab_size: int, random: bool = False, seconds: float = 0.0) -> None:
        self.vocab_size, self.random, self.seconds = vocab_size, random, seconds

    def propose(self, frontier: dp.Frontier) -> dp.TokenTree:
        end = time.perf_counter() + self.seconds
        root, position = frontier.prefix.root[:, None], frontier.prefix.position[:, None]
        ahead = torch.arange(1, 1 + frontier.max_draft_tokens, device=root.device)
        drafted = root + 7 * ahead + 1
        if self.random:
            drafted = (root * 48271 + (position + ahead) * 69621) % 2147483647
        while time.perf_counter() < end:
            pass
        return dp.TokenTree.chain(torch.cat([root, drafted % self.vocab_size], 1))


class Case(NamedTuple):
    """What is written, and with which drafter."""

    drafter: str
    new_tokens: int
    rows: int = 1
    temperature: float = 0.0
    prompt: int = 0
    cold: bool = False

    def __str__(self) -> str:
        parts = [self.drafter] + [f"{self.new_tokens} tokens"] * (self.new_tokens == SHORT)
        parts += [f"batch {self.rows}"] * (self.rows > 1) + ["T = 1.5"] * (self.temperature > 0)
        parts += [f"prompt of {self.prompt}"] * (self.prompt > 0) + ["cold"] * self.cold
        return ", ".join(parts)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--assistant-model", help="a draft model; demo-draft for the demo")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2, help="how often each prompt is completed")
    parser.add_argument("--prompts", type=int, default=8, help="number of built-in prompts")
    parser.add_argument("--cases", nargs="+",
                        help="only the cases whose names contain one of these words")


def run(args: argparse.Namespace) -> list[Row]:
    assistant = args.assistant_model or ("demo-draft" if args.model == "demo" else None)
    engine = dp.load(args.model, assistant_model=assistant, dtype=args.dtype,
                     drafter=None if assistant else "none")
    gc.freeze()
    target, codec = engine.target, engine.codec
    file = STORIES if args.model == "demo" else GENERAL
    prompts = [codec.encode(str(prompt)) for prompt in read_prompts(file)][: args.prompts]
    step = _plain_step(engine, prompts[0])
    drafters: dict[str, Callable[[], dp.Drafter]] = {
        "always wrong": lambda: Wrong(target.vocab_size),
        "random": lambda: Wrong(target.vocab_size, random=True),
        "slow and wrong": lambda: Wrong(target.vocab_size, seconds=step),
        "default": lambda: dp.Portfolio(
            [dp.PromptLookup(), dp.SuffixDrafter(), dp.TokenRecycling()]),
    }
    if assistant:
        drafters["draft model"] = lambda: dp.DraftModel(engine.drafter.model, target.vocab_size)
    best = "draft model" if assistant else "default"
    n, rows = args.new_tokens, list[Row]()
    for case in [
        *(Case(name, n) for name in drafters), *(Case(name, n, cold=True) for name in drafters),
        Case(best, n, 1, 1.5, cold=True),
        *(Case(name, *rest) for name in ("always wrong", best) for rest in (
            (SHORT,), (n, 4), (n, 16), (n, 1, 1.5), (n, 1, 0.0, LONG))),
    ]:
        if args.cases and not any(word in str(case) for word in args.cases):
            continue
        before = [token for text in prompts for token in text] * LONG
        texts = [(before + text)[-(case.prompt or len(text)) :] for text in prompts]
        groups = [(texts * case.rows)[: case.rows]] if case.rows > 1 else [[text] for text in texts]
        rounds = args.rounds * len(prompts) // len(groups)
        rows += measure(engine, drafters[case.drafter], groups * rounds, case)
    return rows


def measure(
    loaded: Any, new_drafter: Callable[[], dp.Drafter], groups: list[Any], case: Case
) -> list[Row]:
    """Wall and CPU time per token of a case, relative to plain decoding, and equal texts."""
    def around(drafter: dp.Drafter, budget: dp.Budget | int | None) -> dp.Engine:
        return dp.Engine(loaded.target, drafter, budget=budget, stop_tokens=loaded.stop_tokens)

    engines = {"plain": around(dp.Plain(), 0), f"fixed {FIXED}": around(new_drafter(), FIXED),
               "adaptive": around(new_drafter(), None)}
    for engine in engines.values():
        engine.generate(groups[0], max_new_tokens=12, sampling=dp.Sampling())
    engines["adaptive"] = around(new_drafter(), None)
    seconds = {name: [list[float](), list[float]()] for name in engines}
    texts: dict[str, list[Any]] = {name: [] for name in engines}
    stats = {name: [0, 0] for name in engines}                         # rounds, tokens
    for place, group in enumerate(groups):
        if case.cold:
            engines["adaptive"] = around(new_drafter(), None)
        first, *rest = list(engines)[place % 3 :] + list(engines)[: place % 3]
        orders = cycle([(first, *rest), (first, *reversed(rest))])
        writings = {name: Writing(engine, group, case) for name, engine in engines.items()}
        level = len(group)
        while not all(writing.ended for writing in writings.values()):
            for name in next(orders):
                writings[name].until(level)
            level += SLICE * len(group)
        for name, writing in writings.items():
            for clock, spent in zip(seconds[name], writing.seconds, strict=True):
                clock.append(spent / writing.tokens)
            texts[name].append([row.tokens for row in writing.rows])
            stats[name][0] += sum(row.stats.rounds for row in writing.rows)
            stats[name][1] += sum(row.stats.emitted for row in writing.rows)
    same = {name: sum(a == b for a, b in zip(written, texts["plain"], strict=True))
            for name, written in texts.items()}
    return [{
        "case": str(case), "budget": name, "wall": ratio(seconds[name][0], seconds["plain"][0]),
        "CPU": ratio(seconds[name][1], seconds["plain"][1])[0],
        "tokens/round": stats[name][1] / max(1, stats[name][0]),
        "same": f"{same[name]}/{len(groups)}",
        "_plain seconds per token": sum(seconds["plain"][0]) / len(groups),
    } for name in engines if name != "plain"]


class Writing:
    """Completes a group of prompts in a batch, slice by slice. seconds: of all slices, by clock."""

    def __init__(self, engine: dp.Engine, prompts: list[list[int]], case: Case) -> None:
        sampling = dp.Sampling(temperature=case.temperature, seed=1)
        requests = engine.read(prompts, max_new_tokens=case.new_tokens, sampling=sampling)
        self.rows = [request.sequences[0] for request in requests]
        length = max(request.max_length for request in requests)
        self.scheduler = engine.new_scheduler(len(prompts), length)
        for request in requests:
            self.scheduler.add(request)
        self.ended, self.seconds = False, [0.0 for _ in CLOCKS]

    @property
    def tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows)

    def until(self, tokens: int) -> None:
        """Write until there are `tokens` tokens in all, or all texts have ended."""
        before = [clock() for clock in CLOCKS]
        while not self.ended and self.tokens < tokens:
            self.scheduler.step()
            self.ended = not self.scheduler.has_unfinished_requests()
        spent = [clock() - start for clock, start in zip(CLOCKS, before, strict=True)]
        self.seconds = [a + b for a, b in zip(self.seconds, spent, strict=True)]


def _plain_step(engine: Any, prompt: list[int]) -> float:
    """Seconds per token of plain decoding."""
    plain = dp.Engine(engine.target, dp.Plain())
    chunks = plain.stream(prompt, max_new_tokens=12, sampling=dp.Sampling())
    times = [time.perf_counter() for _ in chunks]
    return (times[-1] - times[3]) / max(1, len(times) - 4)
