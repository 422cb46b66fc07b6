"""Words: names say what a thing is, in the terms of the field, and sentences are plain English.

A word of our own for something that papers and other engines have a name for costs every reader
a translation, and a variable called `one` or `found` tells nothing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import draftproof

ROOT, TESTS = Path(draftproof.__file__).parent, Path(__file__).parent
FILES = {str(path.relative_to(ROOT)): path for path in sorted(ROOT.rglob("*.py"))}
FILES |= {f"tests/{path.relative_to(TESTS)}": path for path in sorted(TESTS.rglob("*.py"))
          if path != Path(__file__)}
FILES |= {str(path.relative_to(TESTS.parent)): path
          for pattern in ("setup.py", ".ci/**/*.py", "recipes/**/*.py")
          for path in sorted(TESTS.parent.glob(pattern))}      # absent outside of the repository

EMPTY_NAMES = {"one", "found", "own", "given", "said", "some"}
"""A variable is called after what it holds."""

INSTEAD = {
    "anew": "again", "astray": "rejected", "behind": "after", "beside": "next to, in addition to",
    "commonest": "most common", "foretell": "predict", "foretold": "predicted",
    "hears": "receives", "heat": "temperature", "heats": "temperatures", "law": "distribution",
    "laws": "distributions", "leads": "is_main_process", "odds": "probs",
}  # fmt: skip
"""The word to use, in names, docstrings, help texts and errors."""


def bound_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every name that a file gives to something, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.alias) and node.asname:
            yield node.lineno, node.asname


def texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Docstrings, help texts and errors: every string that reads as prose."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


def banned_words(source: str) -> list[str]:
    """One line for each use of a banned word in a file."""
    tree, problems = ast.parse(source), list[str]()
    for line, name in bound_names(tree):
        if name.strip("_") in EMPTY_NAMES:
            problems.append(f"line {line}: a name is {name}; say what it holds")
        problems += [f"line {line}: {name}: say {INSTEAD[part]}"
                     for part in name.lower().split("_") if part in INSTEAD]  # fmt: skip
    for line, text in texts(tree):
        words = set(re.findall(r"[a-z]+", text.lower()))
        problems += [f"line {line}: {word!r} in a text: say {INSTEAD[word]}"
                     for word in words & INSTEAD.keys()]  # fmt: skip
    return problems


@pytest.mark.parametrize("name", FILES)
def test_names_and_texts_use_the_terms_of_the_field(name: str) -> None:
    assert banned_words(FILES[name].read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("source", [
    "one = 1", "for found in x: pass", "def f(given): pass", "x = [own for own in y]",
    "def logits_behind(): pass", "class Law: pass", "self.heats = 1", "import x as said",
    'def f():\n    """Is foretold."""', 'raise ValueError("the law sums to 1")', "lambda some: 0",
    'raise ValueError(f"{x} behind {y}")',
])  # fmt: skip
def test_each_kind_of_use_is_noticed(source: str) -> None:
    assert banned_words(source)


def test_plain_words_pass() -> None:
    assert not banned_words('"""One token was found after its own."""\nlawful = find_one(1)')
