"""What a model stores per layer and what its attention sees, learnt from one forward; models that
cannot be served are refused, in a sentence that names the remedy."""

from __future__ import annotations

import inspect
import logging
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
KINDS = (
    "full_attention", "sliding_attention", "chunked_attention", "indexed_attention", "hybrid",
    "hybrid_sliding", "moe", "mlp", "dummy", *STATES,
)  # fmt: skip
"""Kinds of layers that are understood here, as transformers names them."""
LAYERS = (
    DummyLayer, DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer, LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer,
)  # fmt: skip
"""Cache layers of transformers that are understood here."""


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

    def as_json(self) -> list[Any]:
        """What `from_json` understands."""
        return [*self[:4], str(self.dtype).removeprefix("torch."), self.cache_name]

    @classmethod
    def from_json(cls, facts: list[Any]) -> Layout:
        shapes, states, windows, vocab, dtype, cache_name = facts
        restored = [
            tuple(StateShape(kind, number, tuple(size), name) for kind, number, size, name in own)
            for own in states
        ]
        shapes = [LayerShape(*one) for one in shapes]
        return cls(shapes, restored, windows, vocab, getattr(torch, dtype), cache_name)


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
    expect: LongRoPE and dynamic NTK rescale all positions once one lies beyond, Doge drops keys
    beyond its window by looking at tokens that come later, and Moshi with its cache alone."""
    rope = getattr(config, "rope_parameters", None) or {}
    names = ("max_target_positions", "max_decoder_position_embeddings", "max_position_embeddings")
    context = next(filter(None, (getattr(config, name, None) for name in names)), UNLIMITED)
    limits = []
    for one in (rope, *(kind for kind in rope.values() if isinstance(kind, dict))):
        if one.get("rope_type") in ("dynamic", "longrope"):
            limit = one.get("original_max_position_embeddings") or context
            limits.append((limit, f"positions are rescaled ({one['rope_type']} rope)"))
    window = "sliding_window" if config.model_type == "moshi" else "keep_window_size"
    if (limit := getattr(config, window, None)) is not None:
        limits.append((limit, f"keys are dropped ({window})"))
    for limit, why in limits:
        context = min(context, limit)
        if context < UNLIMITED:
            log.warning("note: %s %s in texts beyond %d tokens, which cannot be exact; texts end "
                        "there", config.model_type, why, context)
    return context


def layout_of(model: PreTrainedModel) -> Layout:
    """What the model stores per layer, learnt from one forward with transformers' own cache."""
    _check_runnable(model)
    try:
        kinds, _ = get_layer_types_and_kwargs(model.config.get_text_config(decoder=True))
        cache = DynamicCache(config=model.config)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise _not_run(model, error) from error
    unknown = sorted(set(kinds) - set(KINDS))
    if unknown:
        raise UnsupportedModel(
            f"{type(model).__name__} has {', '.join(unknown)} layers, which draftproof does not "
            "know how to read; run it with transformers' generate"
        )
    parameters = inspect.signature(model.forward).parameters
    cache_name = "cache_params" if "cache_params" in parameters else "past_key_values"
    logits = _first_logits(model, cache, cache_name)
    _check_cache(type(model).__name__, cache)
    windows: dict[str, int | None] = {}
    for kind, layer in zip(kinds, cache.layers, strict=True):
        if isinstance(layer, DynamicLayer):
            windows[kind] = getattr(layer, "sliding_window", None)
    keyed = [layer.keys.dtype for layer in cache.layers if isinstance(layer, DynamicLayer)]
    shapes, states = map(_shape_of, cache.layers), map(_states_of, cache.layers)
    dtype = keyed[0] if keyed else model.dtype
    return Layout([*shapes], [*states], windows, logits.shape[-1], dtype, cache_name)


def _check_runnable(model: PreTrainedModel) -> None:
    """Refuse what is no decoder, is not in memory, or attends in a way that takes no mask."""
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise UnsupportedModel(
            f"{name} is an encoder-decoder: draftproof.load and draftproof run write with it, and "
            "nothing else here knows how to"
        )
    absent = next((part for part, weight in model.named_parameters() if weight.is_meta), None)
    if absent is not None:
        raise UnsupportedModel(
            f"{name} has weights that are not in memory ({absent} is on the meta device): it was "
            "offloaded, or never loaded; load it whole, on one device"
        )
    attention = getattr(model.config, "_attn_implementation", "eager")
    if attention not in ("sdpa", "eager"):
        raise UnsupportedModel(
            f"{name} uses {attention} attention; load it with attn_implementation='sdpa' or 'eager'"
        )


def _first_logits(model: PreTrainedModel, cache: DynamicCache, cache_name: str) -> Tensor:
    """[1, 2, V] of a two-token text, read into a cache."""
    name = type(model).__name__
    try:
        ids = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
        out = model(input_ids=ids, use_cache=True, **{cache_name: cache})
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
        raise _not_run(model, error) from error
    logits = getattr(out, "logits", None)
    if logits is None or logits.dim() != 3:
        raise UnsupportedModel(
            f"{name} has no language-model head; load it with AutoModelForCausalLM"
        )
    if not bool(logits.isfinite().any()):
        raise BrokenModel(
            f"{name} gives no finite logit for a two-token text; its weights are broken, or its "
            "dtype small"
        )
    return logits


def _not_run(model: PreTrainedModel, error: Exception) -> UnsupportedModel:
    return UnsupportedModel(
        f"{type(model).__name__} does not run as a causal language model with transformers' cache "
        f"({first_line(error)}); run it as its model card says"
    )


def _check_cache(name: str, cache: DynamicCache) -> None:
    """Refuse a model that keeps something which is not understood, or nothing at all."""
    strange = {type(one).__name__ for one in cache.layers if type(one) not in LAYERS}
    if strange:
        raise UnsupportedModel(
            f"{name} keeps state that cannot be rolled back by tokens ({', '.join(sorted(strange))}"
            "); run it with transformers' generate"
        )
    filled = [one.is_initialized if isinstance(one, DynamicLayer)
              else any(one.has_previous_state.values())
              for one in cache.layers if not isinstance(one, DummyLayer)]
    if not filled or not all(filled):
        raise UnsupportedModel(
            f"{name} does not keep what it has read in transformers' cache; run it with "
            "transformers' generate"
        )


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
        StateShape(kind, index, tuple(state.shape[1:]), str(state.dtype).removeprefix("torch."))
        for kind, states in kinds.items() for index, state in states.items() if state is not None
    )
