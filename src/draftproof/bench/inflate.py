"""A small model made as heavy as a real one, its function unchanged: blocks that read their weights and add nothing.

Speculation pays where reading the weights is what takes the time. A small trained pair has real acceptance but no
weight; with this it has both. Every figure obtained so must carry the word "inflated".
"""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from torch import Tensor, nn

from draftproof.errors import BadInput, UnsupportedModel
from draftproof.model.loading import PreTrainedModel, load_model

FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Whose blocks add nothing where their norms are zero, and whose MLPs are three layers of a width of their own."""
LAYERS, FEWEST = 24, 4
"""Layers the heavy model should have, as real ones of half a billion to two billion do; blocks added at least."""
ROUND = 64
"""Even widths, and all large ones, are multiples of this, as quantised formats and kernels like them."""
SPREAD = 0.02
"""Standard deviation of the weights that are read for nothing."""
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def parameters(text: str) -> int:
    """A number of parameters from "0.5B", "350M" or "1_000_000"."""
    found = re.fullmatch(r"([0-9][0-9_]*\.?[0-9]*)\s*([kmb]?)", text.strip().lower())
    if not found:
        raise BadInput(f"inflate was {text!r}; give a number of parameters such as 0.5B or 350M")
    return round(float(found[1]) * {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}[found[2]])


def inflated(
    name: str, size: str | None, dtype: str | None = "bfloat16", device: str | None = "cpu", *, even: bool = False
) -> PreTrainedModel:
    """The model of this name as transformers loads it, inflated if a size is given."""
    wanted = parameters(size) if size is not None else None
    model = load_model(name, dtype, device)
    if wanted is not None:
        inflate(model, wanted, even=even)
    return model


def inflate(model: PreTrainedModel, size: int, *, even: bool = False) -> None:
    """Append blocks to a Llama-like model, in place, until it has about `size` parameters.

    Their attention and their MLP are read and computed as any other, but on zeros, which is what their norms give: what
    goes in comes out, to the bit. Hidden states keep their numbers, so draft heads find what they tap. The width of the
    model cannot grow without changing its function, so the MLPs of the new blocks are as wide as it takes.

    even: the model's own MLPs get that width too, from columns that add nothing. The function is then the same up to the
    order in which sums are rounded, and the usual config describes the model: it can be saved and read by anyone.
    """
    if type(model).__name__ not in FAMILIES:
        raise UnsupportedModel(f"{type(model).__name__} cannot be inflated; only {', '.join(FAMILIES)} can")
    present, layers = _count(model), model.model.layers
    if size <= present:
        raise BadInput(f"the model was to be inflated to {size:,} parameters and has {present:,}; ask for more")
    last, config = layers[-1], model.config
    count, width = (_even if even else _blocks)(last, size - present, len(layers))
    kinds = getattr(config, "layer_types", None)
    if even:
        config.intermediate_size = width
        for index, layer in enumerate(layers):
            _widen(layer.mlp, width, index)
    for _ in range(count):
        layers.append(_block(last, config, len(layers), width))
    config.num_hidden_layers = len(layers)
    if kinds is not None:
        config.layer_types = [*kinds, *[kinds[-1]] * count]


def _blocks(last: Any, extra: int, present: int) -> tuple[int, int]:
    """How many blocks, and the width of their MLPs, for `extra` parameters."""
    around = _count(last) - _count(last.mlp)
    hidden, real = last.mlp.down_proj.out_features, last.mlp.down_proj.in_features
    count = max(FEWEST, LAYERS - present)
    while count > 1 and extra / count < around + 3 * hidden * real:             # never thinner than the model's own
        count -= 1
    width = (extra / count - around) / (3 * hidden)
    return count, _rounded(width) if width > 16 * ROUND else max(1, round(width))


def _rounded(width: float) -> int:
    return max(1, round(width / ROUND)) * ROUND


def _even(last: Any, extra: int, present: int) -> tuple[int, int]:
    """The same, if the MLPs that are there get that width as well."""
    around = _count(last) - _count(last.mlp)
    hidden, real = last.mlp.down_proj.out_features, last.mlp.down_proj.in_features
    count = max(FEWEST, LAYERS - present)
    width = ((extra - count * around) / (3 * hidden) + present * real) / (count + present)
    if width < real:
        raise BadInput(f"{extra:,} more parameters are too few for {count} even blocks of a width of {real}; ask for more")
    return count, _rounded(width)


def _widen(mlp: Any, width: int, index: int) -> None:
    """The same function of more columns: the new ones are weighed by zero."""
    before = {name: getattr(mlp, name) for name in _PROJECTIONS}
    _resize(mlp, width, index)
    mlp.down_proj.weight.zero_()
    for name, old in before.items():
        new = getattr(mlp, name)
        new.weight[: old.out_features, : old.in_features] = old.weight.detach()
        if old.bias is not None:
            new.bias[: old.out_features] = old.bias.detach()


def _block(last: Any, config: Any, index: int, width: int) -> nn.Module:
    """A layer like `last` with an MLP of `width`, which adds nothing: its norms give zeros, and on these it computes."""
    block: Any = copy.deepcopy(last, {id(config): config})
    block.self_attn.layer_idx = index
    _resize(block.mlp, width, index)
    attention = block.self_attn
    silent = [block.input_layernorm.weight, block.post_attention_layernorm.weight, attention.v_proj.bias, attention.o_proj.bias]
    for tensor in silent:
        if tensor is not None:
            tensor.requires_grad_(False).zero_()
    made: nn.Module = block.eval()
    return made


def _resize(mlp: Any, width: int, index: int) -> None:
    """Projections of this width, unlike those of any other layer, so that nobody can store or read two of them as one."""
    hidden, mlp.intermediate_size = mlp.down_proj.out_features, width
    for place, name in enumerate(_PROJECTIONS):
        inputs, outputs = (width, hidden) if name == "down_proj" else (hidden, width)
        setattr(mlp, name, _linear(getattr(mlp, name), inputs, outputs, len(_PROJECTIONS) * index + place))


def _linear(like: nn.Linear, inputs: int, outputs: int, seed: int) -> nn.Linear:
    """Small random weights, no bias to speak of."""
    weight = like.weight
    with torch.device("meta"):
        made = nn.Linear(inputs, outputs, bias=like.bias is not None, dtype=weight.dtype)
    made = made.to_empty(device=weight.device).requires_grad_(False)
    pool = torch.randn(1 << 20, generator=torch.Generator().manual_seed(seed)).mul_(SPREAD).to(weight.device, weight.dtype)
    for piece in torch.split(made.weight.view(-1), len(pool)):
        piece.copy_(pool[: len(piece)])
    if made.bias is not None:
        made.bias.zero_()
    return made


def _count(module: nn.Module) -> int:
    tensors: list[Tensor] = list(module.parameters())
    return sum(tensor.numel() for tensor in tensors)
