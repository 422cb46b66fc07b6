"""Acceptance: which drafted tokens are kept. This knows trees and probabilities, no models or
caches.

Three exact rules. `accept_by_matching` lets the target choose at every node and keeps what it would
have chosen (drafter-invariant, arXiv 2408.07978; optimal for deterministic drafts).
`accept_by_rejection` is the token rule of Leviathan et al. (2211.17192) and Chen et al.
(2302.01318) on chains, and recursive rejection without replacement (2402.14160) on trees of drawn
tokens. `accept_by_block` is block verification of chains (Sun et al., 2403.10444).

The random outcomes of the last two come from a `Chance` of the sampler: keyed noise when decoding,
every outcome in turn when the distribution is enumerated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from draftproof.core.messages import Accepted, Frontier
from draftproof.core.prefix import Paths
from draftproof.core.sampling import Chance
from draftproof.core.tree import TokenTree


def accept_by_matching(tree: TokenTree, target_tokens: Tensor) -> Accepted:
    """A node is accepted if it is what the target chose at its parent, and so are its ancestors.

    target_tokens: [B, N] the target's choice at every node. No synchronisation.
    """
    if tree.is_chain:                                           # the same in fewer steps
        count = (tree.tokens[:, 1:] == target_tokens[:, :-1]).cumprod(-1).sum(-1)
        nodes = torch.arange(target_tokens.shape[1], device=count.device).expand_as(target_tokens)
        return Accepted(nodes, count + 1, target_tokens.gather(1, count[:, None])[:, 0])
    hit = tree.tokens == target_tokens.gather(1, tree.parents.clamp(min=0))         # [B, N]
    hit |= tree.parents < 0                                     # the root was chosen last round
    alive = (hit[:, None] | ~tree.ancestors).all(-1)                                # [B, N]
    last = (alive * (tree.depths + 1)).argmax(-1)               # [B] the deepest accepted node
    return _accepted(tree, last, target_tokens.gather(1, last[:, None])[:, 0])


def accept_by_rejection(tree: TokenTree, probs: Tensor, chance: Chance) -> Accepted:
    """Try each drawn child against its parent's residual, in the order drawn; then draw from it.

    probs: [B, N, V] the target's probabilities p at every node; `tree.draft_probs`: q, which each
    node was drawn from. On a chain these are the lines of Leviathan et al., algorithm 1.
    """
    drafts = _draft_probs(tree)
    rows = torch.arange(tree.tokens.shape[0], device=probs.device)
    here = torch.zeros_like(rows)                               # [B] the deepest accepted node
    target, draft = probs[:, 0], torch.zeros_like(probs[:, 0])  # residuals at `here`
    untried = torch.ones_like(rows, dtype=torch.bool)           # no child of `here` was tried yet
    for node in range(1, tree.tokens.shape[1]):
        token = tree.tokens[:, node].clamp(min=0)
        tried = (tree.parents[:, node] == here) & tree.present[:, node]
        draft = torch.where((tried & untried)[:, None], drafts[:, node], draft)
        tried = tried & (draft[rows, token] > 0)                # used up: nothing left to try
        ratio = target[rows, token] / draft[rows, token].clamp(min=_TINY)
        # r < p(x) / q(x); else what is left is p' = norm(max(0, p - q))
        accepted = tried & chance.flip(torch.where(tried, ratio.clamp(max=1), 0), node)
        left = _normalised((target - draft).clamp(min=0), target)
        without = _normalised(draft.scatter(1, token[:, None], 0.0), draft)
        fails = (tried & ~accepted)[:, None]
        target = torch.where(accepted[:, None], probs[:, node], torch.where(fails, left, target))
        draft = torch.where(fails, without, draft)
        here = torch.where(accepted, node, here)
        untried = accepted | (untried & ~tried)
    root = chance.draw(target, tree.depths.gather(1, here[:, None])[:, 0])      # t ~ p' or p
    return _accepted(tree, here, root)


def accept_by_block(tree: TokenTree, probs: Tensor, chance: Chance) -> Accepted:
    """Accept the longest prefix of a drawn chain by block verification. Other trees: by rejection.

    Sun et al. (2403.10444), algorithm 2: with P_i = min(1, P_{i-1} p_i(x_i) / q_i(x_i)), the first
    i tokens are accepted with probability at least P_i; the token after them is drawn from
    max(P_i p_{i+1} - q_{i+1}, 0).
    """
    if not tree.is_chain:
        return accept_by_rejection(tree, probs, chance)
    drafts = _draft_probs(tree)
    rows, nodes = tree.tokens.shape
    row = torch.arange(rows, device=probs.device)
    weight = torch.ones(rows, dtype=probs.dtype, device=probs.device)               # P_i
    here = torch.zeros_like(row)
    residual = _residual(weight, probs[:, 0], drafts, 0)
    for node in range(1, nodes):
        token, there = tree.tokens[:, node].clamp(min=0), tree.present[:, node]
        ratio = probs[row, node - 1, token] / drafts[row, node, token].clamp(min=_TINY)
        weight = torch.where(there, (weight * ratio).clamp(max=1), 0)
        rest = _residual(weight, probs[:, node], drafts, node)
        mass = rest.sum(-1)
        last = ~tree.present[:, node + 1] if node + 1 < nodes else torch.ones_like(there)
        total = mass + 1 - weight
        ratio = torch.where(total > 0, mass / total.clamp(min=_TINY), 1)            # 0/0 is 1
        ratio = torch.where(last, weight, ratio)
        accepted = there & chance.flip(torch.where(there, ratio, 0), node)
        here = torch.where(accepted, node, here)
        residual = torch.where(accepted[:, None], rest, residual)
    depth = tree.depths.gather(1, here[:, None])[:, 0]
    backup = probs.gather(1, here[:, None, None].expand(-1, 1, probs.shape[-1]))[:, 0]
    return _accepted(tree, here, chance.draw(_normalised(residual, backup), depth))


class Rule(NamedTuple):
    """An acceptance rule: which drafted tokens become text, and the token after them.

    Attributes:
        accept: Called with the tree, the target's logits [B, N, V] after each of its nodes, and the
            frontier that was drafted from; returns what is accepted.
        needs_draft_probs: Whether draft tokens must be drawn, with the probabilities that they were
            drawn from (Leviathan et al., arXiv 2211.17192). Otherwise drafters may choose them.

    Example:
        >>> from draftproof.core.acceptance import RULES
        >>> engine = dp.Engine(target, drafter, acceptance=RULES["block"])
    """

    accept: Callable[[TokenTree, Tensor, Frontier], Accepted]
    needs_draft_probs: bool


def match(tree: TokenTree, logits: Tensor, frontier: Frontier) -> Accepted:
    """Sample-and-match with keyed noise: the text depends only on the seed and the target."""
    sampler = frontier.sampler
    target_tokens = sampler.sample(logits, Paths(frontier.prefix, tree))
    return sampler.ops.run(accept_by_matching, tree, target_tokens)


def weighing(rule: Callable[[TokenTree, Tensor, Chance], Accepted]) -> Rule:
    """Make a rule for drawn tokens. Trees of chosen tokens (a point mass) are matched instead."""
    def accept(tree: TokenTree, logits: Tensor, frontier: Frontier) -> Accepted:
        if tree.draft_probs is None:
            return match(tree, logits, frontier)
        probs = frontier.sampler.probs(logits, Paths(frontier.prefix, tree))
        return rule(tree, probs, frontier.sampler.chance(frontier.prefix))

    return Rule(accept, needs_draft_probs=True)


RULES = {
    "match": Rule(match, needs_draft_probs=False),
    "rejection": weighing(accept_by_rejection),
    "block": weighing(accept_by_block),
}


_TINY = 1e-30       # a divisor where the true one is zero and the quotient is not used


def _draft_probs(tree: TokenTree) -> Tensor:
    assert tree.draft_probs is not None
    return tree.draft_probs * tree.present[..., None]


def _residual(weight: Tensor, target: Tensor, drafts: Tensor, node: int) -> Tensor:
    """[B, V] max(P p - q, 0) after `node`; q is zero where nothing was drafted: P p remains."""
    if node + 1 == drafts.shape[1]:
        return target
    return (weight[:, None] * target - drafts[:, node + 1]).clamp(min=0)


def _normalised(weights: Tensor, fallback: Tensor) -> Tensor:
    """`weights` [B, V] with sum 1; `fallback` where rounding left nothing."""
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights / total.clamp(min=_TINY), fallback)


def _accepted(tree: TokenTree, last: Tensor, root: Tensor) -> Accepted:
    count = tree.depths.gather(1, last[:, None])[:, 0] + 1
    return Accepted(tree.path_to(last), count, root)
