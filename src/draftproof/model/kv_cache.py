"""The KV cache of a running batch: left-aligned rows, each with its own length, preallocated once.

The cache holds exactly the committed tokens of each row; what lies beyond `lengths` is scratch. Rolling back is not
committing. The layer class is the seam to transformers: a model writes through it wherever `slots` says.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple, Self

import torch
import transformers
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from draftproof.core.tree import TokenTree
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


class QuantizedKVLayer(KVLayer):
    """Keys and values in 8 bits: codes [B, heads, capacity, dim], and their scales [B, heads, capacity, 1].

    What a token's keys and values become depends on them alone, not on their slot nor on what was written beside
    them: trees, moves and rollbacks are as exact as with the plain cache.
    """

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
"""Quantised layers by the name of what they store."""


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


def tree_mask(
    tree: TokenTree, lengths: Tensor, span: int, dtype: torch.dtype, first: int = 0, window: int | None = None
) -> Tensor:
    """[B, 1, N - first, span]: 0 where a node sees a cache slot, the dtype's minimum elsewhere.

    Node i of row b lies in slot ``lengths[b] + i`` and sees the slots below ``lengths[b]`` and its own ancestors.
    window: see only that many positions back, itself included (sliding attention). Additive: a boolean mask is
    added to the scores, silently, by eager attention in transformers 5. No host synchronisation.
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
