"""Token Recycling: propose what the target found likely after the same tokens (arXiv 2408.08696).

Every read gives the likely successors of each node of the tree, including rejected ones. The paper
keeps the best successors of each token in a matrix and fills a fixed tree from it. This keeps them
for each pair of tokens as well, which predicts better, and with probabilities, so that a new tree
is built in each round. Gathers only; nothing is read back to the host.

Further shape letters: k successors, w nodes of a level that are followed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from draftproof.core.messages import Commit, Frontier, Successors
from draftproof.core.ops import Ops
from draftproof.core.prefix import Prefix
from draftproof.core.tree import ABSENT, TokenTree
from draftproof.drafters.base import Drafter, SharedMemory
from draftproof.errors import BadInput
from draftproof.native.cpu_ops import cpu_kernel
from draftproof.native.declarations import Structure, structure
from draftproof.native.kernels import Kernels
from draftproof.native.pages import lazy_zeros
from draftproof.native.trees import TreeBuffer, search_member, texts_of

BEST = 8
"""Successors kept per context."""
WIDTH, FAN, DEPTH = 2, 3, 4
"""Nodes of a level that are expanded, successors of each, and depth."""


class TokenRecycling(Drafter):
    """Proposes what the target found likely after the same two tokens, or after the same one.

    Token Recycling (arXiv 2408.08696), with pairs of tokens next to single ones.

    Args:
        memory: Pairs, and as many single tokens, to remember across rows and requests: 104 bytes
            each. New entries replace old ones in the same slot.

    Raises:
        BadInput: `memory` is below 1.

    Example:
        >>> engine = dp.load("demo", drafter=dp.TokenRecycling())
    """

    name = "recycling"
    max_draft_tokens = 8
    top_k_needed = BEST
    deepest = DEPTH

    def __init__(self, memory: int = 1 << 16) -> None:
        if memory < 1:
            raise BadInput(f"token recycling was given a memory of {memory} pairs; give at least 1")
        slots = 1 << (memory - 1).bit_length()
        self._tables = SharedMemory(lambda device: SuccessorTable(slots, device))
        self._last: Tensor | None = None                    # [rows] each row's last committed token
        self._owners = torch.zeros(0, dtype=torch.int64)    # [rows]
        self._coming = dict[int, int]()                     # owners of new rows
        self._member: tuple[Tensor, Tensor, Structure] | None = None

    def start(self, rows: int, capacity: int, ops: Ops) -> None:
        super().start(rows, capacity, ops)
        self._last, self._coming, self._member = None, {}, None

    def assign_owners(self, rows: Sequence[int], owners: Sequence[int]) -> None:
        self._coming.update(zip(rows, owners, strict=True))

    def observe(self, commit: Commit) -> None:
        device = commit.tokens.device
        if self._last is None:
            self._last = torch.zeros(0, dtype=torch.int64, device=device)
            self._owners = self._last.clone()
        if commit.rows[-1] == len(self._last):
            owner = self._coming.pop(len(self._last), 0)
            self._owners = torch.cat([self._owners, torch.tensor([owner], device=device)])
            self._last = torch.cat([self._last, torch.tensor([ABSENT], device=device)])
        told = slice(commit.rows[0], commit.rows[-1] + 1)
        last, owners = self._last, self._owners
        if told != slice(0, len(last)):
            last, owners = last[told], owners[told]
        self.ops.run(recycle, self._tables[device], last, owners, commit)

    def propose(self, frontier: Frontier) -> TokenTree:
        prefix, budget = frontier.prefix, frontier.max_draft_tokens
        assert self._last is not None, "a row begins with its prompt"
        table, sizes = self._tables[prefix.tokens.device], (WIDTH, FAN, min(DEPTH, budget))
        rows = self._last, self._owners
        tree = self.ops.run(likely_successors, table, prefix, *rows, sizes, budget + 1)
        return tree if frontier.trees else tree.best_chain()

    def native_member(self, prefix: Prefix) -> Structure:
        """A search of the table; the same structure until rows change."""
        assert self._last is not None, "a row begins with its prompt"
        table, last = self._tables[prefix.tokens.device], self._member
        if last is None or last[0] is not self._last or last[1] is not self._owners:
            search = _search(table, self._last, self._owners, (WIDTH, FAN, DEPTH))
            member = search_member(len(self._last), table=search)
            last = self._member = self._last, self._owners, member
        return last[2]

    def __getstate__(self) -> dict[str, object]:
        """For copies: all but the addresses of this one."""
        return {**vars(self), "_member": None}

    def select(self, rows: Sequence[int]) -> None:
        if self._last is not None:
            self._last, self._owners = self._last[list(rows)], self._owners[list(rows)]


_TOKEN, _BEFORE = -1640531535, -2048144777              # 0x9E3779B1, 0x85EBCA77


class SuccessorTable:
    """A hash table of the best successors of pairs of tokens and of single tokens, with
    probabilities.

    The first half of the slots is for pairs. At the end are a slot that stays empty, and one for
    writes that are to be discarded.

    An entry belongs to the owner of its text, and is used only for rows of this owner. The owner's
    number, which others cannot guess, is part of the tag, so evicted entries reveal nothing about
    the text of others.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        self.slots, size = slots, 2 * slots + 2
        self.shift = min(31, 33 - slots.bit_length())               # high bits are mixed best
        self.tags = lazy_zeros(size, dtype=torch.int32, device=device)
        self.owners = lazy_zeros(size, dtype=torch.int64, device=device)
        self.tokens = lazy_zeros(size, BEST, dtype=torch.int32, device=device)
        self.confidence = lazy_zeros(size, BEST, dtype=torch.float32, device=device)

    @cached_property
    def in_c(self) -> Structure:
        """The table for the C library."""
        return structure("Table")(
            self.tags, self.tokens, self.owners, self.confidence, BEST, self.slots, self.shift,
            _TOKEN, _BEFORE, ABSENT
        )

    def __getstate__(self) -> dict[str, object]:
        """For copies: all but the addresses of this one."""
        return {name: value for name, value in vars(self).items() if name != "in_c"}

    def place(self, before: Tensor, token: Tensor, owner: Tensor) -> tuple[Tensor, Tensor]:
        """[2, ...] slots of pair and token, and their tags, never 0; 32-bit hashes that wrap."""
        alone = (token.int() + 2) * _TOKEN + owner.int()
        tag = torch.stack([alone + (before.int() + 2) * _BEFORE, alone])
        pair, single = ((tag >> self.shift) & (self.slots - 1)).long()
        return torch.stack([pair, single + self.slots]), tag | 1


