"""The cache of a recurrent or hybrid model: states of fixed size, which cannot be truncated by
tokens.

Where all layers record their states after each token of a short block or of a tree (convolutions
and gated delta nets do), a commit takes those after its last token: a rejected draft costs nothing
more. For other layers (state space models) only the states after a whole chain are known, so the
states of a row may lack its last few committed tokens, which wait. A read reads these again, in one
pass with the nodes it is for, and states advance where everything in the pass was committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, Self

import torch
from torch import Tensor

from draftproof.cache.kv_cache import KVCache, Layer, empty_layer, read
from draftproof.cache.kv_layer import KVLayer, LayerShape, write
from draftproof.cache.state_layer import HybridLayer, StateLayer, Trail
from draftproof.cache.state_shape import StateShape
from draftproof.core.tree import ABSENT, TokenTree
from draftproof.native.threads import torch_alone

BLOCK = 16
"""Tokens of a row that are read in one pass, if a draft is not longer: those that wait, the root,
and as much of the draft as fits. A row whose draft does not fit moves on, so rows wait no
longer."""


class Block(NamedTuple):
    """The tokens of one pass, the same number in every row.

    tree: [B, L] tokens, with arbitrary ones as padding at the end, and the tokens that they go on
    from. start: [B] the first positions. skipped: [B] on the host, how many waiting tokens come
    before the first node of the read.
    """

    tree: TokenTree
    start: Tensor
    skipped: Tensor


class _Trails(NamedTuple):
    """States after each of the `tokens` tokens of a block, layer by layer; the first token is node
    `start` [B] of each row's tree, or waits before it (negative)."""

    start: Tensor
    tokens: int
    layers: list[Trail]


class _Mark(NamedTuple):
    """States that a read passed, layer by layer, and after how many nodes of each row's tree [B]
    (0: not valid for this row)."""

    nodes: Tensor
    states: list[tuple[Tensor, ...]]


@dataclass
class _Reads:
    """What a cache and its views know about the reads since the last commit: intermediate states,
    each further than the previous, and each row's present nodes. Counts are on the host."""

    marks: list[_Mark] = field(default_factory=list)
    trails: list[_Trails] = field(default_factory=list)
    present: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))


