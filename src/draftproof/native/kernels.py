"""The functions of the C library, as Python calls them. Where there is no library, torch serves."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftproof.errors import BadInput
from draftproof.native.build import Library, load
from draftproof.native.structures import Linear

WIDEST = 256
"""Largest head of attention that the kernels read."""
SIGNATURES = {
    "gate": "2p3n", "linear": "3p2n", "heads": "4p4n", "forward": "8p", "present_nodes": "3n5p",
    "keep": "3p3n2pn", "copy": "3p3n3p", "chain": "4pn2p3n4pfn4p:n", "streams": "pn3p2n",
    "gumbel": "2p3n", "sample": "4p4npn", "best_tokens": "5p3n2pn", "top_tokens": "p5n2pn",
    "accept": "3p4n2p", "well_formed": "2p5n:n", "beam_search": "3p3n4pf3pnpn:n",
    "bigram_tree": "pf3p5n4pn4pn", "medusa_tree": "4p4n4pn5pn", "likeliest": "3p3np",
    "match_prompt": "p5np", "learn_text": "5p2n", "continue_text": "5pf2np", "recycle": "6p3n",
    "learn_pairs": "4pnf", "likely_successors": "3p3np", "judge": "5pnpn", "merge_trees": "3p2n4p",
}  # fmt: skip
"""Arguments of each function: pointers, 64-bit numbers and floats; behind a colon what it returns,
if it does."""
_TYPES = {"p": ctypes.c_void_p, "n": ctypes.c_int64, "f": ctypes.c_float}


class Kernels:
    """The functions of the library by their names in `SIGNATURES`; they take pointers as numbers.

    linears: whether the processor has products for linear layers. tiles: by tiles (AMX), as
    attention then is; by vectors, if `attends_by_tiles` is set to 0.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.draftproof_linears.restype = ctypes.c_int64
        has = library.draftproof_linears()
        self.linears, self.tiles = bool(has & 1), bool(has & 2)
        self.attends_by_tiles = ctypes.c_int.in_dll(library, "draftproof_tiles")

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """The function of this name, typed at its first use."""
        if name not in SIGNATURES:
            raise AttributeError(name)
        function = getattr(self._library, f"draftproof_{name}")
        takes, _, returns = SIGNATURES[name].partition(":")
        counted = re.findall(r"(\d*)([pnf])", takes)
        function.argtypes = [
            _TYPES[kind] for count, kind in counted for _ in range(int(count or 1))
        ]
        function.restype = _TYPES[returns] if returns else None
        setattr(self, name, function)
        found: Callable[..., Any] = function
        return found

    def multiply(self, layer: Linear, inputs: Tensor) -> Tensor:
        """[..., outputs] of inputs [..., size], in bfloat16."""
        if inputs.dtype != torch.bfloat16 or inputs.shape[-1] != layer.size:
            raise BadInput(
                f"a layer of {layer.size} inputs in bfloat16 was given {list(inputs.shape)} in "
                f"{inputs.dtype}; convert them"
            )
        inputs = inputs.contiguous()
        outputs: Tensor = inputs.new_empty(*inputs.shape[:-1], layer.outputs)
        rows = inputs.numel() // layer.size
        self.linear(
            ctypes.addressof(layer), inputs.data_ptr(), outputs.data_ptr(), rows,
            torch.get_num_threads()
        )
        return outputs

    def residual_blocks(
        self, blocks: ctypes.Array[Linear], heads: int, layers: int, hidden: Tensor
    ) -> Tensor:
        """[heads, rows, size] what the first `heads` make of hidden states [rows, size], each by
        `layers` blocks.

        A block is x + silu(layer(x)). blocks: those of the first head, then those of the second.
        size: a multiple of 16.
        """
        hidden = hidden.contiguous()
        states: Tensor
        states, work = hidden.new_empty(2, heads, *hidden.shape)
        places = (hidden.data_ptr(), states.data_ptr(), work.data_ptr())
        self.heads(blocks, *places, heads, layers, len(hidden), torch.get_num_threads())
        return states


class Chains(NamedTuple):
    """A chain per row, the root first.

    tokens: [rows, 1 + d]. turns: likewise, with how many nodes per row each would be kept. read:
    [rows] nodes in the scratch.
    """

    tokens: Tensor
    turns: Tensor
    read: Tensor


class Stores:
    """Where tensors [rows, heads, capacity, ...] of one cache lie, to move slots or rows in all of
    them at once."""

    def __init__(self, stores: Sequence[Tensor], kernels: Kernels) -> None:
        self.rows, _, self.capacity = stores[0].shape[:3]
        self.count, self.kernels = len(stores), kernels
        self.places = (ctypes.c_void_p * self.count)(*(store.data_ptr() for store in stores))
        self.heads = (ctypes.c_int64 * self.count)(*(store.shape[1] for store in stores))
        self.bytes = (ctypes.c_int64 * self.count)(
            *(store.stride(2) * store.element_size() for store in stores)
        )
        self._all = (self.places, self.heads, self.bytes, self.count, self.capacity)

    @classmethod
    def of(cls, stores: Sequence[Tensor]) -> Stores | None:
        """If they lie in the memory of a CPU that has kernels."""
        found, there = kernels(), all(
            store.device.type == "cpu" and store.is_contiguous() for store in stores
        )
        return cls(stores, found) if there and found is not None else None

    def keep(self, nodes: Tensor, lengths: Tensor) -> None:
        """Move nodes [rows, D], ascending in each row, to the front of the scratch behind `lengths`
        [rows]."""
        nodes = nodes.contiguous()
        self.kernels.keep(
            *self._all, self.rows, lengths.data_ptr(), nodes.data_ptr(), nodes.shape[1]
        )

    def copy(self, copies: Sequence[tuple[int, int]], lengths: Tensor) -> None:
        """Copy rows, one after another, each (new, old); of an old one its first `lengths` [rows].
        """
        new, old = ((ctypes.c_int64 * len(copies))(*side) for side in zip(*copies, strict=True))
        self.kernels.copy(*self._all, len(copies), new, old, lengths.data_ptr())


@cache
def library() -> Library:
    """The C library, loaded at first use, and why there is none or no quicker one."""
    return load()


@cache
def kernels() -> Kernels | None:
    """The functions of the library; None where it cannot be had (`library().reason` says why)."""
    loaded = library().loaded
    return None if loaded is None else Kernels(loaded)


def linear_kernels() -> Kernels | None:
    """The same where they have linear layers: not in the portable build."""
    found = kernels()
    return found if found is not None and found.linears else None


def release_workers() -> None:
    """Let go of this thread's OpenMP workers, for another thread to decode.

    With those of a second thread they are more than the processors; then OpenMP sleeps at every
    barrier, where it would have waited awake, and a small model is five times slower.
    """
    try:
        ctypes.CDLL("libgomp.so.1").omp_pause_resource_all(1)
    except (OSError, AttributeError):                           # another OpenMP, or an older one
        return
