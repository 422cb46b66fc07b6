"""How many Python calls a token takes, on which a small model's speed depends."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import draftproof as dp
from draftproof.native.kernels import kernels

ROOT = str(Path(dp.__file__).parent)


@pytest.mark.skipif(kernels() is None, reason="needs the C library")
@pytest.mark.parametrize(("drafter", "most"), [("none", 60), ("demo-draft", 120)])
def test_a_round_takes_few_calls(drafter: str, most: int) -> None:
    """From `Engine.stream` down, in files of ours, per round, in steady state."""
    engine = dp.load("demo", drafter=drafter, budget=0 if drafter == "none" else 5)
    stream = engine.stream("Once upon a time", max_new_tokens=120,
                           sampling=dp.Sampling(temperature=0.7, seed=1))
    rounds, calls = 10, 0

    def count(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(ROOT)

    for _ in range(6):
        next(stream)
    sys.setprofile(count)
    try:
        for _ in range(rounds):
            next(stream)
    finally:
        sys.setprofile(None)
    assert 10 * rounds < calls <= most * rounds
