"""The pages that tensors lie in: large ones for what is read often, none for what nobody reads
again. Linux only."""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path

from torch import Tensor


def enlarge(tensor: Tensor) -> Tensor:
    """Ask for large pages for a tensor that nothing was written to yet; returns it.

    Weights are read from end to end for every token. By pages of 4 KiB the processor looks up a
    quarter of a million of them per GB, and in a virtual machine each lookup is long.
    """
    if sys.platform == "linux" and hasattr(mmap, "MADV_HUGEPAGE"):
        _advise(tensor, mmap.MADV_HUGEPAGE)
    return tensor


def release(tensor: Tensor, *, read_again: bool = False) -> None:
    """Let go of the whole pages of a weight that nobody reads again; the mapped checkpoint
    would keep them resident. Of one that somebody does, only if they come back from its file."""
    if sys.platform == "linux" and (not read_again or _is_mapped(tensor)):
        _advise(tensor, mmap.MADV_DONTNEED)


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


def _advise(tensor: Tensor, advice: int) -> None:
    """Of the whole pages within; a system that does not know the advice ignores it."""
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
    if size > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), advice)
