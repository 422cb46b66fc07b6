"""The running batch: rows with their text, KV cache, roots and sampling parameters, and padding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftproof.core.messages import Accepted
from draftproof.core.ops import Ops
from draftproof.core.prefix import Prefix
from draftproof.core.sampling import Sampler
from draftproof.core.tree import TokenTree
from draftproof.drafters.base import Drafter
from draftproof.engine.sequence import SequenceState
from draftproof.engine.shape_policy import ShapePolicy
from draftproof.errors import BadInput, BrokenModel, DraftproofError
from draftproof.model.target import Target

Request = Sequence[SequenceState]
"""The samples of one prompt, each a row of its own."""


class Batch:
    """Rows that run side by side, in the order of the drafter's memory, which is kept in step.

    running: rows that have not ended. padding: where shapes are static a batch always has all its
    rows; those behind the running ones do what the last of these does, and nobody hears of it:
    [B] the row that each one follows, or None. view, lines: cache and text of the rows that take
    part. roots: [B] of the last round, None where the rows have changed.
    """

    def __init__(
        self, target: Target, drafter: Drafter, rows: int, capacity: int, shapes: ShapePolicy,
        ops: Ops,
    ) -> None:  # fmt: skip
        self.target, self.drafter, self.shapes, self.ops = target, drafter, shapes, ops
        self.cache = target.new_cache(rows, capacity)
        self.text = torch.zeros(rows, capacity + 1, dtype=torch.int64, device=target.device)
        self.running: list[SequenceState] = []
        self.padding: Tensor | None = None
        self.roots: Tensor | None = None
        self._line_up()

    def prefix(self, longest: int, ahead: int) -> Prefix:
        """No row has more than `longest` committed tokens; `ahead` may be drafted behind roots."""
        if not self.shapes.closed:
            self.cache.bound(longest)
            return Prefix(self.lines, self.view.lengths.clone(), ahead, longest, self.roots)
        if self.padding is None:
            self._pad()
        self.cache.bound(self.cache.capacity)
        return Prefix(self.lines, self.view.lengths.clone(), ahead)     # one graph: roots unknown

    def keep(self, tree: TokenTree, accepted: Accepted) -> Accepted:
        """Commit the accepted nodes to the cache; return them, of padding as of the row it has."""
        if self.padding is not None:
            accepted = accepted.select(self.padding)
        self.view.keep(None if tree.is_chain else accepted.nodes, accepted.count)
        self.roots = accepted.root
        return accepted

    def add(self, requests: Sequence[Request]) -> None:
        """Let the samples of requests run, whose prompts were read into the rows behind."""
        first, width, device = len(self.running), self.text.shape[1], self.text.device
        lines = [[*row.prompt, *[0] * (width - len(row.prompt))] for row, *_ in requests]
        places = torch.arange(first, first + len(requests), device=device)
        self.text.index_copy_(0, places, torch.tensor(lines, device=device))
        copies = [first + place for place, samples in enumerate(requests) for _ in samples]
        self.running += [row for samples in requests for row in samples]
        self.arrange([*range(first), *copies])

    def retire(self) -> None:
        """Let finished rows go; the last rows take their places."""
        for row in self.running:
            if row.finish_reason is not None:
                break
        else:
            return
        rows = [place for place, row in enumerate(self.running) if row.finish_reason is None]
        stay = {place for place in rows if place < len(rows)}
        move = [place for place in rows if place >= len(rows)]
        order = [place if place in stay else move.pop() for place in range(len(rows))]
        self.running = [self.running[place] for place in order]
        self.arrange(order)

    def fail(self, place: int, logits: Tensor) -> None:
        """End a row for which the target chose nothing; what it left in the cache may be NaN."""
        if bool(logits.isnan().any()):
            error: DraftproofError = BrokenModel(
                f"{self.target.name} gave NaN logits; its weights are broken, or the dtype is too "
                "small for it")
        else:
            error = BadInput("every token is forbidden here (by banned words, logit bias or a "
                             "processor); allow at least one")
        self.running[place].fail(error)
        self.cache.rows(place, place + 1).clear()

    def arrange(self, order: Sequence[int], padding: Tensor | None = None) -> None:
        """Keep these rows, in this order, with this padding among them."""
        self.roots = None
        self.text[: len(order)] = self.text[list(order)]
        self.cache.select(order)
        self.drafter.select(order)
        self.padding = padding
        self._line_up()

    def drop_padding(self) -> None:
        """Leave the rows behind the running ones free."""
        if self.padding is not None:
            self.arrange(range(len(self.running)))

    def _pad(self) -> None:
        rows = [min(place, len(self.running) - 1) for place in range(len(self.text))]
        self.arrange(rows, torch.tensor(rows, device=self.text.device))

    def _line_up(self) -> None:
        """What the rows that take part share."""
        size = len(self.running) if self.padding is None else len(self.padding)
        self.places = range(size)                       # of the rows that take part
        self.view, self.lines = self.cache.rows(0, size), self.text[:size]
        params = [row.params for row in self.running]
        params += params[-1:] * (size - len(params))
        self.sampler = Sampler(params, self.target.device, self.ops)
        self.wants_logprobs = any(row.sampling.logprobs for row in params)
        self.top_logprobs = max((row.sampling.top_logprobs for row in params), default=0)
