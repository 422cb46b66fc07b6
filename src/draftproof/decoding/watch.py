"""Rounds, watched: tells a budget what lies ahead and what came of it. Knows decoder and clock; decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from statistics import median
from typing import NamedTuple

from draftproof.core.tree import TokenTree
from draftproof.decoding.budget import Ahead, Budget, Learner, Round
from draftproof.decoding.decoder import Decoder
from draftproof.decoding.sequence import Running
from draftproof.decoding.stats import Clock, RoundStats

CONTEXT, FORETOLD, EVERY = 3, 5, 4
"""A row that ends as it went on before repeats itself: by so many tokens it could have been seen, so many more were the same.
And after how many rounds of a rest it is looked at again."""


class _Glimpse(NamedTuple):
    """A proposal that nobody reads: the tree, the budget it had, the rows, and how much each had written."""

    tree: TokenTree
    nodes: int
    rows: list[Running]
    written: list[int]

    @property
    def ripe(self) -> bool:
        """Whether every row has written on as far as the tree goes, or ended."""
        depth = self.tree.depth_limit
        pairs = zip(self.rows, self.written, strict=True)
        return all(len(row.tokens) - size >= depth or row.finish_reason is not None for row, size in pairs)

    def compared(self) -> Round:
        """What would have stood, of the rows that wrote on long enough to say."""
        found, depth, numbers = [], self.tree.depth_limit, list[int]()
        trees = zip(self.tree.tokens.tolist(), self.tree.parents.tolist(), strict=True)
        for (tokens, parents), row, size in zip(trees, self.rows, self.written, strict=True):
            nodes = _standing(tokens, parents, row.tokens[size:])
            if len(row.tokens) - size > len(nodes) or len(nodes) == depth:
                found.append(len(nodes))
                numbers += nodes
        tried = [sum(stands >= level for stands in found) for level in range(depth)]
        stood = [sum(stands > level for stands in found) for level in range(depth)]
        told = numbers if self.tree.ranked or self.tree.is_chain else None
        return Round(len(found), tried, stood, self.tree.is_chain, emitted=0, seconds=0.0, nodes=told)


class Watch:
    """Runs the rounds of a decoder, and lets its budget learn from them if it is one that learns.

    The time a budget takes to think is counted as drafting, and told with the next round.
    """

    def __init__(self, decoder: Decoder, budget: Budget, clock: Clock) -> None:
        self.decoder, self.clock = decoder, clock
        self._round = clock.timed(decoder.step, "decide")
        self.learner = budget if isinstance(budget, Learner) else None
        self._spent: tuple[float, float] | None = None          # up to the round before, if that was watched
        self._learning = 0.0                                    # seconds that the last watched round was learned from
        self._before: tuple[list[int], list[int]] = ([], [])
        self._glimpse: _Glimpse | None = None
        self._rows, self._count, self._plain = list[Running](), 0, 0.0          # of the last round; its plain step
        self._left, self._rested = 0, list[float]()             # rounds of a rest: those to come, seconds of those over

    def step(self) -> None:
        """One round."""
        learner = self.learner
        if learner is None:
            self._round()
        elif self._left and self.decoder.running is self._rows and len(self._rows) == self._count:
            self._rest()
        else:
            self.wake()
            self._asked(learner)

    def wake(self) -> None:
        """Account for the rounds of a rest, which nobody asked for."""
        if self._rested and self.learner is not None:
            self.learner.rested(len(self._rested), median(self._rested))
            for row in self._rows:
                row.stats.plain_seconds += self._plain * len(self._rested)
            self._spent = None
        self._left, self._rested = 0, []

    def _rest(self) -> None:
        """A plain round of the same rows as before: nothing is done but what plain decoding does."""
        self._left -= 1
        before = self.clock.total
        self._round(plain=True)
        self._rested.append(self.clock.total - before)
        if self.decoder.running is not self._rows:
            self.wake()
        elif self._glimpse is not None and self._glimpse.ripe:
            with self.clock.part("draft"):
                self._stir(self._glimpse.nodes, self._glimpse.compared())
                self._glimpse = None
        elif self.decoder.drafter.free and len(self._rested) % EVERY == 0:
            with self.clock.part("draft"):
                if (repeating := self.decoder.repeating(CONTEXT + FORETOLD)):
                    self._stir(FORETOLD, self._hindsight(repeating))

    def _stir(self, nodes: int, seen: Round) -> None:
        """What was seen during a rest may end it."""
        self.wake()
        assert self.learner is not None, "nobody else rests"
        self.learner.glimpse(nodes, seen)
        self._left = max(0, self.learner.resting - 1)

    def _hindsight(self, repeating: int) -> Round:
        """What would have stood if the rows that repeat themselves, so many of all, had been drafted for."""
        rows, right = len(self._rows), [*range(1, 1 + FORETOLD)] * repeating
        tried = [rows, *[repeating] * (FORETOLD - 1)]
        return Round(rows, tried, [repeating] * FORETOLD, chain=True, emitted=0, seconds=0.0, nodes=right)

    def _asked(self, learner: Learner) -> None:
        """A round that the budget decides."""
        rows = self._rows = self.decoder.running
        self._count = len(rows)
        written = [(row, row.stats.emitted) for row in rows]
        if any(row.stats.rounds == 0 for row, _ in written):
            learner.begin()
        if learner.resting:
            self._round()
            self._spent = None
        else:
            self._watched(learner, [row for row, _ in written])
        self._plain, self._left = learner.plain_step, max(0, learner.resting - 1)
        for row, count in written:
            row.stats.plain_seconds += self._plain * (row.stats.emitted - count)

    def _watched(self, learner: Learner, rows: list[Running]) -> None:
        stats, before = self.decoder.stats, self._spent or self._spend(less=self._learning)
        emitted, drafted, reached = stats.emitted, stats.drafted, stats.reached
        with self.clock.part("draft"):
            learner.expect(self._ahead(rows))
            if self.decoder.drafter.free:
                self._look(learner, rows)
        self._round()
        self._spent = self._spend()
        seconds, drafting = (now - then for now, then in zip(self._spent, before, strict=True))
        with self.clock.part("draft"):
            tried, stood = self._added(stats) if stats.drafted > drafted else ([], [])
            chain = stats.drafted - drafted == stats.reached - reached and not self.decoder.shared
            given = stats.emitted - emitted
            learner.learn(Round(len(rows), tried, stood, chain, given, seconds, drafting, self.decoder.stood))
        self._learning = self.clock.seconds["draft"] - self._spent[1]

    def _spend(self, less: float = 0.0) -> tuple[float, float]:
        """Seconds so far: of all but prefill, and of drafting; `less` of both."""
        return self.clock.total - self.clock.seconds["prefill"] - less, self.clock.seconds["draft"] - less

    def _ahead(self, rows: list[Running]) -> Ahead:
        remaining = sum(row.limit - len(row.tokens) for row in rows) / len(rows)
        context = max(len(row.prompt) + len(row.tokens) for row in rows)
        return Ahead(len(rows), context, remaining, self.decoder.unread)

    def _look(self, learner: Learner, rows: list[Running]) -> None:
        """Let a free drafter propose for comparison, if the budget is curious; compare it when the text is there."""
        if self._glimpse is not None and self._glimpse.ripe:
            learner.glimpse(self._glimpse.nodes, self._glimpse.compared())
            self._glimpse = None
        if self._glimpse is None:
            nodes = learner.curiosity()
            if nodes:
                self._glimpse = _Glimpse(self.decoder.preview(nodes), nodes, rows, [len(row.tokens) for row in rows])

    def _added(self, stats: RoundStats) -> tuple[list[int], list[int]]:
        """What was tried and stood since the last round that drafted, by depth."""
        before, self._before = self._before, (list(stats.tried_at), list(stats.accepted_at))
        tried, stood = ([now - old for now, old in zip_longest(new, last, fillvalue=0)]
                        for new, last in zip(self._before, before, strict=True))  # fmt: skip
        return tried, stood


def _standing(tokens: Sequence[int], parents: Sequence[int], text: Sequence[int]) -> list[int]:
    """The nodes of a tree of one row that agree with the text behind its root."""
    path = [0]
    for wanted in text:
        below = [child for child in range(path[-1] + 1, len(tokens)) if parents[child] == path[-1] and tokens[child] == wanted]
        if not below:
            break
        path.append(below[0])
    return path[1:]
