"""Tool calls: their form in a model's chat template, their grammars, and parsing them from a
text."""

from __future__ import annotations

import copy
import json
import re
import uuid
from collections.abc import Sequence
from typing import Any

from draftproof.errors import BadInput
from draftproof.server.call_forms import (
    HERMES,
    LLAMA,
    MISTRAL,
    Call,
    Form,
    ToolCall,
    form_of,
    read_calls,
)
from draftproof.server.json_schema import json_rule
from draftproof.server.schema import Chat, Function, Tool
from draftproof.tokenizer.codec import Codec

__all__ = [
    "HERMES",
    "LLAMA",
    "MISTRAL",
    "CallReader",
    "Form",
    "as_client",
    "call_grammar",
    "call_messages",
    "offered",
]


def offered(body: Chat, codec: Codec | None) -> tuple[list[dict[str, object]], Form | None]:
    """The tools that a model may call, for its template, and the form of calls; None if there are
    none."""
    tools = [tool.model_dump(exclude_unset=True, by_alias=True) for tool in body.tools or ()]
    if not tools and body.tool_choice not in (None, "none", "auto"):
        raise BadInput("tool_choice asks for a call, and there are no tools")
    if not tools or body.tool_choice == "none":
        return [], None
    if codec is None:
        raise BadInput("tools were given, and this model has no tokenizer; leave them out")
    return tools, form_of(codec, tools)


def call_grammar(body: Chat, form: Form, codec: Codec | None) -> str | None:
    """The grammar for `tool_choice`: a call of any tool, or of the named one."""
    choice, functions = body.tool_choice, [tool.function for tool in body.tools or ()]
    if choice is None or choice == "auto":
        return None
    if isinstance(choice, Tool):
        functions = [function for function in functions if function.name == choice.function.name]
    if not functions:
        raise BadInput("tool_choice names a function that is not among the tools")
    several = choice == "required" and body.parallel_tool_calls is not False
    return _call_grammar(functions, form, several, codec)


def _call_grammar(
    functions: list[Function], form: Form, several: bool, codec: Codec | None
) -> str:
    """Calls of these functions, in llguidance's Lark."""
    begin, end = (_terminals(text, codec) for text in (form.begin, form.end))
    between = _terminals(form.between, codec) if form.between is not None else None
    rules = list[str]()
    if form.kind == "json":
        call = json_rule({"anyOf": [_call_schema(function, form) for function in functions]})
        rules = [f"call: {call}"]
    elif form.kind == "named":
        separator = _terminals(form.separator, codec)
        for index, function in enumerate(functions):
            schema = json_rule(function.parameters or {"type": "object"})
            rules += [f"call{index}: {json.dumps(function.name)} {separator} arguments{index}",
                      f"arguments{index}: {schema}"]
        rules.append("call: " + " | ".join(f"call{index}" for index in range(len(functions))))
    else:
        raise BadInput("tool_choice asks for a call, and the form in which this model writes calls "
                       'has no grammar here; leave it out, or say "auto"')
    calls = "call"
    if form.listed:
        calls = '"[" call (", " call)* "]"' if several else '"[" call "]"'
    elif several and between is not None:
        calls = f"call ({between} call)*"
    return "\n".join([f"start: {begin} {calls} {end}", *rules])


def _call_schema(function: Function, form: Form) -> dict[str, object]:
    properties = {form.name: {"const": function.name},
                  form.arguments: function.parameters or {"type": "object"}}
    return {"type": "object", "additionalProperties": False, "required": [*properties],
            "properties": properties}


def _terminals(text: str, codec: Codec | None) -> str:
    """A text in a Lark grammar; parts that are added tokens of the tokenizer are written as
    tokens."""
    known = codec.tokenizer.get_added_vocab() if codec else {}
    names = sorted(filter(None, known), key=len, reverse=True)
    parts = re.split("(" + "|".join(map(re.escape, names)) + ")", text) if names else [text]
    return " ".join(f"<[{known[part]}]>" if part in known else json.dumps(part, ensure_ascii=False)
                    for part in parts if part)


def call_messages(messages: list[dict[str, Any]], form: Form | None) -> list[dict[str, Any]]:
    """Messages with arguments of calls as the template expects them: objects, or JSON text."""
    if form is None or not form.text_arguments:
        return messages
    messages = copy.deepcopy(messages)
    for call in (call for message in messages for call in message.get("tool_calls") or ()):
        call["function"]["arguments"] = json.dumps(call["function"].get("arguments") or {},
                                                   ensure_ascii=False)
    return messages


class CallReader:
    """Splits a text, while it is written, into the answer and the calls at its end.

    Everything from the possible beginning of a call on is held back until the text has ended.

    Args:
        form: How the model writes calls.
        tools: The tools offered; forms that write text without quotes need their schemas.
    """

    def __init__(self, form: Form, tools: Sequence[Tool] = ()) -> None:
        self.form, self._text, self._held = form, "", ""
        self._schemas = {tool.function.name: tool.function.parameters for tool in tools}

    def push(self, text: str, last: bool) -> tuple[str, list[ToolCall]]:
        """The new text that is certainly not part of a call; at the end, the calls."""
        self._held += text
        place, calls = self._first_call(), list[Call]()
        cut = len(self._held[:place].rstrip())
        if last:
            place, calls = self._last_calls(place)
            cut = len(self._held[:place].rstrip()) if calls else len(self._held)
        certain, self._held = self._held[:cut], self._held[cut:]
        self._text += certain
        return certain, [as_client(index, call) for index, call in enumerate(calls)]

    def _last_calls(self, place: int) -> tuple[int, list[Call]]:
        """The position of the calls, and the calls. Text before them may quote a mark."""
        while place < len(self._held):
            if calls := read_calls(self._held[place:], self.form, self._schemas):
                return place, calls
            if not self.form.mark:
                break
            place = self._held.find(self.form.mark, place + 1)
            if place < 0:
                break
        return len(self._held), []

    def _first_call(self) -> int:
        """Where a call begins, or may begin, in the text held back."""
        text, begin = self._held, self.form.mark
        start = len(text) - len(text.lstrip())
        opening = {"json": ("{", "["), "python": ("[",)}.get(self.form.kind, ())
        if not self._text.strip() and text[start : start + 1] in opening:   # the mark is optional
            return start
        sizes = range(len(begin) - 1, 0, -1)
        partial = next((size for size in sizes if text.endswith(begin[:size])), 0)
        whole = text.find(begin) if begin else -1
        return whole if whole >= 0 else len(text) - partial


def as_client(index: int, call: Call) -> ToolCall:
    """A call as OpenAI's clients read it."""
    name, arguments = call
    text = json.dumps(arguments, ensure_ascii=False)
    if any("\ud800" <= letter <= "\udfff" for letter in text):    # half of a surrogate pair
        text = json.dumps(arguments)
    return {"index": index, "id": f"call_{uuid.uuid4().hex}", "type": "function",
            "function": {"name": name, "arguments": text}}
