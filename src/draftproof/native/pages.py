"""The pages that tensors lie in: large ones for what is read often, none for what nobody reads
again. Linux only."""

from __future__ import annotations

import ctypes
import mmap
import sys

from torch import Tensor


def enlarge(tensor: Tensor) -> Tensor:
    """Ask for large pages behind a tensor that nothing was written to yet; returns it.

    Weights are read from end to end for every token. By pages of 4 KiB the processor looks up a
    quarter of a million of them per GB, and in a virtual machine each lookup is long.
    """
    if hasattr(mmap, "MADV_HUGEPAGE"):
        _advise(tensor, mmap.MADV_HUGEPAGE)
    return tensor


def release(tensor: Tensor) -> None:
    """Let go of the whole pages behind a weight that nobody reads again; the mapped checkpoint
    would keep them resident."""
    if sys.platform == "linux":
        _advise(tensor, mmap.MADV_DONTNEED)


def _advise(tensor: Tensor, advice: int) -> None:
    """Of the whole pages within; a system that does not know the advice ignores it."""
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
    if size > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), advice)
