"""The running batch: rows with their text, KV cache, roots, drafter's memory, and padding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftproof.core.messages import Accepted, Commit, Successors
from draftproof.core.ops import Ops
from draftproof.core.prefix import Prefix
from draftproof.core.sampling import Sampler
from draftproof.core.tree import TokenTree
from draftproof.drafters.base import Drafter
from draftproof.engine.shape_policy import ShapePolicy
from draftproof.errors import BadInput, BrokenModel, DraftproofError
from draftproof.model.target import Target
from draftproof.requests.sequence import SequenceState

Samples = Sequence[SequenceState]
"""The samples of one prompt, each a row of its own."""


class Batch:
    """Rows that run side by side, in the order of the drafter's memory, which is kept in step.

    running: rows that have not ended.
    padding: with static shapes a batch always has all its rows. Those after the running ones repeat
        the last running row, and their results are dropped. [B] the row that each row repeats, or
        None.
    view, text_rows, row_ids: cache, text and numbers of the rows in use, padding included.
    roots: [B] of the last round; None if the rows have changed since.
    pending: commits of plain rounds that the drafter has not seen yet. It gets them in one call,
        which costs less than many short ones.
    """

    def __init__(
        self, target: Target, drafter: Drafter, rows: int, capacity: int, shapes: ShapePolicy,
        ops: Ops, new_sampler: type[Sampler] = Sampler,
    ) -> None:  # fmt: skip
        self.new_sampler = new_sampler
        self.target, self.drafter, self.shapes, self.ops = target, drafter, shapes, ops
        self.cache = target.new_cache(rows, capacity)
        self.text = torch.zeros(rows, capacity + 1, dtype=torch.int64, device=target.device)
        self.running: list[SequenceState] = []
        self.pending: list[Commit] = []
        self.padding: Tensor | None = None
        self.roots: Tensor | None = None
        self._rebuild_sampler()

    def prefix(self, longest: int, ahead: int) -> Prefix:
        """The text of the rows in use. No row has more than `longest` committed tokens; at most
        `ahead` tokens are drafted after each root."""
        if not self.shapes.closed:
            self.cache.set_max_length(longest)
            return Prefix(self.text_rows, self.view.lengths.clone(), ahead, longest, self.roots)
        if self.padding is None:
            self._pad()
        self.cache.set_max_length(self.cache.capacity)
        return Prefix(self.text_rows, self.view.lengths.clone(), ahead)     # one graph: no roots

    def keep(self, tree: TokenTree, accepted: Accepted) -> Accepted:
        """Commit the accepted nodes to the cache, in padding those of the row it repeats; return
        them."""
        if self.padding is not None:
            accepted = accepted.select(self.padding)
        self.view.keep(None if tree.is_chain else accepted.nodes, accepted.count)
        self.roots = accepted.root
        return accepted

    def notify_drafter(self, commit: Commit, plain: bool) -> None:
        """Let the drafter observe a round: at once, or later if the round was plain."""
        pending = self.pending
        if pending and (not plain or len(pending) == 128
                        or (pending[0].successors is None) != (commit.successors is None)):
            self.flush()
        if plain and self.ops.on_host:
            pending.append(commit)
        else:
            self.drafter.observe(commit)

    def flush(self) -> None:
        """Let the drafter observe what is pending."""
        if self.pending:
            self.drafter.observe(_joined(self.pending))
            self.pending.clear()

    def add(self, groups: Sequence[Samples]) -> None:
        """Let samples run whose prompts were read into the rows after the running ones."""
        first, width, device = len(self.running), self.text.shape[1], self.text.device
        lines = [[*row.prompt, *[0] * (width - len(row.prompt))] for row, *_ in groups]
        rows = torch.arange(first, first + len(groups), device=device)
        self.text.index_copy_(0, rows, torch.tensor(lines, device=device))
        copies = [first + place for place, samples in enumerate(groups) for _ in samples]
        self.running += [row for samples in groups for row in samples]
        self.reorder([*range(first), *copies])

    def retire(self) -> None:
        """Remove finished rows; the last rows take their places."""
        rows = [place for place, row in enumerate(self.running) if row.finish_reason is None]
        stay = {place for place in rows if place < len(rows)}
        move = [place for place in rows if place >= len(rows)]
        order = [place if place in stay else move.pop() for place in range(len(rows))]
        self.running = [self.running[place] for place in order]
        self.reorder(order)

    def fail(self, place: int, logits: Tensor) -> None:
        """End a row for which the target has no next token; its cache may contain NaN."""
        if bool(logits.isnan().any()):
            error: DraftproofError = BrokenModel(
                f"{self.target.name} gave NaN logits; its weights are broken, or the dtype is too "
                "small for it")
        else:
            error = BadInput("every token is forbidden here (by banned words, logit bias or a "
                             "processor); allow at least one")
        self.running[place].fail(error)
        self.cache.rows(place, place + 1).clear()

    def reorder(self, order: Sequence[int], padding: Tensor | None = None) -> None:
        """Keep these rows, in this order; `padding` as in the class."""
        self.flush()
        self.roots = None
        self.text[: len(order)] = self.text[list(order)]
        self.cache.select(order)
        self.drafter.select(order)
        self.padding = padding
        self._rebuild_sampler()

    def _pad(self) -> None:
        rows = [min(place, len(self.running) - 1) for place in range(len(self.text))]
        self.reorder(rows, torch.tensor(rows, device=self.text.device))

    def drop_padding(self) -> None:
        """Free the rows after the running ones."""
        if self.padding is not None:
            self.reorder(range(len(self.running)))

    def _rebuild_sampler(self) -> None:
        """Rebuild what depends on the rows in use: views, the sampler, what is to be reported."""
        size = len(self.running) if self.padding is None else len(self.padding)
        self.row_ids = range(size)
        self.view, self.text_rows = self.cache.rows(0, size), self.text[:size]
        params = [row.params for row in self.running]
        params += params[-1:] * (size - len(params))
        self.sampler = self.new_sampler(params, self.target.device, self.ops)
        self.has_rules = any(row.logits_rules for row in params)
        self.wants_logprobs = any(row.sampling.logprobs for row in params)
        self.top_logprobs = max((row.sampling.top_logprobs for row in params), default=0)


def _joined(commits: Sequence[Commit]) -> Commit:
    """Commits of one token per row as one commit; nodes are those of a chain."""
    first = commits[0]
    if len(commits) == 1:
        return first
    tokens = torch.cat([commit.tokens for commit in commits], 1)
    nodes = torch.arange(len(commits), device=tokens.device).expand_as(tokens)
    hidden = [commit.hidden for commit in commits if commit.hidden is not None]
    successors = [commit.successors for commit in commits if commit.successors is not None]
    top = Successors(
        TokenTree.chain(tokens), torch.cat([part.tokens for part in successors], 1),
        torch.cat([part.logits for part in successors], 1),
    ) if successors else None
    count = torch.full_like(first.count, len(commits))
    return Commit(first.rows, tokens, nodes, count, torch.cat(hidden, 1) if hidden else None, top)
