"""A bench without a model: ways whose texts and seconds are written down beforehand, and a clock that only they move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from draftproof.bench.measure import Bare, Bench, Chunk, Clock, Reads, Setting, Shape, Task, Written
from draftproof.core.params import Sampling
from draftproof.engine.stats import RoundStats


@dataclass
class Time:
    """Seconds that pass only when somebody says so."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Scripted:
    """Writes `text` in rounds of `rounds` tokens, `round_seconds` each, `first_seconds` for the prompt and its token.

    slower: factors by call, the last one from then on: a machine that changes its speed. bare_seconds: what it takes to
    measure the forwards alone.
    """

    name: str
    time: Time
    rounds: Sequence[int]
    first_seconds: float = 0.5
    round_seconds: float = 1.0
    slower: Sequence[float] = (1.0,)
    text: Sequence[int] = tuple(range(100))
    most: int | None = None
    weights: int = 1000
    draft: float | None = 0.0
    bare_seconds: float = 0.0
    calls: list[tuple[int, ...]] = field(default_factory=list)
    order: list[str] = field(default_factory=list)

    def write(self, task: Task, clock: Clock) -> list[Written]:
        factor = self.factor(len(self.calls))
        self.calls.append(tuple(prompt[0] for prompt in task.prompts))
        self.order.append(self.name)
        self.time.now += self.first_seconds * factor
        chunks, stats, deep = [Chunk(clock(), 1)], RoundStats(), 3 if max(self.rounds) > 1 else 0
        for tokens in self.rounds:
            self.time.now += self.round_seconds * factor
            chunks.append(Chunk(clock(), tokens))
            stats.record(width=deep, drafted=deep, reach=deep, accepted=tokens - 1, emitted=tokens)
        length = 1 + sum(self.rounds)
        told = None if self.draft is None else stats
        return [Written(list(self.text[:length]), list(chunks), stats=told) for _ in task.prompts]

    def reads(self) -> Reads:
        return {} if self.draft is None else {"target": {Shape(len(self.calls[-1]), 4, 128): len(self.rounds)}}

    def spent(self) -> dict[str, float] | None:
        factor = self.factor(len(self.calls) - 1)
        verify = 0.8 * self.round_seconds * len(self.rounds) * factor
        parts = {"prefill": self.first_seconds * factor, "draft": 0.0, "verify": verify, "decide": 0.0}
        return None if self.draft is None else parts

    def bare(self, reads: Reads, task: Task) -> Bare | None:
        if self.draft is None:
            return None
        self.order.append(f"{self.name} alone")
        factor = self.factor(len(self.calls) - 1)                       # as fast as the trial was
        self.time.now += self.bare_seconds * factor
        return Bare(0.8 * self.round_seconds * factor, self.draft * factor)

    def factor(self, call: int) -> float:
        return self.slower[min(call, len(self.slower) - 1)]


GREEDY = Setting(1, 0.0)


def bench(*ways: Scripted, prompts: int = 3, settings: Sequence[Setting] = (GREEDY,), turns: int = 1) -> Bench:
    """All ways on as many prompts, not yet run."""
    order: list[str] = []
    for way in ways:
        way.order = order
    return Bench(ways, [[number] for number in range(prompts)], settings, Sampling(), 8, turns, clock=ways[0].time)


def three_ways(time: Time | None = None) -> tuple[Scripted, Scripted, Scripted]:
    """Plain, a drafter of 3 tokens per round, and transformers at half the speed of plain; nine tokens each."""
    time = time or Time()
    return (
        Scripted("plain", time, [1] * 8),
        Scripted("drafter", time, [4, 1, 3], draft=0.1),
        Scripted("transformers", time, [1] * 8, first_seconds=1.0, round_seconds=2.0, draft=None),
    )
