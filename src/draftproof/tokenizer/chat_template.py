"""Renders chat templates with jinja2 as transformers does, without importing it.

Templates come from the hub and are not trusted: they run in an immutable sandbox and see only
plain JSON data (transformers/utils/chat_template_utils.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which messages carry reasoning; templates read the first, gpt-oss the second."""


def render(
    template: str, messages: Sequence[Mapping[str, object]], tools: Sequence[object] | None,
    **values: object,
) -> str:  # fmt: skip
    """Render a conversation.

    Args:
        template: The chat template.
        messages: The conversation; fields of messages that are None are left out.
        tools: JSON schemas of functions, or None.
        values: Further variables of the template: special tokens, add_generation_prompt, ...

    Raises:
        jinja2.TemplateError: Or any other error, since a template is a program.
    """
    if not messages:
        raise ValueError("the conversation is empty; give at least one message")
    chat = [_message(message) for message in messages]
    variables = {"documents": None, **_plain(values)}
    return _compiled(template).render(messages=chat, tools=_plain(tools), **variables)


def _message(message: Mapping[str, object]) -> dict[str, object]:
    chat: dict[str, object] = _plain({key: value for key, value in message.items()
                                   if value is not None})
    reasoning = next((chat[key] for key in REASONING if chat.get(key) is not None), None)
    if reasoning is not None:
        chat = {"thinking": reasoning, **chat, "reasoning_content": reasoning}
    return chat


def _plain(value: Any) -> Any:
    """Copy a value with JSON's types alone; other types become placeholders with their name."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(item) for item in value)
    if callable(getattr(value, "model_dump", None)):                    # pydantic's models
        return _plain(value.model_dump())
    return f"<{type(value).__name__}>"


class _Generation(jinja2.ext.Extension):
    """The tag {% generation %}, which marks the assistant's text and renders as its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_body")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return str(caller())


class _Dict:
    """`dict` without its attributes."""

    def __call__(self, *args: Any, **values: object) -> dict[object, object]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[object, object]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """A namespace that stores no names with underscores, which could reach Python's internals."""

    def __init__(*args: Any, **values: object) -> None:
        self, rest = args[0], args[1:]
        attributes = dict(*rest, **values)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: object) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(
            f"a chat template cannot store {name!r} in a namespace; rename the attribute"
        )


@cache
def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise, "strftime_now": _now, "dict": _Dict(),
                            "namespace": _Namespace}
    return environment.from_string(template)


def _to_json(
    value: object, ensure_ascii: bool = False, indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:  # fmt: skip
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                      sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _now(format: str) -> str:
    return datetime.now().strftime(format)
