"""Random tensors in the block formats of GGUF files."""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.gguf.blocks import BlockTensor
from draftproof.gguf.types import BLOCK_SIZES

HALVES = {
    "Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q2_K": [80, 82],
    "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0],
    "MXFP4": [],
}
"""Bytes at which a block has numbers in half precision."""


def random_blocks(format: str, outputs: int, size: int, seed: int = 0) -> BlockTensor:
    """A matrix of random bytes, with scales of any sign around 1/50; some codes are extreme."""
    dice, block = torch.Generator().manual_seed(seed), BLOCK_SIZES[format]
    count = size // block.weights
    data = torch.randint(0, 256, (outputs, count, block.nbytes), generator=dice, dtype=torch.uint8)
    data[1], data[2 % outputs] = 255, 0
    data[3 % outputs] = 128
    for place in HALVES[format]:
        scales = torch.randn(outputs, count, 1, generator=dice) / 50
        data[:, :, place : place + 2] = scales.half().view(torch.uint8)
    if format == "MXFP4":
        exponents = torch.randint(60, 126, (outputs, count), generator=dice, dtype=torch.uint8)
        data[:, :, 0] = exponents
        data[5 % outputs :, :, 0] = 120
    return BlockTensor(format, (outputs, size), data.view(outputs, -1))


def in_codes(inputs: Tensor) -> Tensor:
    """Inputs as the kernels round them, 32 with one scale, in double precision."""
    parts = inputs.float().view(len(inputs), -1, 32)
    largest = parts.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    codes = (parts * (127 / largest) + 128.5).floor() - 128
    return (codes * (largest.double() / 127)).view(len(inputs), -1)
