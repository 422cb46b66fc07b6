"""What a model stores per layer and what its attention sees, learnt from one forward; models that
cannot be served are refused, in a sentence that names the remedy."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Container
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import (
    DummyLayer,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
    get_layer_types_and_kwargs,
)

from draftproof.errors import BrokenModel, UnsupportedModel, first_line
from draftproof.model.kv_layer import LayerShape
from draftproof.model.state_layer import StateShape

log = logging.getLogger("draftproof")

UNLIMITED = 1 << 30
"""The context of a model whose configuration names no limit."""
STATES = ("linear_attention", "conv")
"""Kinds of layers that keep a state and see no mask."""
LAYERS = (
    DummyLayer, DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer, LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer,
)  # fmt: skip
"""Cache layers of transformers that are understood here."""
FAILURES = (TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError)
"""What a forward may raise that does not understand what it is given."""


class Layout(NamedTuple):
    """What a model stores.

    states: of each layer, beside keys and values. windows: kind of attention → window or chunk.
    dtype: of keys and values. cache_name: what its forward calls the cache.
    """

    shapes: list[LayerShape]
    states: list[tuple[StateShape, ...]]
    windows: dict[str, int | None]
    vocab: int
    dtype: torch.dtype
    cache_name: str = "past_key_values"


class LogitScaling(NamedTuple):
    """What families do to the logits of their head: Cohere multiplies, Granite divides, Gemma 2
    caps them."""

    factor: float | None
    divisor: float | None
    cap: float | None

    @classmethod
    def of(cls, config: Any) -> LogitScaling:
        names = ("logit_scale", "logits_scaling", "final_logit_softcapping")
        factor, divisor, cap = (getattr(config, name, None) for name in names)
        multiplies = isinstance(factor, float) and factor != 1
        divides = isinstance(divisor, (int, float)) and divisor != 1
        return cls(factor if multiplies else None, divisor if divides else None, cap or None)

    def apply(self, logits: Tensor) -> Tensor:
        """[..., V] the logits that are sampled from."""
        logits = logits if self.factor is None else logits * self.factor
        logits = logits if self.divisor is None else logits / self.divisor
        return logits if self.cap is None else (logits / self.cap).tanh() * self.cap


def context_of(config: Any) -> int:
    """Positions the model reads alike in any batch. A warning tells of limits that a user may not
    expect: LongRoPE and dynamic NTK rescale all positions once one lies beyond, Llama 4 scales
    queries by their slot, Doge drops keys beyond its window by looking at tokens that come later,
    and Moshi with its cache alone."""
    rope = getattr(config, "rope_parameters", None) or {}
    names = ("max_target_positions", "max_decoder_position_embeddings", "max_position_embeddings")
    context = next(filter(None, (getattr(config, name, None) for name in names)), UNLIMITED)
    limits = []
    for one in (rope, *(kind for kind in rope.values() if isinstance(kind, dict))):
        if one.get("rope_type") in ("dynamic", "longrope"):
            limit = one.get("original_max_position_embeddings") or context
            limits.append((limit, f"positions are rescaled ({one['rope_type']} rope)"))
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
    """The argument of a forward that takes the cache. transformers 5.24 renamed it to `cache`."""
    names = ("cache_params", "past_key_values", "cache")
    return next((name for name in names if name in parameters), "past_key_values")


def layout_of(model: PreTrainedModel) -> Layout:
    """What the model stores per layer, learnt from one forward with transformers' own cache."""
    name = type(model).__name__
    writes = getattr(model, "can_generate", bool)()
    if not writes or any(weight.is_meta for weight in model.parameters()):
        raise UnsupportedModel(
            f"{name} writes no text, or has weights that are not in memory (offloaded, or never "
            "loaded); load it whole with AutoModelForCausalLM, on one device"
        )
    attention = getattr(model.config, "_attn_implementation", "eager")
    if attention not in ("sdpa", "eager"):
        raise UnsupportedModel(
            f"{name} uses {attention} attention; load it with attn_implementation='sdpa' or 'eager'"
        )
    parameters = inspect.signature(model.forward).parameters
    cache_name = cache_argument(parameters)
    ids = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    try:
        kinds, _ = get_layer_types_and_kwargs(model.config.get_text_config(decoder=True))
        cache = DynamicCache(config=model.config)
        logits = model(input_ids=ids, use_cache=True, **{cache_name: cache}).logits
        finite = bool(logits.isfinite().any())
    except FAILURES as error:
        raise UnsupportedModel(
            f"{name} does not run as a causal language model with transformers' cache "
            f"({first_line(error)}); load it whole with AutoModelForCausalLM, on one device"
        ) from error
    if not finite:
        raise BrokenModel(
            f"{name} gives no finite logit for a two-token text; its weights are broken, or its "
            "dtype small"
        )
    filled = [one.is_initialized if isinstance(one, DynamicLayer)
              else any(one.has_previous_state.values())
              for one in cache.layers if type(one) in LAYERS and type(one) is not DummyLayer]
    strange = sorted({type(one).__name__ for one in cache.layers if type(one) not in LAYERS})
    if strange or not filled or not all(filled):
        raise UnsupportedModel(
            f"{name} does not keep what it has read in transformers' cache, or in a way that "
            f"cannot be rolled back by tokens ({', '.join(strange) or 'nothing in some layers'}); "
            "run it with transformers' generate"
        )
    windows: dict[str, int | None] = {}
    for kind, layer in zip(kinds, cache.layers, strict=True):
        if isinstance(layer, DynamicLayer):
            windows[kind] = getattr(layer, "sliding_window", None)
    keyed = [layer.keys.dtype for layer in cache.layers if isinstance(layer, DynamicLayer)]
    shapes, states = map(_shape_of, cache.layers), map(_states_of, cache.layers)
    dtype = keyed[0] if keyed else model.dtype
    return Layout([*shapes], [*states], windows, logits.shape[-1], dtype, cache_name)


def _shape_of(layer: Any) -> LayerShape:
    if not isinstance(layer, DynamicLayer) or layer.keys is None:
        return LayerShape(0, 0, 0)
    indexer = getattr(layer, "indexer_keys", None)
    index_dim = indexer.shape[-1] if indexer is not None else 0
    return LayerShape(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3], index_dim)


def _states_of(layer: Any) -> tuple[StateShape, ...]:
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        return ()
    kinds = {"conv": layer.conv_states, "recurrent": layer.recurrent_states}
    return tuple(
        StateShape(kind, index, tuple(state.shape[1:]), state.dtype)
        for kind, states in kinds.items() for index, state in states.items() if state is not None
    )
