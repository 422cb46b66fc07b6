"""Drafting from what was read before, by the C library: lookup.c, ensemble.c; and the trees that it
writes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftproof.core.prefix import Prefix
from draftproof.core.tree import ABSENT, TokenTree, TreeShape
from draftproof.native.declarations import structure
from draftproof.native.kernels import Kernels

Index, Member, Table, Texts, TreeOutput = map(
    structure, ("Index", "Member", "Table", "Texts", "TreeOutput")
)


class TreeBuffer:
    """Where the library writes trees, [rows, nodes] each: tokens, parents and confidence."""

    def __init__(self, rows: int, nodes: int) -> None:
        tokens, parents = torch.empty(2, rows, nodes, dtype=torch.int64)
        self.parts = (tokens, parents, torch.empty(rows, nodes))
        # the library sets the widest
        self.output = TreeOutput(*map(Tensor.data_ptr, self.parts), nodes, ABSENT, 1)

    def tree(self, depth_limit: int, shape: TreeShape | None = None) -> TokenTree:
        """The trees written there, as wide as the widest; of this shape if there is one."""
        tokens, parents, confidence = self.parts
        if shape is not None:
            return TokenTree.shaped(tokens, shape, confidence=confidence)
        width = min(self.output.widest, tokens.shape[1])
        tokens, parents, confidence = (part[:, :width] for part in self.parts)
        return TokenTree(tokens, parents, min(depth_limit, width - 1), confidence=confidence)


class Pool(NamedTuple):
    """Members' trees side by side, [rows, M]: tokens, parents (-1 at each root), and the kinds of
    nodes."""

    texts: Tensor
    parents: Tensor
    kinds: Tensor


def require(fits: bool) -> None:
    if not fits:
        raise IndexError(
            "tensors of other rows, or of other sizes, than the batch has were given; the library "
            "cannot read them"
        )


class LookupFunctions:
    """Functions of the library, each with the arguments of its namesake in torch."""

    def __init__(self, library: Kernels) -> None:
        self._call = library

    def likeliest(
        self, tokens: Tensor, parents: Tensor, confidence: Tensor, nodes: int, depth_limit: int
    ) -> TokenTree:
        rows, size = tokens.shape
        out = TreeBuffer(rows, min(nodes, size))
        self._call("likeliest", tokens, parents, confidence.float(), rows, size, out.output)
        return out.tree(depth_limit)

    def match_prompt(
        self, prefix: Prefix, sizes: tuple[int, int, int, int], budget: int
    ) -> TokenTree:
        out = TreeBuffer(len(prefix.position), 1 + budget)
        self._call("match_prompt", _texts(prefix), *sizes, budget, out.output)
        return out.tree(budget)

    def learn_text(
        self, index: Any, tail: Tensor, end: Tensor, tokens: Tensor, count: Tensor
    ) -> None:
        require(len(tail) == len(end) == len(tokens) == len(count))
        self._call("learn_text", _at(Index, index), tail, end, tokens, count, *tokens.shape)

    def continue_text(
        self, index: Any, prefix: Prefix, rows: Any, own: float, paths: int, budget: int
    ) -> TokenTree:
        out = TreeBuffer(len(prefix.position), 1 + budget)
        require(len(rows.end) == len(prefix.position))
        given = (_at(Index, index), _texts(prefix), *rows, own, paths, budget, out.output)
        self._call("continue_text", *given)
        return out.tree(budget)

    def recycle(self, table: Any, last: Tensor, seen: Any) -> None:
        require(len(last) == len(seen.tokens) and seen.tokens.shape[:2] == seen.tree.tokens.shape)
        given = (seen.tree.tokens, seen.tree.parents, last, seen.tokens, seen.logits.float())
        self._call("recycle", _at(Table, table), *given, *seen.tokens.shape)

    def likely_successors(
        self, table: Any, prefix: Prefix, last: Tensor, sizes: tuple[int, int, int], nodes: int
    ) -> TokenTree:
        out = TreeBuffer(len(last), nodes)
        require(len(last) == len(prefix.position))
        given = (_at(Table, table), _texts(prefix), last, *sizes, out.output)
        self._call("likely_successors", *given)
        return out.tree(sizes[2])

    def judge(self, counts: Tensor, proposed: Any, prefix: Prefix, fade: float) -> None:
        require(len(prefix.position) == len(proposed.texts) and counts.is_contiguous())
        where = (proposed.texts, proposed.parents, proposed.kinds, proposed.position)
        size = proposed.texts.shape[1]
        self._call("judge", counts, len(counts), fade, *where, size, _texts(prefix), ABSENT)

    def merge_trees(
        self, trees: Sequence[TokenTree], counts: Tensor, constants: tuple[int, float, float],
        nodes: int
    ) -> tuple[Pool, TokenTree]:
        rows, sizes = len(trees[0].tokens), [one.tokens.shape[1] for one in trees]
        held, members, fits = [], (Member * len(trees))(), len(counts) >= len(trees) * constants[0]
        for number, tree in enumerate(trees):
            fits &= tree.tokens.shape == tree.parents.shape == (rows, sizes[number])
            fits &= tree.tokens.dtype == tree.parents.dtype == torch.int64
            chances = None if tree.confidence is None else tree.confidence.float().contiguous()
            held.append((tree.tokens.contiguous(), tree.parents.contiguous(), chances))
            places = (None if one is None else one.data_ptr() for one in held[-1])
            members[number] = Member(*places, sizes[number])
        require(fits)
        pool = Pool(*torch.empty(3, rows, sum(sizes), dtype=torch.int64))
        out = TreeBuffer(rows, min(nodes, sum(sizes)))
        given = (counts, *constants, members, len(trees), rows, *pool, out.output)
        self._call("merge_trees", *given)
        return pool, out.tree(max(tree.depth_limit for tree in trees))


def _texts(prefix: Prefix) -> ctypes.Structure:
    text, position = prefix.tokens, prefix.position
    require(text.stride(1) == 1 and position.is_contiguous() and len(position) <= len(text))
    return Texts(text.data_ptr(), position.data_ptr(), len(text), text.stride(0))


def _at(kind: type[ctypes.Structure], owner: Any) -> ctypes.Structure:
    """Where the parts of a drafter's memory lie, and its numbers."""
    return kind(*map(Tensor.data_ptr, owner.parts), *owner.numbers)
