"""Structures that describe a model to the kernels, and the layouts of its weights."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from draftproof.native.declarations import array_of, structure
from draftproof.native.pages import enlarge

STRIP, WORDS = 32, 16
"""Outputs of a linear layer made at a time, and what its inputs, in words of 32 bits, are rounded
up to."""
LANES = 16
"""Numbers the kernels reckon with at a time, at most: where activations are read as they lie, there
is a multiple of it."""
LARGE_BLOCK = 64
"""Bytes: more than a block of 32 weights has, less than one of 256."""

Read, Way, Norm, Layer, Model, Embeddings = map(
    structure, ("Read", "Way", "Norm", "Layer", "Model", "Embeddings")
)
Native = ctypes.Structure
"""The type of a linear layer as the kernels read it."""


def linear(
    weights: Tensor, scales: Tensor | None, bias: Tensor | None, size: int, outputs: int
) -> Native:
    """A linear layer. weights: as `interleaved` made them. Scales in 8 bits, and the bias, are of
    as many outputs. The caller keeps them alive.
    """
    places = (weights.data_ptr(), *(None if one is None else one.data_ptr()
                                    for one in (scales, bias)))
    padded = size + -size % (WORDS * 4 // weights.element_size())
    return structure("Linear")(*places, size, padded, outputs)


FORMATS = (
    "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
    "IQ4_XS", "MXFP4",
)
"""Block formats of GGUF files that the kernels multiply, in the order of linear_blocks.h."""


def block_linear(
    format: str, records: Tensor, bias: Tensor | None, size: int, outputs: int
) -> Native:
    """A linear layer with weights in a block format.

    Args:
        format: One of `FORMATS`.
        records: uint8 [strips, blocks, bytes], as `Kernels.pack` made them. The caller keeps them
            and the bias alive.
        bias: bfloat16, padded by `rounded`.
        size: Inputs; at most as many as the blocks have.
        outputs: Outputs.
    """
    inputs = 32 if records.shape[2] // STRIP < LARGE_BLOCK else 256
    return structure("Linear")(
        records.data_ptr(), None, None if bias is None else bias.data_ptr(), size,
        records.shape[1] * inputs, outputs, FORMATS.index(format) + 1
    )


def block_table(format: str, rows: Tensor, size: int) -> Native:
    """Token embeddings in a block format, which kernels look up in the file's own bytes.

    Args:
        format: One of `FORMATS`.
        rows: uint8 [vocab, bytes per row], as a GGUF file stores them.
        size: Numbers of an embedding.
    """
    return Embeddings(rows, len(rows), size, FORMATS.index(format) + 1)


def joint_linear(parts: Sequence[Native]) -> Native:
    """Layers that read the same inputs as one, with their outputs side by side."""
    array = array_of("Linear", parts)
    outputs = sum(part.outputs for part in parts)
    joint = structure("Linear")(
        None, None, None, parts[0].size, 0, outputs, 0, len(parts), ctypes.addressof(array)
    )
    joint.parts_held = array
    return joint


def interleaved(weight: Tensor, fold: int) -> Tensor:
    """[outputs / 32, inputs / fold, 32, fold] a weight [outputs, inputs], rounded up with zeros, as
    the kernels read it."""
    outputs, inputs = weight.shape
    padded = F.pad(weight, (0, -inputs % (WORDS * fold), 0, -outputs % STRIP)).contiguous()
    # `fold` numbers are one word
    words = padded.view(torch.int32).view(len(padded) // STRIP, STRIP, -1).transpose(1, 2)
    packed = enlarge(torch.empty(words.shape, dtype=torch.int32)).copy_(words)
    return packed.view(weight.dtype).view(len(packed), -1, STRIP, fold)


def plain(weight: Tensor, inputs: int, outputs: int) -> Tensor:
    """[outputs, inputs] what `interleaved` was made of."""
    return weight.transpose(1, 2).reshape(len(weight) * STRIP, -1)[:outputs, :inputs]


def strip_rows(weight: Tensor, numbers: Tensor, inputs: int) -> Tensor:
    """Rows `numbers` [...] of what `interleaved` made of a weight: [..., inputs] float32."""
    strips = weight[numbers // STRIP, :, numbers % STRIP]
    return strips.flatten(-2)[..., :inputs].float()


def rounded(numbers: Tensor) -> Tensor:
    """One number per output, with zeros for those a weight was rounded up by."""
    return F.pad(numbers, (0, -len(numbers) % STRIP))
