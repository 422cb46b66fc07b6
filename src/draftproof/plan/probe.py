"""Times what an engine does on this machine: rounds by rows and nodes, drafts, prompts, context.

Rounds run through the engine itself with drafts that are never right, so that nothing is left out;
sizes take turns, so that a machine whose speed drifts slows all alike.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median, stdev

import numpy as np
import torch

from draftproof.core.messages import Frontier
from draftproof.core.params import Sampling
from draftproof.core.tree import TokenTree
from draftproof.drafters.base import Drafter
from draftproof.engine.budget import Budget
from draftproof.engine.engine import Engine
from draftproof.engine.stats import Round, State
from draftproof.plan.machine import Probe, Timed, along, smoothed

TIMES, SECONDS, MOST, LONG = 5, 0.1, 40, 512
"""How often each size is timed, and for how long beyond that if its rounds are short, but at most
so often; tokens of the long prompt."""
Progress = Callable[[str], None]


class Noise(Drafter):
    """Chains of tokens that nobody would choose; they cost nothing."""

    name = "noise"

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def propose(self, frontier: Frontier) -> TokenTree:
        root, place = frontier.prefix.root[:, None], frontier.prefix.position[:, None]
        ahead = torch.arange(1, 1 + frontier.budget, device=root.device)
        tokens = (root * 48271 + (place + ahead) * 69621) % 2147483647 % self.vocab_size
        return TokenTree.chain(torch.cat([root, tokens], 1))


class Turns(Budget):
    """Sizes that take turns; notes seconds of each round and of the draft in it."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.most, self.left = max(sizes), list(sizes)
        self.seen: list[tuple[int, float, float]] = []
        self.drafting: Callable[[], float] = lambda: 0.0
        self.before = 0.0

    def choose(self, state: State) -> int:
        return self.left.pop() if self.left else 0

    def record(self, done: Round) -> None:
        drafting = self.drafting()
        self.seen.append((done.size, done.seconds, drafting - self.before))
        self.before = drafting


def rounds(
    engine: Engine, drafter: Drafter, prompts: Sequence[Sequence[int]], sampling: Sampling,
    sizes: Sequence[int], times: int = TIMES,
) -> dict[int, list[tuple[float, float]]]:  # fmt: skip
    """Seconds of rounds, and of these the draft's, by size; the first of all is dropped.

    Rounds of one size follow each other, as in a run; sizes go up, and down again."""
    half = [size for size in sizes for _ in range(1 + (times + 1) // 2)]
    budget = Turns([*half, *half[::-1]])
    running = Engine(engine.target, drafter, budget=budget)
    limit = min(engine.target.context - max(map(len, prompts)), 2 * sum(half) + 2 * len(half) + 2)
    steps = running.rounds([list(prompt) for prompt in prompts], max_new_tokens=limit,
                           sampling=replace(sampling, stop_tokens=()), batch_size=len(prompts))
    for _ in steps:
        budget.drafting = lambda: running.clock.draft.seconds
        if not budget.left:
            break
    found: dict[int, list[tuple[float, float]]] = {size: [] for size in sizes}
    for (before, *_), (size, seconds, own) in pairwise([(-1, 0.0, 0.0), *budget.seen]):
        if before == size and seconds:
            found[size].append((seconds, own))
    return found


def probe(
    engine: Engine, texts: Sequence[Sequence[int]], batches: Sequence[int],
    heats: Sequence[float], sizes: Sequence[int], models: Mapping[str, Drafter],
    progress: Progress = lambda what: None,
) -> Probe:  # fmt: skip
    """engine: plain. texts: prompts. models: draft models and heads, whose drafts are timed:
    what a round takes beyond one of the same size."""
    chains, wide = Noise(engine.target.vocab_size), sorted({0, *sizes})
    found, drafts, unread, noise = list[Timed](), list[Timed](), dict[str, float](), list[float]()
    for sampled in sorted({heat > 0 for heat in heats}):
        sampling = replace(engine.sampling, temperature=max(heats) if sampled else 0.0)
        for rows in sorted({1, *batches, *(-(-batch // 2) for batch in batches)}):
            progress(f"timing rounds, batch {rows}")
            asked = [texts[row % len(texts)] for row in range(rows)]
            first = usual(rounds(engine, chains, asked, sampling, [0])[0])
            times = min(MOST, TIMES + int(SECONDS / first))
            seen = rounds(engine, chains, asked, sampling, wide, times)
            curve = smoothed({at: usual(some) for at, some in seen.items() if some})
            found += [Timed("", sampled, rows, int(at), seconds) for at, seconds in curve]
            noise += [one / usual(some) for some in seen.values() for one, _ in some]
            for name, drafter in models.items():
                progress(f"timing drafts, batch {rows}: {name}")
                most = drafter.default_budget
                few = sorted({0, 1, min(2, most), (most + 1) // 2, most})
                seen = rounds(engine, drafter, asked, sampling, few, times)
                pace = along(curve, 0) / usual(seen[0])     # of the machine, since then
                for at in few[1:]:
                    spent = usual(seen[at]) * pace - along(curve, at) if seen[at] else 0.0
                    drafts.append(Timed(name, sampled, rows, at, max(0.0, spent)))
                unread[name] = _catch_up(engine, drafter, asked, sampling)
    progress("timing prompts and long texts")
    every = [token for text in texts for token in text]
    prompts, context = list[tuple[float, float]](), sum(map(len, texts)) / len(texts)
    plain, half = list[float](), engine.target.context // 2
    lengths = sorted({min(size, half) for size in (8, 64, 256, LONG)})
    for length in lengths:
        text = (every * (1 + length // len(every)))[:length]
        for _ in range(2):
            running = Engine(engine.target, chains, budget=0)
            next(running.rounds([text], max_new_tokens=8, sampling=Sampling(stop_tokens=())))
        prompts.append((length, running.clock.prefill.seconds))
        if length in (lengths[0], lengths[-1]):
            timed = rounds(engine, chains, [text], engine.sampling, [0], 2 * TIMES)[0]
            plain.append(usual(timed))
    slope = max(0.0, plain[-1] - plain[0]) / max(1, lengths[-1] - lengths[0])
    name = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    return Probe(name, engine.target.name, tuple(found), tuple(drafts), tuple(prompts), context,
                 slope, unread, stdev(noise) / TIMES**0.5, tuple(noise))  # fmt: skip


def usual(timed: Sequence[tuple[float, float]]) -> float:
    """The first quartile of seconds: what others compute disturbs upwards only."""
    return float(np.quantile([seconds for seconds, _ in timed], 0.25))


def _catch_up(
    engine: Engine, drafter: Drafter, prompts: Sequence[Sequence[int]], sampling: Sampling
) -> float:
    """Seconds per token of its prompt that a draft model reads before its first draft."""
    budget = Turns([1] * 6)
    running = Engine(engine.target, drafter, budget=budget)
    steps = running.rounds([list(prompt) for prompt in prompts], max_new_tokens=16,
                           sampling=replace(sampling, stop_tokens=()), batch_size=len(prompts))
    for _ in steps:
        budget.drafting = lambda: running.clock.draft.seconds
    first, *rest = (own for size, _, own in budget.seen if size)
    return max(0.0, first - median(rest or [first])) / sum(map(len, prompts))
