"""What happened and how long it took, seen from outside the algorithm."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class RoundStats:
    """Counts over rounds. Prefill is not a round; the token it yields is not counted here.

    rounds: target forwards that verified. emitted: tokens they gave, after stop rules and limits cut them.
    drafted: draft tokens verified. accepted: draft tokens emitted. reached: depth of the drafts, summed.
    by_width: rounds by nodes drafted, absent ones included; 0 are the plain rounds.
    tried_at, accepted_at: by position in the draft: rounds in which all before it stood, and in which it stood too.
    distance: total variation from the target's law, summed over emitted tokens; None under an exact rule.
    seconds: wall time while the row ran, in prefill, draft, verify and decide.
    plain_seconds: what plain decoding would have taken for the tokens of these rounds, by the budget's reckoning; 0 if it
    does not reckon.
    """

    rounds: int = 0
    emitted: int = 0
    drafted: int = 0
    accepted: int = 0
    reached: int = 0
    by_width: dict[int, int] = field(default_factory=dict)
    tried_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    distance: float | None = None
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("prefill", "draft", "verify", "decide"), 0.0))
    plain_seconds: float = 0.0

    @property
    def tokens_per_round(self) -> float:
        """Emitted tokens per target forward, the last round included; 0 before the first."""
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def acceptance(self) -> float:
        """Share of the draft positions reached that stood: the acceptance rate of Leviathan et al. (2211.17192)."""
        tried = sum(self.tried_at)
        return sum(self.accepted_at) / tried if tried else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Acceptance rate at each position of the draft, given that all before it stood."""
        return [hits / tries for hits, tries in zip(self.accepted_at, self.tried_at, strict=True) if tries]

    @property
    def plain_share(self) -> float:
        """Share of the rounds in which nothing was drafted."""
        return self.by_width.get(0, 0) / self.rounds if self.rounds else 0.0

    @property
    def debt(self) -> float | None:
        """Seconds of the rounds beyond `plain_seconds`; negative is gained, None if nobody reckoned."""
        rounds = sum(seconds for part, seconds in self.seconds.items() if part != "prefill")
        return rounds - self.plain_seconds if self.plain_seconds else None

    @property
    def distance_per_token(self) -> float | None:
        """Mean total variation between the target's law and the one an emitted token came from; None if exact."""
        return None if self.distance is None else self.distance / max(1, self.emitted)

    def record(
        self, *, width: int, drafted: int, reach: int, accepted: int, emitted: int, distance: float | None = None
    ) -> None:
        """Add one round: `drafted` nodes up to depth `reach`; `accepted` stood, `emitted` tokens survived the stops."""
        self.rounds += 1
        self.emitted += emitted
        self.drafted += drafted
        self.accepted += min(accepted, emitted)
        self.reached += reach
        self.by_width[width] = self.by_width.get(width, 0) + 1
        self._stray(distance)
        while len(self.tried_at) < reach:
            self.tried_at.append(0)
            self.accepted_at.append(0)
        for position in range(min(accepted + 1, reach)):
            self.tried_at[position] += 1
            self.accepted_at[position] += position < accepted

    def add(self, other: RoundStats) -> None:
        """Sum counts and seconds of another run."""
        self.rounds += other.rounds
        self.emitted += other.emitted
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.reached += other.reached
        self.plain_seconds += other.plain_seconds
        for width, count in other.by_width.items():
            self.by_width[width] = self.by_width.get(width, 0) + count
        for mine, theirs in ((self.tried_at, other.tried_at), (self.accepted_at, other.accepted_at)):
            mine += [0] * (len(theirs) - len(mine))
            for position, count in enumerate(theirs):
                mine[position] += count
        self._stray(other.distance)
        for part, seconds in other.seconds.items():
            self.seconds[part] += seconds

    def _stray(self, distance: float | None) -> None:
        if distance is not None:
            self.distance = (self.distance or 0.0) + distance


class Clock:
    """Wall seconds by part, measured around calls; a block inside another is counted once. total: of all parts."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.total = 0.0
        self._inside_whole = False

    @contextmanager
    def part(self, name: str, whole: bool = False) -> Iterator[None]:
        """Count the block as `name`, less what blocks inside it count; `whole`: including all that is inside."""
        if self._inside_whole:
            yield
            return
        self._inside_whole = whole
        before, start = self.total, time.perf_counter()
        try:
            yield
        finally:
            self._count(name, before, start)
            self._inside_whole = False

    def timed(self, call: Callable[P, R], name: str) -> Callable[P, R]:
        """`call`, counted as `name`."""
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            if self._inside_whole:
                return call(*args, **kwargs)
            before, start = self.total, time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self._count(name, before, start)

        return run

    def _count(self, name: str, before: float, start: float) -> None:
        """A block ends that began at `start`, when the total was `before`."""
        own = time.perf_counter() - start - (self.total - before)
        self.seconds[name] += own
        self.total += own


class Timed:
    """Stands in for `inner`; its `verbs` are counted as `part`."""

    def __init__(self, inner: object, clock: Clock, part: str, verbs: Sequence[str]) -> None:
        self._inner = inner
        for verb in verbs:
            setattr(self, verb, clock.timed(getattr(inner, verb), part))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
