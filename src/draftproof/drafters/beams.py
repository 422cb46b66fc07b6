"""Beam search for drafts: the most likely of all visited nodes become one tree."""

from __future__ import annotations

from collections.abc import Callable
from math import log

import torch
from torch import Tensor

from draftproof.core.messages import Frontier
from draftproof.core.prefix import Paths
from draftproof.core.tree import ABSENT, TokenTree
from draftproof.core.tree_shape import TreeForm

Read = Callable[[TokenTree, int], Tensor]
"""Logits [B, n, V] after the nodes `first:` of a tree: the beams of one level at a time."""
Sure = Callable[[], Tensor]
"""Log-probability [B, n] that the target accepts the first choice after each of the last read
nodes."""
LEAST = 0.05
"""A path ends if the drafter's estimate of its acceptance is below this."""


def weighed(
    frontier: Frontier, read: Read, width: int, deepest: int, sure: Sure | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """All nodes that a beam search visits.

    The search ends where no beam is as likely as `frontier.min_confidence`.

    Args:
        frontier: The state of the rows.
        read: Computes the logits.
        width: Beams per level.
        deepest: Levels.
        sure: Estimates acceptance, if the drafter can; paths then end below `LEAST`.

    Returns:
        Tokens, parents (the root its own) and path probabilities, [B, M] each.
    """
    prefix, sampler = frontier.prefix, frontier.sampler
    nodes = prefix.root[:, None]
    place, depths, parents = (torch.full_like(nodes, fill) for fill in (0, 0, -1))
    above = torch.zeros(nodes.shape, dtype=torch.float32, device=nodes.device)
    pool, size, first = [(nodes, place, above)], 1, 0
    for depth in range(1, deepest + 1):
        tree = TokenTree(nodes, parents, depth - 1, form=TreeForm(parents, depths))
        steps, tokens = sampler.best(read(tree, first), Paths(prefix, tree, first), width)
        if sure is not None:
            steps = calibrated(steps, sure())
        scores = (above[..., None] + steps).flatten(1)
        if sure is not None:
            scores = scores.masked_fill(scores < log(LEAST), -torch.inf)
        drafted = torch.where(scores > -torch.inf, tokens.flatten(1), ABSENT)
        pool.append((drafted, place[..., None].expand_as(tokens).flatten(1), scores))
        best = scores.topk(width, 1)
        if frontier.min_confidence and float(best.values.amax()) < log(frontier.min_confidence):
            break
        nodes = torch.cat([nodes, drafted.gather(1, best.indices)], 1)
        parents = torch.cat([parents, first + best.indices // width], 1)
        depths = torch.cat([depths, torch.full_like(best.indices, depth)], 1)
        place, above = size + best.indices, best.values
        size, first = size + scores.shape[1], nodes.shape[1] - width
    drafted_nodes, origins, scores = (torch.cat(part, 1) for part in zip(*pool, strict=True))
    return drafted_nodes, origins, scores.exp()


def calibrated(steps: Tensor, sure: Tensor) -> Tensor:
    """Log-probabilities [B, n, k] of the best tokens, highest first. The first has log-probability
    `sure` [B, n]; the others share the rest in the same proportions."""
    first, rest = steps[..., :1], steps[..., 1:]
    left = torch.log1p(-sure.exp().clamp(max=1 - 1e-6))[..., None]
    others = torch.log1p(-first.exp().clamp(max=1 - 1e-6))
    best = torch.where(first > -torch.inf, sure[..., None].to(first.dtype), first)
    return torch.cat([best, (rest - others + left).to(first.dtype)], -1)


def likeliest(
    frontier: Frontier, read: Read, width: int, deepest: int, sure: Sure | None = None
) -> TokenTree:
    """The tree of the `frontier.max_draft_tokens` most likely nodes of a search."""
    pool = weighed(frontier, read, width, deepest, sure)
    nodes = frontier.max_draft_tokens + 1
    return frontier.sampler.ops.run(TokenTree.likeliest, *pool, nodes, deepest)
