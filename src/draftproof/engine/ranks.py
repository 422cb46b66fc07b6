"""What the ranks of a group must hold in common, once a round. Knows nothing of processes.

The target's parts compute one forward between them, so all ranks must feed it the same tree and
keep the same nodes. Every rank drafts and weighs for itself; rank 0's draft is read, and rank 0's
choice stands.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from draftproof.core.acceptance import Rule
from draftproof.core.messages import Accepted, Frontier
from draftproof.core.tree import TokenTree
from draftproof.drafters.base import Drafter
from draftproof.engine.budget import Budget
from draftproof.engine.deferred import DrafterWrapper
from draftproof.engine.stats import Round, State
from draftproof.model.parallel import ProcessGroup


class LedDrafter(DrafterWrapper):
    """Proposes what it proposes on rank 0. Shapes never depend on what was computed."""

    def __init__(self, inner: Drafter, group: ProcessGroup) -> None:
        super().__init__(inner)
        self.group = group

    def propose(self, frontier: Frontier) -> TokenTree:
        mine = self.inner.propose(frontier)
        if mine.is_chain:
            (tokens,) = self.group.same(mine.tokens)
            return mine if self.group.leads else TokenTree.chain(tokens, mine.draft_probs)
        tokens, parents = self.group.same(mine.tokens, mine.parents)
        return mine if self.group.leads else replace(mine, tokens=tokens, parents=parents)


class LedBudget(Budget):
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


def led_rule(rule: Rule, group: ProcessGroup) -> Rule:
    """Accepts what the rule accepts on rank 0."""
    def accept(tree: TokenTree, logits: Tensor, frontier: Frontier) -> Accepted:
        mine = rule.accept(tree, logits, frontier)
        nodes, count, root = group.same(mine.nodes, mine.count, mine.root)
        return replace(mine, nodes=nodes, count=count, root=root)

    return rule._replace(accept=accept)
