"""What the ranks of a group must hold in common, once a round. Knows the round's messages; nothing of processes.

The target's parts compute one forward between them, so all ranks must feed it the same tree and keep the same nodes. Every
rank drafts and weighs for itself; rank 0's draft is read, and rank 0's choice stands. Alone, everything is what it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from draftproof.core.messages import Accepted
from draftproof.core.tree import TokenTree
from draftproof.engine.budget import Ahead, Budget, Fixed, Learner, Round
from draftproof.engine.stats import RoundStats
from draftproof.model.process_group import ProcessGroup


class Ranks:
    """The decisions of a group's rank 0, on every rank."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def tree(self, mine: TokenTree) -> TokenTree:
        """What is read. Shapes are the same on every rank, for they never depend on what was computed."""
        if self.group.alone or mine.tokens.shape[1] == 1:               # nothing was drafted, and the root was agreed on
            return mine
        if mine.is_chain:
            (tokens,) = self.group.same(mine.tokens)
            return mine if self.group.leads else TokenTree.chain(tokens, mine.draft_probs)
        tokens, parents = self.group.same(mine.tokens, mine.parents)
        return mine if self.group.leads else replace(mine, tokens=tokens, parents=parents)

    def accepted(self, mine: Accepted) -> Accepted:
        """What stands."""
        if self.group.alone:
            return mine
        nodes, count, root = self.group.same(mine.nodes, mine.count, mine.root)
        return replace(mine, nodes=nodes, count=count, root=root)

    def target_tokens(self, mine: Tensor) -> Tensor:
        """What was chosen."""
        return self.group.same(mine)[0]

    def budget(self, budget: Budget) -> Budget:
        """One that decides as rank 0's clock tells it."""
        return budget if self.group.alone or isinstance(budget, Fixed) else Led(budget, self.group)


class Led:
    """A budget that rank 0 asks and learns with; the other ranks hear what it said.

    It has no floor: where drafts end early, their shapes depend on what each rank computed.
    """

    def __init__(self, budget: Budget, group: ProcessGroup) -> None:
        self.budget, self.group, self.most = budget, group, budget.most
        self.learner = budget if group.leads and isinstance(budget, Learner) else None
        self._rests = False                              # whether the round asked for last is one of a rest

    def nodes(self, stats: RoundStats, rows: int) -> int:
        self._rests = self.learner is not None and self.learner.resting > 0
        return self.group.number(self.budget.nodes(stats, rows) if self.group.leads else 0)

    @property
    def resting(self) -> int:
        """0: all ranks are told before every round what is drafted, in a rest as well."""
        return 0

    def rested(self, rounds: int, seconds: float) -> None:
        if self.learner:
            self.learner.rested(rounds, seconds)

    @property
    def holding(self) -> int:
        """None, likewise."""
        return 0

    def held(self, done: Round, given: Sequence[int]) -> None:
        if self.learner:
            self.learner.held(done, given)

    def steady(self, ahead: Ahead) -> int | None:
        """No such rounds: prompts are read beside drafts by layers that no group has."""
        return None

    @property
    def plain_step(self) -> float:
        return self.learner.plain_step if self.learner else 0.0

    def begin(self) -> None:
        if self.learner:
            self.learner.begin()

    def expect(self, ahead: Ahead) -> None:
        if self.learner:
            self.learner.expect(ahead)

    def learn(self, done: Round) -> None:
        if self.learner and not self._rests:
            self.learner.learn(done)

    def curiosity(self) -> int:
        if self.learner is None or self.learner.resting:
            return 0
        return self.learner.curiosity()                                 # drafters that are free never ask the target

    def glimpse(self, nodes: int, seen: Round) -> None:
        if self.learner:
            self.learner.glimpse(nodes, seen)
