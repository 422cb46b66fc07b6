"""Wrappers of drafters, rules and budgets: for texts that have a source, and for several ranks.

The ranks of a sharded target compute one forward together, so all of them must read the same tree
and keep the same nodes. Every rank drafts and decides, but the draft and the decision of rank 0
are used.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor

from draftproof.core.acceptance import Rule
from draftproof.core.messages import Accepted, Commit, Frontier
from draftproof.core.ops import Ops
from draftproof.core.prefix import Prefix
from draftproof.core.tree import TokenTree
from draftproof.drafters.base import Drafter
from draftproof.engine.budget import Budget
from draftproof.model.parallel import ProcessGroup
from draftproof.model.target import Target
from draftproof.requests.stats import Round, State

ROOM = 2048
"""The most tokens of a source that are used."""


class DrafterWrapper(Drafter):
    """Forwards everything to `inner`, including attributes with defaults in `Drafter`."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner

    def __getattribute__(self, name: str) -> object:
        attribute_of = object.__getattribute__
        mine = name in attribute_of(self, "__dict__") or any(
            name in kind.__dict__ for kind in type(self).__mro__ if kind not in _DEFAULTS
        )
        mine |= name.startswith("__")
        return attribute_of(self, name) if mine else getattr(self.inner, name)

    def for_run(self, rows: int, capacity: int, ops: Ops) -> Self:
        made = copy.copy(self)
        made.start(rows, capacity, ops)
        return made

    def start(self, rows: int, capacity: int, ops: Ops) -> None:
        self.inner = self.inner.for_run(rows, capacity, ops)

    def observe(self, commit: Commit) -> None:
        self.inner.observe(commit)

    def propose(self, frontier: Frontier) -> TokenTree:
        return self.inner.propose(frontier)

    def select(self, rows: Sequence[int]) -> None:
        self.inner.select(rows)


_DEFAULTS = set(Drafter.__mro__)
"""Classes whose attributes a wrapper forwards instead of using."""


class SourceText(DrafterWrapper):
    """A text drafter whose rows begin with the encoder's input: a summary or a correction repeats
    its source."""

    @classmethod
    def wrap(cls, inner: Drafter, target: Target) -> Drafter:
        """A wrapper of `inner`; `inner` itself if there is no encoder, or if it reads hidden
        states."""
        return cls(inner) if target.is_encoder_decoder and not inner.hidden_layers else inner

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
        return self.inner.propose(replace(frontier, prefix=self._after_sources(frontier.prefix)))

    def select(self, rows: Sequence[int]) -> None:
        self.in_front, self.begun = [self.in_front[row] for row in rows], len(rows)
        super().select(rows)

    def _after_sources(self, prefix: Prefix) -> Prefix:
        device, longest = prefix.tokens.device, max(map(len, self.in_front))
        sizes = torch.tensor([len(source) for source in self.in_front], device=device)
        tokens = torch.nn.functional.pad(prefix.tokens, (longest, 0))
        place = torch.arange(tokens.shape[1], device=device) - sizes[:, None] + longest
        tokens = tokens.gather(1, place.clamp(max=tokens.shape[1] - 1))
        for row, source in enumerate(self.in_front):
            tokens[row, : len(source)] = torch.tensor(source, device=device)
        known = None if prefix.longest is None else prefix.longest + longest
        return Prefix(tokens, prefix.position + sizes, prefix.ahead, known, prefix.roots)


class BroadcastDrafter(DrafterWrapper):
    """Proposes rank 0's draft on all ranks. Shapes never depend on computed values."""

    def __init__(self, inner: Drafter, group: ProcessGroup) -> None:
        super().__init__(inner)
        self.group = group

    def propose(self, frontier: Frontier) -> TokenTree:
        mine = self.inner.propose(frontier)
        if mine.is_chain:
            (tokens,) = self.group.broadcast(mine.tokens)
            return mine if self.group.is_main_process else TokenTree.chain(tokens, mine.draft_probs)
        tokens, parents = self.group.broadcast(mine.tokens, mine.parents)
        return mine if self.group.is_main_process else replace(mine, tokens=tokens, parents=parents)


class BroadcastBudget(Budget):
    """A budget that decides on rank 0; the other ranks receive its answers.

    Its `min_confidence` is 0: where drafts end early, their shapes depend on each rank's rounding.
    """

    def __init__(self, budget: Budget, group: ProcessGroup) -> None:
        self.budget, self.group, self.max_draft_tokens = budget, group, budget.max_draft_tokens

    def choose(self, state: State) -> int:
        mine = self.budget.choose(state) if self.group.is_main_process else 0
        return self.group.broadcast_int(mine)

    def at_most(self, count: int) -> int:
        return self.budget.at_most(count)

    def record(self, done: Round) -> None:
        if self.group.is_main_process:
            self.budget.record(done)


def broadcast_rule(rule: Rule, group: ProcessGroup) -> Rule:
    """A rule that accepts on all ranks what `rule` accepts on rank 0."""
    def accept(tree: TokenTree, logits: Tensor, frontier: Frontier) -> Accepted:
        mine = rule.accept(tree, logits, frontier)
        nodes, count, root = group.broadcast(mine.nodes, mine.count, mine.root)
        return replace(mine, nodes=nodes, count=count, root=root)

    return rule._replace(accept=accept)
