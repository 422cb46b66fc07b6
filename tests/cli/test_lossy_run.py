"""``--lossy typical``: said in so many words, measured on the way, and kept apart from what is exact."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftproof.cli.setup import engine_of
from draftproof.engine.config import EngineConfig, thresholds
from draftproof.errors import BadInput
from draftproof.verify.prove import prove

Call = Callable[..., Any]
TOLD = re.compile(r"lossy: distance from the target's law: (\d\.\d\d) per token \(mean total variation\)\n")
WARM = ("--temperature", "0.5", "--max-new-tokens", "40", "--lossy", "typical:0.001,0.3")


def test_the_distance_is_printed(call: Call, target: str) -> None:
    said = call("run", target, "-p", "Once", "--assistant-model", target, *WARM, "--compare")
    assert said.code == 0
    (told,) = TOLD.findall(said.err)
    assert float(told) > 0
    assert "neither the target's text nor its law" in said.err and "the law is the same" not in said.err


def test_exact_rules_print_no_distance(call: Call, target: str) -> None:
    said = call("run", target, "-p", "Once", "--assistant-model", target, "--temperature", "0.5", "--max-new-tokens", "12")
    assert "distance" not in said.err
    said = call("run", target, "-p", "Once", "--max-new-tokens", "6", "--json")
    assert "distance" not in said.out and "lossy" not in said.out


def test_json_has_the_distance_and_the_thresholds(call: Call, target: str) -> None:
    found = json.loads(call("run", target, "-p", "Once", "--assistant-model", target, *WARM, "--json").out)
    assert 0 < found["stats"]["distance_per_token"] < 1
    assert found["settings"]["acceptance"] == "typical"
    assert found["settings"]["lossy"] == {"epsilon": 0.001, "delta": 0.3}


def test_greedy_text_stays_what_it_was(call: Call, target: str, draft: str) -> None:
    rest = ("run", target, "-p", "Once", "--assistant-model", draft, "--max-new-tokens", "20")
    lossy = call(*rest, "--lossy", "typical")
    assert lossy.out == call(*rest).out != ""
    assert TOLD.findall(lossy.err) == ["0.00"]


def test_a_file_of_prompts_is_told_its_distance(call: Call, target: str, tmp_path: Path) -> None:
    prompts, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": "Once"}\n{"prompt": "One day", "sampling": {"temperature": 0}}\n')
    files = ("--prompts", str(prompts), "--out", str(out))
    said = call("run", target, *files, "--assistant-model", target, *WARM)
    assert TOLD.search(said.err)
    warm, cold = (json.loads(line)["stats"]["distance_per_token"] for line in out.read_text().splitlines())
    assert warm > 0 and cold == 0
    exact = call("run", target, *files, "--assistant-model", target, *WARM[:4])
    assert exact.code == 1 and "other options" in exact.err                  # lossy rows are not taken for exact ones
    other = call("run", target, *files, *WARM)
    assert other.code == 1 and "other options" in other.err                  # nor for those of another drafter


@pytest.mark.parametrize("rule", ["match", "rejection", "block"])
def test_lossy_and_an_exact_rule_are_not_both_had(call: Call, target: str, rule: str) -> None:
    said = call("run", target, "-p", "Once", "--lossy", "typical", "--acceptance", rule)
    assert said.code == 1
    assert said.err == f"draftproof: both lossy and the exact acceptance {rule!r} were given; leave one of them out\n"


@pytest.mark.parametrize("wrong", ["nucleus", "typical:", "typical:0.1", "typical:a,b", "typical:1,2,3", "typical,0.1,0.2"])
def test_thresholds_that_cannot_be_read_are_refused(wrong: str) -> None:
    with pytest.raises(BadInput, match=r"typical:0\.09,0\.3"):
        EngineConfig("demo", lossy=wrong)


def test_thresholds_are_read() -> None:
    assert thresholds("typical") == ()
    assert thresholds("typical:0.2,0.5") == (0.2, 0.5)


def test_thresholds_out_of_range_are_refused(call: Call, target: str) -> None:
    said = call("run", target, "-p", "Once", "--lossy", "typical:2,0.3")
    assert said.code == 1 and "epsilon" in said.err and said.err.count("\n") == 1


def test_a_lossy_engine_cannot_be_proved(target: str) -> None:
    engine = engine_of(EngineConfig(target, drafter="none", lossy="typical"))
    with pytest.raises(BadInput, match="lossy"):
        list(prove(lambda: engine, ["bits"], quick=True, progress=lambda name: lambda share, doing: None))