def recycle(table: SuccessorTable, last: Tensor, owners: Tensor, commit: Commit) -> None:
    """Learn the successors of each node of trees; `last` [b]: the tokens before the roots, and
    then the last committed ones."""
    if commit.successors is not None:
        _learn(table, last, owners, commit.successors)
    last.copy_(commit.tokens.gather(1, commit.count[:, None] - 1)[:, 0])


def _learn(table: SuccessorTable, last: Tensor, owners: Tensor, seen: Successors) -> None:
    """Absent nodes are ignored. Of two entries for one slot, the later one stays."""
    tokens, parents = seen.tree.tokens, seen.tree.parents
    before = torch.where(parents < 0, last[:, None], tokens.gather(1, parents.clamp(min=0)))
    place, tag = table.place(before, tokens, owners[:, None])                       # [2, b, N]
    useless = torch.stack([(before == ABSENT) | (tokens == ABSENT), tokens == ABSENT])
    goal = torch.where(useless, -1, place).flatten(1)                               # [2, b * N]
    later = torch.ones(goal.shape[1:] * 2, dtype=torch.bool, device=goal.device).triu(1)
    useless |= ((goal[:, :, None] == goal[:, None]) & later).any(-1).view_as(tag)
    place = torch.where(useless, 2 * table.slots + 1, place)
    kept = seen.tokens.shape[-1]
    table.tags[place], table.owners[place] = tag, owners[:, None].expand_as(tag)
    table.tokens[place, :kept] = seen.tokens.int()
    table.confidence[place, :kept] = seen.logits.float().softmax(-1).nan_to_num(0.0)


def likely_successors(
    table: SuccessorTable, prefix: Prefix, last: Tensor, owners: Tensor,
    sizes: tuple[int, int, int], nodes: int
) -> TokenTree:
    """The tree of the likeliest `nodes` known to follow each root; `last` [B]: tokens before it.

    sizes: nodes expanded per level, successors of each (of the root: all), and the depth.
    """
    width, few, depth = sizes
    tokens, before = prefix.root[:, None], last[:, None]
    confidence = torch.ones(tokens.shape, dtype=torch.float32, device=tokens.device)
    pool, start = [(tokens, torch.zeros_like(tokens), confidence)], 0
    for level in range(depth):
        best = confidence.topk(min(width, confidence.shape[1]), 1)                      # [B, w]
        above = tokens.gather(1, best.indices)
        place, tag = table.place(before.gather(1, best.indices), above, owners[:, None])
        known = (table.tags[place] == tag) & (table.owners[place] == owners[:, None])
        slots = torch.where(known[1], place[1], 2 * table.slots)
        slots = torch.where(known[0], place[0], slots)                                  # [B, w]
        branching = few if level else BEST
        steps = best.values[..., None] * table.confidence[slots, :branching]           # [B, w, K]
        parents = (best.indices + start)[..., None].expand_as(steps).flatten(1)
        start += tokens.shape[1]
        before = above[..., None].expand_as(steps).flatten(1)
        tokens, confidence = table.tokens[slots, :branching].long().flatten(1), steps.flatten(1)
        pool.append((tokens, parents, confidence))
    tokens, parents, confidence = (torch.cat(part, 1) for part in zip(*pool, strict=True))
    return TokenTree.likeliest(tokens, parents, confidence, nodes, depth)


@cpu_kernel(recycle)
def _recycle(
    library: Kernels, table: SuccessorTable, last: Tensor, owners: Tensor, commit: Commit
) -> None:
    if (seen := commit.successors) is not None:
        learnt = (seen.tree.tokens, seen.tree.parents, seen.tokens, seen.logits.float(),
                  *seen.tokens.shape[1:])
    else:
        learnt = (None, None, None, None, 0, 0)
    library("recycle", table.in_c, last, owners, len(last), *learnt, commit.tokens, commit.count,
            commit.tokens.shape[1])


@cpu_kernel(likely_successors)
def _likely_successors(
    library: Kernels, table: SuccessorTable, prefix: Prefix, last: Tensor, owners: Tensor,
    sizes: tuple[int, int, int], nodes: int
) -> TokenTree:
    out = TreeBuffer(len(prefix.position), nodes)
    search = _search(table, last, owners, sizes)
    library("likely_successors", search, texts_of(prefix, nodes - 1), nodes - 1, out.output)
    return out.tree(sizes[2])


def _search(
    table: SuccessorTable, last: Tensor, owners: Tensor, sizes: tuple[int, int, int]
) -> Structure:
    return structure("TableSearch")(table.in_c, last, owners, *sizes, len(last))
