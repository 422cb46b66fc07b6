"""Attention of transformers' own layers by our kernel, which sums in text order: a node has the
same bits alone, in a chain and in a tree."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from draftproof.cache.kv_layer import KVLayer
from draftproof.core.tree import TokenTree
from draftproof.native.kernels import WIDEST, Kernels, kernels
from draftproof.native.structures import AttentionKind, Native, Read
from draftproof.native.threads import thread_count

NODES = 64
"""The most nodes of a read. Wider reads are faster with torch's own attention."""


class TextOrder:
    """The attention of one read.

    Args:
        library: The kernels.
        layers: The layers that store keys and values as they are computed, in bfloat16.
        lengths: [B] the tokens before the nodes.
        tree: The nodes that are read.
    """

    def __init__(
        self, library: Kernels, layers: Sequence[KVLayer], lengths: Tensor, tree: TokenTree
    ) -> None:
        self.library, self.lengths = library, lengths.contiguous()
        self.parents = tree.parents.contiguous()
        self.layers = {layer.keys.data_ptr(): layer for layer in layers}

    @staticmethod
    def of(layers: Sequence[KVLayer], lengths: Tensor, tree: TokenTree) -> TextOrder | None:
        """The attention of a read; None where the kernel cannot compute it.

        Args:
            layers: The layers that store keys and values.
            lengths: [B] the tokens before the nodes.
            tree: The nodes that are read.
        """
        library, nodes = kernels(), tree.parents.shape[1]
        if library is None or not layers or nodes > NODES or not lengths.is_cpu:
            return None
        end = int(lengths.max()) + nodes
        fits = all(
            type(layer) is KVLayer and layer.keys.dtype == torch.bfloat16
            and layer.keys.shape == layer.values.shape and end <= layer.keys.shape[2]
            and layer.keys.shape[3] <= WIDEST and layer.keys.shape[3] % 16 == 0
            for layer in layers
        )
        return TextOrder(library, layers, lengths, tree) if fits else None

    def __call__(self, query: Tensor, key: Tensor, scale: float | None) -> Tensor | None:
        """Attend to the keys and values that a layer has just stored.

        Args:
            query: [B, heads, N, D] rotated.
            key: [B, key heads, S, D] what the layer returned for its keys.
            scale: The factor of the scores; None for the usual one.

        Returns:
            [B, N, heads, D]; None where these are not the keys of a known layer.
        """
        layer, (rows, heads, nodes, size) = self.layers.get(key.data_ptr()), query.shape
        if layer is None or query.dtype != torch.bfloat16 or nodes != self.parents.shape[1]:
            return None
        keys, values = layer.keys, layer.values
        assert layer.slots is not None
        of_nodes = [_at(store, layer.slots) for store in (keys, values)]
        inner = torch.cat([query.transpose(1, 2), *of_nodes], 2).contiguous()
        out = torch.empty(rows, nodes, heads, size, dtype=torch.bfloat16)
        read = Read(
            rows, nodes, 0, heads, keys.shape[1], size, keys.shape[2], keys.shape[2],
            thread_count(), 2, self.lengths, self.parents, None, None, _unrotated(),
            size**-0.5 if scale is None else scale
        )
        self.library("attend", read, inner, keys, values, out)
        return out


def _at(store: Tensor, slots: Tensor) -> Tensor:
    """[B, N, heads, D] the contents of slots [B, N] of a store [B, heads, S, D]."""
    if len(store) == 1:
        return store.index_select(2, slots[0]).transpose(1, 2)
    rows = torch.arange(len(store))[:, None]
    return store.transpose(1, 2)[rows, slots]


@cache
def _unrotated() -> Native:
    """A kind of attention that sees everything and rotates nothing."""
    nothing = torch.zeros(1, dtype=torch.bfloat16)
    return AttentionKind(0, 0, nothing, nothing)
