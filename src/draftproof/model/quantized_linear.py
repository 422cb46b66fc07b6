"""Linear layers in 8 or 4 bits on a CPU. Knows our kernels and torch's operators, nothing of
models.

A token's outputs are the same bits whatever is read beside it, on every path.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from draftproof.model.packed_linear import JointLinear
from draftproof.native.kernels import linear_kernels
from draftproof.native.structures import Linear, grouped, interleaved, nibbles, rounded

GROUP = 32
"""Weights that share a scale in 4 bits."""
CHUNK = 1 << 22
"""Weights converted at a time, so that a large table needs no second copy."""
EXACT = 1024
"""Products of two 8-bit numbers that float32 sums exactly, in any order: 1024 * 127 * 127 < 2^24.
"""


class QuantizedLinear(JointLinear):
    """What layers of both kinds are made of: `PARTS`, of which some may be None.

    weight, scales: as our kernels read them if there are `kernels`, else by rows. padded_bias: the
    bias as those read it.
    """

    PARTS = ("weight", "scales", "bias", "padded_bias")
    weight: Tensor
    scales: Tensor

    def __init__(self, inputs: int, outputs: int, native: bool) -> None:
        super().__init__(outputs)
        self.in_features, self.kernels = inputs, linear_kernels() if native else None
        self.bias: Tensor | None = None
        self.padded_bias: Tensor | None = None

    @classmethod
    def restored(cls, shape: tuple[int, int, bool], parts: dict[str, Tensor]) -> QuantizedLinear:
        """A layer made earlier, of its `shape` and `parts`."""
        made = cls.__new__(cls)
        QuantizedLinear.__init__(made, *shape)
        vars(made).update(parts)
        made._connect()
        return made

    @property
    def shape(self) -> tuple[int, int, bool]:
        return self.in_features, self.out_features, self.kernels is not None

    @property
    def parts(self) -> dict[str, Tensor]:
        found = {name: getattr(self, name) for name in self.PARTS}
        return {name: one for name, one in found.items() if one is not None}

    @property
    def nbytes(self) -> int:
        """Bytes of weights."""
        return bytes_of(self.weight, self.scales, self.bias)

    def _connect(self) -> None:
        """Tell our kernels where the parts lie."""
        raise NotImplementedError


class Int8Linear(QuantizedLinear):
    """Weights in 8 bits with a scale per output, activations in 8 bits with a scale per token.

    Both are symmetric: codes -127..127 times max|x| / 127. Sums are of integers: by our kernel for
    bfloat16 where there is one, else by float32 products of at most `EXACT` integers, which are
    exact in whatever order the library sums.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(weight.shape[1], len(weight), weight.dtype == torch.bfloat16)
        codes = torch.empty(weight.shape, dtype=torch.int8)
        scale = torch.empty(len(weight))
        for rows in _chunks(weight):
            scale[rows] = weight[rows].abs().amax(1).float().clamp(min=1e-30) / 127
            codes[rows] = (weight[rows] / scale[rows, None]).round_().to(torch.int8)
        self.bias = None if bias is None else bias.to(weight.dtype)
        self.weight, self.scales = codes, scale / 127
        if self.kernels is not None:
            self.scales = rounded(self.scales)
            self.padded_bias = None if self.bias is None else rounded(self.bias)
            self.weight = interleaved(codes, 4).view(torch.uint8).bitwise_xor_(128)
        self._connect()

    def _connect(self) -> None:
        if self.kernels is not None:
            self.native = Linear.of(
                self.weight, self.scales, self.padded_bias, self.in_features, self.out_features
            )

    def forward(self, inputs: Tensor) -> Tensor:
        if self.kernels is not None and self.native is not None:
            return self.kernels.multiply(self.native, inputs)
        largest = inputs.abs().amax(-1, keepdim=True).float()                       # [..., 1]
        codes = inputs.float() * (127 / largest.clamp(min=1e-30))
        # to the nearest, as our kernel
        codes = codes.add_(128.5).floor_().sub_(128)
        outputs = self._sums(codes).mul_(self.scales).mul_(largest)
        return (outputs if self.bias is None else outputs.add_(self.bias)).to(inputs.dtype)

    def _sums(self, codes: Tensor) -> Tensor:
        """[..., outputs] float32, of integers `codes` times the weight's."""
        outputs = codes.new_zeros(*codes.shape[:-1], self.out_features)
        for rows in _chunks(self.weight, EXACT):
            for start in range(0, self.in_features, EXACT):
                some = slice(start, start + EXACT)
                outputs[..., rows] += F.linear(codes[..., some], self.weight[rows, some].float())
        return outputs


