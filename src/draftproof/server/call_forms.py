"""How a chat template writes tool calls. The form is learned by rendering a call and reading it
back."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict

from draftproof.errors import BadInput
from draftproof.server.json_schema import TYPE_NAMES, types_of
from draftproof.tokenizer.codec import Codec


class CalledFunction(TypedDict):
    """The function of a call, with its arguments as JSON."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """A call as OpenAI's clients read it."""

    index: int
    id: str
    type: str
    function: CalledFunction


Call = tuple[str, dict[str, object]]
"""A function's name and its arguments."""
Schemas = Mapping[str, dict[str, Any] | None]
"""The JSON schema of each tool's arguments, by the tool's name."""

NAME, ARGUMENTS = "probe_call", {"text": "a probe", "count": 7}
"""The call that is rendered."""
_NAME_KEYS, _ARGUMENT_KEYS = ("name", "tool_name"), ("arguments", "parameters")
_PAIRS = {
    "arg_key": (r"\s*([\w.-]+)\s*", r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>"
                r"(?=\s*(?:<arg_key>|</tool_call>|$))", "</tool_call>"),
    "parameter": (r"\s*<function=([\w.-]+)>", r"\s*<parameter=([^>]+)>\n?(.*?)\n?</parameter>"
                  r"(?=\s*(?:<parameter=|</function>|$))", "</function> </tool_call>"),
}  # fmt: skip
"""Forms of keys and values after <tool_call>: the name, one pair, and the end of all pairs."""


@dataclass(frozen=True)
class Form:
    """How a model writes calls.

    Attributes:
        begin: The mark before a call; empty if there is none and the whole text is a call.
        end: The mark after it; may be missing at the end of a text.
        kind: "json", an object of name and arguments, or a list of them; "named", the name,
            `separator`, and an object of arguments; "arg_key" or "parameter", pairs; "python".
        arguments, name: The fields of a "json" form.
        listed: Whether the template puts calls into a list.
        between: The text between two calls; None if only one can be written.
        text_arguments: Whether the template wants the arguments of a call as JSON text.
    """

    begin: str
    end: str
    kind: str = "json"
    arguments: str = "arguments"
    name: str = "name"
    listed: bool = False
    separator: str = ""
    between: str | None = None
    text_arguments: bool = False

    @property
    def mark(self) -> str:
        """The marks that show in a running text that a call begins."""
        return self.begin.strip()


HERMES = Form("<tool_call>\n", "\n</tool_call>", between="\n</tool_call>\n<tool_call>\n")
MISTRAL = Form("[TOOL_CALLS]", "", listed=True)
LLAMA = Form("", "", arguments="parameters")


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no JSON number")


def _finite(text: str) -> float:
    return _no_number(text) if float(text) in (float("inf"), -float("inf")) else float(text)


_DECODER = json.JSONDecoder(parse_constant=_no_number, parse_float=_finite)


def read_calls(text: str, form: Form, tools: Schemas | None = None) -> list[Call]:
    """The calls at the beginning of a text; none if there are none, or if other text follows.

    Args:
        text: From a begin mark on.
        form: The model's form.
        tools: The JSON schema of each tool's arguments, by name; forms without quotes need it.
    """
    calls, place = list[Call](), _skip(text, 0, form.begin)
    if place is None:                                           # some models forget the mark
        place = 0 if form.kind == "json" else None
    while place is not None:
        try:
            read, place = _READERS[form.kind](text, place, form, tools or {})
        except (ValueError, RecursionError, SyntaxError, KeyError):
            return []
        calls += read
        end, place = _after(text, place, form)
        if place is None and not end:
            return []
    return calls


def _after(text: str, place: int, form: Form) -> tuple[bool, int | None]:
    """Whether a call may end here, and where the next one begins."""
    following = _skip(text, place, form.between) if form.between else None
    if following is not None:
        return True, following
    closed = _skip(text, place, form.end)
    if closed is not None and form.end.strip():
        again = _skip(text, closed, form.begin) if form.mark else None
        return True, again
    rest = text[place:].lstrip(" \n;")
    if form.kind == "json" and rest[:1] in ("{", "["):          # several without marks
        return True, len(text) - len(rest)
    cut = "".join(form.end.split()).startswith("".join(rest.split()))
    return not rest or cut, None


