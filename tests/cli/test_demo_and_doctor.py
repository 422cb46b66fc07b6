"""``draftproof demo`` and ``draftproof doctor`` say what they promise to say."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from draftproof.cli import demo

Call = Callable[..., Any]


def test_demo_tells_a_story_and_measures_every_drafter(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"STORY": 6, "MEASURED": 6, "PATIENCE": 0.0}
    for name, value in small.items():
        monkeypatch.setattr(demo, name, value)
    said = call("demo")
    assert said.code == 0, said.err
    assert demo.OPENINGS[0] in said.out and "1 stories" in said.out
    for drafter in ("plain", "portfolio", "medusa", "redrafter", "demo-draft"):
        assert said.out.count(f"  {drafter} ") == len(demo.HEATS)
    tables = said.out[said.out.index("stories of") :]
    assert max(len(line) for line in tables.splitlines()) <= 80
    assert "draftproof run MODEL" in said.out.splitlines()[-1]


def test_doctor_promises_in_words_and_in_json(call: Call, target: str) -> None:
    said = call("doctor", target)
    assert said.code == 0 and "Promise for this model on this machine" in said.out
    found = json.loads(call("doctor", target, "--json").out)
    machine = {"versions", "device", "dtype", "threads", "memory_gib", "bf16_native"}
    assert machine | {"promise", "same", "differ"} <= found.keys()
    assert found["dtype"] == "float32"
    assert {"layers", "attention", "sampling", "int8", "int4"} <= found["paths"].keys()
    assert all(told.splitlines()[0] in said.out for told in ("layers", "attention"))
