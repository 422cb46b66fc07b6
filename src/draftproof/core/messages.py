"""The messages of a round: to the drafter, from the target, and the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from draftproof.core.former_names import FormerName
from draftproof.core.ops import TORCH, Ops
from draftproof.core.prefix import Prefix
from draftproof.core.sampling import Sampler
from draftproof.core.tree import TokenTree


class Reading(NamedTuple):
    """The target's output at each node: logits [B, N, V] and, per requested layer, hidden
    [B, N, T, H]."""

    logits: Tensor
    hidden: Tensor | None = None

    def gather(self, logits: Tensor, hidden: Tensor) -> Reading:
        """Logits and hidden states at chosen places.

        Args:
            logits: Logits of nodes that were read in parts.
            hidden: Their hidden states.

        Returns:
            One reading of all.
        """
        taken = self.logits.gather(1, logits[..., None].expand(-1, -1, self.logits.shape[-1]))
        if self.hidden is None:
            return Reading(taken)
        index = hidden[..., None, None].expand(-1, -1, *self.hidden.shape[2:])
        return Reading(taken, self.hidden.gather(1, index))

    def part(self, rows: slice, width: int) -> Reading:
        """The part for these rows and their first nodes.

        Args:
            rows: The rows to take.
            width: How many nodes to take, from the first.

        Returns:
            The reading of that part.
        """
        hidden = self.hidden[rows, :width] if self.hidden is not None else None
        return Reading(self.logits[rows, :width], hidden)


@dataclass(frozen=True)
class Features:
    """The target's output over whole texts, to train a draft head.

    tokens: [B, S] the texts. hidden: [B, S, T, H] at the layers asked for. weights: [B, S] how much
    each token counts as a prediction target; 0 for prompts and padding. logits: [B, S, V] of the
    target after each token, or None.
    """

    tokens: Tensor
    hidden: Tensor
    weights: Tensor
    logits: Tensor | None = None


@dataclass(frozen=True)
class Accepted:
    """Which nodes are kept: their indices [B, D] root first, how many [B], and the next root [B].

    Places of `nodes` beyond `count` hold their own index, so moving them moves nothing.
    distance: [B, D] total variation between the target's distribution and the one that each new
        token came from, the next root last; None under an exact rule.
    drafted: [B, 2] as `TokenTree.drafted`, if it was computed anyway.
    """

    nodes: Tensor
    count: Tensor
    root: Tensor
    distance: Tensor | None = None
    drafted: Tensor | None = None

    def select(self, rows: Tensor) -> Accepted:
        """The results of these rows [b], in this order.

        Args:
            rows: Rows to take, int64 [b].

        Returns:
            The same of those rows.
        """
        parts = (self.nodes, self.count, self.root)
        nodes, count, root = (part.index_select(0, rows) for part in parts)
        distance = self.distance.index_select(0, rows) if self.distance is not None else None
        return Accepted(nodes, count, root, distance)


@dataclass(frozen=True)
class Frontier:
    """The state of each row, and how much may be drafted.

    prefix: the committed text of each row with its root. sampler: draws as the target will.
    max_draft_tokens: the most tokens each row may draft this round; at 0 no drafter is called.
    needs_draft_probs: draw draft tokens and attach their probabilities, which the acceptance rule
        needs; otherwise choose them.
    trees: the target reads trees; otherwise only a chain will do.
    min_confidence: a path may end early where it is less likely than this to be accepted; 0: it may
        not.
    row_limit: the most tokens one row may draft if others draft fewer; 0 if rows share nothing. Of
        trees with `confidence` the likeliest nodes of all rows are read, `max_draft_tokens` per row
        on average.
    cache: the target's keys and values of these rows, a `KVCache`; read-only.
    """

    prefix: Prefix
    sampler: Sampler
    max_draft_tokens: int
    needs_draft_probs: bool = False
    trees: bool = True
    min_confidence: float = 0.0
    row_limit: int = 0
    cache: Any = None

    budget: ClassVar = FormerName("max_draft_tokens")
    drawn: ClassVar = FormerName("needs_draft_probs")
    floor: ClassVar = FormerName("min_confidence")
    most: ClassVar = FormerName("row_limit")

    @property
    def max_nodes(self) -> int:
        """The most tokens that one row may draft, if the drafter gives confidence."""
        return max(self.max_draft_tokens, self.row_limit)


class Successors(NamedTuple):
    """The target's likeliest tokens after each node, [b, N, k], and their logits."""

    tree: TokenTree
    tokens: Tensor
    logits: Tensor


def top_tokens(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """[b, n, count] the tokens with the highest logits [b, n, V], and these logits."""
    best = logits.topk(count, -1)
    return best.indices, best.values


@dataclass(frozen=True)
class Commit:
    """The committed tokens of `rows`: tokens [b, D] at `nodes` [b, D] of the tree, `count` [b]
    each.

    hidden: [b, D, T, H] the target's states at these tokens, at the drafter's layers; or None.
    successors: the likeliest tokens after each verified node, if the drafter needs them and the
        budget does not cool down; None for prompts.
    The first commit of a new row is its prompt, in one or more pieces.
    """

    rows: Sequence[int]
    tokens: Tensor
    nodes: Tensor
    count: Tensor
    hidden: Tensor | None = None
    successors: Successors | None = None

    @classmethod
    def of(
        cls, rows: Sequence[int], tree: TokenTree, reading: Reading, accepted: Accepted,
        top: int = 0, ops: Ops = TORCH,
    ) -> Commit:  # fmt: skip
        """The accepted nodes of a tree read for `rows`, with the `top` successors of each node.

        Args:
            rows: The running rows.
            tree: What was read.
            reading: What the target returned for it.
            accepted: What the rule accepted.
            top: How many of the likeliest tokens after each node the drafter wants; 0 for none.
            ops: The operators of the device.

        Returns:
            The commit that the drafter observes.
        """
        tokens = tree.tokens if tree.is_chain else tree.tokens.gather(1, accepted.nodes)
        hidden = reading.hidden
        if hidden is not None and not tree.is_chain and len(hidden) == 1:
            hidden = hidden.index_select(1, accepted.nodes[0])          # much faster
        elif hidden is not None and not tree.is_chain:
            index = accepted.nodes[:, :, None, None].expand(-1, -1, *hidden.shape[2:])
            hidden = hidden.gather(1, index)
        successors, most = None, min(top, reading.logits.shape[-1])
        if top:
            successors = Successors(tree, *ops.run(top_tokens, reading.logits, most))
        return cls(rows, tokens, accepted.nodes, accepted.count, hidden, successors)


def append_tokens(text: Tensor, position: Tensor, tokens: Tensor, accepted: Accepted) -> Tensor:
    """Write accepted `tokens` [B, D], root first, and the next root into text [B, capacity] after
    the old root at `position` [B]; return what was written, [B, D], the next root at count - 1."""
    new = torch.cat([tokens[:, 1:], accepted.root[:, None]], 1)
    new = new.scatter(1, accepted.count[:, None] - 1, accepted.root[:, None])
    places = position[:, None] + 1 + torch.arange(new.shape[1], device=new.device)
    text[: len(new)].scatter_(1, places, new.clamp(min=0))
    return new
