"""Corrects, during our reads, what transformers' families compute from the slots of their cache:
here rows and the nodes of a tree have positions that differ from their slots.

Functions are wrapped where the families' classes use them; outside of a read nothing changes.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from draftproof.cache.state_patches import (
    delta_net,
    going_on,
    in_a_read,
    last_tokens,
    several_queries,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MARK = "wrapped_by_draftproof"
_NETS = ("Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet")
"""Classes of gated delta nets whose forward is replaced here."""
_CONVOLUTIONS = ("Lfm2ShortConv", "Lfm2MoeShortConv")
"""Classes whose state is the inputs of a convolution alone."""


class Place(NamedTuple):
    """Positions of the nodes [B, N] of the current read, and of the keys in all slots [B, S]."""

    nodes: Tensor
    keys: Tensor
    context: int


_PLACE: ContextVar[Place | None] = ContextVar("place", default=None)


@contextmanager
def placed(place: Place | None) -> Iterator[None]:
    """A block that reads nodes and keys at these positions."""
    token = _PLACE.set(place)
    try:
        yield
    finally:
        _PLACE.reset(token)


R = TypeVar("R")


def patch_decoder(model: PreTrainedModel) -> bool:
    """Correct ALiBi (Bloom, Falcon) and Mamba's scan, and let gated delta nets record their states.
    Returns whether the model needs the place of a read."""
    files = [sys.modules[name] for name in {type(module).__module__ for module in model.modules()}]
    _wrap(files, "mamba_selective_scan", going_on)
    for file in files:
        if hasattr(file, "torch_recurrent_gated_delta_rule"):
            step = file.torch_recurrent_gated_delta_rule
            _wrap([file], "torch_chunk_gated_delta_rule", partial(in_a_read, step=step))
            _wrap([file], "torch_recurrent_gated_delta_rule", in_a_read)
            _wrap([file], "causal_conv1d_fn", last_tokens)
        elif any(hasattr(file, name) for name in _CONVOLUTIONS):
            _wrap([file], "causal_conv1d_fn", last_tokens)
    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if not hasattr(attend, _MARK):
        several = several_queries(attend)
        setattr(several, _MARK, True)
        ALL_ATTENTION_FUNCTIONS.register("sdpa", several)
    nets = {type(module) for module in model.modules()}
    _wrap([net for net in nets if net.__name__ in _NETS], "forward", delta_net)
    alibi = _wrap(files, "build_alibi_tensor", _by_place(_alibi))
    return alibi and bool(getattr(model.config, "alibi", True))


def patch_encoder_decoder(decoder: nn.Module) -> None:
    """Correct position embeddings and relative bias of a decoder that takes no positions."""
    if (embed := getattr(decoder, "embed_positions", None)) is not None:
        _wrap([type(embed)], "forward", _by_place(_embedded))
    _wrap({type(module) for module in decoder.modules()}, "compute_bias", _by_place(_biased))


def _wrap(
    owners: Collection[object], name: str, around: Callable[[Callable[..., R]], Callable[..., R]]
) -> bool:
    """Wrap the attribute `name` of these, unless it is wrapped; return whether any has it."""
    patched = [owner for owner in owners if hasattr(owner, name)]
    for owner in patched:
        inner = getattr(owner, name)
        if not hasattr(inner, _MARK):
            outer = around(inner)
            setattr(outer, _MARK, True)
            setattr(owner, name, outer)
    return bool(patched)


def _by_place(
    instead: Callable[..., Tensor]
) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """A wrapper that during a read calls `instead` with the place and the original function."""

    def around(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @wraps(original)
        def placed_or_original(*args: object, **kwargs: object) -> Tensor:
            place = _PLACE.get()
            if place is None:
                return original(*args, **kwargs)
            return instead(place, original, *args, **kwargs)

        return placed_or_original

    return around


def _alibi(
    place: Place, build: Callable[..., Tensor], mask: Tensor, heads: int, dtype: torch.dtype
) -> Tensor:
    """The bias [B * heads, 1, S]: a head's slope times the key's position, since softmax ignores
    what is equal for all keys of a query."""
    rows, span = place.keys.shape
    table = build(place.keys.new_ones(1, span), heads, dtype)[:, 0]                     # [H, S]
    by_key: Tensor = table[:, place.keys].transpose(0, 1).reshape(rows * heads, 1, span)
    return by_key


def _embedded(
    place: Place, embed: Callable[..., Tensor], module: Any, first: object,
    *args: object, **kwargs: object,
) -> Tensor:
    """Select each node's embedding from those of all positions; decoders pass tokens, their
    embeddings, or their shape."""
    length, nodes = min(place.keys.shape[1], place.context), place.nodes
    if not isinstance(first, Tensor):
        return embed(module, torch.Size((1, length))).reshape(length, -1)[nodes]
    if first.is_floating_point():
        rows: Tensor = embed(module, first[:1, :1].expand(1, length, -1))[0][nodes]
        return rows
    if "position_ids" in inspect.signature(embed).parameters:
        every = torch.arange(length, device=nodes.device)
        return embed(module, first, position_ids=every).reshape(length, -1)[nodes]
    filled = first.new_full((1, length), module.padding_idx + 1)           # padding has no position
    table = embed(module, filled).reshape(length, -1)[nodes]
    pad = embed(module, first.new_full((1, 1), module.padding_idx)).reshape(-1)
    return torch.where((first == module.padding_idx)[..., None], pad, table)


def _biased(
    place: Place, bias: Callable[..., Tensor], module: nn.Module, query_length: int,
    key_length: int, *args: object, **kwargs: object,
) -> Tensor:  # fmt: skip
    """Select the bias between each node and each key from the bias by distance."""
    last = key_length - 1
    by_distance = bias(module, 1, key_length, past_seen_tokens=last)[0, :, 0]              # [H, S]
    back = last - place.nodes[..., None] + place.keys[:, None]                          # [B, N, S]
    rows: Tensor = by_distance[:, back.clamp(0, last)].transpose(0, 1)
    return rows
