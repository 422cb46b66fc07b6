"""Quantising to the block formats of GGUF files, and the choice of a format for each matrix.

"int8" is Q8_0 throughout. "int4" is the mix that llama.cpp calls Q4_K_M: Q4_K, and Q6_K for the
head and, in half of the layers, for values and the second matrix of the MLP. Where inputs do not
divide into blocks of 256, Q5_0 and Q8_0 replace Q4_K and Q6_K, as in llama.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from draftproof.gguf.blocks import BlockTensor
from draftproof.gguf.types import BLOCK_SIZES
from draftproof.native.kernels import kernels
from draftproof.native.structures import QUANTIZED
from draftproof.weights.block_linear import BlockLinear

HEADS = ("lm_head", "model.embed_tokens")
"""Modules that make logits."""
SENSITIVE = ("v_proj", "qkv_proj", "down_proj", "fc2", "dense_4h_to_h", "w2", "wo")
"""Modules whose errors cost most: values, and the second matrix of the MLP."""
BY_TORCH = {"Q4_K": "Q5_1", "Q6_K": "Q8_0"}
"""Their replacements where there are no kernels."""
CHUNK = 1 << 24
"""Weights quantised at a time, which bounds the copy in single precision."""


def format_of(name: str, kind: str, inputs: int, layers: int | None = None) -> str:
    """The format of a matrix.

    Args:
        name: The name of its module, such as "model.layers.3.mlp.down_proj" or "lm_head".
        kind: "int8" or "int4".
        inputs: The number of its inputs.
        layers: The number of layers of the model; None if unknown.
    """
    if kind == "int8":
        return "Q8_0"
    sensitive = name in HEADS
    number = re.search(r"\.(\d+)\.", name)
    if name.rpartition(".")[2] in SENSITIVE and number is not None:
        place, count = int(number[1]), layers or 0
        # the first and last eighth, and every third layer in between
        sensitive = place < count // 8 or place >= 7 * count // 8 or (place - count // 8) % 3 == 2
    if inputs % 256:
        return "Q8_0" if sensitive else "Q5_0"
    return "Q6_K" if sensitive else "Q4_K"


def quantize_blocks(weight: Tensor, format: str) -> BlockTensor:
    """Quantise a matrix.

    Args:
        weight: [outputs, inputs]; inputs are padded with zeros to whole blocks.
        format: One of `QUANTIZED`. Without kernels, `BY_TORCH` names its replacement.

    Returns:
        The blocks of the matrix.
    """
    library = kernels()
    format = format if library is not None else BY_TORCH.get(format, format)
    size, (outputs, inputs) = BLOCK_SIZES[format], weight.shape
    padded = inputs + -inputs % size.weights
    data = torch.empty(outputs, padded // size.weights * size.nbytes, dtype=torch.uint8)
    if library is not None and weight.dtype == torch.bfloat16 and padded == inputs:
        library("quantize_bf16", QUANTIZED.index(format), weight.detach(), outputs, inputs, data)
        return BlockTensor(format, (outputs, inputs), data)
    step = max(1, CHUNK // padded)
    for start in range(0, outputs, step):
        rows = F.pad(weight[start : start + step].detach().float(), (0, padded - inputs))
        rows, to = rows.contiguous(), data[start : start + step]
        if library is not None:
            library("quantize", QUANTIZED.index(format), rows, len(rows), padded, to)
        else:
            to.copy_(_by_numpy(rows, format))
    return BlockTensor(format, (outputs, inputs), data)


def quantized_blocks(
    names: Sequence[str], weights: Sequence[Tensor], bias: Tensor | None, kind: str,
    layers: int | None = None,
) -> BlockLinear:  # fmt: skip
    """Quantise matrices that read the same inputs.

    Args:
        names: The names of their modules, which determine their formats.
        weights: [outputs, inputs] of each.
        bias: [sum of outputs], or None.
        kind: "int8" or "int4".
        layers: The number of layers of the model; None if unknown.

    Returns:
        One layer with the outputs of all, in order; adjacent matrices of one format form one part.
    """
    formats = [format_of(name, kind, weights[0].shape[1], layers) for name in names]
    parts = list[BlockTensor]()
    for format, weight in zip(formats, weights, strict=True):
        part = quantize_blocks(weight, format)
        if parts and parts[-1].type == part.type:
            before = parts.pop()
            shape = (before.shape[0] + part.shape[0], part.shape[1])
            part = BlockTensor(part.type, shape, torch.cat([before.data, part.data]))
        parts.append(part)
    return BlockLinear.from_blocks(parts, bias)


def _by_numpy(rows: Tensor, format: str) -> Tensor:
    from gguf import GGMLQuantizationType, quants

    return torch.from_numpy(quants.quantize(rows.numpy(), GGMLQuantizationType[format]))
