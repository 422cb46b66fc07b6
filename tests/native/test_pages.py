"""The system is asked for large pages, and pages are given back."""

from __future__ import annotations

import mmap
import os
import re
import sys
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from draftproof.native import pages
from draftproof.native.pages import enlarge, lazy_zeros, release

SMAPS = Path("/proc/self/smaps")
pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not SMAPS.exists(), reason="pages are looked up as Linux tells them"
)


def told(address: int) -> str:
    """What the system says of the pages around an address."""
    for entry in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", SMAPS.read_text()):
        result = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", entry)
        if result and int(result[1], 16) <= address < int(result[2], 16):
            return entry
    raise AssertionError(f"nothing lies at {address:x}")


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="no word for large pages here")
def test_large_pages_are_asked_for_where_they_cannot_be_made_later(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "can_collapse", lambda: False)
    numbers = enlarge(torch.empty(1 << 22))
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this system has no large pages")
    assert re.search(r"VmFlags:.*\bhg\b", told(numbers.data_ptr() + numbers.nbytes // 2))
    assert numbers.fill_(1).sum() == len(numbers)


@pytest.mark.skipif(sys.platform == "linux" and not pages.can_collapse(),
                    reason="large pages cannot be made later here")
def test_tensors_move_to_huge_pages_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = list[int]()
    monkeypatch.setattr(pages, "DELAY", 0.0)
    monkeypatch.setattr(pages, "collapse", lambda tensor: moved.append(tensor.data_ptr()))
    collapser = pages._Collapser()
    numbers = torch.arange(1 << 22)
    collapser.add(torch.empty(8))                       # gone before its turn
    collapser.add(numbers)
    while (thread := collapser._thread) is not None:
        thread.join()
    assert moved == [numbers.data_ptr()]
    monkeypatch.undo()
    pages.collapse(numbers)
    assert torch.equal(numbers, torch.arange(1 << 22))


@pytest.mark.parametrize("is_file", [False, True])
def test_file_backed_pages_in_use_are_released(
    is_file: bool, tmp_path: Path
) -> None:
    numbers = torch.rand(1 << 20)
    save_file({"numbers": numbers}, tmp_path / "file")
    held = load_file(tmp_path / "file")["numbers"] if is_file else numbers.clone()
    assert torch.equal(held, numbers)
    release(held, read_again=True)
    resident = re.search(r"Rss: *(\d+)", told(held.data_ptr() + held.nbytes // 2))
    assert resident and (not is_file or int(resident[1]) < 1024)
    assert torch.equal(held, numbers)


def test_unused_pages_are_released() -> None:
    numbers = torch.ones(1 << 22)
    release(numbers)
    assert not numbers[1 << 21 : 1 << 21 | 1024].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.int64])
def test_zeros_take_memory_when_they_are_written_and_belong_to_one_process(
    dtype: torch.dtype
) -> None:
    cpu, process = torch.device("cpu"), psutil.Process()
    assert not lazy_zeros(3, 5, dtype=dtype, device=cpu).any()
    before = process.memory_info().rss
    table = lazy_zeros(1 << 10, 1 << 16, dtype=dtype, device=cpu)
    assert process.memory_info().rss - before < 1 << 24 < table.nbytes
    assert table.shape == (1 << 10, 1 << 16) and table.dtype == dtype
    assert table.data_ptr() % 64 == 0 and not table[-1].any()
    if hasattr(os, "fork"):
        child = os.fork()
        if not child:
            table[0] = 1
            os._exit(0)
        os.waitpid(child, 0)
    assert not table[0].any(), "another process wrote to it"
