"""How quantised checkpoints store a matrix: GPTQ, AWQ, compressed-tensors, FP8, MXFP4 and NVFP4.

Each reader takes the stored tensors of one module and returns its exact values: as `Codes` where
they are integers, as a `BlockTensor` where the layout is that of a GGUF block, else as float32.

Sources of the layouts: GPTQModel (nn_modules/qlinear), AutoAWQ (utils/packing_utils.py),
compressed-tensors (compressors/), transformers (integrations/finegrained_fp8.py, mxfp4.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from draftproof.errors import ModelNotFound
from draftproof.gguf.blocks import BlockTensor, block_tensor
from draftproof.weights.stored_codes import Codes, unpacked_bits

Matrix = Codes | BlockTensor | Tensor
"""A matrix [outputs, inputs]; a Tensor is float32."""

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where the outputs 0 to 7 are among the 4-bit codes of a word (AutoAWQ packs 0, 2, 4, 6, 1, 3, 5,
7)."""
FLOATS_OF_4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Sizes of E2M1 numbers; the fourth bit is the sign."""
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


class Layout(NamedTuple):
    """The configuration's description of the layout.

    Attributes:
        zero_offset: The difference between GPTQ's actual and stored zero points: 1 in the first
            version of the format, 0 in the second.
        tile: The numbers of outputs and inputs that share a scale in blockwise FP8.
    """

    zero_offset: int = 1
    tile: tuple[int, int] = (128, 128)


class Parts:
    """The stored tensors of one module.

    Args:
        name: The name of the module.
        find: Returns the tensor of a full name; None if there is none.
    """

    def __init__(self, name: str, find: Callable[[str], Tensor | None]) -> None:
        self.name, self._find = name, find

    def get(self, *kinds: str) -> Tensor | None:
        """The first existing tensor of several kinds, such as "qweight"."""
        tensors = (self._find(f"{self.name}.{kind}") for kind in kinds)
        return next((tensor for tensor in tensors if tensor is not None), None)

    def need(self, *kinds: str) -> Tensor:
        """As `get`, but the tensor must exist.

        Raises:
            ModelNotFound: There is none.
        """
        tensor = self.get(*kinds)
        if tensor is None:
            raise ModelNotFound(
                f"{self.name} is quantised and lacks its {' or '.join(kinds)}; fetch the "
                "checkpoint again"
            )
        return tensor

    def misfit(self, kind: str, tensor: Tensor) -> ModelNotFound:
        """The error for a tensor whose shape does not match its weight."""
        return ModelNotFound(
            f"{self.name}.{kind} has the shape {list(tensor.shape)}, which does not fit its "
            "weight; fetch the checkpoint again"
        )


def read_module(parts: Parts, layout: Layout) -> Matrix:
    """The matrix of a quantised module.

    Args:
        parts: Its tensors.
        layout: The layout from the configuration.

    Raises:
        ModelNotFound: Tensors are missing or do not fit together.
    """
    if (words := parts.get("qweight")) is not None:
        scales = parts.need("scales")
        if words.shape[1] == scales.shape[1]:
            return _gptq(parts, words, scales, layout.zero_offset)
        return _awq(parts, words, scales)
    if (packed := parts.get("weight_packed")) is not None:
        if packed.dtype == torch.uint8:
            return _floats_of_4(parts, packed)
        return _packed_integers(parts, packed)
    weight = parts.need("weight")
    if weight.dtype == torch.int8:
        scales = parts.need("weight_scale")
        return _integers(parts, weight.short(), parts.get("weight_zero_point"), scales)
    if weight.dtype == torch.uint8:
        return _floats_of_4(parts, weight)
    return _float8(parts, weight, layout.tile)


def _gptq(parts: Parts, words: Tensor, scales: Tensor, zero_offset: int) -> Matrix:
    """qweight int32 [inputs * bits / 32, outputs], qzeros [groups, outputs * bits / 32]."""
    groups, outputs = scales.shape
    stored = parts.need("qzeros")
    bits, rest = divmod(stored.shape[1] * 32, outputs)
    if rest or bits not in (2, 3, 4, 8) or len(stored) != groups:
        raise parts.misfit("qzeros", stored)
    zeros = unpacked_bits(_bytes(stored), bits).short() + zero_offset       # [groups, outputs]
    codes = unpacked_bits(_bytes(words.t()), bits).short()                  # [outputs, inputs]
    inputs = codes.shape[1]
    order = parts.get("g_idx")
    if order is not None and (len(order) != inputs or not _within(order, groups)):
        raise parts.misfit("g_idx", order)
    return _grouped(parts, codes, zeros.t(), scales.float().t(), order)


def _awq(parts: Parts, words: Tensor, scales: Tensor) -> Matrix:
    """qweight int32 [inputs, outputs / 8], qzeros [groups, outputs / 8], both in `AWQ_ORDER`."""
    stored, (groups, outputs) = parts.need("qzeros"), scales.shape
    if words.shape[1] * 8 != outputs:
        raise parts.misfit("qweight", words)
    if tuple(stored.shape) != (groups, outputs // 8):
        raise parts.misfit("qzeros", stored)

    def ordered(packed: Tensor) -> Tensor:              # [outputs, ...]
        codes = unpacked_bits(_bytes(packed), 4).view(len(packed), -1, 8)
        return codes[..., list(AWQ_ORDER)].flatten(1).short().t()

    return _grouped(parts, ordered(words), ordered(stored), scales.float().t(), None)


def _packed_integers(parts: Parts, packed: Tensor) -> Matrix:
    """weight_packed int32 [outputs, words], unsigned codes, with their unpacked shape."""
    shape, scales = parts.need("weight_shape").tolist(), parts.need("weight_scale")
    outputs, inputs = int(shape[0]), int(shape[1])
    bits = next((bits for bits in (2, 4, 8) if -(-inputs * bits // 32) == packed.shape[1]), 0)
    if not bits or len(packed) != outputs:
        raise parts.misfit("weight_packed", packed)
    middle = 1 << (bits - 1)
    codes = unpacked_bits(_bytes(packed), bits)[:, :inputs].short() - middle
    zeros = parts.get("weight_zero_point")
    if zeros is not None and zeros.dtype == torch.int32:                    # packed by outputs
        zeros = unpacked_bits(_bytes(zeros.t()), bits)[:, :outputs].short().t() - middle
    return _integers(parts, codes, zeros, scales)


def _integers(parts: Parts, codes: Tensor, zeros: Tensor | None, scales: Tensor) -> Matrix:
    """Signed codes, with one scale, or scales [outputs, 1] or [outputs, groups]."""
    if scales.dim() < 2:
        scales = scales.reshape(-1, 1)
    if len(scales) == 1:
        scales = scales.expand(len(codes), -1)
    if len(scales) != len(codes):
        raise parts.misfit("weight_scale", scales)
    if zeros is None:
        zeros = torch.zeros(scales.shape, dtype=torch.int16)
    else:
        zeros = zeros.short().reshape(-1, scales.shape[1]).expand(len(codes), -1)
    return _grouped(parts, codes, zeros, scales.float(), parts.get("weight_g_idx"))


def _grouped(
    parts: Parts, codes: Tensor, zeros: Tensor, scales: Tensor, order: Tensor | None
) -> Matrix:
    """Codes [outputs, inputs] with zero points and scales [outputs, groups].

    order: [inputs] the group of each input, or None if groups are consecutive. Inputs grouped by
    activations (`desc_act`) have no blocks, so their values are float32.
    """
    (outputs, inputs), groups = codes.shape, scales.shape[1]
    if inputs % groups:
        raise parts.misfit("scales", scales)
    consecutive = torch.arange(inputs) // (inputs // groups)
    order = None if order is None or bool((order < 0).all()) else order.long()
    if order is not None and not torch.equal(order, consecutive):
        return (codes - zeros[:, order]) * scales[:, order]
    numbers = codes.view(outputs, groups, -1) - zeros[:, :, None]
    return Codes(numbers.view(outputs, inputs), scales.contiguous())


def _floats_of_4(parts: Parts, packed: Tensor) -> Matrix:
    """E2M1 numbers, two per byte: MXFP4 with exponents as scales, NVFP4 with E4M3 scales."""
    scales = parts.need("weight_scale")
    inputs, groups = 2 * packed.shape[1], scales.shape[1]
    if len(scales) != len(packed) or inputs % groups:
        raise parts.misfit("weight_scale", scales)
    codes = unpacked_bits(packed, 4)
    if scales.dtype == torch.uint8 and inputs // groups == 32:
        return mxfp4_blocks(codes, scales)
    divisor, factor = parts.get("weight_global_scale"), parts.get("weight_scale_2")
    exact = scales.float()
    if divisor is not None:
        exact = exact / divisor.float()
    elif factor is not None:
        exact = exact * factor.float()
    else:
        raise parts.misfit("weight_scale", scales)
    sizes = torch.tensor([*FLOATS_OF_4, *(-size for size in FLOATS_OF_4)], dtype=torch.float32)
    values = sizes[codes.long()].view(len(codes), groups, -1)
    return (values * exact[:, :, None]).view(len(codes), inputs)


def mxfp4_blocks(codes: Tensor, exponents: Tensor) -> BlockTensor:
    """Pack E2M1 codes as MXFP4 blocks of a GGUF file, with the first 16 codes in lower halves.

    Args:
        codes: uint8 [outputs, inputs], each less than 16.
        exponents: uint8 [outputs, inputs / 32], exponents of two plus 127.
    """
    outputs, inputs = codes.shape
    first, second = torch.split(codes.view(outputs, -1, 32), 16, -1)
    data = torch.cat([exponents[:, :, None], first | second << 4], -1)
    return block_tensor("MXFP4", (outputs, inputs), data.view(outputs, -1))


def _float8(parts: Parts, weight: Tensor, tile: tuple[int, int]) -> Tensor:
    """8-bit floats with one scale, or with scales per output, group or tile.

    Despite its name, `weight_scale_inv` is the factor of the weights.
    """
    scales = parts.need("weight_scale_inv", "weight_scale").float()
    (outputs, inputs), values = weight.shape, weight.float()
    if scales.numel() == 1:
        return values * scales.reshape(())
    if scales.dim() == 1:
        scales = scales[:, None]
    rows, columns = scales.shape
    high, wide = (1, inputs // max(columns, 1)) if rows == outputs else tile
    if (rows, columns) != (-(-outputs // high), -(-inputs // max(wide, 1))):
        raise parts.misfit("weight_scale", scales)
    expanded = scales.repeat_interleave(high, 0)[:outputs]
    return values * expanded.repeat_interleave(wide, 1)[:, :inputs]


def _bytes(words: Tensor) -> Tensor:
    """The bytes, uint8 [..., 4 n], of int32 [..., n], lower bytes first."""
    return words.contiguous().view(torch.uint8)


def _within(numbers: Tensor, count: int) -> bool:
    return bool(((numbers >= 0) & (numbers < count)).all())
