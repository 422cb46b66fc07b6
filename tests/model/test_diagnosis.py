"""What doctor says of a model is what serves it, and names what would change it."""

from __future__ import annotations

import pytest
from drafting import needs_kernels, packed_target
from tiny import fresh

from draftproof.model import diagnosis as module
from draftproof.model.diagnosis import paths
from draftproof.model.target import Target
from draftproof.native.build import Library


@needs_kernels
def test_diagnosis_reports_our_kernels_when_they_are_used() -> None:
    told = paths(packed_target())
    assert "kernels, a read in one call" in told["layers"] and "up to 64 nodes" in told["attention"]


def test_diagnosis_says_how_to_get_the_fast_path(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh("llama").float()
    told = paths(Target(model))["layers"]
    assert "short forward" in told and ("--dtype bfloat16" in told or module.kernels() is None)
    assert "own forward" in paths(Target(fresh("gpt2")))["layers"]
    monkeypatch.setattr(module, "kernels", lambda: None)
    monkeypatch.setattr(
        module, "library", lambda: Library(None, "", "there is no C compiler; install gcc")
    )
    monkeypatch.setattr("draftproof.weights.quantized_linear.kernels", lambda: None)
    told = paths(Target(model))
    assert told["layers"].endswith("install gcc") and told["sampling"] == "torch's operators"
    assert told["int8"].startswith("right, and not quicker")
