"""No file is read or written in whatever encoding the machine happens to prefer."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import draftproof

SOURCE = Path(draftproof.__file__).parent
REPOSITORY = SOURCE.parent.parent
FOLDERS = [SOURCE, *(REPOSITORY / name for name in ("recipes", "examples", "deploy"))]
FILES = sorted(file for folder in FOLDERS for file in folder.rglob("*.py"))
TEXT_CALLS = ("read_text", "write_text", "open", "fdopen")
NO_FILES = ("os.open", "PROXYLESS.open", "os.fdopen", "GGUFFile.open")
"""File descriptors, URLs."""


def calls_without_encoding(source: str) -> Iterator[str]:
    """Every call that opens a text file without naming its encoding."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        function = ast.unparse(node.func)
        binary = any(isinstance(argument, ast.Constant) and "b" in str(argument.value)
                     and len(str(argument.value)) <= 3 for argument in node.args)
        named = any(keyword.arg in ("encoding", None) for keyword in node.keywords)
        named = named or (function.endswith("read_text") and bool(node.args))
        if function.rpartition(".")[2] in TEXT_CALLS and not (
                named or binary or function in NO_FILES):
            yield ast.unparse(node)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_file_is_opened_with_an_encoding(file: Path) -> None:
    assert not list(calls_without_encoding(file.read_text(encoding="utf-8")))


def test_calls_without_an_encoding_are_detected() -> None:
    for call in ("p.read_text()", "p.open('w')", "open(p)", "p.write_text('a')"):
        assert list(calls_without_encoding(call)) == [ast.unparse(ast.parse(call))]
    for call in ("p.open('rb')", "p.read_text(encoding='utf-8')", "os.open(p, 0)"):
        assert not list(calls_without_encoding(call))
