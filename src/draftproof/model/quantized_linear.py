"""Linear layers in 8 or 4 bits on a CPU. Knows our kernels and torch's operators, nothing of
models.

A token's outputs are the same bits whatever is read beside it, on every path.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftproof.model.packed_linear import JointLinear
from draftproof.native.kernels import kernels
from draftproof.native.structures import BLOCK, GROUP, STRIP, interleaved, nibbles, rounded

CHUNK = 1 << 20
"""Weights converted at a time, so that a large table needs no second copy."""
EXACT = 1024
"""Products of two 8-bit numbers that float32 sums exactly, in any order: 1024 * 127 * 127 < 2^24.
"""


class QuantizedLinear(JointLinear):
    """What layers of both kinds are made of. weight, scales: as our kernels read them, else by
    rows."""

    scales: Tensor

    @property
    def state(self) -> dict[str, Any]:
        """What `restored` makes the layer of."""
        form = (self.in_features, self.out_features, self.bias, self.kernels is not None)
        weights = {"weight": self.weight, "scales": self.scales}
        return {"kind": type(self).__name__, "form": form, "weights": weights}

    @staticmethod
    def restored(state: dict[str, Any]) -> QuantizedLinear:
        kind = Int8Linear if state["kind"] == "Int8Linear" else Int4Linear
        made = kind.__new__(kind)
        JointLinear.__init__(made, *state["form"])
        vars(made).update(state["weights"])
        made.connect()
        return made

    def forward(self, inputs: Tensor) -> Tensor:
        return self._by_torch(inputs) if self.native is None else super().forward(inputs)

    def _by_torch(self, inputs: Tensor) -> Tensor:
        raise NotImplementedError


class Int8Linear(QuantizedLinear):
    """Weights in 8 bits with a scale per output, activations in 8 bits with a scale per token.

    Both are symmetric: codes -127..127 times max|x| / 127. Sums are of integers: by our kernel for
    bfloat16 where there is one, else by float32 products of at most `EXACT` integers, which are
    exact in whatever order the library sums.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        bias = None if bias is None else bias.to(weight.dtype)
        super().__init__(weight.shape[1], len(weight), bias, weight.dtype == torch.bfloat16)
        self.weight = torch.empty(weight.shape, dtype=torch.int8)
        scale = torch.empty(len(weight), dtype=torch.float32)
        for rows in _chunks(weight):
            scale[rows] = weight[rows].abs().amax(1).float().clamp(min=1e-30) / 127
            self.weight[rows] = (weight[rows] / scale[rows, None]).round_().to(torch.int8)
        self.scales = scale / 127
        if self.kernels is not None:
            self.scales = rounded(self.scales)
            self.weight = interleaved(self.weight, 4).view(torch.uint8).bitwise_xor_(128)
        self.connect()

    def _by_torch(self, inputs: Tensor) -> Tensor:
        largest = inputs.abs().amax(-1, keepdim=True).float()                       # [..., 1]
        codes = inputs.float() * (127 / largest.clamp(min=1e-30))
        # to the nearest, as our kernel
        codes = codes.add_(128.5).floor_().sub_(128)
        outputs = codes.new_zeros(*codes.shape[:-1], self.out_features)
        for rows in _chunks(self.weight, EXACT):
            for start in range(0, self.in_features, EXACT):
                some = slice(start, start + EXACT)
                outputs[..., rows] += F.linear(codes[..., some], self.weight[rows, some].float())
        outputs = outputs.mul_(self.scales).mul_(largest)
        return (outputs if self.bias is None else outputs.add_(self.bias)).to(inputs.dtype)


