"""Which device the tests run on, and which tests need the CPU, with the reason.

`DRAFTPROOF_TEST_DEVICE=cuda make test` places the shared models of `tiny` on that device and skips
what is named here, or marked `cpu_only(reason)`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

DEVICE = torch.device(os.environ.get("DRAFTPROOF_TEST_DEVICE", "cpu"))
"""Where models of the tests are."""
TESTS = Path(__file__).parent

KERNELS = "it tests C kernels, which run on a CPU"
HOST = "it compares tensors that it makes on the host; what it tests is the same on every device"
FILES = "it reads files and text, and computes nothing"
OWN_PROCESS = "it starts programs that choose a device themselves"
EMULATED = "it emulates a device on the CPU"
BLOCKS = "blocks of quantised weights are multiplied by C kernels"
CPU_ONLY = {
    "bench": OWN_PROCESS, "cache": HOST, "cli": OWN_PROCESS, "core": HOST,
    "drafters": HOST, "engine/test_default_dtype.py": KERNELS, "engine/test_gguf_files.py": BLOCKS,
    "engine/test_text_distribution.py": HOST, "engine/test_lossy_engine.py": HOST,
    "engine/test_parallel.py": "its ranks talk by gloo, which is for CPUs",
    "engine/test_quantized_target.py": BLOCKS,
    "engine/test_recorded_texts.py": "the texts were recorded on a CPU",
    "forward": KERNELS, "gguf": FILES, "hf": HOST,
    "model/test_changed_weights.py": HOST, "model/test_loading.py": HOST,
    "model/test_target.py": HOST, "model/test_diagnosis.py": KERNELS,
    "model/test_encoder_decoder.py": HOST, "model/test_gguf_source.py": FILES,
    "model/test_graph_replay.py": EMULATED, "model/test_native_model.py": KERNELS,
    "model/test_native_start.py": KERNELS, "native": KERNELS, "plan": HOST, "plots": FILES,
    "server": "its engines load models by name, which choose a device themselves",
    "tokenizer": FILES, "training": "heads are compared with recorded losses of a CPU",
    "verify/test_device_emulation.py": EMULATED, "verify/test_mutants.py": OWN_PROCESS,
    "verify/test_planted_bugs.py": OWN_PROCESS, "weights": BLOCKS,
}
"""Folders and files of tests/ that run on a CPU alone."""


def cpu_only(path: Path) -> str | None:
    """Why the tests of a file run on a CPU alone; None if they run anywhere."""
    if not path.is_relative_to(TESTS):
        return None
    name = path.relative_to(TESTS).as_posix()
    if "/" not in name:
        return FILES
    return next((reason for place, reason in CPU_ONLY.items()
                 if name == place or name.startswith(f"{place}/")), None)


def skip_elsewhere(item: pytest.Item, device: torch.device) -> None:
    """Mark a test that runs on a CPU alone, and skip it on other devices."""
    reason = cpu_only(item.path)
    if reason is not None:
        item.add_marker(pytest.mark.cpu_only(reason))
    if device.type != "cpu":
        for mark in item.iter_markers("cpu_only"):
            item.add_marker(pytest.mark.skip(reason=f"not on {device.type}: {mark.args[0]}"))
