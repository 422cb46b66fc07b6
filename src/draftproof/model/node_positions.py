"""The positions of a tree's nodes in decoders whose forward takes none.

They count positions from the length of their cache, the same for all rows, and know nothing of
trees. While a read runs, the function that embeds positions, or biases attention by distance, is
asked for all of them, and those of each node are taken. Calls of others are treated as ever.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftproof.model.wrapping import wrap


class Place(NamedTuple):
    """Positions of the nodes [B, N] of the running read, and of the keys they see, [B, S]."""

    nodes: Tensor
    keys: Tensor
    context: int


_PLACE: ContextVar[Place | None] = ContextVar("place", default=None)


@contextmanager
def placed(place: Place) -> Iterator[None]:
    token = _PLACE.set(place)
    try:
        yield
    finally:
        _PLACE.reset(token)


def place_by_nodes(decoder: Any) -> None:
    """Let the positions of a decoder be those of the running read, if there is one."""
    if (embed := getattr(decoder, "embed_positions", None)) is not None:
        wrap([type(embed)], "forward", _embedded)
    wrap({type(module) for module in decoder.modules()}, "compute_bias", _biased)


def _embedded(embed: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Of embedded positions, those of each node."""
    takes_positions = "position_ids" in inspect.signature(embed).parameters

    @wraps(embed)
    def by_node(self: Any, first: Any, *args: Any, **kwargs: Any) -> Tensor:
        place = _PLACE.get()
        if place is None:
            return embed(self, first, *args, **kwargs)
        length = min(place.keys.shape[1], place.context)
        if isinstance(first, Tensor) and first.is_floating_point():     # embeddings of tokens
            return embed(self, first[:1, :1].expand(1, length, -1))[0][place.nodes]
        if takes_positions:
            every = torch.arange(length, device=place.nodes.device)
            return embed(self, first, position_ids=every).reshape(length, -1)[place.nodes]
        if not isinstance(first, Tensor):                               # their shape
            return embed(self, torch.Size((1, length))).reshape(length, -1)[place.nodes]
        padding = getattr(self, "padding_idx", None)
        other = 0 if padding is None else padding + 1
        table = embed(self, first.new_full((1, length), other)).reshape(length, -1)[place.nodes]
        if padding is None:
            return table
        pad = embed(self, first.new_full((1, 1), padding)).reshape(-1)  # it has no position
        return torch.where((first == padding)[..., None], pad, table)

    return by_node


def _biased(bias: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Of the bias by distance, that between each node and each key."""

    @wraps(bias)
    def by_node(self: Any, query_length: int, key_length: int, *args: Any, **kwargs: Any) -> Tensor:
        place = _PLACE.get()
        if place is None:
            return bias(self, query_length, key_length, *args, **kwargs)
        last = key_length - 1
        by_distance = bias(self, 1, key_length, past_seen_tokens=last)[0, :, 0]         # [H, S]
        back = last - place.nodes[..., None] + place.keys[:, None]                      # [B, N, S]
        return by_distance[:, back.clamp(0, last)].transpose(0, 1)

    return by_node
