"""``--lossy typical``: said in so many words, measured on the way, apart from what is exact."""

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
TOLD = re.compile(r"lossy: distance from the target's law: (\d\.\d\d) per token \(mean total")
EXACT = ("--temperature", "0.5", "--max-new-tokens", "40")
WARM = (*EXACT, "--lossy", "typical:0.001,0.3")


def test_the_distance_is_printed_where_there_is_one(call: Call, target: str) -> None:
    run = ("run", target, "-p", "Once", "--assistant-model", target)
    said = call(*run, *WARM, "--compare")
    (told,) = TOLD.findall(said.err)
    assert said.code == 0 and float(told) > 0
    assert "neither the target's text nor its law" in said.err
    assert "the law is the same" not in said.err
    found = json.loads(call(*run, *WARM, "--json").out)
    assert 0 < found["stats"]["distance_per_token"] < 1
    assert found["settings"]["acceptance"] == "typical"
    assert found["settings"]["lossy"] == {"epsilon": 0.001, "delta": 0.3}
    assert "distance" not in call(*run, *EXACT).err
    exact = call(*run, "--json").out
    assert "distance" not in exact and "lossy" not in exact


def test_greedy_text_stays_what_it_was(call: Call, target: str, draft: str) -> None:
    rest = ("run", target, "-p", "Once", "--assistant-model", draft, "--max-new-tokens", "20")
    lossy = call(*rest, "--lossy", "typical")
    assert lossy.out == call(*rest).out != "" and TOLD.findall(lossy.err) == ["0.00"]


def test_a_file_of_prompts_is_told_its_distance(call: Call, target: str, tmp_path: Path) -> None:
    prompts, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": "Once"}\n{"prompt": "One day", "temperature": 0}\n')
    files = ("run", target, "--prompts", str(prompts), "--out", str(out))
    assert TOLD.search(call(*files, "--assistant-model", target, *WARM).err)
    rows = [json.loads(line)["stats"] for line in out.read_text().splitlines()]
    warm, cold = (row["distance_per_token"] for row in rows)
    assert warm > 0 and cold == 0
    for other in (("--assistant-model", target, *EXACT), WARM):     # exact, or of another drafter
        said = call(*files, *other)
        assert said.code == 1 and "other options" in said.err


@pytest.mark.parametrize(
    "wrong", ["nucleus", "typical:", "typical:0.1", "typical:a,b", "typical:1,2,3", "typical,1,2"]
)
def test_thresholds_that_cannot_be_read_are_refused(wrong: str) -> None:
    with pytest.raises(BadInput, match=r"typical:0\.09,0\.3"):
        EngineConfig("demo", lossy=wrong)
    assert thresholds("typical") == () and thresholds("typical:0.2,0.5") == (0.2, 0.5)


def test_a_lossy_engine_cannot_be_proved(target: str) -> None:
    engine = engine_of(EngineConfig(target, drafter="none", lossy="typical"))
    with pytest.raises(BadInput, match="lossy"):
        list(prove(lambda: engine, ["bits"], quick=True, progress=lambda name: lambda *_: None))
