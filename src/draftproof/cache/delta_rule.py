"""Gated delta nets by our kernels: the rule, token by token, and the convolutions before it. A
token has the same bits however many are read with it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from draftproof.native.kernels import Kernels, kernels

SILU = ("silu", "swish")
"""Names of the one activation that the kernel of a convolution knows."""


class Recorded(Protocol):
    """A recurrent state after each token of a block."""

    def after(self, row: int, tokens: int, to: Tensor) -> None:
        """Copy a row's state after `tokens` tokens, at least one, to a state [...]."""


class Kept(list[Tensor]):
    """States [B, ...], one after each token."""

    def after(self, row: int, tokens: int, to: Tensor) -> None:
        to.copy_(self[tokens - 1][row])


class DeltaRule(NamedTuple):
    """The effect of a block of tokens on the state of a gated delta net. The state after any of
    them is computed on demand, so rejected drafts cost no memory.

    Attributes:
        query: [B, L, groups, K], float32 like all fields.
        key: As `query`.
        value: [B, L, heads, V].
        decay: [B, L, heads] the logarithms of the factors by which states decay.
        rate: [B, L, heads] the factors with which values are written.
        before: [B, heads, K, V] the states before the block.
        last: The states after the block.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    rate: Tensor
    before: Tensor
    last: Tensor

    def after(self, row: int, tokens: int, to: Tensor) -> None:
        library = kernels()
        if tokens == self.key.shape[1] or library is None:
            to.copy_(self.last[row])
            return
        parts = [part[row, :tokens] for part in self[:5]]
        _advance(library, (1, tokens), parts, self.before[row], to, None)


def delta_gates(
    time: Tensor, much: Tensor, fall: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Compute the decays and rates of a gated delta net, one number at a time: torch gives the
    numbers in whole vectors and the remaining ones different bits.

    Args:
        time: [B, L, heads] bfloat16, from which the decay is computed.
        much: [B, L, heads] bfloat16, whose sigmoid is the rate.
        fall: [heads] logarithms.
        bias: [heads], added to `time`.

    Returns:
        `decay` and `rate` of `DeltaRule`; None where there is no kernel for this.
    """
    library = kernels()
    if library is None or any(not part.is_cpu or part.dtype != torch.bfloat16
                              for part in (time, much)):
        return None
    decay, rate = torch.empty(2, *time.shape, dtype=torch.float32).unbind()
    library("delta_gates", time, much, fall.float(), bias.float(), decay, rate,
            time.shape[0] * time.shape[1], time.shape[2])
    return decay, rate


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, before: Tensor
) -> tuple[Tensor, DeltaRule] | None:
    """Apply the rule to a block of tokens, as transformers' `torch_recurrent_gated_delta_rule` does
    with normalised keys and queries.

    Args:
        query: [B, L, groups, K].
        key: As `query`.
        value: [B, L, heads, V].
        decay: [B, L, heads].
        rate: [B, L, heads].
        before: [B, heads, K, V], which is not changed.

    Returns:
        [B, L, heads, V] outputs in the dtype of the query, and the block's effect on the state;
        None where there is no kernel for this.
    """
    library = kernels()
    if library is None or not before.is_cpu or before.dtype != torch.float32 or decay.dim() != 3:
        return None
    parts = [part.float().contiguous() for part in (query, key, value, decay, rate)]
    before, out = before.contiguous(), torch.empty(value.shape, dtype=torch.float32)
    last = torch.empty_like(before)
    _advance(library, tuple(value.shape[:2]), parts, before, last, out)
    return out.to(query.dtype), DeltaRule._make([*parts, before, last])


def _advance(
    library: Kernels, size: tuple[int, ...], parts: list[Tensor], before: Tensor, after: Tensor,
    out: Tensor | None,
) -> None:  # fmt: skip
    groups, (heads, inner, depth) = parts[1].shape[-2], before.shape[-3:]
    library("delta_rule", *parts, before, after, out, *size, groups, heads, inner, depth)


def causal_conv(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, tokens: int
) -> Tensor | None:
    """A causal convolution of each channel, for the last tokens alone.

    Args:
        inputs: [B, channels, S] bfloat16.
        weight: [channels, taps].
        bias: [channels], or None.
        activation: silu, or None.
        tokens: How many of the last tokens to compute; outputs before them are 0.

    Returns:
        [B, channels, S]; None where there is no kernel for this.
    """
    library, tensors = kernels(), [inputs, weight, *([] if bias is None else [bias])]
    known = activation is None or activation in SILU
    if library is None or not known or tokens > inputs.shape[2]:
        return None
    if any(not part.is_cpu or part.dtype != torch.bfloat16 for part in tensors):
        return None
    out = torch.zeros_like(inputs, memory_format=torch.contiguous_format)
    library("causal_conv", inputs, weight, bias, out, *inputs.shape, weight.shape[1], tokens,
            int(activation is not None))
    return out
