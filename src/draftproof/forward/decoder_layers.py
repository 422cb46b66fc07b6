"""The parts of a decoder layer of any family: its modules and their weights.

Not every family has all parts: norms over heads and of a layer's output, rotation of all, part or
none of a head, windows, several rotary bases, multipliers.
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

    rope: name of their rotary base, if there are several. rotary_dim: how many dimensions of a head
    are rotated. window: how many positions back they see; None: all.
    """

    rope: str | None
    rotary_dim: int
    window: int | None


class DecoderLayer(NamedTuple):
    """One layer: its modules, and its weights in the form our kernels read."""

    input_norm: Linear
    qkv: Linear
    head_norm: Linear | None        # over each head of queries and keys
    output: Linear
    post_attention: Linear | None   # norm of the attention's output
    mlp_norm: Linear
    gate_up: Linear
    down: Linear
    post_mlp: Linear | None         # norm of the MLP's output
    heads: int
    key_heads: int
    inner_size: int
    scale: float
    kind: int                       # index of its AttentionKind
    # [.] float32: input, mlp, query, key, post-attention, post-mlp norms
    weights: tuple[Tensor | None, ...]
    # qkv, output, gate_up and down; None where our kernels cannot read them
    natives: tuple[Native | None, ...]


Angles = Callable[[AttentionKind, Tensor, torch.dtype], tuple[Tensor, Tensor]]
"""Cosines and sines [B, W, rotary_dim] of positions [B, W]."""


@dataclass(frozen=True)
class Decoder:
    """A decoder in the form our forward reads, whatever it was built from.

    Attributes:
        context: The number of positions that the model supports.
        embed_scale: The factor of the embeddings.
        residual_scale: The factor of each layer's contribution.
        gelu: Whether gates are GELU (tanh approximation) rather than SiLU.
        norm: The final norm; `norm_weight` is its weight, [H] float32.
        kinds: The kinds of attention, to which layers refer by index.
        head: Computes logits of normed states; `native_head` is its form for our kernels.
        dtypes: The dtypes of embeddings and norms; our kernels need all to be bfloat16.
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
    """A layer, or the joint layer it is a slice of, in the form our kernels read."""
    linear = module.whole if isinstance(module, PackedSlice) else module
    return linear.native if isinstance(linear, JointLinear) else None


def bare(module: nn.Module) -> Linear:
    """A module's forward, without the overhead of calling the module."""
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
