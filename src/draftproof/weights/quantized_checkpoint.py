"""Reads folders whose weights are already quantised, where the method is known.

Our kernels multiply matrices in a block format if it holds their values exactly; others are
unpacked to the dtype of the model. Other methods are left to transformers, and methods that
neither knows are refused: codes must never be read as if they were weights.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftproof.errors import BadInput, UnsupportedModel
from draftproof.gguf.blocks import BlockTensor, block_tensor, dequantize
from draftproof.native.kernels import kernels
from draftproof.weights.block_linear import BlockLinear
from draftproof.weights.pack import pack
from draftproof.weights.packed_linear import JointLinear
from draftproof.weights.quantized_layouts import FLOAT8, Layout, Matrix, Parts, read_module
from draftproof.weights.stored_codes import Codes, blocks_of_codes, why_no_blocks
from draftproof.weights.tensor_source import SafetensorsSource
from draftproof.weights.token_table import DenseTable, TokenTable

METHODS = ("gptq", "awq", "compressed-tensors", "fp8", "fbgemm_fp8", "modelopt")
"""Values of `quant_method` whose layouts are read here."""
FILES = (
    ("hf_quant_config.json", "modelopt", "quantization"), ("quantize_config.json", "gptq", ""),
    ("quant_config.json", "awq", ""),
)
"""Files in which ModelOpt, and older versions of AutoGPTQ and AutoAWQ, say it; the method; and the
key of what it says."""
COMPRESSED = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized",
              "mxfp4-pack-quantized", "nvfp4-pack-quantized", "mixed-precision", None)
"""Formats of compressed-tensors that are read here."""
MARKERS = ("qweight", "weight_packed")
"""Tensors that a quantised module has in place of its weight."""
SCALES = ("qzeros", "scales", "g_idx", "weight_scale", "weight_scale_inv", "weight_scale_2",
          "weight_zero_point", "weight_shape", "weight_g_idx", "weight_global_scale")
"""Tensors that belong to a quantised weight."""
OF_ACTIVATIONS = ("input_scale", "input_zero_point", "input_global_scale", "activation_scale",
                  "output_scale", "k_scale", "v_scale", "q_scale")
"""Scales for activations, keys and values in few bits, which are computed in more bits here."""
_CODES = (torch.int8, torch.uint8, *FLOAT8)


def quantization_of(folder: Path, settings: Mapping[str, object]) -> dict[str, Any] | None:
    """A folder's description of its quantisation; None if it has none.

    Args:
        folder: The folder.
        settings: Its config.json.
    """
    stated = settings.get("quantization_config") or settings.get("compression_config")
    if isinstance(stated, Mapping):
        return dict(stated)
    for file, method, key in FILES:
        try:
            content = json.loads((folder / file).read_text(encoding="utf-8"))
            return {"quant_method": method, **(content[key] if key else content)}
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None


def layout_of(name: str, stated: Mapping[str, Any]) -> Layout | None:
    """The layout of a quantised checkpoint; None for a method that is left to transformers.

    Args:
        name: The name of the checkpoint.
        stated: The result of `quantization_of`.

    Raises:
        UnsupportedModel: The method is known, but not this variant of it.
    """
    method = str(getattr(stated.get("quant_method"), "value", stated.get("quant_method")))
    if method not in METHODS:
        return None
    if method == "gptq":
        version = str(stated.get("checkpoint_format", "gptq"))
        if version not in ("gptq", "gptq_v2"):
            raise _unread(name, f"GPTQ's checkpoint format {version!r}", "gptq and gptq_v2")
        return Layout(zero_offset=1 if version == "gptq" else 0)
    if method == "awq":
        version = str(getattr(stated.get("version"), "value", stated.get("version", "gemm")))
        if version.lower() != "gemm":
            raise _unread(name, f"AWQ's version {version!r}", "gemm")
        return Layout()
    if method == "compressed-tensors":
        return _compressed(name, stated)
    tile = stated.get("weight_block_size") or (128, 128)
    return Layout(tile=(int(tile[0]), int(tile[1])))


def _compressed(name: str, stated: Mapping[str, Any]) -> Layout:
    """The layout of compressed-tensors."""
    groups = [group for group in (stated.get("config_groups") or {}).values()
              if isinstance(group, Mapping)]
    for format in (stated.get("format"), *(group.get("format") for group in groups)):
        if format not in COMPRESSED:
            known = ", ".join(str(format) for format in COMPRESSED if format)
            raise _unread(name, f"compressed-tensors' format {format!r}", known)
    sparse = (stated.get("sparsity_config") or {}).get("format", "dense")
    if sparse not in ("dense", None):
        raise _unread(name, f"the sparse format {sparse!r} of compressed-tensors", "dense weights")
    if (stated.get("transform_config") or {}).get("config_groups"):
        raise _unread(name, "transforms of compressed-tensors (SpinQuant, QuIP)", "plain weights")
    tiles = [tile for group in groups
             if (tile := (group.get("weights") or {}).get("block_structure"))]
    return Layout(tile=(int(tiles[0][0]), int(tiles[0][1]))) if tiles else Layout()


def _unread(name: str, what: str, known: str) -> UnsupportedModel:
    return UnsupportedModel(f"{name} is quantised in {what}, which is not read here; choose a "
                            f"checkpoint in {known}, or the original model")


def check_stored_as_numbers(name: str, folder: Path) -> None:
    """Refuse a folder whose weights are codes without a description of how to read them.

    Raises:
        UnsupportedModel: There are such weights.
    """
    source = SafetensorsSource(folder, torch.float32)
    for key in source:
        module, _, kind = key.rpartition(".")
        if kind in MARKERS or (kind == "weight" and source.stored_dtype(key) in _CODES):
            raise UnsupportedModel(
                f"{name} has quantised weights ({module}), and its config.json does not say how; "
                "add its quantization_config, or choose another checkpoint"
            )


class QuantizedSource(SafetensorsSource):
    """The weights of a folder with quantised modules.

    Args:
        folder: The folder.
        dtype: The dtype of computation and of unpacked weights.
        layout: The layout of the quantised modules.
        kind: None for block formats where they hold the values; "dense" to unpack all modules.

    Attributes:
        stored_as: The number of modules in each format, such as {"Q4_0": 196, "BF16": 1}.
        unpacked_because: Reasons to unpack modules, with an example for each.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, layout: Layout,
                 kind: str | None = None) -> None:  # fmt: skip
        super().__init__(folder, dtype, kind)
        self.layout = layout
        self.stored_as = Counter[str]()
        self.unpacked_because = dict[str, str]()
        self._quantized = set[str]()
        for key in self._file_of:
            module, _, part = key.rpartition(".")
            if part in MARKERS or (part == "weight" and self.stored_dtype(key) in _CODES):
                self._quantized.add(module)

    def with_kind(self, kind: str | None) -> QuantizedSource:
        if kind not in (None, "dense"):
            raise BadInput(f"{self.folder} is quantised already; do not ask for {kind}, or give "
                           "the original")
        return QuantizedSource(self.folder, self.dtype, self.layout, kind)

    def __contains__(self, name: str) -> bool:
        module, _, kind = name.rpartition(".")
        return super().__contains__(name) or (kind == "weight" and module in self._quantized)

    def __iter__(self) -> Iterator[str]:
        yield from (f"{module}.weight" for module in self._quantized)
        for name in super().__iter__():
            module, _, kind = name.rpartition(".")
            quantized = kind in ("weight", *MARKERS, *SCALES) and module in self._quantized
            if not quantized and kind not in OF_ACTIVATIONS:
                yield name

    @property
    def unread(self) -> list[str]:
        """Unused tensors, without the scales of activations."""
        return [name for name in super().unread
                if name.rpartition(".")[2] not in (*OF_ACTIVATIONS, *SCALES)]

    def tensor(self, name: str) -> Tensor:
        module, _, kind = name.rpartition(".")
        if kind == "weight" and module in self._quantized:
            return _numbers(self._matrix(module), self.dtype)
        stored = self.stored(name)
        return stored.float() if stored.dim() == 1 else stored.to(self.dtype)

    def linear(self, names: Sequence[str], bias: bool) -> JointLinear:
        biases = [self.tensor(f"{name}.bias") for name in names] if bias else []
        joined = torch.cat(biases).to(self.dtype) if biases else None
        matrices = [self._matrix(name) for name in names]
        blocks = [self._blocks(name, matrix) for name, matrix in zip(names, matrices, strict=True)]
        in_blocks = any(block.type != "BF16" for block in blocks)
        if self.kind is None and in_blocks and kernels() is not None:
            return BlockLinear.from_blocks(blocks, joined)
        numbers = [_numbers(matrix, self.dtype) for matrix in matrices]
        return pack(names, numbers, joined, self.kind, self._layers)

    def embedding(self, name: str) -> TokenTable:
        return DenseTable(self.tensor(f"{name}.weight"))

    def _matrix(self, module: str) -> Matrix:
        """The matrix of a module, quantised or not."""
        if module not in self._quantized:
            return super().tensor(f"{module}.weight")
        return read_module(Parts(module, self._stored), self.layout)

    def _stored(self, name: str) -> Tensor | None:
        return self.stored(name) if super().__contains__(name) else None

    def _blocks(self, module: str, matrix: Matrix) -> BlockTensor:
        """Store a matrix in a block format that holds its values, or in bfloat16; note which."""
        why = None
        if isinstance(matrix, Codes):
            why = why_no_blocks(matrix)
            blocks = blocks_of_codes(matrix) if why is None else _plain(matrix.values())
        elif isinstance(matrix, BlockTensor):
            blocks = matrix
        else:
            why = self._why_numbers(module) if module in self._quantized else None
            blocks = _plain(matrix)
        if why is not None:
            self.unpacked_because.setdefault(why, module)
        self.stored_as[blocks.type] += 1
        return blocks

    def _why_numbers(self, module: str) -> str:
        """Why a quantised matrix has neither codes nor blocks."""
        names = (f"{module}.{kind}" for kind in ("weight", "weight_packed"))
        if any(super(QuantizedSource, self).__contains__(name)
               and self.stored_dtype(name) in (torch.uint8, *FLOAT8) for name in names):
            return "no block format holds floats of 8 bits, or of 4 bits with fractional scales"
        return "inputs are grouped in the order of their activations (desc_act)"

    @property
    def described(self) -> str:
        """The formats of the matrices, in words."""
        blocks = {kind: count for kind, count in self.stored_as.items() if kind != "BF16"}
        parts = [f"{count} matrices in {kind} by our kernels, with the values of the checkpoint"
                 for kind, count in sorted(blocks.items())]
        if self.unpacked_because or not blocks:
            dtype = str(self.dtype).removeprefix("torch.")
            why = "; ".join(f"{why} ({module})" for why, module in self.unpacked_because.items())
            parts.append(f"others unpacked to {dtype}, which takes more memory and is slower: "
                         + (why or "there are no kernels for this machine"))
        return ". ".join(parts)


def _plain(values: Tensor) -> BlockTensor:
    """A matrix in bfloat16."""
    data = values.bfloat16().contiguous()
    return block_tensor("BF16", tuple(values.shape), data.view(torch.uint8))


def _numbers(matrix: Matrix, dtype: torch.dtype) -> Tensor:
    """[outputs, inputs] in `dtype`, rounded once."""
    if isinstance(matrix, Codes):
        return matrix.values().to(dtype)
    return dequantize(matrix, dtype) if isinstance(matrix, BlockTensor) else matrix.to(dtype)
