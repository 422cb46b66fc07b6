"""The machine: what it is, what a run needs of its memory, what it draws. Reads the system's own counters."""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import platform
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from draftproof.model.device import Device, processor

POWERCAP = Path("/sys/class/powercap")
"""Where Linux keeps the energy counters of processors (RAPL)."""
PACKAGES = ("draftproof", "torch", "transformers", "numpy", "scipy")


class Meter(NamedTuple):
    """A counter of joules; `wraps`: where it begins again at zero, if it does."""

    name: str
    joules: Callable[[], float]
    wraps: float | None = None


def facts(device: torch.device) -> dict[str, Any]:
    """What a figure depends on besides the models."""
    found: dict[str, Any] = {
        "device": str(device),
        "device_name": Device(device).name,
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(_memory() / 2**30, 1),
        "system": platform.platform(),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "versions": {"python": platform.python_version()},
    }
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found["versions"][package] = version(package)
    return found


def peak_of(run: Callable[[], object], device: torch.device) -> int | None:
    """Bytes that `run` needed at its peak beyond what was held before it; None where the system does not tell."""
    gc.collect()
    if device.type != "cpu":
        return Device(device).peak_of(run)
    try:
        ctypes.CDLL(None).malloc_trim(0)                               # what was freed goes back to the system
        Path("/proc/self/clear_refs").write_text("5")                  # the peak starts anew
        held = _resident("VmRSS")
    except (OSError, AttributeError):
        run()
        return None
    run()
    return max(0, _resident("VmHWM") - held)


class Energy:
    """Joules drawn between two readings, of all meters together; `unreadable` says why there are none."""

    def __init__(self, device: torch.device, powercap: Path = POWERCAP) -> None:
        self.meters, self.unreadable = _gpu(device) if device.type == "cuda" else _processors(powercap)

    def read(self) -> list[float]:
        return [meter.joules() for meter in self.meters]

    def since(self, before: Sequence[float]) -> float | None:
        """Joules since `before` was read; None without a meter."""
        if not self.meters:
            return None
        spent = 0.0
        for meter, earlier, now in zip(self.meters, before, self.read(), strict=True):
            spent += (now - earlier) % meter.wraps if meter.wraps else now - earlier
        return spent


def _processors(powercap: Path) -> tuple[list[Meter], str]:
    """Packages and, counted apart from them, their memory."""
    zones = [zone for zone in sorted(powercap.glob("*:*")) if (zone / "energy_uj").exists()]
    meters = []
    for zone in zones:
        with suppress(OSError, ValueError):
            name = (zone / "name").read_text().strip()
            if name.startswith("package") or name == "dram":
                _micro(zone / "energy_uj")
                meters.append(Meter(f"{zone.name} {name}", _reader(zone), _micro(zone / "max_energy_range_uj")))
    if meters:
        return meters, ""
    return [], f"the counters under {powercap} may not be read" if zones else f"there is no counter under {powercap}"


def _reader(zone: Path) -> Callable[[], float]:
    return lambda: _micro(zone / "energy_uj")


def _micro(file: Path) -> float:
    return int(file.read_text()) / 1e6


def _gpu(device: torch.device) -> tuple[list[Meter], str]:
    """The board's own counter, through NVML."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return [], "the package pynvml is not installed"
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except (nvml.NVMLError, AttributeError) as error:
        return [], f"NVML does not tell ({error})"
    return [Meter(str(device), lambda: float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3)], ""


def _memory() -> int:
    names = os.sysconf_names if hasattr(os, "sysconf_names") else {}
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if "SC_PHYS_PAGES" in names else 0


def _resident(field: str) -> int:
    """Bytes of a memory field of this process; Linux only."""
    if sys.platform != "linux":
        raise OSError("no /proc")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))
