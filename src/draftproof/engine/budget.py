"""How much to draft in a round: a fixed number, or one that follows what drafting costs and gives.

What drafting loses meanwhile is a debt in plain steps: it stops where the debt reaches a limit, a
share of plain decoding's time repays it, and what does not seem to pay waits for that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from draftproof.engine.stats import Round, State
from draftproof.errors import BadInput

MARGIN = 1.02       # drafting must promise so many times the tokens per second of plain decoding
DEBT = 3.0          # plain steps that may be lost,
RATE = 0.01         # and the share of plain decoding's time that repays them
KEPT = 0.98         # what is left of counts after a draft
MEMORY = 16         # rounds over which seconds are averaged
POOL = 4.0          # rounds that the prior of a node's acceptance counts for
STALE = 256         # rounds without a plain one after which a plain round is measured again
CATCH_UP = 8        # more unread tokens per row than this have a cost of their own


class Budget(ABC):
    """Asked before each round, told what came of it; texts (or, under the rules that weigh draft
    probabilities, their distribution) never depend on its answers.

    most: bounds the answers. floor: no path is drafted further that is less likely to be accepted.
    """

    most: int
    floor: float = 0.0

    @abstractmethod
    def choose(self, state: State) -> int:
        """Draft tokens per row of the coming round."""

    def record(self, done: Round) -> None:
        """The round that was chosen is over. Default: nothing is learned."""


class Fixed(Budget):
    """The same number of draft tokens per row each round; fewer below `floor` (see `Budget`)."""

    def __init__(self, count: int, floor: float = 0.0) -> None:
        if count < 0 or not 0 <= floor < 1:
            given = f"a budget of {count} draft tokens with a floor of {floor} was given"
            raise BadInput(f"{given}; the first is 0 or more, the second from 0 to below 1")
        self.most, self.floor = count, floor

    def choose(self, state: State) -> int:
        return self.most


class Costs:
    """Average seconds of rounds by index of size; what is not measured is relative to `like`."""

    def __init__(self, sizes: Sequence[int], like: Costs | None = None) -> None:
        self.sizes, self.like, self.since_plain = sizes, like, 0
        self.mean, self.seen = [0.0] * len(sizes), [0] * len(sizes)
        self.late = [False] * len(sizes)

    def add(self, index: int, seconds: float) -> None:
        """Twice as long as supposed is believed only the second time in a row."""
        known = self.mean[index] or (self.estimate(index) if self.mean[0] else seconds)
        doubted, self.late[index] = self.late[index], seconds > 2 * known
        if self.late[index] and not doubted:
            return
        self.seen[index] += 1
        sudden = self.late[index] or seconds < known / 2
        rounds = min(self.seen[index], MEMORY) * (4 if seconds > known else 1)  # others compute too
        weight = 1 if sudden or self.seen[index] == 1 else 1 / rounds
        self.mean[index] += weight * (seconds - self.mean[index])
        if index == 0 and self.like is not None and self.seen[0] == 2:
            factor = self.mean[0] / self.like.mean[0]
            pairs = zip(self.mean, self.like.mean, strict=True)
            self.mean = [mine or theirs * factor for mine, theirs in pairs]

    def estimate(self, index: int) -> float:
        """Seconds of a round: measured, or on the line through the nearest drafts that were; what
        the first node costs is half to draft at all, unless the second is measured."""
        if self.mean[index]:
            return self.mean[index]
        known = [one for one in range(1, len(self.sizes)) if self.mean[one]]
        if len(known) < 2:
            near = known[0] if known else 0
            added = max(0.0, self.mean[near] - self.mean[0]) / 2        # half of it by the nodes
            each = max(self.mean[0] / MEMORY, added / max(1, self.sizes[near]))
            return self.mean[near] + (self.sizes[index] - self.sizes[near]) * each
        right = min(max(1, bisect_left(known, index)), len(known) - 1)
        low, high = known[right - 1 : right + 1]
        slope = (self.mean[high] - self.mean[low]) / (self.sizes[high] - self.sizes[low])
        return max(self.mean[0], self.mean[low] + slope * (self.sizes[index] - self.sizes[low]))


class Adaptive(Budget):
    """Drafts the size with the most tokens per second; what it learns outlasts a call.

    most: nodes per row it may draft. debt, rate: it may be `debt` plain steps behind plain decoding
    before it stops, and lose `rate` of plain decoding's time. sizes: to choose from, 0 the first.
    """

    def __init__(self, most: int, *, debt: float = DEBT, rate: float = RATE, floor: float = 0.1,
                 sizes: Sequence[int] | None = None) -> None:
        if min(most, debt, rate) < 0:
            given = f"a budget of {most} draft tokens, a debt of {debt} and a rate of {rate}"
            raise BadInput(f"{given} were given; none may be negative")
        self.most, self.floor, self.limit, self.rate = most, floor, debt, rate
        self.sizes = tuple(sizes) if sizes is not None else presets(most)
        self.widths = [high - low for low, high in pairwise(self.sizes)]    # nodes a size adds,
        self.middles = [(low + 1 + high) / 2 for low, high in pairwise(self.sizes)]  # mean number
        self.step_of = [0, *(i for i, width in enumerate(self.widths) for _ in range(width))]
        self.accepted, self.offered = [0.0] * len(self.widths), [0.0] * len(self.widths)
        self.hits, self.tries, self.chain = 0.0, 0.0, True    # of all nodes; only chains so far
        self.owed = self.spent = self.earned = 0.0  # debt at the last plain round, and from then on
        self.setups = self.per_unread = 0.0     # debt by catching up; seconds per token caught up
        self.costs: dict[tuple[int, int], Costs] = {}
        self.now, self.unread = Costs(self.sizes), 0     # of the coming round
        self.plan: tuple[int, float, float] | None = None   # a size, its seconds per token, tokens

    @property
    def debt(self) -> float:
        """Plain steps by which drafting is behind plain decoding, as plain steps are now."""
        return self.owed + (self.spent / self.now.mean[0] - self.earned if self.spent else 0.0)

    def as_json(self) -> dict[str, Any]:
        """What was learned, for `learned`."""
        costs = [[*shape, one.mean, one.seen] for shape, one in self.costs.items()]
        names = ("most", "sizes", "accepted", "offered", "hits", "tries", "chain", "per_unread")
        return {name: getattr(self, name) for name in names} | {"costs": costs}

    @classmethod
    def learned(cls, found: Mapping[str, Any]) -> Adaptive:
        """One that begins with what another had learned, as `as_json` wrote it."""
        made = cls(found["most"], sizes=found["sizes"])
        for name in ("accepted", "offered", "hits", "tries", "chain", "per_unread"):
            setattr(made, name, found[name])
        for rows, context, mean, seen in found["costs"]:
            one = made.costs[rows, context] = Costs(made.sizes)
            one.mean, one.seen = list(mean), list(seen)
            made.now = one
        return made

    def choose(self, state: State) -> int:
        self.unread = state.unread if state.unread > CATCH_UP * state.rows else 0
        shape = (state.rows - 1).bit_length(), (state.context >> 9).bit_length()
        now, left = self.costs.get(shape), state.remaining
        if now is None:
            now = self.costs[shape] = Costs(self.sizes, self.now if self.now.seen[0] else None)
        if now is not self.now:
            self._settle()
            self.now, self.plan = now, None
        if now.seen[0] < 2 or now.since_plain >= STALE or left <= 1 or not self.widths:
            return 0
        if self.plan is None or self.plan[2] > left:
            self.plan = self._best(left)
        catch_up, (size, price, _) = self.unread * self.per_unread, self.plan
        if (price + catch_up / left) * MARGIN >= now.mean[0]:
            return size if not self.debt and catch_up < left * now.mean[0] else 0
        return size if self.debt < self.limit + (0 if catch_up else self.setups) else 0

    def _best(self, left: float) -> tuple[int, float, float]:
        """No size is tried before one at least half as large was measured."""
        measured = max(size for size, mean in zip(self.sizes, self.now.mean, strict=True) if mean)
        tokens = [min(one, left) for one in self._tokens()]
        known = [i for i, size in enumerate(self.sizes) if i == 1 or 0 < size <= 2 * measured + 1]
        price, best = min((self.now.estimate(index) / tokens[index], index) for index in known)
        return self.sizes[best], price, tokens[best]

    def _tokens(self) -> list[float]:
        """Tokens per row of a round of each size, by how often nodes of each number were accepted;
        for numbers seldom drafted that falls geometrically (chains) or as 1 / number."""
        ratio, chance, before, total = (self.hits + 2) / (self.tries + 3), 1.0, 0.0, [1.0]
        for accepted, offered, width, middle in zip(self.accepted, self.offered, self.widths,
                                                    self.middles, strict=True):
            chance *= ratio ** (middle - before) if self.chain or not before else before / middle
            chance = (accepted / width + POOL * chance) / (offered + POOL)
            total.append(total[-1] + width * chance)
            before = middle
        return total

    def record(self, done: Round) -> None:
        if done.size > 0:
            self._count(done)
        now, index = self.now, self.sizes.index(done.size)
        now.since_plain = now.since_plain + 1 if index else 0
        if index and self.unread and done.seconds:
            each = max(0.0, done.seconds - now.estimate(index)) / self.unread
            known = self.per_unread or each
            self.per_unread = known + (min(each, 4 * known) - known) / 4
            self.spent += self.unread * self.per_unread
            self.setups += self.unread * self.per_unread / now.mean[0]
        elif done.seconds:
            now.add(index, done.seconds)
        self.spent += now.estimate(index)
        self.earned += (1 + self.rate) * done.emitted / done.rows
        if index == 0 or self.debt < 0:
            self._settle()

    def _settle(self) -> None:
        """The debt by the plain step as it was measured; less than none is none."""
        self.owed, self.spent, self.earned = max(0.0, self.debt), 0.0, 0.0
        self.setups = min(self.setups, self.owed)

    def _count(self, done: Round) -> None:
        steps, ends = bisect_left(self.sizes, done.size), done.rows
        drafted = [done.rows] * steps + [0] * (len(self.offered) - steps)
        self.accepted = [KEPT * count for count in self.accepted]
        self.offered = [KEPT * old + new for old, new in zip(self.offered, drafted, strict=True)]
        for node in done.accepted:
            self.accepted[self.step_of[node]] += 1
            ends -= node == done.size
        self.hits = KEPT * self.hits + len(done.accepted)
        self.tries = KEPT * self.tries + len(done.accepted) + ends
        self.chain, self.plan = self.chain and done.chain, None


def presets(most: int) -> tuple[int, ...]:
    """Draft sizes to choose from: 0, 1, 2, 3, 5, 7, 10, 14, 20, ... and `most`."""
    sizes = [0, 1, 2, 3, *(round(5 * 2 ** (step / 2)) for step in range(2 * most.bit_length()))]
    return (*(size for size in sizes if size < most), most)
