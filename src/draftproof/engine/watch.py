"""Rounds, watched: tells a budget what lies ahead and what came of it. Knows decoder and clock; decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from statistics import median
from typing import NamedTuple

from draftproof.core.tree import TokenTree
from draftproof.engine.budget import Ahead, Learner, Round
from draftproof.engine.decoder import Decoder
from draftproof.engine.sequence import SequenceState
from draftproof.engine.stats import Clock, RoundStats

CONTEXT, FORETOLD, EVERY = 3, 5, 4
"""A row that ends as it went on before repeats itself: by so many tokens it could have been seen, so many more were the same.
And after how many rounds of a rest it is looked at again."""


class _Glimpse(NamedTuple):
    """A proposal that nobody reads: the tree, the budget it had, the rows, and how much each had written."""

    tree: TokenTree
    nodes: int
    rows: list[SequenceState]
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


class _Counts(NamedTuple):
    """Where decoding stands: what was emitted, drafted and reached so far, and by each running row."""

    emitted: int
    drafted: int
    reached: int
    written: list[tuple[SequenceState, int]]


class Watch:
    """Runs the rounds of a decoder, and lets its budget learn from them if it is a learner.

    The time a budget takes to think is counted as drafting, and told with the next round.
    """

    def __init__(self, decoder: Decoder, learner: Learner | None, clock: Clock) -> None:
        self.decoder, self.learner, self.clock = decoder, learner, clock
        self._round = clock.timed(decoder.step, "decide")
        self._think = clock.timed(self._asked, "draft")
        self._before_round, self._behind_round = clock.timed(self._prepare, "draft"), clock.timed(self._conclude, "draft")
        self._looks = decoder.drafter.free                      # proposals may be compared that nobody reads
        self._spent: tuple[float, float] | None = None          # up to the round before, if that was watched
        self._afterthought = 0.0                                # seconds of thought behind the last watched round
        self._before: tuple[list[int], list[int]] = ([], [])
        self._glimpse: _Glimpse | None = None
        self._rows, self._plain = list[SequenceState](), 0.0          # of the last round that was asked for; its plain step
        self._since = _Counts(0, 0, 0, [])                      # behind the last round that was told
        self._left = self._nodes = 0                            # rounds to come that nobody asks for; what they draft
        self._aside: int | None = None                          # what a round drafts that reads prompts besides
        self._took, self._given = list[float](), list[int]()    # of those over: seconds, and tokens
        self._stood: list[int] | None = []                      # and the nodes that stood

    def takes(self, joining: Sequence[Sequence[SequenceState]]) -> bool:
        """Whether the coming round may read the prompts of these requests besides; ask before `step` alone."""
        if not self.decoder.takes(joining):
            return False
        if self.learner is None:
            return True
        self.wake()
        self._aside = self.learner.steady(self._ahead(self.decoder.running))
        return self._aside is not None

    def step(self, joining: Sequence[Sequence[SequenceState]] = ()) -> None:
        """One round. joining: requests that `takes` allows, their prompts to be read in it."""
        learner, rows = self.learner, self._rows
        if learner is None:
            self._round(None, joining)
        elif joining:
            self._joined(learner, joining)
        elif self._left and self.decoder.running is rows and len(rows) == len(self._since.written):
            self._unasked(rows)
        else:
            self._think(learner)
            if self._spent is not None:
                self._afterthought = self.clock.seconds["draft"] - self._spent[1]

    def wake(self) -> None:
        """Account for the rounds of a rest or a hold, which nobody asked for."""
        if self._took and self.learner is not None:
            rounds, seconds = len(self._took), median(self._took)
            if self._nodes:
                rows = len(self._since.written) * rounds
                with self.clock.part("draft"):
                    self.learner.held(self._round_since(rows, seconds, nodes=self._stood), self._given)
            else:
                self.learner.rested(rounds, seconds)
            self._reckon()
            self._spent = None
        self._left, self._took, self._given, self._stood = 0, [], [], []

    def _unasked(self, rows: list[SequenceState]) -> None:
        """A round of the same rows and with as many nodes as the one before: nothing is done but what a fixed number does."""
        decoder, clock, nodes = self.decoder, self.clock, self._nodes
        self._left -= 1
        before, emitted = clock.total, decoder.stats.emitted if nodes else 0
        self._round(nodes)
        self._took.append(clock.total - before)
        if nodes:
            self._given.append(decoder.stats.emitted - emitted)
            self._stood = None if self._stood is None or decoder.stood is None else self._stood + decoder.stood
        if decoder.running is not rows:
            self.wake()
        elif self._looks and not nodes:
            self._look_back()

    def _joined(self, learner: Learner, joining: Sequence[Sequence[SequenceState]]) -> None:
        """A round like those before it, but that it takes longer: prompts are read in it."""
        self._since, rows, nodes = self._counts(), len(self.decoder.running), self._aside
        self._plain = learner.plain_step
        self._round(nodes, joining)
        if nodes:
            stood = self.decoder.stood
            with self.clock.part("draft"):
                learner.held(self._round_since(rows, 0.0, nodes=stood), [self.decoder.stats.emitted - self._since.emitted])
        else:
            learner.rested(1, 0.0)
        self._reckon()
        self._spent = None

    def _look_back(self) -> None:
        """Whether what was just written shows that a drafter might have known it."""
        if self._glimpse is not None and self._glimpse.ripe:
            with self.clock.part("draft"):
                self._stir(self._glimpse.nodes, self._glimpse.compared())
                self._glimpse = None
        elif len(self._took) % EVERY == 0:
            with self.clock.part("draft"):
                if (repeating := self.decoder.repeating(CONTEXT + FORETOLD)):
                    self._stir(FORETOLD, self._hindsight(repeating))

    def _stir(self, nodes: int, seen: Round) -> None:
        """What was seen during a rest may end it."""
        self.wake()
        assert self.learner is not None, "nobody else rests"
        self.learner.glimpse(nodes, seen)
        self._left = self.learner.resting

    def _hindsight(self, repeating: int) -> Round:
        """What would have stood if the rows that repeat themselves, so many of all, had been drafted for."""
        rows, right = len(self._rows), [*range(1, 1 + FORETOLD)] * repeating
        tried = [rows, *[repeating] * (FORETOLD - 1)]
        return Round(rows, tried, [repeating] * FORETOLD, chain=True, emitted=0, seconds=0.0, nodes=right)

    def _asked(self, learner: Learner) -> None:
        """A round that the budget decides, if no rest goes on. All that it takes besides is counted as drafting."""
        self.wake()
        self._rows, self._since = self.decoder.running, self._counts()
        if any(row.stats.rounds == 0 for row in self._rows):
            learner.begin()
        if learner.resting:
            self._plain, self._nodes, self._left = learner.plain_step, 0, learner.resting
            self._unasked(self._rows)
            return
        self._watched(learner, [row for row, _ in self._since.written])
        self._plain, self._nodes = learner.plain_step, self.decoder.allowed
        self._left = learner.holding if self._nodes else learner.resting
        self._reckon()

    def _reckon(self) -> None:
        """What plain decoding would have taken for these."""
        for row, emitted in self._since.written:
            row.stats.plain_seconds += self._plain * (row.stats.emitted - emitted)
        self._since = self._counts()

    def _counts(self) -> _Counts:
        stats = self.decoder.stats
        return _Counts(stats.emitted, stats.drafted, stats.reached, [(row, row.stats.emitted) for row in self.decoder.running])

    def _watched(self, learner: Learner, rows: list[SequenceState]) -> None:
        before = self._spent or self._spend(less=self._afterthought)
        self._before_round(learner, rows)
        thought = self.clock.seconds["draft"]
        self._round(self._nodes)
        self._spent = self._spend()
        beside = (thought if self._nodes else self._spent[1]) - before[1]
        self._behind_round(learner, rows, self._spent[0] - before[0], beside)

    def _prepare(self, learner: Learner, rows: list[SequenceState]) -> None:
        learner.expect(self._ahead(rows))
        if self._looks:
            self._look(learner, rows)
        self._nodes = self.decoder.budget.nodes(self.decoder.stats, len(rows))

    def _conclude(self, learner: Learner, rows: list[SequenceState], seconds: float, drafting: float) -> None:
        learner.learn(self._round_since(len(rows), seconds, drafting, self.decoder.stood))

    def _round_since(self, rows: int, seconds: float, drafting: float = 0.0, nodes: list[int] | None = None) -> Round:
        """What the rounds that were not told yet were, as one."""
        stats, then = self.decoder.stats, self._since
        tried, stood = self._added(stats) if stats.drafted > then.drafted else ([], [])
        chain = stats.drafted - then.drafted == stats.reached - then.reached and not self.decoder.shared
        return Round(rows, tried, stood, chain, stats.emitted - then.emitted, seconds, drafting, nodes)

    def _spend(self, less: float = 0.0) -> tuple[float, float]:
        """Seconds so far: of all but prefill, and of drafting; `less` of both."""
        return self.clock.total - self.clock.seconds["prefill"] - less, self.clock.seconds["draft"] - less

    def _ahead(self, rows: list[SequenceState]) -> Ahead:
        remaining = sum(row.limit - len(row.tokens) for row in rows) / len(rows)
        context = max(len(row.prompt) + len(row.tokens) for row in rows)
        return Ahead(len(rows), context, remaining, self.decoder.unread)

    def _look(self, learner: Learner, rows: list[SequenceState]) -> None:
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
