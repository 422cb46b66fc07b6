"""The pages that tensors lie in: large ones for what is read often, none for what nobody reads
again, or has written to yet."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import sys
import threading
import time
import weakref
from collections import deque
from contextlib import suppress
from math import prod
from pathlib import Path

import torch
from torch import Tensor

MADV_COLLAPSE = 25
"""Advice of Linux 6.1 and later: move pages into large ones now (linux/mman.h)."""
LARGE_PAGE = 1 << 21
LAZY = 1 << 18
"""Bytes from which memory is asked for page by page."""
DELAY = 2.0
"""Seconds after the last tensor until pages are moved: a model is read, and answers, first."""


def lazy_zeros(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros whose memory the system provides page by page when it is first written, on a CPU: a
    large table costs a short text nothing.

    Args:
        *shape: The sizes.
        dtype: The type of the numbers.
        device: Where they are stored; elsewhere all of it is written.

    Returns:
        Zeros [*shape].
    """
    size = prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < LAZY:
        return torch.zeros(shape, dtype=dtype, device=device)
    # memory from malloc may have been used before, and calloc would write to all of it
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if sys.platform != "win32" else {}
    try:
        room = mmap.mmap(-1, size, **private)
    except OSError:                                     # torch says what there is too little of
        return torch.zeros(shape, dtype=dtype)
    return torch.frombuffer(room, dtype=torch.uint8).view(dtype).view(shape)


def enlarge(tensor: Tensor) -> Tensor:
    """Have large pages for a tensor that nothing was written to yet; returns it.

    Weights are read from end to end for every token. By pages of 4 KiB the processor looks up a
    quarter of a million of them per GB, and in a virtual machine each lookup is long. But where
    memory is fragmented, the system needs seconds per GB to find large pages. So where it can, they
    are made later, by a thread of the lowest priority.
    """
    if sys.platform == "linux" and hasattr(mmap, "MADV_HUGEPAGE"):
        if can_collapse() and tensor.nbytes >= 2 * LARGE_PAGE:
            _collapser.add(tensor)
        else:
            _advise(tensor, mmap.MADV_HUGEPAGE, mmap.PAGESIZE)
    return tensor


def can_collapse() -> bool:
    """Whether this system makes large pages of small ones when it is told to."""
    version = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return version is not None and (int(version[1]), int(version[2])) >= (6, 1)


class _Collapser:
    """Moves tensors to large pages in the background."""

    def __init__(self) -> None:
        self._waiting = deque[tuple[float, weakref.ref[Tensor]]]()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, tensor: Tensor) -> None:
        """Move a tensor once no further one has been added for `DELAY` seconds."""
        with self._lock:
            self._waiting.append((time.monotonic(), weakref.ref(tensor)))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True, name="large pages")
                self._thread.start()

    def _run(self) -> None:
        with suppress(OSError):                         # of this thread alone
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                rest = self._waiting[-1][0] + DELAY - time.monotonic()
                reference = self._waiting.popleft()[1] if rest <= 0 else None
            if reference is None:
                time.sleep(rest)
            elif (tensor := reference()) is not None:
                collapse(tensor)


_collapser = _Collapser()


def collapse(tensor: Tensor) -> None:
    """Move a tensor to large pages, one page after another, so that nobody waits long."""
    start = -(-tensor.data_ptr() // LARGE_PAGE) * LARGE_PAGE
    end, library = tensor.data_ptr() + tensor.nbytes, ctypes.CDLL(None)
    for place in range(start, end - LARGE_PAGE + 1, LARGE_PAGE):
        library.madvise(ctypes.c_void_p(place), ctypes.c_size_t(LARGE_PAGE), MADV_COLLAPSE)


def release(tensor: Tensor, *, read_again: bool = False) -> None:
    """Let go of the whole pages of a weight that nobody reads again; the mapped checkpoint
    would keep them resident. Of one that somebody does, only if they come back from its file."""
    if sys.platform == "linux" and (not read_again or _is_mapped(tensor)):
        _advise(tensor, mmap.MADV_DONTNEED, mmap.PAGESIZE)


def _is_mapped(tensor: Tensor) -> bool:
    """Whether a tensor lies in a file that nobody has written to since it was mapped."""
    first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    text = Path("/proc/self/smaps").read_text(encoding="utf-8")
    lines = [line.split() for line in text.splitlines()]
    within = has_file = False
    for name, *rest in lines:
        if not name.endswith(":"):                                      # of the next mapping
            start, end = (int(place, 16) for place in name.split("-"))
            within, has_file = start <= first and last <= end, rest[3] != "0"
        elif within and name == "Anonymous:":
            return has_file and rest[0] == "0"
    return False


def _advise(tensor: Tensor, advice: int, page: int) -> None:
    """Of the whole pages within; a system that does not know the advice ignores it."""
    start = -(-tensor.data_ptr() // page) * page
    size = (tensor.data_ptr() + tensor.nbytes) // page * page - start
    if size > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), advice)
