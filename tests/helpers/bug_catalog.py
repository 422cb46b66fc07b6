"""What known bugs of speculative samplers do to the next token, as arrays of probabilities."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Mistake = Callable[[Array, Array, Array, int], tuple[Array, Array]]
"""(p, q, q before warping, place in the round) -> probability of each token as an accepted draft,
and as a replacement."""


def drawn(dice: np.random.Generator, odds: Array) -> int:
    """A token drawn with these weights."""
    place = np.searchsorted(odds.cumsum(), dice.random() * odds.sum(), side="right")
    return min(int(place), len(odds) - 1)


def normal(weights: Array) -> Array:
    """As a law."""
    normal: Array = weights / weights.sum()
    return normal


def _weighed(drawn: Array, ratio: Array, rest: Array) -> tuple[Array, Array]:
    accepted = drawn * np.clip(np.nan_to_num(ratio, nan=0.0), 0, 1)
    return accepted, max(0.0, 1 - float(accepted.sum())) * rest


def _rest(p: Array, q: Array) -> Array:
    left = np.maximum(p - q, 0)
    return normal(left) if left.sum() > 0 else p


def _peak(q: Array) -> Array:
    peak: Array = np.eye(1, len(q), int(q.argmax()))[0]
    return peak


def _soft(p: Array, q: Array) -> Array:
    return normal(np.exp(np.maximum(p - q, 0)))


RIGHT: Mistake = lambda p, q, raw, place: _weighed(q, p / q, _rest(p, q))      # noqa: E731
"""No mistake: rejection sampling (Leviathan et al., 2211.17192)."""
MISTAKES: dict[str, Mistake] = {
    "drafts picked by argmax, weighed as if drawn from the draft's law (transformers' Gemma-4)":
        lambda p, q, raw, place: _weighed(_peak(q), p / q, _rest(p, q)),
    "drafts picked by argmax, weighed with the draft's law before warping":
        lambda p, q, raw, place: _weighed(_peak(q), p / raw, _rest(p, raw)),
    "drafts drawn from the warped law, weighed with the raw one (transformers #47932)":
        lambda p, q, raw, place: _weighed(q, p / raw, _rest(p, raw)),
    "drafts drawn from the raw law, weighed with the warped one":
        lambda p, q, raw, place: _weighed(raw, p / q, _rest(p, q)),
    "replacement drawn from the target's law instead of the residual":
        lambda p, q, raw, place: _weighed(q, p / q, p),
    "argmax drafts, replacement drawn from the target's law":
        lambda p, q, raw, place: _weighed(_peak(q), p, p),
    "residual put through a softmax (transformers #28508)":
        lambda p, q, raw, place: _weighed(q, p / q, _soft(p, q)),
    "acceptance ratio upside down": lambda p, q, raw, place: _weighed(q, q / p, _rest(p, q)),
    "every draft accepted": lambda p, q, raw, place: _weighed(q, np.ones_like(p), p),
    "every argmax draft accepted": lambda p, q, raw, place: _weighed(_peak(q), np.ones_like(p), p),
    "first draft of a round accepted without a test":
        lambda p, q, raw, place: _weighed(q, p / q if place else np.ones_like(p), _rest(p, q)),
    **{
        f"lossy acceptance: ensemble weight {weight}":
            lambda p, q, raw, place, w=weight: _weighed(q, 1 - w + w * p / q, _rest(p, q))
        for weight in (0.9, 0.75, 0.5, 0.25)
    },
}  # fmt: skip
"""What each bug makes of the next token."""
