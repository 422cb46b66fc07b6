"""``draftproof plan``: a verdict, a table and a file that ``run --plan`` begins with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftproof.plan import probe

Call = Callable[..., Any]
SMALL = ("--tokens", "12", "--max-prompts", "3")


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is timed here is not believed."""
    monkeypatch.setattr(probe, "TIMES", 1)
    monkeypatch.setattr(probe, "SECONDS", 0.0)
    monkeypatch.setattr(probe, "LONG", 40)


def test_a_saved_plan_is_complete_and_run_can_start_from_it(
    call: Call, target: str, draft: str, prompts: str, tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    answer = call("plan", target, "--prompts", prompts, "--assistant-model", draft, "--drafter",
                "portfolio", "--batch", "1,2", "--temperature", "0,0.7", "--price-per-hour", "2",
                "--json", str(file), "--plot", str(tmp_path / "plan.svg"), *SMALL)
    assert answer.code == 0, answer.err
    assert answer.out.startswith("drafting ") and "cost" in answer.out
    assert (tmp_path / "plan.svg").read_text("utf-8").startswith("<?xml")
    report = json.loads(file.read_text())
    assert {each["drafter"] for each in report["predictions"]} == {"none", "portfolio", draft}
    for item in report["predictions"]:
        assert item["low"] <= item["speed_up"] <= item["high"] and item["tokens_per_round"] >= 1
        assert item["cost"] > 0 and item["memory"] > 0
    assert {each["speed_up"] for each in report["predictions"]
            if each["drafter"] == "none"} == {1.0}
    report["best"] |= {"drafter": draft, "speed_up": 2.0, "low": 1.5, "high": 2.5}
    file.write_text(json.dumps(report))
    run = ("run", target, "-p", "Once", "--max-new-tokens", "8", "--json")
    planned, plain = call(*run, "--plan", str(file)), call(*run, "--drafter", "none")
    assert planned.code == 0, planned.err
    planned, plain = json.loads(planned.out), json.loads(plain.out)
    assert planned["tokens"] == plain["tokens"]
    assert planned["settings"]["drafter"] == "draft-model"
    assert call(*run, "--plan", str(file), "--drafter", "none").code == 2


def test_plans_can_use_logs_and_a_preset_machine(
    call: Call, target: str, tmp_path: Path
) -> None:
    logs = tmp_path / "logs.jsonl"
    row = {"prompt": "Once upon a time", "completion": " there was a dog and a dog and a dog."}
    logs.write_text(json.dumps(row) + "\n")
    answer = call("plan", target, "--logs", str(logs), "--machine", "gaudi3")
    assert answer.code == 0, answer.err
    assert "gaudi3 calculated, not measured" in answer.out


@pytest.mark.parametrize(("options", "why"), [
    (("--batch", "0"), "batch was 0"), (("--tokens", "0"), "tokens was 0"),
    (("--machine", "abacus"), "abacus"), (("--logs", "nowhere.jsonl"), "nowhere.jsonl"),
    (("--json", "/no/folder/plan.json"), "there is no folder /no/folder"),
    (("--plot", "plan.bmp"), "plan.bmp is no picture"),
])  # fmt: skip
def test_invalid_plan_options_are_refused(
    refused: Call, target: str, options: tuple[str, ...], why: str
) -> None:
    refused("plan", target, *SMALL, *options, words=[why])


def test_files_that_are_not_plans_are_refused(refused: Call, target: str, prompts: str) -> None:
    for file in (prompts, "nowhere.json"):
        refused("run", target, "-p", "Once", "--plan", file, words=["plan"])
