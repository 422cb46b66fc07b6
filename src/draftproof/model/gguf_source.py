"""The weights of a GGUF file for a native model."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from draftproof.errors import ModelNotFound
from draftproof.forward.native_config import why_not_native
from draftproof.gguf.blocks import BlockTensor, dequantize
from draftproof.gguf.config import Model, model_of
from draftproof.gguf.file import GGUFFile
from draftproof.gguf.weights import blocks_of, numbers_of
from draftproof.model.native_model import NativeModel
from draftproof.native.formats import FORMATS
from draftproof.native.kernels import kernels
from draftproof.native.pages import release
from draftproof.weights.block_linear import BlockLinear, BlockTable
from draftproof.weights.pack import pack
from draftproof.weights.packed_linear import JointLinear
from draftproof.weights.token_table import DenseTable, TokenTable

log = logging.getLogger("draftproof")

BLOCKS = "blocks"
"""The kind of matrices that stay as the file has them."""


class GGUFSource:
    """The weights of a GGUF file by their Hugging Face names.

    Args:
        file: The file.
        model: The file's description of its model.
        dtype: The dtype of computation.
        kind: `BLOCKS` keeps matrices in the blocks of the file; None unpacks them to `dtype`;
            "int8" or "int4" quantises them again.
    """

    def __init__(
        self, file: GGUFFile, model: Model, dtype: torch.dtype, kind: str | None = None
    ) -> None:
        self.file, self.model, self.dtype, self.kind = file, model, dtype, kind

    def with_kind(self, kind: str | None) -> GGUFSource:
        """The same file, with matrices packed to another number of bits."""
        return GGUFSource(self.file, self.model, self.dtype, kind)

    def __contains__(self, name: str) -> bool:
        return name in self.model.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.model.tensors)

    def tensor(self, name: str) -> Tensor:
        if name not in self.model.tensors:
            raise ModelNotFound(f"{self.file.path} lacks {name}; fetch it again")
        return numbers_of(self.file, self.model.tensors[name])

    def linear(self, names: Sequence[str], bias: bool) -> JointLinear:
        parts = [self._blocks(name) for name in names]
        biases = [self.tensor(f"{name}.bias") for name in names] if bias else []
        joined = torch.cat(biases).to(self.dtype) if biases else None
        layer: JointLinear
        if self.kind == BLOCKS:
            layer = BlockLinear.from_blocks(parts, joined, release)
        else:
            weights = [dequantize(part, self.dtype) for part in parts]
            layer = pack(names, weights, joined, self.kind)
        for name in names:                  # or mapped pages would stay resident
            release(self.file.tensors[self.model.tensors[f"{name}.weight"].name].data)
        return layer

    def embedding(self, name: str) -> TokenTable:
        blocks = self._blocks(name)
        if self.kind == BLOCKS and blocks.type in FORMATS:
            return BlockTable(blocks, self.dtype)
        table = DenseTable(dequantize(blocks, self.dtype))
        release(blocks.data)
        return table

    def _blocks(self, name: str) -> BlockTensor:
        """The matrix of a module."""
        stored = self.model.tensors.get(f"{name}.weight")
        if stored is None:
            raise ModelNotFound(f"{self.file.path} lacks {name}.weight; fetch it again")
        return blocks_of(self.file, stored)


def native_gguf(
    path: str | Path, dtype: torch.dtype, *, unpack: bool = False
) -> NativeModel | None:
    """The model of a GGUF file, read by our own forward; None if our forward cannot read it.

    Args:
        path: The file, or any part of a split file.
        dtype: The dtype of activations, keys and values.
        unpack: Unpack matrices to `dtype` instead of keeping them in blocks.
    """
    file = GGUFFile.open(path)
    model = model_of(file)
    if model is None or why_not_native(model.config) is not None:
        return None
    note_unused(file, model)
    kind = None if unpack or kernels() is None else BLOCKS
    source = GGUFSource(file, model, dtype, kind)
    return NativeModel(model.config, source, dtype=dtype, name=str(path))


def note_unused(file: GGUFFile, model: Model) -> None:
    """Note the tensors of the file that nothing reads."""
    if model.unused:
        more = f" and {len(model.unused) - 1} more" if model.unused[1:] else ""
        log.warning("note: %s%s of %s: not used", model.unused[0], more, file.path)
