"""Positions, for what transformers takes from slots of its cache: ALiBi (Bloom, Falcon, MPT), and
Llama 4's attention temperature; so that rows, and nodes of a tree, have their own.

Softmax ignores what is equal for all keys of a query, so ALiBi's bias is the slope of a head times
the key's position. A mask of ours carries the positions; masks of others are treated as ever.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftproof.core.tree import TokenTree
from draftproof.model.kv_cache import key_depths
from draftproof.model.wrapping import sources, wrap

MPT, LLAMA_4 = "build_mpt_alibi_tensor", "attn_temperature_tuning"
"""What marks the body of MPT, and the attention of Llama 4."""


def takes_positions(model: PreTrainedModel) -> bool:
    """Whether a model of these families needs them; it then takes them from a mask."""
    alibi = wrap(sources(model), "build_alibi_tensor", _alibi)
    for mark, around in ((MPT, _mpt), (LLAMA_4, _llama_4)):
        kinds = {type(module) for module in model.modules() if hasattr(module, mark)}
        alibi |= wrap(kinds, "forward", around)
    return alibi and bool(getattr(model.config, "alibi", True))


def with_positions(mask: Tensor, tree: TokenTree, lengths: Tensor, first: int) -> Tensor:
    """The mask of nodes `first:` of a tree, carrying the position of the key in each slot, [B, S],
    and those of the nodes, [B, N - first]."""
    depths = key_depths(tree, lengths, mask.shape[-1])[1]
    mask.key_positions = lengths[:, None] + depths  # type: ignore[attr-defined]
    mask.query_positions = lengths[:, None] + tree.depths[:, first:]  # type: ignore[attr-defined]
    return mask


def _alibi(build: Callable[[Tensor, int, torch.dtype], Tensor]) -> Callable[..., Tensor]:
    @wraps(build)
    def by_position(attention_mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
        positions: Tensor | None = getattr(attention_mask, "key_positions", None)
        if positions is None:
            return build(attention_mask, num_heads, dtype)
        rows, span = positions.shape
        table = build(positions.new_ones(1, span), num_heads, dtype)[:, 0]              # [H, S]
        return table[:, positions].transpose(0, 1).reshape(rows * num_heads, 1, span)

    return by_position


class _Bias:
    """What MPT's attention cuts from a table by slots: here the bias [B, H, 1, S] as it is."""

    shape = (0, 0, 0)

    def __init__(self, bias: Tensor) -> None:
        self.bias = bias

    def size(self, dim: int) -> int:
        return self.shape[dim]

    def __getitem__(self, slots: Any) -> Tensor:
        return self.bias


def _mpt(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def by_position(
        self: Any, input_ids: Tensor | None = None, past_key_values: Any = None,
        attention_mask: Tensor | None = None, **how: Any,
    ) -> Any:  # fmt: skip
        positions: Tensor | None = getattr(attention_mask, "key_positions", None)
        if positions is not None:
            table = getattr(self, MPT)(self.num_heads, positions.shape[1], device=positions.device)
            bias = _Bias(table[:, 0, positions].transpose(0, 1)[:, :, None])
            self = copy.copy(self)                      # the same parts, for this read alone
            setattr(self, MPT, lambda *_, **__: bias)
        return forward(self, input_ids, past_key_values, attention_mask, **how)

    return by_position


def _llama_4(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def by_position(
        self: Any, hidden_states: Tensor, position_embeddings: Any, attention_mask: Tensor | None,
        *rest: Any, **how: Any,
    ) -> Any:  # fmt: skip
        positions: Tensor | None = getattr(attention_mask, "query_positions", None)
        if positions is not None and self.attn_temperature_tuning and not self.use_rope:
            steps = ((positions.float() + 1) / self.floor_scale).floor()
            scales, queries = steps.log1p() * self.attn_scale + 1, self.q_proj
            self = copy.copy(self)                      # the same parts, for this read alone
            self._modules = {name: one for name, one in self._modules.items() if one is not queries}
            self.q_proj = lambda inputs: (queries(inputs) * scales[..., None]).to(inputs.dtype)
            self.attn_temperature_tuning = False
        return forward(self, hidden_states, position_embeddings, attention_mask, *rest, **how)

    return by_position
