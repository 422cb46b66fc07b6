"""The KV cache of a running batch: left-aligned rows, each with its own length, preallocated once.

The cache holds exactly the committed tokens of each row; what lies beyond `lengths` is scratch. Rolling back is not
committing. The layer class is the seam to transformers: a model writes through it wherever `slots` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import transformers
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin


class LayerShape(NamedTuple):
    """What one attention layer stores per position."""

    heads: int
    key_dim: int
    value_dim: int


class RowLayer(CacheLayerMixin):
    """One layer: keys [B, heads, capacity, key_dim] and values, written at the slots its cache points to."""

    is_compileable = True
    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys: Tensor = keys
        self.values: Tensor = values
        self.is_initialized = True
        self.slots: Tensor | None = None                 # [B, W] where the running read writes

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Write [B, heads, W, dim] at `slots`; return the whole layer."""
        assert self.slots is not None
        for store, states in ((self.keys, key_states), (self.values, value_states)):
            if len(store) == 1:
                store.index_copy_(2, self.slots[0], states)
            else:
                index = self.slots[:, None, :, None].expand_as(states)
                store.scatter_(2, index, states)
        return self.keys, self.values

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: storage exists from the start."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[2], 0

    def get_seq_length(self) -> int:
        return 0                                         # rows differ; positions are always given explicitly

    def get_max_length(self) -> int:
        return self.keys.shape[2]


class RowCache(transformers.Cache):
    """Per layer one `[B, heads, capacity, dim]` pair; per row a length. A view shares storage with its parent."""

    def __init__(self, layers: Sequence[RowLayer], lengths: Tensor) -> None:
        super().__init__(layers=list(layers))
        self.lengths = lengths                           # [B] int64
        self._views: dict[tuple[int, int], RowCache] = {}

    @classmethod
    def empty(
        cls, shapes: Sequence[LayerShape], rows: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> RowCache:
        """Storage for `rows` rows of `capacity` positions. Zeroed: scratch is masked, but NaN would pass a mask."""
        def store(heads: int, dim: int) -> Tensor:
            return torch.zeros(rows, heads, capacity, dim, dtype=dtype, device=device)

        layers = [RowLayer(store(s.heads, s.key_dim), store(s.heads, s.value_dim)) for s in shapes]
        return cls(layers, torch.zeros(rows, dtype=torch.int64, device=device))

    @property
    def capacity(self) -> int:
        """Positions per row, scratch included."""
        return int(self.layers[0].keys.shape[2])

    @property
    def nbytes(self) -> int:
        """Bytes of storage."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers)

    def write_at(self, slots: Tensor) -> None:
        """Let the next forward write its W positions at `slots` [B, W]."""
        for layer in self.layers:
            layer.slots = slots

    def keep(self, nodes: Tensor | None, count: Tensor) -> None:
        """Commit: move scratch nodes `nodes` [B, D] to the front of the scratch and add `count` [B] to the lengths.

        Gathers before it writes, so a path may overlap its destination; a node that holds its own index stays.
        None: the nodes of a chain, which lie where they belong.
        """
        if nodes is not None:
            places = torch.arange(nodes.shape[1], device=nodes.device)
            self._move(self.lengths[:, None] + nodes, self.lengths[:, None] + places)
        self.lengths.add_(count)

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order, in front; a row may be repeated. The rows behind become empty."""
        changed = [(new, old) for new, old in enumerate(rows) if new != old]
        if changed:
            device = self.lengths.device
            new, old = (torch.tensor(side, device=device) for side in zip(*changed, strict=True))
            for layer in self.layers:
                for store in (layer.keys, layer.values):
                    store.index_copy_(0, new, store.index_select(0, old))
            self.lengths.index_copy_(0, new, self.lengths.index_select(0, old))
        self.lengths[len(rows) :] = 0

    def rows(self, start: int, stop: int) -> RowCache:
        """A view of rows `start` to `stop`: reading and keeping there leaves the others alone."""
        if (start, stop) == (0, len(self.lengths)):
            return self
        if (start, stop) not in self._views:
            layers = [RowLayer(layer.keys[start:stop], layer.values[start:stop]) for layer in self.layers]
            self._views[start, stop] = RowCache(layers, self.lengths[start:stop])
        return self._views[start, stop]

    def _move(self, source: Tensor, target: Tensor) -> None:
        for layer in self.layers:
            for store in (layer.keys, layer.values):
                shape = (-1, store.shape[1], -1, store.shape[3])
                moved = store.gather(2, source[:, None, :, None].expand(shape))
                store.scatter_(2, target[:, None, :, None].expand(shape), moved)
