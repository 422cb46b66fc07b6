"""The types of tensors in GGUF files, and the sizes of their blocks. Does not import torch.

The layouts are those of ggml (ggml-common.h). A block holds a fixed number of consecutive weights
of one row together with their scales.
"""

from __future__ import annotations

from typing import NamedTuple

from draftproof.native.formats import BLOCKS


class BlockSize(NamedTuple):
    """The size of a type's blocks.

    Attributes:
        weights: The number of consecutive weights of a row in one block.
        nbytes: The bytes of one block.
    """

    weights: int
    nbytes: int


BLOCK_SIZES = {
    "F32": BlockSize(1, 4), "F16": BlockSize(1, 2), "BF16": BlockSize(1, 2), "F64": BlockSize(1, 8),
    "I8": BlockSize(1, 1), "I16": BlockSize(1, 2), "I32": BlockSize(1, 4), "I64": BlockSize(1, 8),
    **{name: BlockSize(*size) for name, size in BLOCKS.items()},
    "IQ2_XXS": BlockSize(256, 66), "IQ2_XS": BlockSize(256, 74), "IQ2_S": BlockSize(256, 82),
    "IQ3_XXS": BlockSize(256, 98), "IQ3_S": BlockSize(256, 110),
    "IQ1_S": BlockSize(256, 50), "IQ1_M": BlockSize(256, 56),
    "TQ1_0": BlockSize(256, 54), "TQ2_0": BlockSize(256, 66), "NVFP4": BlockSize(64, 36),
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


def row_bytes(type: str, weights: int) -> int:
    """The bytes of a row of `weights` weights, which must fill whole blocks."""
    size = BLOCK_SIZES[type]
    return weights // size.weights * size.nbytes
