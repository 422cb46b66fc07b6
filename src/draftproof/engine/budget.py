"""How much to draft in a round: a fixed number, or one that follows measured costs and gains.

Time lost by drafting is a debt, counted in plain steps. Gains repay it, and so does a share of
plain decoding's time. Drafting stops when the debt reaches a limit; a size that is not expected to
pay is tried only without debt.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import compress, pairwise
from math import inf

from draftproof.core.former_names import FormerName, adopt_former_names, former_keywords
from draftproof.drafters.base import Drafter
from draftproof.errors import BadInput
from draftproof.requests.stats import Round, State

DEBT = 3.0          # plain steps that may be lost
CREDIT = 12.0       # earlier gains, in plain steps, that may be lost again
RATE = 0.01         # share of plain decoding's time that repays the debt
PEEK_RATE = 0.01    # share of a cooldown's time in which the drafter is asked nevertheless
PEEK_SPEEDUP = 1.1  # a draft is read in a cooldown if this speed-up is expected
KEPT = 0.98         # decay of counts per draft
POOL = 4.0          # weight of the prior of a node's acceptance, in rounds
MEMORY = 16         # rounds that seconds are averaged over, and of a cooldown
STALE = 128         # rounds without a plain one after which a plain round is measured again
NEW = 3             # first rounds of a size, which may include warm-up
SPREAD = 1.25       # normal variation of rounds of one size, as a factor
RECENT = 8          # rounds that show how fast the machine is
CONFIRM = 3         # plain rounds that can refute a change of its speed
LEAST = 1 / 256     # plain steps to read a node, at least
CATCH_UP = 8        # more unread tokens per row than this are charged separately


class Budget(ABC):
    """How many tokens to draft: `choose` before each round, `record` after it.

    Texts never depend on it (under rules that need draft probabilities, their distribution does
    not).

    max_draft_tokens: the most it ever chooses. min_confidence: no path goes on that is less likely
    to be accepted. cooldown: coming rounds without drafts, for which `choose` is not called.
    """

    max_draft_tokens: int
    min_confidence: float = 0.0
    cooldown: int = 0

    most = FormerName("max_draft_tokens")
    floor = FormerName("min_confidence")
    rest = FormerName("cooldown")

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        adopt_former_names(cls)

    @abstractmethod
    def choose(self, state: State) -> int:
        """Choose the number of draft tokens per row for the next round.

        Args:
            state: The batch before the round.

        Returns:
            Nodes to draft per row; 0 for none.
        """

    def peek(self, state: State) -> int:
        """Choose whether to ask the drafter during a cooldown. Its draft is read only as far as
        `worth_reading` says.

        Args:
            state: The batch before the round.

        Returns:
            Nodes to ask for, per row; 0 for none. Default: none.
        """
        return 0

    def worth_reading(self, confidence: Sequence[float]) -> int:
        """Choose how much to read of a draft that was made during a cooldown.

        Args:
            confidence: Of each node, the average over rows.

        Returns:
            A size; 0 for a plain round. The cooldown ends with any other. Default: 0.
        """
        return 0

    def at_most(self, count: int) -> int:
        """The largest size within a limit, among those it chooses from.

        Args:
            count: Draft tokens per row.

        Returns:
            The largest size that is not above `count`. Default: `count` itself.
        """
        return count

    def record(self, done: Round) -> None:
        """Learn from the round that `choose` was called for. Default: nothing.

        Args:
            done: Its draft size, accepted nodes and seconds.
        """


class Fixed(Budget):
    """The same number of draft tokens per row each round; fewer below `min_confidence`."""

    @former_keywords(floor="min_confidence")
    def __init__(self, count: int, min_confidence: float = 0.0) -> None:
        if count < 0 or not 0 <= min_confidence < 1:
            values = f"{count} draft tokens with a min_confidence of {min_confidence} were given"
            raise BadInput(f"{values}; the first is 0 or more, the second from 0 to below 1")
        self.max_draft_tokens, self.min_confidence = count, min_confidence

    def choose(self, state: State) -> int:
        return self.max_draft_tokens


class Costs:
    """Average seconds of a round, by index of its size. Sizes without measurements are scaled from
    `like`."""

    def __init__(self, sizes: Sequence[int], like: Costs | None = None) -> None:
        self.sizes, self.like, self.since_plain = sizes, like, 0
        self.mean, self.seen = [0.0] * len(sizes), [0] * len(sizes)
        self.late = [False, False]                              # the last plain round, or draft
        self.doubts: list[float] | None = None                  # plain rounds while drafts are odd

    def add(self, index: int, seconds: float) -> None:
        """Add the seconds of one round.

        In the first rounds of a size, more than twice the expected time counts only if it happens
        twice in a row. Later, outliers are capped near the known time, since they may be stalls."""
        known = self.mean[index] or (self.estimate(index) if self.mean[0] else seconds)
        new = self.seen[index] < NEW
        late, drafted = new and seconds > 2 * known, index > 0
        doubted, self.late[drafted] = self.late[drafted], late
        if late and not doubted:
            return
        self.seen[index] += 1
        sudden = late or seconds < known / (1 if new else 2)           # first: warm-up
        rounds = 1 if sudden else min(self.seen[index], MEMORY if index else MEMORY // 4)
        seconds = min(seconds, (2 if new else SPREAD) * known)
        self.mean[index] += (seconds - self.mean[index]) / rounds
        self.mean[0] = min(self.mean[0], self.mean[index])      # a plain round is the cheapest
        if index == 0 and self.like is not None and self.seen[0] == 2:
            factor = self.mean[0] / self.like.mean[0]
            pairs = zip(self.mean, self.like.mean, strict=True)
            self.mean = [mine or theirs * factor for mine, theirs in pairs]

    def estimate(self, index: int) -> float:
        """Seconds of a round: measured, or extrapolated from the nearest measured sizes. If only
        one draft size is measured, half of its extra cost counts as the fixed cost of drafting."""
        if self.mean[index]:
            return self.mean[index]
        known = [pair for pair in zip(self.sizes, self.mean, strict=True) if pair[1]]
        plain, (size, mean) = self.mean[0], known[-1]
        each = max(plain / MEMORY, (mean - plain) / 2 / max(1, size))
        if len(known) > 2:
            right = min(max(2, bisect_left(known, (self.sizes[index],))), len(known) - 1)
            (size, mean), (larger, longer) = known[right - 1 : right + 1]
            each = (longer - mean) / (larger - size)
        return max(plain, mean + each * (self.sizes[index] - size))


class Adaptive(Budget):
    """Drafts the size that gives the most tokens per second. What it learns outlasts a call.

    max_draft_tokens: the most nodes per row. debt, rate: it may lose `debt` plain steps against
    plain decoding before it stops, and `rate` of plain decoding's time. sizes: to choose from,
    beginning with 0.
    """

    @former_keywords(most="max_draft_tokens", floor="min_confidence")
    def __init__(self, max_draft_tokens: int, *, debt: float = DEBT, rate: float = RATE,
                 min_confidence: float = 0.1, sizes: Sequence[int] | None = None) -> None:
        if min(max_draft_tokens, debt, rate) < 0:
            values = f"{max_draft_tokens} draft tokens, a debt of {debt} and a rate of {rate}"
            raise BadInput(f"{values} were given; none may be negative")
        self.max_draft_tokens, self.min_confidence = max_draft_tokens, min_confidence
        self.limit, self.rate = debt, rate
        self.sizes = tuple(sizes) if sizes is not None else presets(max_draft_tokens)
        self.widths = [high - low for low, high in pairwise(self.sizes)]    # nodes added
        self.accepted, self.offered = [0.0] * len(self.widths), [0.0] * len(self.widths)
        self.hits, self.tries, self.chain = 0.0, 0.0, True    # over all nodes; only chains so far
        self.costs: dict[tuple[int, int], Costs] = {}           # by rows and context
        self.now, self.unread = Costs(self.sizes), 0            # of the coming round
        self.ratios = deque([1.0] * RECENT, RECENT)             # seconds of rounds / known seconds
        self.debt, self.repayment = 0.0, rate                   # plain steps; per plain step
        self.draft_seconds, self.since_asked = 0.0, 0           # of a proposal; rounds since it
        self.peek_credit, self.peek_limit = 0.0, 0.0    # plain steps; seconds charged for this peek
        self.per_node = 1 / MEMORY                              # plain steps to read a node
        self.per_unread = 0.0                                   # seconds per token caught up
        self.catch_up_cost = 0.0                                # the same in plain steps, in all

    def choose(self, state: State) -> int:
        self.peek_limit = 0.0                                      # if its round failed
        if self.cooldown:
            return 0
        rows, context, left, unread = state
        shape = (rows - 1).bit_length(), (context >> 9).bit_length()
        if shape not in self.costs:
            self.costs[shape] = Costs(self.sizes, self.now if self.now.seen[0] else None)
        now = self.now = self.costs[shape]
        self.unread = unread if unread > CATCH_UP * rows else 0
        measured = now.since_plain < min(STALE, MEMORY * (now.seen[0] - 1))     # and not long ago
        if not measured or left <= 1 or not self.widths:
            return 0
        price, size = self._best(left)
        plain, catch_up = now.mean[0], self.unread * self.per_unread
        gain = plain / (price + catch_up / left)
        self.repayment = self.rate * min(1.0, gain) ** 2    # the less it pays, the less it is tried
        allowed = self.limit if gain > 1 + self.rate else 0.0 if catch_up < left * plain else -inf
        if self.debt < allowed + (0 if catch_up else self.catch_up_cost):
            return size
        self.cooldown = min(MEMORY, int(left))
        return 0

    def peek(self, state: State) -> int:
        plain, self.since_asked = self.now.mean[0], self.since_asked + 1
        price = self.draft_seconds * (1 + self.since_asked / MEMORY)    # it learns these rounds
        due = state.unread == 0 < price <= (self.peek_credit + PEEK_RATE * self.since_asked) * plain
        if not due or state.remaining <= 1 or self.debt >= self.limit:
            return 0
        self.peek_limit = 4 * price                                # more is a stall
        return self.max_draft_tokens

    def worth_reading(self, confidence: Sequence[float]) -> int:
        expected, size, tokens = PEEK_SPEEDUP, 0, [1.0]
        for chance in sorted(confidence, reverse=True):
            tokens.append(tokens[-1] + chance)
        for candidate in self.sizes[1:]:
            nodes = min(candidate, len(confidence))
            speedup = tokens[nodes] / (1 + self.per_node * nodes)
            if speedup > expected:
                expected, size = speedup, candidate
        self.cooldown = 0 if size else self.cooldown
        return size

    def _best(self, left: float) -> tuple[float, int]:
        """Seconds per token of the best size, and this size. Sizes more than twice as large as any
        measured one are not considered."""
        known = max(compress(self.sizes, self.now.mean))
        return min(
            (self.now.estimate(index) / min(tokens, left), size)
            for index, (size, tokens) in enumerate(zip(self.sizes, self._tokens(), strict=True))
            if index == 1 or 0 < size <= 2 * known + 1
        )

    def _tokens(self) -> list[float]:
        """Expected tokens per row for each size, from how often the nodes that it adds were
        accepted.
        For nodes seldom drafted, acceptance is assumed to fall geometrically (chains) or as
        1 / number (trees)."""
        ratio, chance, before, total = (self.hits + 2) / (self.tries + 3), 1.0, 0.0, [1.0]
        for size, width, accepted, offered in zip(self.sizes, self.widths, self.accepted,
                                                  self.offered, strict=False):
            middle = size + (width + 1) / 2
            chance *= ratio ** (middle - before) if self.chain or not before else before / middle
            chance = (accepted / width + POOL * chance) / (offered + POOL)
            total.append(total[-1] + width * chance)
            before = middle
        return total

    def at_most(self, count: int) -> int:
        return self.sizes[bisect_right(self.sizes, count) - 1]

    def record(self, done: Round) -> None:
        self.cooldown = max(0, self.cooldown - 1)
        if self.peek_limit:
            seconds = min(done.draft_seconds, self.peek_limit)
            self.peek_credit += PEEK_RATE * self.since_asked - seconds / self.now.mean[0]
            self.peek_limit, self.since_asked = 0.0, 0
        if self.cooldown:
            self.debt -= self.repayment
            self._follow_machine(0, done.seconds)
            return
        now, index = self.now, self.sizes.index(done.size)
        if index or now.doubts is None:
            now.since_plain = now.since_plain + 1 if index else 0
        if index:
            self._count(done)
            self._time_nodes(done)
            self.since_asked = 0
        if index and self.unread and done.seconds:
            each = max(0.0, done.seconds - now.estimate(index)) / self.unread
            known = self.per_unread or each
            self.per_unread = known + (min(each, 4 * known) - known) / 4
            self.catch_up_cost = self.unread * self.per_unread / now.mean[0]
            self.debt += self.catch_up_cost
        elif done.seconds and self._follow_machine(index, done.seconds):
            now.add(index, done.seconds)
        steps = now.estimate(index) / now.mean[0] if index else 1.0
        debt = self.debt + steps - (1 + self.repayment) * done.emitted / done.rows
        self.debt = max(-CREDIT, min(CREDIT, debt))             # the machine may have stalled

    def _follow_machine(self, index: int, seconds: float) -> bool:
        """Scale all costs when rounds of all sizes become slower or faster.

        A stall lengthens one round, a busy machine all of them. So the change is the second
        smallest ratio of the last rounds to their known seconds. If drafted rounds show a change,
        plain rounds must confirm it; otherwise only the drafts have changed.

        Returns:
            Whether the round counts as a measurement of its size.
        """
        now = self.now
        if now.seen[index] < NEW or not seconds:
            return True
        ratio = seconds / now.mean[index]
        if index == 0 and now.doubts is not None:
            now.doubts.append(ratio)
            if _alike(ratio):
                now.doubts, now.since_plain = None, 0
                return True
            if len(now.doubts) == CONFIRM:                      # only the drafts have changed
                now.mean[0] *= sorted(now.doubts)[CONFIRM // 2]
                now.doubts, now.since_plain = None, 0
            return False
        self.ratios.append(ratio)
        change = sorted(self.ratios)[1]
        if not _alike(change):
            for costs in self.costs.values():
                costs.mean = [change * mean for mean in costs.mean]
            self.ratios.extend([ratio / change for ratio in self.ratios])
            if index:
                now.doubts, now.since_plain = [], STALE
            return False
        return True

    def _time_nodes(self, done: Round) -> None:
        """Average the seconds of a proposal, and those of reading a node."""
        plain, known = self.now.mean[0], self.draft_seconds or done.draft_seconds
        self.draft_seconds = known + (min(done.draft_seconds, 4 * known) - known) / 4
        if done.drafted and plain:
            each = ((done.seconds - done.draft_seconds) / plain - 1) * done.rows / done.drafted
            each = min(max(each, LEAST), 4 * self.per_node)
            self.per_node += (each - self.per_node) / 4

    def _count(self, done: Round) -> None:
        """Count the accepted nodes, by the size that added them."""
        self.accepted = [KEPT * count for count in self.accepted]
        self.offered = [KEPT * count + done.rows * (done.size > below)
                        for count, below in zip(self.offered, self.sizes, strict=False)]
        for node in done.accepted:
            self.accepted[bisect_left(self.sizes, node) - 1] += 1
        hits, ends = len(done.accepted), done.rows - done.accepted.count(done.size)
        self.hits, self.tries = KEPT * self.hits + hits, KEPT * self.tries + hits + ends
        self.chain = self.chain and done.chain


def _alike(ratio: float) -> bool:
    """Whether rounds take about as long as before."""
    return 1 / SPREAD < ratio < SPREAD


def presets(largest: int) -> tuple[int, ...]:
    """Draft sizes to choose from: 0, 1, 2, 3, 5, 7, 10, 14, 20, ... and `largest`."""
    sizes = [0, 1, 2, 3, *(round(5 * 2 ** (step / 2)) for step in range(2 * largest.bit_length()))]
    return (*(size for size in sizes if size < largest), largest)


def usual_budget(drafter: Drafter) -> Budget:
    """The budget if none is given: adaptive, or none for a drafter that drafts nothing."""
    return Adaptive(drafter.max_draft_tokens) if drafter.max_draft_tokens else Fixed(0)
