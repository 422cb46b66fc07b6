"""The fast forward in one call of C: bfloat16 or 8-bit layers, on a CPU with kernels for them.

Half of a small model's step goes into starting operators; here all from tokens to logits is one
call. Attention sums in the order of the text, so a node has the same bits in a tree, in a chain,
in a batch and alone.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from draftproof.core.prefix import Prefix
from draftproof.core.sampling import DraftSampling
from draftproof.core.tree import ABSENT, TokenTree
from draftproof.model.kv_cache import KVCache
from draftproof.model.kv_layer import Int8Layer, KVLayer
from draftproof.native.kernels import WIDEST, Chains, Kernels, kernels
from draftproof.native.structures import Layer, Linear, Model, Read

if TYPE_CHECKING:
    from draftproof.model.fast_forward import FastForward

NODES = 64
"""Wider reads, prefill above all, are quicker with torch's own attention."""
MULTIPLE = 4
"""Widths of reads of a batch whose rows have different numbers of nodes are rounded up to these."""


class Tables(NamedTuple):
    """What lies between tokens and hidden states, as our kernels read it, for draft heads."""

    embeddings: Tensor              # [V, H]
    head: Linear
    owner: object                   # whose memory the head lies in

    @classmethod
    def of(cls, fast: FastForward) -> Tables | None:
        """Of a model that our kernels read."""
        head = fast.native_head if fast.fused is not None else None
        return None if head is None else cls(fast.embed.weight, head, fast)


