"""The cache of an encoder–decoder: keys and values of the text, and those of each row's encoder
output for cross-attention, computed once.

The latter belong to a row and not to its text: nothing is committed to them or rolled back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import EncoderDecoderCache

from draftproof.cache.kv_cache import KVCache
from draftproof.cache.kv_layer import KVLayer


class SourceLayer(KVLayer):
    """The keys and values of the encoder's output in one layer."""

    def get_seq_length(self) -> int:
        return self.keys.shape[2]


@dataclass
class _Sources:
    """For all rows of a cache, the length of each encoder output, and its keys and values
    [B, heads, S, dim], layer by layer."""

    sizes: list[int]
    stores: list[Tensor] = field(default_factory=list)

    def put(self, row: int, states: Sequence[Tensor]) -> None:
        """Store the keys and values of a row, [1, heads, s, dim] each."""
        if not self.stores:
            self.stores = [state[:, :, :0].repeat(len(self.sizes), 1, 1, 1) for state in states]
        self.sizes[row] = size = states[0].shape[2]
        more = size - self.stores[0].shape[2]
        if more > 0:
            self.stores = [F.pad(store, (0, 0, 0, more)) for store in self.stores]
        for store, state in zip(self.stores, states, strict=True):
            store[row] = F.pad(state[0], (0, 0, 0, store.shape[2] - size))  # NaN would pass a mask

    def select(self, rows: Sequence[int]) -> None:
        """Move these rows to the front, in this order."""
        changed = [(new, old) for new, old in enumerate(rows) if new != old]
        if changed:
            new, old = (list(side) for side in zip(*changed, strict=True))
            for store in self.stores:
                store[new] = store[old]
        self.sizes[:] = [self.sizes[row] for row in rows] + self.sizes[len(rows) :]


class SourceCache(KVCache):
    """A `KVCache` whose rows also attend to a source."""

    sources: _Sources
    first: int = 0          # first row of this view in the whole cache
    least: int = 0          # the least length of encoder outputs to show, if so much is stored

    @classmethod
    def wrap(cls, plain: KVCache) -> SourceCache:
        """Make a cache of an empty one; its rows have no source yet."""
        cache = cls(plain.layers, plain.lengths, plain.capacity)
        cache.sources = _Sources([0] * len(plain.lengths))
        return cache

    def put(self, row: int, states: Sequence[Tensor]) -> None:
        """Set the keys and values that a row of this view attends to, layer by layer."""
        self.sources.put(self.first + row, states)

    @property
    def source_sizes(self) -> list[int]:
        """The length of each row's encoder output."""
        return self.sources.sizes[self.first : self.first + len(self.lengths)]

    def source_mask(self) -> Tensor | None:
        """[B, S] the mask of the encoder outputs that exist; None: all do."""
        sizes, longest = self.source_sizes, self.longest_source
        if longest == min(sizes):
            return None
        place = torch.arange(longest, device=self.lengths.device)
        return (place < torch.tensor(sizes, device=place.device)[:, None]).long()

    @property
    def longest_source(self) -> int:
        return max(self.least, *self.source_sizes)

    def for_model(self) -> EncoderDecoderCache:
        """Both caches in the form that a forward takes."""
        rows, longest = slice(self.first, self.first + len(self.lengths)), self.longest_source
        seen = [store[rows, :, :longest] for store in self.sources.stores]
        layers = [SourceLayer(*pair) for pair in zip(seen[::2], seen[1::2], strict=True)]
        return EncoderDecoderCache(self.for_module(), transformers.Cache(layers=layers))

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        self.sources.select(rows)

    def _view(self, start: int, stop: int) -> Self:
        view = super()._view(start, stop)
        view.sources, view.first = self.sources, self.first + start
        return view
