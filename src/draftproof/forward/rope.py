"""Computes rotary position embeddings from a configuration's rope parameters.

The formulas and their order of rounding follow transformers' modeling_rope_utils, so the
tables have the same bits. Sources: RoFormer (2104.09864), YaRN (2309.00071), LongRoPE (2402.13753),
and Llama 3.1's scaling.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor


class RopeParameters(TypedDict, total=False):
    """A configuration's settings of rotary embeddings; which there are depends on `rope_type`."""

    rope_type: str
    type: str
    rope_theta: float
    partial_rotary_factor: float
    factor: Any                         # a number; for YaRN and LongRoPE it may be null
    attention_factor: float | None
    original_max_position_embeddings: int
    low_freq_factor: float
    high_freq_factor: float
    beta_fast: float | None
    beta_slow: float | None
    mscale: float | None
    mscale_all_dim: float | None
    truncate: bool
    short_factor: list[float]
    long_factor: list[float]


class RotaryTable(NamedTuple):
    """The frequencies of one kind of layer.

    Attributes:
        inv_freq: [rotated / 2] float32, radians per position.
        scaling: The factor of cosines and sines.
    """

    inv_freq: Tensor
    scaling: float

    @classmethod
    def of(cls, rope: RopeParameters, head_dim: int, max_positions: int) -> RotaryTable:
        """Build the table.

        Args:
            rope: The rope parameters: rope_type, rope_theta and those of the type.
            head_dim: The size of a head, of which the part `partial_rotary_factor` is rotated.
            max_positions: The configuration's max_position_embeddings.
        """
        rotated = int(head_dim * rope.get("partial_rotary_factor", 1.0))
        inv_freq, scaling = ROPE_TYPES[rope.get("rope_type", "default")](
            rope, rotated, max_positions
        )
        return cls(inv_freq, scaling)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines, [..., rotated] each, of positions [...]."""
        freqs = positions[..., None].float() * self.inv_freq.to(positions.device)
        both = torch.cat((freqs, freqs), -1)
        return (both.cos() * self.scaling).to(dtype), (both.sin() * self.scaling).to(dtype)


def _frequencies(theta: float, rotated: int) -> Tensor:
    exponents = torch.arange(0, rotated, 2, dtype=torch.int64).float() / rotated
    return 1.0 / (theta**exponents)


def _default(rope: RopeParameters, rotated: int, _: int) -> tuple[Tensor, float]:
    return _frequencies(rope["rope_theta"], rotated), 1.0


def _linear(rope: RopeParameters, rotated: int, _: int) -> tuple[Tensor, float]:
    return _frequencies(rope["rope_theta"], rotated) / rope["factor"], 1.0


def _llama3(rope: RopeParameters, rotated: int, _: int) -> tuple[Tensor, float]:
    """Stretch long wavelengths by `factor`, keep short ones, and blend those in between."""
    inv_freq, factor = _frequencies(rope["rope_theta"], rotated), rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    context = rope["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inv_freq
    stretched = torch.where(wavelength > context / low, inv_freq / factor, inv_freq)
    share = (context / wavelength - low) / (high - low)
    blended = (1 - share) * stretched / factor + share * stretched
    between = ~(wavelength < context / high) * ~(wavelength > context / low)
    return torch.where(between, blended, stretched), 1.0


def _yarn(rope: RopeParameters, rotated: int, max_positions: int) -> tuple[Tensor, float]:
    theta, context = rope["rope_theta"], rope["original_max_position_embeddings"]
    factor = rope["factor"]
    factor = max_positions / context if factor is None else factor
    scaling = rope.get("attention_factor")
    if scaling is None:
        mscale, mscale_all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
        if mscale and mscale_all_dim:
            scaling = float(_mscale(factor, mscale) / _mscale(factor, mscale_all_dim))
        else:
            scaling = _mscale(factor)

    def dimension(rotations: float) -> float:
        turns = math.log(context / (rotations * 2 * math.pi))
        return (rotated * turns) / (2 * math.log(theta))

    low, high = dimension(rope.get("beta_fast") or 32), dimension(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    high = high + 0.001 if low == high else high
    exponents = torch.arange(0, rotated, 2).float() / rotated
    periods = theta**exponents
    ramp = torch.clamp((torch.arange(rotated // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    keep = 1 - ramp
    return 1.0 / (factor * periods) * (1 - keep) + 1.0 / periods * keep, scaling


def _longrope(rope: RopeParameters, rotated: int, max_positions: int) -> tuple[Tensor, float]:
    """Use the short factors: a context ends at the original limit (`layout.context_of`)."""
    context, factor = rope["original_max_position_embeddings"], rope.get("factor")
    factor = max_positions / context if factor is None else factor
    scaling = rope.get("attention_factor")
    if scaling is None:
        scaling = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(context))
    short = torch.tensor(rope["short_factor"], dtype=torch.float32)
    exponents = torch.arange(0, rotated, 2, dtype=torch.int64).float() / rotated
    return 1.0 / (short * rope["rope_theta"] ** exponents), scaling


def _mscale(scale: float, mscale: float = 1) -> float:
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0


ROPE_TYPES: dict[str, Callable[[RopeParameters, int, int], tuple[Tensor, float]]] = {
    "default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn,
    "longrope": _longrope,
}  # fmt: skip
"""Rotary embeddings that depend on a position alone, by their name in configurations."""
