"""What the functions of the C library are given, and what they write."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from draftproof.core.prefix import Prefix
from draftproof.core.tree import ABSENT, TokenTree, TreeShape
from draftproof.native.structures import Heads, Linear, Recurrence, Texts, TreeOutput


class Declined:
    """What an implementation returns for arguments that it leaves to the torch function."""


DECLINED = Declined()


class PreparedHeads(NamedTuple):
    """Draft heads as heads.c reads them: `whole` points into `blocks`; the weights must live as
    long."""

    blocks: ctypes.Array[Linear]
    layers: int
    head: Linear | None
    whole: Heads | Recurrence | None


class TreeBuffer:
    """Where the library writes trees, [rows, nodes] each: tokens, parents and confidence."""

    def __init__(self, rows: int, nodes: int) -> None:
        tokens, parents = torch.empty(2, rows, nodes, dtype=torch.int64)
        self.parts = (tokens, parents, torch.empty(rows, nodes))
        self.places, self.nodes = pointers(*self.parts), nodes
        # the library sets the widest
        self.output = (TreeOutput * 1)(TreeOutput(*self.places, nodes, ABSENT, 1))

    def likeliest(self, depth_limit: int) -> TokenTree:
        """The trees written there, as wide as the widest."""
        width = self.output[0].widest
        tokens, parents, confidence = self.parts if width == self.nodes else (
            part[:, :width] for part in self.parts
        )
        return TokenTree.found(tokens, parents, confidence, depth_limit)

    def tree(self, shape: TreeShape | None, depth_limit: int) -> TokenTree:
        """The trees written there, of this shape if there is one."""
        tokens, parents, confidence = self.parts
        if shape is None:
            return TokenTree.found(tokens, parents, confidence, depth_limit)
        return TokenTree.shaped(tokens, shape, confidence=confidence)


def require(fits: bool) -> None:
    if not fits:
        raise IndexError(
            "tensors of other rows, or of other sizes, than the batch has were given; the library "
            "cannot read them"
        )


def pointers(*tensors: Tensor | None) -> list[int | None]:
    """Where tensors lie; the caller keeps them alive."""
    places: list[int | None] = []
    # no frame of Python of its own
    for tensor in tensors:
        places.append(None if tensor is None else tensor.data_ptr())
    return places


def texts_of(prefix: Prefix) -> ctypes.Array[Texts]:
    text, position = prefix.tokens, prefix.position
    require(text.stride(1) == 1 and position.is_contiguous() and len(position) <= len(text))
    return (Texts * 1)(Texts(text.data_ptr(), position.data_ptr(), len(text), text.stride(0)))


def ranks_of(shape: TreeShape | None, nodes: int) -> tuple[int, Tensor | None]:
    """How many children a node may have, and the shape as the library takes it."""
    return (nodes, None) if shape is None else (max(shape.ranks) + 1, shape.child_ranks)
