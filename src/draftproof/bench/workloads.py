"""Prompts for measurements, from files in JSON Lines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from draftproof.engine.engine import Engine, Prompt
from draftproof.errors import BadInput
from draftproof.model.loading import embedded, resolve
from draftproof.requests.openai_format import parse_json, prompt_of

EMBEDDED = Path(__file__).parents[1] / "embedded"
STORIES, GENERAL = EMBEDDED / "stories.jsonl", EMBEDDED / "general.jsonl"
"""Prompts that come with the package: for the embedded model, which knows stories, and others."""


def built_in(model: str) -> tuple[list[str], Path]:
    """The default drafters, unless they are the model's own, and prompts for measuring a model."""
    if resolve(model) == str(embedded("demo")):
        return ["portfolio", "medusa", "redrafter", "demo-draft"], STORIES
    return [], GENERAL


def read_prompts(file: Path, chat: bool = False) -> list[Prompt]:
    """Read the prompts of a JSONL file. chat: they are the user's messages. Raises BadInput for a
    missing or malformed file."""
    if not file.is_file():
        raise BadInput(f"there is no file {file}; give a JSONL file with a prompt in each row")
    prompts = list[Prompt]()
    for number, line in enumerate(file.read_bytes().split(b"\n"), 1):
        try:
            if line.strip():
                prompts.append(prompt_of(parse_json(line), chat))
        except BadInput as error:
            raise BadInput(f"line {number} of {file} cannot be used: {error}") from error
    if not prompts:
        raise BadInput(f'{file} has no rows; give JSON objects such as {{"prompt": "..."}}')
    return prompts


def that_fit(engine: Engine, prompts: Sequence[Prompt], new_tokens: int) -> list[list[int]]:
    """The prompts, as tokens, that leave room for `new_tokens`; raises BadInput if none does."""
    tokens = [engine.requests.tokens(prompt) for prompt in prompts]
    fitting = [text for text in tokens if len(text) + new_tokens <= engine.target.context]
    if prompts and not fitting:
        raise BadInput(f"no prompt leaves room for {new_tokens} new tokens; ask for fewer")
    return fitting
