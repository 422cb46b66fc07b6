"""How much to draft, zero included: what a budget is asked before a round, and told about it. Knows no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from draftproof.engine.stats import RoundStats
from draftproof.errors import BadInput

BEYOND = 2
"""Tokens by which a row of a batch may draft more than each does on average; or half of that, if it is more."""


def room(nodes: int) -> int:
    """How many tokens one row may draft where rows share `nodes` each."""
    return nodes + max(BEYOND, nodes // 2)


class Budget(Protocol):
    """Decides before each round; `most` bounds it, so that memory can be set aside once.

    Whatever it decides, the text is the same (under the rules that weigh draft laws, the law is).
    """

    @property
    def most(self) -> int: ...
    def nodes(self, stats: RoundStats, rows: int) -> int: ...


@runtime_checkable
class Confident(Protocol):
    """What a budget says besides, if drafts should end where they are no longer likely to stand."""

    @property
    def floor(self) -> float:
        """The chance to stand below which a path is not drafted further; 0 never ends one."""
        ...


class Ahead(NamedTuple):
    """What a round will meet: rows running, tokens of the longest, tokens a row may still write on average, and committed
    tokens, over all rows, that the drafter must read before it can draft."""

    rows: int
    context: int
    remaining: float
    unread: int = 0


class Round(NamedTuple):
    """What came of a round.

    rows: that ran. tried: by depth, in how many rows a token was drafted whose ancestors all stood. stood: by depth, in
    how many rows one stood. chain: no row drafted a tree, nor more because another drafted less.
    emitted: tokens of all rows together, after stop rules. seconds: the whole round; 0 if that tells nothing. drafting: of
    these, what a round without drafter and budget would not have taken; of one that drafted, what its draft has not: thinking,
    looks.
    nodes: which stood, of all rows together, if smaller drafts would have been the beginnings of these; or None.
    """

    rows: int
    tried: list[int]
    stood: list[int]
    chain: bool
    emitted: int
    seconds: float
    drafting: float = 0.0
    nodes: list[int] | None = None


@runtime_checkable
class Learner(Protocol):
    """What a budget offers besides, if it wants to learn: called around every round, outside the algorithm."""

    @property
    def resting(self) -> int:
        """So many of the next rounds will be plain, and nobody needs to be asked or told of them.

        `rested` tells how many were made like this."""
        ...

    def rested(self, rounds: int, seconds: float) -> None:
        """So many plain rounds were made that `nodes` was not asked for. seconds: the median of them; 0 if it tells nothing."""
        ...

    @property
    def holding(self) -> int:
        """So many of the next rounds may draft as many nodes as the last one did, as long as the same rows run.

        `nodes` need not be asked before any of them; `held` tells what came of them."""
        ...

    def held(self, done: Round, given: Sequence[int]) -> None:
        """Such rounds were made. done: of all of them together, `rows` too; its `seconds` are the median of them. given: the
        tokens that each gave, of all rows."""
        ...

    def steady(self, ahead: Ahead) -> int | None:
        """What a round should draft that reads prompts besides, so that its time tells nothing; None if none should come now.

        It counts as one of a rest or a hold: `rested` or `held` is told of it, with no seconds."""
        ...

    def begin(self) -> None:
        """A text begins in the coming round, of which nothing is known yet."""
        ...

    def expect(self, ahead: Ahead) -> None:
        """A round comes; `nodes` is asked next."""
        ...

    def learn(self, done: Round) -> None:
        """The round that `nodes` was asked for is over."""
        ...

    def curiosity(self) -> int:
        """How many nodes a drafter that is `free` should propose before this round, only to be compared; mostly 0."""
        ...

    def glimpse(self, nodes: int, seen: Round) -> None:
        """What would have stood of such a proposal; `rows` may be 0. Nothing was emitted, and the time is in a round's."""
        ...

    @property
    def plain_step(self) -> float:
        """Seconds a plain round would take for the rows that run; 0 while nobody knows."""
        ...


@dataclass(frozen=True)
class Fixed:
    """The same number of draft tokens per row in every round."""

    count: int

    def __post_init__(self) -> None:
        if self.count < 0:
            raise BadInput(f"a budget of {self.count} draft tokens was given; it must be 0 or more")

    @property
    def most(self) -> int:
        return self.count

    def nodes(self, stats: RoundStats, rows: int) -> int:
        return self.count


@dataclass(frozen=True)
class Confidence:
    """At most `count` draft tokens per row, and none behind a path whose chance to stand is below `floor`.

    The chance is what the drafter takes it for. Only on the CPU, where asking it costs nothing; elsewhere like `Fixed`.
    """

    count: int
    floor: float = 0.3

    def __post_init__(self) -> None:
        if self.count < 0 or not 0 <= self.floor < 1:
            raise BadInput(
                f"a budget of {self.count} draft tokens with a floor of {self.floor} was given; the first must be 0 or more, "
                "the second from 0 to below 1"
            )

    @property
    def most(self) -> int:
        return self.count

    def nodes(self, stats: RoundStats, rows: int) -> int:
        return self.count


class Script:
    """What was written down, round by round; then nothing."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.most, self._left = max(sizes), list(sizes)

    def nodes(self, stats: RoundStats, rows: int) -> int:
        return self._left.pop(0) if self._left else 0
