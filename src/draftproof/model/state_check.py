"""The check at load of models with states: rounds as decoding has them, compared with the model's
own forward without a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftproof.core.tree import TokenTree
from draftproof.errors import UnsupportedModel

if TYPE_CHECKING:
    from draftproof.model.target import Target

ROUNDS = ((3, (3, 3)), (1, (1, 1)), (4, (2, 4)), (4, (4, 1)), (1, (1, 1)), (5, (2, 3)), (2, (2, 2)))
"""Tokens read of each of two rows, and how many of them are committed; what is not is astray."""
CLOSE = 4.0
"""Reads with single steps may be so many times as far from the model's own forward."""
FLOOR = 0.3
"""A share of the tolerance that is rounding, whatever blocks do."""


def check_states(target: Target) -> None:
    """Refuse a target whose rows cannot go on from states; find out whether it may read single
    tokens from them."""
    target.steps = False
    try:
        worst, target.steps = _error(target), True
        target.steps = _error(target) <= max(CLOSE * worst, FLOOR * target.tolerance)
    except (TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError):
        worst = float("inf")
    if not worst <= 6 * target.tolerance:
        raise UnsupportedModel(
            f"{type(target.model).__name__} gives other logits when it goes on from the states it "
            "kept than on its own; run it with transformers' generate"
        )


def _error(target: Target) -> float:
    """The largest difference of logits in rounds of two rows, read at once and node by node."""
    dice = torch.Generator().manual_seed(1)
    length = max(sum(counts[row] for _, counts in ROUNDS) for row in range(2))
    text = torch.randint(target.vocab_size, (2, length), generator=dice).to(target.device)
    own = target.model(input_ids=text, use_cache=False).logits.double()
    cache, error = target.plain_cache(2, length + 8), 0.0
    for one_by_one in (False, True):
        cache.select([])
        at = [0, 0]
        for width, counts in ROUNDS:
            tree = _drafted(text, at, width, counts, target.vocab_size)
            parts = range(1, width + 1) if one_by_one and width < 5 else [width]
            logits, first = [], 0
            for nodes in parts:
                part = TokenTree.chain(tree.tokens[:, :nodes])
                logits.append(target.read(part, cache, first=first).logits.double())
                first = nodes
            cache.keep(None, torch.tensor(counts, device=target.device))
            error = max(error, _distance(torch.cat(logits, 1), own, at, counts))
            at = [place + count for place, count in zip(at, counts, strict=True)]
    return error


def _drafted(
    text: Tensor, at: list[int], width: int, counts: tuple[int, ...], vocab: int
) -> TokenTree:
    """Chains of which the first `counts` nodes are of the text, behind `at` tokens of each row."""
    place = torch.tensor(at, device=text.device)[:, None] + torch.arange(width, device=text.device)
    tokens = text.gather(1, place.clamp(max=text.shape[1] - 1))
    astray = torch.arange(width) >= torch.tensor(counts)[:, None]
    return TokenTree.chain(torch.where(astray.to(text.device), (tokens + 1) % vocab, tokens))


def _distance(logits: Tensor, own: Tensor, at: list[int], counts: tuple[int, ...]) -> float:
    """How far the logits of committed nodes are from those of the whole text, relative to these."""
    return max(
        float((logits[row, :count] - own[row, at[row] : at[row] + count]).abs().max())
        for row, count in enumerate(counts)
    ) / float(own.abs().max())
