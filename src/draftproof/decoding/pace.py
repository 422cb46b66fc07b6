"""What rounds cost, learned from the rounds themselves: no warm-up. Knows sizes of drafts and seconds, nothing of tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import numpy as np

WANDER, DRIFT = 0.05, 0.005
"""In natural logarithms, how far the machine's speed and how far relative costs wander from round to round."""
ABOUT, FIRST = 0.1, 0.5
"""How far a round is off before that is measured, and how far the first of its kind may be: nothing is warm."""
SUPPOSED, VAGUE, BORROWED = 0.3, 1.0, 0.3
"""How far a cost may be off that lies on the line, that is a mere guess, that comes from another shape of batch."""
SURE = 1.65
"""Standard deviations above the estimate that a round rarely exceeds: its 95th percentile."""
GUESS = 0.15
"""Plain steps per drafted token before anything was measured."""
OUTLIER = 3.0
"""Standard deviations at which a surprise is cut off."""
STALE = 96
"""Rounds after which the plain step is measured again."""
NEAR = 256
"""Texts up to this length cost the same."""


class Pace:
    """What rounds cost for one shape of batch: seconds of a plain step, and rounds that draft in plain steps.

    A Kalman filter on logarithms: seconds = plain step x relative cost x noise. The machine's speed wanders and relative
    costs hardly do, so a round that drafts also tells of the plain step, and a plain round settles how much of a change
    was the machine's. Costs that were never measured lie on the line through those that were.
    """

    def __init__(self, sizes: Sequence[int], like: Pace | None = None) -> None:
        self.sizes = tuple(sizes)
        count = len(self.sizes)                                 # sizes[0] is 0: state[0] is the plain step, the rest relative
        self.state = np.zeros(count)
        self.spread = np.diag(np.full(count, FIRST**2))
        self.seen = [False] * count
        self._steps = np.array([WANDER**2, *[DRIFT**2] * (count - 1)])
        self.noise = ABOUT**2
        self.since_plain, self.plain_then = 0, 0.0              # rounds since one was measured, and what it then seemed
        self.frozen = False
        self._strikes = 0                                       # surprises in a row
        if like is not None:
            self.seen = [False, *like.seen[1:]]
            self.state[1:] = like.state[1:]
            self.spread[1:, 1:] = like.spread[1:, 1:] + np.diag(np.full(count - 1, BORROWED**2))
        self._tell()

    @property
    def plain_step(self) -> float:
        """Seconds; 0 while unknown."""
        return math.exp(self.state[0]) if self.seen[0] else 0.0

    @property
    def started(self) -> bool:
        """Whether any round that drafts was measured, here or where this began."""
        return any(self.seen[1:])

    @property
    def plain_is_due(self) -> bool:
        """Whether the plain step should be measured before anything is compared with it."""
        return not self.seen[0] or self._strikes > 1 or (self.since_plain >= STALE and not self.frozen)

    @property
    def risen(self) -> float:
        """By how much, in logarithms, the plain step seems to have grown since one was measured."""
        return float(self.state[0]) - self.plain_then

    def observe(self, index: int, seconds: float) -> float:
        """A round of `sizes[index]` took so long; returns its cost in plain steps: as measured the first time, later as
        estimated, for what one round takes longer than another of its kind is the machine's doing."""
        if self.frozen:
            return self.cost[index]
        said, first = math.log(max(seconds, 1e-9)), not self.seen[index]
        measured = math.exp(said - self.state[0])
        self._wander()
        if first:
            self._begin(index, said)
        self._weigh(index, said, first)
        self.since_plain += 1
        if index == 0:
            self.since_plain, self.plain_then = 0, float(self.state[0])
        self._tell()
        return max(1.0, measured) if first and index else self.cost[index]

    def skip(self) -> None:
        """A round went by that says nothing of costs."""
        self._wander()
        self.since_plain += 1

    def draw(self, dice: Random) -> list[float]:
        """`cost`, as it may be within what is known."""
        off = dice.gauss(0.0, 1 / SURE)
        return [cost * (high / cost) ** off for cost, high in zip(self.cost, self.high, strict=True)]

    def _wander(self) -> None:
        self.spread.flat[:: len(self.sizes) + 1] += self._steps

    def _begin(self, index: int, said: float) -> None:
        """What is supposed of a size before its first round: a plain step takes what it takes, the rest lie on the line."""
        supposed = (SUPPOSED if self.started else VAGUE) if index else FIRST
        self.spread[index] = self.spread[:, index] = 0.0
        self.spread[index, index] = supposed**2
        self.state[index] = math.log(self.cost[index]) if index else said
        self.seen[index] = True

    def _weigh(self, index: int, said: float, first: bool) -> None:
        """The filter's step, with surprises cut off and the noise learned along the way.

        Two surprises in a row are no hiccup: either the machine or this size has changed, and a plain round will tell.
        """
        if self._strikes > 1:
            self._strikes = 0
            for one in {0, index}:
                self.spread[one, one] += FIRST**2
        noise = FIRST**2 if first else self.noise
        toward = self.spread[0] + self.spread[index] if index else self.spread[0].copy()
        known = float(toward[0] + toward[index] if index else toward[0])
        surprise = said - float(self.state[0]) - (float(self.state[index]) if index else 0.0)
        bound = OUTLIER * math.sqrt(known + noise)
        self._strikes = self._strikes + 1 if abs(surprise) > bound else 0
        gain = toward / (known + noise)
        self.state += gain * max(-bound, min(bound, surprise))
        self.spread -= np.outer(gain, toward)
        if not first:                                   # two rounds of three are off by less than the noise says
            self.noise *= 1.1 if surprise**2 > known + noise else 0.955
            self.noise = min(0.25, max(0.02**2, self.noise))
        self._at_least_plain(index)

    def _at_least_plain(self, index: int) -> None:
        """A round that drafts costs no less than one that does not: if it seems to, the plain step was overrated."""
        if index and self.state[index] < 0:
            excess = float(self.state[index])
            self.state[0] += excess
            self.state[1:] -= excess * np.array(self.seen[1:])

    def _tell(self) -> None:
        """Refresh `cost` and `high`, the estimate and its 95th percentile for every size, in plain steps."""
        spread = np.sqrt(self.spread.diagonal().clip(0.0, SUPPOSED**2))
        spread[0] = 0.0
        mean = self.state.copy()
        mean[0] = 0.0
        costs, highs = np.exp(mean).tolist(), np.exp(mean + SURE * spread).tolist()
        known = [(size, cost) for size, cost, seen in zip(self.sizes, costs, self.seen, strict=True) if seen or not size]
        self.cost, self.high = [1.0], [1.0]
        for index, size in enumerate(self.sizes[1:], 1):
            between = costs[index] if self.seen[index] else _on_the_line(known, size)
            self.cost.append(max(1.0, between))
            self.high.append(max(1.0, highs[index] if self.seen[index] else 1 + 1.5 * (between - 1)))


