"""Counts and times of rounds, independent of the algorithm."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

PARTS = ("prefill", "draft", "verify", "decide")
"""Parts of a round, whose seconds are counted."""


@dataclass
class RoundStats:
    """Counts over rounds. Prefill is not a round, and its token is not counted.

    rounds: target forwards that verified drafts. emitted: their tokens, after stop rules.
    drafted: verified draft tokens. accepted: emitted draft tokens.
    by_width: rounds by the number of drafted nodes with absent ones; plain rounds are under 0.
    tried_at, accepted_at: by position in the draft, rounds in which all positions before it were
        accepted, and rounds in which it was accepted, too.
    distance: total variation from the target's distribution, summed over emitted tokens; None under
        an exact rule.
    seconds: wall time while the row ran, by `PARTS`.
    """

    rounds: int = 0
    emitted: int = 0
    drafted: int = 0
    accepted: int = 0
    by_width: dict[int, int] = field(default_factory=dict)
    tried_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    distance: float | None = None
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    @property
    def tokens_per_round(self) -> float:
        """Emitted tokens per target forward, including the last round; 0 before the first."""
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def acceptance(self) -> float:
        """The share of reached draft positions that were accepted (2211.17192)."""
        tried = sum(self.tried_at)
        return sum(self.accepted_at) / tried if tried else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """The acceptance rate at each position of the draft if all before it were accepted."""
        pairs = zip(self.accepted_at, self.tried_at, strict=True)
        return [hits / tries for hits, tries in pairs if tries]

    @property
    def plain_share(self) -> float:
        """The share of rounds without a draft."""
        return self.by_width.get(0, 0) / self.rounds if self.rounds else 0.0

    @property
    def distance_per_token(self) -> float | None:
        """The mean total variation per token from the target's distribution, or None."""
        return None if self.distance is None else self.distance / max(1, self.emitted)

    def record(
        self, width: int, drafted: int, reach: int, accepted: int, emitted: int,
        distance: float | None = None,
    ) -> None:  # fmt: skip
        """Add a round of a tree of width `width`: `drafted` nodes up to depth `reach`, `accepted`
        accepted nodes, and `emitted` tokens after the stop rules."""
        self.rounds += 1
        self.emitted += emitted
        self.drafted += drafted
        self.accepted += accepted if accepted < emitted else emitted
        self.by_width[width] = self.by_width.get(width, 0) + 1
        if distance is not None:
            self.distance = (self.distance or 0.0) + distance
        while len(self.tried_at) < reach:
            self.tried_at.append(0)
            self.accepted_at.append(0)
        for position in range(min(accepted + 1, reach)):
            self.tried_at[position] += 1
            self.accepted_at[position] += position < accepted

    def add(self, other: RoundStats) -> None:
        """Add the counts and seconds of another run."""
        self.rounds += other.rounds
        self.emitted += other.emitted
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.by_width = dict(Counter(self.by_width) + Counter(other.by_width))
        for name in ("tried_at", "accepted_at"):
            both = zip_longest(getattr(self, name), getattr(other, name), fillvalue=0)
            setattr(self, name, [mine + theirs for mine, theirs in both])
        if other.distance is not None:
            self.distance = (self.distance or 0.0) + other.distance
        for part, seconds in other.seconds.items():
            self.seconds[part] += seconds


class State(NamedTuple):
    """The situation before a round, from which a budget chooses.

    rows: the running rows. context: tokens of the longest. remaining: the average number of tokens
    that a row may still write. unread: committed tokens of all rows that the drafter has not read.
    """

    rows: int
    context: int
    remaining: float
    unread: int = 0


class Round(NamedTuple):
    """The result of a round.

    size: the chosen nodes per row. accepted: indices of the accepted nodes of all rows; a smaller
    draft would have been the first nodes of this one. emitted: tokens of all rows. seconds: time of
    the whole round; 0 if it is not meaningful. chain: whether no row drafted a tree. drafted: nodes
    that were read, of all rows. draft_seconds: those
    of `seconds` in which the drafter worked.
    """

    size: int
    rows: int
    accepted: Sequence[int]
    emitted: int
    seconds: float
    chain: bool = True
    drafted: int = 0
    draft_seconds: float = 0.0


class Clock:
    """Wall seconds by part. Time in nested parts counts only for the inner one. total: the sum."""

    def __init__(self) -> None:
        self.total = 0.0
        self.prefill, self.draft = Part(self), Part(self)
        self.verify, self.decide = Part(self), Part(self)

    def add_round(self, draft: float, verify: float, whole: float) -> None:
        """Count the seconds of a round; the remaining time counts as `decide`."""
        self.draft.seconds += draft
        self.verify.seconds += verify
        self.decide.seconds += whole - draft - verify
        self.decide.took = whole
        self.total += whole

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds by name, as in `RoundStats`."""
        return {name: getattr(self, name).seconds for name in PARTS}


class Part:
    """Times its blocks. seconds: without nested parts. took: seconds of the last block."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.seconds, self.took, self.start, self.before = clock, 0.0, 0.0, 0.0, 0.0

    def __enter__(self) -> None:
        self.before, self.start = self.clock.total, time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.took = time.perf_counter() - self.start
        seconds = self.took - (self.clock.total - self.before)
        self.seconds += seconds
        self.clock.total += seconds
