"""Typical acceptance, which is lossy: a likely enough draft token is accepted, chosen or not.

Medusa (2401.10774), section 2.3.1, after truncation sampling (2210.15191). It is kept away from the
exact rules: nothing uses it unless a caller says "lossy".

How far it strays comes with every token. Given the text and the tree, whether a draft token is
accepted follows from the probabilities alone: if so, the next token has a point mass instead of the
target's distribution p, at a total variation of 1 - p(x); else it is drawn from p, at a distance of
0. If drafts are a function of the text, this is the distance of what is written, token by token; if
they are drawn, what is written is the mean over trees, which can only be nearer. Over a whole text
the distances add up at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from draftproof.core import acceptance
from draftproof.core.acceptance import Chance, Rule
from draftproof.core.messages import Accepted, Frontier
from draftproof.core.prefix import Paths
from draftproof.core.tree import TokenTree
from draftproof.errors import BadInput


@dataclass(frozen=True)
class Typical:
    """Accepts a draft token x if p(x) > min(epsilon, delta * exp(-H(p))), with H the entropy of p.

    p is the target's distribution under the row's sampling; greedy rows have all of it on one
    token, so they stay exact. The defaults are those of Medusa: a token of 9 % is always accepted,
    and less is enough where the target is unsure.
    """

    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        for name, most in (("epsilon", 1.0), ("delta", inf)):
            value, below = getattr(self, name), " and below 1" if most == 1 else ""
            if not 0 < value < most:
                given = f"the {name} of typical acceptance was {value!r}"
                raise BadInput(f"{given}; it must be a number above 0{below}")

    @property
    def rule(self) -> Rule:
        """The rule as the decoder uses it."""
        return Rule(self.accept, drawn=False)

    def accept(self, tree: TokenTree, logits: Tensor, frontier: Frontier) -> Accepted:
        """The longest typical path, and a root drawn from the target's law behind it.

        The root has noise of its own: a drafter may have looked at the noise of the target's
        choice, and where its token was turned down that choice would no longer have the law p.
        """
        probs = frontier.sampler.probs(logits, Paths(frontier.prefix, tree))
        return accept_by_typicality(tree, probs, acceptance.KeyedChance(frontier), self)

    def threshold(self, probs: Tensor) -> Tensor:
        """[...] the probability a token must exceed under each law of `probs` [..., V]."""
        entropy = -(probs * (probs + 1e-5).log()).sum(-1)
        return (self.delta * (-entropy).exp()).clamp(max=self.epsilon)


def accept_by_typicality(
    tree: TokenTree, probs: Tensor, chance: Chance, typical: Typical
) -> Accepted:
    """A node stands if it is typical behind its parent and all its ancestors stand; the deepest
    wins, then the likeliest.

    probs: [B, N, V] the target's law at every node. The root behind the path is drawn from the law
    there.
    """
    rows = torch.arange(len(probs), device=probs.device)
    parents = tree.parents.clamp(min=0)
    likelihood = probs[rows[:, None], parents, tree.tokens.clamp(min=0)]  # [B, N] p(node | parent)
    stands = tree.present & (likelihood > typical.threshold(probs).gather(1, parents))
    stands |= tree.parents < 0  # the root was chosen last round
    alive = (stands[:, None] | ~tree.ancestors).all(-1)                              # [B, N]
    last = _deepest(tree, alive, likelihood)
    nodes, depth = tree.path_to(last), tree.depths.gather(1, last[:, None])  # [B, D], [B, 1]
    root = chance.draw(probs[rows, last], depth[:, 0])
    # place i is of the node at i + 1
    missed = (1 - likelihood).clamp(min=0).gather(1, nodes).roll(-1, 1)
    drafted = torch.arange(nodes.shape[1], device=nodes.device) < depth
    return Accepted(nodes, depth[:, 0] + 1, root, torch.where(drafted, missed, 0))


def _deepest(tree: TokenTree, alive: Tensor, likelihood: Tensor) -> Tensor:
    """[B] the deepest standing node; of equals the one with the likeliest path."""
    # the root's is not known, nor needed
    steps = torch.where(alive & (tree.parents >= 0), likelihood, 1)
    paths = (tree.ancestors * steps.log()[:, None]).sum(-1)  # [B, N] log-likelihood
    depth = torch.where(alive, tree.depths, -1)
    ends = depth == depth.amax(1, keepdim=True)
    return torch.where(ends, paths, -torch.inf).argmax(-1)
