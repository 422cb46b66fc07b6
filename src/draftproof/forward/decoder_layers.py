"""The parts of a decoder layer, of whichever family: what is called, with which weights.

The families differ in which parts they have: norms over heads and of what layers add, rotation of
part of a head or none, windows, several rotary bases, multipliers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftproof.native.structures import Native
from draftproof.weights.packed_linear import JointLinear, PackedSlice
from draftproof.weights.token_table import TokenTable

Linear = Callable[[Tensor], Tensor]


class AttentionKind(NamedTuple):
    """How the heads of a layer attend.

    rope: whose rotary base they use, if there are several. rotary_dim: how many numbers of a head
    are rotated. window: how many positions back they see, if not all.
    """

    rope: str | None
    rotary_dim: int
    window: int | None


class DecoderLayer(NamedTuple):
    """One layer: what it calls, and its weights as our kernels read them."""

    input_norm: Linear
    qkv: Linear
    head_norm: Linear | None        # over each head of queries and keys
    output: Linear
    post_attention: Linear | None   # a norm of what attention adds
    mlp_norm: Linear
    gate_up: Linear
    down: Linear
    post_mlp: Linear | None         # a norm of what the MLP adds
    heads: int
    key_heads: int
    inner_size: int
    scale: float
    kind: int                       # index of its AttentionKind
    # [.] float32: input, mlp, query, key, post-attention, post-mlp norms
    weights: tuple[Tensor | None, ...]
    # qkv, output, gate_up and down, where our kernels read them
    natives: tuple[Native | None, ...]


Angles = Callable[[AttentionKind, Tensor, torch.dtype], tuple[Tensor, Tensor]]
"""Cosines and sines [B, W, rotary_dim] of positions [B, W]."""


@dataclass(frozen=True)
class Decoder:
    """A decoder as our forward reads it, whatever it was built from.

    Attributes:
        context: Positions the model knows.
        embed_scale: What embeddings are multiplied by.
        residual_scale: What each layer's contribution is multiplied by.
        gelu: Gates are GELU by tanh, or else SiLU.
        norm: The final norm; `norm_weight` is its weight, [H] float32.
        kinds: The kinds of attention that layers refer to.
        head: Logits of hidden states after the final norm; `native_head` as our kernels read it.
        dtypes: Of embeddings and norms; our kernels want bfloat16 alone.
    """

    dtype: torch.dtype
    device: torch.device
    hidden_size: int
    head_dim: int
    context: int
    embed: TokenTable
    embed_scale: float
    residual_scale: float
    gelu: bool
    norm: Linear
    norm_weight: Tensor
    epsilon: float
    kinds: list[AttentionKind]
    layers: Sequence[DecoderLayer]
    head: Linear
    native_head: Native | None
    angles: Angles
    dtypes: set[torch.dtype]


def native_of(module: nn.Module) -> Native | None:
    """A layer, or the whole it is a part of, as our kernels read it."""
    linear = module.whole if isinstance(module, PackedSlice) else module
    return linear.native if isinstance(linear, JointLinear) else None


def bare(module: nn.Module) -> Linear:
    """A module's forward without the call protocol around it."""
    if type(module) is nn.Linear and "forward" not in module.__dict__:     # some quantisers wrap it
        weight, bias = module.weight, module.bias
        return lambda inputs: F.linear(inputs, weight, bias)
    forward: Linear = module.forward
    return forward


def rms_norm(weight: Tensor, dtype: torch.dtype, size: int, epsilon: float) -> Linear:
    """x / sqrt(mean x² + epsilon) * weight, in `dtype`, in few operators: sqrt(|x|² + n epsilon) is
    a hypotenuse."""
    if weight.device.type != "cpu" and weight.dim() == 1:
        there = weight.to(dtype)
        return lambda inputs: F.rms_norm(inputs, (size,), there, epsilon)       # one kernel there
    least = torch.tensor([(epsilon * size) ** 0.5], dtype=torch.float32, device=weight.device)
    factor = weight * size**0.5

    def normed(inputs: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(inputs, dim=-1, keepdim=True, dtype=torch.float32)
        return (inputs / length.hypot_(least) * factor).to(dtype)

    return normed
