"""ALiBi by the positions of keys (Bloom, Falcon), so that nodes of a tree have their own.

Softmax ignores what is equal for all keys of a query, so the bias is the slope of a head times the
key's position. transformers takes a key's slot for that; behind a mask of ours, which carries the
positions, the same function is asked for them. Masks of others are treated as ever.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftproof.core.tree import TokenTree
from draftproof.model.kv_cache import key_depths

BUILD = "build_alibi_tensor"


def has_alibi(model: PreTrainedModel) -> bool:
    """Whether a model of these families uses ALiBi; it then takes the positions of a mask."""
    places = {sys.modules[type(module).__module__] for module in model.modules()}
    found = [place for place in places if hasattr(place, BUILD)]
    for place in found:
        build = getattr(place, BUILD)
        if not hasattr(build, "by_position"):
            setattr(place, BUILD, _by_position(build))
    return bool(found) and getattr(model.config, "alibi", True)


def with_positions(mask: Tensor, tree: TokenTree, lengths: Tensor) -> Tensor:
    """The mask of a tree, carrying the position of the key in each slot, [B, S]."""
    depths = key_depths(tree, lengths, mask.shape[-1])[1]
    mask.key_positions = lengths[:, None] + depths  # type: ignore[attr-defined]
    return mask


def _by_position(build: Callable[[Tensor, int, torch.dtype], Tensor]) -> Callable[..., Tensor]:
    @wraps(build)
    def by_position(attention_mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
        positions: Tensor | None = getattr(attention_mask, "key_positions", None)
        if positions is None:
            return build(attention_mask, num_heads, dtype)
        rows, span = positions.shape
        table = build(positions.new_ones(1, span), num_heads, dtype)[:, 0]              # [H, S]
        return table[:, positions].transpose(0, 1).reshape(rows * num_heads, 1, span)

    by_position.by_position = True  # type: ignore[attr-defined]
    return by_position
