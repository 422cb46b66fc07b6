"""The table of token embeddings, dense or in blocks."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from draftproof.native.structures import Embeddings, Native


class TokenTable(Protocol):
    """The embeddings of all tokens, [vocab, size]."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def weight(self) -> Tensor | None:
        """The whole table in the model's dtype, contiguous, if it is in memory or in a mapped file;
        None if its rows are stored in blocks and unpacked when they are looked up."""

    @property
    def native(self) -> Native | None:
        """The table in the form our kernels read; None if they cannot read it."""

    def rows(self, tokens: Tensor) -> Tensor:
        """Look up embeddings.

        Args:
            tokens: [...] int64, each from 0 to vocab - 1.

        Returns:
            [..., size] in the model's dtype.
        """


class DenseTable:
    """Token embeddings as a plain tensor, in memory or in a mapped file."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def native(self) -> Native | None:
        readable = self.weight.dtype == torch.bfloat16 and self.weight.device.type == "cpu"
        return Embeddings(self.weight, *self.shape, 0) if readable else None

    def rows(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)
