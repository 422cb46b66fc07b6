"""Typical acceptance, which is lossy: a draft token is accepted if it is likely enough, even if the
target would choose another.

Medusa (2401.10774), section 2.3.1, after truncation sampling (2210.15191). It is kept apart from
the exact rules: nothing uses it unless the caller says "lossy".

Every token comes with its distance from the target's distribution p. Given the text and the tree,
acceptance depends only on probabilities. If a token x is accepted, the next token is a point mass
instead of p, a total variation of 1 - p(x); otherwise it is drawn from p, a distance of 0. If
drafts are a function of the text, this is the exact distance of each token. If they are drawn, the
output is a mean over trees, whose distance can only be smaller. Over a whole text the distances add
up at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from draftproof.core.acceptance import RULES, Rule
from draftproof.core.messages import Accepted, Frontier
from draftproof.core.prefix import Paths
from draftproof.core.sampling import Chance
from draftproof.core.tree import TokenTree
from draftproof.errors import BadInput


@dataclass(frozen=True)
class Typical:
    """Accepts a draft token x if p(x) > min(epsilon, delta * exp(-H(p))), with H the entropy of p.

    p is the target's distribution under the row's options. In greedy rows it is one token with
    probability 1, so these stay exact. The defaults are those of Medusa: a token of 9 % is always
    accepted, and less is enough where the target is unsure.
    """

    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        if not 0 < self.epsilon < 1 or not 0 < self.delta < inf:
            values = f"typical acceptance had an epsilon of {self.epsilon!r}, a delta of"
            raise BadInput(f"{values} {self.delta!r}; give one between 0 and 1, and one above 0")

    @property
    def rule(self) -> Rule:
        """The rule as the decoder uses it."""
        return Rule(self.accept, needs_draft_probs=False)

    def accept(self, tree: TokenTree, logits: Tensor, frontier: Frontier) -> Accepted:
        """The longest typical path, and a root drawn from the target's distribution after it.

        The root uses separate noise. A drafter may have used the noise of the target's choice, and
        after a rejection that choice would no longer be distributed as p.

        Args:
            tree: What was drafted.
            logits: The target's, [B, N, V].
            frontier: The committed text of each row.

        Returns:
            The accepted nodes, and the new roots.
        """
        probs = frontier.sampler.probs(logits, Paths(frontier.prefix, tree))
        return accept_by_typicality(tree, probs, frontier.sampler.chance(frontier.prefix), self)

    def threshold(self, probs: Tensor) -> Tensor:
        """[...] the probability a token must exceed under each distribution [..., V].

        Args:
            probs: The target's distribution, [..., V].

        Returns:
            The least probability of a typical token, [...].
        """
        entropy = -(probs * (probs + 1e-5).log()).sum(-1)
        return (self.delta * (-entropy).exp()).clamp(max=self.epsilon)


def accept_by_typicality(
    tree: TokenTree, probs: Tensor, chance: Chance, typical: Typical
) -> Accepted:
    """A node is accepted if it is typical after its parent and all its ancestors are accepted. The
    deepest accepted node ends the path; among equally deep ones, the one with the likeliest path.

    probs: [B, N, V] the target's distribution at every node; the next root is drawn from the last.
    """
    rows = torch.arange(len(probs), device=probs.device)
    parents, is_root = tree.parents.clamp(min=0), tree.parents < 0
    likelihood = probs[rows[:, None], parents, tree.tokens.clamp(min=0)]  # [B, N] p(node | parent)
    likely = tree.present & (likelihood > typical.threshold(probs).gather(1, parents))
    alive = ((likely | is_root)[:, None] | ~tree.ancestors).all(-1)               # [B, N]
    steps = torch.where(alive & ~is_root, likelihood, 1)
    paths = (tree.ancestors * steps.log()[:, None]).sum(-1)               # [B, N] log-likelihood
    depths = torch.where(alive, tree.depths, -1)
    last = paths.masked_fill(depths < depths.amax(1, keepdim=True), -torch.inf).argmax(-1)
    nodes, depth = tree.path_to(last), tree.depths.gather(1, last[:, None])     # [B, D], [B, 1]
    root = chance.draw(probs[rows, last], depth[:, 0])
    # place i is of the node at i + 1
    missed = (1 - likelihood).clamp(min=0).gather(1, nodes).roll(-1, 1)
    drafted = torch.arange(nodes.shape[1], device=nodes.device) < depth
    return Accepted(nodes, depth[:, 0] + 1, root, torch.where(drafted, missed, 0))


def rule_of(acceptance: str | Rule, lossy: Typical | None) -> tuple[str, Rule]:
    """The name of an acceptance rule, and the rule itself.

    Raises:
        BadInput: There is no such rule, or both a rule and a lossy one were given.
    """
    if isinstance(acceptance, Rule) and lossy is None:
        return getattr(acceptance.accept, "__name__", "custom"), acceptance
    if acceptance not in (("match", "typical") if lossy else RULES):
        raise BadInput(
            f"acceptance was {acceptance!r:.60}; choose one of {', '.join(RULES)}, a Rule, or "
            "lossy=True, which changes the text; give one of the two"
        )
    return ("typical", lossy.rule) if lossy else (str(acceptance), RULES[str(acceptance)])
