"""The only seam between functions written in torch and faster implementations of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


class Ops:
    """Runs functions of tensors as written: in torch, with static shapes, without host reads.

    A subclass may run another implementation that is registered for the function object, if it
    supports the dtypes and shapes; the torch function is the reference. exact: the widest
    floating-point type of the device. flush: called before a copy to the host.
    """

    on_host = False
    """Values can be read without waiting for a device, and shapes may depend on them."""

    def __init__(
        self, exact: torch.dtype = torch.float64, flush: Callable[[], None] | None = None
    ) -> None:
        self.exact, self._flush = exact, flush

    def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call `function` with these arguments; it may change tensors in place."""
        return function(*args, **kwargs)

    def to_host(self, *columns: Tensor) -> list[list[list[Any]]]:
        """Tensors [B, n] as lists of numbers, in one copy from the device."""
        kinds = [column.is_floating_point() for column in columns]
        dtype = self.exact if any(kinds) else torch.int64       # token ids are far below 2**24
        if self._flush is not None:
            self._flush()
        rows: list[list[Any]] = torch.cat([column.to(dtype) for column in columns], 1).tolist()
        lists, start = [], 0
        for column, floating in zip(columns, kinds, strict=True):
            end = start + column.shape[1]
            part = [row[start:end] for row in rows]
            lists.append(part if floating else [list(map(int, row)) for row in part])
            start = end
        return lists


TORCH = Ops()
"""Plain torch on any device."""
