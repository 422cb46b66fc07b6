"""Structures that describe a model to the kernels, and the layouts of its weights."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from draftproof.errors import BadInput
from draftproof.native.declarations import Structure, array_of, derived, size_helper, structure
from draftproof.native.formats import BLOCKS, FORMATS, STRIP
from draftproof.native.pages import enlarge

WORDS = 16
"""The multiple, in words of 32 bits, to which the inputs of a linear layer are padded."""
LANES = 16
"""The most numbers that the kernels compute at a time: sizes of activations are multiples of it."""

Read, AttentionKind, Norm, Layer, Model, Embeddings = map(
    structure, ("Read", "AttentionKind", "Norm", "Layer", "Model", "Embeddings")
)
Native = ctypes.Structure
"""The type of a linear layer as the kernels read it."""
QUANTIZED = ("Q8_0", "Q5_0", "Q4_K", "Q6_K")
"""Formats that quantize.c makes, in its order."""


def linear(
    weights: Tensor, scales: Tensor | None, bias: Tensor | None, size: int, outputs: int
) -> Native:
    """A linear layer.

    Args:
        weights: As `interleaved` made them: bfloat16 without scales, uint8 with them.
        scales: float32 per output, padded by `rounded`; None for bfloat16.
        bias: bfloat16, padded by `rounded`.
        size: Inputs.
        outputs: Outputs.

    Raises:
        BadInput: A tensor has another dtype or too few elements.
    """
    wanted = torch.bfloat16 if scales is None else torch.uint8
    if weights.dtype != wanted:
        raise BadInput(f"weights of a linear layer were {weights.dtype}; {wanted} was wanted")
    padded = size + -size % (WORDS * 4 // weights.element_size())
    return structure("Linear")(weights, scales, bias, size, padded, outputs)


def block_linear(
    format: str, records: Tensor, bias: Tensor | None, size: int, outputs: int
) -> Native:
    """A linear layer with weights in a block format.

    Args:
        format: One of `FORMATS`.
        records: uint8 [strips, blocks, bytes], as `pack_blocks` made them.
        bias: bfloat16, padded by `rounded`.
        size: Inputs; at most as many as the blocks have.
        outputs: Outputs.

    Raises:
        BadInput: A tensor has another dtype, or there are fewer blocks than inputs and outputs.
    """
    padded = records.shape[1] * BLOCKS[format][0]
    if records.dtype != torch.uint8 or padded < size:
        raise BadInput(
            f"blocks of a linear layer were {list(records.shape)} in {records.dtype}; uint8 blocks "
            f"of {size} inputs were wanted"
        )
    return structure("Linear")(
        records, None, bias, size, padded, outputs, FORMATS.index(format) + 1
    )


def block_table(format: str, rows: Tensor, size: int) -> Native:
    """Token embeddings in a block format, which kernels look up in the file's own bytes.

    Args:
        format: One of `FORMATS`.
        rows: uint8 [vocab, bytes per row], as a GGUF file stores them.
        size: Numbers of an embedding.

    Raises:
        BadInput: The rows are not bytes, or too few.
    """
    if rows.dtype != torch.uint8:
        raise BadInput(f"rows of a block format were {rows.dtype}; torch.uint8 was wanted")
    return Embeddings(rows, len(rows), size, FORMATS.index(format) + 1)


def joint_linear(parts: Sequence[Native]) -> Native:
    """Layers that read the same inputs as one, with their outputs side by side."""
    if len({part.size for part in parts}) != 1:
        sizes = ", ".join(str(part.size) for part in parts)
        raise BadInput(f"layers of {sizes} inputs do not read the same; join those that do")
    outputs = sum(part.outputs for part in parts)
    return structure("Linear")(
        None, None, None, parts[0].size, 0, outputs, 0, len(parts), array_of("Linear", parts)
    )


@size_helper
def weight_bytes(scale: object, outputs: int, padded: int, format: int) -> int:
    """Bytes of the weights of a `Linear`."""
    rows = -(-outputs // STRIP) * STRIP
    if format == 0:
        return rows * padded * (1 if scale is not None else 2)
    inputs, size = BLOCKS[FORMATS[format - 1]]
    return rows * (padded // inputs) * size


@size_helper
def table_bytes(vocab: int, size: int, format: int) -> int:
    """Bytes of `Embeddings`."""
    if format == 0:
        return vocab * size * 2
    inputs, bytes_ = BLOCKS[FORMATS[format - 1]]
    return vocab * (size // inputs * bytes_)


@size_helper
def block_bytes(format: int) -> int:
    """Bytes of a block; formats are counted from 1."""
    return BLOCKS[FORMATS[format - 1]][1]


@size_helper
def quantized_bytes(format: int, size: int) -> int:
    """Bytes that quantize.c makes of a row."""
    inputs, bytes_ = BLOCKS[QUANTIZED[format]]
    return size // inputs * bytes_


@size_helper
def last(starts: Tensor | None) -> int:
    """Nodes that a read names, row by row."""
    return 0 if starts is None else int(starts[-1])


@derived(Read)
def width(read: Structure) -> int:
    """Tokens that a read reads, as `start_of` counts them."""
    starts, nodes = read.pointed("starts"), read.rows * (read.nodes - read.first)
    width = nodes if starts is None else int(starts[read.rows])
    if width < 1:
        raise BadInput(f"a read of {width} tokens was asked for; read at least one")
    return int(width)


@derived(Model)
def hidden(model: Structure) -> int:
    """Numbers of a hidden state."""
    return int(model.pointed("layers")[0].inner.size)


@derived(Model)
def vocab_of(model: Structure) -> int:
    """Outputs of the head."""
    return int(model.pointed("head").outputs)


@derived(Model)
def work_of(model: Structure) -> int:
    """Numbers that a token needs on its way through the layers of a model."""
    widest = max(layer.inner.outputs + layer.output.size + 3 * layer.down.size
                 for layer in model.pointed("layers"))
    return int(2 * model.hidden + widest)


@size_helper
def reach(places: Tensor | None, steps: int = 1) -> int:
    """Rows of noise that are read, from the places on.

    Raises:
        BadInput: There are no places, or negative ones.
    """
    if places is None or int(places.min()) < 0:
        raise BadInput("noise was passed with no place, or a negative one, of each row's noise")
    return int(places.max()) + steps


def interleaved(weight: Tensor | Sequence[Tensor], fold: int) -> Tensor:
    """[outputs / 32, inputs / fold, 32, fold] a weight [outputs, inputs], rounded up with zeros, as
    the kernels read it. Of several weights, the outputs are joined in order."""
    parts = [weight] if isinstance(weight, Tensor) else [*weight]
    if any(len(part) % STRIP for part in parts[:-1]):
        parts = [torch.cat(parts)]
    inputs, strips = parts[0].shape[1], sum(-(-len(part) // STRIP) for part in parts)
    more = -inputs % (WORDS * fold)
    packed = torch.empty(strips, (inputs + more) // fold, STRIP, dtype=torch.int32)
    result = enlarge(packed.view(parts[0].dtype).view(strips, -1, STRIP, fold))
    first = 0
    for part in parts:
        if more or len(part) % STRIP:                           # padding copies in any case
            part = F.pad(part, (0, more, 0, -len(part) % STRIP))
        # `fold` numbers are one word
        words = part.contiguous().view(torch.int32).view(len(part) // STRIP, STRIP, -1)
        packed[first : first + len(words)].copy_(words.transpose(1, 2))
        first += len(words)
    return result


def unpack(weight: Tensor, inputs: int, outputs: int) -> Tensor:
    """[outputs, inputs] what `interleaved` was made of."""
    return weight.transpose(1, 2).reshape(len(weight) * STRIP, -1)[:outputs, :inputs]


def strip_rows(weight: Tensor, numbers: Tensor, inputs: int) -> Tensor:
    """Rows `numbers` [...] of what `interleaved` made of a weight: [..., inputs] float32."""
    strips = weight[numbers // STRIP, :, numbers % STRIP]
    return strips.flatten(-2)[..., :inputs].float()


def pad_to_strip(numbers: Tensor) -> Tensor:
    """One number per output, with zeros for those a weight was rounded up by."""
    return F.pad(numbers, (0, -len(numbers) % STRIP))