class Int4Linear(QuantizedLinear):
    """Weights in 4 bits with a scale and an offset per `GROUP` of inputs.

    By our kernel where there is one, which reads activations in bfloat16, and these in 8 bits with
    a scale per token and group. Else row by row with weights widened anew.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(weight.shape[1], len(weight), True)
        codes, scales = zip(*(_four_bits(weight[rows]) for rows in _chunks(weight)), strict=True)
        self.scales, self.bias = torch.cat(scales, 1), bias                # [groups, outputs, 2]
        all_codes = torch.cat(codes)
        if self.kernels is not None:
            scale, offset = self.scales.float().transpose(0, 1).unbind(2)   # [outputs, groups]
            self.weight = nibbles(all_codes)
            self.scales = grouped(scale.half(), (offset - 8 * scale).half())
            self.padded_bias = None if bias is None else rounded(bias.bfloat16())
        else:
            pairs = all_codes.view(len(weight), -1, 2)
            self.weight = pairs[..., 0] | pairs[..., 1] << 4               # [outputs, inputs / 2]
        self._connect()

    def _connect(self) -> None:
        if self.kernels is not None:
            self.native = Linear.of_4_bits(
                self.weight, self.scales, self.padded_bias, self.in_features, self.out_features
            )

    def forward(self, inputs: Tensor) -> Tensor:
        if self.kernels is not None and self.native is not None:
            return self.kernels.multiply(self.native, inputs.bfloat16()).to(inputs.dtype)
        rows = inputs.reshape(-1, inputs.shape[-1]).to(self.scales.dtype)
        outputs = self._by_rows(rows).to(inputs.dtype)
        outputs = outputs if self.bias is None else outputs + self.bias
        return outputs.view(*inputs.shape[:-1], self.out_features)

    def _by_rows(self, rows: Tensor) -> Tensor:
        """A row at a time: no library's blocking can then mix one row's sums with another's."""
        codes = torch.stack([self.weight & 15, self.weight >> 4], -1)
        codes = codes.view(self.out_features, -1, GROUP)
        # [outputs, groups, 1]
        scale, offset = self.scales.float().transpose(0, 1)[..., None].unbind(2)
        weight = ((codes - 8.0) * scale + offset).view(self.out_features, -1)
        return torch.stack([weight @ row for row in rows.float()]) if len(rows) else rows @ weight.T


def slow_because(kind: str, dtype: torch.dtype) -> str | None:
    """Why layers of this kind ("int8", "int4") are no quicker than the originals; None if they are.
    """
    if linear_kernels() is None:
        return f"there is no {kind[3:]}-bit kernel for this machine, see draftproof doctor"
    reads = kind == "int4" or dtype == torch.bfloat16
    return None if reads else f"our 8-bit kernel reads bfloat16, not {dtype}"


def bytes_of(*tensors: Tensor | None) -> int:
    """Bytes held; a tensor made of tensors holds those."""
    total = 0
    for tensor in tensors:
        inner = getattr(tensor, "__tensor_flatten__", None)
        if inner is not None:
            total += bytes_of(*(getattr(tensor, name) for name in inner()[0]))
        elif tensor is not None:
            total += tensor.numel() * tensor.element_size()
    return total


def _chunks(weight: Tensor, columns: int | None = None) -> list[slice]:
    """Rows of a weight, some at a time."""
    rows = max(1, CHUNK // (columns or weight.shape[1]))
    return [slice(start, start + rows) for start in range(0, len(weight), rows)]


def _four_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes 0..15 [outputs, inputs]; scale and offset of each group, [groups, outputs, 2] bfloat16.

    w = (code - 8) * scale + offset.
    """
    grouped = weight.float().view(len(weight), -1, GROUP)
    # [outputs, groups]
    low, high = grouped.amin(-1), grouped.amax(-1)
    scale = ((high - low) / 15).clamp(min=1e-6).bfloat16()
    offset = (low + 8 * scale.float()).bfloat16()
    codes = ((grouped - offset[..., None]) / scale[..., None]).round_().clamp_(-8, 7) + 8
    both = torch.stack([scale, offset], -1).transpose(0, 1).contiguous()
    return codes.view(weight.shape).to(torch.uint8), both
