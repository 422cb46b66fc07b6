"""Parses a row of a file of prompts in the formats of draftproof, OpenAI, vLLM and others.

A row has its prompt and sampling options at the top level, or under "sampling", "sampling_params"
or "body". Fields that change the text and cannot be honoured are refused; a user's own fields (a
reference answer, a category) are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from draftproof.errors import BadInput
from draftproof.requests.foreign_options import (
    HARMLESS,
    OFF,
    OTHER_NAMES,
    UNSUPPORTED,
    refuse_unknown,
    refuse_unsupported,
)
from draftproof.requests.json_text import read_json

if TYPE_CHECKING:
    from draftproof.core.params import Sampling
    from draftproof.requests.prompts import Prompt

NOT_DATA = ("processors", "stop_when", "logits_rules")
"""Fields of `Sampling` that no file or request can hold."""
PROMPTS = ("prompt", "messages", "turns", "text", "prompt_token_ids", "inputs")
"""Fields that may hold the prompt; of turns, the first is taken."""
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message's reasoning: an answer may have nothing else."""
SWITCHES = ("n", "do_sample", "ignore_eos")
"""What a row may ask for in addition to the fields of `Sampling`."""


class ParsedRow(NamedTuple):
    """The parsed contents of a row."""

    prompt: Prompt
    sampling: Sampling


def parse_json(text: bytes) -> dict[str, object]:
    """The object on a line, with its "body" unfolded. Raises BadInput, in one sentence."""
    try:
        row = read_json(text)
    except json.JSONDecodeError as error:
        raise BadInput(f"the row is not JSON: {error if error.doc else error.msg}") from error
    if not isinstance(row, dict):
        wanted = f"an object with one of {', '.join(PROMPTS)}"
        raise BadInput(f"the row is a JSON {type(row).__name__}; it must be {wanted}")
    body = row.get("body")
    return {**row, **body} if isinstance(body, dict) else row


def row_ids(text: bytes) -> dict[str, object]:
    """The row's own ids, if it has any."""
    try:
        row = parse_json(text)
    except BadInput:
        return {}
    return {name: row[name] for name in ("id", "custom_id") if name in row}


def parse_row(text: bytes, base: Sampling, chat: bool) -> ParsedRow:
    """Parse a row, with `base` as defaults. Raises BadInput, in one sentence."""
    row = parse_json(text)
    refuse_unhonoured(row)
    if (n := row.get("n")) not in (None, 1):
        raise BadInput(f'"n" was {n!r}; each row is completed once, repeat it with another seed')
    return ParsedRow(prompt_of(row, chat), sampling_of(base, row))


def refuse_unhonoured(row: Mapping[str, object]) -> None:
    """Raise BadInput for a field that would change the answer and is not honoured."""
    if (n := _nested(row).get("n")) not in (None, 1):
        raise BadInput(f'"n" was {n!r} among the sampling options; give it next to the prompt')
    for options in (row, _nested(row)):
        refuse_unsupported(options)


def refuse_unrecognized(row: Mapping[str, object], base: Sampling) -> None:
    """Raise BadInput for any unknown name: a file's row may have the user's own fields, but a
    request may not."""
    refuse_unhonoured(row)
    refuse_unknown(row, (*_sampling_fields(base), *SWITCHES, "sampling", "sampling_params"))


def prompt_of(row: Mapping[str, object], chat: bool) -> Prompt:
    """The prompt of a row, as text, as token ids or as a chat. Raises BadInput, in one sentence."""
    name = next((name for name in PROMPTS if name in row), None)
    if name is None:
        raise BadInput(f"the row has no prompt; it must have one of {', '.join(PROMPTS)}")
    prompt = row[name]
    if row.get("input") and isinstance(row["input"], str):
        raise BadInput(f'"input" and "{name}" were both given; put it into the prompt')
    system = row.get("system") or None
    if name == "messages":
        return _with_system(messages_of(prompt), system)
    if name == "turns" and isinstance(prompt, list) and prompt:
        prompt = prompt[0]
    if isinstance(prompt, list) and prompt and system is None and all(
            type(token) is int for token in prompt):
        return [int(token) for token in prompt]
    if not isinstance(prompt, str) or (chat and not prompt):
        raise BadInput(f'"{name}" must be text, and of a chat at least one word')
    if chat:
        return _with_system([{"role": "user", "content": prompt}], system)
    if system is not None:
        raise BadInput(f'"system" was given with "{name}"; it needs --chat, or "messages"')
    return prompt


def _with_system(messages: list[dict[str, object]], system: object) -> list[dict[str, object]]:
    """Messages with the row's own system message, if any, in front."""
    if system is None:
        return messages
    if not isinstance(system, str) or messages[0]["role"] == "system":
        raise BadInput('"system" must be one text, and not also a message of "messages"')
    return [{"role": "system", "content": system}, *messages]


