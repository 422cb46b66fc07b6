"""Packs weights into a layer, in the same way for 16, 8 and 4 bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from draftproof.native.kernels import kernels
from draftproof.weights.block_formats import quantized_blocks
from draftproof.weights.packed_linear import JointLinear, PackedLinear

SMALLEST = 32
"""Layers of fewer outputs are not quantised: gates and routers, which cost nothing and matter."""


class DenseLinear(JointLinear):
    """Linear layers that torch multiplies as one: without kernels, and in other dtypes than
    bfloat16."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight.shape[1], len(weight), bias, native=False)
        self.weight = weight

    def forward(self, inputs: Tensor) -> Tensor:
        return F.linear(inputs, self.weight, self.bias)

    def dense(self) -> Tensor:
        return self.weight

    def rows(self, numbers: Tensor) -> Tensor:
        return self.weight[numbers].float()


def pack(
    names: Sequence[str], weights: Sequence[Tensor], bias: Tensor | None, kind: str | None,
    layers: int | None = None,
) -> JointLinear:  # fmt: skip
    """Pack the weights of linear layers that read the same inputs.

    Args:
        names: The names of the modules, which determine their number of bits.
        weights: [outputs, inputs] of each, of one dtype.
        bias: [sum of outputs], or None.
        kind: None for the dtype of the weights, "int8" or "int4"; "dense" leaves them as in the
            file, for torch to multiply.
        layers: The number of layers of the model, on which "int4" depends; None if unknown.

    Returns:
        One layer with the outputs of all, in order.
    """
    if kind == "dense":
        return DenseLinear(_joined(weights), bias)
    outputs = sum(len(weight) for weight in weights)
    if kind is not None and outputs >= SMALLEST:
        return quantized_blocks(names, weights, bias, kind, layers)
    if weights[0].dtype == torch.bfloat16 and kernels() is not None:
        return PackedLinear(weights, bias)
    return DenseLinear(_joined(weights), bias)


def _joined(weights: Sequence[Tensor]) -> Tensor:
    return torch.cat([*weights]) if len(weights) > 1 else weights[0]
