"""Rows over the workers of a Ray cluster: each once, in order, whatever dies."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from draftproof.cli import over_ray
from draftproof.cli.batch import Batch, Line
from draftproof.engine.config import EngineConfig
from draftproof.errors import BadInput, RankLost

Call = Callable[..., Any]
ROWS = 9


class Gone(Exception):
    """A worker died."""


class Told(Exception):
    """A worker raised."""


@dataclass(frozen=True, eq=False)
class Promise:
    number: int
    lines: Sequence[Line]


class FakeRay:
    """As much of Ray as is used, in this process: `deadly` rows cost every worker that tries."""

    def __init__(self, deadly: Sequence[int] = ()) -> None:
        self.deadly = set(deadly)
        kinds = {"RayActorError": Gone, "ObjectLostError": Gone, "RayTaskError": Told}
        self.exceptions = type("exceptions", (), kinds)

    def is_initialized(self) -> bool:
        return True

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 8.0}

    def remote(self, kind: Any) -> Any:
        return self

    def options(self, **wants: Any) -> Any:
        tries = {"max_restarts": -1, "max_task_retries": over_ray.RETRIES}
        assert wants == {"num_cpus": 1, "num_gpus": 0, **tries}

        def remote(function: Any) -> Any:
            return type("Remote", (), {"remote": staticmethod(function)})

        actor = type("Actor", (), {"complete": remote(lambda lines: Promise(len(lines), lines))})
        return remote(lambda batch: actor)

    def wait(self, promises: list[Any], num_returns: int) -> tuple[list[Any], list[Any]]:
        return promises[-1:], promises[:-1]             # who began last is done first

    def get(self, promise: Promise) -> list[tuple[Line, str]]:
        if self.deadly & {line.index for line in promise.lines}:
            raise Gone
        return [(line, f"row {line.index}") for line in promise.lines]


def answered(ray: FakeRay, monkeypatch: pytest.MonkeyPatch, workers: int = 2) -> dict[int, Any]:
    monkeypatch.setattr(over_ray, "_ray", lambda: ray)
    batch = Batch(EngineConfig("demo"), {}, Path("in"), Path("out"), 1, False, workers)
    lines = [Line(index, b"{}") for index in range(ROWS)]
    found = list(over_ray.outcomes(batch, lines, workers))
    assert sorted(line.index for line, _ in found) == list(range(ROWS)), "each row once"
    return {line.index: outcome for line, outcome in found}


def test_a_row_that_kills_workers_is_given_up_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    found = answered(FakeRay(deadly=[4]), monkeypatch)
    assert "workers ended" in found.pop(4)
    assert found == {index: f"row {index}" for index in range(ROWS) if index != 4}


def test_a_cluster_where_nothing_survives_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RankLost, match="completed nothing"):
        answered(FakeRay(deadly=range(99)), monkeypatch)


def args(model: str, rows: Path, out: Path, *more: str) -> list[str]:
    return ["run", model, "--prompts", str(rows), "--out", str(out), "--max-new-tokens", "6", *more]


def texts(out: Path) -> list[tuple[Any, ...]]:
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    return [(row["index"], row["text"], row["settings"]) for row in rows]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "in.jsonl"
    prompts = [{"prompt": f"Ben had {count} balls"} for count in range(ROWS)]
    file.write_text("\n".join(map(json.dumps, prompts)))
    return file


def test_ray_must_be_installed_and_the_options_make_sense(
    call: Call, target: str, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.jsonl"
    assert "ray was 0" in call(*args(target, rows, out, "--ray", "0")).err
    assert "--prompts FILE.jsonl and --out" in call("run", target, "-p", "x", "--ray", "2").err
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    said = call(*args(target, rows, out, "--ray", "2"))
    assert said.code == 1 and "pip install 'draftproof[ray]'" in said.err


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A Ray of two workers on this machine."""
    ray = pytest.importorskip("ray")
    quiet = {"log_to_driver": False, "logging_level": "error", "include_dashboard": False}
    ray.init(num_cpus=2, object_store_memory=100 << 20, **quiet)
    yield ray
    ray.shutdown()


@pytest.mark.timeout(500)
def test_a_killed_worker_loses_no_row_and_writes_none_twice(
    cluster: Any, call: Call, target: str, rows: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, killed = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    assert call(*args(target, rows, whole)).code == 0
    once = tmp_path / "once"
    complete = over_ray.Writer.complete

    def fragile(self: over_ray.Writer, lines: Sequence[Line]) -> Any:
        if lines[0].index >= 4 and not once.exists():   # in the middle, the first who comes
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return complete(self, lines)

    methods = {"__init__": over_ray.Writer.__init__, "complete": fragile}
    monkeypatch.setattr(over_ray, "Writer", type("Writer", (), methods))
    said = call(*args(target, rows, killed, "--ray", "2"))
    assert said.code == 0, said.err
    assert once.exists() and texts(killed) == texts(whole)


@pytest.mark.timeout(500)
def test_a_mistake_on_a_worker_is_told_as_here(
    cluster: Any, rows: Path, tmp_path: Path, call: Call
) -> None:
    said = call(*args("/no/such/folder", rows, tmp_path / "out.jsonl", "--ray", "1"))
    assert said.code == 1 and "there is no folder /no/such/folder" in said.err
    assert said.err.count("\n") == 1


def test_no_ray_with_shards() -> None:
    config = EngineConfig("demo", parallel="tensor")
    batch = Batch(config, {}, Path("in"), Path("out"), None, False, 2)
    with pytest.raises(BadInput, match="leave one of them out"):
        batch._begun()
