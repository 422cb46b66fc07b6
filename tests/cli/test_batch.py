"""``draftproof run --prompts --out``: order, resumption, and rows that cannot be honoured."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from draftproof.cli.batch import Batch
from draftproof.engine.engine import Engine, Update
from draftproof.requests.reader import RequestReader
from draftproof.training.files import file_lock

Call = Callable[..., Any]

ROWS: list[dict[str, Any]] = [
    {"prompt": "Once upon a time", "id": "long", "max_new_tokens": 30},
    {"text": "One day"},
    {"turns": ["The sun", "and then"], "max_new_tokens": 4},
    {"prompt": "Tom", "sampling": {"temperature": 1.0, "seed": 5, "top_k": 50}},
    {"prompt": "Mia", "sampling": {"logit_bias": {"17": -2.5}}},
    *({"prompt": f"Ben had {count} balls", "max_new_tokens": count} for count in range(9, 1, -1)),
]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "in.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n")
    return file


def args(model: str, rows: Path, out: Path) -> list[str]:
    files = ["--prompts", str(rows), "--out", str(out)]
    return ["run", model, *files, "--batch-size", "3", "--max-new-tokens", "8"]


def read(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def texts(out: Path) -> list[Any]:
    names = ("index", "id", "text", "tokens", "finish_reason")
    return [tuple(row.get(name) for name in names) for row in read(out)]


def test_rows_are_written_in_order_and_resume_after_an_interrupt(
    call: Call, target: str, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    assert call(*args(target, rows, whole)).code == 0
    assert [row["index"] for row in read(whole)] == list(range(len(ROWS)))
    assert read(whole)[0]["id"] == "long" and read(whole)[0]["tokens"] == 30
    run, begun, read_rows = Engine.run, RequestReader.begun, list[Any]()

    def interrupted(self: Engine, *args: Any) -> Iterator[Update]:
        count = 0
        for update in run(self, *args):
            if count == 8:
                raise KeyboardInterrupt
            count += update.finished
            yield update

    def counted(self: RequestReader, prompt: Any) -> tuple[list[int], Any]:
        read_rows.append(prompt)
        return begun(self, prompt)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "run", interrupted)
        answer = call(*args(target, rows, broken))
    written = texts(broken)
    assert answer.code == 130 and f"with 8 of {len(ROWS)} rows done" in answer.err.splitlines()[-1]
    assert len(written) == 8 and set(written) < set(texts(whole)) and written != sorted(written)
    with broken.open("a") as file:
        file.write('{"index": 11, "input_sha')                  # a line that was being written
    monkeypatch.setattr(RequestReader, "begun", counted)
    answer = call(*args(target, rows, broken))
    assert answer.code == 0 and f"{len(ROWS) - 8} rows · " in answer.err
    assert len(read_rows) == len(ROWS) - 8      # each once; what was finished is not done again
    assert texts(broken) == texts(whole)


def test_rows_of_other_engines_are_understood(call: Call, target: str, tmp_path: Path) -> None:
    """OpenAI's, vLLM's, TGI's, top-level options: each asks for the same, and keeps its ids."""
    asked = {"temperature": 1.0, "seed": 3, "max_tokens": 6}
    same = [
        {"prompt": "Tom", "sampling": {"temperature": 1.0, "seed": 3}, "max_new_tokens": 6},
        {"prompt": "Tom", **asked, "answer": "a user's own field"},
        {"prompt": "Tom", "sampling_params": {**asked, "n": 1}},
        {"inputs": "Tom", "parameters": {**asked, "best_of": 1, "do_sample": True}, "options": []},
        {"custom_id": "c", "url": "/v1", "body": {"model": "m", "prompt": "Tom", **asked}},
    ]
    rows, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows.write_text("\n".join(map(json.dumps, same)))
    assert call("run", target, "--prompts", str(rows), "--out", str(out)).code == 0
    result = read(out)
    assert {row["text"] for row in result} == {result[0]["text"]} and result[0]["tokens"] == 6
    assert result[4]["custom_id"] == "c"