class Int4Linear(QuantizedLinear):
    """Weights in 4 bits: of the codes of 8 bits 16 evenly spaced ones for each group of inputs,
    with a scale for each block of them.

    By our kernel where there is one, which reads activations in bfloat16, and these in 8 bits with
    a scale per token and part. Else row by row with weights widened anew.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(weight.shape[1], len(weight), bias)
        parts = zip(*(_four_bits(weight[rows]) for rows in _chunks(weight)), strict=True)
        self.weight, self.scales = nibbles(*(torch.cat(part) for part in parts))
        self.connect()

    def _by_torch(self, inputs: Tensor) -> Tensor:
        rows = inputs.reshape(-1, inputs.shape[-1]).bfloat16().float()
        weight = _widened(self.weight, self.scales, self.in_features, self.out_features)
        # a row at a time: no library's blocking can then mix one row's sums with another's
        sums = torch.stack([weight @ row for row in rows]) if len(rows) else rows @ weight.T
        outputs = sums.to(inputs.dtype)
        outputs = outputs if self.bias is None else outputs + self.bias
        return outputs.view(*inputs.shape[:-1], self.out_features)


def slow_because(kind: str, dtype: torch.dtype) -> str | None:
    """Why layers of this kind ("int8", "int4") are no quicker than the originals; None if they are.
    """
    if kernels() is None:
        return f"there is no {kind[3:]}-bit kernel for this machine, see draftproof doctor"
    reads = kind == "int4" or dtype == torch.bfloat16
    return None if reads else f"our 8-bit kernel reads bfloat16, not {dtype}"


def _chunks(weight: Tensor, columns: int | None = None) -> list[slice]:
    """Rows of a weight, some at a time."""
    rows = max(1, CHUNK // (columns or weight.shape[1]))
    return [slice(start, start + rows) for start in range(0, len(weight), rows)]


def _four_bits(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes, steps, bases and scales, as `nibbles` wants them: the widest group of a block has
    steps of up to 17. The step that covers a group, or one less, whichever errs less."""
    inputs = weight.shape[1]
    groups = F.pad(weight.float(), (0, -inputs % BLOCK)).view(len(weight), -1, BLOCK // GROUP,
                                                              GROUP)
    low, high = groups.amin(-1), groups.amax(-1)                # [outputs, blocks, groups of one]
    far = torch.maximum((high - low) / (15 * 17), torch.maximum(high, -low) / 127).amax(-1)
    scale = far.clamp(min=1e-7).half()
    groups, low, high = (one / scale.float().view(*scale.shape, *[1] * (one.dim() - 2))
                         for one in (groups, low, high))
    found: list[Tensor] = []
    for less in (0, 1):
        step = (((high - low) / 15).ceil_() - less).clamp_(1, 17)
        base = ((high + low) / 2 - 7.5 * step + 128).round_().clamp_(min=0).minimum(255 - 15 * step)
        codes = ((groups - (base - 128)[..., None]) / step[..., None]).round_().clamp_(0, 15)
        error = codes * step[..., None] + (base - 128)[..., None] - groups
        new = [codes, step, base, error.square_().sum(-1)]
        if found:
            better = new[3] < found[3]
            masks = (better[..., None], better, better, better)
            new = [torch.where(*one) for one in zip(masks, new, found, strict=True)]
        found = new
    codes, step, base = (one.to(torch.uint8).flatten(1) for one in found[:3])
    count = -(-inputs // GROUP)
    return codes[:, :inputs], step[:, :count], base[:, :count], scale


def _widened(weights: Tensor, scales: Tensor, inputs: int, outputs: int) -> Tensor:
    """[outputs, inputs] float32 what `nibbles` were made of."""
    strips, groups = weights.shape[:2]
    packed, behind = weights[..., : -2 * STRIP], weights[..., -2 * STRIP :]
    codes = packed.reshape(strips, groups, GROUP // 8, STRIP, 4)
    codes = torch.stack([codes & 15, codes >> 4], -2).permute(0, 3, 1, 2, 4, 5)
    both = behind.reshape(strips, groups, STRIP, 2).transpose(1, 2)[..., None].float()
    steps, bases = both.unbind(3)
    eight = codes.reshape(strips, STRIP, groups, GROUP) * steps + bases - 128
    unit = scales.float().transpose(1, 2).repeat_interleave(BLOCK // GROUP, 2)[..., :groups, None]
    return (eight * unit).view(strips * STRIP, -1)[:outputs, :inputs]
