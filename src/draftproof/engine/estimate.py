"""How deep drafts stand: discounted counts by depth, and a draw of what they let expect. Knows no costs."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import pairwise
from random import Random

from draftproof.engine.budget import Round

FORGET, FORGET_PLAIN = 0.99, 0.98 ** (1 / 16)
"""What is left of every count after a round that drafted, and after one that did not."""
POOL = 4.0
"""Observations that the pooled rate counts for at each depth, and what is supposed of further nodes, in rounds."""
HOPE = (2.0, 1.0)
"""Tokens that stood and that did not, imagined before the first: rather too much hope, for what it costs is bounded."""
DOUBT = 0.5
"""Draws lie so many standard deviations of the posterior around its mean: enough not to be stuck with early bad luck."""
BREADTH = 0.25
"""A tree of four times the nodes fails at a depth 4^-BREADTH times as often, as long as its own counts say nothing."""


class Counts:
    """By depth, how often a drafted token was tried and how often it stood; fading."""

    def __init__(self) -> None:
        self.tried: list[float] = []
        self.stood: list[float] = []
        self._worth = 1.0                               # of what is added; instead of fading all, new counts grow

    def add(self, tried: Sequence[float], stood: Sequence[float]) -> None:
        missing = len(tried) - len(self.tried)
        self.tried += [0.0] * missing
        self.stood += [0.0] * missing
        for depth, (tries, hits) in enumerate(zip(tried, stood, strict=True)):
            self.tried[depth] += tries * self._worth
            self.stood[depth] += hits * self._worth

    def fade(self, factor: float) -> None:
        self._worth /= factor
        if self._worth > 1e6:
            self.tried = [count / self._worth for count in self.tried]
            self.stood = [count / self._worth for count in self.stood]
            self._worth = 1.0

    def total(self) -> tuple[float, float]:
        """Of all depths: tried, and stood."""
        return sum(self.tried) / self._worth, sum(self.stood) / self._worth

    def rate(self, depth: int, prior: float, off: float) -> float:
        """The chance to stand at `depth`, given that all above stood, `off` standard deviations from what was counted;
        `prior` is worth `POOL` observations."""
        if depth >= len(self.tried):
            return prior
        tried = self.tried[depth] / self._worth
        seen = (self.stood[depth] / self._worth + 1) / (tried + 2)
        seen += off * math.sqrt(seen * (1 - seen) / (tried + 3))
        return min(1.0, max(0.0, (tried * seen + POOL * prior) / (tried + POOL)))

    def share(self, place: int, prior: float, pool: float, off: float) -> float:
        """What stood of what was tried at `place`, `off` standard deviations away; `prior` is worth `pool` observations."""
        tried, stood = (counts[place] / self._worth if place < len(counts) else 0.0 for counts in (self.tried, self.stood))
        seen = (stood + pool * prior) / (tried + pool)
        return min(1.0, max(0.0, seen + off * math.sqrt(seen * (1 - seen) / (tried + pool))))


class Acceptance:
    """What drafts of each of some sizes, 0 the first, let expect.

    Chains: a round of a long chain informs all shorter ones, so all share their counts by depth; a row that found
    nothing to draft failed at the first. Trees whose nodes are ranked: a large one informs of all smaller ones, its
    beginnings, so counts are by nodes that the next larger size adds. Other trees: each size has counts of its own, pulled
    towards those of all sizes.
    """

    def __init__(self, dice: Random, sizes: Sequence[int]) -> None:
        self.dice, self.sizes = dice, sizes
        self._steps = [high - low for low, high in pairwise(sizes)]
        self.chain = self.ranked = True                 # so far
        self.added = Counts()                           # by place in `sizes`, less 1
        self.together = Counts()
        self.alone: dict[int, Counts] = {}
        self._size = 0.0                                # nodes of a tree behind the pooled counts, mean logarithm

    def learn(self, nodes: int, done: Round) -> None:
        """Count a round that drafted `nodes` per row."""
        self.fade(FORGET)
        self.chain = self.chain and done.chain
        self.ranked = self.ranked and done.nodes is not None
        if self.chain:
            stood = [*done.stood, *[0] * nodes][:nodes]
            self.together.add([done.rows, *stood[:-1]], stood)
        elif self.ranked and done.nodes is not None:
            steps = self._steps[: bisect_left(self.sizes, nodes)]
            stood = [0] * len(steps)
            for node in done.nodes:
                if node <= self.sizes[len(steps)]:                              # a look may go beyond what is ever drafted
                    stood[bisect_left(self.sizes, node) - 1] += 1
            self.added.add([done.rows * step for step in steps], stood)
        else:
            stood = [*done.stood, 0][: max(1, len(done.tried))]
            tried = [done.rows, *done.tried[1:]]
            self.together.add(tried, stood)
            self.alone.setdefault(nodes, Counts()).add(tried, stood)
            self._size += (math.log(nodes) - self._size) * done.rows / max(sum(self.together.tried[:1]), done.rows)

    def fade(self, factor: float) -> None:
        """Forget a little."""
        for counts in (self.together, self.added, *self.alone.values()):
            counts.fade(factor)

    def draw(self, limit: float) -> list[float]:
        """Tokens a round of each size gives to a row that may still write `limit`: one draw of the posterior.

        All depths are off to the same side: luck at one of them alone would always make long drafts look best.
        """
        sizes, off = self.sizes, self.dice.gauss(0.0, DOUBT)
        if self.ranked and not self.chain:
            return [min(tokens, max(1.0, limit)) for tokens in self._of_ranked(off)]
        tried, stood = self.together.total()
        weight = tried + HOPE[0] + HOPE[1]
        general = (stood + HOPE[0]) / weight
        general += off * math.sqrt(general * (1 - general) / (weight + 1))
        general = min(1.0, max(0.0, general))
        deepest = min(max(sizes), max(0, math.ceil(limit) - 1))
        if self.chain:
            along = _along(self.together.rate(depth, general, off) for depth in range(deepest))
            along += along[-1:] * (deepest + 1 - len(along))
            return [along[min(size, deepest)] for size in sizes]
        deepest = min(deepest, len(self.together.tried))
        pooled = [self.together.rate(depth, general, off) for depth in range(deepest)]
        return [self._of_tree(size, pooled, off) for size in sizes]

    def _of_ranked(self, off: float) -> list[float]:
        """Tokens of a round of each size. What a node adds is supposed to fall as its number grows."""
        tokens, prior, before = [1.0], HOPE[0] / (HOPE[0] + HOPE[1]), 1.0
        for place, step in enumerate(self._steps):
            number = self.sizes[place] + (step + 1) / 2
            prior *= before / number
            prior = self.added.share(place, prior, POOL * step, off)
            tokens.append(tokens[-1] + step * prior)
            before = number
        return tokens

    def _of_tree(self, size: int, pooled: list[float], off: float) -> float:
        if size == 0:
            return 1.0
        own = self.alone.get(size)
        less = (math.exp(self._size) / size) ** BREADTH
        rates = [max(0.0, 1 - (1 - rate) * less) for rate in pooled[:size]]
        return _along((own.rate(depth, rate, off) for depth, rate in enumerate(rates)) if own else rates)[-1]


def _along(rates: Iterable[float]) -> list[float]:
    """[1 + sum of the first products] of the rates: tokens of a round that drafts 0, 1, 2, ... deep, as far as it matters."""
    total, run, tokens = 1.0, 1.0, [1.0]
    for rate in rates:
        run *= rate
        total += run
        tokens.append(total)
        if run < 0.003:
            break
    return tokens
