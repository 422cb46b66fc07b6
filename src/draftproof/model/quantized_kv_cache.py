"""Keys and values in 8 bits, with a scale for every token and head. Knows storage; the cache around it is the plain one.

What a token's keys and values become depends on them alone: not on their slot, nor on what was written beside them. So
trees, moves and rollbacks are as exact as with the plain cache, and the text is one with any drafter, though not that of
the plain cache.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Self

import torch
from torch import Tensor

from draftproof.model.kv_cache import KVLayer, LayerShape, write


class QuantizedKVLayer(KVLayer):
    """One layer: codes [B, heads, capacity, dim] of keys and values, and their scales [B, heads, capacity, 1]."""

    most: ClassVar[float]
    """The largest code."""

    def __init__(self, keys: Tensor, values: Tensor, key_scales: Tensor, value_scales: Tensor) -> None:
        super().__init__(keys, values)
        self.key_scales, self.value_scales = key_scales, value_scales

    @classmethod
    def empty(cls, shape: LayerShape, rows: int, capacity: int, dtype: torch.dtype, device: torch.device) -> Self:
        """Codes of one byte each, scales in the model's dtype. Zeroed, as the plain layer."""
        store = (rows, shape.heads, capacity)
        codes = [torch.zeros(*store, size, dtype=torch.int8, device=device) for size in (shape.key_dim, shape.value_dim)]
        return cls(*codes, *(torch.zeros(*store, 1, dtype=dtype, device=device) for _ in codes))

    @property
    def stores(self) -> tuple[Tensor, ...]:
        return self.keys, self.values, self.key_scales, self.value_scales

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Quantise [B, heads, W, dim] and write it at `slots`; return the first `span` slots as they can be multiplied."""
        assert self.slots is not None
        pairs = ((self.keys, self.key_scales), (self.values, self.value_scales))
        for (codes, scales), states in zip(pairs, (key_states, value_states), strict=True):
            scale = (states.abs().amax(-1, keepdim=True) / self.most).clamp_(min=torch.finfo(states.dtype).tiny)
            exact = torch.promote_types(states.dtype, torch.float32)
            write(codes, self.slots, self._encode((states.to(exact) / scale).clamp_(-self.most, self.most)))
            write(scales, self.slots, scale)
        seen = [(codes[:, :, : self.span], scales[:, :, : self.span]) for codes, scales in pairs]
        return self._decode(*seen[0]), self._decode(*seen[1])

    @abstractmethod
    def _encode(self, scaled: Tensor) -> Tensor:
        """int8, of numbers up to `most`."""

    @abstractmethod
    def _decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Codes times scales, in the dtype of the scales."""


class Int8Layer(QuantizedKVLayer):
    """Codes are integers: even steps."""

    most = 127.0

    def _encode(self, scaled: Tensor) -> Tensor:
        return scaled.round_().to(torch.int8)

    def _decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        return codes * scales


class Fp8Layer(QuantizedKVLayer):
    """Codes are floats of three bits behind the point (e4m3), held as bytes: small numbers keep their precision."""

    most = 448.0

    def _encode(self, scaled: Tensor) -> Tensor:
        return scaled.to(torch.float8_e4m3fn).view(torch.int8)

    def _decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        return codes.view(torch.float8_e4m3fn).to(scales.dtype).mul_(scales)


LAYERS: dict[str, type[KVLayer]] = {"int8": Int8Layer, "fp8": Fp8Layer}
"""By the name of what is stored."""
