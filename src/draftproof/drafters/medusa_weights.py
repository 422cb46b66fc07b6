"""The layers of Medusa heads: of one as it is trained, and of all side by side as decoding reads them.

Knows layers and the target's tables; nothing of trees. Shape letters beyond the usual: K heads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftproof.drafters.base import Vocabulary, over_vocabulary
from draftproof.model.packed_linear import PackedLinear, can_pack
from draftproof.native.kernels import Kernels, kernels
from draftproof.native.structures import LANES, Heads, Linear, Pairs


class Head(nn.Module):
    """x + SiLU(A x + b), several times, then a projection: p = softmax(W (SiLU(A h + b) + h)), section 2.1.1."""

    def __init__(self, size: int, layers: int, bias: bool, rows: int | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_zero_linear(size, size, bias) for _ in range(layers))
        self.proj = _zero_linear(size, rows, False) if rows is not None else None

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = hidden + F.silu(block(hidden))
        return hidden


class _Own(NamedTuple):
    """The layers of all heads as our kernels read them.

    blocks: [K * layers] the residual blocks of the first head, then those of the second. packed: whose weights these are.
    """

    layers: int
    blocks: ctypes.Array[Linear]
    packed: list[PackedLinear]
    projections: list[PackedLinear] | None

    def with_pairs(self, pairs: Sequence[Tensor], weight: float, vocabulary: Vocabulary) -> Heads | None:
        """All that drafting reads as one, if the projection is the target's. weight: what gains are multiplied with."""
        shared = vocabulary.native.head if vocabulary.native is not None else None
        if self.projections is not None or shared is None or shared.outputs != vocabulary.vocab_size:
            return None
        table = Pairs(*(part.data_ptr() for part in pairs))
        return Heads(ctypes.addressof(self.blocks), shared, table, self.layers, weight)

    def logits(self, found: Kernels, hidden: Tensor, heads: int, vocabulary: Vocabulary) -> Tensor:
        """[heads, B, rows] as `Weights.logits`."""
        states = found.residual_blocks(self.blocks, heads, self.layers, hidden)
        if self.projections is not None:
            return torch.stack([own(state) for state, own in zip(states, self.projections, strict=False)])
        shared = vocabulary.native.head if vocabulary.native is not None else None
        return found.multiply(shared, states) if shared is not None else vocabulary.unembed(states)


class Weights(NamedTuple):
    """The weights of all heads side by side: one product per layer serves them all.

    own: where our kernels read them, instead.
    """

    blocks: list[tuple[Tensor, Tensor]]             # per layer: [K, H, H] to multiply with, [K, 1, H] to add
    projection: Tensor | None                       # [K, H, rows]
    token_map: Tensor | None
    own: _Own | None

    @classmethod
    def of(cls, heads: Sequence[Head], token_map: Tensor | None, vocabulary: Vocabulary) -> Weights:
        """Copies in the target's dtype and on its device. token_map: the id of each row of projections that lack some."""
        token_map = token_map.to(vocabulary.device) if token_map is not None else None
        own = _packed(heads, vocabulary)
        if own is not None:
            return cls([], None, token_map, own)

        def stack(tensors: Sequence[Tensor]) -> Tensor:
            return torch.stack([tensor.detach().to(vocabulary.device, vocabulary.dtype) for tensor in tensors])

        blocks = []
        for layer in range(len(heads[0].blocks)):
            linears = [cast(nn.Linear, one.blocks[layer]) for one in heads]
            bias = [torch.zeros(linear.out_features) if linear.bias is None else linear.bias for linear in linears]
            blocks.append((stack([linear.weight for linear in linears]).transpose(1, 2), stack(bias)[:, None]))
        tables = [one.proj.weight[: vocabulary.vocab_size] for one in heads if one.proj is not None]
        return cls(blocks, stack(tables).transpose(1, 2) if tables else None, token_map, None)

    def logits(self, hidden: Tensor, heads: int, vocabulary: Vocabulary) -> Tensor:
        """[B, K, V] what the first `heads` heads say of hidden states [B, H]."""
        found = kernels()
        if self.own is not None and found is not None:
            logits = self.own.logits(found, hidden, heads, vocabulary)
            return over_vocabulary(logits, vocabulary.vocab_size, self.token_map).transpose(0, 1)
        states = hidden.expand(heads, -1, -1)                                               # [K, B, H]
        for weight, bias in self.blocks:
            states = states + F.silu(torch.baddbmm(bias[:heads], states, weight[:heads]))
        own = self.projection                                   # oneDNN takes ten times as long for [B, K, H] transposed
        logits = vocabulary.unembed(states) if own is None else torch.bmm(states, own[:heads])              # [K, B, rows]
        return over_vocabulary(logits, vocabulary.vocab_size, self.token_map).transpose(0, 1)


def _packed(heads: Sequence[Head], vocabulary: Vocabulary) -> _Own | None:
    """The layers of all heads as our kernels read them, where they do."""
    if vocabulary.native is None or vocabulary.hidden_size % LANES or not can_pack():
        return None

    def packed(layer: nn.Module) -> PackedLinear:
        return PackedLinear(_copy(cast(nn.Linear, layer), vocabulary))

    blocks = [packed(block) for one in heads for block in one.blocks]
    projections = [packed(one.proj) for one in heads if one.proj is not None]
    natives = [layer.native for layer in (*blocks, *projections) if layer.native is not None]
    if len(natives) < len(blocks) + len(projections):
        return None
    listed = (Linear * len(blocks))(*natives[: len(blocks)])
    return _Own(len(blocks) // len(heads), listed, blocks, projections or None)


def _copy(linear: nn.Linear, vocabulary: Vocabulary) -> nn.Linear:
    """A layer in the target's dtype and on its device, without outputs for tokens that the target lacks."""
    rows = vocabulary.vocab_size
    with torch.device("meta"):
        made = nn.Linear(linear.in_features, min(rows, linear.out_features), linear.bias is not None)
    for name, value in linear.named_parameters():
        setattr(made, name, nn.Parameter(value.detach()[:rows].to(vocabulary.device, vocabulary.dtype), requires_grad=False))
    return made


def _zero_linear(inputs: int, outputs: int, bias: bool) -> nn.Linear:
    linear = nn.Linear(inputs, outputs, bias=bias)
    for parameter in linear.parameters():
        nn.init.zeros_(parameter)
    return linear
