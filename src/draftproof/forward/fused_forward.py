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

from draftproof.cache.kv_cache import KVCache
from draftproof.cache.kv_layer import Int8Layer, KVLayer
from draftproof.core.prefix import Prefix
from draftproof.core.sampling import DraftSampling
from draftproof.core.tree import ABSENT, TokenTree
from draftproof.errors import BadInput
from draftproof.native.declarations import addresses, array_of
from draftproof.native.kernels import WIDEST, Chains, Kernels, kernels
from draftproof.native.structures import Layer, Model, Native, Norm, Read, Way, work_of
from draftproof.native.threads import thread_count

if TYPE_CHECKING:
    from draftproof.forward.fast_forward import FastForward

NODES = 64
"""Wider reads, prefill above all, are quicker with torch's own attention."""


class Tables(NamedTuple):
    """What lies between tokens and hidden states, as our kernels read it, for draft heads."""

    embeddings: Native
    head: Native
    owner: object                   # whose memory the head lies in

    @classmethod
    def of(cls, fast: FastForward) -> Tables | None:
        """Of a model that our kernels read."""
        head, table = fast.native_head, fast.embed.native
        if fast.fused is None or head is None or table is None:
            return None
        return cls(table, head, fast)


class FusedForward:
    """Reads up to `NODES` nodes per row with the layers of a `FastForward`."""

    def __init__(self, fast: FastForward, library: Kernels, head: Native, table: Native) -> None:
        decoder = fast.decoder
        self.fast, self.kernels, self.head = fast, library, head
        # cosines and sines [reach, D] of each kind
        self._ways, self._rope_positions = (Way * len(fast.kinds))(), 0
        self._rope_tables = list[tuple[Tensor, Tensor]]()
        layers = array_of("Layer", [
            Layer(*layer.natives, *layer.weights, layer.kind) for layer in fast.layers
        ])
        self._model = Model(
            layers, len(layers), decoder.gelu, decoder.norm_weight, table, head,
            Norm(decoder.epsilon, decoder.residual_scale), decoder.embed_scale
        )
        # numbers a token needs on its way through a layer
        self._work = work_of(self._model)

    @staticmethod
    def of(fast: FastForward) -> FusedForward | None:
        """For a model the kernels can serve, on a machine that has them."""
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
        """Whether a read of so many nodes into this cache can be done here."""
        known = type(cache.layers[0]) in (KVLayer, Int8Layer) and cache.stores is not None
        return known and nodes <= NODES and cache.holds(nodes)

    def __call__(
        self, tokens: Tensor, tree: TokenTree, first: int, cache: KVCache, last_only: bool,
        hidden_layers: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """As `FastForward`. In a batch, absent nodes are not read."""
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
        """Trees [B, N] of the first rows of a cache, and a chunk [1, W] of a prompt in its last
        row, in one pass: logits [B, N, V] and hidden states of the trees, and of the chunk the
        logits [1, 1, V] after its last token and hidden states."""
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
        """States [B, W, H] after the final norm and those of `hidden_layers`; logits are filled."""
        (rows, width), count = tokens.shape, len(self.fast.layers)
        assert cache.stores is not None
        last = torch.empty(rows, width, self.fast.decoder.hidden_size, dtype=torch.bfloat16)
        kept = {count: last}
        for number in hidden_layers:
            kept.setdefault(number % (count + 1), torch.empty_like(last))
        places = addresses([kept.get(number) for number in range(count)]) if hidden_layers else None
        self.kernels(
            "forward", read, self._model, cache.stores.places, tokens, last, logits, places,
            torch.empty(rows * width * self._work, dtype=torch.bfloat16)
        )
        if not hidden_layers:
            return last, None
        return last, torch.stack([kept[number % (count + 1)] for number in hidden_layers], 2)

    def chain(
        self, prefix: Prefix, width: int, cache: KVCache, steps: int, nodes: int,
        draft_sampling: DraftSampling
    ) -> Chains | None:
        """As `Target.chain`."""
        assert cache.stores is not None
        text, positions, rows = prefix.tokens.contiguous(), prefix.position, len(prefix.position)
        tokens, read = torch.empty(rows, 1 + steps, dtype=torch.int64), torch.empty_like(positions)
        ranks = torch.empty_like(tokens)
        each = width * (self.head.size + self._work) + self.head.outputs
        done = self.kernels(
            # the kernel makes parents of its own
            "chain", self._read(rows, text, 0, cache), self._model, cache.stores.places, text,
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
        shape, wanted = cache.layers[0].stores[0].shape, (
            rows, layer.key_heads, cache.capacity, fast.head_dim)
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
            starts, nodes, self._ways, layer.scale
        )

    def _extend_rope(self, positions: int) -> None:
        """Make cosines and sines of `positions` positions for each kind of attention."""
        self._rope_positions, self._rope_tables = positions, []
        places = torch.arange(positions)[None]
        for number, kind in enumerate(self.fast.kinds):
            angles = self.fast.angles(kind, places)
            cos, sin = (table[0].contiguous() for table in angles)
            self._ways[number] = Way(kind.window or 0, kind.rotary_dim, cos, sin)
            self._rope_tables.append((cos, sin))


class _Present(NamedTuple):
    """The nodes [M] of trees [B, N] that are not absent, row by row.

    tokens: [1, M]. nodes: their numbers. starts: [B + 1] where each row's begin. back: [B, N] which
    of them each node is; of an absent one, some other.
    """

    tokens: Tensor
    nodes: Tensor
    starts: Tensor
    back: Tensor

    @classmethod
    def of(cls, tree: TokenTree) -> _Present | None:
        """If they are fewer than the trees have room for."""
        there = tree.present
        if bool(there.all()):
            return None
        back = there.flatten().cumsum(0).sub_(1).clamp_(min=0).view_as(there)
        starts = torch.nn.functional.pad(there.sum(1).cumsum(0), (1, 0))
        return cls(tree.tokens[there][None], there.nonzero()[:, 1].contiguous(), starts, back)

    def scatter(self, states: Tensor) -> Tensor:
        """[B, N, ...] of states [1, M, ...]."""
        return states[0][self.back]
