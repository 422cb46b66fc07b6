"""Tensors of a GGUF file as they are stored: rows of quantised blocks, or plain numbers.

The layouts are those of ggml (ggml-common.h). A block holds a fixed number of consecutive weights
of one row together with their scales.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class BlockSize(NamedTuple):
    """The size of a type's blocks.

    Attributes:
        weights: The number of consecutive weights of a row in one block.
        nbytes: The bytes of one block.
    """

    weights: int
    nbytes: int


PLAIN = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64,
    "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip
"""Types that store each number by itself, and the same type in torch."""

BLOCK_SIZES = {
    **{name: BlockSize(1, dtype.itemsize) for name, dtype in PLAIN.items()},
    "Q4_0": BlockSize(32, 18), "Q4_1": BlockSize(32, 20), "Q5_0": BlockSize(32, 22),
    "Q5_1": BlockSize(32, 24), "Q8_0": BlockSize(32, 34),
    "Q2_K": BlockSize(256, 84), "Q3_K": BlockSize(256, 110), "Q4_K": BlockSize(256, 144),
    "Q5_K": BlockSize(256, 176), "Q6_K": BlockSize(256, 210),
    "IQ2_XXS": BlockSize(256, 66), "IQ2_XS": BlockSize(256, 74), "IQ2_S": BlockSize(256, 82),
    "IQ3_XXS": BlockSize(256, 98), "IQ3_S": BlockSize(256, 110),
    "IQ1_S": BlockSize(256, 50), "IQ1_M": BlockSize(256, 56),
    "IQ4_NL": BlockSize(32, 18), "IQ4_XS": BlockSize(256, 136),
    "TQ1_0": BlockSize(256, 54), "TQ2_0": BlockSize(256, 66),
    "MXFP4": BlockSize(32, 17), "NVFP4": BlockSize(64, 36),
}  # fmt: skip
"""Every type that can be dequantised, by its name in ggml."""

TYPE_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0",
    10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K",
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
"""The names of the numbers that a GGUF file uses for types (`ggml_type` in ggml.h)."""

_CHUNK = 1 << 22
"""Weights dequantised at a time, which bounds the memory for intermediate results."""


class BlockTensor(NamedTuple):
    """A tensor as stored in the file.

    Attributes:
        type: The name of its type in ggml: "Q4_K", "Q8_0", "F16", "BF16", "F32", ...
        shape: Its shape in torch's order, [outputs, inputs] for the matrix of a linear layer.
        data: uint8 [rows, bytes per row], a read-only view of the memory-mapped file. A row holds
            the weights along the last axis; all other axes are folded into `rows`.
    """

    type: str
    shape: tuple[int, ...]
    data: Tensor

    @property
    def nbytes(self) -> int:
        """The bytes of the stored tensor."""
        return self.data.nbytes

    def rows(self, index: slice | Tensor) -> BlockTensor:
        """Rows of a matrix, in the order of `index`. A slice copies nothing.

        Args:
            index: A slice, or an int64 tensor of row numbers.
        """
        data = self.data[index]
        return self._replace(shape=(len(data), *self.shape[1:]), data=data)


def row_bytes(type: str, weights: int) -> int:
    """The bytes of a row of `weights` weights, which must fill whole blocks."""
    size = BLOCK_SIZES[type]
    return weights // size.weights * size.nbytes


def block_tensor(type: str, shape: tuple[int, ...], data: Tensor) -> BlockTensor:
    """Make a tensor from the file's bytes.

    Args:
        type: A key of `BLOCK_SIZES`.
        shape: In torch's order. The last dimension is a multiple of the type's block.
        data: uint8 of any shape, in the file's order.
    """
    return BlockTensor(type, shape, data.view(-1, row_bytes(type, shape[-1] if shape else 1)))


def dequantize(tensor: BlockTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Compute the numbers that blocks represent.

    Args:
        tensor: A tensor of any type in `BLOCK_SIZES`.
        dtype: The dtype of the result. Values are computed in float32 and rounded once.

    Returns:
        A new tensor of shape `tensor.shape`.
    """
    if tensor.type in PLAIN:
        numbers = tensor.data.view(PLAIN[tensor.type]).to(dtype, copy=True)
        return numbers.reshape(tensor.shape)
    rows, width = len(tensor.data), tensor.shape[-1]
    with torch.inference_mode(False):                   # our threads write to it
        result = torch.empty(rows, width, dtype=dtype)
    step = max(1, _CHUNK // width)

    def convert(start: int) -> None:
        stored = tensor.data[start : start + step].numpy()
        result[start : start + step] = torch.from_numpy(_unpacked(stored, tensor.type))

    if rows <= step:                                    # no threads for a few rows
        convert(0)
    else:
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            list(pool.map(convert, range(0, rows, step)))
    assert math.prod(tensor.shape) == result.numel()
    return result.view(tensor.shape)


def _unpacked(stored: np.ndarray, type: str) -> np.ndarray:
    """Unpack bytes [rows, bytes per row] to float32 [rows, weights]."""
    from gguf import GGMLQuantizationType, quants

    # NaN or infinite scales come from the file and need no warning here
    with np.errstate(invalid="ignore", over="ignore"):
        return quants.dequantize(stored, GGMLQuantizationType[type])
