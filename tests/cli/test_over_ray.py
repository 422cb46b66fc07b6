"""Rows over the workers of a Ray cluster: each once, whatever dies."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from draftproof.cli import over_ray

Call = Callable[..., Any]


def args(model: str, rows: Path, out: Path, *more: str) -> list[str]:
    return ["run", model, "--prompts", str(rows), "--out", str(out), "--max-new-tokens", "6", *more]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "in.jsonl"
    file.write_text("".join(f'{{"prompt": "Ben had {count} balls"}}\n' for count in range(9)))
    return file


def test_ray_options_are_checked_and_ray_is_required(
    refused: Call, target: str, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    out = tmp_path / "out.jsonl"
    refused(*args(target, rows, out, "--ray", "0"), words=["ray was 0"])
    refused(*args(target, rows, out, "--ray", "2"), words=["pip install ray"])


@pytest.mark.timeout(500)
def test_no_rows_are_lost_if_a_worker_dies_and_errors_read_the_same(
    call: Call, refused: Call, target: str, rows: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    ray = pytest.importorskip("ray")
    quiet = {"log_to_driver": False, "logging_level": "error", "include_dashboard": False}
    ray.init(num_cpus=2, object_store_memory=100 << 20, **quiet)
    whole, killed, once = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl", tmp_path / "once"
    complete = over_ray.Writer.complete

    def write_then_kill_once(self: over_ray.Writer, lines: Sequence[Any]) -> Any:
        if lines[0].index >= 4 and not once.exists():   # in the middle, the first who comes
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return complete(self, lines)

    try:
        assert call(*args(target, rows, whole)).code == 0
        refused(*args("/no/such/folder", rows, tmp_path / "none.jsonl", "--ray", "1"),
                words=["there is no folder /no/such/folder"])
        methods = {"__init__": over_ray.Writer.__init__, "complete": write_then_kill_once}
        monkeypatch.setattr(over_ray, "Writer", type("Writer", (), methods))
        answer = call(*args(target, rows, killed, "--ray", "2"))
    finally:
        ray.shutdown()
    assert answer.code == 0, answer.err
    rows_of = [list(map(json.loads, file.open())) for file in (whole, killed)]
    texts = [[(row["index"], row["text"], row["settings"]) for row in item] for item in rows_of]
    assert once.exists() and texts[0] == texts[1]
