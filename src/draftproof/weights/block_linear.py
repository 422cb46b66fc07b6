"""Linear layers and token tables in the block formats of GGUF files, used as they are stored.

Our kernels multiply the blocks with 8-bit activations that have a scale per 32; sums are exact
within blocks, and in single precision over blocks. So the result differs from that of the
dequantised weights only by the rounding of the activations. Without kernels, torch multiplies the
dequantised weights.

A token's outputs have the same bits whatever is read with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftproof.errors import BadInput
from draftproof.gguf.blocks import BlockTensor, dequantize
from draftproof.gguf.types import BLOCK_SIZES
from draftproof.native.formats import FORMATS, STRIP
from draftproof.native.kernels import Kernels, kernels
from draftproof.native.pages import enlarge
from draftproof.native.structures import (
    Native,
    block_linear,
    block_table,
    interleaved,
    joint_linear,
    linear,
    pad_to_strip,
    strip_rows,
    unpack,
)
from draftproof.weights import pack_ahead
from draftproof.weights.packed_linear import bytes_of
from draftproof.weights.quantized_linear import QuantizedLinear

CHUNK = 1 << 22
"""Weights that torch dequantises at a time."""
PACKED = 1 << 25
"""Bytes of a matrix that are packed at a time."""
BFLOAT16 = "BF16"
"""The format of parts that are stored as bfloat16."""


class Part(NamedTuple):
    """A matrix of a layer.

    Attributes:
        format: One of `FORMATS`, or `BFLOAT16`.
        outputs: The number of its outputs.
        weight: In the form our kernels read: blocks as uint8 [strips, blocks, bytes], or bfloat16
            as `interleaved`. Without kernels: blocks as in a file, or [outputs, inputs].
    """

    format: str
    outputs: int
    weight: Tensor


class BlockLinear(QuantizedLinear):
    """Matrices that read the same inputs, each in its own format.

    Args:
        parts: The matrices, whose outputs are concatenated.
        inputs: The number of inputs.
        bias: [sum of outputs], or None.
        native: Whether the parts are laid out for our kernels.
    """

    def __init__(
        self, parts: Sequence[Part], inputs: int, bias: Tensor | None, native: bool
    ) -> None:
        super().__init__(inputs, sum(part.outputs for part in parts), bias, native)
        self.parts = list(parts)
        if native:
            self.connect()

    @classmethod
    def from_blocks(
        cls, parts: Sequence[BlockTensor], bias: Tensor | None,
        packed: Callable[[Tensor], object] | None = None,
    ) -> BlockLinear:  # fmt: skip
        """Make a layer from tensors of a GGUF file without changing their values.

        Only numbers in half or single precision, and values of rare formats that our kernels do
        not read (IQ1 to IQ3, TQ, NVFP4), are rounded to bfloat16.

        Args:
            parts: Matrices [outputs, inputs] that read the same inputs.
            bias: [sum of outputs], or None.
            packed: As in `pack_blocks`.

        Raises:
            BadInput: The matrices do not read the same inputs.
        """
        inputs = parts[0].shape[-1]
        if any(len(part.shape) != 2 or part.shape[1] != inputs for part in parts):
            shapes = ", ".join(str(list(part.shape)) for part in parts)
            raise BadInput(f"matrices of {shapes} do not read the same inputs; give them apart")
        library = kernels()
        return cls([_part(part, library, packed) for part in parts], inputs, bias,
                   library is not None)

    def connect(self) -> None:
        natives, biases = list[Native](), list[Tensor | None]()
        widths = [part.outputs for part in self.parts]
        for part, bias in zip(self.parts, _split(self.bias, widths), strict=True):
            biases.append(None if bias is None else pad_to_strip(bias.bfloat16()))
            form = (biases[-1], self.in_features, part.outputs)
            natives.append(linear(part.weight, None, *form) if part.format == BFLOAT16
                           else block_linear(part.format, part.weight, *form))
        self._held = biases
        self.native = natives[0] if len(natives) == 1 else joint_linear(natives)
        self._natives = natives

    @property
    def nbytes(self) -> int:
        return bytes_of(*(part.weight for part in self.parts), self.bias)

    @property
    def state(self) -> dict[str, object]:
        """The state from which `restored` makes the layer again."""
        return {
            "kind": type(self).__name__, "parts": [tuple(part) for part in self.parts],
            "form": (self.in_features, self.bias, self.kernels is not None),
        }

    @classmethod
    def _restored(cls, state: Mapping[str, Any]) -> BlockLinear:
        return cls([Part(*part) for part in state["parts"]], *state["form"])

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) if self.native is not None else self._by_torch(inputs)

    def dense(self) -> Tensor:
        return torch.cat([self._dense(number).bfloat16() for number in range(len(self.parts))])

    def rows(self, numbers: Tensor) -> Tensor:
        assert len(self.parts) == 1, "rows are looked up in a single matrix"
        return self._rows(0, numbers)

    def _rows(self, number: int, numbers: Tensor) -> Tensor:
        part, shape = self.parts[number], (*numbers.shape, self.in_features)
        if not numbers.numel():
            return torch.empty(shape, dtype=torch.float32)
        if part.format == BFLOAT16:
            if self.kernels is None:
                return part.weight[numbers].float()
            return strip_rows(part.weight, numbers, self.in_features)
        if self.kernels is None:
            size = BLOCK_SIZES[part.format]
            padded = part.weight.shape[1] // size.nbytes * size.weights
            stored = BlockTensor(part.format, (part.outputs, padded), part.weight)
            values = dequantize(stored.rows(numbers.flatten()))
            return values[:, : self.in_features].reshape(shape)
        values = torch.empty(shape, dtype=torch.float32)
        self.kernels("block_rows", self._natives[number], numbers, numbers.numel(), values)
        return values

    def _dense(self, number: int) -> Tensor:
        """The matrix [outputs, inputs] of a part."""
        part = self.parts[number]
        if part.format == BFLOAT16 and self.kernels is not None:
            return unpack(part.weight, self.in_features, part.outputs)
        return self._rows(number, torch.arange(part.outputs))

    def _by_torch(self, inputs: Tensor) -> Tensor:
        rows = inputs.reshape(-1, self.in_features).float()
        outputs = rows.new_empty(len(rows), self.out_features)
        start, step = 0, max(1, CHUNK // self.in_features)
        for number, part in enumerate(self.parts):
            for first in range(0, part.outputs, step):
                numbers = torch.arange(first, min(first + step, part.outputs))
                weight, end = self._rows(number, numbers), start + len(numbers)
                for row, output in zip(rows, outputs[:, start:end], strict=True):
                    output.copy_(weight @ row)     # one row at a time: bits depend on no other
                start = end
        outputs = outputs if self.bias is None else outputs + self.bias
        return outputs.to(inputs.dtype).view(*inputs.shape[:-1], self.out_features)


class BlockTable:
    """Token embeddings in the blocks of a mapped file, which is never unpacked as a whole.

    Args:
        source: The table.
        dtype: The dtype of looked-up embeddings.
    """

    weight = None

    def __init__(self, source: BlockTensor, dtype: torch.dtype) -> None:
        self.source, self.dtype = source, dtype

    @property
    def shape(self) -> tuple[int, int]:
        return self.source.shape[0], self.source.shape[1]

    @property
    def native(self) -> Native | None:
        source = self.source
        readable = source.type in FORMATS and self.dtype == torch.bfloat16
        return block_table(source.type, source.data, source.shape[1]) if readable else None

    def rows(self, tokens: Tensor) -> Tensor:
        if not tokens.numel():
            return torch.empty(*tokens.shape, self.shape[1], dtype=self.dtype)
        few = self.source.rows(tokens.flatten())
        numbers = torch.arange(len(few.data)).view(tokens.shape)
        if few.type in FORMATS and kernels() is not None:
            return BlockLinear.from_blocks([few], None).rows(numbers).to(self.dtype)
        return dequantize(few, self.dtype).view(*tokens.shape, self.shape[1])


def _part(
    tensor: BlockTensor, library: Kernels | None, packed: Callable[[Tensor], object] | None
) -> Part:
    """A matrix in the form our kernels read; without kernels, as it is."""
    outputs = tensor.shape[0]
    if tensor.type not in FORMATS:
        weight = dequantize(tensor, torch.bfloat16)
        return Part(BFLOAT16, outputs, weight if library is None else interleaved(weight, 2))
    if library is None:
        return Part(tensor.type, outputs, tensor.data)
    return Part(tensor.type, outputs, pack_blocks(tensor, library, packed))


def pack_blocks(
    tensor: BlockTensor, library: Kernels, packed: Callable[[Tensor], object] | None = None
) -> Tensor:
    """Rearrange blocks to the form our kernels read: uint8 [strips, blocks, bytes].

    Args:
        tensor: A matrix of one of `FORMATS`.
        library: The kernels.
        packed: Called with rows that are no longer needed, so that a large matrix is never held
            twice.
    """
    size, outputs = BLOCK_SIZES[tensor.type], len(tensor.data)
    blocks = tensor.data.shape[1] // size.nbytes
    strips = -(-outputs // STRIP)
    ready = pack_ahead.take(tensor.data.data_ptr(), tensor.type, outputs, blocks)
    if ready is not None:
        return enlarge(torch.frombuffer(ready, dtype=torch.uint8).view(strips, blocks, -1))
    records = enlarge(torch.empty(strips, blocks, STRIP * size.nbytes, dtype=torch.uint8))
    step = max(1, PACKED // max(1, STRIP * tensor.data.shape[1]))
    for first in range(0, strips, step):
        rows = tensor.data[first * STRIP : (first + step) * STRIP]
        to = records[first : first + step]
        library("pack", FORMATS.index(tensor.type) + 1, rows, len(rows), blocks, to)
        if packed is not None:
            packed(rows)
    return records


def _split(bias: Tensor | None, widths: Sequence[int]) -> Sequence[Tensor | None]:
    return [None] * len(widths) if bias is None else torch.split(bias, list(widths))
