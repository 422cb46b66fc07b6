"""Every user mistake is one sentence on stderr and an exit code, never a traceback."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from random_models import save_model

Call = Callable[..., Any]

MISTAKES = {
    "-p ''": "empty",
    "": "one prompt",
    "-p a b": "one prompt",
    f"-p '{'one two three ' * 200}'": "256",
    "-p a --num-assistant-tokens 0": "at least 1",
    "-p a --num-assistant-tokens 256": "context of 256",
    "-p a --max-new-tokens 0": "max_new_tokens",
    "-p a --temperature -1": "temperature",
    "-p a --n 0": "at least 1",
    "-p a --logprobs": "--json",
    "-p a --assistant-model x --draft-tree 2,,1": "2,,1",
    "-p a --draft-tree 2,1": "--assistant-model",
    "-p a --assistant-model x --draft-tree 99,99,99": "1024",
    "-p a --assistant-model x --drafter none": "both",
    "-p a --drafter oracle": "oracle",
    "-p a --dtype float7": "float7",
    "-p a --device abacus": "abacus",
    "-p a --chat": "has no chat template",
    "-p a --use_hpu_graphs": "habana_frameworks",
    "-p a --use_hpu_graphs --device cpu": "cpu devices record",
    "-p a --bf16 --dtype float32": "--bf16",
    "-p a --bucket_size 0": "bucket_size",
    "-p a --lossy typical --acceptance match": "both lossy",
    "-p a --lossy typical:2,0.3": "epsilon",
    "-p a --lossy nucleus": "typical:0.09,0.3",
    "--prompts rows.jsonl": "--out",
    "--prompts {rows} --out out.jsonl --json": "--json",
    "-p a --ray 2": "--prompts FILE.jsonl and --out",
    "--prompts {rows} --out /no/folder/out.jsonl": "/no/folder/out.jsonl",
    "--prompts {rows} --out out.jsonl --ray 2 --parallel tensor": "a whole model",
    "--prompt-file nowhere.txt": "nowhere.txt",
    "--prompt-file {binary}": "UTF-8",
}


@pytest.mark.parametrize("options", MISTAKES)
def test_user_errors_are_reported_in_one_sentence(
    refused: Call, target: str, tmp_path: Path, options: str
) -> None:
    (binary := tmp_path / "prompt.bin").write_bytes(b"\xff\xfe\x00")
    (rows := tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    words = shlex.split(options.format(binary=binary, rows=rows))
    refused("run", target, *words, words=[MISTAKES[options]])


def test_a_port_in_use_is_reported_in_one_sentence(refused: Call, target: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        refused("serve", target, "--port", port, words=["cannot listen", port, "--port"])


@pytest.mark.parametrize("name", ["org/no-such-model", "nowhere"])
def test_unknown_models_are_reported_in_one_sentence(
    refused: Call, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    refused("run", name, "-p", "a", words=[name, "HF_HUB_OFFLINE is set"], code=1)


FOUND_BEFORE_LOADING = {
    "{there}/smollm2-136m.gguf -p a": ["no file", "near it: ", "smollm2-135m.gguf"],
    "/nowhere/at/all -p a": ["there is no folder /nowhere/at/all"],
    "demo -p a --drafter medusaa": ["did you mean medusa?", "module:Class"],
    "demo -p a --drafter medusa+sufix": ["'sufix'; did you mean suffix?"],
    "demo -p a --drafter ./heads": ["there is no folder ./heads"],
    "demo -p a --assistant-model ./none": ["there is no folder ./none"],
    "demo -p a --temperature -1": ["temperature was -1"],
    "demo": ["give one prompt"],
    "demo -p ''": ["the prompt is empty"],
}


@pytest.mark.parametrize("options", FOUND_BEFORE_LOADING)
def test_mistakes_are_found_before_anything_is_loaded(
    refused: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: str
) -> None:
    (tmp_path / "smollm2-135m.gguf").touch()
    monkeypatch.delattr("draftproof.engine.load.build")
    words = shlex.split(options.format(there=tmp_path))
    refused("run", *words, words=FOUND_BEFORE_LOADING[options])


def test_out_of_memory_errors_are_reported_consistently(
    refused: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error in (MemoryError(), OSError(12, "Cannot allocate memory"),
                  RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")):
        def fail(*_: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr("draftproof.engine.load.build", fail)
        refused("run", "demo", "-p", "a", words=["out of memory; use a smaller model"], code=1)


def test_broken_weights_are_reported_in_one_sentence(refused: Call, tmp_path: Path) -> None:
    broken = save_model(tmp_path / "broken", broken=True)
    refused("run", str(broken), "-p", "a", words=["weights are broken"], code=1)
    weights = save_model(tmp_path / "corrupt") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    refused("run", str(weights.parent), "-p", "a", words=[str(weights.parent)], code=1)


@pytest.mark.parametrize("options", ["run", "run {} --no-such", "run {} --n many", "nonsense"])
def test_usage_errors_exit_with_code_2(call: Call, target: str, options: str) -> None:
    answer = call(*options.format(target).split())
    assert answer.code == 2 and "Traceback" not in answer.err
