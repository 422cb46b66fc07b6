"""The result of a round for each row, as numbers on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from draftproof.core.messages import Accepted
from draftproof.core.ops import Ops
from draftproof.core.params import Likely
from draftproof.core.tree import TokenTree


class RowOutput(NamedTuple):
    """The result of a round for one row: the accepted tokens and the next root, and the accepted
    nodes.

    drafted: nodes after the root. reach: depth of the deepest. logprobs, distance, top: for each
    token, if needed; they may be longer. top: the likeliest tokens at its position.
    """

    drafted: int
    reach: int
    tokens: list[int]
    path: Sequence[int]
    logprobs: list[float] | None = None
    distance: list[float] | None = None
    top: list[Likely] | None = None


def row_outputs(
    tree: TokenTree, accepted: Accepted, new: Tensor, scored: Tensor | None, ops: Ops,
    top: int = 0,
) -> list[RowOutput]:
    """The results of all rows, in one copy to the host.

    new: [B, D] accepted tokens, the next root at count - 1. scored: logits [B, N, V], if
    log-probabilities are needed. top: how many of the likeliest tokens are needed.
    """
    drafted = tree.drafted if accepted.drafted is None else accepted.drafted
    columns = [accepted.count[:, None], drafted, new]
    if not tree.is_chain:
        columns.append(accepted.nodes)
    if scored is not None:
        columns += logprobs(scored, accepted.nodes, new, ops.exact, top)
    if accepted.distance is not None:
        columns.append(accepted.distance)
    rows = []
    for (count,), (nodes, reach), tokens, *more in zip(*ops.to_host(*columns), strict=True):
        parts = iter(more)
        path = range(count) if tree.is_chain else next(parts)[:count]
        scores, likely = next(parts) if scored is not None else None, None
        if scores and top:
            pairs = list(zip(next(parts), next(parts), strict=True))
            each = len(pairs) // len(tokens)
            likely = [pairs[start : start + each] for start in range(0, len(pairs), each)]
        distance = next(parts, None)
        rows.append(RowOutput(nodes, reach, tokens[:count], path, scores, distance, likely))
    return rows


def logprobs(
    logits: Tensor, nodes: Tensor, tokens: Tensor, dtype: torch.dtype, top: int = 0
) -> list[Tensor]:
    """[B, D] log-probability of `tokens` [B, D] under raw logits [B, N, V] at `nodes` [B, D]; ids
    and log-probabilities of the `top` likeliest tokens, [B, D * top]."""
    row = torch.arange(len(nodes), device=nodes.device)[:, None]
    log_probs = logits[row, nodes].to(dtype).log_softmax(-1)
    chosen = log_probs.gather(-1, tokens.clamp(min=0)[..., None])[..., 0]
    if not top:
        return [chosen]
    scores, likely = log_probs.topk(min(top, log_probs.shape[-1]))
    return [chosen, likely.flatten(1), scores.flatten(1)]
