"""Row-invariant kernels, by Triton's interpreter: the bits of a row depend on no other row."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

CHECK = """
import json, sys, torch
sys.path.insert(0, sys.argv[1])
import exact_bits
print(json.dumps({str(kind): exact_bits.invariance("cpu", kind)
                  for kind in (torch.float32, torch.bfloat16)}))
"""


def test_bits_of_a_row_depend_on_no_other_row() -> None:
    import json

    folder = Path(__file__).parents[2] / "recipes" / "gpu"
    done = subprocess.run([sys.executable, "-c", CHECK, str(folder)], capture_output=True,
                          text=True, check=True, env={**os.environ, "TRITON_INTERPRET": "1"})
    for kind, gaps in json.loads(done.stdout).items():
        assert gaps["our product"] == gaps["our attention"] == 0.0, kind
        bound = 1e-4 if kind == "torch.float32" else 0.5
        assert gaps["error of product"] < bound and gaps["error of attention"] < bound
