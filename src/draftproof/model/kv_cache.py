"""The KV cache of a running batch: left-aligned rows, each with its own length, preallocated once.

The cache holds exactly the committed tokens of each row; what lies beyond `lengths` is scratch. Rolling back is not
committing. The layer class is the seam to transformers: a model writes through it wherever `slots` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

import torch
import transformers
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from draftproof.native.kernels import Stores

SPAN = 64
"""A read sees the slots of its cache up to a multiple of this."""


class LayerShape(NamedTuple):
    """What one attention layer stores per position."""

    heads: int
    key_dim: int
    value_dim: int


class KVLayer(CacheLayerMixin):
    """One layer: keys [B, heads, capacity, key_dim] and values, written at the slots its cache points to."""

    is_compileable = True
    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys: Tensor = keys
        self.values: Tensor = values
        self.is_initialized = True
        self.slots: Tensor | None = None                 # [B, W] where the running read writes
        self.span: int = keys.shape[2]                   # and how many slots it may see

    @classmethod
    def empty(cls, shape: LayerShape, rows: int, capacity: int, dtype: torch.dtype, device: torch.device) -> Self:
        """Storage for `rows` rows of `capacity` positions. Zeroed: scratch is masked, but NaN would pass a mask."""
        sizes = (shape.key_dim, shape.value_dim)
        return cls(*(torch.zeros(rows, shape.heads, capacity, size, dtype=dtype, device=device) for size in sizes))

    @property
    def stores(self) -> tuple[Tensor, ...]:
        """All that is stored, [B, heads, capacity, ...] each; what makes a layer anew."""
        return self.keys, self.values

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Write [B, heads, W, dim] at `slots`; return the first `span` slots of the layer."""
        assert self.slots is not None
        for store, states in ((self.keys, key_states), (self.values, value_states)):
            write(store, self.slots, states)
        return self.keys[:, :, : self.span], self.values[:, :, : self.span]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: storage exists from the start."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.span, 0

    def get_seq_length(self) -> int:
        return 0                                         # rows differ; positions are always given explicitly

    def get_max_length(self) -> int:
        return self.keys.shape[2]


@dataclass
class _Reach:
    """What the host knows of how far rows reach: none holds more tokens than `longest`; nodes of the last tree read."""

    longest: int = 0
    read: int = 0


