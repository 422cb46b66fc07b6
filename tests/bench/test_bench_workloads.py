"""Prompts from files, those of the package, and their choice."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftproof.bench.workloads import GENERAL, STORIES, Question, read_questions, select
from draftproof.errors import BadInput


def test_rows_become_questions(tmp_path: Path) -> None:
    file = tmp_path / "some.jsonl"
    file.write_text('{"prompt": "a", "category": "x"}\n\n{"prompt": "b"}\n')
    assert read_questions(file) == [Question("a", "x"), Question("b")]


@pytest.mark.parametrize(("line", "why"), [
    ("{", "cannot be used"), ("[1]", "not an object"), ("{}", "no prompt"),
    ('{"prompt": "a", "category": 3}', "not text"),
])
def test_a_bad_row_is_named_by_its_line(tmp_path: Path, line: str, why: str) -> None:
    file = tmp_path / "some.jsonl"
    file.write_text(f'{{"prompt": "a"}}\n{line}\n')
    with pytest.raises(BadInput, match=rf"line 2 of .*{why}"):
        read_questions(file)
    file.write_text("\n")
    with pytest.raises(BadInput, match="has no rows"):
        read_questions(file)
    with pytest.raises(BadInput, match=r"no file .*none\.jsonl"):
        read_questions(tmp_path / "none.jsonl")


def test_a_choice_keeps_the_order() -> None:
    several = [Question(str(number), "ab"[number % 2]) for number in range(6)]
    assert [one.prompt for one in select(several, ["b"], None)] == ["1", "3", "5"]
    assert [one.prompt for one in select(several, [], 2)] == ["0", "1", "2", "3"]
    with pytest.raises(BadInput, match="no category 'c' in the prompts; there are: a, b"):
        select(several, ["c"], None)
    with pytest.raises(BadInput, match="at least 1"):
        select(several, [], 0)


@pytest.mark.parametrize("file", [STORIES, GENERAL])
def test_built_in_prompts_have_categories_and_differ(file: Path) -> None:
    questions = read_questions(file)
    assert all(one.category for one in questions)
    assert len({one.prompt for one in questions}) == len(questions) >= 6
