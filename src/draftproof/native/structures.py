"""Structures that describe a model to the kernels, and the layouts of its weights."""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor

from draftproof.native.declarations import structure
from draftproof.native.pages import enlarge

STRIP, WORDS = 32, 16
"""Outputs of a linear layer made at a time, and what its inputs, in words of 32 bits, are rounded
up to."""
LANES = 16
"""Numbers the kernels reckon with at a time, at most: where activations are read as they lie, there
is a multiple of it."""
GROUP, PART, BLOCK = 32, 128, 256
"""Weights of 4 bits that share a step and a base; activations, and weights, that share a scale."""

Read, Way, Norm, Layer, Model = map(structure, ("Read", "Way", "Norm", "Layer", "Model"))
Native = ctypes.Structure
"""The type of a linear layer as the kernels read it."""


def linear(
    weights: Tensor, scales: Tensor | None, bias: Tensor | None, size: int, outputs: int
) -> Native:
    """A linear layer. weights: as `interleaved` made them, or with its scales, of float16,
    `nibbles`. Scales in 8 bits, and the bias, are of as many outputs. The caller keeps them alive.
    """
    places = (weights.data_ptr(), *(None if one is None else one.data_ptr()
                                    for one in (scales, bias)))
    if scales is not None and scales.dtype == torch.float16:
        packed = (places[0], None, places[2], size, size + -size % PART, outputs, places[1])
        return structure("Linear")(*packed)
    padded = size + -size % (WORDS * 4 // weights.element_size())
    return structure("Linear")(*places, size, padded, outputs)


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


def nibbles(codes: Tensor, steps: Tensor, bases: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Weights (step * code + base - 128) * scale of 4 bits, and their scales, as the kernels read
    them: of codes [outputs, inputs] up to 15, steps and bases [outputs, groups] up to 17 and 255,
    and scales [outputs, blocks], rounded up with zeros."""
    more = -len(codes) % STRIP
    padded = F.pad(codes.to(torch.uint8), (0, -codes.shape[1] % PART, 0, more))
    halves = padded.view(len(padded) // STRIP, STRIP, -1, GROUP // 8, 2, 4)
    packed = (halves[..., 0, :] | halves[..., 1, :] << 4).permute(0, 2, 3, 1, 4).flatten(2)
    beyond = (0, 0, 0, packed.shape[1] - steps.shape[1], 0, more)
    both = F.pad(torch.stack([steps, bases], -1).to(torch.uint8), beyond)
    behind = both.view(len(packed), STRIP, -1, 2).transpose(1, 2).flatten(2)
    weights = torch.cat([packed, behind], 2)
    ordered = F.pad(scales.half(), (0, 0, 0, more)).view(len(packed), STRIP, -1)
    return enlarge(torch.empty_like(weights)).copy_(weights), ordered.transpose(1, 2).contiguous()


def rounded(numbers: Tensor) -> Tensor:
    """One number per output, with zeros for those a weight was rounded up by."""
    return F.pad(numbers, (0, -len(numbers) % STRIP))
