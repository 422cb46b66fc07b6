"""The drawn rules once more, row by row, each with the mistakes that real projects made."""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.core.acceptance import Chance
from draftproof.core.messages import Accepted
from draftproof.core.tree import TokenTree

TOKEN_MISTAKES = (
    "target instead of residual",  # rejected tokens come back too often
    "residual softmaxed",
    "residual of the wrong node",
    "draft law raw",  # q at another temperature than the one that was drawn from
    "draft law not renormalised",  # siblings drawn without replacement, weighed as if with
    "residual restricted to the draft's support",
    "ratio upside down",
    "one child stands for all",  # the first child's siblings are tried against p itself
    "accepted without a coin",  # the first drafted token is taken unseen (lattice #243)
)
BLOCK_MISTAKES = (
    "stop at the first failed coin", "token rule's residual", "no minimum", "bonus from a residual",
    "p_i in Z_i",
)


def token_rule(tree: TokenTree, probs: Tensor, chance: Chance, mistake: str = "") -> Accepted:
    """Recursive rejection without replacement, from the definition: B.3.2 of the specification."""
    assert tree.draft_probs is not None
    laws = tree.draft_probs ** (0.5 if mistake == "draft law raw" else 1.0)
    laws = laws / laws.sum(-1, keepdim=True).clamp(min=1e-300)
    worlds = torch.arange(len(tree.tokens))
    here, law, left = torch.zeros_like(worlds), probs[:, 0], None
    for node in range(1, tree.tokens.shape[1]):
        token = tree.tokens[:, node].clamp(min=0)
        tried = (tree.parents[:, node] == here) & tree.present[:, node]
        first = torch.tensor([node == 1 or tree.parents[0, node] != tree.parents[0, node - 1]])
        fresh = (tried & first)[:, None]
        draft = laws[:, node] if left is None else torch.where(fresh, laws[:, node], left)
        ratio = law[worlds, token] / draft[worlds, token].clamp(min=1e-300)
        if mistake == "ratio upside down":
            ratio = draft[worlds, token] / law[worlds, token].clamp(min=1e-300)
        if mistake == "accepted without a coin" and node == 1:
            ratio = torch.ones_like(ratio)
        stands = tried & chance.flip(torch.where(tried, ratio.clamp(max=1), 0), node)
        residual = (law - draft).clamp(min=0)
        if mistake == "residual of the wrong node":
            residual = (probs[:, node] - draft).clamp(min=0)
        if mistake == "residual restricted to the draft's support":
            residual = residual * (draft > 0)
        if mistake == "residual softmaxed":
            residual = torch.where(residual > 0, residual.exp(), 1.0)
        total = residual.sum(-1, keepdim=True)
        residual = torch.where(total > 0, residual / total.clamp(min=1e-300), law)
        once = mistake == "one child stands for all" and not first
        if mistake == "target instead of residual" or once:
            residual = law
        rest = draft.scatter(1, token[:, None], 0.0)
        if mistake != "draft law not renormalised":
            rest = rest / rest.sum(-1, keepdim=True).clamp(min=1e-300)
        fails = (tried & ~stands)[:, None]
        law = torch.where(stands[:, None], probs[:, node], torch.where(fails, residual, law))
        left = torch.where(fails, rest, draft)
        here = torch.where(stands, node, here)
    depth = tree.depths.gather(1, here[:, None])[:, 0]
    return Accepted(tree.path_to(here), depth + 1, chance.draw(law, depth))


def block_rule(tree: TokenTree, probs: Tensor, chance: Chance, mistake: str = "") -> Accepted:
    """Block verification of full chains, from B.1 of the specification."""
    assert tree.draft_probs is not None
    laws, worlds, length = tree.draft_probs, torch.arange(len(probs)), tree.tokens.shape[1] - 1
    weight, tau, going = probs.new_ones(len(worlds)), torch.zeros_like(worlds), worlds >= 0
    weights = [weight]
    for i in range(1, length + 1):
        token = tree.tokens[:, i]
        ratio = probs[worlds, i - 1, token] / laws[worlds, i, token].clamp(min=1e-300)
        weight = weight * ratio if mistake == "no minimum" else (weight * ratio).clamp(max=1)
        weights.append(weight)
    stacked = torch.stack(weights, 1)
    for i in range(1, length + 1):
        confidence = stacked[:, i]
        if i < length:
            law = probs[:, i - 1] if mistake == "p_i in Z_i" else probs[:, i]
            mass = (stacked[:, i, None] * law - laws[:, i + 1]).clamp(min=0).sum(-1)
            room = mass + 1 - stacked[:, i]
            confidence = torch.where(room > 0, mass / room.clamp(min=1e-300), 1.0)
        stands = chance.flip(confidence.clamp(0, 1), i)
        if mistake == "stop at the first failed coin":
            going = going & stands
            stands = going
        tau = torch.where(stands, i, tau)
    following = torch.cat([laws[:, 1:], torch.zeros_like(laws[:, :1])], 1)
    if mistake == "bonus from a residual":
        following[:, -1] = laws[:, -1]
    scale = torch.ones_like(stacked) if mistake == "token rule's residual" else stacked.clone()
    scale[:, -1] = 1.0
    residual = (scale[worlds, tau, None] * probs[worlds, tau] - following[worlds, tau]).clamp(min=0)
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, probs[worlds, tau])
    return Accepted(tree.path_to(tau), tau + 1, chance.draw(residual, tau))
