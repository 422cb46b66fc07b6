"""The best tree of draft tokens, from the ranks that drafts gave to the tokens that came.

A rank path names a node by which choice of its step each node on its way is. A static tree accepts
as far as it holds the ranks of the text as a path, so positions of a text are joint samples.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from draftproof.errors import BadInput

RANKS = 20
"""Choices of a step that a tree may take."""
PRIOR = 16.0
"""A path seen in fewer positions than this is valued more by the ranks of its steps, one by one."""
RankPath = tuple[int, ...]


def complete(ranks: Sequence[Tensor]) -> Tensor:
    """[n, K] the ranks of all positions behind which every step had a token to predict."""
    steps = ranks[0].shape[1]
    positions = torch.cat([one[: max(0, len(one) - steps)] for one in ranks])
    if len(positions) == 0:
        raise BadInput(f"the texts are too short to predict {steps} tokens; give other prompts")
    return positions


def grow(positions: Tensor, nodes: int, widest: int = RANKS) -> tuple[RankPath, ...]:
    """The best tree of `nodes` nodes, as rank paths; its first N are the best tree of N nodes.

    positions: [n, K] ranks. A node is worth the probability of its path, so a child is never worth
    more than its parent, and adding the best neighbour is optimal. Probabilities are shares of
    positions, each drawn towards that of its rank alone: (count + PRIOR * share) / (count of the
    parent + PRIOR).
    """
    columns = (torch.bincount(column, minlength=RANKS + 1) for column in positions.T)
    alone = [column.div(len(positions)).tolist() for column in columns]
    depths = range(positions.shape[1] + 1)
    counts = Counter(tuple(row[:depth]) for row in positions.tolist() for depth in depths)
    tree: list[RankPath] = []
    neighbours: list[tuple[float, int, RankPath]] = [(-1.0, 0, ())]
    while neighbours and len(tree) <= nodes:
        worth, depth, path = heapq.heappop(neighbours)
        tree.append(path)
        for rank in range(widest if depth < len(alone) else 0):
            share = (counts[*path, rank] + PRIOR * alone[depth][rank]) / (counts[path] + PRIOR)
            heapq.heappush(neighbours, (worth * share, depth + 1, (*path, rank)))
    return tuple(tree[1:])


def expected(ranks: Sequence[Tensor], most: int, widest: int = RANKS) -> tuple[float, ...]:
    """Tokens per round with trees of 0 to `most` nodes, counted on texts they were not grown on."""
    halves = [ranks[0::2], ranks[1::2]]
    emitted = sum(len(one) - 1 for half in halves for one in half)
    trees = [grow(complete(half), most, widest) for half in halves]
    counts = [rounds_of(half, tree, most) for half, tree in zip(halves, trees[::-1], strict=True)]
    return tuple(emitted / max(1, one + other) for one, other in zip(*counts, strict=True))


def rounds_of(ranks: Sequence[Tensor], tree: Sequence[RankPath], most: int) -> list[int]:
    """Rounds it takes to write the texts with the first 0, 1, ..., `most` nodes of a tree.

    Exactly what an engine that matches would count: a round goes as far as the tree holds the
    ranks.
    """
    order = {path: number for number, path in enumerate(tree, 1)}
    total, steps = [0] * (most + 1), range(1, ranks[0].shape[1] + 1)
    for one in ranks:
        needed = [[order.get(tuple(row[:n]), math.inf) for n in steps] for row in one.tolist()]
        for nodes in range(len(total)):
            position = 0
            while position < len(needed) - 1:
                position += 1 + sum(number <= nodes for number in needed[position])
                total[nodes] += 1
    return total


def optimal(positions: Tensor, nodes: int, widest: int = 8) -> tuple[RankPath, ...]:
    """The best tree of `nodes` nodes by dynamic programming, if steps are independent.

    Sequoia's recursion (2402.12374) with shares by depth: behind a node of depth d, n nodes are
    worth W(d, n) = max over their division among its children, child of rank r with m of them
    being worth a(d, r) (1 + W(d + 1, m - 1)). Equal to `grow` where ranks are independent.
    """
    shares = [torch.bincount(column, minlength=RANKS + 1)[:widest].div(len(positions)).tolist()
              for column in positions.T]  # fmt: skip
    worth = np.zeros(nodes + 1)                             # behind the deepest node: nothing
    given = list[list[list[int]]]()                         # by depth and rank: nodes of n
    for depth in reversed(shares):
        below, worth, taken = worth, np.zeros(nodes + 1), list[list[int]]()
        for share in depth:
            child = np.concatenate([[0.0], share * (1 + below[:-1])])
            totals = [worth[n::-1] + child[: n + 1] for n in range(nodes + 1)]
            taken.append([int(one.argmax()) for one in totals])
            worth = np.array([one.max() for one in totals])
        given.insert(0, taken)

    def paths(depth: int, count: int, path: RankPath) -> list[RankPath]:
        found = list[RankPath]()
        for rank in reversed(range(len(given[depth]) if depth < len(given) else 0)):
            own = given[depth][rank][count]
            count -= own
            if own:
                found += [(*path, rank), *paths(depth + 1, own - 1, (*path, rank))]
        return found

    return tuple(sorted(paths(0, nodes, ()), key=lambda path: (len(path), path)))
