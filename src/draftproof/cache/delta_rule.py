"""Gated delta nets by our kernels: the rule, token by token, and the convolutions before it. A
token has the same bits however many are read with it, in a chain or in a tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from draftproof.native.kernels import Kernels, kernels

SILU = ("silu", "swish")
"""Names of the one activation that the kernel of a convolution knows."""


class Recorded(Protocol):
    """A recurrent state after each token of a block, or after each node of a tree."""

    def after(self, row: int, path: Sequence[int], to: Tensor) -> None:
        """Copy a row's state after a path, at least the first node of a tree, to a state [...].

        Args:
            row: The row of the batch.
            path: The nodes of the path; of a block of tokens, its first ones.
            to: Where the state is copied.
        """


class Kept(list[Tensor]):
    """States [B, ...], one after each token."""

    def after(self, row: int, path: Sequence[int], to: Tensor) -> None:
        to.copy_(self[path[-1]][row])


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
        last: The states after the last token of the block.
        parents: [B, L] the token that each goes on from, in a tree; None for a chain.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    rate: Tensor
    before: Tensor
    last: Tensor
    parents: Tensor | None = None

    def after(self, row: int, path: Sequence[int], to: Tensor) -> None:
        library, tokens = kernels(), len(path)
        if library is None or (self.parents is None and tokens == self.key.shape[1]):
            to.copy_(self.last[row])
            return
        if path[-1] == tokens - 1:                      # and so is every node before it
            parts = [part[row, :tokens] for part in self[:5]]
        else:
            parts = [part[row, list(path)] for part in self[:5]]
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
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, before: Tensor,
    parents: Tensor | None = None,
) -> tuple[Tensor, DeltaRule] | None:  # fmt: skip
    """Apply the rule to a block of tokens, as transformers' `torch_recurrent_gated_delta_rule` does
    with normalised keys and queries.

    Args:
        query: [B, L, groups, K].
        key: As `query`.
        value: [B, L, heads, V].
        decay: [B, L, heads].
        rate: [B, L, heads].
        before: [B, heads, K, V], which is not changed.
        parents: [B, L] the token that each goes on from, where they are the nodes of a tree; the
            first goes on from `before`. None: each goes on from the one before it.

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
    parents = None if parents is None else parents.contiguous()
    _advance(library, tuple(value.shape[:2]), parts, before, last, out, parents)
    return out.to(query.dtype), DeltaRule._make([*parts, before, last, parents])


def _advance(
    library: Kernels, size: tuple[int, ...], parts: list[Tensor], before: Tensor, after: Tensor,
    out: Tensor | None, parents: Tensor | None = None,
) -> None:  # fmt: skip
    groups, (heads, inner, depth) = parts[1].shape[-2], before.shape[-3:]
    library("delta_rule", *parts, before, after, out, parents, *size, groups, heads, inner, depth)


def causal_conv(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, tokens: int,
    parents: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """A causal convolution of each channel, for the last tokens alone.

    Args:
        inputs: [B, channels, S] bfloat16.
        weight: [channels, taps].
        bias: [channels], or None.
        activation: silu, or None.
        tokens: How many of the last tokens to compute; outputs before them are 0.
        parents: [B, tokens] the token that each of these follows, where they are the nodes of a
            tree; None: the one before it.

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
    library("causal_conv", inputs, weight, bias, out, parents, *inputs.shape, weight.shape[1],
            tokens, int(activation is not None))
    return out
