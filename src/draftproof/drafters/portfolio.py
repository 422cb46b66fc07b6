"""Several drafters as one: their proposals are merged, weighted by how often each was right.

Every member proposes in every round, and every proposal is compared with the committed text,
whether the target read it or not (full information, arXiv 2510.20064). From these comparisons the
chances that members give are corrected, per row (`Counts.corrected`), and the likeliest nodes of
all are what the target reads. Knows no member by name.

Shape letters beyond the usual: M nodes of all members side by side, C kinds of node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftproof.core.messages import Commit, Frontier
from draftproof.core.ops import Ops
from draftproof.core.prefix import Prefix
from draftproof.core.tree import ABSENT, NO_TOKEN, TokenTree
from draftproof.drafters.base import Drafter, SharedMemory
from draftproof.errors import BadInput, DrafterMismatch

CLASSES, LEVELS = 32, 16
"""Kinds of node of a member: by its chance, in `LEVELS` steps, or else by its place in the tree."""
FADE, FADE_ALL = 0.98, 0.998
"""Decay of counts per round: of a row's own, and of those over all rows and requests."""
TRUST, TRUST_ALL = 4.0, 4.0
"""Weight, in comparisons, of the rate over all rows as prior of a row's own, and of a member's
confidence as prior of the rate over all rows."""
UNKNOWN = 0.4
"""The chance of a node after its parent, at first, from a member that gives none."""


