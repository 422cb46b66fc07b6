"""Tiny random models on disk, and the command line called in this process."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from random_models import save_model

from draftproof.cli.app import main


class Said(NamedTuple):
    """What a command left."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("models") / "target"))


@pytest.fixture(scope="session")
def draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("models") / "draft", layers=1))


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    """A file of prompts, as `plan` reads them."""
    rows = [{"prompt": "Once upon"}, {"text": "One day a dog"}, {"prompt": "The cat sat on the"},
            {"turns": ["Ben had a"]}]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Said]:
    """``draftproof ARGS``, in this process."""

    def run(*args: str, stdin: str | None = "") -> Said:
        out, err = io.StringIO(), io.StringIO()
        monkeypatch.setattr(sys, "argv", ["draftproof", *args])
        monkeypatch.setattr(sys, "stdin", None if stdin is None else io.StringIO(stdin))
        code = 0
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main()
            except SystemExit as leaving:
                code = int(leaving.code or 0)
            finally:
                gc.unfreeze()           # a command keeps it as long as its process, tests do not
        return Said(code, out.getvalue(), err.getvalue())

    return run


@pytest.fixture
def refused(call: Callable[..., Said]) -> Callable[..., None]:
    """``draftproof ARGS`` ends with 2 (1 if it was no wrong usage), nothing on stdout and one line
    that has all the words."""

    def run(*args: str, words: Sequence[str], notes: bool = False, code: int = 2) -> None:
        answer = call(*args)
        assert answer.code == code and answer.out == "", answer
        *before, last = answer.err.splitlines()
        assert last.startswith("draftproof: ") and (notes or not before), answer.err
        assert all(word in last for word in words), last
        assert "Errno" not in last and "Error:" not in last

    return run
