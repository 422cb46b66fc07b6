"""The functions of the C library, as Python calls them. Knows nothing of models; where there is no library, torch serves."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from draftproof.core.sampling import DraftSampling
from draftproof.native.build import Library, load
from draftproof.native.lookup import Lookup
from draftproof.native.structures import LANES, Heads, Linear, Pairs, Recurrence

WIDEST = 256
"""Largest head the kernels have room for."""


class Kernels:
    """The functions of the library, which take pointers as numbers.

    int8, bf16: whether the processor has a product for linear layers of 8 bits, and of bfloat16. tiles: by tiles (AMX), as
    attention then is; by vectors, if `attends_by_tiles` is set to 0.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self.norm = library.draftproof_norm
        self.norm.argtypes = (*(pointer,) * 6, number, number, number)
        self.gate = library.draftproof_gate
        self.gate.argtypes = (pointer, pointer, number, number, number, number)
        self.attend = library.draftproof_attend
        self.attend.argtypes = (pointer,) * 8
        self.keep = library.draftproof_keep
        self.keep.argtypes = (pointer, pointer, pointer, number, number, number, pointer, pointer, number)
        self.copy = library.draftproof_copy
        self.copy.argtypes = (pointer, pointer, pointer, number, number, number, pointer, pointer, pointer)
        self.codes = library.draftproof_codes
        self.codes.argtypes = (pointer, pointer, pointer, number, number, number)
        self.scaled = library.draftproof_scaled
        self.scaled.argtypes = (pointer, pointer, pointer, pointer, number, number, number)
        self.linear = library.draftproof_linear
        self.linear.argtypes = (pointer, pointer, pointer, number, number)
        self.forward = library.draftproof_forward
        self.forward.argtypes = (pointer,) * 8
        self._best = library.draftproof_best
        self._best.argtypes = (*(pointer,) * 5, *(number,) * 3, pointer, pointer, number)
        self._top = library.draftproof_top
        self._top.argtypes = (pointer, *(number,) * 5, *(pointer,) * 2, number)
        self._pick = library.draftproof_pick
        self._pick.argtypes = (*(pointer,) * 4, *(number,) * 4, pointer, number)
        self._settle = library.draftproof_settle
        self._settle.argtypes = (*(pointer,) * 3, *(number,) * 4, *(pointer,) * 2)
        self.chain = library.draftproof_chain
        rooms = (number, *(pointer,) * 2, *(number,) * 3)
        self.chain.argtypes = (*(pointer,) * 4, *rooms, *(pointer,) * 4, ctypes.c_float, number, *(pointer,) * 4)
        self.some = library.draftproof_some
        self.some.argtypes = (*(number,) * 3, *(pointer,) * 5)
        self._heads = library.draftproof_heads
        self._heads.argtypes = (*(pointer,) * 4, *(number,) * 4)
        self._gumbel = library.draftproof_gumbel
        self._gumbel.argtypes = (pointer, pointer, number, number, number)
        self._streams = library.draftproof_streams
        self._streams.argtypes = (pointer, number, *(pointer,) * 3, *(number,) * 2)
        self._search = library.draftproof_search
        self._search.argtypes = (
            *(pointer,) * 3, *(number,) * 3, *(pointer,) * 4, ctypes.c_float, *(pointer,) * 3, number, pointer, number
        )  # fmt: skip
        self._paired = library.draftproof_paired
        self._paired.argtypes = (
            pointer, ctypes.c_float, *(pointer,) * 3, *(number,) * 5, *(pointer,) * 4, number, *(pointer,) * 4, number
        )  # fmt: skip
        self._medusa = library.draftproof_medusa
        self._medusa.argtypes = (*(pointer,) * 4, *(number,) * 4, *(pointer,) * 4, number, *(pointer,) * 5, number)
        for function in vars(self).values():
            function.restype = None
        self.chain.restype = self._search.restype = number
        self.lookup = Lookup(library)
        library.draftproof_linears.restype = number
        self.int8, self.bf16, self.tiles = (bool(library.draftproof_linears() >> bit & 1) for bit in range(3))
        self.attends_by_tiles = ctypes.c_int.in_dll(library, "draftproof_tiles")

    def multiply(self, layer: Linear, inputs: Tensor) -> Tensor:
        """[..., outputs] of inputs [..., size], in bfloat16."""
        inputs = inputs.contiguous()
        outputs = inputs.new_empty(*inputs.shape[:-1], layer.outputs)
        rows = inputs.numel() // layer.size
        self.linear(ctypes.addressof(layer), inputs.data_ptr(), outputs.data_ptr(), rows, torch.get_num_threads())
        return outputs

    def heads(self, blocks: ctypes.Array[Linear], heads: int, layers: int, hidden: Tensor) -> Tensor:
        """[heads, rows, size] what the first `heads` make of hidden states [rows, size], each by `layers` blocks of its own.

        A block is x + silu(layer(x)). blocks: those of the first head, then those of the second. size: a multiple of 16.
        """
        hidden = hidden.contiguous()
        states = hidden.new_empty(heads, *hidden.shape)
        beside = torch.empty_like(states)
        places = (hidden.data_ptr(), states.data_ptr(), beside.data_ptr())
        self._heads(blocks, *places, heads, layers, len(hidden), torch.get_num_threads())
        return states

    def pick(self, logits: Tensor, noise: Tensor | None, places: Tensor | None, temperatures: Tensor, nothing: int) -> Tensor:
        """[B, N] the first token with the highest score at each node of logits [B, N, V], `nothing` if there is none.

        Rounds as torch's operators do, so the choice is the same. Arguments as for `best`, places [B, N], heats [B].
        """
        (rows, nodes, vocab), logits = logits.shape, logits.contiguous()
        tokens = torch.empty(rows, nodes, dtype=torch.int64)
        where = (None if one is None else one.data_ptr() for one in (noise, places))
        self._pick(
            logits.data_ptr(), *where, temperatures.data_ptr(), nodes, rows * nodes, vocab, nothing, tokens.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        return tokens

    def settle(self, tokens: Tensor, parents: Tensor, target_tokens: Tensor, deep: int, absent: int) -> tuple[Tensor, Tensor]:
        """Of trees [B, N] the nodes that stand [B, deep], root first; and [4, B] how many these are, what was picked behind the
        last, how many nodes behind the root are not `absent`, and the edges to the deepest of them.

        A node stands if it is what was picked [B, N] at its parent and its ancestors stand. Places beyond the path hold their
        own index. deep: nodes on the longest path.
        """
        (rows, nodes), tokens, parents = tokens.shape, tokens.contiguous(), parents.contiguous()
        path, told = torch.empty(rows, deep, dtype=torch.int64), torch.empty(4, rows, dtype=torch.int64)
        places = (tokens.data_ptr(), parents.data_ptr(), target_tokens.data_ptr())
        self._settle(*places, rows, nodes, deep, absent, path.data_ptr(), told.data_ptr())
        return path, told

    def best(
        self, logits: Tensor, noise: Tensor | None, places: Tensor | None, temperatures: Tensor, confidence_scales: Tensor, count: int
    ) -> tuple[Tensor, Tensor]:
        """The `count` best tokens of each row and the logarithm of their chances, [rows, count] both.

        logits: [rows, V] bfloat16. noise: [., V] float32, of which `places` [rows] names each row's. heats: [rows] what logits
        are divided by. confidence_scales: [rows] what scores are multiplied by to say a chance.
        """
        rows, vocab = logits.shape
        confidence, tokens = torch.empty(rows, count), torch.empty(rows, count, dtype=torch.int64)
        where = (None if one is None else one.data_ptr() for one in (noise, places))
        self._best(
            logits.data_ptr(), *where, temperatures.data_ptr(), confidence_scales.data_ptr(), rows, vocab, count, confidence.data_ptr(),
            tokens.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return confidence, tokens

    def top(self, logits: Sequence[Tensor], count: int) -> tuple[Tensor, Tensor]:
        """The `count` best tokens, and their logits, [B, P * N, count] both, of P logits [B, N, V] in bfloat16, side by side.

        Of equals the earlier; NaN is never among them. Where less than `count` are, token 0 at -inf stands for them.
        """
        lying = [part.contiguous() for part in logits]
        (rows, nodes, vocab), parts = lying[0].shape, len(lying)
        tokens = torch.empty(rows, parts * nodes, count, dtype=torch.int64)
        best = torch.empty(tokens.shape)
        places = (ctypes.c_void_p * parts)(*(part.data_ptr() for part in lying))
        self._top(places, parts, rows, nodes, vocab, count, tokens.data_ptr(), best.data_ptr(), torch.get_num_threads())
        return tokens, best

    def streams(self, keys: Tensor, role: int, position: Tensor, origin: Tensor | None) -> Tensor:
        """[B, N, 2] int32, the very bits of `noise.stream`."""
        keys, position, origin = keys.contiguous(), position.contiguous(), None if origin is None else origin.contiguous()
        (rows, count), out = position.shape, torch.empty(*position.shape, 2, dtype=torch.int32)
        told = None if origin is None else origin.data_ptr()
        self._streams(keys.data_ptr(), role, position.data_ptr(), told, out.data_ptr(), rows, count)
        return out

    def gumbel(self, streams: Tensor, vocab: int) -> Tensor:
        """[..., V] the noise of `noise.gumbel` for streams [..., 2] int32, up to the last bits of logarithms."""
        streams = streams.contiguous()
        noise = torch.empty(*streams.shape[:-1], vocab)
        rows = streams.numel() // 2
        self._gumbel(streams.data_ptr(), noise.data_ptr(), rows, vocab, torch.get_num_threads())
        return noise

    def search(
        self, head: Recurrence, context: Tensor, roots: Tensor, width: int, length: int, draft_sampling: DraftSampling
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What a beam search weighs, [rows, M] each: tokens, parents, and the logarithms of the chances of the paths.

        context: [rows, H] bfloat16. roots: [rows], at place 0 of each pool. width: beams, and children of each.
        """
        rows, room = len(roots), 1 + width + max(length - 1, 0) * width * width
        tokens, parents = torch.empty(2, rows, room, dtype=torch.int64)
        chances, context = torch.empty(rows, room), context.contiguous()
        each = 8 * head.hidden + 2 * head.projection.size + head.projection.outputs
        work = context.new_empty(rows * width * each)
        where = (None if one is None else one.data_ptr() for one in draft_sampling[:4])
        size = self._search(
            ctypes.addressof(head), context.data_ptr(), roots.data_ptr(), rows, width, length, *where, draft_sampling.floor,
            tokens.data_ptr(), parents.data_ptr(), chances.data_ptr(), room, work.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return tokens[:, :size], parents[:, :size], chances[:, :size]

    def paired(
        self, pairs: Pairs, weight: float, logits: Tensor, roots: Tensor, nodes: int, children: int, draft_sampling: DraftSampling,
        absent: int, shape: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """The tree of the likeliest `nodes` nodes, [rows, nodes + 1] each: tokens, parents, chances.

        logits: [rows, heads, V] bfloat16. roots: [rows]. weight: what gains are multiplied with before they are added to
        logits. children: at most so many of one parent. `absent` where there are no more. shape: [2, nodes + 1] int64, each
        node's parent and which of its children it is; the tree is then of this shape. The caller keeps what `pairs` names.
        """
        (rows, heads, vocab), logits = logits.shape, logits.contiguous()
        tokens, chances = torch.empty(rows, nodes + 1, dtype=torch.int64), torch.empty(rows, nodes + 1)
        parents, work = torch.empty_like(tokens), torch.empty(rows * heads * (vocab + LANES))
        where = (None if one is None else one.data_ptr() for one in draft_sampling[:4])
        self._paired(
            ctypes.addressof(pairs), weight, None if shape is None else shape.data_ptr(), logits.data_ptr(), roots.data_ptr(),
            rows, heads, vocab, nodes, children, *where, absent, tokens.data_ptr(), parents.data_ptr(), chances.data_ptr(),
            work.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return tokens, parents, chances

    def medusa(
        self, heads: Heads, count: int, hidden: Tensor, roots: Tensor, nodes: int, children: int, draft_sampling: DraftSampling, absent: int,
        shape: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """As `paired`, by what the first `count` of `heads` say of hidden states [rows, size], contiguous, in bfloat16."""
        (rows, size), vocab = hidden.shape, heads.projection.outputs
        tokens, chances = torch.empty(rows, nodes + 1, dtype=torch.int64), torch.empty(rows, nodes + 1)
        parents, work = torch.empty_like(tokens), torch.empty(rows * count * (vocab + LANES))
        room = hidden.new_empty(rows * count * (2 * size + vocab))
        where = (None if one is None else one.data_ptr() for one in draft_sampling[:4])
        self._medusa(
            ctypes.addressof(heads), hidden.data_ptr(), None if shape is None else shape.data_ptr(), roots.data_ptr(), rows,
            count, nodes, children, *where, absent, tokens.data_ptr(), parents.data_ptr(), chances.data_ptr(), room.data_ptr(),
            work.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return tokens, parents, chances


class Chains(NamedTuple):
    """A chain per row, the root first.

    tokens: [rows, 1 + d]. turns: likewise, with how many nodes per row each would be kept. read: [rows] nodes in the scratch.
    """

    tokens: Tensor
    turns: Tensor
    read: Tensor


class Stores:
    """Where tensors [rows, heads, capacity, ...] of one cache lie, to move slots or rows in all of them at once."""

    def __init__(self, stores: Sequence[Tensor]) -> None:
        self.rows, _, self.capacity = stores[0].shape[:3]
        self.count = len(stores)
        self.places = (ctypes.c_void_p * self.count)(*(store.data_ptr() for store in stores))
        self.heads = (ctypes.c_int64 * self.count)(*(store.shape[1] for store in stores))
        self.bytes = (ctypes.c_int64 * self.count)(*(store.stride(2) * store.element_size() for store in stores))

    @classmethod
    def of(cls, stores: Sequence[Tensor]) -> Stores | None:
        """If they lie in the memory of a CPU that has kernels."""
        there = all(store.device.type == "cpu" and store.is_contiguous() for store in stores)
        return cls(stores) if there and kernels() is not None else None

    def keep(self, nodes: Tensor, lengths: Tensor) -> None:
        """Move nodes [rows, D], ascending in each row, to the front of the scratch behind `lengths` [rows]."""
        found = kernels()
        assert found is not None
        nodes = nodes.contiguous()
        found.keep(
            self.places, self.heads, self.bytes, self.count, self.capacity, self.rows, lengths.data_ptr(), nodes.data_ptr(),
            nodes.shape[1],
        )  # fmt: skip

    def copy(self, copies: Sequence[tuple[int, int]], lengths: Tensor) -> None:
        """Let rows become what others are, one after another, each (new, old); of an old one its first `lengths` [rows]."""
        found = kernels()
        assert found is not None
        new, old = ((ctypes.c_int64 * len(copies))(*side) for side in zip(*copies, strict=True))
        found.copy(
            self.places, self.heads, self.bytes, self.count, self.capacity, len(copies), new, old, lengths.data_ptr()
        )  # fmt: skip


@cache
def library() -> Library:
    """The C library, loaded at first use, and why there is none or no quicker one."""
    return load()


@cache
def kernels() -> Kernels | None:
    """The functions of the library; None where it cannot be had (`library().reason` says why)."""
    loaded = library().loaded
    return None if loaded is None else Kernels(loaded)