class Portfolio(Drafter):
    """Merges the proposals of cheap drafters, and of heads, into one tree of the likeliest nodes.

    members: at least one; each is asked in every round, so a member should cost little next to the
    target. They may want hidden states and successors; a draft model, which keeps a KV cache of
    its own tree, has to be used alone.
    """

    name = "portfolio"
    default_budget = 10

    def __init__(self, members: Sequence[Drafter]) -> None:
        for member in members:
            if member.has_kv_cache:
                raise DrafterMismatch(
                    f"{member.name} keeps a KV cache of its own tree; use it alone"
                )
        if not members:
            raise BadInput("a portfolio of no drafters was asked for; give it at least one")
        self.members = tuple(members)
        layers = {layer for member in members for layer in member.hidden_layers}
        self.hidden_layers = tuple(sorted(layers))
        self.reads_every_state = any(member.reads_every_state for member in members)
        self.wants_top = max(member.wants_top for member in members)
        deepest = [member.deepest for member in members if member.deepest is not None]
        self.deepest = max(deepest) if len(deepest) == len(members) else None
        kinds = len(members) * CLASSES
        self._all = SharedMemory(lambda device: torch.zeros(kinds, 2, device=device))
        self._counts: Counts | None = None
        self._proposed: Proposed | None = None

    def start(self, rows: int, capacity: int, ops: Ops) -> None:
        super().start(rows, capacity, ops)
        self.members = tuple(member.for_run(rows, capacity, ops) for member in self.members)
        self._counts = self._proposed = None

    def observe(self, commit: Commit) -> None:
        for member in self.members:
            member.observe(self._for(member, commit))
        if self._counts is None:
            everyone = self._all[commit.tokens.device]
            self._counts = Counts(everyone[None][:0], everyone)
        if commit.rows[-1] == len(self._counts.rows):
            self._counts = self._counts.joined()
            self._proposed = self._proposed.joined() if self._proposed is not None else None

    def propose(self, frontier: Frontier) -> TokenTree:
        counts, prefix, budget = self._counts, frontier.prefix, frontier.budget
        assert counts is not None, "a row begins with its prompt"
        everyone = counts.all.clone()           # before: a row does not depend on its neighbours
        if self._proposed is not None:
            self.ops.run(judge, counts, self._proposed, prefix)
        asked = replace(frontier, budget=budget + budget // 2, drawn=False)     # some are dropped
        trees = [member.propose(asked) for member in self.members]
        pool, tree = self.ops.run(merge_trees, trees, counts, everyone, budget + 1)
        self._proposed = Proposed(*pool, prefix.position)
        return tree if frontier.trees else tree.best_chain()

    def select(self, rows: Sequence[int]) -> None:
        for member in self.members:
            member.select(rows)
        self._counts = self._counts.select(rows) if self._counts is not None else None
        last = self._proposed
        self._proposed = last.select(rows) if last is not None and rows else None

    def drafted_by(self, tree: TokenTree) -> list[list[str]]:
        """Of each node, the first member that proposed it."""
        if self._proposed is None:
            return super().drafted_by(tree)
        names, found = [member.name for member in self.members], []
        texts, parents, kinds = (part.tolist() for part in self._proposed[:3])
        rows = zip(texts, parents, kinds, tree.tokens.tolist(), tree.parents.tolist(), strict=True)
        for nodes, above, kind, tokens, own in rows:
            by: dict[tuple[int, ...], str] = {}
            for path, one in zip(_paths(nodes, above), kind, strict=True):
                by.setdefault(path, names[one // CLASSES])
            found.append([by.get(path, self.name) for path in _paths(tokens, own)])
        return found

    def _for(self, member: Drafter, commit: Commit) -> Commit:
        """The commit with the hidden layers this member wants, in its order."""
        layers, hidden = member.hidden_layers, commit.hidden
        if hidden is None or layers == self.hidden_layers:
            return commit
        wanted = [hidden[:, :, self.hidden_layers.index(layer)] for layer in layers]
        return replace(commit, hidden=torch.stack(wanted, 2) if wanted else None)


class Proposed(NamedTuple):
    """What all members proposed, side by side, and the kind of each node.

    texts: [B, M] tokens as the C library keeps them, or [B, M, D], see `TokenTree.texts`. position:
    [B] of the roots; beyond all text for rows without a proposal.
    """

    texts: Tensor
    parents: Tensor         # [B, M], -1 at each root
    kinds: Tensor           # [B, M]
    position: Tensor

    def select(self, rows: Sequence[int]) -> Proposed:
        order = torch.tensor(list(rows), dtype=torch.int64, device=self.position.device)
        return Proposed(*(part[order] for part in self))

    def joined(self) -> Proposed:
        """With a new row without a proposal."""
        more = self.select([*range(len(self.position)), 0])
        beyond = torch.arange(len(more.position), device=more.position.device) == len(self.position)
        return more._replace(position=torch.where(beyond, 1 << 30, more.position))


class Counts(NamedTuple):
    """Nodes whose parents were right: how many of each kind were right, of how many."""

    rows: Tensor            # [B, C, 2] of each row: right, compared
    all: Tensor             # [C, 2] of all rows, earlier ones too

    @property
    def numbers(self) -> tuple[float, ...]:
        """Sizes and constants, in the order of ensemble.c."""
        return len(self.all), CLASSES, LEVELS, FADE, FADE_ALL, TRUST, TRUST_ALL, UNKNOWN

    def joined(self) -> Counts:
        """With a new row after the others."""
        return self._replace(rows=torch.cat([self.rows, torch.zeros_like(self.all)[None]]))

    def select(self, rows: Sequence[int]) -> Counts:
        order = torch.tensor(list(rows), dtype=torch.int64, device=self.all.device)
        return self._replace(rows=self.rows[order])

    def corrected(self, given: Tensor, kinds: Tensor, everyone: Tensor) -> Tensor:
        """[B, M] the chance of each node after its parent: its row's rate for its kind, with the
        rate of `everyone` [C, 2] as prior, and with the member's confidence as prior to that."""
        right, count = everyone[kinds].unbind(-1)                                       # [B, M]
        prior = (right + TRUST_ALL * given) / (count + TRUST_ALL)
        right, count = self.rows.gather(1, kinds[..., None].expand(-1, -1, 2)).unbind(-1)
        return (right + TRUST * prior) / (count + TRUST)


def judge(counts: Counts, proposed: Proposed, prefix: Prefix) -> None:
    """Count, in place, which nodes of the last proposals the committed text confirms."""
    texts, parents, position = proposed.texts, proposed.parents, prefix.position
    place = proposed.position[:, None] + torch.arange(texts.shape[2], device=position.device)
    known = place <= position[:, None]                                                  # [B, D]
    committed = prefix.tokens.gather(1, place.clamp(max=prefix.tokens.shape[1] - 1))
    matches = ((texts == committed[:, None]) & known[:, None]) | (texts == NO_TOKEN)
    right, depth = matches.all(-1), (texts != NO_TOKEN).sum(-1) - 1                      # [B, M]
    there = (parents >= 0) & (texts != ABSENT).all(-1) & known.gather(1, depth)
    compared = there & right.gather(1, parents.clamp(min=0))
    seen = torch.stack([right & compared, compared], -1).float()                        # [B, M, 2]
    kinds = proposed.kinds[..., None].expand_as(seen)
    new = torch.zeros_like(counts.rows).scatter_add_(1, kinds, seen)
    counts.rows.mul_(FADE).add_(new)
    counts.all.mul_(FADE_ALL).add_(new.sum(0))


def merge_trees(
    trees: Sequence[TokenTree], counts: Counts, everyone: Tensor, nodes: int
) -> tuple[tuple[Tensor, Tensor, Tensor], TokenTree]:
    """Texts, parents and kinds of all members' nodes, and the tree of the likeliest of them."""
    pool = TokenTree.concat(trees)
    paths = torch.cat([_path_chances(tree) for tree in trees], 1)
    given = paths / paths.gather(1, pool.parents.clamp(min=0)).clamp(min=1e-9)          # [B, M]
    sizes = tuple((one.tokens.shape[1], one.confidence is not None) for one in trees)
    first, by_chance = _first_kinds(sizes, given.device)
    kinds = first + by_chance * (given * LEVELS).long().clamp(max=LEVELS - 1)
    steps = torch.where(pool.parents < 0, 1, counts.corrected(given, kinds, everyone))
    confidence = torch.where(pool.ancestors, steps[:, None], 1).prod(-1)
    confidence = torch.where(pool.present, confidence, 0)
    return (pool.texts.contiguous(), pool.parents, kinds), pool.merged(confidence, nodes)


def _paths(nodes: Sequence[Any], parents: Sequence[int]) -> list[tuple[int, ...]]:
    """The tokens from below the root to each node of a row; of nodes as tokens, or as texts."""
    paths = list[tuple[int, ...]]()
    for node, parent in zip(nodes, parents, strict=True):
        token = node if isinstance(node, int) else [one for one in node if one != NO_TOKEN][-1]
        paths.append((*paths[parent], token) if parent >= 0 else ())
    return paths


def _path_chances(tree: TokenTree) -> Tensor:
    return UNKNOWN**tree.depths * tree.present if tree.confidence is None else tree.confidence


@lru_cache(maxsize=256)
def _first_kinds(
    members: tuple[tuple[int, bool], ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    """[M] the lowest kind of each node, and if its chance adds to it; of (nodes, has chances)."""
    kinds = [
        index * CLASSES + (0 if chances else min(node, CLASSES - 1))
        for index, (nodes, chances) in enumerate(members) for node in range(nodes)
    ]  # fmt: skip
    by_chance = [chances for nodes, chances in members for _ in range(nodes)]
    return torch.tensor(kinds, device=device), torch.tensor(by_chance, device=device)
