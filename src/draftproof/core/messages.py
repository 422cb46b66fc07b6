"""The messages of a round: what the drafter is asked, what the target read, what became true."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from draftproof.core.ops import TORCH, Ops
from draftproof.core.prefix import Prefix
from draftproof.core.sampling import Sampler
from draftproof.core.tree import TokenTree


class Reading(NamedTuple):
    """What the target says at each node: logits [B, N, V] and, per tap, hidden states [B, N, T, H] or None."""

    logits: Tensor
    hidden: Tensor | None = None

    def part(self, rows: slice, width: int) -> Reading:
        """Of these rows, and of their first nodes."""
        return Reading(self.logits[rows, :width], self.hidden[rows, :width] if self.hidden is not None else None)


@dataclass(frozen=True)
class Features:
    """What the target computed over whole texts, for a draft head to learn from.

    tokens: [B, S] the texts. hidden: [B, S, T, H] at the layers asked for. weights: [B, S] how much each token counts
    as something to foretell; 0 for prompts and padding. logits: [B, S, V] of the target behind each token, or None.
    """

    tokens: Tensor
    hidden: Tensor
    weights: Tensor
    logits: Tensor | None = None


@dataclass(frozen=True)
class Accepted:
    """Which nodes stand: their indices [B, D] root first, how many [B], and the next root [B].

    Places of `nodes` beyond `count` hold their own index, so moving them moves nothing.
    distance: [B, D] total variation between the target's law and the one each new token came from: the accepted nodes
    behind the root, then the next root; None under an exact rule, where there is none.
    drafted: [B, 2] as `TokenTree.drafted`, if it was found on the way.
    """

    nodes: Tensor
    count: Tensor
    root: Tensor
    distance: Tensor | None = None
    drafted: Tensor | None = None

    def select(self, rows: Tensor) -> Accepted:
        """What these rows [B] accepted, in this order."""
        nodes, count, root = (part.index_select(0, rows) for part in (self.nodes, self.count, self.root))
        return Accepted(nodes, count, root, self.distance.index_select(0, rows) if self.distance is not None else None)


@dataclass(frozen=True)
class Frontier:
    """Where each row stands, and how much may be drafted.

    prefix: the true text of each row with its root. sampler: the rows' wishes, to draft what the target will want.
    budget: how many tokens each row may draft this round, zero included.
    drawn: draw draft tokens from a law and attach it, for rules that weigh it; otherwise choose them.
    trees: the target reads trees; otherwise only a chain will do.
    floor: a path may end early where it has less than this chance to stand; 0: it may not, since to ask a device costs more
    than it saves, or since the rule must not know.
    most: how many tokens one row may draft if others draft fewer, 0 if rows share nothing. Of a tree that tells its odds the
    likeliest nodes of all rows are read, together as many as `budget` for each.
    """

    prefix: Prefix
    sampler: Sampler
    budget: int
    drawn: bool = False
    trees: bool = True
    floor: float = 0.0
    most: int = 0

    @property
    def max_nodes(self) -> int:
        """The most tokens that any row may draft, by a drafter that tells their odds."""
        return max(self.budget, self.most)


class Successors(NamedTuple):
    """What the target found likeliest behind each node of the tree it read: the best tokens [b, N, k], and their logits."""

    tree: TokenTree
    tokens: Tensor
    logits: Tensor

    @classmethod
    def of(cls, tree: TokenTree, logits: Sequence[Tensor], top: int, ops: Ops) -> Successors:
        """The `top` tokens of the highest logits, of which one or several [b, n, V] lie side by side."""
        return cls(tree, *ops.run(top_tokens, logits, min(top, logits[0].shape[-1])))


def top_tokens(logits: Sequence[Tensor], count: int) -> tuple[Tensor, Tensor]:
    """The `count` tokens of the highest logits, and these logits, [b, P * n, count] both, of P logits [b, n, V] side by side."""
    best = torch.cat(list(logits), 1).topk(count, -1)
    return best.indices, best.values


@dataclass(frozen=True)
class Commit:
    """What became true of `rows`: of each the tokens [b, D] at `nodes` [b, D] of the tree read, `count` [b] of them.

    hidden: [b, D, T, H] the target's hidden states at these tokens, at the layers the drafter taps; or None.
    successors: what came out behind every node read, rejected ones too, if the drafter asks; never of a prompt, or None.
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
        cls, rows: Sequence[int], tree: TokenTree, reading: Reading, accepted: Accepted, top: int = 0, ops: Ops = TORCH
    ) -> Commit:
        """The commit of the accepted nodes of a tree that was read for `rows`, with the `top` successors of each node."""
        tokens = tree.tokens if tree.is_chain else tree.tokens.gather(1, accepted.nodes)
        hidden = reading.hidden
        if hidden is not None and not tree.is_chain and len(hidden) == 1:
            hidden = hidden.index_select(1, accepted.nodes[0])                          # far sooner done
        elif hidden is not None and not tree.is_chain:
            index = accepted.nodes[:, :, None, None].expand(-1, -1, *hidden.shape[2:])
            hidden = hidden.gather(1, index)
        successors = Successors.of(tree, [reading.logits], top, ops) if top else None
        return cls(rows, tokens, accepted.nodes, accepted.count, hidden, successors)


def append_tokens(text: Tensor, position: Tensor, tokens: Tensor, accepted: Accepted) -> Tensor:
    """Write the accepted `tokens` [B, D], root first, and the next root into text [B, capacity] behind the old root at
    `position` [B]; return what was written, [B, D], the next root at count - 1. Beyond it lies scratch."""
    new = torch.cat([tokens[:, 1:], accepted.root[:, None]], 1)
    new = new.scatter(1, accepted.count[:, None] - 1, accepted.root[:, None])
    places = position[:, None] + 1 + torch.arange(new.shape[1], device=new.device)
    text[: len(new)].scatter_(1, places, new.clamp(min=0))
    return new
