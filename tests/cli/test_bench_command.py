"""``draftproof bench``: options, table, JSON; mistakes in one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftproof.bench import measure

Call = Callable[..., Any]
SHORT = ("--new-tokens", "6", "--rounds", "1")


@pytest.fixture(scope="module")
def prompts_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "some.jsonl"
    rows: list[dict[str, Any]] = [{"prompt": "Lily and Tom"}, {"text": "The sun"},
                                  {"turns": ["One day", "Two days"]}, {"prompt": "word " * 300}]
    file.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return file


def test_all_options_work_together(
    call: Call, target: str, draft: str, prompts_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "b.json"
    answer = call(
        "bench", target, "--drafter", "prompt-lookup", "--assistant-model", draft, "--prompts",
        str(prompts_file), "--batch", "1,2", "--temperature", "0,0.7",
        "--max-draft-tokens", "3", *SHORT, "--json", str(out),
        "--plot", str(tmp_path / "b.png"))
    assert answer.code == 0, answer.err
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
    for name in ("plain", "prompt-lookup", "T = 0.7, batch 2", "3 of the 4"):
        assert name in answer.out
    report = json.loads(out.read_text())
    assert len(report["figures"]) == 3 * 4
    assert all(figure["same"] == figure["texts"] > 0 for figure in report["figures"])


def test_the_demo_brings_its_own_prompts_and_drafters(call: Call) -> None:
    answer = call("bench", *SHORT, "--limit", "1")
    assert answer.code == 0, answer.err
    names = ("plain", "portfolio", "medusa", "redrafter", "demo-draft", "prompts of stories.jsonl")
    assert all(name in answer.out for name in names)


def test_an_interrupt_shows_and_saves_what_was_measured(
    call: Call, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial, count = measure.Bench._trial, [0]

    def counted(self: measure.Bench, *args: Any) -> measure.Trial:
        count[0] += 1
        if count[0] == 8:                                       # two of them warm up
            raise KeyboardInterrupt
        return trial(self, *args)

    monkeypatch.setattr(measure.Bench, "_trial", counted)
    out = tmp_path / "b.json"
    inputs = ("--drafter", "prompt-lookup", "--new-tokens", "4", "--json", str(out))
    answer = call("bench", target, *inputs)
    assert answer.code == 130 and "prompt-lookup" in answer.out
    assert answer.err.strip().endswith("interrupted after 5 of 48 runs")
    report = json.loads(out.read_text())
    assert len(report["trials"]) == 5 and len(report["figures"]) == 2


@pytest.mark.parametrize(("inputs", "why"), [
    (("--batch", "0"), "batch was 0; it must be at least 1"),
    (("--batch", "1,x"), "batch was '1,x'"), (("--temperature", "-1"), "temperature was '-1'"),
    (("--limit", "0"), "limit was 0"), (("--prompts", "/no/such/file"), "there is no file"),
    (("--json", "/no/such/folder/x.json"), "there is no folder /no/such/folder"),
    (("--plot", "/no/such/folder/x.png"), "there is no folder /no/such/folder"),
    (("--plot", "speed.gif"), "speed.gif is no picture"),
    (("--new-tokens", "9999"), "no prompt leaves room"),
])
def test_user_errors_are_reported_in_one_sentence(
    refused: Call, target: str, inputs: tuple[str, ...], why: str
) -> None:
    refused("bench", target, *inputs, words=[why])
