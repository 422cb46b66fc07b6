"""The commands on the folder of an encoder–decoder: they write, or say in a sentence what does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from random_models import save_translator

Call = Callable[..., Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_translator(tmp_path_factory.mktemp("models") / "t5"))


def test_a_prompt_and_a_file_of_prompts_are_what_the_encoder_reads(
    call: Call, folder: str, tmp_path: Path
) -> None:
    how = ("--max-new-tokens", "9", "--temperature", "0.8", "--seed", "1")
    both = call("run", folder, "-p", "Lily and Tom", "--assistant-model", folder, "--compare", *how)
    assert both.code == 0 and "the text is identical" in both.err
    other = call("run", folder, "-p", "A dog", *how)
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": text}) for text in ("Lily and Tom", "A dog")))
    assert call("run", folder, "--prompts", str(file), "--out", str(out), *how).code == 0
    rows = [json.loads(line)["text"] for line in out.read_text().splitlines()]
    assert rows == [both.out.removesuffix("\n"), other.out.removesuffix("\n")]
    assert rows[0] != rows[1]


@pytest.mark.parametrize(
    "command",
    ["prove {model} --section bits", "plan {model}",
     "audit --hf {model} --assistant-model {model}",
     "train medusa {model} --data {texts} --out {out}"],
    ids=lambda command: command.split()[0],
)  # fmt: skip
def test_what_knows_no_encoder_says_so(
    call: Call, folder: str, command: str, tmp_path: Path
) -> None:
    (texts := tmp_path / "texts.jsonl").write_text(json.dumps({"text": "Lily and Tom"}))
    places = {"{model}": folder, "{texts}": str(texts), "{out}": str(tmp_path / "out")}
    said = call(*(places.get(word, word) for word in command.split()))
    assert said.code and "is an encoder-decoder" in said.err and "Traceback" not in said.err
