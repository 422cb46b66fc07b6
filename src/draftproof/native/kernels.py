"""The functions of the C library, as Python calls them. Where there is no library, torch serves."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from draftproof.errors import BadInput
from draftproof.native.build import SWITCH, Library, load
from draftproof.native.declarations import (
    Checked,
    Value,
    addresses,
    checked_values,
    functions,
)
from draftproof.native.structures import Native
from draftproof.native.threads import thread_count

log = logging.getLogger("draftproof")

WIDEST = 256
"""The largest attention head that the kernels read."""


class Kernels:
    """Calls the functions of the library by their names in C, less `draftproof_`, with what they
    take there, and with the number of threads.

    This is the only place where Python calls our C code, except `weights/pack_ahead.py`, which runs
    before torch is imported and passes matrices of a checked file. Every tensor is compared with
    what the source declares (see `declarations`), so that a mistake in Python raises and never
    reaches memory that is not the tensor's.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._functions = {}
        for name, (returns, takes, threaded) in functions().items():
            function = getattr(library, f"draftproof_{name}")
            function.restype = returns
            function.argtypes = [parameter.type for parameter in takes] + [
                ctypes.c_int64
            ] * threaded
            self._functions[name] = function, tuple(map(Checked.of, takes)), threaded

    def __call__(self, name: str, *args: Value) -> int:
        """Call a function of the library.

        Args:
            name: The function, less `draftproof_`.
            *args: What it takes. Tensors and structures are passed by their address; a tensor that
                is only read may be non-contiguous and is copied then.

        Returns:
            What the function returns; 0 if it returns nothing.

        Raises:
            BadInput: A tensor is not what the function declares: its dtype, its device, its
                contiguity or its size.
        """
        function, checks, threaded = self._functions[name]
        if len(args) != len(checks):
            raise ValueError(f"{name} takes {len(checks)} arguments, {len(args)} were passed")
        held, values = checked_values(checks, args, name)
        if threaded:
            values.append(thread_count())
        result = function(*values) or 0
        del held                                    # copies among them must live until C returns
        return result

    def multiply(self, layer: Native, inputs: Tensor) -> Tensor:
        """[..., outputs] of inputs [..., size], in bfloat16."""
        if inputs.dtype != torch.bfloat16 or inputs.shape[-1] != layer.size:
            raise BadInput(
                f"a layer of {layer.size} inputs in bfloat16 was given {list(inputs.shape)} in "
                f"{inputs.dtype}; convert them"
            )
        outputs: Tensor = inputs.new_empty(*inputs.shape[:-1], layer.outputs)
        self("linear", layer, inputs, outputs, inputs.numel() // layer.size)
        return outputs


class Chains(NamedTuple):
    """A chain per row, the root first.

    tokens: [rows, 1 + d]. budget_rank: likewise, as of a `TokenTree`. read: [rows] nodes in the
    scratch.
    """

    tokens: Tensor
    budget_rank: Tensor
    read: Tensor


class Stores:
    """Where tensors [rows, heads, capacity, ...] of one cache lie, in the memory of a CPU.

    shape: that of the first one.
    """

    def __init__(self, stores: Sequence[Tensor], kernels: Kernels) -> None:
        self.shape = stores[0].shape
        self.rows, _, self.capacity = self.shape[:3]
        self.count, self.kernels = len(stores), kernels
        if any(not store.is_cpu or not store.is_contiguous() or store.dim() < 3
               or (len(store), store.shape[2]) != (self.rows, self.capacity) for store in stores):
            shapes = ", ".join(str(list(store.shape)) for store in stores)
            raise BadInput(f"the stores of a cache were {shapes}; they must be contiguous on the "
                           "CPU, with the same rows and the same capacity")
        self.pointers = addresses(stores)
        self._heads = (ctypes.c_int64 * self.count)(*(store.shape[1] for store in stores))
        self._bytes = (ctypes.c_int64 * self.count)(
            *(store.stride(2) * store.element_size() for store in stores)
        )

    @classmethod
    def of(cls, stores: Sequence[Tensor]) -> Stores | None:
        """If there are kernels for them."""
        library, there = kernels(), all(
            store.device.type == "cpu" and store.is_contiguous() for store in stores
        )
        return cls(stores, library) if there and library is not None else None

    def keep(self, nodes: Tensor, lengths: Tensor) -> None:
        """Move nodes [rows, D], ascending in each row, to the front of the scratch after `lengths`
        [rows], in all stores."""
        self.kernels(
            "keep", self.pointers, self._heads, self._bytes, self.count, self.capacity, self.rows,
            lengths, nodes, nodes.shape[1]
        )


@cache
def library() -> Library:
    """The C library, loaded at first use, and why there is none or no quicker one.

    If it cannot be had, a warning says so once: torch serves, several times slower.
    """
    result = load()
    if result.loaded is None and os.environ.get(SWITCH) != "0":
        log.warning("note: decoding on the CPU is several times slower than it could be, without "
                    "the C kernels: %s", (result.reason.splitlines() or [""])[0])
    return result


@cache
def kernels() -> Kernels | None:
    """The functions of the library; None where it cannot be had (`library().reason` says why)."""
    loaded = library().loaded
    return None if loaded is None else Kernels(loaded)
