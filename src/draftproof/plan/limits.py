"""Bounds: the best draft trees, what a text's entropy allows, the acceptance from which drafts pay.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch
from scipy.optimize import brentq
from torch import Tensor

from draftproof.plan.recording import Drafts, Text
from draftproof.training.draft_trees import RANKS, complete, expected, optimal, rounds_of

STEPS, NODES = 8, (4, 8, 16, 32)
"""How deep draft trees are looked at, and of how many nodes."""


def trees(texts: Sequence[Text], drafts: Sequence[Drafts]) -> list[tuple[int, float, float, float]]:
    """Nodes, and tokens per round of a draft model's chain, of the tree grown from joint ranks, and
    of the dynamic programme's; counted on texts that they were not made from."""
    ranks = [_windows(one.ranks, text) for one, text in zip(drafts, texts, strict=True)]
    if len(ranks) < 2:
        return []
    halves, emitted = (ranks[0::2], ranks[1::2]), sum(len(one) - 1 for one in ranks)
    chains, grown, found = expected(ranks, STEPS, 1), expected(ranks, max(NODES)), []
    for nodes in NODES:
        best = [optimal(complete(half), nodes) for half in halves]
        rounds = sum(rounds_of(half, tree, len(tree))[-1]
                     for half, tree in zip(halves, best[::-1], strict=True))  # fmt: skip
        chain = chains[min(nodes, len(chains) - 1)]
        found.append((nodes, chain, grown[min(nodes, len(grown) - 1)], emitted / max(1, rounds)))
    return found


def _windows(ranks: Tensor, text: Text) -> Tensor:
    """[P, STEPS] ranks of the tokens behind each new token; RANKS where there is none."""
    own = torch.cat([ranks[text.prompt : -1], torch.full((STEPS,), RANKS)])
    return own.unfold(0, STEPS, 1)[: len(text.tokens) - text.prompt]


def entropy(texts: Sequence[Text]) -> float:
    """Nats per new token of the target's own distribution; where it is greedy, at temperature 1."""
    return float(torch.cat([text.entropy[text.prompt - 1 : -1] for text in texts
                            if text.entropy is not None]).mean())  # fmt: skip


def ceiling(texts: Sequence[Text], nodes: int) -> float:
    """Tokens per round of trees of the likeliest `nodes` under the target's own distribution, as
    far as it is known along the texts: no draft that does not know the draw can give more."""
    found = list[float]()
    for text in texts:
        assert text.likeliest is not None
        chances = text.likeliest[2][text.prompt - 1 : -1].tolist()
        found += [1 + _likeliest(chances[start:], nodes) for start in range(1, len(chances), 4)]
    return sum(found) / max(1, len(found))


def _likeliest(chances: Sequence[Sequence[float]], nodes: int) -> float:
    """The sum of the largest products of one choice at each depth, prefixes first."""
    total, heap = 0.0, [(-chances[0][0], 0, 0, 1.0)]    # worth, depth, rank, worth of the parent
    for _ in range(nodes):
        if not heap:
            break
        worth, depth, rank, above = heapq.heappop(heap)
        total -= worth
        if rank + 1 < len(chances[depth]):
            heapq.heappush(heap, (-above * chances[depth][rank + 1], depth, rank + 1, above))
        if depth + 1 < len(chances):
            heapq.heappush(heap, (worth * chances[depth + 1][0], depth + 1, 0, -worth))
    return total


def break_even(size: int, cost: float) -> float | None:
    """The acceptance, the same at all positions, from which chains of `size` pay if their rounds
    cost so many plain ones; None if none is enough."""
    if not 1 < cost < 1 + size:
        return 0.0 if cost <= 1 else None
    return float(brentq(lambda rate: sum(rate**i for i in range(size + 1)) - cost, 0.0, 1.0))
