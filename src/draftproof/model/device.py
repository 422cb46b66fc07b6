"""Differences between devices: cpu, cuda, hpu, xpu and mps. Knows torch and its device modules;
knows nothing of models.

PyTorch's accelerator modules have a common interface (`torch.cuda`, `torch.hpu`, `torch.xpu`),
which most methods use. An Intel Gaudi (hpu) compiles a graph for every new shape, which takes
seconds to minutes: it needs a fixed set of shapes, no 64-bit numbers, and no reads by the host
within a round. The tests hold a CPU to these rules.
"""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from importlib import util
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch

from draftproof.core.ops import Ops
from draftproof.errors import BadInput, first_line
from draftproof.native.cpu_ops import CpuOps
from draftproof.native.kernels import kernels

R = TypeVar("R")

KINDS = {"cpu": "", "cuda": "CUDA device", "hpu": "Gaudi", "xpu": "Intel GPU", "mps": "Apple GPU"}


@dataclass(frozen=True)
class Device:
    """A device and its kind."""

    torch_device: torch.device

    @staticmethod
    def from_name(name: str | None = None) -> Device:
        """The device of this name, or the best one available; raises BadInput, in one sentence, if
        it does not exist."""
        if name is None:
            best = torch.accelerator.current_accelerator(check_available=True)
            gaudi = torch.device("hpu")
            return Device(gaudi if _missing(gaudi) is None else best or torch.device("cpu"))
        try:
            where = torch.device(name)
        except RuntimeError:
            where = torch.device("meta")                                # an unsupported kind
        if where.type not in KINDS:
            raise BadInput(
                f"the device was {name!r}; choose one of {', '.join(KINDS)}, such as cuda:1"
            )
        missing = _missing(where)
        if missing is not None:
            raise BadInput(
                f"device {name!r} was asked for, and {missing}; choose another, or leave it out"
            )
        return Device(where)

    @property
    def kind(self) -> str:
        return self.torch_device.type

    @property
    def name(self) -> str:
        """The name of the device for users."""
        named = getattr(self._module, "get_device_name", None)
        return str(named(self.torch_device)) if named is not None else processor()

    @property
    def compiles(self) -> bool:
        """Whether it compiles a graph for every new shape, so that shapes should be few."""
        return self.kind == "hpu"

    @property
    def captures(self) -> bool:
        """Whether it can record a sequence of operators once and replay it."""
        return self.kind in ("cuda", "hpu")

    @property
    def widest(self) -> torch.dtype:
        """The widest floating-point dtype that it supports."""
        return torch.float32 if self.kind in ("hpu", "mps") else torch.float64

    @property
    def bf16_is_native(self) -> bool:
        """Whether it multiplies bfloat16 in hardware."""
        if self.kind == "cpu":
            there = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
            return bool(there and torch.ops.mkldnn._is_mkldnn_bf16_supported())
        supported = getattr(self._module, "is_bf16_supported", None)
        return bool(supported()) if supported is not None else True

    def dtype_for(self, stored: torch.dtype) -> torch.dtype:
        """The default dtype of computation for weights stored in `stored`."""
        if stored == torch.float16 and self.kind == "hpu":      # the first Gaudi does not have it
            return torch.bfloat16
        quick = self.bf16_is_native or (self.kind == "cpu" and kernels() is not None)
        return torch.float32 if stored == torch.bfloat16 and not quick else stored

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Refuse a dtype that it does not support."""
        if dtype == torch.float64 and self.widest != dtype:
            raise BadInput(
                f"dtype float64 was asked for, and {self.kind} devices have none; use float32, or "
                "--device cpu"
            )

    def synchronize(self) -> None:
        """Wait until all its work is done."""
        self.flush()
        wait = getattr(self._module, "synchronize", None)
        if wait is not None:
            wait()

    def flush(self) -> None:
        """End a round: in lazy mode a Gaudi runs nothing before it is told to."""
        if self.kind == "hpu" and os.environ.get("PT_HPU_LAZY_MODE", "0") == "1":
            importlib.import_module("habana_frameworks.torch.core").mark_step()

    def ops(self, static_shapes: bool = False) -> Ops:
        """The operators of decoding on this device. static_shapes: their shapes depend on no
        values, as on a device that compiles."""
        on_host = self.kind == "cpu" and not static_shapes
        return CpuOps() if on_host else Ops(self.widest, self.flush)

    def memory(self) -> tuple[int, int]:
        """The free and the total bytes."""
        ask = getattr(self._module, "mem_get_info", None)
        if ask is not None:
            free, total = ask(self.torch_device)
            return int(free), int(total)
        total = os.sysconf("SC_PHYS_PAGES")
        known = "SC_AVPHYS_PAGES" in os.sysconf_names
        free = os.sysconf("SC_AVPHYS_PAGES") if known else total
        page = os.sysconf("SC_PAGE_SIZE")
        return page * free, page * total

    def record(self, call: Callable[[], R]) -> tuple[Callable[[], None], R]:
        """Record the operators of a call; return a function that replays them, and the tensors of
        their results.

        For devices that capture. CUDA graphs and HPU graphs have the same API.
        """
        module = self._module
        # libraries set themselves up in their first call
        call()
        self.synchronize()
        graph = module.CUDAGraph() if self.kind == "cuda" else module.HPUGraph()
        with module.graph(graph):
            results = call()
        return graph.replay, results

    @property
    def _module(self) -> Any:
        return None if self.kind == "cpu" else getattr(torch, self.kind, None)


def processor() -> str:
    """The name of this machine's processor."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _missing(where: torch.device) -> str | None:
    """Why a device is not available; None if it is. torch knows a Gaudi only after its bridge is
    imported."""
    if where.type == "cpu":
        return None
    if where.type == "hpu" and util.find_spec("habana_frameworks") is None:
        return "habana_frameworks, Intel Gaudi's bridge to PyTorch, is not installed"
    try:
        if where.type == "hpu":
            importlib.import_module("habana_frameworks.torch.core")
    except (ImportError, OSError, RuntimeError) as error:
        return f"habana_frameworks cannot be imported ({first_line(error)})"
    module = torch.backends.mps if where.type == "mps" else getattr(torch, where.type, None)
    if module is None or not module.is_available():
        return f"this PyTorch sees no {KINDS[where.type]}"
    count = module.device_count() if where.type != "mps" else 1
    if where.index is not None and where.index >= count:
        return f"there are {count} of them, counted from 0"
    return None


def versions() -> dict[str, str]:
    """The versions of everything that could change a result."""
    packages = {name: version(name) for name in ("draftproof", "torch", "transformers")}
    return {**packages, "python": platform.python_version()}
