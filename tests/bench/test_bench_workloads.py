"""Prompts from files and from the package."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny

from draftproof.bench.workloads import GENERAL, MT_BENCH, STORIES, Question, Workload, chosen, read
from draftproof.errors import BadInput


def prompt_of(row: Mapping[str, Any]) -> str:
    if "prompt" not in row:
        raise BadInput("the row has no prompt")
    return str(row["prompt"])


def turns_of(row: Mapping[str, Any]) -> str:
    return str(row["turns"][0])


def test_rows_become_questions(tmp_path: Path) -> None:
    file = tmp_path / "some.jsonl"
    file.write_text('{"prompt": "a", "category": "x"}\n\n{"prompt": "b"}\n')
    assert read(file, prompt_of) == Workload("some.jsonl", (Question("a", "x"), Question("b")))


@pytest.mark.parametrize(
    ("line", "why"),
    [("{", "not JSON"), ("[1]", "not an object"), ("{}", "no prompt"), ('{"prompt": "a", "category": 3}', "must be text")],
)
def test_a_bad_row_is_named_by_its_line(tmp_path: Path, line: str, why: str) -> None:
    file = tmp_path / "some.jsonl"
    file.write_text(f'{{"prompt": "a"}}\n{line}\n')
    with pytest.raises(BadInput, match=rf"line 2 of .*{why}"):
        read(file, prompt_of)
    file.write_text("\n")
    with pytest.raises(BadInput, match="has no rows"):
        read(file, prompt_of)


def test_a_file_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"no file .*none\.jsonl"):
        read(tmp_path / "none.jsonl", lambda row: str(row["prompt"]))


def test_spec_bench_has_six_tasks_of_eighty() -> None:
    whole = read(tiny.shared("data", "spec_bench", "question.jsonl"), turns_of, tasks=True)
    assert Counter(question.category for question in whole.questions) == dict.fromkeys(
        ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag"), 80
    )
    apart = read(tiny.shared("data", "mt_bench", "question.jsonl"), turns_of)
    assert set(apart.categories) == set(MT_BENCH)


def test_a_choice_keeps_the_order() -> None:
    several = Workload("w", tuple(Question(str(number), "ab"[number % 2]) for number in range(6)))
    assert [q.prompt for q in chosen(several, ["b"], None).questions] == ["1", "3", "5"]
    assert [q.prompt for q in chosen(several, [], 2).questions] == ["0", "1", "2", "3"]
    assert chosen(several, [], None) == several
    with pytest.raises(BadInput, match="no category 'c' in w; there are: a, b"):
        chosen(several, ["c"], None)
    with pytest.raises(BadInput, match="at least 1"):
        chosen(several, [], 0)


def test_chats_can_be_chosen_too() -> None:
    chat = Workload("w", (Question([{"role": "user", "content": "a"}], "x"),))
    assert chosen(chat, ["x"], 1) == chat


def test_built_in_prompts_have_categories_and_differ() -> None:
    for workload in (STORIES, GENERAL):
        assert all(question.category for question in workload.questions)
        texts = [json.dumps(question.prompt) for question in workload.questions]
        assert len(set(texts)) == len(texts) >= 6
