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
from draftproof.target.lean import FAMILIES
from draftproof.target.loading import PreTrainedModel

LAYERS, FEWEST = 24, 4
"""Layers the heavy model should have, as real ones of half a billion to two billion do; blocks added at least."""
SPREAD = 0.02
"""Standard deviation of the weights that are read for nothing."""


def parameters(text: str) -> int:
    """A number of parameters from "0.5B", "350M" or "1_000_000"."""
    found = re.fullmatch(r"([0-9][0-9_]*\.?[0-9]*)\s*([kmb]?)", text.strip().lower())
    if not found:
        raise BadInput(f"inflate was {text!r}; give a number of parameters such as 0.5B or 350M")
    return round(float(found[1]) * {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}[found[2]])


def inflate(model: PreTrainedModel, size: int) -> None:
    """Append blocks to a Llama-like model, in place, until it has about `size` parameters.

    Their attention and their MLP are read and computed as any other, but end in projections that are zero: what goes
    in comes out, to the bit. Hidden states keep their numbers, so draft heads find what they tap. The width of the
    model cannot grow without changing its function, so the MLPs of the new blocks are as wide as it takes.
    """
    if type(model).__name__ not in FAMILIES:
        raise UnsupportedModel(f"{type(model).__name__} cannot be inflated; only {', '.join(FAMILIES)} can")
    present, layers = _count(model), model.model.layers
    if size <= present:
        raise BadInput(f"the model was to be inflated to {size:,} parameters and has {present:,}; ask for more")
    last = layers[-1]
    count, width = _blocks(last, size - present, len(layers))
    config = model.config
    kinds = getattr(config, "layer_types", None)
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
    return count, max(1, round((extra / count - around) / (3 * hidden)))


def _block(last: Any, config: Any, index: int, width: int) -> nn.Module:
    """A layer like `last` with an MLP of `width`, which adds nothing."""
    block: Any = copy.deepcopy(last, {id(config): config})
    block.self_attn.layer_idx = index
    _silence(block.self_attn.o_proj)
    mlp = block.mlp
    hidden = mlp.down_proj.out_features
    mlp.intermediate_size = width
    for name, inputs, outputs in (("gate_proj", hidden, width), ("up_proj", hidden, width), ("down_proj", width, hidden)):
        setattr(mlp, name, _linear(getattr(mlp, name), inputs, outputs))
    _silence(mlp.down_proj)
    made: nn.Module = block.eval()
    return made


def _linear(like: nn.Linear, inputs: int, outputs: int) -> nn.Linear:
    """Small random weights, no bias to speak of."""
    weight = like.weight
    with torch.device("meta"):
        made = nn.Linear(inputs, outputs, bias=like.bias is not None, dtype=weight.dtype)
    made = made.to_empty(device=weight.device).requires_grad_(False)
    pool = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).mul_(SPREAD).to(weight.device, weight.dtype)
    for piece in torch.split(made.weight.view(-1), len(pool)):
        piece.copy_(pool[: len(piece)])
    if made.bias is not None:
        made.bias.zero_()
    return made


def _silence(linear: nn.Linear) -> None:
    """Zeros that are written, so that they lie in memory of their own and are read like any others."""
    linear.requires_grad_(False)
    for tensor in (linear.weight, linear.bias):
        if tensor is not None:
            tensor.fill_(0.0)


def _count(module: nn.Module) -> int:
    tensors: list[Tensor] = list(module.parameters())
    return sum(tensor.numel() for tensor in tensors)
