"""Suffix decoding: propose what followed the end of the text in this or in earlier texts.

The paper (arXiv 2411.04975) counts in suffix trees on the host. Here the counts are in a hash index
of fixed size next to the text. For every context of the sizes in `SIZES` it has the successors,
their
counts and their last positions; further tokens are read from the text at that position. A round is
a handful of gathers for all rows. Memory is bounded; the oldest text is overwritten.

Probabilities are those of an escape coder (Bell, Cleary and Witten 1990, method C): a context seen
c
times with u different successors reserves u / (c + u) for unseen successors, which the next shorter
context predicts.

Further shape letters: O context sizes, L the longest, S slots of a context, W paths.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from draftproof.core.messages import Commit, Frontier
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

SIZES = (16, 12, 8, 6, 4, 3, 2, 1)
"""Context sizes, in tokens; the C library supports no larger ones."""
SLOTS = 4
"""Successors kept per context; two that share a slot replace each other."""
OWN = 2
"""Extra weight, in occurrences, of an occurrence in the row's own text."""
PATHS = 12
"""Continuations that are merged into the tree."""


class SuffixDrafter(Drafter):
    """Proposes the likeliest continuations by counting: in this text, other rows', earlier ones.

    SuffixDecoding (arXiv 2411.04975), with a hash index in place of suffix trees. Earlier requests
    of the same owner change how fast a text is generated, never the text.

    Args:
        memory: Tokens of text to remember, at least twice the rows of a batch; the index takes 160
            bytes per token.

    Raises:
        BadInput: `memory` is below 1.

    Example:
        >>> engine = dp.load("demo", drafter=dp.SuffixDrafter(memory=1 << 20))
    """

    name = "suffix"
    max_draft_tokens = 8

    def __init__(self, memory: int = 1 << 16) -> None:
        if memory < 1:
            raise BadInput(f"suffix decoding was given a memory of {memory} tokens; give 1 or more")
        self.memory = memory
        self._member: tuple[Rows, Structure, Structure] | None = None
        self._indexes = SharedMemory(lambda device: SuffixIndex(memory, device))

    def start(self, rows: int, capacity: int, ops: Ops) -> None:
        super().start(rows, capacity, ops)
        self._width = capacity + 3                          # a root and two ends after the text
        self._places = max(self.memory // self._width, 2 * rows + 1)
        self._rows = Rows(*(torch.zeros(0, dtype=torch.int64) for _ in range(4)))
        self._owners = dict[int, int]()                     # of new rows
        self._member = None

    def assign_owners(self, rows: Sequence[int], owners: Sequence[int]) -> None:
        self._owners.update(zip(rows, owners, strict=True))

    def observe(self, commit: Commit) -> None:
        device, known = commit.tokens.device, len(self._rows.end)
        index = self._index(device)
        if commit.rows[-1] == known:
            begin = torch.tensor([self._place(index)], device=device)
            tail = torch.full((1, SIZES[0]), ABSENT, dtype=torch.int64, device=device)
            owner = torch.tensor([self._owners.pop(known, 0)], device=device)
            new = Rows(tail, begin, begin.clone(), owner)
            both = zip(self._rows, new, strict=True)
            self._rows = Rows(*map(torch.cat, both)) if known else new
        told = slice(commit.rows[0], commit.rows[-1] + 1)
        whole = told == slice(0, len(self._rows.end))
        rows = self._rows if whole else Rows(*(part[told] for part in self._rows))
        self.ops.run(learn_text, index, rows, commit.tokens, commit.count)

    def propose(self, frontier: Frontier) -> TokenTree:
        prefix, budget = frontier.prefix, frontier.max_draft_tokens
        index = self._index(prefix.tokens.device)
        tree = self.ops.run(continue_text, index, prefix, self._rows, OWN, PATHS, budget)
        return tree if frontier.trees else tree.best_chain()

    def native_member(self, prefix: Prefix) -> Structure:
        """A search of the index; the same structure until rows or the index change."""
        in_c, last = self._index(prefix.tokens.device).in_c(), self._member
        if last is None or last[0] is not self._rows or last[1] is not in_c:
            search = _search(in_c, self._rows, OWN, PATHS)
            member = search_member(len(self._rows.end), index=search)
            last = self._member = self._rows, in_c, member
        return last[2]

    def __getstate__(self) -> dict[str, object]:
        """For copies: all but the addresses of this one."""
        return {**vars(self), "_member": None}

    def select(self, rows: Sequence[int]) -> None:
        """Move a running row to a new place."""
        device = self._rows.end.device
        new = [self._place(self._index(device)) if row in rows[:at] else -1
               for at, row in enumerate(rows)]  # fmt: skip
        order, place = torch.tensor([list(rows), new], dtype=torch.int64, device=device)
        tail, begin, end, owner = (part[order] for part in self._rows)
        begin, end = (torch.where(place < 0, old, place) for old in (begin, end))
        self._rows = Rows(tail, begin, end, owner)

    def _index(self, device: torch.device) -> SuffixIndex:
        """The memory of this device, enlarged for the rows of this run if necessary."""
        index = self._indexes[device]
        index.hold(self._width * self._places)
        return index

    def _place(self, index: SuffixIndex) -> int:
        """A place for a row to write; places are reused in turn, the oldest first."""
        begin = index.cursor if index.cursor <= self._width * (self._places - 1) else 0
        index.cursor = begin + self._width
        return begin


class Rows(NamedTuple):
    """For each running row: its last tokens [B, L], the start of its place and the end of its text
    [B], and its owner [B]."""

    tail: Tensor
    begin: Tensor
    end: Tensor
    owner: Tensor


_FOLLOW, _SCATTER = -2048144777, -1640531535            # 0x85EBCA77, 0x9E3779B1


class SuffixIndex:
    """Text, and the successors of each context in it.

    An entry is a hash of (context, successor), the successor's last place, and how often it was
    seen. Hashes have 32 bits and wrap around, as on every device. An entry is valid while the token
    at its place gives the same hash, so overwritten text is forgotten with all its entries.

    Text has an owner, and is used only for rows of this owner. The owner's number, which others
    cannot guess, is part of every hash, so evicted entries reveal nothing about the text of others.
    """

    def __init__(self, memory: int, device: torch.device) -> None:
        self.slots = 1 << max(memory * len(SIZES) // SLOTS - 1, 0).bit_length()
        size = self.slots * SLOTS + 1                       # the last is for what has no place
        self.text, self.cursor = torch.full((1,), ABSENT, dtype=torch.int64, device=device), 0
        self.owners = torch.zeros_like(self.text)           # of each token of the text
        self.tags = lazy_zeros(size, dtype=torch.int32, device=device)
        self.positions = lazy_zeros(size, dtype=torch.int64, device=device)
        self.counts = lazy_zeros(size, dtype=torch.float32, device=device)
        self.sizes = torch.tensor(SIZES, device=device)
        dice, shape = torch.Generator().manual_seed(0), (2, len(SIZES), SIZES[0])
        low, high = -(1 << 31), (1 << 31) - 1
        weights = torch.randint(low, high, shape, generator=dice, dtype=torch.int32)
        seen = torch.arange(SIZES[0]) >= SIZES[0] - torch.tensor(SIZES)[:, None]
        self.context = (weights * seen).to(device)          # [2, O, L]: for the slot, for the tag
        self.shift = min(31, 33 - self.slots.bit_length())  # the highest bits are mixed best
        self._in_c: Structure | None = None

    def hold(self, size: int) -> None:
        """Enlarge it to `size` tokens, keeping the contents."""
        if len(self.text) <= size:
            with torch.inference_mode(False):
                more = self.text.new_full((size + 2 - len(self.text),), ABSENT)
                # owners first, for a thread that describes the index meanwhile
                self.owners = torch.cat([self.owners[:-1], torch.zeros_like(more)])
                self.text = torch.cat([self.text[:-1], more])

    def in_c(self) -> Structure:
        """The index for the C library; the same structure until the index is enlarged."""
        made, text = self._in_c, self.text
        if made is None or made.held[0] is not text:
            made = self._in_c = structure("Index")(
                text, self.positions, self.owners, self.tags, self.counts, self.context,
                self.sizes, len(text), len(SIZES), SLOTS, self.slots, self.shift, _FOLLOW,
                _SCATTER, ABSENT
            )
        return made

    def __getstate__(self) -> dict[str, object]:
        """For copies: all but the addresses of this one."""
        return {**vars(self), "_in_c": None}

    def hash(
        self, context: Tensor, successor: Tensor, owner: Tensor
    ) -> tuple[Tensor, Tensor]:
        """First entry and tag [..., O] of contexts of `owner` [..., 1] that end `context` [..., L],
        and a successor."""
        terms = (context.int() + 1)[..., None, None, :] * self.context
        key = terms.sum(-1, dtype=torch.int32)                                      # [..., 2, O]
        key += torch.stack([owner.int(), (owner >> 32).int()], -2)
        slot = (key[..., 0, :] >> self.shift) & (self.slots - 1)
        return slot.long() * SLOTS, key[..., 1, :] + (successor.int() + 1) * _FOLLOW


def slot_of(tokens: Tensor) -> Tensor:
    """The slot of each successor among those of its context."""
    return ((tokens.int() + 1) * _SCATTER >> 30) & (SLOTS - 1)


def learn_text(index: SuffixIndex, rows: Rows, tokens: Tensor, count: Tensor) -> None:
    """Learn `count` [b] of tokens [b, D] that follow the text of `rows`; tails and ends are updated
    in place."""
    tail, _, end, owner = rows
    ahead = torch.arange(tokens.shape[1], device=tokens.device)
    there = ahead < count[:, None]                                                      # [b, D]
    place = torch.where(there, end[:, None] + ahead, len(index.text) - 1)
    index.text[place], index.owners[place] = tokens, owner[:, None].expand_as(tokens)
    after = (end + count)[:, None] + torch.arange(2, device=tokens.device)
    index.text[after] = torch.full_like(after, ABSENT)                          # the end, so far
    text = torch.cat([tail, tokens], 1)
    context = text.unfold(1, SIZES[0] + 1, 1)[..., :-1]                                 # [b, D, L]
    entry, tag = index.hash(context, tokens[..., None], owner[:, None, None])
    known = there[..., None] & (context[..., SIZES[0] - index.sizes] != ABSENT)         # [b, D, O]
    entry = torch.where(known, entry + slot_of(tokens)[..., None], len(index.tags) - 1)
    index.counts[entry] = torch.where(index.tags[entry] == tag, index.counts[entry], 0)
    ones = torch.ones_like(entry, dtype=torch.float32)
    index.counts.scatter_add_(0, entry.flatten(), ones.flatten())
    index.tags[entry], index.positions[entry] = tag, place[..., None].expand_as(entry)
    last = count[:, None] + torch.arange(SIZES[0], device=tokens.device)
    tail.copy_(text.gather(1, last))
    end += count


def continue_text(
    index: SuffixIndex, prefix: Prefix, rows: Rows, own_weight: float, paths: int, budget: int
) -> TokenTree:
    """The tree of the `paths` likeliest continuations of each row's text, its root included.

    own: extra weight, in occurrences, of an occurrence in the row's own text.
    """
    root, end = prefix.root, rows.end[:, None]
    index.text[rows.end], index.owners[rows.end] = root, rows.owner     # its place if committed
    context = torch.cat([rows.tail, root[:, None]], 1)[:, 1:]
    confidence, place = _successors(index, context, rows, own_weight)
    confidence, best = confidence.sort(dim=1, descending=True, stable=True)
    confidence, best = confidence[:, :paths], best[:, :paths]                           # [B, W]
    place = place.gather(1, best)
    ahead = torch.arange(budget, device=root.device)                                    # [K]
    period = torch.where(place >= rows.begin[:, None], end + 1 - place, 0)[..., None]
    ahead = torch.where(period > 0, ahead % period.clamp(min=1), ahead)     # repeat own text
    ahead = (place[..., None] + ahead).clamp(max=len(index.text) - 1)                   # [B, W, K]
    known = (confidence[..., None] > 0) & (index.owners[ahead] == rows.owner[:, None, None])
    drafted = torch.where(known, index.text[ahead], ABSENT)
    texts = torch.cat([root[:, None, None].expand(-1, drafted.shape[1], 1), drafted], -1)
    votes = confidence[..., None] * _lasting(budget, root.device)[best // SLOTS]    # [B, W, 1 + K]
    return TokenTree.from_paths(texts, budget + 1, votes)


def _successors(
    index: SuffixIndex, context: Tensor, rows: Rows, own_weight: float
) -> tuple[Tensor, Tensor]:
    """Probabilities and positions of the successors of `context` [B, L], by size and slot.

    Both [B, O * S], the largest contexts first."""
    unknown = torch.full_like(context[:, :1], ABSENT)
    entry, none = index.hash(context, unknown, rows.owner[:, None])                     # [B, O]
    entry = entry[..., None] + torch.arange(SLOTS, device=entry.device)                 # [B, O, S]
    place = index.positions[entry]
    token = index.text[place]
    same = index.tags[entry] == none[..., None] + (token.int() + 1) * _FOLLOW
    alive = same & (context[:, SIZES[0] - index.sizes, None] != ABSENT) & (token != ABSENT)
    alive &= index.owners[place] == rows.owner[:, None, None]
    begin, end = rows.begin[:, None, None], rows.end[:, None, None]
    mine = (place >= begin) & (place <= end)
    counts = torch.where(alive, index.counts[entry] + own_weight * mine, 0)
    kinds, total = alive.sum(-1), counts.sum(-1)                                        # [B, O]
    seen = (kinds + total).clamp(min=1)
    escape = torch.where(kinds > 0, kinds / seen, 1)
    left = torch.cat([torch.ones_like(escape[:, :1]), escape[:, :-1].cumprod(1)], 1)
    return ((left / seen)[..., None] * counts).flatten(1), place.flatten(1)


@cpu_kernel(learn_text)
def _learn_text(
    library: Kernels, index: SuffixIndex, rows: Rows, tokens: Tensor, count: Tensor
) -> None:
    tail, _, end, owner = rows
    library("learn_text", index.in_c(), tail, end, owner, tokens, count, *tokens.shape)


@cpu_kernel(continue_text)
def _continue_text(
    library: Kernels, index: SuffixIndex, prefix: Prefix, rows: Rows, own_weight: float, paths: int,
    budget: int
) -> TokenTree:
    out = TreeBuffer(len(prefix.position), 1 + budget)
    search = _search(index.in_c(), rows, own_weight, paths)
    library("continue_text", search, texts_of(prefix, budget), budget, out.output)
    return out.tree(budget)


def _search(in_c: Structure, rows: Rows, own_weight: float, paths: int) -> Structure:
    return structure("IndexSearch")(in_c, *rows, own_weight, paths, len(rows.end))


@lru_cache(maxsize=64)
def _lasting(budget: int, device: torch.device) -> Tensor:
    """[O, 1 + K] by context size, the probability that a continuation holds for 0, 1, ... tokens.

    A match of n tokens is followed by the same token n times in n + 3, as measured on stories, code
    and quotations. The first token has a probability of its own.
    """
    sizes = torch.tensor(SIZES, dtype=torch.float32, device=device)[:, None]
    grown = sizes + torch.arange(1, budget, device=device)
    steps = (grown / (grown + 3)).cumprod(1)
    return torch.cat([torch.ones(len(SIZES), 2, dtype=torch.float32, device=device), steps], 1)
