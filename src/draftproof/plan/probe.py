"""Times an engine on this machine: rounds by rows and nodes, drafts, prompts, context.

Rounds run through the engine itself with drafts that are never right, so that nothing is left out;
sizes take turns, so that a drifting speed of the machine affects all alike.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from statistics import fmean, median, pstdev
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import isotonic_regression

from draftproof.core.messages import Frontier
from draftproof.core.params import Sampling
from draftproof.core.tree import TokenTree
from draftproof.drafters.base import Drafter
from draftproof.engine.budget import Budget
from draftproof.engine.engine import Engine
from draftproof.plan.machine import Curve, Machine, RoundTiming, interpolate
from draftproof.requests.stats import Round, State

TIMES, SECONDS, MOST, LONG, STALL = 5, 0.1, 24, 512, 1.5
"""How often and how long to time. Each size is timed TIMES times, short rounds for SECONDS more,
but at most MOST times. The long prompt has LONG tokens. A round that takes more than STALL usual
rounds is recorded as STALL usual rounds: another process ran."""


class RandomDrafter(Drafter):
    """Drafts chains of unlikely tokens at no cost. silent: whether it drafts nothing. top: the
    number of successors that it requests for each node.
    """

    name = "noise"

    def __init__(self, vocab_size: int, silent: bool = False, top: int = 0) -> None:
        self.vocab_size, self.silent, self.top_k_needed = vocab_size, silent, top

    def propose(self, frontier: Frontier) -> TokenTree:
        if self.silent:
            return TokenTree.root(frontier.prefix.root)
        root, place = frontier.prefix.root[:, None], frontier.prefix.position[:, None]
        ahead = torch.arange(1, 1 + frontier.max_draft_tokens, device=root.device)
        tokens = (root * 48271 + (place + ahead) * 69621) % 2147483647 % self.vocab_size
        return TokenTree.chain(torch.cat([root, tokens], 1))


class RoundRobin(Budget):
    """Sizes that take turns, once there are `rows` rows."""

    def __init__(self, sizes: Sequence[int], rows: int) -> None:
        self.max_draft_tokens, self.left, self.rows = max(sizes), list(sizes), rows
        self.done: Round | None = None

    def choose(self, state: State) -> int:
        return self.left.pop() if self.left and state.rows == self.rows else 0

    def record(self, done: Round) -> None:
        self.done = done if done.rows == self.rows else None


class Seen(NamedTuple):
    """A round: its budget, its seconds, those of the draft, drafted nodes per row, and tokens."""

    size: int
    seconds: float
    drafting: float
    nodes: float
    context: float


def run(
    engine: Engine, drafter: Drafter, prompts: Sequence[Sequence[int]], sampling: Sampling,
    sizes: Sequence[int],
) -> Iterator[Seen]:  # fmt: skip
    """Run rounds of these sizes, the last one first, with all prompts in a batch."""
    budget, count = RoundRobin(sizes, len(prompts)), len(prompts)
    running, drafting, drafted = Engine(engine.target, drafter, budget=budget), 0.0, 0
    most = sum(sizes) + len(sizes) + count + 2
    limit = min(engine.target.context - max(map(len, prompts)), most)
    requests = running.read([list(prompt) for prompt in prompts], max_new_tokens=limit,
                            sampling=replace(sampling, stop_tokens=()))
    rows = [request.sequences[0] for request in requests]
    with running.scheduled(requests, count) as scheduler:
        while budget.left and scheduler.has_unfinished_requests():
            scheduler.step()
            done, budget.done = budget.done, None
            if done is None:
                continue
            before = drafting, drafted
            drafting = scheduler.clock.draft.seconds
            drafted = sum(row.stats.drafted for row in rows)
            nodes = (drafted - before[1]) / count if engine.target.ragged_batches else done.size
            context = sum(len(row.prompt) + len(row.tokens) for row in rows) / count
            yield Seen(done.size, done.seconds, drafting - before[0], nodes, context)


def rounds(
    engine: Engine, drafters: Sequence[Drafter], prompts: Sequence[Sequence[int]],
    sampling: Sampling, sizes: Sequence[Sequence[int]], times: int = TIMES,
) -> list[list[list[Seen]]]:  # fmt: skip
    """Consecutive rounds of one size, as in a run, by drafter; sizes go up and down again, and
    drafters take turns at each."""
    length = 1 + (times + 1) // 2
    orders = [[*ascending, *reversed(ascending)] for ascending in sizes]
    runs = [run(engine, drafter, prompts, sampling, [size for size in order for _ in range(length)])
            for drafter, order in zip(drafters, orders, strict=True)]
    blocks_seen: list[list[list[Seen]]] = [[] for _ in drafters]
    for number in range(max(map(len, orders))):
        for running, order, blocks in zip(runs, orders, blocks_seen, strict=True):
            if number < len(order):
                blocks.append(list(islice(running, length)))
    return blocks_seen


def by_size(blocks: Sequence[Sequence[Seen]], per_token: float = 0.0) -> dict[int, list[Seen]]:
    """Rounds by size, without the first of each block, which differs; the time for the texts,
    `per_token` seconds per token but at most half of a round, is subtracted."""
    by_count: dict[int, list[Seen]] = {}
    for step in (each for block in blocks for each in block[1:] if each.seconds):
        seconds = max(step.seconds / 2, step.seconds - per_token * step.context)
        by_count.setdefault(step.size, []).append(step._replace(seconds=seconds))
    return by_count


def usual(seen: Sequence[Seen]) -> float:
    """The mean of seconds without stalls, not the median, since not every round makes noise. Of the
    ways up and down, the less disturbed one counts."""
    seconds = np.array([step.seconds for step in seen])
    halves = np.array_split(np.minimum(seconds, STALL * np.median(seconds)), min(2, len(seen)))
    return float(min(half.mean() for half in halves))


def smoothed(seen: Mapping[int, Sequence[Seen]]) -> Curve:
    """Seconds by size, made monotonic: lower costs of more nodes are noise."""
    sizes = sorted(seen)
    rising = isotonic_regression(np.array([usual(seen[size]) for size in sizes])).x
    return tuple(zip(sizes, rising.tolist(), strict=True))


def probe(
    engine: Engine, texts: Sequence[Sequence[int]], batches: Sequence[int],
    temperatures: Sequence[float], sizes: Sequence[int], models: Mapping[str, Drafter],
    progress: Callable[[str], None] = lambda what: None,
) -> Machine:  # fmt: skip
    """Time a machine. engine: plain. texts: prompts. models: drafters whose drafts are timed as the
    excess over a round that reads as many nodes without them."""
    drafters = [RandomDrafter(engine.target.vocab_size), *models.values()]
    few = [sorted({0, *sizes})]
    for most in (model.max_draft_tokens for model in models.values()):
        few.append(sorted({0, 1, min(2, most), (most + 1) // 2, most}))
    progress("timing prompts and long texts")
    prompts, slope = _prompts(engine, drafters[0], texts)
    timed, unread, noise = list[RoundTiming](), dict[str, float](), list[float]()
    for sampled in sorted({temperature > 0 for temperature in temperatures}):
        sampling = replace(engine.sampling, temperature=max(temperatures) if sampled else 0.0)
        for rows in sorted({1, *batches, *(-(-count // 2) for count in batches)}):
            progress(f"timing rounds and drafts, batch {rows}")
            batch = [texts[row % len(texts)] for row in range(rows)]
            warm, *_ = rounds(engine, drafters, batch, sampling, [[0], *[[1] for _ in models]], 1)
            times = min(MOST, TIMES + int(SECONDS / usual(warm[0])))
            blocks, *others = rounds(engine, drafters, batch, sampling, few, times)
            seen = by_size(blocks, slope * rows)
            curve = smoothed(seen)
            timed += [RoundTiming("", sampled, rows, size, seconds) for size, seconds in curve]
            noise += [min(STALL, step.seconds / usual(steps))
                      for steps in seen.values() for step in steps]  # fmt: skip
            for name, drafter_blocks in zip(models, others, strict=True):
                for size, steps in by_size(drafter_blocks, slope * rows).items():
                    spent = usual(steps) - interpolate(curve, fmean(step.nodes for step in steps))
                    timed.append(RoundTiming(name, sampled, rows, size, max(0.0, spent)))
                catching, *rest = (step.drafting for step in drafter_blocks[1])
                tokens = sum(map(len, batch)) + rows * len(drafter_blocks[0])
                unread[name] = max(0.0, catching - median(rest)) / tokens
    threads = torch.get_num_threads()
    name = f"{platform.processor() or platform.machine()}, {threads} thread{'s' * (threads > 1)}"
    return Machine(name, engine.target.name, tuple(timed), prompts, slope, unread,
                   pstdev(noise) / TIMES**0.5, tuple(noise))  # fmt: skip


def _prompts(
    engine: Engine, chains: Drafter, texts: Sequence[Sequence[int]]
) -> tuple[Curve, float]:
    """Tokens and seconds of prompts, and the time that a token of a text adds to a row's round."""
    every, half = [token for text in texts for token in text], engine.target.context // 2
    prompts, plain = list[tuple[float, float]](), list[float]()
    lengths = sorted({min(size, half) for size in (8, 64, 256, LONG)})
    for length in lengths:
        text = (every * (1 + length // len(every)))[:length]
        for _ in range(2):
            running = Engine(engine.target, chains, budget=0)
            requests = running.read([text], max_new_tokens=8, sampling=Sampling(stop_tokens=()))
            with running.scheduled(requests) as scheduler:
                while not requests[0].sequences[0].tokens:
                    scheduler.step()
                seconds = scheduler.clock.prefill.seconds
        prompts.append((length, seconds))
        if length in (lengths[0], lengths[-1]):
            (blocks,) = rounds(engine, [chains], [text], engine.sampling, [[0]], 2 * TIMES)
            plain.append(usual(by_size(blocks)[0]))
    return tuple(prompts), max(0.0, plain[-1] - plain[0]) / max(1, lengths[-1] - lengths[0])
