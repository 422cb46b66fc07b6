"""The fast forward in one C call: bfloat16 or 8-bit layers, on a CPU with kernels for them.

Starting operators takes half of a small model's step; here one call goes from tokens to logits.
Attention sums in text order, so a node has the same bits in a tree, in a chain, in a batch and
alone.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from draftproof.cache.kv_cache import KVCache
from draftproof.cache.kv_layer import Int8Layer, KVLayer
from draftproof.core.prefix import Prefix
from draftproof.core.sampling import DraftSampling
from draftproof.core.tree import ABSENT, TokenTree
from draftproof.errors import BadInput
from draftproof.native.declarations import addresses, array_of
from draftproof.native.kernels import WIDEST, Chains, Kernels, kernels
from draftproof.native.structures import AttentionKind, Layer, Model, Native, Norm, Read
from draftproof.native.threads import thread_count

if TYPE_CHECKING:
    from draftproof.forward.fast_forward import FastForward

NODES = 64
"""The most nodes of a read. Wider reads, such as prefill, are faster with torch's own attention."""


class Tables(NamedTuple):
    """The embeddings and the head of a model in the form our kernels read, for draft heads."""

    embeddings: Native
    head: Native
    owner: object                   # keeps the head's memory alive

    @classmethod
    def of(cls, fast: FastForward) -> Tables | None:
        """The tables of a model; None if our kernels cannot read it."""
        head, table = fast.native_head, fast.embed.native
        if fast.fused is None or head is None or table is None:
            return None
        return cls(table, head, fast)