class StateCache(KVCache):
    """A `KVCache` with states.

    waiting: [B], on the host, how many committed tokens the states of each row lack. text: [B,
    capacity] the tokens of each row. steps: whether a read may be of a single token; some families
    round single steps differently, so their reads have two tokens at least.
    """

    def __init__(
        self, layers: Sequence[Layer], lengths: Tensor, capacity: int, waiting: Tensor,
        text: Tensor, steps: bool
    ) -> None:
        super().__init__(layers, lengths, capacity)
        self.waiting, self.text, self.steps = waiting, text, steps
        self._stateful = [layer for layer in layers if isinstance(layer, StateLayer)]
        inner = [layer.inner if isinstance(layer, HybridLayer) else layer for layer in layers]
        self.kv_layers = [layer for layer in inner if isinstance(layer, KVLayer)]
        self._reads = _Reads()

    @classmethod
    def for_states(
        cls, shapes: Sequence[LayerShape], states: Sequence[tuple[StateShape, ...]], rows: int,
        capacity: int, dtype: torch.dtype, device: torch.device, layer: type[KVLayer], steps: bool
    ) -> StateCache:
        """Make storage for layers of these shapes, some of which have states."""
        layers = list[Layer]()
        for shape, layer_states in zip(shapes, states, strict=True):
            keys = empty_layer(shape, rows, capacity, dtype, device, layer)
            if layer_states:
                made = tuple(state.empty(rows, device) for state in layer_states)
                two = (layer_states, made)
                keys = HybridLayer(*two, keys) if isinstance(keys, KVLayer) else StateLayer(*two)
            layers.append(keys)
        lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        text, waiting = lengths[:, None].repeat(1, capacity), torch.zeros(rows, dtype=torch.int64)
        return cls(layers, lengths, capacity, waiting, text, steps)

    @cached_property
    def stores(self) -> None:
        """None: torch's operators move the states."""

    def truncate_tree(self, tree: TokenTree) -> TokenTree:
        """Cut off the last nodes, for which a block has no room after the waiting tokens."""
        nodes = tree.tokens.shape[1]
        room = max(BLOCK, nodes) - self.waiting
        if nodes <= int(room.min()):
            return tree
        fits = torch.arange(nodes) < room[:, None]
        return replace(tree, tokens=torch.where(fits.to(tree.tokens.device), tree.tokens, ABSENT))

    @property
    def knows_every_state(self) -> bool:
        """Whether the last read recorded the states after each of its nodes."""
        return bool(self._reads.trails)

    @property
    def by_position(self) -> list[Tensor]:
        states = {id(state) for layer in self._stateful for state in layer.states}
        return [store for store in self.tensors if id(store) not in states]

    def copied_states(self) -> list[Tensor] | None:
        if bool(self.waiting.any()):
            return None
        return [state.clone() for layer in self._stateful for state in layer.states]

    def resume(self, states: Sequence[Tensor], tokens: Tensor) -> None:
        stored = [state for layer in self._stateful for state in layer.states]
        for store, state in zip(stored, states, strict=True):
            store.copy_(state)
        self.text[:, : len(tokens)] = tokens
        self.waiting.zero_()
        self._reads.marks, self._reads.trails = [], []

    def block(self, tree: TokenTree, first: int) -> Block:
        """The block to read for the nodes `first:` of a tree; prepares states and slots for it. A
        tree that branches is read from its root on."""
        if not tree.is_chain:
            return self._block_of_tree(tree, first)
        nodes, device = tree.tokens.shape[1], self.text.device
        place = self.lengths[:, None] + torch.arange(first, nodes, device=device)
        new = tree.tokens[:, first:].clamp(min=0)
        self.text.scatter_(1, place.clamp(max=self.capacity - 1), new)
        self._reads.present = present = (tree.tokens != ABSENT).sum(1).cpu()
        skipped, known = torch.zeros_like(self.waiting), None
        for mark in self._reads.marks if first and (self.steps or nodes - first > 1) else ():
            if bool(((mark.nodes == first) | (present <= first)).all()):
                known = mark.states
        if known is None:
            self._reads.marks = self._reads.marks if first else []
            self._reads.trails = self._reads.trails if first else []
            skipped = self.waiting + first
            known = [layer.states for layer in self._stateful]
        start = self.lengths + first - skipped.to(device)
        length = max(1 if self.steps else 2, int((skipped + present - first).max()))
        tokens = self._begin(start, length, known)
        return Block(TokenTree.chain(tokens), start, skipped)

    def _block_of_tree(self, tree: TokenTree, first: int) -> Block:
        """The waiting tokens of each row and, after the last of them, its tree."""
        nodes, device = tree.tokens.shape[1], self.text.device
        self._reads.marks, self._reads.trails = [], []
        place = self.lengths[:, None] + torch.arange(nodes, device=device)
        self.text.scatter_(1, place.clamp(max=self.capacity - 1), tree.tokens.clamp(min=0))
        waiting = self.waiting.to(device)[:, None]
        most = int(self.waiting.max())
        index = torch.arange(most + nodes, device=device) - waiting                     # [B, L]
        parents = tree.parents.gather(1, index.clamp(0, nodes - 1))
        parents = torch.where(index < 1, index - 1, parents.clamp(min=0)) + waiting
        parents = torch.where(index < nodes, parents, 0)                                # padding
        start = self.lengths - waiting[:, 0]
        tokens = self._begin(start, most + nodes, [layer.states for layer in self._stateful])
        block = TokenTree(tokens, parents, tree.depth_limit + most)
        return Block(block, start, self.waiting + first)

    def _begin(
        self, start: Tensor, length: int, states: Sequence[tuple[Tensor, ...]]
    ) -> Tensor:
        """Let the next forward read `length` tokens from `start` [B] on, after these states of each
        layer; return the tokens [B, length]."""
        slots = start[:, None] + torch.arange(length, device=self.text.device)
        slots = slots.clamp(max=self.capacity - 1)          # only padding lies so far out
        span = self.reserve(length)
        for layer in self.layers:
            layer.set_slots(slots, span)
        for layer, before in zip(self._stateful, states, strict=True):
            layer.begin(before)
        return self.text.gather(1, slots)

    def was_read(self, block: Block, first: int) -> None:
        """Note the states after each token of a block, if all layers recorded them, and those after
        a whole chain, for rows where it ends with a node."""
        length = block.tree.tokens.shape[1]
        trails = [layer.take_trail() for layer in self._stateful]
        kept = [trail for trail in trails if trail is not None]
        if len(kept) == len(trails):
            self._reads.trails.append(_Trails(first - block.skipped, length, kept))
        if not block.tree.is_chain:
            return
        ends = length - block.skipped + first
        nodes = torch.where((ends > 0) & (ends <= self._reads.present), ends, 0)
        if bool(nodes.any()):
            self._reads.marks.append(
                _Mark(nodes, [layer.take_states() for layer in self._stateful])
            )

    def keep(self, nodes: Tensor | None, count: Tensor) -> None:
        """Commit `count` [B] nodes; states advance as far as they are known."""
        with torch_alone():
            self._move_on(count.cpu(), None if nodes is None else nodes.tolist())
        super().keep(nodes, count)

    def _compact(self, nodes: Tensor) -> None:
        front = torch.arange(nodes.shape[1], device=nodes.device)
        source, target = self.lengths[:, None] + nodes, self.lengths[:, None] + front
        last = self.capacity - 1                            # only padding lies beyond
        source, target = source.clamp(max=last), target.clamp(max=last)
        self.text.scatter_(1, target, self.text.gather(1, source))
        for store in self.by_position:
            write(store, target, read(store, source))

    def _move_on(self, counts: Tensor, nodes: list[list[int]] | None) -> None:
        moved = torch.zeros_like(self.waiting)
        self._follow(counts, nodes, moved)
        for mark in reversed(self._reads.marks):
            rows = (moved == 0) & (mark.nodes > 0) & (mark.nodes <= counts)
            moved = torch.where(rows, mark.nodes, moved)
            self._take(mark, rows.nonzero()[:, 0])
        self.waiting.copy_(torch.where(moved > 0, 0, self.waiting) + counts - moved)
        left = [_Mark((nodes - counts).clamp(min=0), states) for nodes, states in self._reads.marks]
        self._reads.marks = [mark for mark in left if bool(mark.nodes.any())]
        self._reads.trails = [trail._replace(start=trail.start - counts)
                              for trail in (self._reads.trails if nodes is None else ())]

    def _follow(self, counts: Tensor, nodes: list[list[int]] | None, moved: Tensor) -> None:
        """Advance states of rows to those after `counts` [B] nodes where these were recorded, and
        set `moved` [B] to that number. nodes: [B, D] the paths, if they are not chains."""
        for trails in reversed(self._reads.trails):
            starts = trails.start.tolist()
            for row, (count, start) in enumerate(zip(counts.tolist(), starts, strict=True)):
                if moved[row] or not count or not 0 < count - start <= trails.tokens:
                    continue
                moved[row] = count
                path: Sequence[int] = range(count - start)
                if nodes is not None:
                    path = [*range(-start), *(node - start for node in nodes[row][:count])]
                for layer, trail in zip(self._stateful, trails.layers, strict=True):
                    trail.after(row, path, [state[row] for state in layer.states])

    def copy_row(self, row: Tensor, other: KVCache) -> None:
        assert isinstance(other, StateCache)
        super().copy_row(row, other)
        self.text[:, : other.capacity].index_copy_(0, row, other.text)
        self.waiting.index_copy_(0, row.cpu(), other.waiting)

    def _held(self, rows: Tensor) -> int | None:
        return None                                 # states have no positions

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        order = list(rows)
        self._reads.marks, self._reads.trails = [], []
        for store in (self.waiting, self.text):
            store[: len(order)] = store[order]
        self.waiting[len(order) :] = 0
        for layer in self._stateful:
            for state in layer.states:
                state[len(order) :] = 0

    def clear(self) -> None:
        super().clear()
        self.waiting.zero_()

    def _view(self, start: int, stop: int) -> Self:
        layers = [layer.rows(start, stop) for layer in self.layers]
        lengths, waiting = self.lengths[start:stop], self.waiting[start:stop]
        text = self.text[start:stop]
        view = type(self)(layers, lengths, self.capacity, waiting, text, self.steps)
        view._reach, view._reads = self._reach, self._reads
        return view

    def _take(self, mark: _Mark, rows: Tensor) -> None:
        """Copy the states of a mark to the states of these rows."""
        if not len(rows):
            return
        index = rows.to(self.lengths.device)
        for layer, states in zip(self._stateful, mark.states, strict=True):
            for store, new in zip(layer.states, states, strict=True):
                if len(rows) == len(store):
                    store.copy_(new)
                    continue
                store.index_copy_(0, index, new.index_select(0, index).to(store.dtype))