def _skip(text: str, place: int, mark: str) -> int | None:
    """The end of a mark at this place, ignoring blanks in it; None if there is no mark."""
    pattern = r"\s*" + r"\s*".join(map(re.escape, mark.split())) + r"\s*"
    match = re.compile(pattern).match(text, place)
    return match.end() if match else None


Read = tuple[list[Call], int]


def _json(text: str, place: int, form: Form, tools: Schemas) -> Read:
    value, end = _DECODER.raw_decode(text, place)
    calls, marked = list[Call](), bool(text[:place].strip())
    for entry in value if isinstance(value, list) else [value]:
        if not isinstance(entry, dict) or not isinstance(entry.get(form.name), str):
            raise ValueError("no call")
        arguments = entry.get(form.arguments, entry.get("arguments", ... if not marked else None))
        calls.append((entry[form.name], _object(arguments)))
    if not calls:
        raise ValueError("no call")
    return calls, end


def _object(arguments: object) -> dict[str, object]:
    """Arguments as an object. Some models leave them out, or write them as text."""
    if isinstance(arguments, str):
        arguments = _DECODER.decode(arguments) if arguments.strip() else None
    if arguments is None:
        return {}
    if not isinstance(arguments, dict):
        raise ValueError("arguments are an object")
    return arguments


def _named(text: str, place: int, form: Form, tools: Schemas) -> Read:
    match = re.compile(r"\s*([\w.-]+)").match(text, place)
    start = _skip(text, match.end(), form.separator) if match else None
    if match is None or start is None:
        raise ValueError("no call")
    arguments, end = _DECODER.raw_decode(text, start)
    return [(match[1], _object(arguments))], end


def _pairs(text: str, place: int, form: Form, tools: Schemas) -> Read:
    name_pattern, pair_pattern, _ = _PAIRS[form.kind]
    match = re.compile(name_pattern).match(text, place)
    if match is None:
        raise ValueError("no call")
    name, arguments, end = match[1], dict[str, object](), match.end()
    schema = tools.get(name) or {}
    properties = schema.get("properties") or {}
    while pair := re.compile(pair_pattern, re.DOTALL).match(text, end):
        key, end = pair[1].strip(), pair.end()
        arguments[key] = _value(pair[2], properties.get(key))
    return [(name, arguments)], end


def _value(text: str, schema: object) -> object:
    """Read a value that was written without quotes.

    If the schema allows a string, the value is one, unless it is JSON of another type that the
    schema allows as well: for "string or null", 12 is a string and null is not."""
    types = types_of(schema)
    try:
        value: object = _DECODER.decode(text.strip())
    except (ValueError, RecursionError):
        return text
    if "string" in types and not (types - {"string"}) & TYPE_NAMES[type(value)]:
        return text
    return value


def _python(text: str, place: int, form: Form, tools: Schemas) -> Read:
    """A list of calls with literal keywords, to the end of the text."""
    source = text[place:].strip()
    if form.end.strip():
        source = source.removesuffix(form.end.strip()).rstrip()
    tree = ast.parse(source, mode="eval").body
    nodes = tree.elts if isinstance(tree, ast.List) else [tree]
    calls = list[Call]()
    for node in nodes:
        if not isinstance(node, ast.Call) or node.args:
            raise ValueError("no call")
        arguments = {str(word.arg): ast.literal_eval(word.value) for word in node.keywords}
        json.dumps(arguments, allow_nan=False)
        calls.append((ast.unparse(node.func), arguments))
    if not calls:
        raise ValueError("no call")
    return calls, len(text)


_READERS = {"json": _json, "named": _named, "arg_key": _pairs, "parameter": _pairs,
            "python": _python}


