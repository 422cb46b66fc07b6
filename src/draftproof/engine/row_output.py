"""Given: what a round gave each row, on the host. Numbers at hand are looked at; elsewhere one copy brings them all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftproof.core.messages import Accepted
from draftproof.core.tree import ABSENT, TokenTree
from draftproof.model.device import Device


class RowOutput(NamedTuple):
    """What a round gave one row: the accepted tokens and the next root, and the nodes that stood, root first.

    drafted: nodes. reach: depth of the deepest.
    logprobs, distance: of each token, if somebody asks; they may be longer.
    """

    drafted: int
    reach: int
    tokens: list[int]
    path: list[int]
    logprobs: list[float] | None = None
    distance: list[float] | None = None


def looked_at(tree: TokenTree, tokens: Sequence[Sequence[int]], accepted: Accepted, scored: Tensor | None) -> list[RowOutput]:
    """Of rows whose accepted nodes and `tokens`, root first, are on the host. scored: logits [B, N, V] if somebody asks."""
    rows = []
    for said, (path, root), (drafted, reach) in zip(
        tokens, accepted.on_host, zip(tree.sizes, tree.reach, strict=True), strict=True
    ):
        rows.append(RowOutput(drafted, reach, [*said[1 : len(path)], root], path))
    if scored is not None:
        deep = accepted.nodes.shape[1]
        padded = torch.tensor([[*row.tokens, *[0] * (deep - len(row.tokens))] for row in rows])
        told = logprobs(scored, accepted.nodes, padded, torch.float64).tolist()
        rows = [row._replace(logprobs=one) for row, one in zip(rows, told, strict=True)]
    if accepted.distance is not None:
        rows = [row._replace(distance=one) for row, one in zip(rows, accepted.distance.tolist(), strict=True)]
    return rows


def copied(tree: TokenTree, chosen: Tensor, accepted: Accepted, scored: Tensor | None, device: Device) -> list[RowOutput]:
    """Of all rows, in one copy to the host. chosen: [B, D] accepted tokens, the next root at count - 1."""
    there, deep = tree.tokens != ABSENT, chosen.shape[1]
    reach = torch.where(there, tree.depths, 0).amax(1)
    columns = [torch.stack([accepted.count, there.sum(1) - 1, reach], 1), chosen]
    if not tree.is_chain:
        columns.append(accepted.nodes)
    if scored is not None:
        columns.append(logprobs(scored, accepted.nodes, chosen, device.widest))
    if accepted.distance is not None:
        columns.append(accepted.distance)
    exact = device.widest if len(columns) > 2 else torch.int64                  # token ids are far below 2**24
    device.flush()
    host: list[list[Any]] = torch.cat([column.to(exact) for column in columns], 1).tolist()
    rows = []
    for sizes in host:
        count, drafted, reached = (int(size) for size in sizes[:3])
        parts = iter([sizes[start : start + count] for start in range(3, len(sizes), deep)])
        tokens = [int(token) for token in next(parts)]
        path = [int(node) for node in next(parts)] if not tree.is_chain else list(range(count))
        scores = next(parts) if scored is not None else None
        rows.append(RowOutput(drafted, reached, tokens, path, scores, next(parts, None)))
    return rows


def logprobs(logits: Tensor, nodes: Tensor, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, D] log-probability of `tokens` [B, D] under the raw logits [B, N, V] at `nodes` [B, D], in this dtype."""
    row = torch.arange(len(nodes), device=nodes.device)[:, None]
    chosen = logits[row, nodes].to(dtype)
    return chosen.log_softmax(-1).gather(-1, tokens.clamp(min=0)[..., None])[..., 0]
