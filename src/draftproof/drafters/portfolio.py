"""Several drafters as one: what they propose is merged, and each is believed as far as it was right.

Every member proposes in every round, and every proposal is compared with the text that came, whether the target read it
or not: no member has to be tried to be known (full information, arXiv 2510.20064). From these comparisons the odds that
members give are corrected, per row, and the likeliest nodes of all are what the target reads. Knows no member by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from draftproof.core.messages import Commit, Frontier
from draftproof.core.ops import Ops
from draftproof.core.prefix import Prefix
from draftproof.core.tree import ABSENT, NOTHING, TokenTree
from draftproof.drafters.base import Drafter
from draftproof.errors import BadInput, DrafterMismatch

CLASSES, LEVELS = 32, 16
"""Kinds of node each member is judged by: by its odds in `LEVELS` steps if it gives odds, else by its place in the tree."""
FADE, FADE_ALL = 0.98, 0.998
"""What is left of a count after a round: of a row's own counts, and of those of all rows and earlier requests."""
TRUST, TRUST_ALL = 4.0, 4.0
"""How many comparisons the odds of all rows weigh against a row's own, and the member's own word against all rows'."""
UNTOLD = 0.4
"""Odds of a node behind its parent, before anything is known, from a member that gives none."""


class Portfolio(Drafter):
    """Merges the proposals of cheap drafters, and of trained heads, into one tree of the likeliest nodes.

    members: at least one; each is asked in every round, so a member should cost little next to the target. They may
    want hidden states and successors; a draft model, which has_kv_cache its own tree, has to be used alone.
    """

    name = "portfolio"
    default_budget = 10

    def __init__(self, members: Sequence[Drafter]) -> None:
        for member in members:
            if member.has_kv_cache:
                raise DrafterMismatch(f"{member.name} rereads the tree it drafted and cannot share one; use it alone")
        if not members:
            raise BadInput("a portfolio of no drafters was asked for; give it at least one")
        self.members = tuple(members)
        self.hidden_layers = tuple(sorted({tap for member in members for tap in member.hidden_layers}))
        self.wants_top = max(member.wants_top for member in members)
        self.free = all(member.free for member in members)
        deepest = [member.deepest for member in members]
        self.deepest = None if None in deepest else max(depth for depth in deepest if depth is not None)
        self._counts: _Counts | None = None
        self._asked: _Asked | None = None

    def start(self, rows: int, capacity: int, ops: Ops) -> None:
        super().start(rows, capacity, ops)
        for member in self.members:
            member.start(rows, capacity, ops)
        self._asked = None
        if self._counts is not None:
            self._counts = self._counts.select([])

    def observe(self, commit: Commit) -> None:
        for member in self.members:
            member.observe(self._for(member, commit))
        if self._counts is None or self._counts.all.device != commit.tokens.device:
            self._counts = _Counts.none(len(self.members), commit.tokens.device)
        if commit.rows[-1] == len(self._counts.rows):
            self._counts = self._counts.joined()
            self._asked = self._asked.joined() if self._asked is not None else None

    def propose(self, frontier: Frontier) -> TokenTree:
        counts, prefix = self._counts, frontier.prefix
        if frontier.budget == 0 or counts is None:
            return TokenTree.root(prefix.root)
        everyone = counts.all.clone()                               # as it was: a row does not depend on who runs beside it
        if self._asked is not None:
            self.ops.run(judge, counts, self._asked, prefix)
        asked = replace(frontier, budget=frontier.budget + frontier.budget // 2, drawn=False)      # corrected, others may do
        trees = [member.propose(asked) for member in self.members]
        pool, tree = self.ops.run(merge_trees, trees, counts, everyone, frontier.budget + 1)
        self._asked = _Asked(*pool, prefix.position)
        return tree if frontier.trees else tree.trunk()

    def select(self, rows: Sequence[int]) -> None:
        for member in self.members:
            member.select(rows)
        self._counts = self._counts.select(rows) if self._counts is not None else None
        self._asked = self._asked.select(rows) if self._asked is not None and len(rows) > 0 else None

    def _for(self, member: Drafter, commit: Commit) -> Commit:
        """The commit with the hidden states this member taps, in its order."""
        if commit.hidden is None or member.hidden_layers == self.hidden_layers:
            return commit
        if not member.hidden_layers:
            return replace(commit, hidden=None)
        return replace(commit, hidden=torch.stack([commit.hidden[:, :, self.hidden_layers.index(tap)] for tap in member.hidden_layers], 2))


class _Asked(NamedTuple):
    """What all members proposed, side by side; the kind of each node."""

    said: Tensor            # [B, M] the nodes' tokens, for our kernels; for operators [B, M, D], see `TokenTree.texts`
    parents: Tensor         # [B, M]
    kinds: Tensor           # [B, M]
    position: Tensor        # [B] of the roots; beyond all text for rows that were not asked

    def select(self, rows: Sequence[int]) -> _Asked:
        order = torch.tensor(list(rows), dtype=torch.int64, device=self.position.device)
        return _Asked(*(part[order] for part in self))

    def joined(self) -> _Asked:
        """With a row behind that was not asked."""
        more = self.select([*range(len(self.position)), 0])
        beyond = torch.arange(len(more.position), device=more.position.device) == len(self.position)
        return more._replace(position=torch.where(beyond, 1 << 30, more.position))


class _Counts(NamedTuple):
    """Nodes judged: how many of each kind stood, of how many whose parent did."""

    rows: Tensor            # [B, kinds, 2] of each row: stood, judged
    all: Tensor             # [kinds, 2] of all rows, earlier ones too

    @staticmethod
    def none(members: int, device: torch.device) -> _Counts:
        return _Counts(torch.zeros(0, members * CLASSES, 2, device=device), torch.zeros(members * CLASSES, 2, device=device))

    def joined(self) -> _Counts:
        """With a new row behind."""
        return self._replace(rows=torch.cat([self.rows, torch.zeros_like(self.all)[None]]))

    @property
    def numbers(self) -> tuple[float, ...]:
        """Sizes and constants, in the order of lookup.c."""
        return len(self.all), CLASSES, LEVELS, FADE, FADE_ALL, TRUST, TRUST_ALL, UNTOLD

    def select(self, rows: Sequence[int]) -> _Counts:
        order = torch.tensor(list(rows), dtype=torch.int64, device=self.all.device)
        return self._replace(rows=self.rows[order])

    def learn(self, asked: _Asked, prefix: Prefix) -> None:
        """When the text has come to `prefix`: of each node whose parent stood, whether it stood too."""
        texts, parents = asked.said, asked.parents                                                  # [B, M, D]
        ahead = torch.arange(texts.shape[2], device=prefix.position.device)
        place = asked.position[:, None] + ahead                                                     # [B, D]
        known = place <= prefix.position[:, None]
        came = prefix.tokens.gather(1, place.clamp(max=prefix.tokens.shape[1] - 1))
        right = ((texts == came[:, None]) & known[:, None]) | (texts == NOTHING)                    # [B, M, D]
        stands = right.all(-1)
        depth = (texts != NOTHING).sum(-1) - 1                                                      # [B, M]
        there = (parents >= 0) & (texts != ABSENT).all(-1) & known.gather(1, depth)
        judged = there & stands.gather(1, parents.clamp(min=0))
        seen = torch.stack([stands & judged, judged], -1).float()                                   # [B, M, 2]
        kinds = asked.kinds[..., None].expand_as(seen)
        new = torch.zeros_like(self.rows).scatter_add_(1, kinds, seen)
        self.rows.mul_(FADE).add_(new)
        self.all.mul_(FADE_ALL).add_(new.sum(0))

    def corrected(self, given: Tensor, kinds: Tensor, everyone: Tensor) -> Tensor:
        """[B, M] the odds of each node behind its parent: what its row has shown of its kind, before that `everyone`
        [kinds, 2], before that what the member gave."""
        seen = everyone[kinds]                                                                      # [B, M, 2]
        prior = (seen[..., 0] + TRUST_ALL * given) / (seen[..., 1] + TRUST_ALL)
        own = self.rows.gather(1, kinds[..., None].expand_as(seen))
        return (own[..., 0] + TRUST * prior) / (own[..., 1] + TRUST)


class Pool(NamedTuple):
    """Members' trees side by side, [B, M]: what they said, as in `_Asked`, parents (-1 at each root), and kinds of nodes."""

    said: Tensor
    parents: Tensor
    kinds: Tensor


def judge(counts: _Counts, asked: _Asked, prefix: Prefix) -> None:
    """Count, in place, what was right of what members said, by the text that came."""
    counts.learn(asked, prefix)


def merge_trees(trees: Sequence[TokenTree], counts: _Counts, everyone: Tensor, nodes: int) -> tuple[Pool, TokenTree]:
    """Members' trees side by side, and the tree of the likeliest of all nodes, each member believed as far as it was right."""
    pool = TokenTree.beside(trees)
    given = _given(trees, pool)                                                                     # [B, M]
    kinds = _kinds(trees, given)
    steps = torch.where(pool.parents < 0, 1, counts.corrected(given, kinds, everyone))
    confidence = torch.where(pool.ancestors, steps[:, None], 1).prod(-1)
    return Pool(pool.texts.contiguous(), pool.parents, kinds), pool.merged(torch.where(pool.present, confidence, 0), nodes)


def _given(trees: Sequence[TokenTree], pool: TokenTree) -> Tensor:
    """[B, M] the odds that members give each node, its parent standing; 0 where absent."""
    confidence = torch.cat([tree.confidence if tree.confidence is not None else UNTOLD**tree.depths * tree.present for tree in trees], 1)
    return confidence / confidence.gather(1, pool.parents.clamp(min=0)).clamp(min=1e-9)


def _kinds(trees: Sequence[TokenTree], given: Tensor) -> Tensor:
    """[B, M] by what each node is judged."""
    first, told = _first_kinds(tuple((tree.tokens.shape[1], tree.confidence is not None) for tree in trees), given.device)
    return first + told * (given * LEVELS).long().clamp(max=LEVELS - 1)


@lru_cache(maxsize=256)
def _first_kinds(members: tuple[tuple[int, bool], ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """[M] the lowest kind of each node, and whether it has `LEVELS` of them; by nodes per member, and if it gives odds."""
    kinds = [
        index * CLASSES + (0 if told else min(node, CLASSES - 1))
        for index, (nodes, told) in enumerate(members)
        for node in range(nodes)
    ]
    levels = [told for nodes, told in members for _ in range(nodes)]
    return torch.tensor(kinds, device=device), torch.tensor(levels, device=device)
