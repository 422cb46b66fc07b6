"""What rounds cost, learned from the rounds themselves: no warm-up. Knows sizes of drafts and seconds, nothing of tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

WANDER, DRIFT, AGED = 0.05, 0.005, 0.01
"""In natural logarithms, how far the machine's speed and how far relative costs wander from round to round; and how far a cost
that was not measured since may be off for each round, since it may have been measured while the machine was busy otherwise."""
ABOUT, FIRST = 0.1, 0.5
"""How far a round is off before that is measured, and how far the first of its kind may be: nothing is warm."""
SUPPOSED, VAGUE, BORROWED = 0.3, 1.0, 0.3
"""How far a cost may be off that lies on the line, that is a mere guess, that comes from another shape of batch."""
CONFIDENCE_SCALE = 1.65
"""Standard deviations above the estimate that a round rarely exceeds: its 95th percentile."""
TURNED, ASKED, BESIDE = -2, -1, 0.03
"""Plain rounds that are no plain step: behind one that drafted, and any that was thought about, for what the processor kept at
hand has to be fetched again. By how much, in logarithms, they are supposed to be slower, and how far that may be off."""
GUESS = 0.15
"""Plain steps per drafted token before anything was measured."""
OUTLIER = 3.0
"""Standard deviations at which a surprise is cut off."""
TOO_LONG, READ = 2.5, 0.05
"""Times what was supposed that are too long to be believed at once; plain steps that a token of a set-up is thought to take."""
STALE, COLD, WANTED = 384, 0.2, 2
"""Rounds after which the plain step is measured again, by how much the first ones may have been overrated, and how many are
measured before anything is compared with them: the first may be cold."""
NEAR = 256
"""Texts up to this length cost the same."""


class Doubt:
    """What takes far too long is the machine's doing, once; the second time in a row it is believed.

    Whoever believes the first time that drafts are that dear never finds out that they are not.
    """

    def __init__(self) -> None:
        self._late = False

    def believed(self, took: float, most: float) -> float:
        """`took`, or `most` if it was more."""
        self._late = took > most and not self._late
        return most if self._late else took


class Pace:
    """What rounds cost for one shape of batch: seconds of a plain step, and rounds that draft in plain steps.

    A Kalman filter on logarithms: seconds = plain step x relative cost x noise. The machine's speed wanders and relative
    costs hardly do, so a round that drafts also tells of the plain step, and a plain round settles how much of a change
    was the machine's. Costs that were never measured lie on the line through those that were. A plain round that was thought
    about is a little slower than one of a rest, and so is one behind a round that drafted: each has a cost of its own, the last
    two. (Covariances between the costs of different sizes are left out; plain Python, because a round has no time for more.)
    """

    def __init__(self, sizes: Sequence[int], like: Pace | None = None) -> None:
        self.sizes = tuple(sizes)                               # sizes[0] is 0
        count = len(self.sizes)
        self.speed, self.speed_var = 0.0, FIRST**2              # of the plain step, logarithm of seconds
        self.logs = [0.0] * count + [BESIDE] * 2                # of relative costs
        self.vars = [0.0] * count + [BESIDE**2] * 2
        self.shared = [0.0] * (count + 2)                       # covariances of relative costs with the plain step
        self.seen = [False] * count + [True] * 2
        self.last = [0] * (count + 2)                           # the round in which each was measured last
        self.quick = [False] * (count + 2)                      # whether the last one was far quicker than supposed
        self.noise = ABOUT**2
        self.rounds, self.plains = 0, 0                         # so far, and plain steps among them that were measured
        self.speed_then = 0.0                                   # when that was done last
        self.frozen = False
        self._doubt = Doubt()
        self._strikes, self._struck = 0, 0                      # surprises in a row, and the last one's size
        self._told: tuple[list[float], list[float]] | None = None
        if like is not None:
            self.seen = [False, *like.seen[1:]]
            self.logs = list(like.logs)
            self.vars = [0.0, *(var + BORROWED**2 for var in like.vars[1:TURNED]), *like.vars[TURNED:]]

    @property
    def plain_step(self) -> float:
        """Seconds; 0 while unknown."""
        return math.exp(self.speed) if self.seen[0] else 0.0

    @property
    def started(self) -> bool:
        """Whether any round that drafts was measured, here or where this began."""
        return True in self.seen[1:TURNED]

    @property
    def since_plain(self) -> int:
        """Rounds since a plain step was measured."""
        return self.rounds - self.last[0]

    @property
    def plain_is_due(self) -> bool:
        """Whether the plain step should be measured before anything is compared with it."""
        if self.frozen:
            return False
        cold = self.plains < 4 and self.risen < -COLD           # what came later says that the first ones were slow
        return self.plains < WANTED or cold or self._strikes > 1 or self.since_plain >= STALE

    @property
    def risen(self) -> float:
        """By how much, in logarithms, the plain step seems to have grown since one was measured."""
        return self.speed - self.speed_then

    @property
    def cost(self) -> list[float]:
        """Of every size, in plain steps."""
        return (self._told or self._flush())[0]

    @property
    def high(self) -> list[float]:
        """The 95th percentile of `cost`."""
        return (self._told or self._flush())[1]

    def draw(self, dice: Random) -> list[float]:
        """`cost`, as it may be within what is known."""
        off = dice.gauss(0.0, 1 / CONFIDENCE_SCALE)
        return [max(1.0, cost + (high - cost) * off) for cost, high in zip(self.cost, self.high, strict=True)]

    def observe(self, index: int, seconds: float) -> float:
        """A round of `sizes[index]`, or one that was `TURNED` or `ASKED`, took so long; returns its cost in plain steps: as
        measured the first time, later as estimated, for what one round takes longer than another of its kind is the machine's
        doing.
        """
        if self.frozen:
            return self._cost_of(index)
        index = index if self.seen[0] else max(0, index)
        if self.seen[0] and index > 0:
            seconds = self._doubt.believed(seconds, TOO_LONG * self.cost[index] * self.plain_step)
        said, first = math.log(max(seconds, 1e-9)), not self.seen[index]
        measured = math.exp(said - self.speed) if self.seen[0] else 1.0
        self.skip()
        if self._strikes > 1:
            self._forgive()
        if index:
            self._weigh(index, said, first)
        elif first:
            self.seen[0], self.speed, self.speed_var = True, said, FIRST**2
        else:
            self._weigh_plain(said)
        self.last[index] = self.rounds
        if index in (0, ASKED):
            self._plain_was_measured()
        return max(1.0, measured) if first and index else self._cost_of(index)

    def rest(self, rounds: int, seconds: float) -> None:
        """So many plain rounds that nobody thought about took so long, the median of them."""
        if self.frozen:
            return
        self.skip(rounds)
        if not self.seen[0]:
            self.seen[0], self.speed, self.speed_var = True, math.log(max(seconds, 1e-9)), FIRST**2
        else:
            self._weigh_plain(math.log(max(seconds, 1e-9)), rounds)
        self._plain_was_measured()

    def _plain_was_measured(self) -> None:
        self.last[0], self.speed_then, self.plains = self.rounds, self.speed, self.plains + 1

    def _cost_of(self, index: int) -> float:
        return self.cost[index] if index >= 0 else math.exp(self.logs[index])

    def skip(self, rounds: int = 1) -> None:
        """Rounds went by that say nothing of costs."""
        self.rounds += rounds
        self.speed_var += rounds * WANDER**2

    def _weigh_plain(self, said: float, rounds: int = 1) -> None:
        """A plain round, or the median of some: whatever else was measured by a wrong plain step is corrected along with it."""
        total = self.speed_var + self.noise / rounds
        surprise = self._surprise(said - self.speed, total)
        gain = self.speed_var / total
        self.speed += gain * surprise
        self.speed_var -= gain * self.speed_var
        for index, shared in enumerate(self.shared):
            if shared:
                self.logs[index] += shared / total * surprise
                self.vars[index] -= shared * shared / total
                self.shared[index] -= gain * shared
                self._told = None

    def _weigh(self, index: int, said: float, first: bool) -> None:
        """A round that drafted. The first of its size begins from what was supposed of it, and is believed less."""
        if first:
            self.logs[index] = math.log(self.cost[index])
            self.vars[index] = (SUPPOSED if self.started else VAGUE) ** 2
            self.seen[index] = True
        else:
            self.vars[index] += (self.rounds - self.last[index]) * DRIFT**2
        shared, surprise = self.shared[index], said - self.speed - self.logs[index]
        to_speed, to_cost = self.speed_var + shared, self.vars[index] + shared
        total = to_speed + to_cost + (FIRST**2 if first else self.noise)
        if not first:
            again, self.quick[index] = self.quick[index], surprise < -OUTLIER * math.sqrt(total)
            if again and self.quick[index]:                     # no machine is too quick: what was measured before was wrong
                self.vars[index] += FIRST**2
                to_cost, total = to_cost + FIRST**2, total + FIRST**2
            surprise = self._surprise(surprise, total, index)
        self.speed += to_speed / total * surprise
        self.logs[index] += to_cost / total * surprise
        left = max(1e-6, 1 - to_speed * to_speed / total / self.speed_var)
        self.shared = [covariance * left for covariance in self.shared]
        self.shared[index] = shared - to_speed * to_cost / total
        self.speed_var *= left
        self.vars[index] = max(1e-6, self.vars[index] - to_cost * to_cost / total)
        if self.logs[index] < 0:
            self._at_least_plain(index)
        self._told = None

    def _at_least_plain(self, index: int) -> None:
        """A draft costs no less than none: if it seems to, the plain step was overrated."""
        excess, self.logs[index] = self.logs[index], 0.0
        if index > 0:
            self.speed += excess

    def _surprise(self, surprise: float, total: float, index: int = 0) -> float:
        """Cut off what is too much to believe, and learn how much that is: two of three are off by less than the noise."""
        bound = OUTLIER * math.sqrt(total)
        self._strikes, self._struck = (self._strikes + 1 if abs(surprise) > bound else 0), index
        self.noise = min(0.25, max(0.02**2, self.noise * (1.1 if surprise * surprise > total else 0.955)))
        return max(-bound, min(bound, surprise))

    def _forgive(self) -> None:
        """Two surprises in a row are no hiccup: either the machine or this size has changed. The next round, a plain one,
        will tell."""
        self._strikes = 0
        self.speed_var += FIRST**2
        self.vars[self._struck] += FIRST**2 if self._struck else 0.0

    def _flush(self) -> tuple[list[float], list[float]]:
        measured = {one: math.exp(self.logs[one]) for one in range(1, len(self.sizes)) if self.seen[one]}
        known = [(0, 1.0), *((self.sizes[one], cost) for one, cost in measured.items())]
        costs, highs, aged = [1.0], [1.0], 0.0 if self.frozen else AGED**2
        for index in range(1, len(self.sizes)):
            cost = max(1.0, measured[index] if index in measured else _on_the_line(known, self.sizes[index]))
            off = math.sqrt(max(0.0, self.vars[index]) + aged * (self.rounds - self.last[index]))
            costs.append(cost)
            highs.append(cost * math.exp(CONFIDENCE_SCALE * min(SUPPOSED, off)) if self.seen[index] else 1 + 1.5 * (cost - 1))
        self._told = costs, highs
        return self._told


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
        self._doubt = Doubt()

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

    def observe_setup(self, tokens: int, cost: float) -> float:
        """Reading `tokens` took so many plain steps; returns what is believed of that. Less is believed sooner than more."""
        if self.frozen:
            return cost
        bucket = _bucket(tokens)
        known = self._setups.get(bucket)
        cost = self._doubt.believed(cost, 1 + TOO_LONG * (READ * tokens if known is None else known))
        self._setups[bucket] = cost if known is None else cost + (0.3 if cost < known else 0.7) * (known - cost)
        return cost


def _bucket(count: int) -> int:
    """The exponent of the power of two at or above `count`."""
    return max(0, count - 1).bit_length()


def _frozen(sizes: Sequence[int], plain_step: float, costs: Sequence[float]) -> Pace:
    pace = Pace(sizes)
    pace.speed = math.log(plain_step or 1.0)
    pace.logs = [0.0, *(math.log(cost) for cost in costs[1:]), 0.0, 0.0]
    pace.vars[TURNED:] = [0.0, 0.0]
    pace.seen = [True] * (len(sizes) + 2)
    pace.frozen = True
    return pace
