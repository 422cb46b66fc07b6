"""The lean forward with everything between its linear layers fused: bfloat16, on a CPU with a C compiler.

Half of a small model's step goes into starting operators. Here each layer is four multiplications and four calls, or where our
kernels multiply as well, all from tokens to logits is one. Attention sums in the order of the text, so a node has the same bits
in a tree as in plain decoding.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from draftproof.core.prefix import Prefix
from draftproof.core.tree import ABSENT, TokenTree
from draftproof.model.kv_cache import KVCache, KVLayer
from draftproof.native.kernels import WIDEST, Chains, DraftSampling, Kernels, Stores, kernels
from draftproof.native.structures import Layer, Model, Read

if TYPE_CHECKING:
    from draftproof.model.fast_forward import FastForward, Way

NODES = 64
"""Wider reads, prefill above all, are quicker with torch's own attention."""
TOGETHER = 4
"""Widths of reads of a batch whose rows have different numbers of nodes are rounded up to these."""
ALONE = 2
"""Rows that linear layers read where there is one: for a single row oneDNN has kernels that sum in another order."""


class FusedForward:
    """Reads up to `NODES` nodes per row with the layers of a lean forward."""

    def __init__(self, lean: FastForward, found: Kernels) -> None:
        self.lean, self.kernels, self._weight = lean, found, lean.embed.weight
        self._turns = [(torch.zeros(0), torch.zeros(0))]                # cosines and sines [positions, D] of each way
        layers = _native(lean)
        self._room = 2 * lean.hidden_size + max(                        # numbers a token needs on its way through a layer
            (layer.inner.outputs + layer.output.size + 3 * layer.down.size for layer in layers), default=0
        )
        self._model = Model.of(
            layers, len(lean.ways), lean.gelu, lean.last_weight, lean.embed.weight, lean.native_head, lean.sums, lean.loud
        ) if layers else None  # fmt: skip

    @staticmethod
    def of(lean: FastForward) -> FusedForward | None:
        """For a model the kernels can serve, on a machine that has them."""
        sizes = (lean.hidden_size, lean.head_dim, *lean.inner_sizes)
        fits = {lean.dtype, lean.embed.weight.dtype, *lean.norm_types} == {torch.bfloat16}
        fits &= not any(size % 16 for size in sizes)
        fits &= lean.device.type == "cpu" and lean.head_dim <= WIDEST
        fits &= all(way.window is None or way.window > NODES for way in lean.ways)
        found = kernels() if fits else None
        return FusedForward(lean, found) if found is not None else None

    def takes(self, nodes: int, cache: KVCache) -> bool:
        """Whether a read of so many nodes into this cache can be done here."""
        return nodes <= NODES and type(cache.layers[0]) is KVLayer and cache.holds(nodes)

    def __call__(
        self, tokens: Tensor, tree: TokenTree, first: int, cache: KVCache, last_only: bool, hidden_layers: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """As `FastForward`. In a batch, nodes that are not there are not read."""
        some = _Some.of(tree, self.kernels) if len(tokens) > 1 and first == 0 and not last_only else None
        parents = tree.parents.contiguous()
        ways = self._ways(len(tokens), parents, first, cache, some)
        asked = tokens if some is None else some.tokens
        if self._model is not None and cache.stores is not None:
            logits, tapped = self._whole(self._model, cache.stores, ways, asked, last_only, hidden_layers)
        else:
            logits, tapped = self._by_layers(ways, asked, cache, last_only, hidden_layers)
        if some is None:
            return logits, tapped
        return some.among_all(logits), some.among_all(tapped) if tapped is not None else None

    def _by_layers(
        self, ways: ctypes.Array[Read], tokens: Tensor, cache: KVCache, last_only: bool, hidden_layers: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """Layer by layer, whose multiplications are torch's."""
        lean, kernels, read = self.lean, self.kernels, ways[0]
        hidden = lean.embedded(tokens)
        (rows, width, size), threads = hidden.shape, read.threads
        work = rows * width
        room = (rows, width if work > 1 else ALONE)
        normed, mixed, last = (hidden.new_zeros(*room, much) for much in (size, read.heads * read.head_dim, size))
        gated = {inner: hidden.new_zeros(*room, inner) for inner in lean.inner_sizes}
        x, mix, sums = hidden.data_ptr(), mixed.data_ptr(), ctypes.addressof(lean.sums)
        count = len(lean.layers)
        wanted = {tap % (count + 1) for tap in hidden_layers}
        kept = {0: hidden.clone()} if 0 in wanted else {}
        delta: Tensor | None = None
        fed: int | None = None
        for number, (layer, store) in enumerate(zip(lean.layers, cache.layers, strict=True)):
            added = delta.data_ptr() if delta is not None else None
            before, after, query, key, behind, fed_next = layer.places
            kernels.norm(x, added, fed, before, sums, normed.data_ptr(), work, size, threads)
            if number and number in wanted:
                kept[number] = hidden.clone()
            states = layer.inner(normed)
            keys, values = store.keys.data_ptr(), store.values.data_ptr()
            kernels.attend(ctypes.addressof(ways[layer.way]), states.data_ptr(), query, key, sums, keys, values, mix)
            delta = layer.output(mixed)
            kernels.norm(x, delta.data_ptr(), behind, after, sums, normed.data_ptr(), work, size, threads)
            both = layer.gate_up(normed)
            gate = gated[layer.inner_size]
            kernels.gate(both.data_ptr(), gate.data_ptr(), lean.gelu, work, layer.inner_size, threads)
            delta, fed = layer.down(gate), fed_next
        added = delta.data_ptr() if delta is not None else None
        kernels.norm(x, added, fed, lean.last_weight.data_ptr(), sums, last.data_ptr(), work, size, threads)
        wanted_from = max(0, width - ALONE) if last_only else 0
        logits = lean.head(last[:, wanted_from:])[:, : width - wanted_from]
        logits = logits[:, -1:] if last_only else logits
        if not hidden_layers:
            return logits, None
        kept[count] = last[:, :width]
        return logits, torch.stack([kept[tap % (count + 1)] for tap in hidden_layers], 2)

    def _whole(
        self, model: Model, stores: Stores, ways: ctypes.Array[Read], tokens: Tensor, last_only: bool, hidden_layers: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """All in one call, but for a head of another layout."""
        lean, weight, count, (rows, width) = self.lean, self._weight, model.count, tokens.shape
        tokens, work = tokens.contiguous(), weight.new_empty(rows * width * self._room)
        last = weight.new_empty(rows, width, lean.hidden_size)
        head = None if last_only else lean.native_head
        logits = weight.new_empty(rows, width, head.outputs) if head is not None else None
        kept = {tap % (count + 1): torch.empty_like(last) for tap in hidden_layers if tap % (count + 1) < count}
        places = (ctypes.c_void_p * count)(*(kept[n].data_ptr() if n in kept else None for n in range(count))) if kept else None
        told = logits.data_ptr() if logits is not None else None
        self.kernels.forward(
            ctypes.addressof(ways), ctypes.addressof(model), stores.places, tokens.data_ptr(), last.data_ptr(), told, places,
            work.data_ptr(),
        )  # fmt: skip
        kept[count] = last
        if logits is None:
            logits = lean.head(last[:, -1:] if last_only else last)
        tapped = [kept[tap % (count + 1)] for tap in hidden_layers]
        return logits, (tapped[0].unsqueeze(2) if len(tapped) == 1 else torch.stack(tapped, 2)) if hidden_layers else None

    def chain(self, prefix: Prefix, width: int, cache: KVCache, steps: int, nodes: int, draft_sampling: DraftSampling) -> Chains | None:
        """As `FastForward.chain`."""
        model, stores, head = self._model, cache.stores, self.lean.native_head
        if model is None or stores is None or head is None:
            return None
        text, positions, rows = prefix.tokens.contiguous(), prefix.position, len(prefix.position)
        ways = self._ways(rows, text, 0, cache)                                         # the kernel makes parents of its own
        tokens, reads = torch.empty(rows, 1 + steps, dtype=torch.int64), torch.empty_like(positions)
        turns = torch.empty_like(tokens)
        work = self._weight.new_empty(rows * (width * (head.size + self._room) + head.outputs))
        noise, places, temperatures, confidence_scales = (None if one is None else one.data_ptr() for one in draft_sampling[:4])
        done = self.kernels.chain(
            ctypes.addressof(ways), ctypes.addressof(model), stores.places, text.data_ptr(), text.shape[1],
            positions.data_ptr(), cache.lengths.data_ptr(), width, steps, nodes, noise, places, temperatures, confidence_scales, draft_sampling.floor,
            ABSENT, tokens.data_ptr(), turns.data_ptr(), reads.data_ptr(), work.data_ptr(),
        )  # fmt: skip
        cache.reserve(1 + done)
        return Chains(tokens, turns, reads) if done == steps else Chains(tokens[:, : 1 + done], turns[:, : 1 + done], reads)

    def _ways(
        self, rows: int, parents: Tensor, first: int, cache: KVCache, some: _Some | None = None
    ) -> ctypes.Array[Read]:
        """The same read for every way in which layers see."""
        lean, layer = self.lean, self.lean.layers[0]
        starts, which = (some.starts.data_ptr(), some.nodes.data_ptr()) if some is not None else (None, None)
        turns, lengths, threads = self._turned(cache.capacity), cache.lengths.data_ptr(), torch.get_num_threads()
        sizes = (rows, parents.shape[1], first, layer.heads, layer.key_heads, lean.head_dim, cache.capacity)

        def told(way: Way, cosines: Tensor, sines: Tensor) -> Read:
            places = (lengths, parents.data_ptr(), cosines.data_ptr(), sines.data_ptr(), starts, which)
            return Read(*sizes, way.window or 0, lean.context, threads, way.turned, *places, layer.scale)

        return (Read * len(turns))(*(told(way, *angles) for way, angles in zip(lean.ways, turns, strict=True)))

    def _turned(self, capacity: int) -> list[tuple[Tensor, Tensor]]:
        """For each way, cosines and sines of all positions a cache of this capacity can hold."""
        lean, wanted = self.lean, min(capacity, self.lean.context)
        if len(self._turns[0][0]) < wanted:
            weight = lean.embed.weight
            positions = torch.arange(wanted, device=weight.device)[None]
            found = [lean.angles(way, weight[:1, None], positions) for way in lean.ways]
            self._turns = [(cos[0].contiguous(), sin[0].contiguous()) for cos, sin in found]
        return self._turns


class _Some(NamedTuple):
    """The nodes [M] of trees [B, N] that are there, row by row.

    tokens: theirs, [1, M], and a few more. nodes: their numbers. starts: [B + 1] where each row's begin. back: [B, N] which of
    them each is, or, if it is not there, some other.
    """

    tokens: Tensor
    nodes: Tensor
    starts: Tensor
    back: Tensor

    @classmethod
    def of(cls, tree: TokenTree, found: Kernels) -> _Some | None:
        """If they are fewer than the trees have room for."""
        rows, width = tree.tokens.shape
        count = sum(tree.sizes) + rows
        count += -count % TOGETHER
        if count >= rows * width:
            return None
        tokens = torch.zeros(1, count, dtype=torch.int64)
        nodes, starts, back = torch.empty(3, (rows + 1) * width, dtype=torch.int64)
        asked = tree.tokens.contiguous()
        found.some(rows, width, ABSENT, *(one.data_ptr() for one in (asked, starts, nodes, tokens, back)))
        return cls(tokens, nodes, starts[: rows + 1], back[: rows * width].view(rows, width))

    def among_all(self, states: Tensor) -> Tensor:
        """[B, N, ...] of states [1, M, ...]."""
        return states[0].index_select(0, self.back.flatten()).view(*self.back.shape, *states.shape[2:])


def _native(lean: FastForward) -> list[Layer]:
    """The layers of a model, if our kernels read all that is in them; otherwise none."""
    return [Layer(*layer.natives, *layer.places, layer.way) for layer in lean.layers] if lean.native else []
