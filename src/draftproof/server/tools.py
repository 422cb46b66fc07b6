"""Tool calls: the form in which a model's chat template writes them, grammars of them, and calls
read from a text."""

from __future__ import annotations

import json
import uuid
from typing import Any, NamedTuple

from draftproof.core.params import LogitsRule
from draftproof.errors import BadInput
from draftproof.model.tokenizer import Codec
from draftproof.server.grammar import Grammars, json_rule
from draftproof.server.schema import Chat, Function, Tool


class Form(NamedTuple):
    """How a model writes calls: `begin`, an object (or one list of them), `end`.

    mark: what in a template tells this form. arguments: the name of that field.
    """

    mark: str
    begin: str
    end: str
    arguments: str = "arguments"


HERMES = Form("<tool_call>", "<tool_call>", "</tool_call>")                     # Qwen, too
MISTRAL = Form("[TOOL_CALLS]", "[TOOL_CALLS]", "")
LLAMA = Form('"parameters"', "", "", arguments="parameters")


def offered(body: Chat, codec: Codec | None) -> tuple[list[dict[str, Any]], Form | None]:
    """The tools that a model may call, for its template, and how it writes calls; None for none."""
    tools = [one.model_dump(exclude_unset=True) for one in body.tools or ()]
    if not tools and body.tool_choice not in (None, "none", "auto"):
        raise BadInput("tool_choice asks for a call, and there are no tools")
    if not tools or body.tool_choice == "none":
        return [], None
    template = ""
    if codec is not None and codec.tokenizer.chat_template:
        template = str(codec.tokenizer.get_chat_template(None, tools))
    form = next((form for form in (HERMES, MISTRAL, LLAMA) if form.mark in template), None)
    if "tools" not in template or "<function=" in template or form is None:
        raise BadInput(
            "tools were given, and the chat template of this model writes no calls of them in "
            "a form that is read here (Hermes, Qwen, Mistral, Llama 3); leave them out"
        )
    return tools, form


def call_rule(body: Chat, form: Form, grammars: Grammars) -> LogitsRule | None:
    """The grammar that `tool_choice` asks for: a call of some tool, or of the one named."""
    choice, functions = body.tool_choice, [one.function for one in body.tools or ()]
    if choice is None or choice == "auto":
        return None
    if isinstance(choice, Tool):
        functions = [one for one in functions if one.name == choice.function.name]
    if not functions:
        raise BadInput("tool_choice names a function that is not among the tools")
    one = json_rule({"anyOf": [_call_schema(function, form) for function in functions]})
    several = choice == "required" and body.parallel_tool_calls is not False
    begin, end = (_terminal(text, grammars.codec) for text in (form.begin, form.end))
    if form is LLAMA:
        return grammars.lark(f"start: {one}")
    if form is MISTRAL:
        many = '"[" one (", " one)* "]"' if several else '"[" one "]"'
        return grammars.lark(f"start: {begin} {many}\none: {one}")
    many = 'call ("\\n" call)*' if several else "call"
    return grammars.lark(f'start: {many}\ncall: {begin} "\\n" one "\\n" {end}\none: {one}')


def _call_schema(function: Function, form: Form) -> dict[str, Any]:
    properties = {"name": {"const": function.name},
                  form.arguments: function.parameters or {"type": "object"}}
    return {"type": "object", "additionalProperties": False, "required": [*properties],
            "properties": properties}


def _terminal(text: str, codec: Codec | None) -> str:
    """A text in a Lark grammar: as one token, where the tokenizer has that."""
    known = codec.tokenizer.get_added_vocab() if codec else {}
    return f"<[{known[text]}]>" if text in known else json.dumps(text)


class CallReader:
    """Parts a text, as it comes, into what is said and the calls at its end.

    From what may begin a call on, everything is held back until the text has ended.
    """

    def __init__(self, form: Form) -> None:
        self.form, self._said, self._held = form, "", ""

    def push(self, text: str, last: bool) -> tuple[str, list[dict[str, Any]]]:
        """The text that is certain to be none of a call; with the last of it, the calls."""
        self._held += text
        place = self._first_call()
        kept = len(self._held[:place].rstrip())
        calls = _calls(self._held[place:], self.form) if last else []
        cut = len(self._held) if last and not calls else kept
        said, self._held = self._held[:cut], self._held[cut:]
        self._said += said
        return said, calls

    def _first_call(self) -> int:
        """Where a call begins, or may begin, in what is held."""
        text, begin = self._held, self.form.begin
        start = len(text) - len(text.lstrip())
        if not self._said and text[start : start + 1] in ("{", "["):    # some forget the mark
            return start
        sizes = range(len(begin) - 1, 0, -1)
        partial = next((size for size in sizes if text.endswith(begin[:size])), 0)
        whole = text.find(begin) if begin else -1
        return whole if whole >= 0 else len(text) - partial


def _calls(text: str, form: Form) -> list[dict[str, Any]]:
    """The calls that a text consists of, as OpenAI's clients read them; none if it is not so. What
    follows the last end mark is left out."""
    decoder, found = json.JSONDecoder(), list[Any]()
    if form.end in text:
        text = text[: text.rindex(form.end)]
    for mark in filter(None, (form.begin, form.end)):
        text = text.replace(mark, " ")
    while text := text.lstrip(" \n;"):
        try:
            one, end = decoder.raw_decode(text)
        except (ValueError, RecursionError):
            return []
        found += one if isinstance(one, list) else [one]
        text = text[end:]
    calls = list[dict[str, Any]]()
    for index, one in enumerate(found):
        name = one.get("name") if isinstance(one, dict) else None
        arguments = one.get(form.arguments, one.get("arguments")) if name else None
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return []
        function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
        calls.append({"index": index, "id": f"call_{uuid.uuid4().hex}", "type": "function",
                      "function": function})
    return calls
