"""An Intel Gaudi emulated on the CPU: its rules, enforced on every operator of a decoding round.

A Gaudi (hpu) runs graphs compiled for shapes. Inside a round nothing may be read back to the host
but what is declared, no shape may depend on data, nothing may be written through a view of a part,
no number may need more than 32 bits, nothing may come from the host, and, once warm, no graph may
be new. The device's arithmetic cannot be emulated. Ground: Gaudi's documentation of HPU graphs,
dynamic shapes and data types; docs/devices.md has the rules.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from draftproof.core.params import Sampling
from draftproof.engine import engine as engines
from draftproof.engine.decoder import Decoder
from draftproof.engine.engine import Engine
from draftproof.engine.shape_policy import ShapePolicy
from draftproof.model.device import Device

LENGTHS = tuple(range(1, 40, 2))
"""Twenty prompts of different lengths."""
PARTS = ("round", "draft", "read", "accept", "observe")
"""What a round is made of; "round" is the rest of it."""
GRAPHS = 3
"""Graphs of a part for each number of draft tokens: a draft model's first read has three widths."""
READS = {"_local_scalar_dense", "item", "is_nonzero", "equal", "allclose"}
"""Operators that answer on the host."""
DYNAMIC = {
    "nonzero", "masked_select", "unique", "_unique", "_unique2", "unique_consecutive", "unique_dim",
    "bincount", "repeat_interleave.Tensor", "repeat_interleave.self_Tensor", "nonzero_numpy",
}
"""Operators whose output's shape depends on data."""
TO_HOST = {
    "tolist", "numpy", "cpu", "__array__", "__bool__", "__int__", "__float__", "__index__", "item",
}
"""Methods that read a tensor, some of which no operator shows on a CPU."""


class ForbiddenOnDevice(Exception):
    """An operator that the emulated device cannot follow."""


