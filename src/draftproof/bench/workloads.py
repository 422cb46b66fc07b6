"""Prompts to measure with, by category, from files in JSON Lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from draftproof.engine.engine import Engine, Prompt
from draftproof.engine.rows import prompt_of
from draftproof.errors import BadInput
from draftproof.model.loading import embedded, resolve

EMBEDDED = Path(__file__).parents[1] / "embedded"
STORIES, GENERAL = EMBEDDED / "stories.jsonl", EMBEDDED / "general.jsonl"
"""Prompts that come with the package: for the embedded model, which knows stories, and others."""


def built_in(model: str) -> tuple[list[str], Path]:
    """The drafters, if others than its default, and prompts to measure a model with when nobody
    names any."""
    if resolve(model) == str(embedded("demo")):
        return ["portfolio", "medusa", "redrafter", "demo-draft"], STORIES
    return [], GENERAL


class Question(NamedTuple):
    """One prompt, and what kind it is."""

    prompt: Prompt
    category: str = ""


def read_questions(file: Path, chat: bool = False) -> list[Question]:
    """The rows of a JSONL file, each a prompt with, perhaps, a "category".

    chat: prompts are the user's messages. Raises BadInput for a file that is missing or malformed.
    """
    if not file.is_file():
        raise BadInput(f"there is no file {file}; give a JSONL file with a prompt in each row")
    questions = []
    for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            category = row.get("category") or "" if isinstance(row, dict) else None
            if not isinstance(category, str):
                raise BadInput("it is not an object, or its category is not text")
            questions.append(Question(prompt_of(row, chat), category))
        except (BadInput, json.JSONDecodeError) as error:
            raise BadInput(f"line {number} of {file} cannot be used: {error}") from error
    if not questions:
        raise BadInput(f'{file} has no rows; give JSON objects such as {{"prompt": "..."}}')
    return questions


def select(
    questions: Sequence[Question], categories: Sequence[str], limit: int | None
) -> list[Question]:
    """Those of the categories (all if none is named), of each the first `limit`; else BadInput."""
    known = list(dict.fromkeys(one.category for one in questions if one.category))
    for name in categories:
        if name not in known:
            there = ", ".join(known) or "none"
            raise BadInput(f"there is no category {name!r} in the prompts; there are: {there}")
    if limit is not None and limit < 1:
        raise BadInput(f"limit was {limit}; take at least 1 prompt of each category")
    of_each: dict[str, list[Question]] = {}
    for one in questions:
        if not categories or one.category in categories:
            of_each.setdefault(one.category, []).append(one)
    return [one for one in questions if one in of_each.get(one.category, [])[:limit]]


def that_fit(engine: Engine, questions: Sequence[Question], new_tokens: int) -> list[list[int]]:
    """The prompts, as tokens, that leave room for so many new ones; else BadInput."""
    tokens = [engine.requests.tokens(one.prompt) for one in questions]
    fitting = [some for some in tokens if len(some) + new_tokens <= engine.target.context]
    if questions and not fitting:
        raise BadInput(f"no prompt leaves room for {new_tokens} new tokens; ask for fewer")
    return fitting
