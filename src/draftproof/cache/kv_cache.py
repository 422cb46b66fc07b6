"""The KV cache of a running batch: left-aligned rows, each with its own length, preallocated once.

The cache holds exactly the committed tokens of each row; what lies beyond `lengths` is scratch.
Rolling back is not committing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from draftproof.cache.kv_layer import IndexedLayer, KVLayer, LayerShape, write
from draftproof.core.tree import TokenTree
from draftproof.native.kernels import Stores

SPAN = 64
"""A read sees the slots of its cache up to a multiple of this."""
CHUNKS = (32, 128, 256)
"""Sizes of the chunks in which prompts are read: the largest, or, with static shapes, the smallest
that holds what is left, padded."""


def chunk_of(tokens: int, static: bool) -> int:
    """The size of the next chunk if `tokens` are left; with static shapes it includes padding."""
    sizes = CHUNKS if static else (tokens,)
    return next((size for size in sizes if tokens <= size <= CHUNKS[-1]), CHUNKS[-1])


@dataclass
class _Reach:
    """An upper bound of row lengths that the host knows. longest: no row has more tokens. read:
    nodes of the last tree that was read."""

    longest: int = 0
    read: int = 0


class Layer(Protocol):
    """What the cache requires of a layer."""

    @property
    def stores(self) -> tuple[Tensor, ...]: ...
    def rows(self, start: int, stop: int) -> Self: ...
    def set_slots(self, slots: Tensor, span: int) -> None: ...


class KVCache:
    """Per layer one `[B, heads, capacity, dim]` pair; per row a length. A view shares storage with
    its parent.

    A read sees no more slots than the longest row may have. The host keeps an upper bound of that
    without asking the device: it assumes that every commit was a whole tree, until `set_max_length`
    says better.
    """

    def __init__(
        self, layers: Sequence[Layer], lengths: Tensor, capacity: int, reach: _Reach | None = None
    ) -> None:
        self.layers: list[Any] = list(layers)
        self.lengths = lengths                           # [B] int64
        self.capacity = capacity                         # positions per row, scratch included
        self._reach = reach or _Reach()                  # of a cache and all its views
        self._views: dict[tuple[int, int], KVCache] = {}
        self._for_module: object = None

    @classmethod
    def empty(
        cls, shapes: Sequence[LayerShape], rows: int, capacity: int, dtype: torch.dtype,
        device: torch.device, layer: type[KVLayer] = KVLayer
    ) -> KVCache:
        """Storage for `rows` rows of `capacity` positions, in layers of this class."""
        layers = [empty_layer(shape, rows, capacity, dtype, device, layer) for shape in shapes]
        return cls(layers, torch.zeros(rows, dtype=torch.int64, device=device), capacity)

    def for_module(self) -> object:
        """The same layers as a transformers cache."""
        if self._for_module is None:
            from draftproof.cache.module_cache import module_cache

            self._for_module = module_cache(self)
        return self._for_module

    @property
    def nbytes(self) -> int:
        """Bytes of storage."""
        return sum(store.nbytes for store in self.tensors)

    @property
    def tensors(self) -> list[Tensor]:
        """All stores, layer by layer, each [B, heads, capacity, ...]."""
        return [store for layer in self.layers for store in layer.stores]

    @property
    def by_position(self) -> list[Tensor]:
        """What is stored per position: all that can be cut to the beginning of a text."""
        return self.tensors

    def copied_states(self) -> list[Tensor] | None:
        """A copy of the recurrent states after all committed tokens; None if they are not known, or
        there are none."""
        return None

    def resume(self, states: Sequence[Tensor], tokens: Tensor) -> None:
        """Let the only row go on from copied states after tokens [n]."""

    def write_at(self, first: int, nodes: int) -> int:
        """Let the next forward write nodes `first` to `nodes`; return how many slots it may see."""
        span = self.reserve(nodes)
        slots = self.lengths[:, None] + torch.arange(first, nodes, device=self.lengths.device)
        if not self.holds(nodes):                            # only padding lies beyond
            slots = slots.clamp(max=self.capacity - 1)
        for layer in self.layers:
            layer.set_slots(slots, span)
        return span

    def holds(self, nodes: int) -> bool:
        """Whether `nodes` nodes certainly fit after every row."""
        return self._reach.longest + nodes <= self.capacity

    def reserve(self, nodes: int) -> int:
        """Record that a tree of `nodes` nodes is read; return how many slots it may see."""
        self._reach.read = nodes
        return min(-(-(self._reach.longest + nodes) // SPAN) * SPAN, self.capacity)

    def filled_span(self) -> int:
        """How many slots cover the committed tokens of all rows."""
        return min(max(SPAN, -(-self._reach.longest // SPAN) * SPAN), self.capacity)

    def keep(self, nodes: Tensor | None, count: Tensor) -> None:
        """Commit: move scratch nodes `nodes` [B, D] to the front of the scratch and add `count` [B]
        to the lengths.

        Nodes of a row ascend, so a path may overlap its destination; a node equal to its own index
        stays. None: a chain, whose nodes are in place already.
        """
        if nodes is not None:
            self._compact(nodes)
        self.lengths.add_(count)
        self._reach.longest += self._reach.read if nodes is None else nodes.shape[1]

    @cached_property
    def stores(self) -> Stores | None:
        """Keys and values, layer by layer, for kernels; None if kernels cannot use them."""
        return Stores.of(self.tensors)

    def clear(self) -> None:
        """Zero all stores: NaN would pass a mask."""
        for store in self.tensors:
            store.zero_()

    def set_max_length(self, longest: int) -> None:
        """No row of this cache or its parent holds more than `longest` tokens."""
        self._reach.longest = longest

    def copy_row(self, row: Tensor, other: KVCache) -> None:
        """Copy the only row of another cache, of at most this capacity, to row `row` [1]."""
        for store, source in zip(self.tensors, other.tensors, strict=True):
            front = store[(slice(None), *map(slice, source.shape[1:]))]
            if row.is_cpu:                              # twice as fast
                front[int(row)].copy_(source[0])
            else:
                front.index_copy_(0, row, source)
        self.lengths.index_copy_(0, row, other.lengths)

    def move_row(self, row: int, place: int, tokens: int) -> None:
        """Copy so many tokens of one row to another, which then holds just these."""
        for store in self.tensors if row != place else ():
            store[place, :, :tokens] = store[row, :, :tokens]
        self.lengths[place] = tokens

    def select(self, rows: Sequence[int]) -> None:
        """Move these rows to the front, in this order; a row may be repeated. All other rows become
        empty."""
        changed = [(new, old) for new, old in enumerate(rows) if new != old]
        if changed:
            device = self.lengths.device
            new, old = (torch.tensor(side, device=device) for side in zip(*changed, strict=True))
            held = self._held(old)
            for store in self.tensors:
                part = store[:, :, :held] if held is not None else store
                part.index_copy_(0, new, part.index_select(0, old))
            self.lengths.index_copy_(0, new, self.lengths.index_select(0, old))
        self.lengths[len(rows) :] = 0

    def _held(self, rows: Tensor) -> int | None:
        """Tokens of the longest of these rows; None if the host does not know it."""
        return int(self.lengths[rows].max()) if self.lengths.is_cpu else None

    def rows(self, start: int, stop: int) -> KVCache:
        """A view of rows `start` to `stop`. Its reads and commits do not touch other rows."""
        if (start, stop) == (0, len(self.lengths)):
            return self
        if (start, stop) not in self._views:
            self._views[start, stop] = self._view(start, stop)
        return self._views[start, stop]

    def truncate_tree(self, tree: TokenTree) -> TokenTree:
        """The part of a tree that can be read in one pass: all of it."""
        return tree

    def _view(self, start: int, stop: int) -> Self:
        layers = [layer.rows(start, stop) for layer in self.layers]
        return type(self)(layers, self.lengths[start:stop], self.capacity, self._reach)

    def _compact(self, nodes: Tensor) -> None:
        """Move nodes [B, D] of the scratch to its front."""
        if self.stores is not None:
            self.stores.keep(nodes, self.lengths)
            return
        front = torch.arange(nodes.shape[1], device=nodes.device)
        source, target = self.lengths[:, None] + nodes, self.lengths[:, None] + front
        for store in self.tensors:
            write(store, target, read(store, source))


def empty_layer(
    shape: LayerShape, rows: int, capacity: int, dtype: torch.dtype, device: torch.device,
    layer: type[KVLayer]
) -> Layer:
    """Storage of one layer. layer: the class of layers that store only keys and values."""
    if not shape.heads:
        from draftproof.cache.module_cache import EmptyLayer

        return EmptyLayer()
    kind = IndexedLayer if shape.index_dim else layer
    return kind.empty(shape, rows, capacity, dtype, device)


def read(store: Tensor, slots: Tensor) -> Tensor:
    """[B, heads, D, dim] of the slots [B, D] of each row."""
    if len(store) == 1:
        return store.index_select(2, slots[0])
    rows = torch.arange(len(store), device=slots.device)[:, None]
    return store.transpose(1, 2)[rows, slots].transpose(1, 2)


def key_depths(tree: TokenTree, lengths: Tensor, span: int) -> tuple[Tensor, Tensor]:
    """[B, S] each: the node in a slot (negative: a committed token), and its position relative to
    `lengths`."""
    node = torch.arange(span, device=lengths.device) - lengths[:, None]
    nodes = tree.tokens.shape[1]
    inside = (node >= 0) & (node < nodes)
    return node, torch.where(inside, tree.depths.gather(1, node.clamp(0, nodes - 1)), node)


def tree_mask(
    tree: TokenTree, lengths: Tensor, span: int, dtype: torch.dtype, first: int = 0,
    window: int | None = None, chunked: bool = False
) -> Tensor:
    """[B, 1, N - first, span]: 0 where a node sees a cache slot, the dtype's minimum elsewhere.

    Node i of row b lies in slot ``lengths[b] + i`` and sees the slots below ``lengths[b]`` and its
    own ancestors.
    window: a node sees that many positions, itself included (sliding attention). chunked: it sees
    the positions of its own chunk of `window` instead (chunked attention). The mask is additive,
    because eager attention in transformers 5 silently adds a boolean mask to the scores. No host
    synchronisation.
    """
    nodes = tree.tokens.shape[1]
    node, depth = key_depths(tree, lengths, span)
    inside = (node >= 0) & (node < nodes)
    index = node.clamp(0, nodes - 1)[:, None].expand(-1, nodes - first, -1)
    sees = tree.ancestors[:, first:].gather(2, index) & inside[:, None]       # [B, n, S]
    sees = sees | (node < 0)[:, None]
    depths = tree.depths[:, first:, None]
    if window is not None and chunked:
        chunk = (lengths[:, None, None] + depths) // window
        sees = sees & ((lengths[:, None] + depth)[:, None] // window == chunk)
    elif window is not None:
        sees = sees & (depths - depth[:, None] < window)
    mask = torch.zeros(sees.shape, dtype=dtype, device=lengths.device)
    return mask.masked_fill_(~sees, torch.finfo(dtype).min)[:, None]
