"""What depends on the processor, on each level below its own: this library and
torch are held to that level."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from draftproof.native.build import ISA, able

TESTS = Path(__file__).parents[1]
WHAT = [
    "native/test_kernels.py", "core/test_ops.py", "core/test_noise.py",
    "weights/test_quantized_linear.py", "forward/test_fused_forward.py",
]  # fmt: skip
TORCH = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "avx512": {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
}


@pytest.mark.parametrize("level", list(TORCH))
def test_kernels_agree_on_lower_instruction_sets(level: str) -> None:
    levels = [build.partition("-")[0] for build in able()]
    if ISA in os.environ or level not in levels[1:] or levels[0] == level:
        pytest.skip("not a lower level of this processor, or held to one already")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += [str(TESTS / item) for item in WHAT]
    held = {**os.environ, **TORCH[level], ISA: level}
    done = subprocess.run(command, env=held, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
