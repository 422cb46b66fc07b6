"""Attention masks for tree reads: additive, four-dimensional, built without a host synchronisation.

Additive because a boolean mask is added to the scores, silently, by eager attention in transformers 5.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.core.tree import TokenTree


def tree_mask(
    tree: TokenTree, lengths: Tensor, span: int, dtype: torch.dtype, first: int = 0, window: int | None = None
) -> Tensor:
    """[B, 1, N - first, span]: 0 where a node sees a cache slot, the dtype's minimum elsewhere.

    Node i of row b lies in slot ``lengths[b] + i`` and sees the slots below ``lengths[b]`` and its own ancestors.
    `window`: see only that many positions back, itself included (sliding attention).
    """
    slots = torch.arange(span, device=lengths.device)
    nodes = tree.tokens.shape[1]
    node = slots - lengths[:, None]                                           # [B, S] which node a slot holds
    inside = (node >= 0) & (node < nodes)
    index = node.clamp(0, nodes - 1)[:, None].expand(-1, nodes - first, -1)
    sees = tree.ancestors[:, first:].gather(2, index) & inside[:, None]       # [B, n, S]
    sees = sees | (node < 0)[:, None]
    if window is not None:
        depth = torch.where(inside, tree.depths.gather(1, node.clamp(0, nodes - 1)), node)      # relative to lengths
        sees = sees & (tree.depths[:, first:, None] - depth[:, None] < window)
    blocked = torch.finfo(dtype).min
    return torch.zeros(sees.shape, dtype=dtype, device=lengths.device).masked_fill_(~sees, blocked)[:, None]
