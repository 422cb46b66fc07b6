"""What the ranks of a group must hold in common, once a round. Knows the round's messages; nothing of processes.

The target's parts compute one forward between them, so all ranks must feed it the same tree and keep the same nodes. Every
rank drafts and weighs for itself; rank 0's draft is read, and rank 0's choice stands. Alone, everything is what it was.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from draftproof.core.messages import Accepted
from draftproof.core.tree import TokenTree
from draftproof.engine.budget import Budget, Fixed
from draftproof.engine.stats import Round, State
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
        return mine if self.group.leads else replace(mine, tokens=tokens, parents=parents, form=None)

    def accepted(self, mine: Accepted) -> Accepted:
        """What stands."""
        if self.group.alone:
            return mine
        nodes, count, root = self.group.same(mine.nodes, mine.count, mine.root)
        return replace(mine, nodes=nodes, count=count, root=root, drafted=None)

    def target_tokens(self, mine: Tensor) -> Tensor:
        """What was chosen."""
        return self.group.same(mine)[0]

    def budget(self, budget: Budget) -> Budget:
        """One that decides as rank 0's clock tells it."""
        return budget if self.group.alone or isinstance(budget, Fixed) else Led(budget, self.group)


class Led(Budget):
    """A budget that rank 0 asks and tells; the other ranks hear what it said.

    It has no floor: where drafts end early, their shapes depend on what each rank computed.
    """

    def __init__(self, budget: Budget, group: ProcessGroup) -> None:
        self.budget, self.group, self.most = budget, group, budget.most

    def choose(self, state: State) -> int:
        return self.group.number(self.budget.choose(state) if self.group.leads else 0)

    def record(self, done: Round) -> None:
        if self.group.leads:
            self.budget.record(done)
