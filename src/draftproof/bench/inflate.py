"""A small model made as heavy as a large one, its function unchanged.

Speculation pays where reading the weights takes the time. A small trained target and draft have
real acceptance but little weight; inflated, the target has both. Figures of it say "inflated".
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from draftproof.errors import BadInput, UnsupportedModel
from draftproof.model.loading import PreTrainedModel, load_model

FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Models whose layers add nothing where their norms give zero, and whose MLPs are gated."""
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
LAYERS, MIN_ADDED, MULTIPLE, STD = 24, 4, 64, 0.02
"""Layers as in real models of half a billion parameters; layers added at least; what MLP widths are
multiples of, as kernels want; standard deviation of the added weights."""


def parse_size(text: str) -> int:
    """A number of parameters from "0.5B", "350M" or "1_000_000"."""
    found = re.fullmatch(r"([0-9][0-9_]*\.?[0-9]*)\s*([kmb]?)", text.strip().lower())
    if not found:
        raise BadInput(f"inflate was {text!r}; give a number of parameters such as 0.5B or 350M")
    return round(float(found[1]) * {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}[found[2]])


def load_inflated(
    name: str, size: str | None, dtype: str | None = None, device: str | None = None
) -> PreTrainedModel:
    """The model as transformers loads it, inflated if a size such as "0.5B" is given."""
    parameters = parse_size(size) if size is not None else None
    model = load_model(name, dtype, device)
    if parameters is not None:
        inflate(model, parameters)
    return model


@torch.no_grad()
def inflate(model: PreTrainedModel, size: int) -> None:
    """Add layers and widen the MLPs of a Llama-like model, in place, up to about `size` parameters.

    Added layers have random weights that are read and multiplied, but norms of zero, so they add
    zero to the residual stream. The model's own MLPs get the same width by random columns whose
    output weights are zero. The function is the same up to the order in which sums are rounded, and
    the config describes the result, so any program can read it once saved.
    Raises UnsupportedModel for other families, BadInput for a size that is too small.
    """
    if type(model).__name__ not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UnsupportedModel(f"{type(model).__name__} cannot be inflated; only {known} can")
    layers, config, present = model.model.layers, model.config, _count(model)
    last, added = layers[-1], max(MIN_ADDED, LAYERS - len(layers))
    hidden, width = last.mlp.down_proj.out_features, last.mlp.down_proj.in_features
    rest = size - present - added * (_count(last) - _count(last.mlp))
    columns = (rest / (3 * hidden) + len(layers) * width) / (added + len(layers))
    if columns < width:
        raise BadInput(f"the model was to be inflated to {size:,} parameters, too few for {added} "
                       f"layers more than its {present:,} parameters have; ask for more")
    wide = max(width, round(columns / MULTIPLE) * MULTIPLE)
    for index, layer in enumerate(layers):
        _widen(layer.mlp, wide, index)
    for _ in range(added):
        layers.append(_added_layer(last, config, len(layers)))
    config.intermediate_size, config.num_hidden_layers = wide, len(layers)
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = [*config.layer_types, *config.layer_types[-1:] * added]


def _added_layer(last: Any, config: Any, index: int) -> Any:
    """A layer as wide as `last` that adds zero, and whose MLP weights are its own."""
    layer: Any = copy.deepcopy(last, {id(config): config}).requires_grad_(False)
    attention, mlp = layer.self_attn, layer.mlp
    attention.layer_idx = index
    norms = (layer.input_layernorm.weight, layer.post_attention_layernorm.weight)
    for tensor in (*norms, attention.v_proj.bias, attention.o_proj.bias, mlp.down_proj.bias):
        if tensor is not None:
            tensor.zero_()
    for place, name in enumerate(PROJECTIONS):
        weight = getattr(mlp, name).weight
        weight.copy_(_random(weight.shape, 10 * index + place))
    return layer


def _widen(mlp: Any, width: int, index: int) -> None:
    """The same function with `width` columns: the new ones are computed and multiplied by zero."""
    mlp.intermediate_size = width
    for place, name in enumerate(PROJECTIONS):
        linear, down = getattr(mlp, name), name == "down_proj"
        old, (outputs, inputs) = linear.weight, linear.weight.shape
        shape = (outputs, width) if down else (width, inputs)
        new = (torch.zeros(shape) if down else _random(shape, 10 * index + place)).to(old)
        new[:outputs, :inputs] = old
        linear.weight = nn.Parameter(new, requires_grad=False)
        linear.out_features, linear.in_features = new.shape
        if linear.bias is not None and not down:
            bias = nn.functional.pad(linear.bias, (0, width - outputs))
            linear.bias = nn.Parameter(bias, requires_grad=False)


def _random(shape: Sequence[int], seed: int) -> Tensor:
    """Weights unlike any other layer's, so that none is stored or cached as another."""
    pool = torch.randn(1 << 20, generator=torch.Generator().manual_seed(seed)).mul_(STD)
    count = math.prod(shape)
    return pool.repeat(-(-count // len(pool)))[:count].view(*shape)


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