class FusedForward:
    """Reads up to `NODES` nodes per row with the layers of a `FastForward`."""

    def __init__(self, fast: FastForward, library: Kernels, head: Native, table: Native) -> None:
        decoder = fast.decoder
        self.fast, self.kernels, self.head = fast, library, head
        # cosines and sines [reach, D] for each kind
        self._attention_kinds, self._rope_positions = (AttentionKind * len(fast.kinds))(), 0
        self._rope_tables = list[tuple[Tensor, Tensor]]()
        layers = array_of("Layer", [
            Layer(*layer.natives, *layer.weights, layer.kind) for layer in fast.layers
        ])
        self._model = Model(
            layers, len(layers), decoder.gelu, decoder.norm_weight, table, head,
            Norm(decoder.epsilon, decoder.residual_scale), decoder.embed_scale
        )
        # scratch numbers per token within a layer
        self._work: int = self._model.work_of

    @staticmethod
    def of(fast: FastForward) -> FusedForward | None:
        """The fused forward; None where the kernels cannot read the model or do not exist."""
        sizes = (
            fast.decoder.hidden_size, fast.head_dim, *(layer.inner_size for layer in fast.layers)
        )
        fits = fast.native and fast.decoder.dtypes == {torch.bfloat16}
        fits &= not any(size % 16 for size in sizes)
        fits &= fast.device.type == "cpu" and fast.head_dim <= WIDEST
        fits &= all(kind.window is None or kind.window > NODES for kind in fast.kinds)
        library, head, table = kernels() if fits else None, fast.native_head, fast.embed.native
        if library is None or head is None or table is None:
            return None
        return FusedForward(fast, library, head, table)

    def takes(self, nodes: int, cache: KVCache) -> bool:
        """Whether a read of this many nodes into this cache is possible here."""
        known = type(cache.layers[0]) in (KVLayer, Int8Layer) and cache.stores is not None
        return known and nodes <= NODES and cache.holds(nodes)

    def __call__(
        self, tokens: Tensor, tree: TokenTree, first: int, cache: KVCache, last_only: bool,
        hidden_layers: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """Read as `FastForward` does, but skip absent nodes in a batch."""
        batch = len(tokens) > 1 and first == 0 and not last_only
        present = _Present.of(tree) if batch else None
        parents = tree.parents.contiguous()
        read = self._read(len(tokens), parents, first, cache, present)
        tokens_read = tokens if present is None else present.tokens
        logits, hidden = self._forward(read, tokens_read, cache, last_only, hidden_layers)
        if present is None:
            return logits, hidden
        return present.scatter(logits), present.scatter(hidden) if hidden is not None else None

    def with_chunk(
        self, tree: TokenTree, chunk: Tensor, cache: KVCache, hidden_layers: tuple[int, ...]
    ) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]:
        """Read trees [B, N] in the first rows of a cache and a chunk [1, W] of a prompt in its last
        row, in one pass. Returns logits [B, N, V] and hidden states of the trees, then the chunk's
        logits [1, 1, V] after its last token and its hidden states."""
        (batch, nodes), width = tree.tokens.shape, chunk.shape[1]
        rows, wide = len(cache.lengths), max(nodes, width)
        tokens = torch.full((rows, wide), ABSENT, dtype=torch.int64)
        parents = torch.arange(-1, wide - 1, dtype=torch.int64).repeat(rows, 1)
        tokens[:batch, :nodes], parents[:batch, :nodes] = tree.tokens, tree.parents
        tokens[-1, :width] = chunk
        present = _Present.of(TokenTree(tokens, parents, wide - 1))
        read = self._read(rows, parents, 0, cache, present)
        last, hidden = self._states(read, tokens if present is None else present.tokens, cache,
                                    hidden_layers)
        last = last.flatten(0, 1)                       # row by row: the chunk comes last
        of_trees = len(last) - width
        logits = self.kernels.multiply(self.head, torch.cat([last[:of_trees], last[-1:]]))
        back = (torch.arange(of_trees, dtype=torch.int64).view(batch, nodes) if present is None
                else present.back[:batch, :nodes])
        if hidden is None:
            return (logits[back], None), (logits[None, -1:], None)
        hidden = hidden.flatten(0, 1)
        return (logits[back], hidden[back]), (logits[None, -1:], hidden[None, of_trees:])

    def _forward(
        self, read: ctypes.Structure, tokens: Tensor, cache: KVCache, last_only: bool,
        hidden_layers: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]:
        logits = None
        if not last_only:
            logits = torch.empty(*tokens.shape, self.head.outputs, dtype=torch.bfloat16)
        last, hidden = self._states(read, tokens, cache, hidden_layers, logits)
        if logits is None:
            logits = self.kernels.multiply(self.head, last[:, -1:])
        return logits, hidden

    def _states(
        self, read: ctypes.Structure, tokens: Tensor, cache: KVCache,
        hidden_layers: tuple[int, ...], logits: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return states [B, W, H] after the final norm and of `hidden_layers`; fill the logits."""
        (rows, width), count = tokens.shape, len(self.fast.layers)
        assert cache.stores is not None
        last = torch.empty(rows, width, self.fast.decoder.hidden_size, dtype=torch.bfloat16)
        kept = {count: last}
        for number in hidden_layers:
            kept.setdefault(number % (count + 1), torch.empty_like(last))
        places = addresses([kept.get(number) for number in range(count)]) if hidden_layers else None
        self.kernels(
            "forward", read, self._model, cache.stores.pointers, tokens, last, logits, places,
            torch.empty(rows * width * self._work, dtype=torch.bfloat16)
        )
        if not hidden_layers:
            return last, None
        return last, torch.stack([kept[number % (count + 1)] for number in hidden_layers], 2)

    def chain(
        self, prefix: Prefix, width: int, cache: KVCache, steps: int, nodes: int,
        draft_sampling: DraftSampling
    ) -> Chains | None:
        """See `Target.chain`."""
        assert cache.stores is not None
        text, positions, rows = prefix.tokens.contiguous(), prefix.position, len(prefix.position)
        tokens, read = torch.empty(rows, 1 + steps, dtype=torch.int64), torch.empty_like(positions)
        ranks = torch.empty_like(tokens)
        each = width * (self.head.size + self._work) + self.head.outputs
        done = self.kernels(
            # the kernel makes the parents
            "chain", self._read(rows, text, 0, cache), self._model, cache.stores.pointers, text,
            text.shape[1], positions, cache.lengths, width, steps, nodes, *draft_sampling, ABSENT,
            tokens, ranks, read, torch.empty(rows * each, dtype=torch.bfloat16)
        )
        cache.reserve(1 + done)
        return Chains(tokens[:, : 1 + done], ranks[:, : 1 + done], read)

    def _read(
        self, rows: int, parents: Tensor, first: int, cache: KVCache,
        present: _Present | None = None
    ) -> ctypes.Structure:
        fast, layer = self.fast, self.fast.layers[0]
        assert cache.stores is not None
        shape = cache.stores.shape
        wanted = rows, layer.key_heads, cache.capacity, fast.head_dim
        if shape != wanted or cache.stores.count % len(fast.layers):
            raise BadInput(f"the layers of the cache were {list(shape)}; to read {rows} rows they "
                           f"must be {list(wanted)}")
        if (positions := min(cache.capacity, fast.context)) > self._rope_positions:
            self._extend_rope(positions)
        starts, nodes = (None, None) if present is None else (present.starts, present.nodes)
        return Read(
            rows, parents.shape[1], first, layer.heads, layer.key_heads, fast.head_dim,
            cache.capacity, fast.context, thread_count(),
            cache.stores.count // len(fast.layers), cache.lengths, parents,
            starts, nodes, self._attention_kinds, layer.scale
        )

    def _extend_rope(self, positions: int) -> None:
        """Extend cosines and sines to `positions` positions for each kind of attention."""
        self._rope_positions, self._rope_tables = positions, []
        places = torch.arange(positions)[None]
        for number, kind in enumerate(self.fast.kinds):
            angles = self.fast.angles(kind, places)
            cos, sin = (table[0].contiguous() for table in angles)
            self._attention_kinds[number] = AttentionKind(
                kind.window or 0, kind.rotary_dim, cos, sin)
            self._rope_tables.append((cos, sin))


class _Present(NamedTuple):
    """The nodes [M] of trees [B, N] that are present, row by row.

    tokens: [1, M]. nodes: their indices. starts: [B + 1] where each row begins. back: [B, N] the
    index of each node among them; an arbitrary one if it is absent.
    """

    tokens: Tensor
    nodes: Tensor
    starts: Tensor
    back: Tensor

    @classmethod
    def of(cls, tree: TokenTree) -> _Present | None:
        """The nodes that are present; None if all are."""
        there = tree.present
        if bool(there.all()):
            return None
        back = there.flatten().cumsum(0).sub_(1).clamp_(min=0).view_as(there)
        starts = torch.nn.functional.pad(there.sum(1).cumsum(0), (1, 0))
        return cls(tree.tokens[there][None], there.nonzero()[:, 1].contiguous(), starts, back)

    def scatter(self, states: Tensor) -> Tensor:
        """Spread states [1, M, ...] to [B, N, ...]."""
        return states[0][self.back]
