"""Beam search through a draft: of all nodes that it weighs the likeliest are one tree."""

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


def weighed(
    frontier: Frontier, read: Read, width: int, deepest: int
) -> tuple[Tensor, Tensor, Tensor]:
    """All nodes that a search with so many beams weighs: tokens, parents (the root its own) and
    path probabilities, [B, M] each. It ends where no beam is as likely as `frontier.floor`."""
    prefix, sampler = frontier.prefix, frontier.sampler
    nodes = prefix.root[:, None]
    place, depths, parents = (torch.full_like(nodes, fill) for fill in (0, 0, -1))
    above = torch.zeros(nodes.shape, dtype=torch.float32, device=nodes.device)
    pool, size, first = [(nodes, place, above)], 1, 0
    for depth in range(1, deepest + 1):
        tree = TokenTree(nodes, parents, depth - 1, form=TreeForm(parents, depths))
        steps, tokens = sampler.best(read(tree, first), Paths(prefix, tree, first), width)
        scores = (above[..., None] + steps).flatten(1)
        drafted = torch.where(scores > -torch.inf, tokens.flatten(1), ABSENT)
        pool.append((drafted, place[..., None].expand_as(tokens).flatten(1), scores))
        best = scores.topk(width, 1)
        if frontier.floor and float(best.values.amax()) < log(frontier.floor):
            break
        nodes = torch.cat([nodes, drafted.gather(1, best.indices)], 1)
        parents = torch.cat([parents, first + best.indices // width], 1)
        depths = torch.cat([depths, torch.full_like(best.indices, depth)], 1)
        place, above = size + best.indices, best.values
        size, first = size + scores.shape[1], nodes.shape[1] - width
    tokens, origins, scores = (torch.cat(part, 1) for part in zip(*pool, strict=True))
    return tokens, origins, scores.exp()


def likeliest(frontier: Frontier, read: Read, width: int, deepest: int) -> TokenTree:
    """The `frontier.budget` likeliest of the nodes that a search weighs."""
    pool = weighed(frontier, read, width, deepest)
    return frontier.sampler.ops.run(TokenTree.likeliest, *pool, frontier.budget + 1, deepest)
