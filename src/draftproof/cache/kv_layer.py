"""What one attention layer stores for a running batch, as the model computes it or in 8 bits.

The layer class is the interface to transformers, whose cache layers have these methods: a model
writes through it to `slots`.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import torch
from torch import Tensor

from draftproof.native.pages import lazy_zeros


class LayerShape(NamedTuple):
    """What one attention layer stores per position; nothing without heads, as with shared keys.

    index_dim: size of the keys by which an indexer, if any, selects what attention may see.
    """

    heads: int
    key_dim: int
    value_dim: int
    index_dim: int = 0


class KVLayer:
    """One layer: keys [B, heads, capacity, key_dim] and values, written at the slots that its cache
    sets."""

    is_compileable = True
    is_croppable = False
    is_sliding = False
    supports_early_init = True
    names: tuple[str, ...] = ("keys", "values")
    """Of what is stored, in the order of `stores`."""
    keys: Tensor
    values: Tensor

    def __init__(self, *stores: Tensor) -> None:
        for name, store in zip(self.names, stores, strict=True):
            setattr(self, name, store)
        self.is_initialized = True
        self.slots: Tensor | None = None                 # [B, W] where the current read writes
        self.span: int = self.keys.shape[2]                  # how many slots it may see

    @classmethod
    def empty(
        cls, shape: LayerShape, rows: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> Self:
        """Storage for `rows` rows of `capacity` positions. It is zeroed, since NaN in scratch would
        pass the mask; a text that ends early takes no memory for the rest of its capacity."""
        store = (rows, shape.heads, capacity)
        sizes = (shape.key_dim, shape.value_dim)
        return cls(*(lazy_zeros(*store, size, dtype=dtype, device=device) for size in sizes))

    @property
    def stores(self) -> tuple[Tensor, ...]:
        """All stored tensors, [B, heads, capacity, ...] each, from which a layer can be made."""
        return tuple([getattr(self, name) for name in self.names])

    def rows(self, start: int, stop: int) -> Self:
        """A view of some rows."""
        return type(self)(*(store[start:stop] for store in self.stores))

    def set_slots(self, slots: Tensor, span: int) -> None:
        """Let the next forward write at `slots` [B, W] and see the first `span`."""
        self.slots, self.span = slots, span

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write [B, heads, W, dim] at `slots`; return the first `span` slots of the layer."""
        assert self.slots is not None
        for store, states in ((self.keys, key_states), (self.values, value_states)):
            write(store, self.slots, states)
        return self.keys[:, :, : self.span], self.values[:, :, : self.span]

    def visible(self, span: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first `span` slots, dequantised if need be."""
        return self.keys[:, :, :span], self.values[:, :, :span]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: storage exists from the start."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.span, 0

    def get_seq_length(self) -> int:
        return 0        # rows differ, and positions are always passed explicitly

    def get_max_length(self) -> int:
        return self.keys.shape[2]


class IndexedLayer(KVLayer):
    """A layer that also stores the keys of an indexer, [B, 1, capacity, index_dim]."""

    names = ("keys", "values", "indexer_keys")
    indexer_keys: Tensor

    @classmethod
    def empty(
        cls, shape: LayerShape, rows: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> Self:
        plain = KVLayer.empty(shape, rows, capacity, dtype, device)
        size = (rows, 1, capacity, shape.index_dim)
        return cls(*plain.stores, lazy_zeros(*size, dtype=dtype, device=device))

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Write [B, W, dim] at `slots`; return the visible slots."""
        assert self.slots is not None
        write(self.indexer_keys, self.slots, indexer_key_states[:, None])
        return self.indexer_keys[:, 0, : self.span]


class Int8Layer(KVLayer):
    """Keys and values in 8 bits: codes [B, heads, capacity, dim], and their scales [B, heads,
    capacity, 1].

    The codes of a token's keys and values depend on these alone, not on their slot or on their
    neighbours: trees, moves and rollbacks are as exact as with the plain cache.
    """

    names = ("keys", "values", "key_scales", "value_scales")
    key_scales: Tensor
    value_scales: Tensor
    most = 127.0
    """The largest code."""

    @classmethod
    def empty(
        cls, shape: LayerShape, rows: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> Self:
        """Zeroed storage: codes of one byte each, and scales in the model's dtype."""
        codes = KVLayer.empty(shape, rows, capacity, torch.int8, device).stores
        scales = [lazy_zeros(*code.shape[:3], 1, dtype=dtype, device=device) for code in codes]
        return cls(*codes, *scales)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Quantise [B, heads, W, dim] and write it at `slots`; return the first `span` slots,
        dequantised."""
        assert self.slots is not None
        pairs = ((self.keys, self.key_scales), (self.values, self.value_scales))
        for (codes, scales), states in zip(pairs, (key_states, value_states), strict=True):
            least = torch.finfo(states.dtype).tiny
            scale = (states.abs().amax(-1, keepdim=True) / self.most).clamp_(min=least)
            exact = torch.promote_types(states.dtype, torch.float32)
            scaled = (states.to(exact) / scale).clamp_(-self.most, self.most)
            write(codes, self.slots, self._encode(scaled))
            write(scales, self.slots, scale)
        return self.visible(self.span)

    def visible(self, span: int) -> tuple[Tensor, Tensor]:
        pairs = ((self.keys, self.key_scales), (self.values, self.value_scales))
        seen = [(codes[:, :, :span], scales[:, :, :span]) for codes, scales in pairs]
        return self._decode(*seen[0]), self._decode(*seen[1])

    def _encode(self, scaled: Tensor) -> Tensor:
        """Encode numbers up to `most` as bytes."""
        return scaled.round_().to(torch.int8)

    def _decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Codes times scales, in the dtype of the scales."""
        return codes * scales


class Fp8Layer(Int8Layer):
    """A layer whose codes are floats with three bits of mantissa (e4m3), stored as bytes: small
    numbers keep their precision."""

    most = 448.0

    def _encode(self, scaled: Tensor) -> Tensor:
        return scaled.to(torch.float8_e4m3fn).view(torch.int8)

    def _decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        return codes.view(torch.float8_e4m3fn).to(scales.dtype).mul_(scales)


LAYERS: dict[str, type[KVLayer]] = {"int8": Int8Layer, "fp8": Fp8Layer}
"""Quantised layers by the name of what they store."""


def write(store: Tensor, slots: Tensor, states: Tensor) -> None:
    """store[b, :, slots[b, w]] = states[b, :, w]."""
    if len(store) == 1:
        store.index_copy_(2, slots[0], states)
    else:                               # much faster than scattering along the slots
        rows, heads, capacity, size = store.shape
        first = capacity * torch.arange(rows * heads, device=slots.device).view(rows, heads, 1)
        store.view(-1, size).index_copy_(
            0, (first + slots[:, None]).flatten(), states.reshape(-1, size)
        )
