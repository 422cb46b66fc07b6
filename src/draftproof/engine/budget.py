"""How much to draft in a round: a fixed number, or one that follows what drafting costs and gives.

`Adaptive` knows the seconds of rounds of each size and how often the i-th node of a draft was
accepted, and drafts the size with the most tokens per second. What it loses meanwhile is a debt in
plain steps: drafting stops where the debt reaches a limit, a share of plain decoding's time repays
it, and what does not seem to pay is tried only when there is no debt.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

from draftproof.engine.stats import Round, State
from draftproof.errors import BadInput

MARGIN = 1.02
"""Drafting must promise so many times the tokens per second of plain decoding."""
DEBT, RATE = 3.0, 0.01
"""Plain steps that may be lost, and the share of plain decoding's time that repays them."""
KEPT, MEMORY = 0.98, 16
"""What is left of counts after a draft; rounds over which seconds are averaged."""
POOL = 4.0
"""Rounds that the prior of a node's acceptance counts for."""
STALE = 256
"""Rounds without a plain one after which a plain round is measured again."""
CATCH_UP = 8
"""A drafter that must read more tokens per row before it can draft has a cost of its own."""


class Budget(ABC):
    """Asked before each round, told what came of it. Texts never depend on its answers.

    (Under the rules that weigh draft probabilities, their distribution does not.) most: bounds the
    answers, so that memory can be set aside once. floor: no path is drafted further that is less
    likely than this to be accepted; 0 never ends one.
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
            raise BadInput(f"a budget of {count} draft tokens with a floor of {floor} was given; "
                           "the first must be 0 or more, the second from 0 to below 1")
        self.most, self.floor = count, floor

    def choose(self, state: State) -> int:
        return self.most


class Costs:
    """Average seconds of rounds by index of their size, for batches of one shape.

    like: a shape whose relative costs hold here until others are measured.
    """

    def __init__(self, sizes: Sequence[int], like: Costs | None = None) -> None:
        self.sizes, self.like, self.since_plain = sizes, like, 0
        self.mean, self.seen, self.late = ([0.0] * len(sizes), [0] * len(sizes), [False] * len(sizes))

    def add(self, index: int, seconds: float) -> None:
        """Twice as long as supposed is believed only the second time in a row."""
        known = self.mean[index] or (self.estimate(index) if self.mean[0] else seconds)
        doubted, self.late[index] = self.late[index], seconds > 2 * known
        if self.late[index] and not doubted:
            return
        self.seen[index] += 1
        sudden = self.late[index] or seconds < known / 2
        self.mean[index] += (seconds - self.mean[index]) / (
            1 if sudden else min(self.seen[index], MEMORY))
        if index == 0 and self.like is not None and self.seen[0] == 2:
            factor = self.mean[0] / self.like.mean[0]
            pairs = zip(self.mean, self.like.mean, strict=True)
            self.mean = [mine or theirs * factor for mine, theirs in pairs]

    def estimate(self, index: int) -> float:
        """Seconds of a round: measured, or on the line through the nearest sizes that were."""
        if self.mean[index]:
            return self.mean[index]
        known = [one for one in range(len(self.sizes)) if self.mean[one]]
        if len(known) < 2:
            return self.mean[0] * (1 + self.sizes[index] / MEMORY)
        right = min(max(1, bisect_left(known, index)), len(known) - 1)
        low, high = known[right - 1], known[right]
        slope = (self.mean[high] - self.mean[low]) / (self.sizes[high] - self.sizes[low])
        line = self.mean[low] + slope * (self.sizes[index] - self.sizes[low])
        return max(self.mean[0], line)


class Adaptive(Budget):
    """Drafts the size with the most tokens per second, none if that is plain decoding.

    most: nodes per row it may draft. debt, rate: drafting may be `debt` plain steps behind plain
    decoding before it stops, and lose `rate` of plain decoding's time besides. floor: see `Budget`.
    sizes: to choose from, 0 the first. What it learns outlasts a call; one engine owns it.
    """

    def __init__(self, most: int, *, debt: float = DEBT, rate: float = RATE, floor: float = 0.1,
                 sizes: Sequence[int] | None = None) -> None:
        if min(most, debt, rate) < 0:
            raise BadInput(f"a budget of {most} draft tokens, a debt of {debt} and a rate of "
                           f"{rate} were given; none may be negative")
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
        self.now, self.state = Costs(self.sizes), State(1, 0, 1.0)
        self.plan: tuple[int, float, float] | None = None   # a size, its seconds per token, tokens

    @property
    def debt(self) -> float:
        """Plain steps by which drafting is behind plain decoding, as plain steps are now."""
        return self.owed + (self.spent / self.now.mean[0] - self.earned if self.spent else 0.0)

    def choose(self, state: State) -> int:
        self.state = state
        shape = (state.rows - 1).bit_length(), (state.context >> 9).bit_length()
        if shape not in self.costs:
            self.costs[shape] = Costs(self.sizes, self.now if self.now.seen[0] else None)
        if self.costs[shape] is not self.now:
            self._settle()
            self.now, self.plan = self.costs[shape], None
        now, left = self.now, state.remaining
        if now.seen[0] < 2 or now.since_plain >= STALE or left <= 1 or not self.widths:
            return 0
        if self.plan is None or self.plan[2] > left:
            self.plan = self._best(left)
        catch_up = self._unread() * self.per_unread
        size, price, _ = self.plan
        pays = (price + catch_up / left) * MARGIN < now.mean[0]
        if not pays:
            return size if not self.debt and catch_up < left * now.mean[0] else 0
        return size if self.debt < self.limit + (0 if catch_up else self.setups) else 0

    def _best(self, left: float) -> tuple[int, float, float]:
        """No size is tried before one at least half as large was measured."""
        measured = max(size for size, mean in zip(self.sizes, self.now.mean, strict=True) if mean)
        tokens = [min(one, left) for one in self._tokens()]
        known = [index for index, size in enumerate(self.sizes)
                 if index == 1 or 0 < size <= 2 * measured + 1]
        price, best = min((self.now.estimate(index) / tokens[index], index) for index in known)
        return self.sizes[best], price, tokens[best]

    def _tokens(self) -> list[float]:
        """Tokens per row of a round of each size.

        By how often nodes of a number were accepted. Of numbers seldom drafted it is supposed that
        this falls geometrically (chains), or as 1 / number (trees).
        """
        ratio, chance, before, total = (self.hits + 2) / (self.tries + 3), 1.0, 0.0, [1.0]
        for accepted, offered, width, middle in zip(self.accepted, self.offered, self.widths,
                                                    self.middles, strict=True):
            chance *= ratio ** (middle - before) if self.chain or not before else before / middle
            chance = (accepted / width + POOL * chance) / (offered + POOL)
            total.append(total[-1] + width * chance)
            before = middle
        return total

    def _unread(self) -> int:
        return self.state.unread if self.state.unread > CATCH_UP * self.state.rows else 0

    def record(self, done: Round) -> None:
        if done.size > 0:
            self._count(done)
        now, index = self.now, self.sizes.index(done.size)
        now.since_plain = now.since_plain + 1 if index else 0
        catch_up = 0.0
        if done.size > 0 and self._unread() and done.seconds:
            each = max(0.0, done.seconds - now.estimate(index)) / self._unread()
            known = self.per_unread or each
            self.per_unread = known + (min(each, 4 * known) - known) / 4
            catch_up = self._unread() * self.per_unread
        elif done.seconds:
            now.add(index, done.seconds)
        self.spent += now.estimate(index) + catch_up
        self.setups += catch_up / now.mean[0] if catch_up else 0.0
        self.earned += (1 + self.rate) * done.emitted / done.rows
        if index == 0 or self.debt < 0:
            self._settle()

    def _settle(self) -> None:
        """The debt by the plain step as it was measured; less than none is none."""
        self.owed, self.spent, self.earned = max(0.0, self.debt), 0.0, 0.0
        self.setups = min(self.setups, self.owed)

    def _count(self, done: Round) -> None:
        steps, ends = bisect_left(self.sizes, done.size), done.rows
        self.accepted = [KEPT * count for count in self.accepted]
        self.offered = [KEPT * count + done.rows * (step < steps)
                        for step, count in enumerate(self.offered)]
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
