"""Requests of OpenAI's Responses API as a chat."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from draftproof.errors import BadInput
from draftproof.server.request_keys import (
    FUNCTION_TOOL,
    ITEMS,
    REFUSAL_PART,
    ROLES,
    TEXT_PART,
    check_keys,
)
from draftproof.server.schema import Chat, DraftproofOptions, StreamOptions, Strict

LOGPROBS = "message.output_text.logprobs"
INCLUDED = (LOGPROBS, "reasoning.encrypted_content", "message.input_image.image_url",
            "file_search_call.results", "web_search_call.results", "web_search_call.action.sources",
            "computer_call_output.output.image_url", "code_interpreter_call.outputs")
"""Allowed values of `include`. For reasoning the text is sent; the others are about tools and
images, which are refused."""
TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
"""Types of parts that hold a text."""


class FunctionTool(BaseModel):
    """A tool that the client runs; OpenAI's own tools are refused."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, object] | None = None


class TextFormat(Strict):
    """Constraints on the text; name and description of a schema change nothing."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, object] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Strict):
    """Constraints on the text; `verbosity` is not honoured."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class NamedFunction(Strict):
    """The function that must be called."""

    type: Literal["function"]
    name: str


class Reasoning(Strict):
    """How much the model reasons, if its template reads it."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesBody(Strict):
    """Of /v1/responses."""

    input: str | list[dict[str, object]]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    stream: bool | None = None
    store: bool | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | int | None = None
    top_p: float | int | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    priority: int | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    draftproof: DraftproofOptions = DraftproofOptions()
    metadata: object = None
    user: object = None
    service_tier: object = None
    safety_identifier: object = None
    prompt_cache_key: object = None
    prompt_cache_retention: object = None
    prompt_cache_options: object = None
    stream_options: StreamOptions | None = None

    def conversation(self, earlier: list[dict[str, object]]) -> list[dict[str, object]]:
        """The messages so far, without the instructions, which are for one response only.

        Args:
            earlier: Messages of the response that this request continues.

        Raises:
            BadInput: A part of the input is not text.
        """
        if isinstance(self.input, str):
            return [*earlier, {"role": "user", "content": self.input}]
        return [*earlier, *read_items(self.input)]

    def chat(self, earlier: list[dict[str, object]]) -> Chat:
        """Convert it to a chat.

        Args:
            earlier: Messages of the response that this request continues.

        Raises:
            BadInput: A part of it is not text, or cannot be honoured.
        """
        messages = self.conversation(earlier)
        if self.instructions:
            messages.insert(0, {"role": "system", "content": self.instructions})
        names = ("model", "stream", "temperature", "top_p", "top_k", "seed", "stop",
                 "parallel_tool_calls", "priority", "cache_salt")
        options = {name: value for name in names if (value := getattr(self, name)) is not None}
        effort = self.reasoning.effort if self.reasoning is not None else None
        return Chat.model_validate({
            "messages": messages, "max_tokens": self.max_output_tokens, **options, **self._tools(),
            "response_format": self._format(), "reasoning_effort": effort,
            "draftproof": self.draftproof, **self._logprobs(),
        })  # fmt: skip

    @property
    def wants_logprobs(self) -> bool:
        """Whether the client wants log-probabilities."""
        return LOGPROBS in (self.include or ())

    def _logprobs(self) -> dict[str, object]:
        for name in self.include or ():
            if name not in INCLUDED:
                raise BadInput(f"include has {name!r:.60}, which is not known here; it may have "
                               f"{', '.join(INCLUDED)}")
        if not self.wants_logprobs:
            if self.top_logprobs:
                raise BadInput(f'top_logprobs was {self.top_logprobs}; add "{LOGPROBS}" to include')
            return {}
        return {"logprobs": True, "top_logprobs": self.top_logprobs or 0}

    def _format(self) -> dict[str, object] | None:
        wanted = self.text.format if self.text is not None else None
        if wanted is None or wanted.type == "text":
            return None
        return {"type": wanted.type, "json_schema": {"schema": wanted.schema_}
                if wanted.schema_ is not None else {}}

    def _tools(self) -> dict[str, object]:
        for tool in self.tools or ():
            if tool.type != "function" or not tool.name:
                raise BadInput(f"a tool of type {tool.type!r:.60} was given; this server offers "
                               "functions alone, which the client runs")
            check_keys(tool.model_dump(), FUNCTION_TOOL, f"the tool {tool.name!r:.60}")
        tools = [{"type": "function", "function": {
            "name": tool.name, "parameters": tool.parameters,
            **({"description": tool.description} if tool.description else {})}}
            for tool in self.tools or ()]
        choice: object = self.tool_choice
        if isinstance(choice, NamedFunction):
            choice = {"type": "function", "function": {"name": choice.name}}
        return {**({"tools": tools} if tools else {}), "tool_choice": choice}


def read_items(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Input items as messages; consecutive calls belong to one message."""
    messages, reasoning = list[dict[str, Any]](), ""
    for number, item in enumerate(items):
        where, kind = f"input.{number}", item.get("type") or ("message" if "role" in item else None)
        if kind in [*ITEMS]:
            check_keys(item, ITEMS[kind], where)
        if kind == "reasoning":
            reasoning += _joined(item.get("content") or item.get("summary") or [], where)
        elif kind == "message":
            role = item.get("role")
            if role not in ROLES[:-1]:
                raise BadInput(f"the role of {where} was {role!r:.60}; it must be one of "
                               f"{', '.join(ROLES[:-1])}")
            role = "system" if role == "developer" else role
            message = {"role": role, "content": _joined(item.get("content") or "", where)}
            if role == "assistant" and reasoning:
                message["reasoning_content"], reasoning = reasoning, ""
            messages.append(message)
        elif kind == "function_call":
            last = messages[-1] if messages else {}
            if last.get("role") != "assistant" or (reasoning and "tool_calls" in last):
                last = {"role": "assistant", "content": "", "tool_calls": []}
                messages.append(last)
            if reasoning:
                last["reasoning_content"], reasoning = reasoning, ""
            last.setdefault("tool_calls", []).append({
                "id": item.get("call_id", ""), "type": "function", "function": {
                    "name": item.get("name", ""), "arguments": item.get("arguments") or "{}"}})
        elif kind == "function_call_output":
            output = item.get("output")
            messages.append({"role": "tool", "tool_call_id": item.get("call_id", ""),
                             "content": _joined(output if output is not None else "", where)})
        else:
            raise BadInput(f"an input item of type {kind!r:.60} was given; messages, function "
                           "calls, their outputs and reasoning are read here")
    return messages


def _joined(content: Any, where: str) -> str:
    """The text of an item's parts."""
    if isinstance(content, str):
        return content
    parts = []
    for number, part in enumerate(content if isinstance(content, list) else [content]):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if kind else None
        if kind not in (*TEXTS, "refusal") or not isinstance(text, str):
            raise BadInput(f"a part of type {kind!r:.60} was given; only text is read here")
        keys = REFUSAL_PART if kind == "refusal" else TEXT_PART
        check_keys(part, keys, f"{where}.content.{number}")
        parts.append(text)
    return "".join(parts)
