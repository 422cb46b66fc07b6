"""Dictated text: what is wanted is written, whatever the model would say, and files that are none are refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

import draftproof as dp
from draftproof.bench import never_slower
from draftproof.bench.repeats import Dictation, Task, code_edits, measure, summaries
from draftproof.errors import BadInput

FUNCTION = {
    "prompt": "def close(numbers):\n    '''Are two numbers close?'''\n",
    "entry_point": "close",
    "canonical_solution": "    distance = numbers[0] - numbers[1]\n    return distance < 1\n",
}
ARTICLE = {"category": "summarization", "turns": ["Summarize: One came. Two went. Three stayed. Four slept. Five ate."]}


def written(path: Path, *rows: object) -> Path:
    with gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def test_a_function_comes_again_under_other_names(tmp_path: Path) -> None:
    (task,) = code_edits(written(tmp_path / "human.jsonl.gz", FUNCTION))
    assert task.prompt.startswith(FUNCTION["prompt"] + FUNCTION["canonical_solution"])
    assert "def run_close(numbers)" in task.text and "new_distance = numbers[0]" in task.text
    assert "return new_distance < 1" in task.text


def test_an_article_is_quoted(tmp_path: Path) -> None:
    other = {"category": "qa", "turns": ["Who?"]}
    (task,) = summaries(written(tmp_path / "bench.jsonl", other, ARTICLE))
    assert task.text == 'The article says: "One came." It goes on: "Three stayed."'
    assert task.prompt.startswith("One came.") and "Summarize" not in task.prompt


def test_what_is_no_file_of_these_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no JSON")
    for name in ("text", "nothing"):
        with pytest.raises(BadInput, match="could not be read as JSONL"):
            list(code_edits(tmp_path / name))


def test_dictation_allows_one_token() -> None:
    told = Dictation([1, 2], [7, 5])
    for length, wanted in ((1, 7), (2, 7), (3, 5), (9, 5)):
        scores = told(torch.zeros(1, length, dtype=torch.int64), torch.zeros(1, 10))
        assert scores.isfinite().nonzero().tolist() == [[0, wanted]]


def test_every_text_is_written_in_both_ways_if_there_is_room() -> None:
    plain = dp.load("demo", drafter="none", budget=0)
    text = "The cat sat on the mat, and the dog sat on the log, and the bird sat in the tree."
    found = measure(plain, [Task("echo", f"{text}\n", text), Task("too long", text * 80, text)], rounds=2)
    assert list(found) == ["echo"] and len(found["echo"].ours) == len(found["echo"].plain) == 2
    assert found["echo"].stats.emitted + 2 == 2 * len(plain.codec.encode(text))


def test_what_repeats_its_prompt_takes_fewer_rounds() -> None:
    """With as many drafted in every round: what a budget does depends on the clock."""
    engine = dp.load("demo", budget=10)
    text = "The cat sat on the mat, and the dog sat on the log, and the bird sat in the tree."
    prompt, wanted = engine.codec.encode(f"{text}\n"), engine.codec.encode(text)
    dictated = dp.Sampling(processors=(Dictation(prompt, wanted),))
    done = engine.generate([prompt], max_new_tokens=len(wanted), sampling=dictated)[0]
    assert done.tokens == wanted and done.stats.rounds < len(wanted) / 2


def test_cases_of_the_grid_say_what_they_are() -> None:
    cases = never_slower._cases(["draft model", "random"], 128)
    assert len({case.title for case in cases}) == len(cases)
    titles = " ".join(case.title for case in cases)
    assert all(word in titles for word in ("8 tokens", "batch 16", "T = 1.5", "prompt of 640"))
    long = never_slower._long([1, 2], [[3], [4, 5], [1, 2]], 16)
    assert len(long) == 12 and long[-2:] == [1, 2] and never_slower._long([1, 2], [[3]], 0) == [1, 2]


def test_no_way_of_the_grid_remembers_what_another_wrote() -> None:
    engine = dp.load("demo", drafter="none")
    made = [way.engine.drafter for way in never_slower._ways(engine, dp.PromptLookup).values()]
    assert len({id(drafter) for drafter in made}) == 3


@pytest.mark.parametrize("drafter", [never_slower.Dice, never_slower.Wrong])
def test_hopeless_drafters_change_no_text(drafter: type[dp.Drafter]) -> None:
    engine = dp.load("demo", drafter="none")
    wanted = engine.generate("Once upon a time", max_new_tokens=12, sampling=dp.Sampling())[0]
    other = dp.Engine(engine.target, drafter(engine.target.vocab_size), codec=engine.codec, budget=5)  # type: ignore[call-arg]
    found = other.generate("Once upon a time", max_new_tokens=12, sampling=dp.Sampling())[0]
    assert found.tokens == wanted.tokens and found.stats.drafted >= 40 and found.stats.acceptance < 0.1