class FusedForward:
    """Reads up to `NODES` nodes per row with the layers of a `FastForward`."""

    def __init__(self, fast: FastForward, found: Kernels, head: Linear) -> None:
        self.fast, self.kernels, self.head, self._embeddings = fast, found, head, fast.embed.weight
        # cosines and sines [positions, D] of each kind
        self._angles = [(torch.zeros(0), torch.zeros(0))]
        layers = []
        for layer in fast.layers:
            places = [None if one is None else one.data_ptr() for one in layer.weights]
            layers.append(Layer(*layer.natives, *places, layer.kind))
        widest = max(one.inner.outputs + one.output.size + 3 * one.down.size for one in layers)
        # numbers a token needs on its way through a layer
        self._work = 2 * fast.hidden_size + widest
        self._model = Model.of(
            layers, len(fast.kinds), fast.gelu, fast.norm_weight, self._embeddings, head,
            fast.norm_terms, fast.embed_scale,
        )  # fmt: skip

    @staticmethod
    def of(fast: FastForward) -> FusedForward | None:
        """For a model the kernels can serve, on a machine that has them."""
        sizes = (fast.hidden_size, fast.head_dim, *(layer.inner_size for layer in fast.layers))
        dtypes = {fast.dtype, fast.embed.weight.dtype, *fast.norm_types}
        fits = dtypes == {torch.bfloat16} and fast.native and not any(size % 16 for size in sizes)
        fits &= fast.device.type == "cpu" and fast.head_dim <= WIDEST
        fits &= all(kind.window is None or kind.window > NODES for kind in fast.kinds)
        found, head = kernels() if fits else None, fast.native_head
        return FusedForward(fast, found, head) if found is not None and head is not None else None

    def takes(self, nodes: int, cache: KVCache) -> bool:
        """Whether a read of so many nodes into this cache can be done here."""
        known = type(cache.layers[0]) in (KVLayer, Int8Layer) and cache.stores is not None
        return known and nodes <= NODES and cache.holds(nodes)

    def __call__(
        self, tokens: Tensor, tree: TokenTree, first: int, cache: KVCache, last_only: bool,
        hidden_layers: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """As `FastForward`. In a batch, absent nodes are not read."""
        batch = len(tokens) > 1 and first == 0 and not last_only
        present = _Present.of(tree, self.kernels) if batch else None
        parents = tree.parents.contiguous()
        reads = self._reads(len(tokens), parents, first, cache, present)
        asked = tokens if present is None else present.tokens
        logits, hidden = self._forward(reads, asked, cache, last_only, hidden_layers)
        if present is None:
            return logits, hidden
        return present.scatter(logits), present.scatter(hidden) if hidden is not None else None

    def _forward(
        self, reads: ctypes.Array[Read], tokens: Tensor, cache: KVCache, last_only: bool,
        hidden_layers: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]:
        fast, weight, (rows, width) = self.fast, self._embeddings, tokens.shape
        count = len(fast.layers)
        assert cache.stores is not None
        tokens, work = tokens.contiguous(), weight.new_empty(rows * width * self._work)
        last = weight.new_empty(rows, width, fast.hidden_size)
        logits = None if last_only else weight.new_empty(rows, width, self.head.outputs)
        kept = {
            n % (count + 1): torch.empty_like(last) for n in hidden_layers
            if n % (count + 1) < count
        }
        places = [kept[n].data_ptr() if n in kept else None for n in range(count)] if kept else []
        self.kernels.forward(
            ctypes.addressof(reads), ctypes.addressof(self._model), cache.stores.places,
            tokens.data_ptr(), last.data_ptr(), logits.data_ptr() if logits is not None else None,
            (ctypes.c_void_p * count)(*places) if kept else None, work.data_ptr(),
        )  # fmt: skip
        kept[count] = last
        if logits is None:
            logits = self.kernels.multiply(self.head, last[:, -1:])
        if not hidden_layers:
            return logits, None
        states = [kept[number % (count + 1)] for number in hidden_layers]
        return logits, states[0].unsqueeze(2) if len(states) == 1 else torch.stack(states, 2)

    def chain(
        self, prefix: Prefix, width: int, cache: KVCache, steps: int, nodes: int,
        draft_sampling: DraftSampling
    ) -> Chains | None:
        """As `Target.chain`."""
        assert cache.stores is not None
        text, positions, rows = prefix.tokens.contiguous(), prefix.position, len(prefix.position)
        # the kernel makes parents of its own
        reads = self._reads(rows, text, 0, cache)
        tokens, read = torch.empty(rows, 1 + steps, dtype=torch.int64), torch.empty_like(positions)
        ranks = torch.empty_like(tokens)
        each = width * (self.head.size + self._work) + self.head.outputs
        work = self._embeddings.new_empty(rows * each)
        drawn = (None if one is None else one.data_ptr() for one in draft_sampling[:4])
        done = self.kernels.chain(
            ctypes.addressof(reads), ctypes.addressof(self._model), cache.stores.places,
            text.data_ptr(), text.shape[1], positions.data_ptr(), cache.lengths.data_ptr(), width,
            steps, nodes, *drawn, draft_sampling.floor, ABSENT, tokens.data_ptr(), ranks.data_ptr(),
            read.data_ptr(), work.data_ptr(),
        )  # fmt: skip
        cache.reserve(1 + done)
        return Chains(tokens[:, : 1 + done], ranks[:, : 1 + done], read)

    def _reads(
        self, rows: int, parents: Tensor, first: int, cache: KVCache,
        present: _Present | None = None
    ) -> ctypes.Array[Read]:
        """The same read for every kind of attention."""
        fast, layer = self.fast, self.fast.layers[0]
        some: tuple[int | None, ...] = (None, None)
        if present is not None:
            some = (present.starts.data_ptr(), present.nodes.data_ptr())
        angles, lengths = self._angles_up_to(cache.capacity), cache.lengths.data_ptr()
        heads = (layer.heads, layer.key_heads, fast.head_dim)
        sizes = (rows, parents.shape[1], first, *heads, cache.capacity)
        assert cache.stores is not None
        threads, stores = torch.get_num_threads(), cache.stores.count // len(fast.layers)
        reads = (Read * len(angles))()
        for number, (kind, (cosines, sines)) in enumerate(zip(fast.kinds, angles, strict=True)):
            places = (lengths, parents.data_ptr(), cosines.data_ptr(), sines.data_ptr(), *some)
            reads[number] = Read(
                *sizes, kind.window or 0, fast.context, threads, kind.rotary_dim, stores, *places,
                layer.scale
            )
        return reads

    def _angles_up_to(self, capacity: int) -> list[tuple[Tensor, Tensor]]:
        """For each kind of attention, cosines and sines of all positions a cache of this capacity
        can hold."""
        fast, wanted = self.fast, min(capacity, self.fast.context)
        if len(self._angles[0][0]) < wanted:
            positions = torch.arange(wanted)[None]
            made = [fast.angles(kind, self._embeddings[:1, None], positions) for kind in fast.kinds]
            self._angles = [(cos[0].contiguous(), sin[0].contiguous()) for cos, sin in made]
        return self._angles


class _Present(NamedTuple):
    """The nodes [M] of trees [B, N] that are not absent, row by row, padded to a `MULTIPLE`.

    tokens: [1, M]. nodes: their numbers. starts: [B + 1] where each row's begin. back: [B, N] which
    of them each node is; of an absent one, some other.
    """

    tokens: Tensor
    nodes: Tensor
    starts: Tensor
    back: Tensor

    @classmethod
    def of(cls, tree: TokenTree, found: Kernels) -> _Present | None:
        """If they are fewer than the trees have room for."""
        rows, width = tree.tokens.shape
        count = sum(tree.sizes) + rows
        count += -count % MULTIPLE
        if count >= rows * width:
            return None
        tokens = torch.zeros(1, count, dtype=torch.int64)
        nodes, starts, back = torch.empty(3, (rows + 1) * width, dtype=torch.int64)
        given = tree.tokens.contiguous()
        found.present_nodes(
            rows, width, ABSENT, *(one.data_ptr() for one in (given, starts, nodes, tokens, back))
        )
        return cls(tokens, nodes, starts[: rows + 1], back[: rows * width].view(rows, width))

    def scatter(self, states: Tensor) -> Tensor:
        """[B, N, ...] of states [1, M, ...]."""
        found = states[0].index_select(0, self.back.flatten())
        return found.view(*self.back.shape, *states.shape[2:])
