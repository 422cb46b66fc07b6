"""The one random source: a counter-based generator, a function of seed, position, role and token.

Every value is a hash of its key, so it does not depend on the order of calls, the batch, the tree
or the drafter. Hashes use int32 with wrap-around, which CPU, CUDA and HPU share. The mixing
function is the "lowbias32" finaliser of C. Wellons (hash prospector), applied between 64 bits of
key. Logarithms are polynomials of single IEEE operations in a fixed order, so torch's operators and
native/noise.c give the same bits on every processor.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

_GOLDEN = -1640531527            # 0x9E3779B9, as a signed 32-bit number
_SECOND = -2048144789            # 0x85EBCA6B
_LOG = tuple(map(float.fromhex, (
    "0x1.204376p-4", "-0x1.d7a37p-4", "0x1.de4a34p-4", "-0x1.fcba9ep-4", "0x1.23d37ep-3",
    "-0x1.555ca0p-3", "0x1.999d58p-3", "-0x1.fffff8p-3", "0x1.555554p-2",
)))  # fmt: skip
"""Cephes' logf: (log(1 + m) - m + m^2 / 2) / m^3, from the highest power on."""
_LN2_HIGH, _LN2_LOW = float.fromhex("0x1.63p-1"), float.fromhex("-0x1.bd0106p-13")
_SQRT_HALF = 0x3F3504F3         # the bits of sqrt(1/2)
_MIX_1, _MIX_2 = 0x7FEB352D, -2073254261          # 0x7FEB352D, 0x846CA68B


class Role(IntEnum):
    """What a draw is for. Streams of different roles are independent."""

    TARGET = 0      # the target's own choice; a drafter may share it on purpose (coupling)
    DRAFT = 1       # a draft token drawn from the drafter's distribution
    ACCEPT = 2      # whether a drawn token is accepted
    RECOVER = 3     # the token that replaces a rejected one


def row_keys(seeds: list[int], samples: list[int], device: torch.device | str = "cpu") -> Tensor:
    """[B, 2] int32: a key per row, of its seed (any integer; 64 bits count) and sample number."""
    words = []
    for seed, sample in zip(seeds, samples, strict=True):
        low, high = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
        words.append([_signed(low), _signed(high ^ (sample * 0x9E3779B9 & 0xFFFFFFFF))])
    return torch.tensor(words, dtype=torch.int32, device=device).view(-1, 2)


def stream(keys: Tensor, role: Role, position: Tensor, origin: Tensor | None = None) -> Tensor:
    """[B, N, 2] int32: a key per draw, of `keys` [B, 2] int32 and `position` [B, N] int64.

    `origin` [B, N] identifies the round, for draws that must be fresh when a position is drafted
    again. """
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


def gumbel(streams: Tensor, vocab: int) -> Tensor:
    """[..., V] float32 standard Gumbel noise, one per token, for streams `[..., 2]`.

    ``argmax(logits + gumbel)`` is a draw from softmax(logits): the exponential race of Daliri,
    Musco and Suresh (arXiv 2408.07978). The uniform is finest near 0, where winners are: 31 bits.
    """
    tokens = torch.arange(vocab, dtype=torch.int32, device=streams.device).mul_(_GOLDEN)
    bits = streams[..., :1] ^ tokens
    bits = _mix_(bits).add_(streams[..., 1:])
    unit = _unit(_mix_(bits))
    left = 1 - unit
    lost = (1 - left).sub_(unit)                                        # 1 - unit is left + lost
    wait = _log_(left).add_(lost).neg_()                                # exponential waiting times
    return _log_(wait).neg_()


def _log_(x: Tensor) -> Tensor:
    """In-place log of normal positive float32 numbers; each step is rounded separately, as in C."""
    bits = x.view(torch.int32)
    power = (bits - _SQRT_HALF) >> 23
    bits -= power << 23
    m, n = x.sub_(1.0), power.float()
    square, y = m * m, m * _LOG[0]
    for coefficient in _LOG[1:]:
        y.add_(coefficient).mul_(m)
    y.mul_(square).add_(n * _LN2_LOW).sub_(square.mul_(0.5))
    return m.add_(y).add_(n.mul_(_LN2_HIGH))


def _unit(bits: Tensor) -> Tensor:
    """int32 → float32 in (0, 1), 31 bits near zero; never 1, where a token could not win."""
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
