"""How many threads the kernels use: torch's number, but no more than this process may run at a
time."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch


class _Before(threading.local):
    """Of a thread within `torch_alone`: how many threads there were before; else 0."""

    count = 0


_before = _Before()


def thread_count() -> int:
    """`torch.get_num_threads()`, bounded by `limit()`; within `torch_alone`, that of before."""
    return _before.count or min(torch.get_num_threads(), limit())


@contextmanager
def torch_alone() -> Iterator[None]:
    """Torch's own operators run on the calling thread alone, our kernels on as many as before.

    Two pools of threads that take turns wait for one another's cores, where other programs
    run for longer than the operators take.
    """
    threads = torch.get_num_threads()
    if threads == 1 or _before.count:
        yield
        return
    _before.count = min(threads, limit())
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        _before.count = 0


@cache
def limit() -> int:
    """The processors that the system gives to this process: those that it may run on
    (`sched_getaffinity`), or the CPU quota of its control group, rounded up, if that is less.

    More threads than that are not faster: the quota is used up early, and then all wait.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    processors = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return max(1, min([processors, *map(round_up, quotas())]))


def round_up(quota: float) -> int:
    """The least whole number that is not less."""
    return -int(-quota // 1)


def quotas(
    groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> list[float]:
    """The CPU quotas, in processors, of this process's control groups and of those above them.

    Args:
        groups: Where Linux lists the groups of this process.
        root: Where control groups are mounted, version 2 or version 1.
    """
    try:
        lines = groups.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    bounds = list[float | None]()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:                                             # version 2
            bounds += [_quota(*_numbers(folder / "cpu.max")) for folder in _above(root, path)]
        elif "cpu" in controllers.split(","):
            for mount in {root / controllers, root / "cpu"}:
                bounds += [
                    _quota(*_numbers(folder / "cpu.cfs_quota_us"),
                           *_numbers(folder / "cpu.cfs_period_us"))
                    for folder in _above(mount, path)
                ]
    return [quota for quota in bounds if quota is not None]


def _above(mount: Path, path: str) -> Iterator[Path]:
    """The folder of a group and those above it. In a container the group's own folder may be
    mounted in place of the root."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for count in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:count])


def _numbers(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").split()
    except OSError:
        return []


def _quota(*numbers: str) -> float | None:
    """Of microseconds and the period that they are for; None if there is no bound."""
    if len(numbers) != 2 or not all(number.isdigit() for number in numbers):      # "max", or -1
        return None
    quota, period = map(int, numbers)
    return quota / period if quota and period else None
