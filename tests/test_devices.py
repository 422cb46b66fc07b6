"""Which tests run on which device: every entry names something, and says why."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import CPU_ONLY, TESTS, cpu_only, skip_elsewhere


def test_every_entry_names_a_file_or_a_folder_and_a_reason() -> None:
    for place, reason in CPU_ONLY.items():
        assert (TESTS / place).exists(), place
        assert len(reason.split()) >= 5 and reason[0].islower() and not reason.endswith(".")


def test_files_are_matched_by_their_place() -> None:
    assert cpu_only(TESTS / "native" / "test_linear.py") == CPU_ONLY["native"]
    file = "engine/test_text_distribution.py"
    assert cpu_only(TESTS / file) == CPU_ONLY[file]
    assert cpu_only(TESTS / "engine" / "test_exact.py") is None
    assert cpu_only(Path("/elsewhere/test_x.py")) is None


def test_another_device_skips_them_with_their_reason() -> None:
    class Item:
        """As much of a test as the hook looks at."""

        def __init__(self, place: str) -> None:
            self.path, self.marks = TESTS / place, list[Any]()

        def add_marker(self, mark: pytest.MarkDecorator) -> None:
            self.marks.append(mark.mark)

        def iter_markers(self, name: str) -> list[Any]:
            return [mark for mark in self.marks if mark.name == name]

    def skipped(device: str, place: str) -> list[str]:
        item: Any = Item(place)
        skip_elsewhere(item, torch.device(device))
        return [mark.kwargs["reason"] for mark in item.marks if mark.name == "skip"]

    assert skipped("cuda", "native/test_pages.py") == [f"not on cuda: {CPU_ONLY['native']}"]
    assert skipped("cuda", "engine/test_exact.py") == []
    assert skipped("cpu", "native/test_pages.py") == []


@pytest.mark.skipif("DRAFTPROOF_TEST_DEVICE" in os.environ, reason="a device was named")
def test_a_gpu_is_used_only_if_it_was_asked_for() -> None:
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
