"""Runs several decoding methods on the same prompts, interleaved; records texts and seconds.

Every method completes a group of prompts before the next group; the order of the methods rotates,
so that a drifting speed of the machine affects all alike. Seconds are for the whole call. Each
repetition has an owner of its own, so no drafter knows a text from the repetition before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from draftproof.core.params import Sampling
from draftproof.engine.engine import Engine
from draftproof.requests.stats import RoundStats

Clock = Callable[[], float]
Prompts = Sequence[list[int]]
Output = tuple[list[list[int]], float | None, RoundStats]

PLAIN = "plain"
"""The method that others are compared with."""
WARM_UP, PROMPTS_PER_ROW = 8, 4
"""New tokens of each method's untimed first call, and prompts per row of a batch that are submitted
at once."""


@dataclass(frozen=True, order=True)
class Setting:
    """The settings besides the method: rows per batch, and the temperature."""

    batch: int
    temperature: float

    def __str__(self) -> str:
        kind = f"T = {self.temperature:g}" if self.temperature else "greedy"
        return f"{kind}, batch {self.batch}"


class OurEngine:
    """An engine as a user calls it; a single prompt is streamed, to time its first token."""

    def __init__(self, name: str, engine: Engine) -> None:
        self.name, self.engine = name, engine

    def write(
        self, prompts: Prompts, sampling: Sampling, batch: int, clock: Clock, owner: int
    ) -> Output:
        """Complete all prompts (token ids), with at most `batch` rows at a time; drafters may use
        earlier texts of `owner`. Returns the new tokens of each, the clock's time of the first
        token, and counts of all rows."""
        requests, total = self.engine.read(list(prompts), sampling=sampling), RoundStats()
        for request in requests:
            request.owner = owner
        arrived = [(clock(), update.completion) for update in self.engine.run(requests, batch)]
        done = sorted((completion for _, completion in arrived if completion is not None),
                      key=lambda completion: completion.prompt)
        for completion in done:
            total.add(completion.checked().stats)
        first = arrived[0][0] if len(prompts) == 1 else None
        return [completion.tokens for completion in done], first, total


@dataclass(frozen=True)
class Trial:
    """One completion of a group of prompts by a method.

    round: repetition, from 0. group: index of the group of prompts. prompts: their indices.
    first_token: seconds from the call to the first token, None if unknown.
    """

    method: str
    setting: Setting
    round: int
    group: int
    prompts: tuple[int, ...]
    tokens: list[list[int]]
    seconds: float
    first_token: float | None
    stats: RoundStats

    @property
    def count(self) -> int:
        """The number of new tokens in all texts."""
        return sum(len(text) for text in self.tokens)


@dataclass
class Bench:
    """All trials of all methods. After an interrupted `run`, `trials` has those until then.

    prompts: token ids. sampling: common to all settings. rounds: repetitions of each group.
    """

    methods: Sequence[OurEngine]
    prompts: Prompts
    settings: Sequence[Setting]
    sampling: Sampling
    new_tokens: int
    rounds: int
    clock: Clock = time.perf_counter
    trials: list[Trial] = field(default_factory=list)

    @property
    def total(self) -> int:
        """The number of trials in `run`."""
        return (
            self.rounds
            * len(self.methods)
            * sum(len(self.groups(setting)) for setting in self.settings)
        )

    def groups(self, setting: Setting) -> list[tuple[int, ...]]:
        """Indices of prompts in each group; the first prompts fill up the last group."""
        count, batch = len(self.prompts), setting.batch
        size = batch * max(1, min(PROMPTS_PER_ROW, count // batch)) if batch > 1 else 1
        return [tuple((at + i) % count for i in range(size)) for at in range(0, count, size)]

    def run(self, progress: Callable[[str], None] = lambda method: None) -> None:
        """Warm up, then run every group with every method; `progress` gets each method's name."""
        for setting in self.settings:
            for method in self.methods:
                self._trial(method, setting, -1, 0, min(WARM_UP, self.new_tokens))
        sizes = {setting: len(self.groups(setting)) for setting in self.settings}
        order = sorted(((group + 0.5) / size, setting, group)              # settings are mixed
                       for setting, size in sizes.items() for group in range(size))
        for number in range(self.rounds):
            for _, setting, group in order:
                first = (number * sizes[setting] + group) % len(self.methods)
                for method in [*self.methods[first:], *self.methods[:first]]:
                    progress(method.name)
                    trial = self._trial(method, setting, number, group, self.new_tokens)
                    self.trials.append(trial)

    def _trial(
        self, method: OurEngine, setting: Setting, number: int, group: int, new_tokens: int
    ) -> Trial:
        indices, temperature = self.groups(setting)[group], setting.temperature
        prompts = [self.prompts[i] for i in indices]
        sampling = replace(self.sampling, temperature=temperature, max_new_tokens=new_tokens)
        start = self.clock()
        owner = 1 + len(self.settings) * (1 + number) + self.settings.index(setting)
        tokens, first, stats = method.write(prompts, sampling, setting.batch, self.clock, owner)
        seconds = self.clock() - start
        first = first - start if first is not None else None
        return Trial(method.name, setting, number, group, indices, tokens, seconds, first, stats)
