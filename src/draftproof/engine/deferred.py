"""Drafters around others: `Deferred` hears of plain rounds together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from draftproof.core.messages import Commit, Frontier, Successors
from draftproof.core.ops import Ops
from draftproof.core.tree import TokenTree
from draftproof.drafters.base import Drafter

TOGETHER = 128
"""Plain rounds that come together at most."""


class DrafterWrapper(Drafter):
    """Passes everything on to `inner`."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        for name in (
            "name", "hidden_layers", "reads_every_state", "wants_top", "has_kv_cache", "deepest"
        ):
            setattr(self, name, getattr(inner, name))
        self.default_budget = inner.default_budget

    def unread(self, pending: int = 0) -> int:
        return self.inner.unread(pending)

    def start(self, rows: int, capacity: int, ops: Ops) -> None:
        self.inner = self.inner.for_run(rows, capacity, ops)

    def begin(self, rows: Sequence[int], sources: Sequence[Any]) -> None:
        self.inner.begin(rows, sources)

    def observe(self, commit: Commit) -> None:
        self.inner.observe(commit)

    def propose(self, frontier: Frontier) -> TokenTree:
        return self.inner.propose(frontier)

    def select(self, rows: Sequence[int]) -> None:
        self.inner.select(rows)

    def sources(self, tree: TokenTree) -> list[list[str]]:
        return self.inner.sources(tree)


class Deferred(DrafterWrapper):
    """Tells a drafter of plain rounds together when it is asked again: many short calls cost more
    than a long one. What answers a proposal comes at once, if `inner` keeps what it read of it."""

    pending: list[Commit]
    proposed: bool

    def start(self, rows: int, capacity: int, ops: Ops) -> None:
        super().start(rows, capacity, ops)
        self.pending, self.proposed = [], False

    @classmethod
    def around(cls, inner: Drafter) -> Drafter:
        """`inner` itself, if it observes nothing."""
        return inner if type(inner).observe is Drafter.observe else cls(inner)

    def unread(self, pending: int = 0) -> int:
        return self.inner.unread(pending + len(self.pending))

    def observe(self, commit: Commit) -> None:
        if self.pending and (len(self.pending) == TOGETHER or self.pending[0].rows != commit.rows):
            self.flush()
        if commit.tokens.shape[1] == 1 and not self.proposed:
            self.pending.append(commit)
            return
        self.flush()
        self.proposed = False
        self.inner.observe(commit)

    def propose(self, frontier: Frontier) -> TokenTree:
        self.flush()
        self.proposed = self.has_kv_cache
        return self.inner.propose(frontier)

    def select(self, rows: Sequence[int]) -> None:
        self.flush()
        self.inner.select(rows)

    def flush(self) -> None:
        """Nothing is kept from the drafter any more."""
        if self.pending:
            self.inner.observe(_joined(self.pending))
            self.pending = []


def _joined(commits: Sequence[Commit]) -> Commit:
    """Commits of single tokens of the same rows as one; nodes as of a chain."""
    first, top = commits[0], None
    if len(commits) == 1:
        return first
    tokens = torch.cat([one.tokens for one in commits], 1)
    nodes = torch.arange(len(commits), device=tokens.device).expand_as(tokens)
    hidden = [one.hidden for one in commits if one.hidden is not None]
    found = [one.successors for one in commits if one.successors is not None]
    if found:
        best, logits = ([one.tokens for one in found], [one.logits for one in found])
        top = Successors(TokenTree.chain(tokens), torch.cat(best, 1), torch.cat(logits, 1))
    count = torch.full_like(first.count, len(commits))
    return Commit(first.rows, tokens, nodes, count, torch.cat(hidden, 1) if hidden else None, top)
