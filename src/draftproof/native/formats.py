"""The block formats of GGUF files that the kernels multiply. Does not import torch."""

from __future__ import annotations

STRIP = 32
"""Outputs of a linear layer that are computed at a time."""
BLOCKS = {
    "Q8_0": (32, 34), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24),
    "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176),
    "Q6_K": (256, 210), "IQ4_NL": (32, 18), "IQ4_XS": (256, 136), "MXFP4": (32, 17),
}  # fmt: skip
"""Inputs and bytes of a block of each format."""
FORMATS = tuple(BLOCKS)
"""The formats in the order of linear_blocks.h, where they are counted from 1."""
