"""Times what an engine does on this machine: rounds by rows and nodes, drafts, prompts, context.

Rounds run through the engine itself with drafts that are never right, so that nothing is left out;
sizes take turns, so that a machine whose speed drifts slows all alike.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median, stdev

import torch

from draftproof.core.messages import Frontier
from draftproof.core.params import Sampling
from draftproof.core.tree import TokenTree
from draftproof.drafters.base import Drafter
from draftproof.engine.budget import Budget
from draftproof.engine.engine import Engine
from draftproof.engine.stats import Round, State
from draftproof.plan.machine import Probe, Timed, smoothed

TIMES, LONG = 5, 512
"""How often each size is timed; tokens of the long prompt."""
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

    def __init__(self, sizes: Sequence[int], rounds: int) -> None:
        self.most, self.left = max(sizes), [sizes[i % len(sizes)] for i in range(rounds)][::-1]
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
) -> list[tuple[int, float, float]]:  # fmt: skip
    """(size, seconds, of these the draft's) of rounds, sizes in turn; the first turn warms up."""
    count = (1 + times) * len(sizes)
    budget = Turns(sizes, count)
    running = Engine(engine.target, drafter, budget=budget)
    longest = max(map(len, prompts))
    limit = min(engine.target.context - longest, (1 + times) * sum(1 + size for size in sizes) + 2)
    steps = running.rounds([list(prompt) for prompt in prompts], max_new_tokens=limit,
                           sampling=replace(sampling, stop_tokens=()), batch_size=len(prompts))
    for _ in steps:
        budget.drafting = lambda: running.clock.draft.seconds
        if not budget.left:
            break
    return budget.seen


def probe(
    engine: Engine, texts: Sequence[Sequence[int]], batches: Sequence[int],
    heats: Sequence[float], sizes: Sequence[int], models: Mapping[str, Drafter],
    progress: Progress = lambda what: None,
) -> Probe:  # fmt: skip
    """engine: plain. texts: prompts. models: draft models, whose drafts are timed by size."""
    noise, wide = Noise(engine.target.vocab_size), sorted({0, *sizes})
    found, drafts, unread, spreads = list[Timed](), list[Timed](), dict[str, float](), [0.0]
    every = [token for text in texts for token in text]
    for sampled in sorted({heat > 0 for heat in heats}):
        sampling = replace(engine.sampling, temperature=max(heats) if sampled else 0.0)
        for rows in sorted({1, *batches}):
            progress(f"timing rounds, batch {rows}")
            asked = [texts[row % len(texts)] for row in range(rows)]
            seen = rounds(engine, noise, asked, sampling, wide)[len(wide):]
            by_size = {size: [s - own for at, s, own in seen if at == size and s] for size in wide}
            times = smoothed({size: median(some) for size, some in by_size.items() if some})
            found += [Timed("", sampled, rows, size, seconds) for size, seconds in times.items()]
            spreads += [stdev(some) / median(some) / len(some) ** 0.5
                        for some in by_size.values() if len(some) > 1]
            for name, drafter in models.items():
                progress(f"timing drafts, batch {rows}: {name}")
                most = drafter.default_budget
                some = sorted({1, (most + 1) // 2, most})
                seen = rounds(engine, drafter, asked, sampling, some, 3)
                for size in some:
                    own = [spent for at, _, spent in seen[len(some):] if at == size]
                    drafts += [Timed(name, sampled, rows, size, median(own))] if own else []
                first = seen[0][2] - min(spent for at, _, spent in seen if at == seen[0][0])
                unread[name] = max(0.0, first / sum(map(len, asked)))
    progress("timing prompts and long texts")
    prompts = list[tuple[float, float]]()
    slope, context = 0.0, sum(map(len, texts)) / len(texts)
    for length in sorted({min(size, engine.target.context // 2) for size in (8, 64, 256, LONG)}):
        text = (every * (1 + length // len(every)))[:length]
        for _ in range(2):
            running = Engine(engine.target, noise, budget=0)
            steps = running.rounds([text], max_new_tokens=8, sampling=Sampling(stop_tokens=()))
            next(steps)
            seconds = running.clock.prefill.seconds
        prompts.append((length, seconds))
    long = rounds(engine, noise, [text], engine.sampling, [0], 2 * TIMES)[1:]
    short = rounds(engine, noise, [text[:8]], engine.sampling, [0], 2 * TIMES)[1:]
    gap = median(s for _, s, _ in long) - median(s for _, s, _ in short)
    slope = max(0.0, gap / max(1, length - 8))
    name = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    return Probe(name, engine.target.name, tuple(found), tuple(drafts), tuple(prompts), context,
                 slope, unread, median(spreads))  # fmt: skip