class DeviceEmulation(TorchDispatchMode):
    """Watches operators, and the part they belong to. The rules hold once it is `warm`.

    A part is one call of one component; its graph is the sequence of its operators, their shapes,
    dtypes and plain arguments. Nested parts are counted separately.
    """

    def __init__(self) -> None:
        super().__init__()
        self.graphs: dict[str, set[int]] = defaultdict(set)     # by part, the graphs met
        self.calls: dict[str, int] = defaultdict(int)
        self.read = 0                                           # declared reads, in all
        self.warm = self.strict = False
        self.prefix = ""
        self._stack: list[list[object]] = []
        self._readable = 0

    @contextmanager
    def running(self) -> Iterator[DeviceEmulation]:
        """Watch what runs inside."""
        with _Calls(self), self:
            yield self

    @contextmanager
    def part(self, name: str, strict: bool = False, reads: int = 0) -> Iterator[None]:
        """One call of a component. strict: the rules hold; otherwise only shapes are noted.
        reads: so many are declared inside."""
        outer, self.strict = self.strict, self.strict or (strict and self.warm)
        self._readable += reads
        self._stack.append([])
        try:
            yield
            graph = hash(tuple(self._stack[-1]))
            self.calls[name] += 1
            if graph not in self.graphs[name]:
                self.forbid(f"{name} met a shape after warm-up that it had not met before")
            self.graphs[name].add(graph)
        finally:
            self.strict = outer
            self._stack.pop()
            self._readable = 0 if reads else self._readable

    def wrapped(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call` as a part: of a round, or (after `prefix` was set) of reading a prompt."""
        def run(*args: Any, **how: Any) -> Any:
            with self.part(self.prefix + name, strict=not self.prefix):
                return call(*args, **how)

        return run

    @contextmanager
    def free(self) -> Iterator[None]:
        """Work between rounds, where the rules do not hold."""
        outer, self.strict = self.strict, False
        try:
            yield
        finally:
            self.strict = outer

    def forbid(self, what: str) -> None:
        if self.strict:
            raise ForbiddenOnDevice(what)

    def reads(self, what: str) -> None:
        """Something reads a tensor on the host."""
        if self._readable == 0:
            self.forbid(f"{what} reads a tensor back to the host inside a round")
        elif self.strict:
            self._readable -= 1
            self.read += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every operator, as the device would see it."""
        kwargs, name = kwargs or {}, func._schema.name.removeprefix("aten::")
        full = f"{name}.{func._overloadname}"
        if name in READS:
            self.reads(name)
        masks = name in ("index", "index_put", "index_put_") and any(
            isinstance(tree_leave, Tensor) and tree_leave.dtype in (torch.bool, torch.uint8)
            for tree_leave in tree_leaves(args[1])
        )
        alone = name == "where" and len(args) == 1
        if masks or alone or name in DYNAMIC or full in DYNAMIC:
            self.forbid(f"{name} makes a shape that depends on data")
        if name == "lift_fresh":
            self.forbid("a constant copies host data to the device inside a round")
        out = func(*args, **kwargs)
        if self._stack:
            self._stack[-1].append((full, *map(_plain, tree_leaves((args, kwargs)))))
        if self.strict:
            self._check(full, func, args, tree_leaves(out))
        return out

    def _check(self, name: str, func: Any, args: Any, made: Sequence[object]) -> None:
        """What an operator wrote and made."""
        for argument, tensor in zip(func._schema.arguments, args, strict=False):
            alias = argument.alias_info
            if alias is None or not alias.is_write or not isinstance(tensor, Tensor):
                continue
            whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
            if not whole or not tensor.is_contiguous():
                self.forbid(f"{name} writes into a view, a part of its tensor")
        for tensor in made if not name.startswith("empty") else ():
            if isinstance(tensor, Tensor) and tensor.numel():
                if tensor.dtype == torch.float64:
                    self.forbid(f"{name} makes a float64 tensor; the device has none")
                if tensor.dtype == torch.int64 and int(tensor.abs().max()) >= 1 << 31:
                    self.forbid(f"{name} makes int64 numbers beyond 32 bits")


class _Calls(TorchFunctionMode):
    """Methods that leave no trace among operators when the tensor is on the CPU already."""

    def __init__(self, emulation: DeviceEmulation) -> None:
        super().__init__()
        self.emulation = emulation

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if func in (torch.tensor, torch.as_tensor, torch.from_numpy, torch.asarray):
            self.emulation.forbid(f"torch.{name} copies host data to the device inside a round")
        if name in TO_HOST and args and isinstance(args[0], Tensor):
            self.emulation.reads(name)
            with self.emulation.free():                         # its parts were counted as one
                return func(*args, **kwargs)
        if name == "to" and "cpu" in [*args[1:], *kwargs.values()]:
            self.emulation.reads("to('cpu')")
        return func(*args, **kwargs)


def _plain(value: object) -> object:
    """What a graph knows of an argument: of a tensor its form, of anything else its value."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.stride(), value.storage_offset()
    return value if isinstance(value, (bool, int, type(None), torch.dtype)) else str(value)


# Decoding under the rules


class Emulated(NamedTuple):
    """What a run counted. graphs: of each part of a round."""

    rounds: int
    reads: int
    graphs: Mapping[str, int]
    tokens: list[list[int]]


@torch.inference_mode()
def emulate(
    engine: Engine, *, lengths: Sequence[int] = LENGTHS, new_tokens: int = 12, batch_size: int = 4,
    sampling: Sampling | None = None,
) -> Emulated:
    """Decode random prompts of these lengths under the rules of a device that compiles graphs.

    The engine is warmed up first; then no shape, and no constant, may be new. Raises
    ForbiddenOnDevice for the first operator that breaks a rule, and where a part took more than
    `GRAPHS` graphs for each size of draft.
    """
    emulation, ours = DeviceEmulation(), copy.copy(engine)
    ours.shapes = engine.shapes if engine.shapes.closed else ShapePolicy(closed=True)
    dice = torch.Generator().manual_seed(0)
    vocab = engine.target.vocab_size
    prompts = [torch.randint(vocab, (length,), generator=dice).tolist() for length in lengths]
    with _patched(emulation, ours), emulation.running():
        for _ in range(2):                                  # constants are made in the first
            emulation.graphs.clear()
            ours.warm_up(max(lengths) + new_tokens, batch_size=batch_size, sampling=sampling)
        emulation.warm, before = True, emulation.calls["round"]
        done = ours.generate(
            prompts, max_new_tokens=new_tokens, sampling=sampling, batch_size=batch_size
        )
    graphs = {part: len(emulation.graphs[part]) for part in PARTS}
    most = GRAPHS * len(getattr(ours.budget, "sizes", (0,)))
    for part, count in graphs.items():
        if count > most:
            raise ForbiddenOnDevice(f"{part} took {count} graphs, at most {most} were allowed")
    rounds = emulation.calls["round"] - before
    return Emulated(rounds, emulation.read, graphs, [completion.tokens for completion in done])


@contextmanager
def _patched(emulation: DeviceEmulation, engine: Engine) -> Iterator[None]:
    """While this lasts, target and drafter are parts, and the decoder holds the device's rules."""

    class Watched(Decoder):
        """Tells the emulation which part runs, and whether the rules hold."""

        def __init__(self, *args: Any, **how: Any) -> None:
            super().__init__(*args, **how)
            self.rule = self.rule._replace(accept=emulation.wrapped("accept", self.rule.accept))
            ours: Any = self.drafter                                     # of this run
            ours.propose = emulation.wrapped("draft", ours.propose)
            ours.observe = emulation.wrapped("observe", ours.observe)
            self.addresses, self._arrange = self._addresses(), self.batch.reorder
            self.batch.reorder = self.between_rounds  # type: ignore[method-assign]

        def _addresses(self) -> list[int]:
            return [store.data_ptr() for layer in self.batch.cache.layers for store in layer.stores]

        def step(self, *args: Any, **how: Any) -> Any:
            if self.batch.padding is None:
                self.batch._pad()
            with emulation.part("round", strict=True, reads=1):
                done = super().step(*args, **how)
            if self._addresses() != self.addresses:
                raise ForbiddenOnDevice("the KV cache moved in memory")
            return done

        def read(self, prefill: Any) -> bool:
            emulation.prefix = "prompt: "
            whole = super().read(prefill)
            emulation.prefix = ""
            return whole

        def between_rounds(self, *args: Any) -> None:
            with emulation.free(), emulation.part("between rounds"):
                self._arrange(*args)

    with (
        patch.object(engine.target, "read", emulation.wrapped("read", engine.target.read)),
        patch.object(engines, "Decoder", Watched),
        patch.object(Device, "widest", torch.float32),
    ):
        yield
