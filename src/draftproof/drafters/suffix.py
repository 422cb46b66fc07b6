"""Suffix decoding: what followed when a text ended like this, this one or an earlier one (arXiv 2411.04975).

The paper counts in suffix trees on the host. Here the counts lie in a hash index of fixed size beside the text: for every
context of the sizes in `SIZES` the successors seen, how often, and where last; what follows a successor is read off the
text at that place. A round is a handful of gathers for all rows: nothing is read back to the host, memory is bounded, and
what is oldest is overwritten.

Odds are those of an escape coder (Bell, Cleary and Witten 1990, method C): a context seen c times with u different
successors keeps u / (c + u) for what it has not shown yet, and asks the next shorter context for it.
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
from draftproof.drafters.base import Drafter
from draftproof.errors import BadInput

SIZES = (16, 12, 8, 6, 4, 3, 2, 1)
"""Context sizes, in tokens; the largest is as many as our kernels hold at a time."""
WAYS = 4
"""Successors kept per context; two that meet on one way push each other out."""
OWN = 2
"""Occurrences that one in the row's own text counts for, beside the one it is."""
PATHS = 12
"""Continuations that are merged into the tree."""


class SuffixDrafter(Drafter):
    """Proposes the likeliest continuations by counting, from this text, the other rows', and earlier ones of this object.

    memory: tokens of text to remember; a batch sets aside room for twice its rows, if that is more. The index takes 160
    bytes per token. Other requests change how fast a text comes, never the text.
    """

    name = "suffix"
    default_budget = 8
    free = True

    def __init__(self, memory: int = 1 << 16) -> None:
        if memory < 1:
            raise BadInput(f"suffix decoding was given a memory of {memory} tokens; give it at least 1")
        self.memory = memory
        self._index: _Index | None = None
        self._lanes = _Lanes(1, 1)
        self._rows: _Rows | None = None

    def start(self, rows: int, capacity: int, ops: Ops) -> None:
        super().start(rows, capacity, ops)
        width = capacity + 3                                            # a root and two ends behind the text
        self._lanes = _Lanes(width, max(self.memory // width, 2 * rows + 1), self._lanes.cursor)
        self._rows = None

    def observe(self, commit: Commit) -> None:
        index = self._indexed(commit.tokens.device)
        if commit.rows[-1] == len(self._lanes.used):
            self._rows = _Rows.joined(self._rows, self._lanes.take(), commit.tokens.device)
        assert self._rows is not None, "a row begins with its prompt"
        rows = slice(commit.rows[0], commit.rows[-1] + 1)
        self.ops.run(learn_text, index, self._rows.tail[rows], self._rows.end[rows], commit.tokens, commit.count)

    def propose(self, frontier: Frontier) -> TokenTree:
        root, budget = frontier.prefix.root, frontier.budget
        if budget == 0 or self._rows is None:
            return TokenTree.root(root)
        tree = self.ops.run(continue_text, self._indexed(root.device), frontier.prefix, self._rows, OWN, PATHS, budget)
        return tree if frontier.trees else tree.trunk()

    def select(self, rows: Sequence[int]) -> None:
        if self._rows is None:
            return
        copies = [row in rows[:place] for place, row in enumerate(rows)]
        self._lanes.used = [self._lanes.used[row] for row in rows]
        for place, copy in enumerate(copies):
            if copy:                                                    # it goes on in a lane of its own
                self._lanes.used[place] = self._lanes.next()
        self._rows = self._rows.select(rows, self._lanes.used, copies)

    def _indexed(self, device: torch.device) -> _Index:
        """The memory, made or enlarged when it is needed; it stays over requests."""
        if self._index is None or self._index.text.device != device:
            with torch.inference_mode(False):
                self._index = _Index(self.memory, device)
        self._index.hold(self._lanes.size)
        return self._index


def learn_text(index: _Index, tail: Tensor, end: Tensor, tokens: Tensor, count: Tensor) -> None:
    """Learn `count` [b] of tokens [b, D] behind `end` [b]; tail [b, L], the text before, and end move on, in place."""
    index.learn(tail, end, tokens, count)
    last = count[:, None] + torch.arange(tail.shape[1], device=tokens.device)
    tail.copy_(torch.cat([tail, tokens], 1).gather(1, last))
    end += count


def continue_text(index: _Index, prefix: Prefix, rows: _Rows, own: float, paths: int, budget: int) -> TokenTree:
    """The tree of the `paths` likeliest continuations of each row's text, its root included.

    own: occurrences that one in the row's own text counts for, beside the one it is.
    """
    root, end = prefix.root, rows.end[:, None]
    index.text[rows.end] = root                                         # where it will stand if it is committed
    found = index.successors(torch.cat([rows.tail, root[:, None]], 1)[:, 1:], rows, own)
    confidence, best = (part[:, :paths] for part in found.confidence.sort(dim=1, descending=True, stable=True))         # [B, W]
    place, size = found.place.gather(1, best), best // WAYS
    ahead = torch.arange(budget, device=root.device)                    # [K]
    circle = torch.where(place >= rows.begin[:, None], end + 1 - place, 0)[..., None]
    ahead = torch.where(circle > 0, ahead % circle.clamp(min=1), ahead)                 # its own end is its beginning
    drafted = index.text[(place[..., None] + ahead).clamp(max=len(index.text) - 1)]
    drafted = torch.where(confidence[..., None] > 0, drafted, ABSENT)                   # [B, W, K]
    texts = torch.cat([root[:, None, None].expand(-1, drafted.shape[1], 1), drafted], -1)
    votes = confidence[..., None] * _lasting(budget, root.device)[size]                 # [B, W, 1 + K]
    return TokenTree.from_paths(texts, budget + 1, votes)


class _Lanes:
    """Where on the text each running row writes: lanes of equal width, used in turn, so that the oldest text goes first."""

    def __init__(self, width: int, count: int, cursor: int = 0) -> None:
        self.width, self.count, self.cursor = width, count, cursor
        self.used: list[int] = []               # per row, where its lane begins

    @property
    def size(self) -> int:
        return self.width * self.count

    def take(self) -> int:
        """A lane for a new row."""
        self.used.append(self.next())
        return self.used[-1]

    def next(self) -> int:
        """The next lane that no row uses; of twice as many as there are rows, one is free."""
        for _ in range(self.count):
            start = self.cursor if self.cursor + self.width <= self.size else 0
            self.cursor = start + self.width
            if all(abs(start - other) >= self.width for other in self.used):
                break
        return start


class _Rows(NamedTuple):
    """Per running row, on the device: its last committed tokens [B, L], where its lane begins [B] and its text ends [B]."""

    tail: Tensor
    begin: Tensor
    end: Tensor

    @staticmethod
    def joined(rows: _Rows | None, lane: int, device: torch.device) -> _Rows:
        """With a new row behind."""
        start = torch.tensor([lane], device=device)
        new = _Rows(torch.full((1, SIZES[0]), ABSENT, device=device), start, start.clone())
        return new if rows is None else _Rows(*(torch.cat(pair) for pair in zip(rows, new, strict=True)))

    def select(self, rows: Sequence[int], lanes: Sequence[int], copies: Sequence[bool]) -> _Rows:
        """These rows, in this order; a copy goes on in the lane it was given."""
        order, lane, moved = (torch.tensor(list(of), dtype=torch.int64, device=self.end.device) for of in (rows, lanes, copies))
        return _Rows(self.tail[order], lane, torch.where(moved > 0, lane, self.end[order]))


class _Found(NamedTuple):
    """Successors of a row's text: their odds [B, O * WAYS], by context size and way, and where each stands [B, O * WAYS]."""

    confidence: Tensor
    place: Tensor


class _Index:
    """Text, and for each context that occurs in it the successors seen.

    An entry is a hash of (context, successor), the successor's last place, and how often it was seen. Hashes are of 32 bits
    that wrap around, which every device has. An entry holds as long
    as the token at that place gives the same hash: text that was overwritten is forgotten with all that points to it.
    """

    def __init__(self, memory: int, device: torch.device) -> None:
        self.slots = 1 << max(memory * len(SIZES) // WAYS - 1, 0).bit_length()
        self.text = torch.full((1,), ABSENT, device=device)             # the last place is for what has none
        self.tags = torch.zeros(self.slots * WAYS + 1, dtype=torch.int32, device=device)
        self.places = torch.zeros(self.slots * WAYS + 1, dtype=torch.int64, device=device)
        self.counts = torch.zeros(self.slots * WAYS + 1, device=device)
        self.sizes = torch.tensor(SIZES, device=device)
        dice = torch.Generator().manual_seed(0)
        weights = torch.randint(-(1 << 31), (1 << 31) - 1, (2, len(SIZES), SIZES[0]), generator=dice, dtype=torch.int32)
        seen = torch.arange(SIZES[0]) >= SIZES[0] - torch.tensor(SIZES)[:, None]
        self.context = (weights * seen).to(device)                      # [2, O, L]: for the slot, for the tag
        self.shift = min(31, 33 - self.slots.bit_length())              # the highest bits are mixed best

    def hold(self, size: int) -> None:
        """Make room for `size` tokens; what is known stays."""
        if len(self.text) <= size:
            with torch.inference_mode(False):
                self.text = torch.cat([self.text[:-1], self.text.new_full((size + 2 - len(self.text),), ABSENT)])

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The tensors it lies in, in the order of lookup.c."""
        return self.text, self.places, self.tags, self.counts, self.context, self.sizes

    @property
    def numbers(self) -> tuple[int, ...]:
        """Its sizes and constants, in the order of lookup.c."""
        return len(self.text), len(SIZES), WAYS, self.slots, self.shift, _FOLLOW, _SCATTER, ABSENT

    def learn(self, tail: Tensor, end: Tensor, tokens: Tensor, count: Tensor) -> None:
        """Write `count` [b] of tokens [b, D] behind `end` [b], each behind its contexts; `tail` [b, L] is the text before."""
        dump = len(self.text) - 1
        ahead = torch.arange(tokens.shape[1], device=tokens.device)
        there = ahead < count[:, None]                                                      # [b, D]
        place = torch.where(there, end[:, None] + ahead, dump)
        self.text[place] = tokens
        behind = (end + count)[:, None] + torch.arange(2, device=tokens.device)
        self.text[behind] = torch.full_like(behind, ABSENT)                                 # the end, so far
        context = torch.cat([tail, tokens], 1).unfold(1, SIZES[0] + 1, 1)[..., :-1]         # [b, D, L]
        slot, tag = self._hash(context, tokens[..., None])
        known = there[..., None] & (context[..., SIZES[0] - self.sizes] != ABSENT)          # [b, D, O]
        entry = torch.where(known, slot * WAYS + way(tokens)[..., None], len(self.tags) - 1)
        self.counts[entry] = torch.where(self.tags[entry] == tag, self.counts[entry], 0)
        self.counts.scatter_add_(0, entry.flatten(), torch.ones_like(entry, dtype=torch.float32).flatten())
        self.tags[entry], self.places[entry] = tag, place[..., None].expand_as(entry)

    def successors(self, context: Tensor, rows: _Rows, weight: float) -> _Found:
        """What followed the last tokens `context` [B, L], the largest contexts first."""
        slot, none = self._hash(context, torch.full_like(context[:, :1], ABSENT))           # [B, O]
        entry = slot[..., None] * WAYS + torch.arange(WAYS, device=slot.device)             # [B, O, WAYS]
        place = self.places[entry]
        token = self.text[place]
        same = self.tags[entry] == none[..., None] + (token.int() + 1) * _FOLLOW
        alive = same & (context[:, SIZES[0] - self.sizes, None] != ABSENT) & (token != ABSENT)
        own = (place >= rows.begin[:, None, None]) & (place <= rows.end[:, None, None])
        counts = torch.where(alive, self.counts[entry] + weight * own, 0)
        kinds, total = alive.sum(-1), counts.sum(-1)                                        # [B, O]
        room = (kinds + total).clamp(min=1)
        escape = torch.where(kinds > 0, kinds / room, 1)
        left = torch.cat([torch.ones_like(escape[:, :1]), escape[:, :-1].cumprod(1)], 1)
        return _Found(((left / room)[..., None] * counts).flatten(1), place.flatten(1))

    def _hash(self, context: Tensor, successor: Tensor) -> tuple[Tensor, Tensor]:
        """Slot and tag [..., O] of the contexts that end `context` [..., L], before `successor` [..., 1]."""
        key = ((context.int() + 1)[..., None, None, :] * self.context).sum(-1, dtype=torch.int32)       # [..., 2, O]
        slot = (key[..., 0, :] >> self.shift) & (self.slots - 1)
        return slot.long(), key[..., 1, :] + (successor.int() + 1) * _FOLLOW


_FOLLOW, _SCATTER = -2048144777, -1640531535            # 0x85EBCA77, 0x9E3779B1


def way(tokens: Tensor) -> Tensor:
    """On which of its context's ways each successor is kept."""
    return ((tokens.int() + 1) * _SCATTER >> 30) & (WAYS - 1)


@lru_cache(maxsize=64)
def _lasting(budget: int, device: torch.device) -> Tensor:
    """[O, 1 + K] by context size, the odds that a continuation still holds after 0, 1, ... tokens, if the first does.

    A match of n tokens is followed by the same token n times in n + 3: what was found on stories, code and quotations.
    """
    grown = torch.tensor(SIZES, device=device)[:, None] + torch.arange(1, budget, device=device)
    return torch.cat([torch.ones(len(SIZES), 2, device=device), (grown / (grown + 3)).cumprod(1)], 1)
