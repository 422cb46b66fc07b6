"""Tool calls: what a chat's request says of tools, the form its template gives them, and calls
read from the text as it comes."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from draftproof.core.params import LogitsRule
from draftproof.errors import BadInput
from draftproof.model.tokenizer import Codec
from draftproof.server.grammar import Grammars, json_rule


class Form(NamedTuple):
    """How a model writes calls: `begin`, an object (or a list of them), `end`.

    mark: what in a template tells this form. arguments: the name of that field. listed: one list
    holds all calls.
    """

    mark: str
    begin: str
    end: str
    arguments: str = "arguments"
    listed: bool = False


FORMS = (
    Form("<tool_call>", "<tool_call>", "</tool_call>"),                         # Qwen, Hermes, ...
    Form("[TOOL_CALLS]", "[TOOL_CALLS]", "", listed=True),                      # Mistral
    Form('"parameters"', "", "", arguments="parameters"),                       # Llama 3
)


class Call(NamedTuple):
    """A tool's name and its arguments, as JSON."""

    name: str
    arguments: str

    def told(self, index: int | None = None) -> dict[str, Any]:
        """As OpenAI's clients read it. index: of a streamed one."""
        place = {} if index is None else {"index": index}
        function = {"name": self.name, "arguments": self.arguments}
        return {**place, "id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


@dataclass(frozen=True)
class Tools:
    """The tools of a request. given: for the template. form: of the model's calls."""

    given: list[dict[str, Any]]
    form: Form

    @classmethod
    def of(cls, body: Mapping[str, Any], codec: Codec | None) -> Tools | None:
        """What a request offers; None where it offers nothing, or the model may use nothing."""
        given, choice = body.get("tools") or [], body.get("tool_choice")
        if not isinstance(given, list) or not all(map(_is_tool, given)):
            raise BadInput(
                '"tools" must be a list of {"type": "function", "function": {"name": ...}}'
            )
        if not given and choice not in (None, "none", "auto"):
            raise BadInput(f"tool_choice was {str(choice)[:99]!r}, and there are no tools")
        if not given or choice == "none":
            return None
        template = str(codec.tokenizer.get_chat_template(None, given)) if codec else ""
        form = next((form for form in FORMS if form.mark in template), None)
        if "tools" not in template or "<function=" in template or form is None:
            raise BadInput(
                "tools were given, and the chat template of this model writes no calls of them in "
                "a form that is read here (Hermes, Qwen, Mistral, Llama 3); leave them out"
            )
        return cls(given, form)

    def rule(self, body: Mapping[str, Any], grammars: Grammars) -> LogitsRule | None:
        """The grammar that `tool_choice` asks for: a call of some tool, or of the one named."""
        choice, functions = body.get("tool_choice"), [one["function"] for one in self.given]
        if choice in (None, "auto"):
            return None
        several = choice == "required" and body.get("parallel_tool_calls") is not False
        if choice != "required":
            function = choice.get("function") if isinstance(choice, dict) else None
            name = function.get("name") if isinstance(function, dict) else None
            functions = [one for one in functions if one["name"] == name]
            if not functions:
                raise BadInput(
                    f"tool_choice was {str(choice)[:99]!r}; it must be none, auto, required, or "
                    '{"type": "function", "function": {"name": ...}} of one of the tools'
                )
        one = json_rule({"anyOf": [self._schema(function) for function in functions]})
        form, codec = self.form, grammars.codec
        begin, end = (_terminal(text, codec) for text in (form.begin, form.end))
        if form.listed:
            many = '"[" one (", " one)* "]"' if several else '"[" one "]"'
            return grammars.lark(f"start: {begin} {many}\none: {one}")
        if not form.begin:
            return grammars.lark(f"start: {one}")
        many = 'call ("\\n" call)*' if several else "call"
        return grammars.lark(
            f'start: {many}\ncall: {begin} "\\n" one "\\n" {end}\none: {one}'
        )

    def _schema(self, function: dict[str, Any]) -> dict[str, Any]:
        key = self.form.arguments
        given = function.get("parameters") or {"type": "object"}
        return {"type": "object", "additionalProperties": False, "required": ["name", key],
                "properties": {"name": {"const": function["name"]}, key: given}}


def _is_tool(one: Any) -> bool:
    function = one.get("function") if isinstance(one, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str) and isinstance(
        function.get("parameters") or {}, dict)


def _terminal(text: str, codec: Codec | None) -> str:
    """A text in a Lark grammar: as one token, where the tokenizer has that."""
    known = codec.tokenizer.get_added_vocab() if codec else {}
    return f"<[{known[text]}]>" if text in known else json.dumps(text)


@dataclass
class CallReader:
    """Parts a text, as it comes, into what is said and what is called.

    Blanks are held back until it is clear that no call follows them.
    """

    form: Form
    calls: int = 0
    _held: str = ""
    _said: bool = False
    _open: bool = False
    _blank: str = ""

    def push(self, text: str, last: bool = False) -> tuple[str, list[Call]]:
        """The text that is certain to be none of a call, and the calls that are complete."""
        self._held += text
        bare = not (self._said or self._open or self.calls) and self._held.lstrip()[:1] == "{"
        whole = bare or not self.form.end                       # small models forget the marks
        said, calls = self._whole(last) if whole else self._parted(last)
        self.calls += len(calls)
        self._said = self._said or bool(said)
        return said, calls

    def _parted(self, last: bool) -> tuple[str, list[Call]]:
        """Calls stand between two marks."""
        said, calls, form = "", list[Call](), self.form
        while (place := self._held.find(mark := form.end if self._open else form.begin)) >= 0:
            part, self._held = self._held[:place], self._held[place + len(mark) :]
            found = _calls(part, form) if self._open else []
            if not self._open:
                said += part.rstrip()
                self._blank = part[len(part.rstrip()) :]
            elif not found:                                     # no call, so it was said
                said += f"{self._blank}{form.begin}{part}{form.end}"
            calls, self._open = calls + found, not self._open
        if self._open and last:
            found, text = _calls(self._held, form), self._blank + form.begin + self._held
            return said + ("" if found else text), calls + found
        if not self._open:
            sure = len(self._held) - _overlap(self._held, form.begin)
            blank = len(self._held[:sure].rstrip())
            cut = blank if not last or self.calls or calls else len(self._held)
            cut = len(self._held) if last and self._held.strip() else cut
            said, self._held = said + self._held[:cut], self._held[cut:]
        return said, calls

    def _whole(self, last: bool) -> tuple[str, list[Call]]:
        """Calls are all that there is, or there are none."""
        text = self._held.lstrip().removeprefix(self.form.begin)
        if not self._said and not last and (not text or text[0] in "[{"):
            return "", []
        found = _calls(text, self.form) if last and not self._said else []
        said, self._held = "" if found else self._held, ""
        return said, found


def _calls(text: str, form: Form) -> list[Call]:
    """The calls that a text consists of; none if it is anything else."""
    decoder, found, text = json.JSONDecoder(), list[Any](), text.strip()
    while text:
        try:
            one, end = decoder.raw_decode(text)
        except (ValueError, RecursionError):
            return []
        found += one if isinstance(one, list) else [one]
        text = text[end:].lstrip(" \n;")
    calls = list[Call]()
    for one in found:
        name = one.get("name") if isinstance(one, dict) else None
        arguments = one.get(form.arguments, one.get("arguments")) if name else None
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return []
        calls.append(Call(name, json.dumps(arguments, ensure_ascii=False)))
    return calls


def _overlap(text: str, mark: str) -> int:
    """How many of the last characters of `text` could begin `mark`."""
    sizes = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((size for size in sizes if mark.startswith(text[-size:])), 0)
