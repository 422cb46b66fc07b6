"""A row of a file of prompts: what it asks for, as draftproof, OpenAI batches, vLLM and others write it.

A row asks for its prompt and its sampling, at the top level, under "sampling", "sampling_params" or "body". Whatever changes
the text and is not honoured is refused; a user's own fields (a reference answer, a category) are left alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from draftproof.cli.setup import as_chat
from draftproof.errors import BadInput

if TYPE_CHECKING:
    from draftproof.core.params import Sampling
    from draftproof.engine.engine import Prompt

PROMPTS = ("prompt", "messages", "turns", "text", "prompt_token_ids")
"""Fields a prompt is looked for in; of turns, the first is taken."""
OTHER_NAMES = {
    "max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens", "min_tokens": "min_new_tokens",
    "stop_token_ids": "stop_tokens", "stop_strings": "stop", "bad_words": "banned_words", "no_repeat_ngram_size": "no_repeat_ngram",
}  # fmt: skip
"""What OpenAI, vLLM and transformers call an option."""
NOT_HONOURED = (
    "tools", "tool_choice", "functions", "function_call", "response_format", "guided_json", "guided_regex", "guided_choice",
    "structured_outputs", "best_of", "echo", "suffix", "typical_p", "num_beams", "prompt_embeds", "modalities", "audio",
)  # fmt: skip
"""Fields that would change the text, and that nothing here does."""


class Request(NamedTuple):
    """One row, understood."""

    prompt: Prompt
    sampling: Sampling


def parsed(text: bytes) -> dict[str, Any]:
    """The object on a line, its "body" unfolded. Raises BadInput, in one sentence."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise BadInput(f"the row is not JSON: {reason}") from error
    if not isinstance(row, dict):
        raise BadInput(f"the row is a JSON {type(row).__name__}; it must be an object with one of {', '.join(PROMPTS)}")
    body = row.get("body")
    return {**row, **body} if isinstance(body, dict) else row


def identity(text: bytes) -> dict[str, Any]:
    """The row's own ids, if it has any."""
    try:
        row = parsed(text)
    except BadInput:
        return {}
    return {name: row[name] for name in ("id", "custom_id") if name in row}


def understood(text: bytes, base: Sampling, chat: bool) -> Request:
    """What a row asks for, beside what `base` says. Raises BadInput, in one sentence."""
    row = parsed(text)
    asked = [name for name in NOT_HONOURED if row.get(name) not in (None, False, [], "none")]
    if asked:
        raise BadInput(f'"{asked[0]}" was asked for and is not honoured here; leave it out')
    if row.get("n") not in (None, 1):
        raise BadInput(f'"n" was {row["n"]!r}; each row is completed once, repeat it with another seed')
    return Request(prompt_of(row, chat), _sampling(base, row))


def prompt_of(row: Mapping[str, Any], chat: bool) -> Prompt:
    """The prompt of a row, as text, as token ids or as a chat. Raises BadInput, in one sentence."""
    name = next((name for name in PROMPTS if name in row), None)
    if name is None:
        raise BadInput(f"the row has no prompt; it must have one of {', '.join(PROMPTS)}")
    given = row[name]
    if name == "turns" and isinstance(given, list) and given:
        given = given[0]
    if name == "messages":
        return _messages(given)
    if isinstance(given, list) and given and all(type(token) is int for token in given):
        return [int(token) for token in given]
    if not isinstance(given, str):
        raise BadInput(f'"{name}" must be text')
    return as_chat(given) if chat else given


def _messages(given: object) -> list[dict[str, str]]:
    """Messages with their content as text; parts of text are joined, other parts refused."""
    if not isinstance(given, list) or not given:
        raise BadInput('"messages" must be a list of objects with "role" and "content"')
    return [{**message, "content": _content(message)} for message in given]


def _content(message: object) -> str:
    if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
        raise BadInput('"messages" must be a list of objects with "role" and "content"')
    content = message["content"]
    if isinstance(content, list):
        for part in content:
            if not (isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str)):
                raise BadInput("a message has a part that is not text; only text is read here")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str) or message.get("tool_calls"):
        raise BadInput("a message has a content that is not text, or tool calls; only text is read here")
    return content


def _sampling(base: Sampling, row: Mapping[str, Any]) -> Sampling:
    """`base` with what the row asks for."""
    known = {field.name: str(field.type) for field in fields(base) if field.name not in ("processors", "logits_rules")}
    asked = {name: value for name, value in row.items() if OTHER_NAMES.get(name, name) in known}
    for nested in ("sampling", "sampling_params"):
        inner = row.get(nested) or {}
        if not isinstance(inner, dict):
            raise BadInput(f'"{nested}" must be an object of sampling options')
        strange = [name for name in inner if OTHER_NAMES.get(name, name) not in known and name != "n"]
        if strange:
            raise BadInput(f"there is no sampling option {strange[0]!r}; there are {', '.join(known)}")
        asked |= {name: value for name, value in inner.items() if name != "n"}
    params = {OTHER_NAMES.get(name, name): value for name, value in asked.items() if value is not None}
    for name, value in params.items():
        params[name] = _typed(name, known[name], value)
    try:
        return replace(base, **params)
    except BadInput:
        raise
    except (TypeError, ValueError) as error:
        raise BadInput(f"the sampling options cannot be used: {error}") from error


def _typed(name: str, kind: str, value: Any) -> Any:
    """A value as its option wants it; JSON knows no token ids as keys, and others write one stop string alone."""
    if kind.startswith("int") and type(value) is not int:
        if isinstance(value, float) and value.is_integer():
            return int(value)
        raise BadInput(f"{name} was {value!r}; it must be a whole number")
    if kind.startswith("float") and (not isinstance(value, (int, float)) or isinstance(value, bool)):
        raise BadInput(f"{name} was {value!r}; it must be a number")
    if name == "logprobs":
        if not isinstance(value, (bool, int)):
            raise BadInput(f"logprobs was {value!r}; it must be true or false")
        return bool(value)
    if name == "logit_bias":
        try:
            return {int(token): float(bias) for token, bias in dict(value).items()}
        except (TypeError, ValueError) as error:
            raise BadInput(f"logit_bias was {value!r}; it must be an object of token ids and numbers") from error
    if name in ("stop", "banned_words") and isinstance(value, str):
        return (value,)
    if name in ("stop", "stop_tokens", "banned_words") and not _listed(name, value):
        wanted = {"stop": "texts", "stop_tokens": "token ids", "banned_words": "texts or lists of token ids"}[name]
        raise BadInput(f"{name} was {value!r}; it cannot be used, give a list of {wanted}")
    return value


def _listed(name: str, value: object) -> bool:
    """Whether a list holds what its option takes."""
    if not isinstance(value, Sequence):
        return False
    if name == "stop":
        return all(isinstance(one, str) for one in value)
    if name == "stop_tokens":
        return all(type(one) is int for one in value)
    return all(isinstance(one, str) or (isinstance(one, list) and _listed("stop_tokens", one)) for one in value)
