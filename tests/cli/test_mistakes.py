"""Every user mistake is one sentence on stderr and an exit code, never a traceback."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from random_models import save_model

from draftproof.cli.app import _leave as leave
from draftproof.errors import LAST_WORD

Call = Callable[..., Any]


MISTAKES: dict[str, tuple[list[str], list[str]]] = {
    "empty prompt": (["-p", ""], ["empty"]),
    "no prompt": ([], ["one prompt"]),
    "two prompts": (["-p", "a", "b"], ["one prompt"]),
    "prompt longer than context": (["-p", "one two three " * 200], ["256", "shorten"]),
    "K of 0": (["-p", "a", "--num-assistant-tokens", "0"], ["at least 1"]),
    "K beyond the context": (["-p", "a", "--num-assistant-tokens", "256"], ["context of 256"]),
    "no new tokens": (["-p", "a", "--max-new-tokens", "0"], ["max_new_tokens", "at least 1"]),
    "temperature below 0": (["-p", "a", "--temperature", "-1"], ["temperature"]),
    "no samples": (["-p", "a", "--n", "0"], ["at least 1"]),
    "tree that is none": (["-p", "a", "--assistant-model", "x", "--draft-tree", "2,,1"], ["2,,1"]),
    "tree without a model": (["-p", "a", "--draft-tree", "2,1"], ["--assistant-model"]),
    "tree without heads": (["-p", "a", "--drafter", "suffix", "--draft-tree", "2,1"], ["heads"]),
    "tree too large": (["-p", "a", "--assistant-model", "x", "--draft-tree", "99,99,99"], ["1024"]),
    "two drafters": (["-p", "a", "--assistant-model", "x", "--drafter", "none"], ["both"]),
    "unknown drafter": (["-p", "a", "--drafter", "oracle"], ["oracle"]),
    "unknown dtype": (["-p", "a", "--dtype", "float7"], ["float7"]),
    "device that is not there": (["-p", "a", "--device", "mps:7"], ["mps"]),
    "device that is none": (["-p", "a", "--device", "abacus"], ["abacus"]),
    "chat without a template": (["-p", "a", "--chat"], ["chat template"]),
    "HPU graphs": (["-p", "a", "--use_hpu_graphs"], ["habana_frameworks"]),
    "HPU": (["-p", "a", "--device", "hpu"], ["habana_frameworks"]),
    "graphs of a CPU": (["-p", "a", "--use_hpu_graphs", "--device", "cpu"], ["cpu devices record"]),
    "two dtypes": (["-p", "a", "--bf16", "--dtype", "float32"], ["--bf16"]),
    "bucket of 0": (["-p", "a", "--bucket_size", "0"], ["bucket_size"]),
    "lossy and match": (["-p", "a", "--lossy", "typical", "--acceptance", "match"], ["both lossy"]),
    "lossy and block": (["-p", "a", "--lossy", "typical", "--acceptance", "block"], ["both lossy"]),
    "thresholds": (["-p", "a", "--lossy", "typical:2,0.3"], ["epsilon"]),
    "prompts without out": (["--prompts", "rows.jsonl"], ["--out"]),
    "missing prompt file": (["--prompt-file", "nowhere.txt"], ["nowhere.txt"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_every_user_mistake_is_one_sentence(refused: Call, target: str, mistake: str) -> None:
    options, words = MISTAKES[mistake]
    refused("run", target, *options, words=words)


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "org/no-such-model", "nowhere"])
def test_unknown_models_are_one_sentence(
    refused: Call, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused("run", name, "-p", "a", words=[name])


def test_a_draft_with_another_tokenizer_is_told(
    call: Call, target: str, stranger: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Which tokens both have is drafted; that it may be few is for the user to know."""
    told = call("run", target, "-p", "a", "--max-new-tokens", "4", "--assistant-model", stranger)
    assert told.code == 0 and "has another tokenizer" in caplog.text


def test_broken_weights_are_one_sentence(refused: Call, tmp_path: Path) -> None:
    broken = save_model(tmp_path / "broken", broken=True)
    refused("run", str(broken), "-p", "a", words=["weights are broken"])
    weights = save_model(tmp_path / "corrupt") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    refused("run", str(weights.parent), "-p", "a", words=[str(weights.parent)])


def test_files_are_looked_at_before_the_model_is_loaded(refused: Call, tmp_path: Path) -> None:
    (binary := tmp_path / "prompt.bin").write_bytes(b"\xff\xfe\x00")
    refused("run", "/no/model", "--prompt-file", str(binary), words=["UTF-8"])
    (rows := tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    for out, word in (("/no/folder/out.jsonl",) * 2, (str(tmp_path), "directory")):
        refused("run", "/no/model", "--prompts", str(rows), "--out", out, words=[word])


def test_wrong_usage_exits_with_2(call: Call, target: str) -> None:
    wrong = ["run"], ["run", target, "--no-such"], ["run", target, "--n", "many"], ["nonsense"]
    for options in wrong:
        said = call(*options)
        assert said.code == 2 and "Traceback" not in said.err


def test_why_it_ends_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    """A thread that watches other ranks may have said it already."""
    for taken, said in ((True, ""), (False, "draftproof: because\n")):
        with contextlib.suppress(RuntimeError):
            LAST_WORD.release()
        if taken:
            LAST_WORD.acquire()
        with pytest.raises(SystemExit):
            leave("because", 1)
        assert capsys.readouterr().err == said and LAST_WORD.locked()