def _on_the_line(known: list[tuple[int, float]], size: int) -> float:
    """The cost of `size` between the known ones around it, or on the line from the first to the last known."""
    if len(known) == 1:
        return 1 + GUESS * size
    after = next((index for index, (other, _) in enumerate(known) if other > size), None)
    (low, least), (high, most) = (known[0], known[-1]) if after is None else (known[after - 1], known[after])
    return least + (most - least) * (size - low) / (high - low)


class CostTable:
    """A `Pace` for every shape of batch, and what it costs a drafter to catch up with a text.

    Shapes are told apart by the powers of two around their rows and their longest text; a new one begins with what the
    nearest known one says of relative costs. A recorded table (`replay`) answers what it answered then and learns nothing.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self.frozen = False
        self._paces: dict[tuple[int, int], Pace] = {}
        self._setups: dict[int, float] = {}                     # power of two above the tokens → plain steps

    @classmethod
    def of(cls, costs: Mapping[int, float], plain_step: float = 1.0, setups: Mapping[int, float] | None = None) -> CostTable:
        """A table that never changes: plain steps of a round by its drafted tokens, and of catching up by tokens to read."""
        found = cls(sorted({0, *costs}))
        found.frozen = True
        found._paces[0, 0] = _frozen(found.sizes, plain_step, [costs.get(size, 1.0) for size in found.sizes])
        found._setups = {_bucket(tokens): cost for tokens, cost in (setups or {}).items()}
        return found

    @classmethod
    def replay(cls, recorded: Mapping[str, Any]) -> CostTable:
        """The table that `record` wrote down; it never changes."""
        found = cls(recorded["sizes"])
        found.frozen = True
        for one in recorded["shapes"]:
            found._paces[tuple(one["shape"])] = _frozen(found.sizes, one["plain_step"], one["costs"])
        found._setups = {int(bucket): cost for bucket, cost in recorded["setups"].items()}
        return found

    def record(self) -> dict[str, Any]:
        """What is known, for JSON."""
        shapes = [
            {"shape": shape, "plain_step": pace.plain_step, "costs": pace.cost} for shape, pace in self._paces.items()
        ]
        return {"sizes": self.sizes, "shapes": shapes, "setups": self._setups}

    def pace(self, rows: int, context: int) -> Pace:
        """Of batches like this one."""
        shape = (_bucket(rows), _bucket(max(context, NEAR)))
        found = self._paces.get(shape)
        if found is None:
            near = min(self._paces, key=lambda other: 4 * abs(other[0] - shape[0]) + abs(other[1] - shape[1]), default=None)
            if near is not None and self.frozen:
                return self._paces[near]
            found = self._paces[shape] = Pace(self.sizes, self._paces[near] if near is not None else None)
        return found

    @property
    def knows_setups(self) -> bool:
        return bool(self._setups)

    def setup(self, tokens: int) -> float:
        """Plain steps to read `tokens` before a draft; 0 if nothing like it was ever seen."""
        if not self._setups or not tokens:
            return 0.0
        bucket = _bucket(tokens)
        near = min(self._setups, key=lambda other: (abs(other - bucket), -other))
        return self._setups[near] * max(1.0, 2.0 ** (bucket - near))

    def observe_setup(self, tokens: int, cost: float) -> None:
        """Reading `tokens` took so many plain steps."""
        bucket = _bucket(tokens)
        if not self.frozen:
            self._setups[bucket] = cost + 0.7 * (self._setups.get(bucket, cost) - cost)


def _bucket(count: int) -> int:
    """The exponent of the power of two at or above `count`."""
    return max(0, count - 1).bit_length()


def _frozen(sizes: Sequence[int], plain_step: float, costs: Sequence[float]) -> Pace:
    pace = Pace(sizes)
    pace.state = np.log(np.array([plain_step, *costs[1:]]))
    pace.spread = np.zeros_like(pace.spread)
    pace.seen = [True] * len(sizes)
    pace.frozen = True
    pace._tell()
    return pace
