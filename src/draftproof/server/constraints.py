"""Constraints on the text of a request, as one grammar: `response_format`, and the spellings of
vLLM, SGLang and llama.cpp."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from draftproof.errors import BadInput, first_line
from draftproof.requests.foreign_options import is_neutral
from draftproof.server.json_schema import json_rule
from draftproof.server.schema import ResponseFormat

SPELLINGS = {
    "guided_json": "json", "guided_regex": "regex", "guided_choice": "choice",
    "guided_grammar": "grammar", "guided_json_object": "json_object", "json_schema": "json",
    "regex": "regex", "ebnf": "grammar", "grammar": "grammar",
}  # fmt: skip
"""Fields of a request, and the equivalent fields of vLLM's `structured_outputs`."""


def split(options: dict[str, object]) -> tuple[dict[str, object], dict[str, object]]:
    """Split the fields of a request: those that constrain the text, and all others."""
    names = {*SPELLINGS, "structured_outputs"}
    asked = {name: value for name, value in options.items()
             if name in names and not is_neutral(name, value)}
    return asked, {name: value for name, value in options.items() if name not in asked}


def grammar_of(response: ResponseFormat | None, asked: dict[str, object]) -> str | None:
    """The grammar that the text must follow, or None if any text is allowed.

    Args:
        response: OpenAI's field.
        asked: Fields of other engines, from `split`.

    Returns:
        A grammar in the Lark dialect of llguidance.

    Raises:
        BadInput: It cannot be followed, or there are two constraints.
    """
    wanted = [(SPELLINGS[name], value) for name, value in asked.items() if name in SPELLINGS]
    outputs = asked.get("structured_outputs", {})
    if not isinstance(outputs, dict):
        raise BadInput(f'"structured_outputs" was {outputs!r:.99}; it must be an object')
    wanted += [(name, value) for name, value in outputs.items() if not is_neutral(name, value)]
    grammar = _response_grammar(response)
    if len(wanted) + (grammar is not None) > 1:
        names = ", ".join([*asked, *(["response_format"] if grammar is not None else [])])
        raise BadInput(f"several constraints were asked for ({names}); give one")
    if not wanted:
        return grammar
    ((kind, value),) = wanted
    if kind not in _GRAMMARS:
        raise BadInput(f'"structured_outputs" has {kind!r}, which is not honoured; it may have one '
                       f"of {', '.join(_GRAMMARS)}")
    return _GRAMMARS[kind](value)


def _response_grammar(response: ResponseFormat | None) -> str | None:
    """The grammar of OpenAI's `response_format`; None if any text is allowed."""
    if response is None:
        return None
    if response.type == "text":
        if response.json_schema is not None or response.schema_ is not None:
            raise BadInput('response_format is "text" and has a schema; say "json_schema"')
        return None
    schema = response.json_schema.schema_ if response.json_schema is not None else None
    schema = response.schema_ if schema is None else schema
    if schema is None and response.type == "json_object":
        schema = {"type": "object"}
    if not isinstance(schema, dict):
        raise BadInput('response_format json_schema needs {"json_schema": {"schema": {...}}}')
    return f"start: {json_rule(schema)}"


def _json(schema: object) -> str:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise BadInput(f"the JSON schema is not JSON: {first_line(error)}") from None
    if not isinstance(schema, dict):
        raise BadInput(f"the JSON schema was {schema!r:.99}; it must be an object")
    return f"start: {json_rule(schema)}"


def _regex(pattern: object) -> str:
    """A regular expression that the whole text matches."""
    text = _text(pattern, "regular expression").removeprefix("^")
    text = re.sub(r"(?<!\\)((?:\\\\)*)\$$", r"\1", text)        # implied
    text = re.sub(r"(\\.)|/", lambda match: match[1] or "\\/", text, flags=re.DOTALL)
    escaped = text.replace("\n", "\\n")
    return f"start: TEXT\nTEXT: /{escaped}/"


def _choice(choices: object) -> str:
    texts = choices if isinstance(choices, list) else []
    if not texts or not all(isinstance(text, str) for text in texts):
        raise BadInput(f"the choices were {choices!r:.99}; give a list of strings")
    return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in texts)


def _grammar(value: object) -> str:
    """A grammar in llguidance's Lark or in llama.cpp's GBNF."""
    text = _text(value, "grammar")
    try:
        from llguidance.gbnf_to_lark import any_to_lark
    except ImportError:
        return text                 # compiling reports what to install
    try:
        return str(any_to_lark(text))
    except Exception as error:      # its parser may raise any exception
        raise BadInput(f"the grammar cannot be read: {first_line(error)}") from None


def _text(value: object, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise BadInput(f"the {what} was {value!r:.99}; it must be text")
    return value


_GRAMMARS: dict[str, Callable[[object], str]] = {
    "json": _json, "regex": _regex, "choice": _choice, "grammar": _grammar,
    "json_object": lambda _: f"start: {json_rule({'type': 'object'})}",
}  # fmt: skip
