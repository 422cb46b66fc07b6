"""Several ways to write the same texts, each in turn: what they wrote, and when every token came.

Keeps time and judges nothing. A way is asked for a group of texts at once and says when tokens arrived, in chunks as a
user sees them. The order of the ways turns by one place from group to group, and the groups of all settings lie side by side
in each turn. What a trial's forwards take alone is measured right behind it, while the machine is as fast as it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import torch

from draftproof.bench.machine import Energy, peak_of
from draftproof.core.params import Sampling
from draftproof.engine.stats import RoundStats

Clock = Callable[[], float]
Tick = Callable[[str], None]
"""``tick(doing)`` before everything that takes long."""

WAVES = 4
"""Prompts that are asked for at once, at most, for each of several rows: where one ends, the next begins."""
WARM_UP = 8
"""New tokens of the first run of each way."""
SELDOM = 4
"""Bare forwards of a way are measured again when its trials have taken so many times what measuring them took."""


class Setting(NamedTuple):
    """What is varied besides the ways: rows side by side, and the temperature."""

    batch: int
    temperature: float

    @property
    def title(self) -> str:
        return f"{'greedy' if self.temperature == 0 else f'temperature {self.temperature:g}'}, batch {self.batch}"


class Task(NamedTuple):
    """What a way is asked for: to complete all prompts by so many tokens, at most `rows` side by side."""

    prompts: Sequence[list[int]]
    wanted: Sampling
    new_tokens: int
    rows: int = 1


class Chunk(NamedTuple):
    """Tokens that came together: seconds since the call, and how many."""

    at: float
    tokens: int


@dataclass(frozen=True)
class Written:
    """One text.

    chunks: when its tokens came. prefilled: the first of them came with the prompt, before any round. stats: what rounds
    did, if the way tells.
    """

    tokens: list[int]
    chunks: list[Chunk]
    prefilled: bool = True
    stats: RoundStats | None = None

    @property
    def rounds(self) -> list[int]:
        """Tokens of each round."""
        return [chunk.tokens for chunk in self.chunks[self.prefilled :]]


class Shape(NamedTuple):
    """The shape of a read: rows, nodes per row (their mean, where rows have different numbers), positions of the cache."""

    rows: int
    width: int
    capacity: int


Reads = Mapping[str, Mapping[Shape, int]]
"""How often each model ("target", or the name of a draft model) read each shape; prompts are not counted."""


class Bare(NamedTuple):
    """Seconds per round of the bare forwards, measured alone at the shapes that rounds used."""

    verify: float
    draft: float


@dataclass(frozen=True)
class Trial:
    """One way wrote one group of prompts once.

    prompts: which. spent: seconds by part, if the way tells. joules: of the whole machine, or None. bare: what its forwards
    took alone right behind it, if measured.
    """

    way: str
    setting: Setting
    turn: int
    group: int
    prompts: tuple[int, ...]
    texts: list[Written]
    seconds: float
    reads: Reads = field(default_factory=dict)
    spent: Mapping[str, float] | None = None
    joules: float | None = None
    bare: Bare | None = None

    @property
    def tokens(self) -> int:
        return sum(len(text.tokens) for text in self.texts)

    @property
    def parts(self) -> dict[str, float] | None:
        """Seconds by part, with what is left."""
        if self.spent is None:
            return None
        return {**self.spent, "other": max(0.0, self.seconds - sum(self.spent.values()))}

    @property
    def first(self) -> list[Written]:
        """The texts that did not wait for another to end."""
        return self.texts[: self.setting.batch]


class Way(Protocol):
    """Something that writes texts."""

    name: str
    most: int | None
    """Rows it can write side by side; None is any number."""
    weights: int
    """Bytes of the models it needs."""

    def write(self, task: Task, clock: Clock) -> list[Written]:
        """Complete all prompts; chunks are in the clock's own time."""

    def reads(self) -> Reads:
        """What the last `write` read."""

    def spent(self) -> Mapping[str, float] | None:
        """Seconds of the last `write` by part; None where that cannot be told."""

    def bare(self, reads: Reads, task: Task) -> Bare | None:
        """Its forwards, measured alone; None where that cannot be told."""


