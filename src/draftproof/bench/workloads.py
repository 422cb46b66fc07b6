"""What is written: prompts, by category. Knows files of prompts and the prompts that come with the package."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftproof.errors import BadInput
from draftproof.model.tokenizer import Messages

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
"""Categories of MT-bench; Spec-Bench counts them as one of its six tasks."""


@dataclass(frozen=True)
class Question:
    """One prompt: a text, or a chat."""

    prompt: str | Messages
    category: str = ""


@dataclass(frozen=True)
class Workload:
    """Prompts, and what they are called."""

    name: str
    questions: tuple[Question, ...]

    @property
    def categories(self) -> list[str]:
        """In the order they come."""
        return list(dict.fromkeys(question.category for question in self.questions if question.category))


STORIES = Workload(
    "openings of stories, built in",
    tuple(
        Question(text, "story")
        for text in (
            "Once upon a time, there was a little girl named Lily. She",
            "Tom and his dog were playing in the park when",
            "One day, a small bird fell from its nest.",
            "Ben had a big red ball. He loved",
            "The sun was hot, and Mia wanted to",
            "There was an old man who lived near the sea. Every morning",
        )
    ),
)
"""For the embedded model, which knows stories and nothing else."""

GENERAL = Workload(
    "general prompts, built in",
    (
        Question("The history of the lighthouse begins long before electricity. The first", "prose"),
        Question("It was raining when the last train left the station, and", "prose"),
        Question("Question: Why does ice float on water?\nAnswer:", "explanation"),
        Question("Question: What is the difference between a process and a thread?\nAnswer:", "explanation"),
        Question(
            "def merge_sorted(left: list[int], right: list[int]) -> list[int]:\n"
            '    """Merge two sorted lists into one sorted list."""\n',
            "code",
        ),
        Question("# Read a CSV file and print the mean of every numeric column.\nimport csv\n\n", "code"),
        Question(
            "Text: The museum will open at nine on weekdays and at ten at the weekend. Tickets cost eight euros, four for "
            "students. Children under six enter free. The last visitors are let in one hour before the museum closes at six.\n"
            "The same text, with all numbers as digits:",
            "rewriting",
        ),
        Question(
            "Question: A baker sells 14 loaves in the morning and twice as many in the afternoon, at 3 euros each. How much "
            "does he earn in a day?\nAnswer, step by step:",
            "arithmetic",
        ),
    ),
)
"""For any other model."""


def read(file: Path, prompt_of: Callable[[Mapping[str, Any]], str | Messages], *, tasks: bool = False) -> Workload:
    """The rows of a JSONL file, each a prompt with, perhaps, a "category".

    prompt_of: the prompt of a row; raises BadInput for one that has none. tasks: count MT-bench's categories as one.
    Raises BadInput for a file that is not there, or holds something else.
    """
    if not file.is_file():
        raise BadInput(f"there is no file {file}; give a JSONL file with a prompt in each row")
    questions = []
    for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), 1):
        if line.strip():
            try:
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise BadInput("it is not an object")
                questions.append(Question(prompt_of(row), _category(row, tasks)))
            except ValueError as error:                               # BadInput is one
                reason = str(error) if isinstance(error, BadInput) else f"it is not JSON ({error})"
                raise BadInput(f"line {number} of {file} cannot be used: {reason}") from error
    if not questions:
        raise BadInput(f'{file} has no rows; give one JSON object per line, such as {{"prompt": "..."}}')
    return Workload(file.name, tuple(questions))


def chosen(workload: Workload, categories: Sequence[str], limit: int | None) -> Workload:
    """The prompts of these categories, all of them if none are named; of each category the first `limit`."""
    strange = [name for name in categories if name not in workload.categories]
    if strange:
        there = ", ".join(workload.categories) or "none"
        raise BadInput(f"there is no category {strange[0]!r} in {workload.name}; there are: {there}")
    if limit is not None and limit < 1:
        raise BadInput(f"limit was {limit}; take at least 1 prompt of each category")
    seen: Counter[str] = Counter()
    kept = []
    for question in workload.questions:
        if (not categories or question.category in categories) and (limit is None or seen[question.category] < limit):
            seen[question.category] += 1
            kept.append(question)
    return Workload(workload.name, tuple(kept))


def _category(row: Mapping[str, Any], tasks: bool) -> str:
    name = row.get("category") or ""
    if not isinstance(name, str):
        raise BadInput('"category" must be text')
    return "mt_bench" if tasks and name in MT_BENCH else name
