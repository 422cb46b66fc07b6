"""The shape of one recurrent or convolutional state of a layer."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class StateShape(NamedTuple):
    """One state of a layer for one row: "conv" or "recurrent", and its number in the layer."""

    kind: str
    number: int
    size: tuple[int, ...]
    dtype: torch.dtype

    def empty(self, rows: int, device: torch.device) -> Tensor:
        """The state before the first token."""
        return torch.zeros(rows, *self.size, dtype=self.dtype, device=device)
