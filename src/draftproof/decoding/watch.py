"""Rounds, watched: tells a budget what lies ahead and what came of it. Knows decoder and clock; decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from draftproof.core.tree import TokenTree
from draftproof.decoding.budget import Ahead, Learner, Round
from draftproof.decoding.decoder import Decoder
from draftproof.decoding.sequence import Running
from draftproof.decoding.stats import Clock


class _Glimpse(NamedTuple):
    """A proposal that nobody reads: the tree, its tokens per row, the rows, how much each had written, what it took."""

    tree: TokenTree
    nodes: int
    rows: list[Running]
    written: list[int]
    seconds: float


class Watch:
    """Runs the rounds of a decoder, and lets its budget learn from them if it is one that learns."""

    def __init__(self, decoder: Decoder, clock: Clock) -> None:
        self.decoder, self.clock = decoder, clock
        self.learner = decoder.budget if isinstance(decoder.budget, Learner) else None
        self._glimpse: _Glimpse | None = None

    def step(self) -> None:
        """One round."""
        if self.learner is None:
            self._round()
            return
        rows, stats = list(self.decoder.running), self.decoder.stats
        self.learner.expect(self._ahead(rows))
        self._look(rows)
        written = [row.stats.emitted for row in rows]
        start, drafting = self.clock.total, self.clock.seconds["draft"]
        before = replace(stats, tried_at=list(stats.tried_at), accepted_at=list(stats.accepted_at))
        self._round()
        done = Round(
            rows=len(rows),
            tried=_added(before.tried_at, stats.tried_at),
            stood=_added(before.accepted_at, stats.accepted_at),
            chain=stats.drafted - before.drafted == stats.reached - before.reached,
            emitted=stats.emitted - before.emitted,
            seconds=self.clock.total - start,
            drafting=self.clock.seconds["draft"] - drafting,
        )
        self.learner.learn(done)
        for row, count in zip(rows, written, strict=True):
            row.stats.plain_seconds += self.learner.plain_step * (row.stats.emitted - count)

    def _round(self) -> None:
        with self.clock.part("decide"):
            self.decoder.step()

    def _ahead(self, rows: list[Running]) -> Ahead:
        remaining = sum(row.limit - len(row.tokens) for row in rows) / len(rows)
        context = max(len(row.prompt) + len(row.tokens) for row in rows)
        return Ahead(len(rows), context, remaining, self.decoder.drafter.unread)

    def _look(self, rows: list[Running]) -> None:
        """Compare what was proposed for comparison, or let a free drafter propose if the budget is curious."""
        assert self.learner is not None
        if self._glimpse is not None:
            if all(len(row.tokens) - size >= self._glimpse.tree.depth_limit or row.finish_reason is not None
                   for row, size in zip(self._glimpse.rows, self._glimpse.written, strict=True)):  # fmt: skip
                self.learner.glimpse(self._glimpse.nodes, _compared(self._glimpse))
                self._glimpse = None
            return
        nodes = self.learner.curiosity() if self.decoder.drafter.free else 0
        if nodes:
            start = self.clock.total
            with self.clock.part("decide"):
                tree = self.decoder.preview(nodes)
            self._glimpse = _Glimpse(tree, nodes, rows, [len(row.tokens) for row in rows], self.clock.total - start)


def _compared(glimpse: _Glimpse) -> Round:
    """What would have stood, of the rows that wrote on long enough to say."""
    found = []
    trees = zip(glimpse.tree.tokens.tolist(), glimpse.tree.parents.tolist(), strict=True)
    for (tokens, parents), row, size in zip(trees, glimpse.rows, glimpse.written, strict=True):
        depth = _stands(tokens, parents, row.tokens[size:])
        if len(row.tokens) - size > depth or depth == glimpse.tree.depth_limit:
            found.append(depth)
    levels = range(glimpse.tree.depth_limit)
    tried = [sum(depth >= level for depth in found) for level in levels]
    stood = [sum(depth > level for depth in found) for level in levels]
    return Round(len(found), tried, stood, glimpse.tree.is_chain, emitted=0, seconds=glimpse.seconds)


def _stands(tokens: Sequence[int], parents: Sequence[int], text: Sequence[int]) -> int:
    """How deep a tree of one row agrees with the text behind its root."""
    node = 0
    for depth, wanted in enumerate(text):
        below = [child for child in range(node + 1, len(tokens)) if parents[child] == node and tokens[child] == wanted]
        if not below:
            return depth
        node = below[0]
    return len(text)


def _added(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """What was added to counts by position."""
    return [now - (before[place] if place < len(before) else 0) for place, now in enumerate(after)]
