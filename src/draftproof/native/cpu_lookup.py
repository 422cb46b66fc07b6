"""Drafting from what was read before, by the C library: lookup.c, ensemble.c."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftproof.core.prefix import Prefix
from draftproof.core.tree import ABSENT, TokenTree
from draftproof.native.arguments import DECLINED, Declined, TreeBuffer, pointers, require, texts_of
from draftproof.native.kernels import Kernels
from draftproof.native.structures import Counts, Index, Member, Table


class Same(IntEnum):
    """Nodes of a pool that have the same text: there are none, the likeliest counts, or their
    chances add up."""

    NONE = 0
    LIKELIEST = 1
    SUMMED = 2


class Pool(NamedTuple):
    """Members' trees side by side, [rows, M]: tokens, parents (-1 at each root), and the kinds of
    nodes."""

    texts: Tensor
    parents: Tensor
    kinds: Tensor


class LookupFunctions:
    """Functions of the library, each with the arguments of its namesake in torch."""

    def __init__(self, library: Kernels) -> None:
        self._library = library

    def likeliest(
        self, tokens: Tensor, parents: Tensor, confidence: Tensor, nodes: int, depth_limit: int,
        same: Same = Same.NONE
    ) -> TokenTree:
        rows, size = tokens.shape
        parts = [part.contiguous() for part in (tokens, parents, confidence.float())]
        out = TreeBuffer(rows, min(nodes, size))
        self._library.likeliest(*pointers(*parts), rows, size, same, out.output)
        return out.likeliest(depth_limit)

    def match_prompt(
        self, prefix: Prefix, sizes: tuple[int, int, int, int], budget: int, trees: bool
    ) -> TokenTree | Declined:
        if not trees:
            return DECLINED
        out = TreeBuffer(len(prefix.position), 1 + budget)
        self._library.match_prompt(texts_of(prefix), *sizes, budget, out.output)
        return out.likeliest(budget)

    def learn_text(
        self, index: Any, tail: Tensor, end: Tensor, tokens: Tensor, count: Tensor
    ) -> None:
        tokens, count = tokens.contiguous(), count.contiguous()
        require(len(tail) == len(end) == len(tokens) == len(count))
        index_at = Index(*pointers(*index.parts), *index.numbers)
        self._library.learn_text(
            ctypes.addressof(index_at), *pointers(tail, end, tokens, count), *tokens.shape
        )

    def continue_text(
        self, index: Any, prefix: Prefix, rows: Any, own: float, paths: int, budget: int
    ) -> TokenTree:
        index_at = Index(*pointers(*index.parts), *index.numbers)
        out = TreeBuffer(len(prefix.position), 1 + budget)
        require(len(rows.end) == len(prefix.position))
        given = (ctypes.addressof(index_at), texts_of(prefix), *pointers(*rows), own, paths, budget)
        self._library.continue_text(*given, out.output)
        return out.likeliest(budget)

    def recycle(self, table: Any, tail: Tensor, seen: Any) -> None:
        table_at = Table(*pointers(*table.parts), *table.numbers)
        tensors = (seen.tree.tokens, seen.tree.parents, tail, seen.tokens, seen.logits.float())
        parts = [part.contiguous() for part in tensors]
        require(len(tail) == len(seen.tokens) and seen.tokens.shape[:2] == seen.tree.tokens.shape)
        self._library.recycle(ctypes.addressof(table_at), *pointers(*parts), *seen.tokens.shape)

    def learn_pairs(
        self, table: Any, before: Tensor, tokens: Tensor, successors: Tensor, chance: float
    ) -> None:
        table_at = Table(*pointers(*table.parts), *table.numbers)
        parts = [part.contiguous() for part in (before, tokens, successors)]
        self._library.learn_pairs(
            ctypes.addressof(table_at), *pointers(*parts), tokens.numel(), chance
        )

    def likely_successors(
        self, table: Any, prefix: Prefix, tail: Tensor, sizes: tuple[int, int, int], nodes: int
    ) -> TokenTree:
        table_at, out = Table(*pointers(*table.parts), *table.numbers), TreeBuffer(len(tail), nodes)
        require(len(tail) == len(prefix.position))
        self._library.likely_successors(
            ctypes.addressof(table_at), texts_of(prefix), tail.data_ptr(), *sizes, out.output
        )
        return out.likeliest(sizes[2])

    def judge(self, counts: Any, proposed: Any, prefix: Prefix) -> None:
        counts_at = Counts(*pointers(counts.rows, counts.all), *counts.numbers)
        where = pointers(proposed.texts, proposed.parents, proposed.kinds, proposed.position)
        require(len(prefix.position) == len(proposed.texts) == len(counts.rows))
        self._library.judge(
            ctypes.addressof(counts_at), *where, proposed.texts.shape[1], texts_of(prefix), ABSENT
        )

    def merge_trees(
        self, trees: Sequence[TokenTree], counts: Any, everyone: Tensor, nodes: int
    ) -> tuple[Pool, TokenTree]:
        counts_at = Counts(*pointers(counts.rows, counts.all), *counts.numbers)
        rows = len(trees[0].tokens)
        held, members, sizes = [], (Member * len(trees))(), [one.tokens.shape[1] for one in trees]
        fits = rows == len(counts.rows)
        for number, tree in enumerate(trees):
            fits &= tree.tokens.shape == tree.parents.shape == (rows, sizes[number])
            fits &= tree.tokens.dtype == tree.parents.dtype == torch.int64
            chances = None if tree.confidence is None else tree.confidence.float().contiguous()
            held.append((tree.tokens.contiguous(), tree.parents.contiguous(), chances))
            members[number] = Member(*pointers(*held[-1]), sizes[number])
        require(fits)
        pool = Pool(*torch.empty(3, rows, sum(sizes), dtype=torch.int64))
        out = TreeBuffer(rows, min(nodes, sum(sizes)))
        given = (ctypes.addressof(counts_at), everyone.data_ptr(), members, len(trees), rows)
        self._library.merge_trees(*given, *pointers(*pool), out.output)
        return pool, out.likeliest(max(tree.depth_limit for tree in trees))
