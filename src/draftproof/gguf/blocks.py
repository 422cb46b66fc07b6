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

from draftproof.gguf.types import row_bytes

PLAIN = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64,
    "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip
"""Types that store each number by itself, and the same type in torch."""

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
