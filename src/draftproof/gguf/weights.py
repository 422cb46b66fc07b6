"""Tensors of a file, in the order and with the values of Hugging Face's checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.errors import ModelNotFound
from draftproof.gguf.blocks import BlockTensor, dequantize
from draftproof.gguf.config import Stored, paired_rows
from draftproof.gguf.file import GGUFFile


def blocks_of(file: GGUFFile, stored: Stored) -> BlockTensor:
    """A matrix in its blocks, with rows in Hugging Face's order. No value changes.

    Args:
        file: The file.
        stored: The location of the matrix. Its numbers are not shifted.
    """
    tensor = file.tensors[stored.name]
    if not stored.heads:
        return tensor
    return tensor.rows(paired_rows(len(tensor.data), stored.heads))


def numbers_of(file: GGUFFile, stored: Stored, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor as numbers.

    Args:
        file: The file.
        stored: The location of the tensor.
        dtype: The dtype of the result. Values are computed in float32 and rounded once.
    """
    tensor = file.tensors[stored.name]
    second = file.tensors[stored.joined] if stored.joined else None
    if stored.restored is not None:
        parts = [tensor] if second is None else [tensor, second]
        try:
            return stored.restored(*map(dequantize, parts)).to(dtype).contiguous()
        except (RuntimeError, IndexError, ZeroDivisionError) as error:
            raise ModelNotFound(
                f"{file.path} has another shape of {stored.name} than its metadata say; fetch it "
                "again"
            ) from error
    if second is not None:                              # outputs are the second-to-last axis
        return torch.cat([dequantize(tensor, dtype), dequantize(second, dtype)], -2)
    if len(tensor.shape) > 1 and not stored.shift:
        return dequantize(blocks_of(file, stored), dtype)
    numbers = dequantize(tensor)
    if stored.heads:
        numbers = numbers[paired_rows(len(numbers), stored.heads)]
    return (numbers - stored.shift).to(dtype)
