"""``draftproof calibrate``: a table, a tree that ``run`` uses, a picture, and early refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import save_model

from draftproof.drafters.checkpoints import read_head, write_head
from draftproof.drafters.medusa import MedusaHead
from draftproof.engine.load import load
from draftproof.training import calibrate as training

Call = Callable[..., Any]
SMALL = ("--tokens", "12", "--max-nodes", "6")


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "TIMES", 1)
    monkeypatch.setattr(training, "TIMED_TOKENS", 4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that repeats itself, so that fresh heads are right at times."""
    return str(save_model(tmp_path_factory.mktemp("calibrate") / "target", layers=1, seed=3))


@pytest.fixture(scope="module")
def trained(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calibrate") / "heads"
    torch.manual_seed(0)
    write_head(MedusaHead.fresh(load(model, drafter="none").target, num_heads=2), folder)
    return folder


@pytest.fixture
def heads(trained: Path, tmp_path: Path) -> Path:
    """Heads of one's own to write to."""
    return Path(shutil.copytree(trained, tmp_path / "heads"))


def test_run_uses_the_tree_from_then_on(call: Call, model: str, heads: Path, prompts: str) -> None:
    rest = ("-p", "Once", "--max-new-tokens", "6", "--json")
    before = json.loads(call("run", model, "--drafter", str(heads), *rest).out)
    said = call("calibrate", model, "--drafter", str(heads), "--prompts", prompts, *SMALL)
    assert said.code == 0, said.err
    assert "tokens/round" in said.out and str(heads) in said.err
    tree = json.loads((heads / "config.json").read_text())["tree"]
    found = json.loads((heads / "calibration.json").read_text())
    assert 1 <= found["nodes"] == len(tree) <= 6
    assert found["tree"][: len(tree)] == found["chosen"] == tree
    assert len(found["tokens"]) == len(found["speed_up"]) == 7
    after = json.loads(call("run", model, "--drafter", str(heads), *rest).out)
    assert after["settings"]["draft_tokens"] == len(tree) != before["settings"]["draft_tokens"]
    assert after["tokens"] == before["tokens"]


def test_with_out_the_heads_stay_as_they_are(call: Call, model: str, heads: Path, prompts: str,
                                             tmp_path: Path) -> None:
    before = {file.name: file.read_bytes() for file in heads.iterdir()}
    out = tmp_path / "new"
    said = call("calibrate", model, "--drafter", str(heads), "--prompts", prompts, *SMALL, "--out",
                str(out))
    assert said.code == 0, said.err
    assert {file.name: file.read_bytes() for file in heads.iterdir()} == before
    target = load(model, drafter="none").target
    old, new = read_head(heads, target), read_head(out, target)
    assert isinstance(new, MedusaHead) and new.config.tree is not None
    assert all(torch.equal(one, other) for one,
               other in zip(old.parameters(), new.parameters(), strict=True))


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(*_: Any) -> None:
        raise AssertionError("this was to be refused before the work")

    monkeypatch.setattr(training, "calibrate", work)


@pytest.mark.usefixtures("no_work")
def test_other_folders_are_not_written_to(
    refused: Call, model: str, heads: Path, prompts: str, tmp_path: Path
) -> None:
    (full := tmp_path / "full").mkdir()
    (full / "notes.txt").write_text("mine")
    given = ("calibrate", model, "--prompts", prompts, "--drafter")
    refused(*given, str(heads), "--out", str(full), words=["something else"])
    target = load(model, drafter="none").target
    head = read_head(heads, target)
    assert isinstance(head, MedusaHead)
    write_head(head.unshared(target), tmp_path / "vllm", "vllm")
    refused(*given, str(tmp_path / "vllm"), words=["--out DIR"])


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(("options", "why"), [
    (("--drafter", "MODEL"), "holds no draft heads"), (("--drafter", "nowhere"), "nowhere"),
    (("--tokens", "5000"), "no prompt leaves room"),
])  # fmt: skip
def test_what_cannot_be_calibrated_is_refused(
    refused: Call, model: str, heads: Path, prompts: str, options: tuple[str, str], why: str
) -> None:
    given = ["--drafter", str(heads), *(model if one == "MODEL" else one for one in options)]
    refused("calibrate", model, "--prompts", prompts, *given, words=[why])
