"""Learns the layout of a transformers model from one forward with transformers' own cache. Models
that cannot be served are refused, in a sentence that names the remedy."""

from __future__ import annotations

import inspect

import torch
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

from draftproof.cache.kv_layer import LayerShape
from draftproof.cache.layout import FAILURES, Layout, cache_argument
from draftproof.cache.state_shape import StateShape
from draftproof.errors import BrokenModel, UnsupportedModel, first_line

LAYERS = (
    DummyLayer, DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer, LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer,
)  # fmt: skip
"""Cache layers of transformers that are understood here."""


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
    filled = [layer.is_initialized if isinstance(layer, DynamicLayer)
              else any(layer.has_previous_state.values())
              for layer in cache.layers if type(layer) in LAYERS and type(layer) is not DummyLayer]
    strange = sorted({type(layer).__name__ for layer in cache.layers if type(layer) not in LAYERS})
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


def _shape_of(layer: object) -> LayerShape:
    if not isinstance(layer, DynamicLayer) or layer.keys is None:
        return LayerShape(0, 0, 0)
    indexer = getattr(layer, "indexer_keys", None)
    index_dim = indexer.shape[-1] if indexer is not None else 0
    return LayerShape(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3], index_dim)


def _states_of(layer: object) -> tuple[StateShape, ...]:
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        return ()
    kinds = {"conv": layer.conv_states, "recurrent": layer.recurrent_states}
    return tuple(
        StateShape(kind, index, tuple(state.shape[1:]), state.dtype)
        for kind, states in kinds.items() for index, state in states.items() if state is not None
    )
