"""Token Recycling: what the target found likely behind these tokens before (arXiv 2408.08696). No training, no model.

Every read tells what would follow each node of the tree, rejected ones too. The paper keeps the best successors of each
token in a matrix and fills a fixed tree from it. Ours keeps them for each pair of tokens as well, which says more when it
is known, and with their odds, so that the tree is drawn anew each round. Gathers only; nothing is read back to the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftproof.core.messages import Commit, Frontier, Successors
from draftproof.core.ops import Ops
from draftproof.core.prefix import Prefix
from draftproof.core.tree import ABSENT, TokenTree
from draftproof.drafters.base import Drafter
from draftproof.errors import BadInput

BEST = 8
"""Successors kept per context."""
WIDTH, FAN, DEPTH = 2, 3, 4
"""The nodes of a level that are followed further, how many successors of each, and how far."""
TOLD = 0.5
"""Odds of a successor that was read in a prompt, where the target did not say."""


class TokenRecycling(Drafter):
    """Proposes what the target found likely behind the same two tokens, or the same one, in any row or earlier request.

    memory: pairs, and as many single tokens, to remember: 104 bytes each. The newest pushes out what it meets.
    """

    name = "recycling"
    default_budget = 8
    free = True
    wants_top = BEST
    deepest = DEPTH

    def __init__(self, memory: int = 1 << 16) -> None:
        if memory < 1:
            raise BadInput(f"token recycling was given a memory of {memory} pairs; give it at least 1")
        self.slots = 1 << (memory - 1).bit_length()
        self._table: _Table | None = None
        self._tail: Tensor | None = None                        # [rows, 2] each row's last committed tokens

    def start(self, rows: int, capacity: int, ops: Ops) -> None:
        super().start(rows, capacity, ops)
        self._tail = None

    def observe(self, commit: Commit) -> None:
        table = self._on(commit.tokens.device)
        known = 0 if self._tail is None else len(self._tail)
        if commit.rows[-1] == known:
            new = torch.full((1, 2), ABSENT, device=commit.tokens.device)
            self._tail = new if self._tail is None else torch.cat([self._tail, new])
        assert self._tail is not None, "a row begins with its prompt"
        rows = slice(commit.rows[0], commit.rows[-1] + 1)
        text = torch.cat([self._tail[rows], commit.tokens], 1)                          # [b, 2 + D]
        if commit.successors is not None:
            self.ops.run(recycle, table, self._tail[rows], commit.successors)
        else:
            there = torch.arange(commit.tokens.shape[1], device=text.device) < commit.count[:, None]
            self.ops.run(learn_pairs, table, text[:, :-2], torch.where(there, text[:, 1:-1], ABSENT), commit.tokens, TOLD)
        last = commit.count[:, None] + torch.arange(2, device=text.device)
        self._tail = torch.cat([self._tail[: rows.start], text.gather(1, last), self._tail[rows.stop :]])

    def propose(self, frontier: Frontier) -> TokenTree:
        root, budget = frontier.prefix.root[:, None], frontier.budget
        if budget == 0 or self._tail is None:
            return TokenTree.chain(root)
        sizes = (WIDTH, FAN, min(DEPTH, budget))
        tree = self.ops.run(likely_successors, self._on(root.device), frontier.prefix, self._tail, sizes, budget + 1)
        return tree if frontier.trees else tree.trunk()

    def select(self, rows: Sequence[int]) -> None:
        if self._tail is not None:
            self._tail = self._tail[list(rows)]

    def _on(self, device: torch.device) -> _Table:
        """The memory, made when it is first needed; it stays over requests."""
        if self._table is None or self._table.tags.device != device:
            with torch.inference_mode(False):
                self._table = _Table(self.slots, device)
        return self._table


def recycle(table: _Table, tail: Tensor, seen: Successors) -> None:
    """Learn what came out behind each node of trees; `tail` [b, 2] are the tokens before the roots."""
    tokens, parents = seen.tree.tokens, seen.tree.parents
    before = torch.where(parents < 0, tail[:, 1:], tokens.gather(1, parents.clamp(min=0)))
    table.learn(before, tokens, seen.tokens, seen.logits.float().softmax(-1).nan_to_num(0.0))


def learn_pairs(table: _Table, before: Tensor, tokens: Tensor, successors: Tensor, odds: float) -> None:
    """Learn that `successors` were read behind `tokens`, and these behind `before`, all [b, D], in a prompt, at these odds."""
    table.told(before, tokens, successors, odds)


def likely_successors(table: _Table, prefix: Prefix, tail: Tensor, sizes: tuple[int, int, int], nodes: int) -> TokenTree:
    """The tree of what is known to follow each root, and what follows that; `tail` [B, 2] are the tokens before the roots.

    sizes: the nodes of a level that are followed, how many successors of each but the root are drafted, and how deep.
    """
    width, few, depth = sizes
    root, rows = prefix.root[:, None], len(tail)
    before, tokens, confidence = tail[:, 1:], root, torch.ones(root.shape, device=root.device)
    pool = [(tokens, torch.zeros_like(root), confidence)]
    start = 0
    for _ in range(depth):
        best = confidence.topk(min(width, confidence.shape[1]), 1)                              # [B, w] the nodes to follow
        above = tokens.gather(1, best.indices)
        fan = BEST if start == 0 else few
        next_tokens, next_odds = table.likely(before.gather(1, best.indices), above, fan)       # [B, w, fan]
        parents = (best.indices + start)[..., None].expand_as(next_tokens).reshape(rows, -1)
        start += tokens.shape[1]
        before = above[..., None].expand_as(next_tokens).reshape(rows, -1)
        tokens, confidence = next_tokens.flatten(1), (best.values[..., None] * next_odds).flatten(1)
        pool.append((tokens, parents, confidence))
    tokens, parents, confidence = (torch.cat(part, 1) for part in zip(*pool, strict=True))
    return TokenTree.likeliest(tokens, parents, confidence, nodes, depth)


_TOKEN, _BEFORE = -1640531535, -2048144777              # 0x9E3779B1, 0x85EBCA77


class _Table:
    """Of a pair of tokens, and of a token alone, the best successors and their odds: hashed, the newest stays."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self.slots = slots
        self.shift = min(31, 33 - slots.bit_length())                                       # the highest bits are mixed best
        self.tags = torch.zeros(2 * slots + 1, dtype=torch.int32, device=device)            # the last place is for nothing
        self.tokens = torch.full((2 * slots + 1, BEST), ABSENT, dtype=torch.int32, device=device)
        self.confidence = torch.zeros(2 * slots + 1, BEST, device=device)
        self.halves = torch.tensor([0, slots], device=device)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The tensors it lies in, in the order of lookup.c."""
        return self.tags, self.tokens, self.confidence

    @property
    def numbers(self) -> tuple[int, ...]:
        """Its sizes and constants, in the order of lookup.c."""
        return BEST, self.slots, self.shift, _TOKEN, _BEFORE, ABSENT

    def likely(self, before: Tensor, token: Tensor, fan: int) -> tuple[Tensor, Tensor]:
        """[..., fan] the best successors of `token` behind `before`, and their odds; ABSENT and 0 where none is known."""
        best = self._known(*self._place(before, token))[0]
        return self.tokens[best, :fan].long(), self.confidence[best, :fan]

    def learn(self, before: Tensor, token: Tensor, best: Tensor, confidence: Tensor) -> None:
        """`best` [..., b, N, k] follow `token` behind `before`, both [b, N], the pair and the token alone (or each its own);
        ABSENT teaches nothing. Of two for one place the later counts."""
        place, tag = self._place(before, token)
        useless = torch.stack([(before == ABSENT) | (token == ABSENT), token == ABSENT])      # [2, b, N]
        goal = torch.where(useless, -1, place).flatten(1)                                   # [2, b * N]
        later = torch.ones(goal.shape[1], goal.shape[1], dtype=torch.bool, device=goal.device).triu(1)
        useless |= ((goal[:, :, None] == goal[:, None]) & later).any(-1).view_as(tag)
        place = torch.where(useless, 2 * self.slots, place)
        self.tags[place] = torch.where(useless, 0, tag)
        kept = best.shape[-1]
        self.tokens[place, :kept] = torch.where(useless[..., None], ABSENT, best).int()
        self.confidence[place, :kept] = torch.where(useless[..., None], 0, confidence)

    def told(self, before: Tensor, token: Tensor, successor: Tensor, odds: float) -> None:
        """`successor` [b, N] was read behind `token`: it goes to the front, what was known before moves back."""
        best = self._known(*self._place(before, token))
        tokens, confidence = self.tokens[best].long(), self.confidence[best]                            # [2, b, N, k]
        first = successor[..., None].expand_as(tokens[..., :1])
        rest = ((1 - odds) * torch.where(tokens == first, 0, confidence)).sort(-1, descending=True)
        tokens = torch.cat([first, tokens.gather(-1, rest.indices)[..., :-1]], -1)
        self.learn(before, token, tokens, torch.cat([torch.full_like(confidence[..., :1], odds), rest.values[..., :-1]], -1))

    def _known(self, place: Tensor, tag: Tensor) -> Tensor:
        """[2, ...] the place of what is known of a pair, or else of its token; and of the token; the last if nothing is."""
        known = self.tags[place] == tag
        token = torch.where(known[1], place[1], 2 * self.slots)
        return torch.stack([torch.where(known[0], place[0], token), token])

    def _place(self, before: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        """[2, ...] where pair and token belong, and their tags, which are never 0; in 32 bits that wrap around."""
        alone = (token.int() + 2) * _TOKEN
        tag = torch.stack([alone + (before.int() + 2) * _BEFORE, alone])
        place = ((tag >> self.shift) & (self.slots - 1)).long()
        return place + self.halves.view(2, *[1] * token.dim()), tag | 1
