"""Integer codes with a scale per group, as in GPTQ, AWQ and compressed-tensors, and the block
formats of GGUF that hold the same values.

A weight is `(code - zero) * scale`. Codes minus their zero point, with scales in half precision,
fit Q4_0 (-8 to 7), Q5_0 (-16 to 15) or Q8_0 (-128 to 127) without changing a value, since a group
of weights is a whole number of blocks with one scale each.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from draftproof.gguf.blocks import BlockTensor, block_tensor

BLOCK = 32
"""Weights of a block that share a scale."""
HALF_RANGE = {"Q4_0": 8, "Q5_0": 16, "Q8_0": 128}
"""Formats with signed codes and a scale in half precision, and how far the codes reach."""


class Codes(NamedTuple):
    """A matrix of integer codes.

    Attributes:
        numbers: int16 [outputs, inputs], codes minus their zero point.
        scales: float32 [outputs, groups], each for `inputs / groups` consecutive inputs.
    """

    numbers: Tensor
    scales: Tensor

    def values(self) -> Tensor:
        """The values of the matrix, float32 [outputs, inputs]."""
        outputs, inputs = self.numbers.shape
        groups = self.scales.shape[1]
        numbers = self.numbers.view(outputs, groups, inputs // groups).float()
        return (numbers * self.scales[:, :, None]).view(outputs, inputs)


def unpacked_bits(stream: Tensor, bits: int) -> Tensor:
    """Unpack unsigned integers that are stored one after another, lower bits first.

    Args:
        stream: uint8 [..., bytes].
        bits: The bits of one integer: 2, 3, 4 or 8.

    Returns:
        uint8 [..., 8 * bytes / bits].
    """
    if bits == 8:
        return stream
    together = 3 if bits == 3 else 1                    # bytes that hold a whole number of integers
    parts = stream.reshape(*stream.shape[:-1], -1, together).int()
    whole = sum((parts[..., place] << 8 * place for place in range(1, together)), parts[..., 0])
    shifts = torch.arange(8 * together // bits, dtype=torch.int32) * bits
    integers = (whole[..., None] >> shifts).bitwise_and_((1 << bits) - 1)
    return integers.to(torch.uint8).flatten(-2)


def why_no_blocks(codes: Codes) -> str | None:
    """Why no block format holds the values of a matrix; None if one does."""
    groups = codes.scales.shape[1]
    inputs = codes.numbers.shape[1]
    if groups > 1 and inputs // groups % BLOCK:
        return f"its groups of {inputs // groups} weights are no multiple of {BLOCK}"
    low, high = (int(number) for number in codes.numbers.aminmax())
    if low < -128 or high > 127:
        return f"its codes reach from {low} to {high}, beyond 8 bits with a sign"
    if not torch.equal(codes.scales.half().float(), codes.scales):
        return "its scales are not numbers of half precision"
    return None


def blocks_of_codes(codes: Codes) -> BlockTensor:
    """Pack a matrix in the smallest block format that holds its values.

    Args:
        codes: A matrix for which `why_no_blocks` returns None.

    Returns:
        Blocks of the same values. Inputs are padded with zeros to whole blocks.
    """
    outputs, inputs = codes.numbers.shape
    low, high = (int(number) for number in codes.numbers.aminmax())
    format = next(name for name, reach in HALF_RANGE.items() if -reach <= low and high < reach)
    numbers = F.pad(codes.numbers, (0, -inputs % BLOCK)).view(outputs, -1, BLOCK)
    blocks, groups = numbers.shape[1], codes.scales.shape[1]
    scales = codes.scales.half().repeat_interleave(blocks // groups, 1).contiguous()
    parts = [scales[:, :, None].view(torch.uint8)]
    if format == "Q8_0":
        parts.append(numbers.to(torch.int8).view(torch.uint8))
    else:
        unsigned = (numbers + HALF_RANGE[format]).to(torch.uint8)
        if format == "Q5_0":
            bits = (unsigned >> 4).view(outputs, blocks, 4, 8) << torch.arange(8).to(torch.uint8)
            parts.append(bits.sum(-1, dtype=torch.uint8))
        low_half, high_half = torch.split(unsigned & 15, 16, -1)
        parts.append(low_half | high_half << 4)
    return block_tensor(format, (outputs, inputs), torch.cat(parts, -1).view(outputs, -1))
