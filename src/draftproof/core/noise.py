"""The one random source: a counter-based generator. Knows seeds, positions, roles and tokens; keeps no state.

Every value is a hash of its key, so it does not depend on the order of calls, the batch, the tree or the drafter.
All arithmetic is on int32 with wrap-around, which CPU, CUDA and HPU share. The mixing function is the "lowbias32"
finaliser of C. Wellons (hash prospector), applied between 64 bits of key.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from draftproof.native.kernels import kernels

_GOLDEN = -1640531527            # 0x9E3779B9, as a signed 32-bit number
_SECOND = -2048144789            # 0x85EBCA6B
_MIX_1, _MIX_2 = 0x7FEB352D, -2073254261          # 0x7FEB352D, 0x846CA68B


class Role(IntEnum):
    """What a draw is for. Streams of different roles are independent."""

    TARGET = 0      # the target's own choice; a drafter may share it on purpose (coupling)
    DRAFT = 1       # a draft token drawn from the drafter's own law
    ACCEPT = 2      # whether a drawn token stands
    RECOVER = 3     # the token that replaces a rejected one


def row_keys(seeds: list[int], samples: list[int], device: torch.device | str = "cpu") -> Tensor:
    """[B, 2] int32: one key per row, from its seed (any integer; 64 bits count) and which sample of it this is."""
    words = []
    for seed, sample in zip(seeds, samples, strict=True):
        low, high = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
        words.append([_signed(low), _signed(high ^ (sample * 0x9E3779B9 & 0xFFFFFFFF))])
    return torch.tensor(words, dtype=torch.int32, device=device).view(-1, 2)


def stream(
    keys: Tensor, role: Role, position: Tensor, origin: Tensor | None = None, *, at_hand: bool = False
) -> Tensor:
    """[B, N, 2] int32: a key per draw. `keys` [B, 2] int32, `position` [B, N], `origin` [B, N] (default 0), both int64.

    `origin` tells rounds apart for draws that must be fresh when a position is drafted again. at_hand: by a kernel, if there
    is one.
    """
    found = kernels() if at_hand else None
    if found is not None:
        return found.streams(keys, int(role), position, origin)
    place = position.to(torch.int32)
    start = torch.zeros_like(place) if origin is None else origin.to(torch.int32)
    low = _mix(keys[:, None, 0] ^ (place * _GOLDEN))
    low = _mix(low + _SECOND * (int(role) + 1))
    high = _mix(keys[:, None, 1] + low)
    high = _mix(high ^ (start * _SECOND))
    return torch.stack([_mix(low ^ (high * _GOLDEN)), high], -1)


def uniform(streams: Tensor) -> Tensor:
    """[...] float32 in (0, 1): one number per stream `[..., 2]`."""
    return _unit(_mix(_mix(streams[..., 0]) + streams[..., 1]))


def gumbel(streams: Tensor, vocab: int, *, at_hand: bool = False) -> Tensor:
    """[..., V] float32 standard Gumbel noise, one per token, for streams `[..., 2]`.

    at_hand: by a kernel, if there is one, whose logarithms may differ in their last bits.

    ``argmax(logits + gumbel)`` is a draw from softmax(logits): the exponential race of Daliri, Musco and Suresh
    (arXiv 2408.07978). The uniform is finest near 0, where the winners of the race live: 31 bits.
    """
    found = kernels() if at_hand else None
    if found is not None:
        return found.gumbel(streams, vocab)
    tokens = torch.arange(vocab, dtype=torch.int32, device=streams.device).mul_(_GOLDEN)
    bits = streams[..., :1] ^ tokens
    bits = _mix_(bits).add_(streams[..., 1:])
    wait = _unit(_mix_(bits)).neg_().log1p_().neg_()                     # exponential waiting times
    return wait.log_().neg_()


def _unit(bits: Tensor) -> Tensor:
    """int32 → float32 in (0, 1), 31 bits near zero; never 1, where a token could not win even alone."""
    return bits.bitwise_and(0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)


def _mix(bits: Tensor) -> Tensor:
    return _mix_(bits.clone())


def _mix_(bits: Tensor) -> Tensor:
    """In-place bijection of 32 bits; arithmetic shifts are masked to make them logical."""
    bits ^= (bits >> 16) & 0xFFFF
    bits *= _MIX_1
    bits ^= (bits >> 15) & 0x1FFFF
    bits *= _MIX_2
    bits ^= (bits >> 16) & 0xFFFF
    return bits


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word
