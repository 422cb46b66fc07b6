"""A rehearsal of another device on the CPU: its rules, enforced on every operator. Knows operators; nothing of decoding.

Intel Gaudi (hpu) runs graphs that are compiled for shapes. Inside a round nothing may be read back to the host but what is
declared, no shape may depend on data, nothing may be written through a view of a part, no number may need more than 32 bits,
nothing may come from the host, and, once warm, no graph may be new. What cannot be rehearsed is the device's arithmetic.

Ground: Gaudi's documentation of HPU graphs, dynamic shapes and data types; docs/gaudi.md says what each rule stands for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from draftproof.errors import ForbiddenOnDevice
from draftproof.model.device import Device

LARGEST = 1 << 31
"""Integers live in 32 bits there, whatever their dtype says."""

_READS = {"_local_scalar_dense", "item", "is_nonzero", "equal", "allclose"}
"""Operators that answer on the host."""
_DYNAMIC = {
    "nonzero", "masked_select", "unique", "_unique", "_unique2", "unique_consecutive", "unique_dim", "bincount",
    "repeat_interleave.Tensor", "repeat_interleave.self_Tensor", "nonzero_numpy",
}
"""Operators whose output's shape depends on data."""
_TO_HOST = {"tolist", "numpy", "cpu", "__array__", "__bool__", "__int__", "__float__", "__index__", "item"}
"""Methods that read a tensor, some of which no operator shows on a CPU."""
_FROM_HOST = {"tensor", "as_tensor", "from_numpy", "asarray"}
"""Functions that make a tensor of host data."""


class DeviceEmulation:
    """Watches operators, and what they belong to. The rules hold once it is `warm`: until then constants are made.

    A part is one call of one component; its graph is the sequence of its operators, their shapes, dtypes and plain
    arguments. Parts inside parts are counted apart.
    """

    def __init__(self) -> None:
        self.graphs: dict[str, set[int]] = defaultdict(set)     # by part, the graphs met
        self.calls: dict[str, int] = defaultdict(int)
        self.read = 0                                           # by declared reads, in all
        self.warm = False
        self._stack: list[list[object]] = []
        self._strict = False
        self._readable = 0

    def forget(self) -> None:
        """Count anew."""
        self.graphs.clear()
        self.calls.clear()

    @contextmanager
    def running(self) -> Iterator[DeviceEmulation]:
        """Watch what runs inside."""
        with _Calls(self), _Operators(self):
            yield self

    @contextmanager
    def part(self, name: str, strict: bool = False) -> Iterator[None]:
        """One call of a component. `strict`: the rules hold inside; without, and outside, only shapes are noted."""
        outer, self._strict = self._strict, self._strict or (strict and self.warm)
        self._stack.append([])
        try:
            yield
            self._close(name)
        finally:
            self._strict = outer
            self._stack.pop()

    @contextmanager
    def free(self) -> Iterator[None]:
        """Work between rounds, in which the rules do not hold."""
        outer, self._strict = self._strict, False
        try:
            yield
        finally:
            self._strict = outer

    @contextmanager
    def reading(self, times: int) -> Iterator[None]:
        """So many reads are declared inside."""
        self._readable = times
        try:
            yield
        finally:
            self._readable = 0

    def reads(self, what: str) -> None:
        """Something reads a tensor on the host."""
        if not self._strict:
            return
        if self._readable == 0:
            raise ForbiddenOnDevice(f"{what} reads a tensor back to the host inside a round, whose one read is its last act")
        self._readable -= 1
        self.read += 1

    def host_data(self, what: str) -> None:
        """Something brings host data to the device."""
        if self._strict:
            raise ForbiddenOnDevice(f"{what} copies host data to the device inside a round; make it before, once")

    def operator(self, name: str, inputs: Sequence[object], outputs: Sequence[object], written: Sequence[Tensor]) -> None:
        """An operator ran."""
        if self._stack:
            self._stack[-1].append((name, *map(_plain, inputs)))
        if not self._strict:
            return
        for tensor in written:
            if tensor.numel() * tensor.element_size() != tensor.untyped_storage().nbytes() or not tensor.is_contiguous():
                raise ForbiddenOnDevice(
                    f"{name} writes into a view of shape {tuple(tensor.shape)}, a part of its tensor; graph compilers do not "
                    "follow that: use scatter, index_copy_ or where on the whole"
                )
        for made in outputs:
            if isinstance(made, Tensor) and not name.startswith("empty"):
                self._numbers(name, made)

    def _numbers(self, name: str, tensor: Tensor) -> None:
        if tensor.dtype == torch.float64:
            raise ForbiddenOnDevice(f"{name} makes a float64 tensor of shape {tuple(tensor.shape)}; the device has none")
        if tensor.dtype == torch.int64 and tensor.numel() and int(tensor.abs().max()) >= LARGEST:
            raise ForbiddenOnDevice(f"{name} makes int64 numbers beyond 32 bits, which the device does not keep; use int32")

    def _close(self, name: str) -> None:
        graph = hash(tuple(self._stack[-1]))
        self.calls[name] += 1
        if self._strict and graph not in self.graphs[name]:
            raise ForbiddenOnDevice(
                f"{name} met a shape after warm-up that it had not met before; {len(self.graphs[name])} graphs were known"
            )
        self.graphs[name].add(graph)


