"""``draftproof train``: what is seen, what is said of mistakes, and a head at the end."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Call = Callable[..., Any]

SHORT = ("--steps", "4", "--length", "32", "--batch", "4")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    rows = [{"text": f"Once upon a time there was number {number}, and it had a larger friend."}
            for number in range(40)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.mark.parametrize(("method", "options", "columns"), [
    ("medusa", ("--heads", "2", "--layers", "2"), 2), ("medusa", ("--own-projection",), 5),
    ("redrafter", ("--horizon", "2"), 2),
    ("redrafter", ("--horizon", "2", "--exit-dim", "40"), 2),
])
def test_decoding_with_a_trained_head_keeps_the_targets_text(
    call: Call, target: str, texts: str, tmp_path: Path, method: str, options: tuple[str, ...],
    columns: int
) -> None:
    out = str(tmp_path / "heads")
    answer = call("train", method, target, "--data", texts, "--out", out, *SHORT, *options)
    assert answer.code == 0 and answer.out == "", answer
    assert "4 steps" in answer.err and "held out" in answer.err
    assert f"draftproof run {target} --drafter {out}" in answer.err
    title, *table = [line for line in answer.err.splitlines() if line.startswith("   ")]
    steps = [int(line.split()[0]) for line in table]
    assert title.count("token ") == columns and steps == [1, 2, 3, 4]
    words = ("run", target, "Once upon a time", "--max-new-tokens", "12")
    assert (Path(out) / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert call(*words, "--drafter", out).out == call(*words, "--drafter", "none").out != ""


def test_joint_training_saves_heads_and_a_model(
    call: Call, target: str, texts: str, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    inputs = ("train", "medusa", target, "--data", texts, "--out", str(out := tmp_path / "both"))
    answer = call(*inputs, "--heads", "1", "--joint", *SHORT)
    assert answer.code == 0, answer
    assert f"draftproof run {out}/model --drafter {out}/heads" in answer.err, answer


@pytest.mark.parametrize(("options", "words"), [
    (["--data", "nowhere.jsonl"], ["nowhere.jsonl"]),
    (["--horizon", "3"], ["--horizon", "redrafter"]),
    (["--length", "512"], ["512", "256"]),                      # the context
    (["--length", "4"], ["length", "at least 16"]), (["--lr", "0"], ["rate", "above 0"]),
    (["--objective", "tv"], ["objective", "ce or kl"]),
    (["--self-generate", "--tokens", "0"], ["at least 1"]),
    (["--self-generate", "--temperature", "-1"], ["temperatures"]),
    (["--own-text", "own.jsonl"], ["--own-text", "--self-generate"]),
    (["--heads", "-1"], ["num_heads", "at least 1"]),
])
def test_user_errors_are_reported_in_one_sentence(
    refused: Call, target: str, texts: str, tmp_path: Path, options: list[str], words: list[str]
) -> None:
    inputs = ("train", "medusa", target, "--data", texts, "--out", str(tmp_path / "out"))
    refused(*inputs, *options, words=words, notes=True)


@pytest.mark.parametrize(("rows", "word"), [
    ("", "no text"), (2 * '{"messages": [{"role": "user", "content": "Who?"}]}\n', "at least two"),
    ('{"prompt": "Who?"}\n{"prompt": "What?"}\n', "--self-generate"),
])
def test_data_with_nothing_to_learn_is_reported_in_one_sentence(
    refused: Call, target: str, tmp_path: Path, rows: str, word: str
) -> None:
    (file := tmp_path / "rows.jsonl").write_text(rows)
    inputs = ("train", "medusa", target, "--data", str(file), "--out", str(tmp_path / "out"))
    refused(*inputs, words=[word], notes=True)


def test_missing_files_are_reported_before_loading(
    refused: Call, texts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file := tmp_path / "file").write_text("")
    inputs = ("train", "medusa", "/no/model", "--data", texts, "--out")
    refused(*inputs, str(file / "out"), words=[str(file)])
    monkeypatch.setitem(sys.modules, "peft", None)
    refused(*inputs, str(tmp_path / "out"), "--joint", words=["pip install peft"])
