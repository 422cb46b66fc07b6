"""What a model stores per layer, what its attention sees, and what a configuration says about its
context and logits. Does not know transformers."""

from __future__ import annotations

import logging
from collections.abc import Container
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftproof.cache.kv_layer import LayerShape
from draftproof.cache.state_shape import StateShape

log = logging.getLogger("draftproof")

UNLIMITED = 1 << 30
"""The context of a model whose configuration names no limit."""
STATES = ("linear_attention", "conv")
"""Kinds of layers that keep a state and see no mask."""
FAILURES = (TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError)
"""Exceptions of a forward pass that does not support its arguments."""


class Layout(NamedTuple):
    """What a model stores.

    states: recurrent states of each layer. windows: kind of attention → window or chunk.
    dtype: of keys and values. cache_name: the name of the cache argument of its forward.
    """

    shapes: list[LayerShape]
    states: list[tuple[StateShape, ...]]
    windows: dict[str, int | None]
    vocab: int
    dtype: torch.dtype
    cache_name: str = "past_key_values"


class LogitScaling(NamedTuple):
    """How families change the logits of their head: Cohere multiplies, Granite divides, and Gemma 2
    caps them."""

    factor: float | None
    divisor: float | None
    cap: float | None

    @classmethod
    def of(cls, config: object) -> LogitScaling:
        names = ("logit_scale", "logits_scaling", "final_logit_softcapping")
        factor, divisor, cap = (getattr(config, name, None) for name in names)
        multiplies = isinstance(factor, float) and factor != 1
        divides = isinstance(divisor, (int, float)) and divisor != 1
        return cls(factor if multiplies else None, divisor if divides else None, cap or None)

    def apply(self, logits: Tensor) -> Tensor:
        """Return the logits [..., V] to sample from."""
        logits = logits if self.factor is None else logits * self.factor
        logits = logits if self.divisor is None else logits / self.divisor
        return logits if self.cap is None else (logits / self.cap).tanh() * self.cap


UNSCALED = LogitScaling(None, None, None)
"""Most families sample from the logits of their head as they are."""


def context_of(config: Any) -> int:
    """The number of positions that the model reads alike in any batch. Warns about limits that a
    user may not expect: LongRoPE and dynamic NTK rescale all positions once one lies beyond, Llama
    4 scales queries by their slot, Doge drops keys beyond its window depending on later tokens, and
    Moshi drops them only with its cache."""
    rope = getattr(config, "rope_parameters", None) or {}
    names = ("max_target_positions", "max_decoder_position_embeddings", "max_position_embeddings")
    context = next(filter(None, (getattr(config, name, None) for name in names)), UNLIMITED)
    limits = []
    for settings in (rope, *(kind for kind in rope.values() if isinstance(kind, dict))):
        if settings.get("rope_type") in ("dynamic", "longrope"):
            limit = settings.get("original_max_position_embeddings") or context
            limits.append((limit, f"positions are rescaled ({settings['rope_type']} rope)"))
    if getattr(config, "attn_temperature_tuning", False):
        limits.append((int(config.floor_scale) - 1, "queries are scaled (floor_scale)"))
    window = "sliding_window" if config.model_type == "moshi" else "keep_window_size"
    if (limit := getattr(config, window, None)) is not None:
        limits.append((limit, f"keys are dropped ({window})"))
    for limit, why in limits:
        context = min(context, limit)
        if context < UNLIMITED:
            log.warning("note: %s %s in texts beyond %d tokens, which cannot be exact; texts end "
                        "there", config.model_type, why, context)
    return context


def cache_argument(parameters: Container[str]) -> str:
    """The name of a forward's argument for the cache. transformers 5.24 renamed it to `cache`."""
    names = ("cache_params", "past_key_values", "cache")
    return next((name for name in names if name in parameters), "past_key_values")
