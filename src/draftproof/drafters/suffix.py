"""Suffix decoding: what followed when a text ended like this, this one or an earlier one.

The paper (arXiv 2411.04975) counts in suffix trees on the host. Here the counts lie in a hash index
of fixed size next to the text: for every context of the sizes in `SIZES` the successors seen, how
often, and where last; what follows a successor is read off the text at that place. A round is a
handful of gathers for all rows: memory is bounded, and what is oldest is overwritten.

Chances are those of an escape coder (Bell, Cleary and Witten 1990, method C; `SuffixIndex.
successors`): a context seen c times with u different successors keeps u / (c + u) for what it has
not shown yet, and asks the next shorter context for it.

Shape letters beyond the usual: O context sizes, L the longest, S slots of a context, W paths.
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

SIZES = (16, 12, 8, 6, 4, 3, 2, 1)
"""Context sizes, in tokens; the largest is as many as the C library holds at a time."""
SLOTS = 4
"""Successors kept per context; two that meet in one slot push each other out."""
OWN = 2
"""How many more occurrences one in the row's own text counts for."""
PATHS = 12
"""Continuations that are merged into the tree."""


class SuffixDrafter(Drafter):
    """Proposes the likeliest continuations by counting: in this text, other rows', earlier ones.

    memory: tokens of text to remember, at least twice the rows of a batch; the index takes 160
    bytes per token. Earlier requests change how fast a text is generated, never the text.
    """

    name = "suffix"
    default_budget = 8

    def __init__(self, memory: int = 1 << 16) -> None:
        if memory < 1:
            raise BadInput(f"suffix decoding was given a memory of {memory} tokens; give 1 or more")
        self.memory = memory
        self._indexes = SharedMemory(lambda device: SuffixIndex(memory, device))
        self._places = Places(1, 1)
        self._rows: Rows | None = None

    def start(self, rows: int, capacity: int, ops: Ops) -> None:
        super().start(rows, capacity, ops)
        width = capacity + 3                                # a root and two ends after the text
        count = max(self.memory // width, 2 * rows + 1)
        self._places, self._rows = Places(width, count), None

    def observe(self, commit: Commit) -> None:
        index = self._index(commit.tokens.device)
        if commit.rows[-1] == len(self._places.used):
            self._places.used.append(self._places.next(index))
            self._rows = Rows.joined(self._rows, self._places.used[-1], commit.tokens.device)
        assert self._rows is not None, "a row begins with its prompt"
        tail, _, end = (part[commit.rows[0] : commit.rows[-1] + 1] for part in self._rows)
        self.ops.run(learn_text, index, tail, end, commit.tokens, commit.count)

    def propose(self, frontier: Frontier) -> TokenTree:
        prefix, budget = frontier.prefix, frontier.budget
        assert self._rows is not None, "a row begins with its prompt"
        index = self._index(prefix.tokens.device)
        tree = self.ops.run(continue_text, index, prefix, self._rows, OWN, PATHS, budget)
        return tree if frontier.trees else tree.best_chain()

    def select(self, rows: Sequence[int]) -> None:
        if self._rows is None:
            return
        used, copies = self._places.used, [row in rows[:place] for place, row in enumerate(rows)]
        self._places.used = [used[row] for row in rows]
        for place, copy in enumerate(copies):
            if copy:                                        # it continues elsewhere
                self._places.used[place] = self._places.next(self._index(self._rows.end.device))
        self._rows = self._rows.select(rows, self._places.used, copies)

    def _index(self, device: torch.device) -> SuffixIndex:
        """The memory of this device, with room for the places of this run."""
        index = self._indexes[device]
        index.hold(self._places.width * self._places.count)
        return index


def learn_text(
    index: SuffixIndex, tail: Tensor, end: Tensor, tokens: Tensor, count: Tensor
) -> None:
    """Learn `count` [b] of tokens [b, D] that follow `end` [b]; `tail` [b, L] is before.

    Tail and end move on, in place."""
    index.learn(tail, end, tokens, count)
    last = count[:, None] + torch.arange(tail.shape[1], device=tokens.device)
    tail.copy_(torch.cat([tail, tokens], 1).gather(1, last))
    end += count


def continue_text(
    index: SuffixIndex, prefix: Prefix, rows: Rows, own: float, paths: int, budget: int
) -> TokenTree:
    """The tree of the `paths` likeliest continuations of each row's text, its root included.

    own: how many more occurrences one in the row's own text counts for.
    """
    root, end = prefix.root, rows.end[:, None]
    index.text[rows.end] = root                             # its place if committed
    context = torch.cat([rows.tail, root[:, None]], 1)[:, 1:]
    confidence, place = index.successors(context, rows, own)
    confidence, best = confidence.sort(dim=1, descending=True, stable=True)
    confidence, best = confidence[:, :paths], best[:, :paths]                           # [B, W]
    place = place.gather(1, best)
    ahead = torch.arange(budget, device=root.device)                                    # [K]
    period = torch.where(place >= rows.begin[:, None], end + 1 - place, 0)[..., None]
    ahead = torch.where(period > 0, ahead % period.clamp(min=1), ahead)     # repeat own text
    drafted = index.text[(place[..., None] + ahead).clamp(max=len(index.text) - 1)]
    drafted = torch.where(confidence[..., None] > 0, drafted, ABSENT)                   # [B, W, K]
    texts = torch.cat([root[:, None, None].expand(-1, drafted.shape[1], 1), drafted], -1)
    votes = confidence[..., None] * _lasting(budget, root.device)[best // SLOTS]    # [B, W, 1 + K]
    return TokenTree.from_paths(texts, budget + 1, votes)


class Places:
    """Where on the text running rows write: `count` places of `width`, used in turn."""

    def __init__(self, width: int, count: int) -> None:
        self.width, self.count = width, count
        self.used: list[int] = []                           # per row, where its place begins

    def next(self, index: SuffixIndex) -> int:
        """The next place that no row uses; of twice as many as there are rows, one is free."""
        for _ in range(self.count):
            whole = index.cursor + self.width <= self.width * self.count
            start = index.cursor if whole else 0
            index.cursor = start + self.width
            if all(abs(start - other) >= self.width for other in self.used):
                break
        return start


class Rows(NamedTuple):
    """Of each running row: its last tokens [B, L], where its place begins and its text ends [B]."""

    tail: Tensor
    begin: Tensor
    end: Tensor

    @staticmethod
    def joined(rows: Rows | None, place: int, device: torch.device) -> Rows:
        """With a new row after the others."""
        start = torch.tensor([place], device=device)
        new = Rows(torch.full((1, SIZES[0]), ABSENT, device=device), start, start.clone())
        return new if rows is None else Rows(*map(torch.cat, zip(rows, new, strict=True)))

    def select(self, rows: Sequence[int], places: Sequence[int], copies: Sequence[bool]) -> Rows:
        """These rows, in this order; a copy goes on in the place it was given."""
        columns = torch.tensor([list(rows), list(places), list(copies)], device=self.end.device)
        order, begin, copy = columns.long()
        return Rows(self.tail[order], begin, torch.where(copy > 0, begin, self.end[order]))


_FOLLOW, _SCATTER = -2048144777, -1640531535            # 0x85EBCA77, 0x9E3779B1


class SuffixIndex:
    """Text, and for each context that occurs in it the successors seen.

    An entry is a hash of (context, successor), the successor's last place, and how often it was
    seen. Hashes are of 32 bits that wrap around, which every device has. An entry holds as long as
    the token at that place gives the same hash: text that was overwritten is forgotten with all
    that points to it.
    """

    def __init__(self, memory: int, device: torch.device) -> None:
        self.slots = 1 << max(memory * len(SIZES) // SLOTS - 1, 0).bit_length()
        size = self.slots * SLOTS + 1                       # the last is for what has no place
        self.text, self.cursor = torch.full((1,), ABSENT, device=device), 0
        self.tags = torch.zeros(size, dtype=torch.int32, device=device)
        self.places = torch.zeros(size, dtype=torch.int64, device=device)
        self.counts = torch.zeros(size, device=device)
        self.sizes = torch.tensor(SIZES, device=device)
        dice, shape = torch.Generator().manual_seed(0), (2, len(SIZES), SIZES[0])
        low, high = -(1 << 31), (1 << 31) - 1
        weights = torch.randint(low, high, shape, generator=dice, dtype=torch.int32)
        seen = torch.arange(SIZES[0]) >= SIZES[0] - torch.tensor(SIZES)[:, None]
        self.context = (weights * seen).to(device)          # [2, O, L]: for the slot, for the tag
        self.shift = min(31, 33 - self.slots.bit_length())  # the highest bits are mixed best

    def hold(self, size: int) -> None:
        """Make room for `size` tokens; what is known stays."""
        if len(self.text) <= size:
            with torch.inference_mode(False):
                more = self.text.new_full((size + 2 - len(self.text),), ABSENT)
                self.text = torch.cat([self.text[:-1], more])

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Its tensors, in the order of lookup.c."""
        return self.text, self.places, self.tags, self.counts, self.context, self.sizes

    @property
    def numbers(self) -> tuple[int, ...]:
        """Its sizes and constants, in the order of lookup.c."""
        sizes = len(self.text), len(SIZES), SLOTS, self.slots, self.shift
        return *sizes, _FOLLOW, _SCATTER, ABSENT

    def learn(self, tail: Tensor, end: Tensor, tokens: Tensor, count: Tensor) -> None:
        """As `learn_text`, but tail and end stay."""
        ahead = torch.arange(tokens.shape[1], device=tokens.device)
        there = ahead < count[:, None]                                                  # [b, D]
        place = torch.where(there, end[:, None] + ahead, len(self.text) - 1)
        self.text[place] = tokens
        after = (end + count)[:, None] + torch.arange(2, device=tokens.device)
        self.text[after] = torch.full_like(after, ABSENT)                       # the end, so far
        context = torch.cat([tail, tokens], 1).unfold(1, SIZES[0] + 1, 1)[..., :-1]  # [b, D, L]
        slot, tag = self._hash(context, tokens[..., None])
        known = there[..., None] & (context[..., SIZES[0] - self.sizes] != ABSENT)      # [b, D, O]
        entry = slot * SLOTS + slot_of(tokens)[..., None]
        entry = torch.where(known, entry, len(self.tags) - 1)
        self.counts[entry] = torch.where(self.tags[entry] == tag, self.counts[entry], 0)
        ones = torch.ones_like(entry, dtype=torch.float32)
        self.counts.scatter_add_(0, entry.flatten(), ones.flatten())
        self.tags[entry], self.places[entry] = tag, place[..., None].expand_as(entry)

    def successors(self, context: Tensor, rows: Rows, own: float) -> tuple[Tensor, Tensor]:
        """Of `context` [B, L], by size and slot, the chances and places of successors.

        Both [B, O * S], the largest contexts first."""
        slot, none = self._hash(context, torch.full_like(context[:, :1], ABSENT))       # [B, O]
        entry = slot[..., None] * SLOTS + torch.arange(SLOTS, device=slot.device)       # [B, O, S]
        place = self.places[entry]
        token = self.text[place]
        same = self.tags[entry] == none[..., None] + (token.int() + 1) * _FOLLOW
        alive = same & (context[:, SIZES[0] - self.sizes, None] != ABSENT) & (token != ABSENT)
        begin, end = rows.begin[:, None, None], rows.end[:, None, None]
        mine = (place >= begin) & (place <= end)
        counts = torch.where(alive, self.counts[entry] + own * mine, 0)
        kinds, total = alive.sum(-1), counts.sum(-1)                                    # [B, O]
        whole = (kinds + total).clamp(min=1)
        escape = torch.where(kinds > 0, kinds / whole, 1)
        left = torch.cat([torch.ones_like(escape[:, :1]), escape[:, :-1].cumprod(1)], 1)
        return ((left / whole)[..., None] * counts).flatten(1), place.flatten(1)

    def _hash(self, context: Tensor, successor: Tensor) -> tuple[Tensor, Tensor]:
        """Slot and tag [..., O] of contexts at the end of `context` [..., L], with a successor."""
        terms = (context.int() + 1)[..., None, None, :] * self.context
        key = terms.sum(-1, dtype=torch.int32)                                      # [..., 2, O]
        slot = (key[..., 0, :] >> self.shift) & (self.slots - 1)
        return slot.long(), key[..., 1, :] + (successor.int() + 1) * _FOLLOW


def slot_of(tokens: Tensor) -> Tensor:
    """In which of its context's slots each successor is kept."""
    return ((tokens.int() + 1) * _SCATTER >> 30) & (SLOTS - 1)


@lru_cache(maxsize=64)
def _lasting(budget: int, device: torch.device) -> Tensor:
    """[O, 1 + K] by context size, the chance that a continuation holds for 0, 1, ... tokens.

    A match of n tokens is followed by the same token n times in n + 3: what was found on stories,
    code and quotations. The first token has its own chance.
    """
    grown = torch.tensor(SIZES, device=device)[:, None] + torch.arange(1, budget, device=device)
    steps = (grown / (grown + 3)).cumprod(1)
    return torch.cat([torch.ones(len(SIZES), 2, device=device), steps], 1)