def test_existing_results_are_never_overwritten(
    call: Call, target: str, rows: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    call(*args(target, rows, out))
    before = out.read_bytes()
    again = call(*args(target, rows, out))
    assert again.code == 0 and "complete" in again.err
    other = tmp_path / "other.jsonl"
    other.write_text(rows.read_text().replace("Once", "Twice"))
    assert "another input" in call(*args(target, other, out)).err
    for option in (["--temperature", "1"], ["--chat"]):
        assert "other options" in call(*args(target, rows, out), *option).err
    assert out.read_bytes() == before
    notes = tmp_path / "notes.txt"
    for text in ("dear diary", "dear diary\n"):
        notes.write_text(text)
        assert call(*args(target, rows, notes)).code == 2
        assert notes.read_text() == text
    assert "itself" in call(*args(target, rows, rows)).err
    (empty := tmp_path / "empty.jsonl").write_text("\n\n")
    assert "no rows" in call(*args(target, empty, tmp_path / "none.jsonl")).err


BAD = {
    "not json": "not JSON", "\udcff": "JSON", "[1]": "object", '{"nothing": 1}': "no prompt",
    '{"prompt": 5}': "must be text", '{"prompt": [true]}': "must be text",
    '{"prompt": [-1]}': "-1", '{"prompt": "\\ud83d"}': "surrogate",
    json.dumps({"prompt": "one two " * 300}): "256", '{"prompt": ""}': "empty",
    '{"messages": ["a"]}': "objects", '{"messages": [{"role": "user"}]}': "content",
    '{"messages": [{"role": "user", "content": "a"}]}': "chat template",
    '{"prompt": "a", "meta": ' + "[" * 5000 + "]" * 5000 + "}": "nested",
} | {json.dumps({"prompt": "a", **asked}): why for why, asked in (
    ("max_new_tokens", {"max_new_tokens": 0}), ("'top'", {"sampling": {"top": 1}}),
    ("whole", {"sampling": {"top_k": 2.5}}), ("temperature", {"temperature": "hot"}),
    ("strings", {"sampling": {"stop": 5}}), ("token ids", {"stop_tokens": [True]}),
    ("object", {"logit_bias": [5]}), ("1e30", {"temperature": 10**400}), ("seed", {"seed": True}),
    ("max_length", {"max_length": 1}), ("top_logprobs", {"logprobs": 21}),
    ("tools", {"tools": [1]}), ("another seed", {"n": 2}),
    ("next to the prompt", {"sampling_params": {"n": 3}}),
    ("greedy", {"do_sample": True}), ("best_of", {"sampling_params": {"best_of": 3}}),
    ("object of sampling", {"sampling": [1]}), ("eos_token_id", {"eos_token_id": 0}),
    ("same option", {"max_tokens": 3, "max_new_tokens": 4}), ("--chat", {"system": "Be brief."}),
    ("into the prompt", {"input": "more"}), ("numbers", {"logit_bias": [[5, False]]}),
)}  # fmt: skip
"""Rows, and a word of why they cannot be completed."""


def test_a_bad_row_does_not_stop_the_batch(call: Call, target: str, tmp_path: Path) -> None:
    lines = [line for text in BAD for line in (text, '{"prompt": "fine"}')]
    rows, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows.write_bytes("\n".join(lines).encode(errors="surrogateescape"))
    answer = call("run", target, "--prompts", str(rows), "--out", str(out))
    assert answer.code == 1
    last = f"draftproof: {len(BAD)} of {2 * len(BAD)} rows could not be completed"
    assert answer.err.splitlines()[-1].startswith(last)
    result = read(out)
    assert [row["index"] for row in result] == list(range(2 * len(BAD)))
    for row, reason in zip(result[::2], BAD.values(), strict=True):
        assert reason in row["error"], row
    assert {row["text"] for row in result[1::2]} == {result[1]["text"]}


def test_two_processes_cannot_write_the_same_output(
    refused: Call, target: str, rows: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    out.touch()
    with file_lock(out):
        refused(*args(target, rows, out), words=["another process is writing", str(out)])
    assert out.read_bytes() == b""


def test_no_rows_are_lost_when_the_disk_is_full(
    call: Call, target: str, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, count = tmp_path / "out.jsonl", [0]
    as_row = Batch._row

    def full(self: Batch, *inputs: Any) -> bytes:
        count[0] += 1
        if count[0] == 4:
            raise OSError(28, "No space left on device")
        return as_row(self, *inputs)

    with monkeypatch.context() as patch:
        patch.setattr(Batch, "_row", full)
        answer = call(*args(target, rows, out))
    assert answer.code == 1 and "No space left on device" in answer.err.splitlines()[-1]
    assert "3 of 13 rows were done" in answer.err and len(read(out)) == 3
    assert call(*args(target, rows, out)).code == 0 and len(read(out)) == len(ROWS)


@pytest.mark.timeout(300)
def test_a_killed_run_can_be_resumed(target: str, rows: Path, tmp_path: Path, call: Call) -> None:
    """SIGKILL once some rows were written."""
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    assert call(*args(target, rows, whole)).code == 0
    command = [sys.executable, "-m", "draftproof", *args(target, rows, out)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None and not (out.exists() and out.read_bytes().count(b"\n") > 1):
            time.sleep(0.005)
        process.kill()
    assert call(*args(target, rows, out)).code == 0
    assert texts(out) == texts(whole)
