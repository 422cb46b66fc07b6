"""Drafters for known texts, which read the target's outputs from a recording."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from draftproof.core.messages import Commit, Frontier, Successors
from draftproof.core.tree import ABSENT, TokenTree
from draftproof.drafters.base import Drafter
from draftproof.drafters.draft_model import DraftModel
from draftproof.plan.recording import Drafts, Text

if TYPE_CHECKING:
    from draftproof.core.ops import Ops


@dataclass
class Timing:
    """Times of a run's drafts. going: rows that a draft model drafts, by depth. spent: seconds of
    actual drafting. ahead: the largest possible depth of the last draft."""

    going: list[int] = field(default_factory=list)
    spent: float = 0.0
    ahead: int = 0

    def take(self) -> float:
        """Return the seconds since the last call."""
        spent, self.spent = self.spent, 0.0
        return spent


class Playback(Drafter):
    """Knows the text of each row, and how many of its tokens are committed.

    timing: shared by all runs.
    """

    def __init__(self, texts: Sequence[Text], like: Drafter) -> None:
        self.texts, self.name, self.max_draft_tokens = texts, like.name, like.max_draft_tokens
        self.deepest, self.timing = like.deepest, Timing()
        self.has_kv_cache = like.has_kv_cache

    def start(self, rows: int, capacity: int, ops: Ops) -> None:
        super().start(rows, capacity, ops)
        self.rows, self.begun = list[tuple[int, int]](), 0      # text and committed tokens

    def observe(self, commit: Commit) -> None:
        for row, count in zip(commit.rows, commit.count.tolist(), strict=True):
            if row == len(self.rows):
                self.rows.append((self.begun, 0))               # requests join in order
                self.begun += 1
            number, length = self.rows[row]
            self.rows[row] = number, length + count

    def select(self, rows: Sequence[int]) -> None:
        self.rows = [self.rows[row] for row in rows]


class PlayedDrafter(Playback):
    """A drafter that runs as usual but receives the target's outputs from the recording, which has
    none for rejected tokens."""

    def __init__(self, texts: Sequence[Text], inner: Drafter) -> None:
        super().__init__(texts, inner)
        self.inner, self.top_k_needed = inner, inner.top_k_needed
        if inner.top_k_needed:
            self.starts = [0, *accumulate(len(text.tokens) for text in texts)]  # positions in `top`
            known = [text.likeliest for text in texts if text.likeliest is not None]
            self.top = [torch.cat(parts) for parts in zip(*known, strict=True)]

    def start(self, rows: int, capacity: int, ops: Ops) -> None:
        super().start(rows, capacity, ops)
        self.inner = self.inner.for_run(rows, capacity, ops)

    def unread(self, pending: int = 0) -> int:
        return self.inner.unread(pending)

    def observe(self, commit: Commit) -> None:
        before = [self.rows[row][1] if row < len(self.rows) else 0 for row in commit.rows]
        super().observe(commit)
        begun = [(self.rows[row][0], start) for row, start in zip(commit.rows, before, strict=True)]
        if self.inner.hidden_layers:
            ahead = torch.arange(commit.tokens.shape[1])
            known = [(self.texts[number].hidden, ahead + start) for number, start in begun]
            hidden = [states[at.clamp(max=len(states) - 1)] for states, at in known
                      if states is not None]  # fmt: skip
            commit = replace(commit, hidden=torch.stack(hidden))
        if commit.successors is not None:
            commit = replace(commit, successors=self._successors(commit, begun))
        with self._timed():
            self.inner.observe(commit)

    def _successors(self, commit: Commit, begun: Sequence[tuple[int, int]]) -> Successors:
        """Recorded successors of accepted nodes, none of others. begun: texts and positions."""
        assert commit.successors is not None
        tree = commit.successors.tree
        at = torch.full_like(tree.tokens, -1)
        for row, (number, start) in enumerate(begun):
            nodes = commit.nodes[row, : int(commit.count[row])]
            at[row, nodes] = self.starts[number] + start + torch.arange(len(nodes))
        known = replace(tree, tokens=torch.where(at < 0, ABSENT, tree.tokens))
        return Successors(known, *(part[at.clamp(min=0)] for part in self.top))

    def propose(self, frontier: Frontier) -> TokenTree:
        self.timing.ahead = frontier.prefix.ahead
        with self._timed():
            return self.inner.propose(frontier)

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        self.inner.select(rows)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.timing.spent += time.perf_counter() - start


class PlayedDraft(Playback):
    """The chains of a draft model, from one pass over each text.

    lag: the number of committed tokens of each row that it has yet to read.
    """

    def __init__(self, texts: Sequence[Text], drafts: Sequence[Drafts], like: DraftModel) -> None:
        super().__init__(texts, like)
        self.drafts = drafts

    def start(self, rows: int, capacity: int, ops: Ops) -> None:
        super().start(rows, capacity, ops)
        self.lag, self.proposed = list[int](), False

    def unread(self, pending: int = 0) -> int:
        return sum(max(0, lag + pending - 1) for lag in self.lag)

    def observe(self, commit: Commit) -> None:
        super().observe(commit)
        self.lag += [0] * (len(self.rows) - len(self.lag))
        for row in commit.rows:
            self.lag[row] = 1 if self.proposed else self.lag[row] + commit.tokens.shape[1]
        self.proposed = False

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        self.lag = [self.lag[row] for row in rows]

    def propose(self, frontier: Frontier) -> TokenTree:
        """Draft like `DraftModel`: up to the floor, and while a row is among the most likely."""
        most, nodes = frontier.max_nodes, frontier.max_draft_tokens * len(self.rows)
        floor = math.log(frontier.min_confidence) if frontier.min_confidence else -math.inf
        self.lag, self.proposed, going = [0] * len(self.rows), True, list[int]()
        self.timing.going = going
        tokens = torch.full((len(self.rows), 1 + most), ABSENT, dtype=torch.int64)
        chances, ranked = torch.full(tokens.shape, -math.inf, dtype=torch.float32), list[float]()
        tokens[:, 0], live = frontier.prefix.root, list(range(len(self.rows)))
        scores = [0.0] * len(live)
        for depth in range(most):
            going.append(len(live))
            for row in live:
                number, place = self.rows[row]
                drafts = self.drafts[number]
                at = min(place + depth, len(drafts.tokens) - 1)
                scores[row] += drafts.confidence[at]
                tokens[row, 1 + depth], chances[row, 1 + depth] = drafts.tokens[at], scores[row]
                ranked.append(scores[row])
            least = max(floor, sorted(ranked)[-nodes] if len(ranked) >= nodes else floor)
            live = [row for row in live if scores[row] >= least]
            if not live:
                break
        depth = len(going)
        tree = TokenTree.chain(tokens[:, : 1 + depth])
        if not frontier.row_limit:
            return tree
        tree = replace(tree, confidence=chances[:, : 1 + depth].exp())
        return tree.within_budget(frontier.max_draft_tokens)