class EmulatedGaudi(Device):
    """What decoding asks of a device, answered as a Gaudi would."""

    @property
    def compiles(self) -> bool:
        return True

    @property
    def widest(self) -> torch.dtype:
        return torch.float32


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every operator, as the device would see it."""

    def __init__(self, rehearsal: DeviceEmulation) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rehearsal = rehearsal

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name.removeprefix("aten::")
        if name in _READS:
            self.rehearsal.reads(name)
        if self.rehearsal._strict:
            self._must_be_static(name, func, args)
        if name == "lift_fresh":
            self.rehearsal.host_data("a constant")
        out = func(*args, **kwargs)
        written = [
            value for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor)
        ]
        self.rehearsal.operator(f"{name}.{func._overloadname}", tree_leaves((args, kwargs)), tree_leaves(out), written)
        return out

    def _must_be_static(self, name: str, func: Any, args: Any) -> None:
        """Refuse operators whose output takes its shape from data; an index of bools is one."""
        masks = name in ("index", "index_put", "index_put_") and any(
            isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in tree_leaves(args[1])
        )
        alone = name == "where" and len(args) == 1
        if masks or alone or name in _DYNAMIC or f"{name}.{func._overloadname}" in _DYNAMIC:
            what = f"{name} with a mask" if masks else f"{name} of one argument" if alone else name
            raise ForbiddenOnDevice(f"{what} makes a shape that depends on data; use where, gather or topk")


class _Calls(TorchFunctionMode):
    """Methods that leave no trace among operators when the tensor is on the CPU already."""

    def __init__(self, rehearsal: DeviceEmulation) -> None:
        super().__init__()
        self.rehearsal = rehearsal

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        kwargs = kwargs or {}
        if name in _FROM_HOST and func in (torch.tensor, torch.as_tensor, torch.from_numpy, torch.asarray):
            self.rehearsal.host_data(f"torch.{name}")
        if name in _TO_HOST and args and isinstance(args[0], Tensor):
            self.rehearsal.reads(name)
            with self.rehearsal.free():                         # what it is made of was counted as one
                return func(*args, **kwargs)
        if name == "to" and "cpu" in [value for value in (*args[1:], *kwargs.values()) if isinstance(value, str)]:
            self.rehearsal.reads("to('cpu')")
        return func(*args, **kwargs)


def _plain(value: object) -> object:
    """What a graph knows of an argument: of a tensor its form, of anything else its value."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.stride(), value.storage_offset()
    return value if isinstance(value, (bool, int, type(None), torch.dtype)) else str(value)          # NaN is not NaN
