"""What a round gave each row, as numbers on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from draftproof.core.messages import Accepted
from draftproof.core.ops import Ops
from draftproof.core.tree import TokenTree


class RowOutput(NamedTuple):
    """What a round gave one row: the accepted tokens and the next root; the accepted nodes.

    drafted: nodes behind the root. reach: depth of the deepest. logprobs, distance: of each token,
    if somebody asks; they may be longer.
    """

    drafted: int
    reach: int
    tokens: list[int]
    path: Sequence[int]
    logprobs: list[float] | None = None
    distance: list[float] | None = None


def row_outputs(
    tree: TokenTree, accepted: Accepted, new: Tensor, scored: Tensor | None, ops: Ops
) -> list[RowOutput]:
    """Of all rows, in one copy to the host.

    new: [B, D] accepted tokens, the next root at count - 1. scored: logits [B, N, V] if needed.
    """
    drafted = tree.drafted if accepted.drafted is None else accepted.drafted
    columns = [accepted.count[:, None], drafted, new]
    if not tree.is_chain:
        columns.append(accepted.nodes)
    if scored is not None:
        columns.append(logprobs(scored, accepted.nodes, new, ops.exact))
    if accepted.distance is not None:
        columns.append(accepted.distance)
    rows = []
    for (count,), (nodes, reach), tokens, *more in zip(*ops.to_host(*columns), strict=True):
        parts = iter(more)
        path = range(count) if tree.is_chain else next(parts)[:count]
        scores = next(parts) if scored is not None else None
        rows.append(RowOutput(nodes, reach, tokens[:count], path, scores, next(parts, None)))
    return rows


def logprobs(logits: Tensor, nodes: Tensor, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, D] log-probability of `tokens` [B, D] under raw logits [B, N, V] at `nodes` [B, D]."""
    row = torch.arange(len(nodes), device=nodes.device)[:, None]
    chosen = logits[row, nodes].to(dtype)
    return chosen.log_softmax(-1).gather(-1, tokens.clamp(min=0)[..., None])[..., 0]
