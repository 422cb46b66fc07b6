"""Linear layers in 8 or 4 bits on a CPU. Knows our kernels and torch's operators, but not
models.

A token's outputs have the same bits whatever is read with it, on every path.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftproof.native.kernels import kernels
from draftproof.native.structures import interleaved, pad_to_strip
from draftproof.weights.packed_linear import JointLinear

CHUNK = 1 << 20
"""Weights converted at a time, so that a large table needs no second copy."""
EXACT = 1024
"""Products of two 8-bit numbers that float32 sums exactly, in any order: 1024 * 127 * 127 < 2^24.
"""


class QuantizedLinear(JointLinear):
    """The common base of both kinds. weight, scales: in the form our kernels read, or else by
    rows."""

    scales: Tensor

    @property
    def state(self) -> dict[str, object]:
        """The state from which `restored` makes the layer again."""
        form = (self.in_features, self.out_features, self.bias, self.kernels is not None)
        weights = {"weight": self.weight, "scales": self.scales}
        return {"kind": type(self).__name__, "form": form, "weights": weights}

    @staticmethod
    def restored(state: Mapping[str, Any]) -> QuantizedLinear:
        """Make a layer from its `state`."""
        kinds = {kind.__name__: kind for kind in QuantizedLinear.__subclasses__()}
        return kinds[state["kind"]]._restored(state)

    @classmethod
    def _restored(cls, state: Mapping[str, Any]) -> QuantizedLinear:
        made = cls.__new__(cls)
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

    Both are symmetric: codes -127..127 times max|x| / 127. Sums of integers are computed by our
    kernel for bfloat16, or else by float32 products of at most `EXACT` integers, which are exact in
    any order of summing.
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
            self.scales = pad_to_strip(self.scales)
            self.weight = interleaved(self.weight, 4).view(torch.uint8).bitwise_xor_(128)
        self.connect()

    def _by_torch(self, inputs: Tensor) -> Tensor:
        largest = inputs.abs().amax(-1, keepdim=True).float()                       # [..., 1]
        codes = inputs.float() * (127 / largest.clamp(min=1e-30))
        # round to nearest, like our kernel
        codes = codes.add_(128.5).floor_().sub_(128)
        outputs = codes.new_zeros(*codes.shape[:-1], self.out_features)
        for rows in _chunks(self.weight, EXACT):
            for start in range(0, self.in_features, EXACT):
                columns = slice(start, start + EXACT)
                outputs[..., rows] += F.linear(
                    codes[..., columns], self.weight[rows, columns].float()
                )
        outputs = outputs.mul_(self.scales).mul_(largest)
        return (outputs if self.bias is None else outputs.add_(self.bias)).to(inputs.dtype)


def slow_because(kind: str, dtype: torch.dtype) -> str | None:
    """Why layers of this kind ("int8", "int4") are not faster than the originals; None if they are.
    """
    if kernels() is None:
        return f"there is no {kind[3:]}-bit kernel for this machine, see draftproof doctor"
    reads = kind == "int4" or dtype == torch.bfloat16
    return None if reads else f"our 8-bit kernel reads bfloat16, not {dtype}"


def _chunks(weight: Tensor, columns: int | None = None) -> list[slice]:
    """Slices of a weight's rows, of limited size."""
    rows = max(1, CHUNK // (columns or weight.shape[1]))
    return [slice(start, start + rows) for start in range(0, len(weight), rows)]
