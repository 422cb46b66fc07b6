"""Drafters that look at text alone see, in front of each row's, what its encoder reads: a summary
or a correction repeats its source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from draftproof.core.messages import Commit, Frontier
from draftproof.core.ops import Ops
from draftproof.core.prefix import Prefix
from draftproof.core.tree import TokenTree
from draftproof.drafters.base import Drafter
from draftproof.engine.deferred import DrafterWrapper
from draftproof.model.target import Target

ROOM = 2048
"""Tokens of a source that are looked at."""


class SourceText(DrafterWrapper):
    """A drafter whose rows begin with their sources."""

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
