"""Prompts from files, and those of the package."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftproof.bench.workloads import GENERAL, STORIES, read_prompts
from draftproof.errors import BadInput


def test_rows_become_prompts(tmp_path: Path) -> None:
    file = tmp_path / "some.jsonl"
    file.write_text('{"prompt": "a", "category": "x"}\n\n{"turns": ["b", "c"]}\n')
    assert read_prompts(file) == ["a", "b"]
    assert read_prompts(file, chat=True)[0] == [{"role": "user", "content": "a"}]
    for built_in in (STORIES, GENERAL):
        prompts = read_prompts(built_in)
        assert len(set(map(str, prompts))) == len(prompts) >= 6


@pytest.mark.parametrize(("line", "why"), [
    ("{", "not JSON"), ("[1]", "must be an object"), ("{}", "no prompt"),
])
def test_a_bad_row_is_named_by_its_line(tmp_path: Path, line: str, why: str) -> None:
    file = tmp_path / "some.jsonl"
    file.write_text(f'{{"prompt": "a"}}\n{line}\n')
    with pytest.raises(BadInput, match=rf"line 2 of .*{why}"):
        read_prompts(file)
    file.write_text("\n")
    with pytest.raises(BadInput, match="has no rows"):
        read_prompts(file)
    with pytest.raises(BadInput, match=r"no file .*none\.jsonl"):
        read_prompts(tmp_path / "none.jsonl")
