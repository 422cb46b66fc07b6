"""The weights of a GGUF file for a native model."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from draftproof.errors import ModelNotFound
from draftproof.gguf.blocks import PLAIN, BlockTensor, dequantize
from draftproof.gguf.config import Model, model_of
from draftproof.gguf.file import GGUFFile
from draftproof.gguf.weights import blocks_of, numbers_of
from draftproof.model.native_config import why_not_native
from draftproof.model.native_model import NativeModel
from draftproof.model.pack import pack
from draftproof.model.packed_linear import JointLinear
from draftproof.model.token_table import DenseTable, TokenTable

log = logging.getLogger("draftproof")


class BlockTable:
    """Token embeddings in blocks, whose rows are unpacked when they are looked up.

    Args:
        blocks: [vocab, size], in the mapped file.
        dtype: Of the rows.
    """

    weight: Tensor | None = None

    def __init__(self, blocks: BlockTensor, dtype: torch.dtype) -> None:
        self.blocks, self.dtype = blocks, dtype

    @property
    def shape(self) -> tuple[int, int]:
        return self.blocks.shape[0], self.blocks.shape[1]

    def rows(self, tokens: Tensor) -> Tensor:
        rows = dequantize(self.blocks.rows(tokens.flatten()), self.dtype)
        return rows.view(*tokens.shape, -1)


class GGUFSource:
    """The weights of a GGUF file by their Hugging Face names.

    Args:
        file: The file.
        model: What it says about its model.
        dtype: What is computed in.
        kind: None keeps matrices as they are; "int8" or "int4" quantises them anew.
    """

    def __init__(
        self, file: GGUFFile, model: Model, dtype: torch.dtype, kind: str | None = None
    ) -> None:
        self.file, self.model, self.dtype, self.kind = file, model, dtype, kind

    def with_kind(self, kind: str | None) -> GGUFSource:
        """The same file, with matrices packed in other bits."""
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
        return pack(names, [dequantize(part, self.dtype) for part in parts], joined, self.kind)

    def embedding(self, name: str) -> TokenTable:
        blocks = self._blocks(name)
        if PLAIN.get(blocks.type) == self.dtype:
            return DenseTable(dequantize(blocks, self.dtype))
        return BlockTable(blocks, self.dtype)

    def _blocks(self, name: str) -> BlockTensor:
        """The matrix of a module."""
        stored = self.model.tensors.get(f"{name}.weight")
        if stored is None:
            raise ModelNotFound(f"{self.file.path} lacks {name}.weight; fetch it again")
        return blocks_of(self.file, stored)


def native_gguf(
    path: str | Path, dtype: torch.dtype, *, unpack: bool = False
) -> NativeModel | None:
    """The model of a GGUF file, read by our own forward; None where another has to read it.

    Args:
        path: The file, or any part of a split one.
        dtype: What activations, keys and values are computed in.
        unpack: Unpack matrices to `dtype`, where they would stay in blocks.
    """
    file = GGUFFile.open(path)
    model = model_of(file)
    if model is None or why_not_native(model.config) is not None:
        return None
    if model.unused:
        more = f" and {len(model.unused) - 1} more" if model.unused[1:] else ""
        log.warning("note: %s%s of %s: not used", model.unused[0], more, file.path)
    return NativeModel(model.config, GGUFSource(file, model, dtype), dtype=dtype, name=str(path))