def messages_of(value: object) -> list[dict[str, Any]]:
    """Messages for templates: text is joined, and arguments of calls are objects."""
    messages: list[Any] = value if isinstance(value, list) else []
    roles = [isinstance(entry, dict) and isinstance(entry.get("role"), str) for entry in messages]
    if not roles or not all(roles):
        raise BadInput('"messages" must be a list of objects with "role" and "content"')
    read = list[dict[str, Any]]()
    for message in messages:
        calls, content = message.get("tool_calls"), message.get("content")
        if content is None and (calls or any(message.get(name) for name in REASONING)):
            content = ""
        if isinstance(content, list):
            content = "".join(map(text_part, content))
        if not isinstance(content, str):
            raise BadInput("the content of a message must be text, or a list of parts that are")
        extra = {"tool_calls": tool_calls_of(calls)} if calls else {}
        read.append({**message, "content": content, **extra})
    return read


def text_part(part: object) -> str:
    """The text of a part of a message; raises BadInput for images and all other kinds."""
    if isinstance(part, dict) and part.get("type", "text") == "text":
        words = part.get("text")
        if isinstance(words, str):
            return words
    raise BadInput("a message has a part that is not text; only text is read here")


def tool_calls_of(calls: Any) -> list[dict[str, object]]:
    """Tool calls for chat templates, with arguments as an object instead of text."""
    try:
        read = []
        for call in calls:
            function = dict(call["function"])
            if isinstance(function.get("arguments"), str):
                function["arguments"] = json.loads(function["arguments"] or "{}")
            read.append({"type": "function", **call, "function": function})
        return read
    except (TypeError, KeyError, ValueError, RecursionError) as error:
        raise BadInput(f"a message's tool_calls cannot be read: {error!r:.120}") from None


def sampling_of(base: Sampling, row: Mapping[str, object]) -> Sampling:
    """`base` with the row's options, under our names or another engine's.

    As in vLLM, `stop_token_ids` are end tokens in addition to the model's own, and `ignore_eos`
    drops only the model's own.
    """
    kinds, nested = _sampling_fields(base), _nested(row)
    unsupported = {name for names in UNSUPPORTED.values() for name in names}
    for name in nested:
        ours = OTHER_NAMES.get(name, name)
        if not (ours in kinds or name in SWITCHES or name in unsupported or name in HARMLESS):
            raise BadInput(f"there is no sampling option {name!r}; there are {', '.join(kinds)}")
    params, names, options = dict[str, Any](), dict[str, str](), {**row, **nested}
    for name, value in options.items():
        ours = OTHER_NAMES.get(name, name)
        if ours not in kinds or value is None or (ours == "seed" and value == -1):
            continue
        typed = _typed(ours, kinds[ours], value)
        if ours in params and params[ours] != typed:
            raise BadInput(f'"{names[ours]}" and "{name}" are the same option; give one of them')
        params[ours], names[ours] = typed, name
        if ours == "logprobs" and type(value) is int:       # the number of most likely tokens
            params["top_logprobs"] = value
    sampling, drawn = replace(base, **params), options.get("do_sample")
    if options.get("ignore_eos") and sampling.stop_tokens is None:
        sampling = replace(sampling, stop_tokens=())
    if drawn is not None and bool(drawn) != (sampling.temperature > 0):
        raise BadInput(f"do_sample was {drawn!r}; set temperature instead, where 0 is greedy")
    return sampling


def _sampling_fields(base: Sampling) -> dict[str, str]:
    """The sampling options that JSON can hold, and their types."""
    return {field.name: str(field.type) for field in fields(base) if field.name not in NOT_DATA}


def _nested(row: Mapping[str, object]) -> dict[str, object]:
    """The sampling options that a row has below its top level."""
    options = dict[str, object]()
    for name in ("sampling", "sampling_params", *(["parameters"] if "inputs" in row else [])):
        inner = row.get(name) or {}
        if not isinstance(inner, dict):
            raise BadInput(f'"{name}" must be an object of sampling options')
        options |= inner
    return options


def _typed(name: str, kind: str, value: Any) -> object:
    """Convert a value to its option's type: JSON keys are not ids, and some write 8.0 or 1."""
    off, ours = OFF.get(name, (None, None))
    if off is not None and type(value) is int and value == off:
        return ours
    if kind.startswith("int") and isinstance(value, float) and value.is_integer():
        return int(value)
    if name == "logprobs" and type(value) is int:
        return True
    if name == "logit_bias":
        try:
            pairs = dict(value).items()
            if any(isinstance(bias, bool) for _, bias in pairs):    # llama.cpp's false bans a token
                raise TypeError
            return {int(token): float(bias) for token, bias in pairs}
        except (TypeError, ValueError) as error:
            wanted = "an object of token ids and numbers"
            raise BadInput(f"logit_bias was {value!r}; it must be {wanted}") from error
    return value
