"""What one command understands they all do: drafters, quantised weights and caches."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from draftproof.engine.engine import Engine
from draftproof.model import exactness
from draftproof.verify import prove as proving
from draftproof.verify.report import Section

Call = Callable[..., Any]
NAMES = ("prompt-lookup", "suffix", "recycling", "portfolio", "self-int8", "self-layers:1")
OF_THE_DEMO = ("medusa", "redrafter+suffix", "self-int4", "demo-draft")
COMMANDS = ("run", "batch", "bench", "prove", "doctor")


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """No timing, and a proof that only looks at the engine it would examine."""
    def looked(engine: Engine, *_: object, **__: object) -> Section:
        kinds = f"{engine.target.quantization}, {engine.target.kv_cache}"
        return Section("bits", f"{engine.drafter.name}, {kinds}")

    monkeypatch.setattr(proving, "prove_bits", looked)
    monkeypatch.setattr(exactness, "probe", partial(exactness.probe, widths=(2,), forced=8))


def command(name: str, model: str, folder: Path, options: Sequence[str]) -> list[str]:
    """A small run of a command."""
    rows, out = folder / "rows.jsonl", folder / "out.jsonl"
    rows.write_text('{"prompt": "One day"}\n{"prompt": "The sun was"}\n')
    given = {
        "run": ["run", model, "-p", "One day", "--max-new-tokens", "4"],
        "batch": ["run", model, "--prompts", str(rows), "--out", str(out), "--max-new-tokens", "4"],
        "bench": ["bench", model, "--prompts", str(rows), "--limit", "1", "--new-tokens", "4",
                  "--rounds", "1"],
        "prove": ["prove", model, "--section", "bits", "--quick"],
        "doctor": ["doctor", model],
    }
    return [*given[name], *options]


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("drafter", NAMES)
def test_every_command_knows_every_drafter(
    call: Call, target: str, tmp_path: Path, name: str, drafter: str
) -> None:
    said = call(*command(name, target, tmp_path, ["--drafter", drafter]))
    assert said.code == 0, said.err


@pytest.mark.parametrize("drafter", OF_THE_DEMO)
def test_commands_know_the_drafters_of_the_demo(call: Call, tmp_path: Path, drafter: str) -> None:
    for name in ("run", "prove"):
        said = call(*command(name, "demo", tmp_path, ["--drafter", drafter]))
        assert said.code == 0, said.err


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--drafter", "oracle"], ["oracle", "prompt-lookup", "self-layers:N"]),
        (["--drafter", "self-int7"], ["self-int7", "self-int8"]),
        (["--drafter", "self-layers:99"], ["99"]),
        (["--drafter", "prompt-lookup", "--quantize", "int7"], ["int7", "int8"]),
        (["--drafter", "prompt-lookup", "--kv-cache", "int7"], ["int7", "fp8"]),
        (["--drafter", "prompt-lookup", "--quantize-draft", "int8"], ["--quantize-draft"]),
    ],
)
def test_every_command_refuses_in_one_sentence(
    refused: Call, target: str, tmp_path: Path, name: str, options: list[str], words: list[str]
) -> None:
    refused(*command(name, target, tmp_path, options), words=words)


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("drafter", ["prompt-lookup", "self-int8"])
def test_every_command_quantises(
    call: Call, target: str, tmp_path: Path, name: str, drafter: str
) -> None:
    kinds = ["--quantize", "int8", "--kv-cache", "int8"]
    said = call(*command(name, target, tmp_path, ["--drafter", drafter, *kinds]))
    assert said.code == 0, said.err
    if name == "prove":
        assert "int8: " in said.out
    if name in ("bench", "doctor"):
        assert "KV cache: " in said.out and "mean KL" in " ".join(said.out.split())


def test_what_quantising_cost_is_in_every_json(call: Call, target: str, tmp_path: Path) -> None:
    how = ["--quantize", "int8", "--kv-cache", "int8"]
    doctor = json.loads(call("doctor", target, "--json", *how).out)
    assert doctor["quantize"]["kind"] == "int8" and doctor["kv_cache"]["kind"] == "int8"
    bench, prove = tmp_path / "b.json", tmp_path / "p.json"
    lookup = ["--drafter", "prompt-lookup", *how, "--json", str(bench)]
    call(*command("bench", target, tmp_path, lookup))
    found = json.loads(bench.read_text())
    assert len(found["about"]["quantised"]) == 2
    assert all(one["same"] == one["texts"] for one in found["figures"])
    call(*command("prove", target, tmp_path, [*how, "--json", str(prove)]))
    assert "int8" in json.loads(prove.read_text())["about"]["quantised"]
