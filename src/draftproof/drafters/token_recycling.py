"""Token Recycling: what the target found likely after these tokens before (arXiv 2408.08696).

Every read tells what would follow each node of the tree, rejected ones too. The paper keeps the
best successors of each token in a matrix and fills a fixed tree from it. Ours keeps them for each
pair of tokens as well, which says more when it is known, and with their chances, so that the tree
is made anew each round. Gathers only; nothing is read back to the host.

Shape letters beyond the usual: k successors, w nodes of a level that are followed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftproof.core.messages import Commit, Frontier, Successors
from draftproof.core.ops import Ops
from draftproof.core.prefix import Prefix
from draftproof.core.tree import ABSENT, TokenTree
from draftproof.drafters.base import Drafter, SharedMemory
from draftproof.errors import BadInput

BEST = 8
"""Successors kept per context."""
WIDTH, FAN, DEPTH = 2, 3, 4
"""The nodes of a level that are followed further, how many successors of each, and how far."""
READ = 0.5
"""The chance given to a successor that was read in a prompt, where the target did not say."""


class TokenRecycling(Drafter):
    """Proposes what the target found likely after the same two tokens, or else the same one.

    memory: pairs, and as many single tokens, to remember over rows and requests: 104 bytes each.
    The newest pushes out what it meets.
    """

    name = "recycling"
    default_budget = 8
    wants_top = BEST
    deepest = DEPTH

    def __init__(self, memory: int = 1 << 16) -> None:
        if memory < 1:
            raise BadInput(f"token recycling was given a memory of {memory} pairs; give at least 1")
        slots = 1 << (memory - 1).bit_length()
        self._tables = SharedMemory(lambda device: SuccessorTable(slots, device))
        self._tail: Tensor | None = None                # [rows, 2] each row's last committed tokens

    def start(self, rows: int, capacity: int, ops: Ops) -> None:
        super().start(rows, capacity, ops)
        self._tail = None

    def observe(self, commit: Commit) -> None:
        table, tokens = self._tables[commit.tokens.device], commit.tokens
        if commit.rows[-1] == (0 if self._tail is None else len(self._tail)):
            new = torch.full((1, 2), ABSENT, device=tokens.device)
            self._tail = new if self._tail is None else torch.cat([self._tail, new])
        assert self._tail is not None, "a row begins with its prompt"
        tail = self._tail[commit.rows[0] : commit.rows[-1] + 1]
        text = torch.cat([tail, tokens], 1)                                             # [b, 2 + D]
        if commit.successors is not None:
            self.ops.run(recycle, table, tail, commit.successors)
        else:
            there = torch.arange(tokens.shape[1], device=text.device) < commit.count[:, None]
            first = torch.where(there, text[:, 1:-1], ABSENT)
            self.ops.run(learn_pairs, table, text[:, :-2], first, tokens, READ)
        last = commit.count[:, None] + torch.arange(2, device=text.device)
        tail.copy_(text.gather(1, last))

    def propose(self, frontier: Frontier) -> TokenTree:
        prefix, budget = frontier.prefix, frontier.budget
        assert self._tail is not None, "a row begins with its prompt"
        table, sizes = self._tables[prefix.tokens.device], (WIDTH, FAN, min(DEPTH, budget))
        tree = self.ops.run(likely_successors, table, prefix, self._tail, sizes, budget + 1)
        return tree if frontier.trees else tree.best_chain()

    def select(self, rows: Sequence[int]) -> None:
        if self._tail is not None:
            self._tail = self._tail[list(rows)]


def recycle(table: SuccessorTable, tail: Tensor, seen: Successors) -> None:
    """Learn the successors of each node of trees; `tail` [b, 2]: the tokens before the roots."""
    tokens, parents = seen.tree.tokens, seen.tree.parents
    before = torch.where(parents < 0, tail[:, 1:], tokens.gather(1, parents.clamp(min=0)))
    table.learn(before, tokens, seen.tokens, seen.logits.float().softmax(-1).nan_to_num(0.0))


def learn_pairs(
    table: SuccessorTable, before: Tensor, tokens: Tensor, successors: Tensor, chance: float
) -> None:
    """Learn from a prompt that `successors` follow `tokens`, and these `before`, all [b, D].

    The successor comes first, with this chance; what was known moves back."""
    best = table.find(*table.place(before, tokens))
    known, confidence = table.tokens[best].long(), table.confidence[best]           # [2, b, D, k]
    first = successors[..., None].expand_as(known[..., :1])
    rest = (1 - chance) * torch.where(known == first, 0, confidence)
    rest, order = rest.sort(-1, descending=True)
    known = torch.cat([first, known.gather(-1, order)[..., :-1]], -1)
    rest = torch.cat([torch.full_like(rest[..., :1], chance), rest[..., :-1]], -1)
    table.learn(before, tokens, known, rest)


def likely_successors(
    table: SuccessorTable, prefix: Prefix, tail: Tensor, sizes: tuple[int, int, int], nodes: int
) -> TokenTree:
    """The tree of the likeliest `nodes` known to follow each root; `tail` [B, 2]: tokens before it.

    sizes: the nodes of a level that are followed, by how many successors (the root by all), and
    how deep.
    """
    width, few, depth = sizes
    rows, tokens = len(tail), prefix.root[:, None]
    before, confidence = tail[:, 1:], torch.ones(tokens.shape, device=tokens.device)
    pool, start = [(tokens, torch.zeros_like(tokens), confidence)], 0
    for level in range(depth):
        best = confidence.topk(min(width, confidence.shape[1]), 1)                      # [B, w]
        above = tokens.gather(1, best.indices)
        found = table.find(*table.place(before.gather(1, best.indices), above))[0]      # [B, w]
        fan = few if level else BEST
        steps = best.values[..., None] * table.confidence[found, :fan]                 # [B, w, fan]
        parents = (best.indices + start)[..., None].expand_as(steps).reshape(rows, -1)
        start += tokens.shape[1]
        before = above[..., None].expand_as(steps).reshape(rows, -1)
        tokens, confidence = table.tokens[found, :fan].long().flatten(1), steps.flatten(1)
        pool.append((tokens, parents, confidence))
    tokens, parents, confidence = (torch.cat(part, 1) for part in zip(*pool, strict=True))
    return TokenTree.likeliest(tokens, parents, confidence, nodes, depth)


_TOKEN, _BEFORE = -1640531535, -2048144777              # 0x9E3779B1, 0x85EBCA77


class SuccessorTable:
    """The best successors of a pair of tokens, and of a token alone, with their chances: hashed.

    The first half of the slots is for pairs; the last place is for what is not there.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        self.slots = slots
        self.shift = min(31, 33 - slots.bit_length())               # high bits are mixed best
        self.tags = torch.zeros(2 * slots + 1, dtype=torch.int32, device=device)
        shape = (2 * slots + 1, BEST)
        self.tokens = torch.full(shape, ABSENT, dtype=torch.int32, device=device)
        self.confidence = torch.zeros(shape, device=device)
        self.halves = torch.tensor([0, slots], device=device)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Its tensors, in the order of ensemble.c."""
        return self.tags, self.tokens, self.confidence

    @property
    def numbers(self) -> tuple[int, ...]:
        """Its sizes and constants, in the order of ensemble.c."""
        return BEST, self.slots, self.shift, _TOKEN, _BEFORE, ABSENT

    def learn(self, before: Tensor, token: Tensor, best: Tensor, confidence: Tensor) -> None:
        """`best` [..., b, N, k] follow `token` after `before`, both [b, N], the pair and the token
        alone (or each its own); ABSENT teaches nothing. Of two in one place the later counts."""
        place, tag = self.place(before, token)
        useless = torch.stack([(before == ABSENT) | (token == ABSENT), token == ABSENT])
        goal = torch.where(useless, -1, place).flatten(1)                               # [2, b * N]
        later = torch.ones(goal.shape[1:] * 2, dtype=torch.bool, device=goal.device).triu(1)
        useless |= ((goal[:, :, None] == goal[:, None]) & later).any(-1).view_as(tag)
        place = torch.where(useless, 2 * self.slots, place)
        self.tags[place] = torch.where(useless, 0, tag)
        kept = best.shape[-1]
        self.tokens[place, :kept] = torch.where(useless[..., None], ABSENT, best).int()
        self.confidence[place, :kept] = torch.where(useless[..., None], 0, confidence)

    def find(self, place: Tensor, tag: Tensor) -> Tensor:
        """[2, ...] the place of what is known of a pair, or else of its token; and of the token."""
        known = self.tags[place] == tag
        token = torch.where(known[1], place[1], 2 * self.slots)
        return torch.stack([torch.where(known[0], place[0], token), token])

    def place(self, before: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        """[2, ...] where pair and token belong, and their tags, never 0; in 32 bits that wrap."""
        alone = (token.int() + 2) * _TOKEN
        tag = torch.stack([alone + (before.int() + 2) * _BEFORE, alone])
        place = ((tag >> self.shift) & (self.slots - 1)).long()
        return place + self.halves.view(2, *[1] * token.dim()), tag | 1
