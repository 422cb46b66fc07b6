"""Drafters around others: for plain rounds, and for texts that have a source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from draftproof.core.messages import Commit, Frontier, Successors
from draftproof.core.ops import Ops
from draftproof.core.prefix import Prefix
from draftproof.core.tree import TokenTree
from draftproof.drafters.base import Drafter
from draftproof.model.target import Target

TOGETHER = 128
"""Plain rounds that come together at most."""
ROOM = 2048
"""Tokens of a source that are looked at."""


class DrafterWrapper(Drafter):
    """Passes everything on to `inner`."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        for name in ("name", "hidden_layers", "reads_every_state", "wants_top", "has_kv_cache",
                     "deepest"):
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

    def drafted_by(self, tree: TokenTree) -> list[list[str]]:
        return self.inner.drafted_by(tree)


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
        alone = commit.tokens.shape[1] == 1 and not self.proposed
        if alone and self.pending:
            first = self.pending[0]
            alike = first.rows == commit.rows and bool(first.successors) == bool(commit.successors)
            if len(self.pending) == TOGETHER or not alike:
                self.flush()
        if alone:
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


class SourceText(DrafterWrapper):
    """A drafter of text alone whose rows begin with what their encoder reads: a summary or a
    correction repeats its source."""

    @classmethod
    def around(cls, inner: Drafter, target: Target) -> Drafter:
        """`inner` itself, if nothing is encoded, or if it looks at more than text."""
        return cls(inner) if target.encodes and not inner.hidden_layers else inner

    def start(self, rows: int, capacity: int, ops: Ops) -> None:
        super().start(rows, capacity + ROOM, ops)
        self.in_front, self.begun = list[list[int]](), 0

    def begin(self, rows: Sequence[int], sources: Sequence[Any]) -> None:
        self.in_front[rows[0] :] = [list(source.tokens[:ROOM]) for source in sources]

    def observe(self, commit: Commit) -> None:
        new = commit.rows[-1] >= self.begun
        self.begun = max(self.begun, commit.rows[-1] + 1)
        if new and (source := self.in_front[commit.rows[-1]]):
            text = torch.tensor([source], device=commit.tokens.device)
            nodes = torch.arange(len(source), device=text.device)[None]
            count = torch.full_like(commit.count, len(source))
            self.inner.observe(Commit(commit.rows, text, nodes, count))
        self.inner.observe(commit)

    def propose(self, frontier: Frontier) -> TokenTree:
        return self.inner.propose(replace(frontier, prefix=self._behind_sources(frontier.prefix)))

    def select(self, rows: Sequence[int]) -> None:
        self.in_front, self.begun = [self.in_front[row] for row in rows], len(rows)
        super().select(rows)

    def _behind_sources(self, prefix: Prefix) -> Prefix:
        device, longest = prefix.tokens.device, max(map(len, self.in_front))
        sizes = torch.tensor([len(source) for source in self.in_front], device=device)
        tokens = torch.nn.functional.pad(prefix.tokens, (longest, 0))
        place = torch.arange(tokens.shape[1], device=device) - sizes[:, None] + longest
        tokens = tokens.gather(1, place.clamp(max=tokens.shape[1] - 1))
        for row, source in enumerate(self.in_front):
            tokens[row, : len(source)] = torch.tensor(source, device=device)
        known = None if prefix.longest is None else prefix.longest + longest
        return Prefix(tokens, prefix.position + sizes, prefix.ahead, known, prefix.roots)