def form_of(codec: Codec, tools: Sequence[object]) -> Form:
    """The form of calls in a model's chat template.

    Raises:
        BadInput: A rendered call cannot be read back.
    """
    template = codec.tokenizer.chat_template
    if not template or "tools" not in str(codec.tokenizer.get_chat_template(None, list(tools))):
        raise BadInput(
            f"tools were given, and the chat template of {codec.name} ignores tools; leave them out"
        )
    form = _probed(codec, list(tools))
    if form is None:
        raise BadInput(
            f"tools were given, and the chat template of {codec.name} writes calls in a form that "
            "cannot be read back here; leave them out"
        )
    return form


def _probed(codec: Codec, tools: Sequence[object]) -> Form | None:
    for as_text in (False, True):
        written = _rendered(codec, tools, 1, as_text) or ""
        form = _derived(written)
        if form is None:
            continue
        two = _rendered(codec, tools, 2, as_text)
        between = _between(two, form) if two else None
        form = replace(form, between=between or None, text_arguments=as_text)
        if read_calls(written, form) == [(NAME, ARGUMENTS)]:
            return form
    return None


def _rendered(codec: Codec, tools: Sequence[object], count: int, as_text: bool) -> str | None:
    """The template's text for `count` calls, without the beginning and end of every answer; None if
    the template refuses."""
    arguments = json.dumps(ARGUMENTS) if as_text else ARGUMENTS
    calls = [{"id": f"probe000{index}", "type": "function", "function": {
        "name": NAME, "arguments": arguments}} for index in range(count)]
    question, answer = {"role": "user", "content": "x"}, "probe answer"
    try:
        start = codec.chat_text([question], tools)
        answered = codec.chat_text(
            [question, {"role": "assistant", "content": answer}], tools, answer=False)
        full = codec.chat_text(
            [question, {"role": "assistant", "content": "", "tool_calls": calls}], tools,
            answer=False)
    except BadInput:
        return None
    same = next((place for place, (a, b) in enumerate(zip(start, full, strict=False)) if a != b),
                min(len(start), len(full)))
    ending = answered.rpartition(answer)[2]
    written = full[same:].removesuffix(ending)
    for mark in ("</think>", "<|END_THINKING|>"):
        written = written.rpartition(mark)[2]
    return written


def _derived(written: str) -> Form | None:
    """The form of one call, as it was written."""
    place = written.find(NAME)
    if place < 0:
        return None
    for start in (at for at in range(place) if written[at] in "[{"):
        try:
            value, end = _DECODER.raw_decode(written, start)
        except (ValueError, RecursionError):
            continue
        entry = value[0] if isinstance(value, list) and value else value
        keys = entry if isinstance(entry, dict) else {}
        name = next((key for key in _NAME_KEYS if keys.get(key) == NAME), None)
        about = next((key for key in _ARGUMENT_KEYS if keys.get(key) == ARGUMENTS), None)
        if name and about:
            return Form(written[:start], written[end:], "json", about, name,
                        isinstance(value, list))
    after, brace = place + len(NAME), written.find("{", place)
    if brace > 0:
        try:
            arguments, end = _DECODER.raw_decode(written, brace)
            if arguments == ARGUMENTS and written[after:brace].strip():
                return Form(written[:place], written[end:], "named",
                            separator=written[after:brace])
        except (ValueError, RecursionError):
            pass
    for kind, (_, _, end_mark) in _PAIRS.items():
        form = Form("<tool_call>", end_mark, kind)
        if read_calls(written, form) == [(NAME, ARGUMENTS)]:
            return form
    begin = written[:place].rstrip().removesuffix("[")
    form = Form(begin, "", "python")
    return form if read_calls(written, form) == [(NAME, ARGUMENTS)] else None


def _between(two: str, form: Form) -> str | None:
    """The text between two consecutive calls."""
    if form.kind != "json" and form.kind != "named":
        return None
    if form.listed:
        return None
    inner = two.removeprefix(form.begin)
    inner = inner.removesuffix(form.end)
    first = json.dumps(ARGUMENTS)
    start, last = inner.find(first), inner.rfind(NAME)
    if start < 0 or last <= start:
        return None
    if form.kind == "named":
        return inner[start + len(first) : last]
    try:
        _, end = _DECODER.raw_decode(inner)
        return inner[end : inner.index("{", end)]
    except ValueError:
        return None