class KVCache(transformers.Cache):
    """Per layer one `[B, heads, capacity, dim]` pair; per row a length. A view shares storage with its parent.

    A read sees no more slots than the rows may reach. What they reach is bounded on the host, without asking the
    device: every commit may have been a whole tree, until `bound` is told better.
    """

    def __init__(self, layers: Sequence[KVLayer], lengths: Tensor, reach: _Reach | None = None) -> None:
        super().__init__(layers=list(layers))
        self.lengths = lengths                           # [B] int64
        self.capacity = int(layers[0].keys.shape[2])     # positions per row, scratch included
        self._reach = reach or _Reach()                  # of a cache and all its views
        self._views: dict[tuple[int, int], KVCache] = {}

    @classmethod
    def empty(
        cls,
        shapes: Sequence[LayerShape],
        rows: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        layer: type[KVLayer] = KVLayer,
    ) -> KVCache:
        """Storage for `rows` rows of `capacity` positions, in layers of this class."""
        layers = [layer.empty(shape, rows, capacity, dtype, device) for shape in shapes]
        return cls(layers, torch.zeros(rows, dtype=torch.int64, device=device))

    @property
    def nbytes(self) -> int:
        """Bytes of storage."""
        return sum(store.nbytes for layer in self.layers for store in layer.stores)

    def write_at(self, first: int, nodes: int) -> int:
        """Let the next forward write nodes `first` to `nodes` of a tree; return how many slots it may see."""
        span = self.reserve(nodes)
        slots = self.lengths[:, None] + torch.arange(first, nodes, device=self.lengths.device)
        if not self.holds(nodes):                            # padding alone lies so far out
            slots = slots.clamp(max=self.capacity - 1)
        for layer in self.layers:
            layer.slots, layer.span = slots, span
        return span

    def holds(self, nodes: int) -> bool:
        """Whether so many nodes behind any row are within the capacity, as far as the host knows."""
        return self._reach.longest + nodes <= self.capacity

    def reserve(self, nodes: int) -> int:
        """Note that a tree of so many nodes is read; return how many slots rows and tree may reach."""
        self._reach.read = nodes
        return min(-(-(self._reach.longest + nodes) // SPAN) * SPAN, self.capacity)

    def keep(self, nodes: Tensor | None, count: Tensor) -> None:
        """Commit: move scratch nodes `nodes` [B, D] to the front of the scratch and add `count` [B] to the lengths.

        Nodes of a row ascend, so a path may overlap its destination; a node that holds its own index stays.
        None: the nodes of a chain, which lie where they belong.
        """
        if nodes is not None:
            self._bring(nodes)
        self.lengths.add_(count)
        self._reach.longest += self._reach.read if nodes is None else nodes.shape[1]

    @cached_property
    def stores(self) -> Stores | None:
        """Where keys and values lie, layer by layer, for kernels."""
        return Stores.of([store for layer in self.layers for store in layer.stores])

    def clear(self) -> None:
        """Zero what is stored: NaN would pass a mask."""
        for store in (store for layer in self.layers for store in layer.stores):
            store.zero_()

    def bound(self, longest: int) -> None:
        """No row of this cache or its parent holds more than `longest` tokens."""
        self._reach.longest = longest

    def take(self, row: Tensor, other: KVCache) -> None:
        """Put the one row of another cache of this capacity into row `row` [1]."""
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            for store, given in zip(mine.stores, theirs.stores, strict=True):
                store.index_copy_(0, row, given)
        self.lengths.index_copy_(0, row, other.lengths)

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order, in front; a row may be repeated. The rows behind become empty."""
        changed = [(new, old) for new, old in enumerate(rows) if new != old]
        if changed:
            device = self.lengths.device
            new, old = (torch.tensor(side, device=device) for side in zip(*changed, strict=True))
            if self.stores is not None and _in_turn(changed):
                self.stores.copy(changed, self.lengths)
            else:
                for layer in self.layers:
                    for store in layer.stores:
                        store.index_copy_(0, new, store.index_select(0, old))
            self.lengths.index_copy_(0, new, self.lengths.index_select(0, old))
        self.lengths[len(rows) :] = 0

    def rows(self, start: int, stop: int) -> KVCache:
        """A view of rows `start` to `stop`: reading and keeping there leaves the others alone."""
        if (start, stop) == (0, len(self.lengths)):
            return self
        if (start, stop) not in self._views:
            layers = [type(layer)(*(store[start:stop] for store in layer.stores)) for layer in self.layers]
            self._views[start, stop] = KVCache(layers, self.lengths[start:stop], self._reach)
        return self._views[start, stop]

    def _bring(self, nodes: Tensor) -> None:
        """Move nodes [B, D] of the scratch to its front."""
        if self.stores is not None:
            self.stores.keep(nodes, self.lengths)
            return
        front = torch.arange(nodes.shape[1], device=nodes.device)
        source, target = self.lengths[:, None] + nodes, self.lengths[:, None] + front
        for layer in self.layers:
            for store in layer.stores:
                write(store, target, _read(store, source))


def _in_turn(changed: Sequence[tuple[int, int]]) -> bool:
    """Whether rows (new, old) may be copied one after another: none that is still to be copied is overwritten before."""
    done = set[int]()
    for new, old in changed:
        if old in done:
            return False
        done.add(new)
    return True


def write(store: Tensor, slots: Tensor, states: Tensor) -> None:
    """store[b, :, slots[b, w]] = states[b, :, w]."""
    if len(store) == 1:
        store.index_copy_(2, slots[0], states)
    else:                                                # far quicker than scattering along the slots, and no strided view
        rows, heads, capacity, size = store.shape
        first = capacity * torch.arange(rows * heads, device=slots.device).view(rows, heads, 1)
        store.view(-1, size).index_copy_(0, (first + slots[:, None]).flatten(), states.reshape(-1, size))


def _read(store: Tensor, slots: Tensor) -> Tensor:
    """[B, heads, D, dim] of the slots [B, D] of each row."""
    if len(store) == 1:
        return store.index_select(2, slots[0])
    rows = torch.arange(len(store), device=slots.device)[:, None]
    return store.transpose(1, 2)[rows, slots].transpose(1, 2)