@dataclass
class Bench:
    """All trials of all ways. `run` may be interrupted: what was measured is there.

    prompts: token ids. base: sampling that settings vary. turns: how often every group is written by every way.
    """

    ways: Sequence[Way]
    prompts: Sequence[list[int]]
    settings: Sequence[Setting]
    base: Sampling
    new_tokens: int
    turns: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    clock: Clock = time.perf_counter
    energy: Energy | None = None
    trials: list[Trial] = field(default_factory=list)
    memory: dict[tuple[str, Setting], int | None] = field(default_factory=dict)
    _due: dict[tuple[str, Setting], float] = field(default_factory=dict)        # seconds of trials until forwards are measured

    @property
    def total(self) -> int:
        """How often `run` ticks."""
        return self.runs + sum(len(self.able(setting)) for setting in self.settings)

    @property
    def runs(self) -> int:
        """Trials there will be."""
        return sum(len(self.able(setting)) * self.turns * len(self.groups(setting)) for setting in self.settings)

    def able(self, setting: Setting) -> list[Way]:
        """The ways that can write so many rows."""
        return [way for way in self.ways if way.most is None or setting.batch <= way.most]

    def groups(self, setting: Setting) -> list[tuple[int, ...]]:
        """Prompts asked for at once: one by one for a single row, for several rows up to `WAVES` times as many, as far as there
        are so many; the last group is filled up with the first prompts."""
        count, waves = len(self.prompts), WAVES if setting.batch > 1 else 1
        size = setting.batch * max(1, min(waves, count // setting.batch))
        return [tuple((start + i) % count for i in range(size)) for start in range(0, count, size)]

    def wanted(self, setting: Setting) -> Sampling:
        return replace(self.base, temperature=setting.temperature, max_new_tokens=None)

    def run(self, tick: Tick = lambda doing: None) -> None:
        """Warm up; then every group by every way in turn, and now and then the forwards of a trial alone, right behind it."""
        groups = {setting: self.groups(setting) for setting in self.settings}
        for setting in self.settings:
            for way in self.able(setting):
                tick(f"{way.name}, warming up")
                self._warm_up(way, setting, groups[setting][0])
        everything = [(setting, number) for setting in self.settings for number in range(len(groups[setting]))]
        for turn in range(self.turns):
            for setting, number in sorted(everything, key=lambda one: (one[1] + 0.5) / len(groups[one[0]])):
                ways = self.able(setting)
                first = (turn * len(groups[setting]) + number) % len(ways)
                for way in [*ways[first:], *ways[:first]]:
                    tick(way.name)
                    self.trials.append(self._trial(way, setting, turn, number, groups[setting][number]))
                    self._alone(way)

    def _warm_up(self, way: Way, setting: Setting, group: tuple[int, ...]) -> None:
        """Runs that nobody times: a short one for the first calls, a whole one for the memory."""
        task = self._task(setting, group)
        way.write(task._replace(new_tokens=min(WARM_UP, self.new_tokens)), self.clock)
        self.memory[way.name, setting] = peak_of(lambda: way.write(task, self.clock), self.device)

    def _task(self, setting: Setting, group: tuple[int, ...]) -> Task:
        return Task([self.prompts[index] for index in group], self.wanted(setting), self.new_tokens, setting.batch)

    def _trial(self, way: Way, setting: Setting, turn: int, number: int, group: tuple[int, ...]) -> Trial:
        task = self._task(setting, group)
        before = self.energy.read() if self.energy else []
        start = self.clock()
        texts = way.write(task, self.clock)
        seconds = self.clock() - start
        joules = self.energy.since(before) if self.energy else None
        texts = [replace(text, chunks=[Chunk(at - start, tokens) for at, tokens in text.chunks]) for text in texts]
        return Trial(way.name, setting, turn, number, group, texts, seconds, way.reads(), way.spent(), joules)

    def _alone(self, way: Way) -> None:
        """Measure the forwards of the last trial alone, if enough of the time went into trials."""
        trial = self.trials[-1]
        key = way.name, trial.setting
        self._due[key] = self._due.get(key, 0.0) - trial.seconds
        if self._due[key] <= 0:
            start = self.clock()
            found = way.bare(trial.reads, self._task(trial.setting, trial.prompts))
            self._due[key] = SELDOM * (self.clock() - start)
            self.trials[-1] = replace(trial, bare=found)
