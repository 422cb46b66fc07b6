"""Anthropic's messages as a chat: /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from draftproof.errors import BadInput
from draftproof.server.request_keys import BLOCKS, check_keys
from draftproof.server.schema import Chat, DraftproofOptions
from draftproof.tokenizer.codec import Codec

Blocks = str | list[dict[str, Any]]
"""Content: text, or a list of blocks."""


class Message(BaseModel):
    """A turn."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["user", "assistant"]
    content: Blocks


class ClientTool(BaseModel):
    """A tool that the client runs."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    description: str | None = None
    input_schema: dict[str, object]
    type: Literal["custom"] | None = None
    cache_control: object = None
    strict: bool | None = None
    input_examples: object = None
    allowed_callers: list[Literal["direct"]] | None = None
    defer_loading: Literal[False] | None = None
    eager_input_streaming: bool | None = None


class ToolChoice(BaseModel):
    """Whether a tool must be called."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(BaseModel):
    """Whether the model reasons. The budget is not enforced."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(BaseModel):
    """What the text must be."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["json_schema"]
    schema_: dict[str, object] = Field(alias="schema")


class OutputConfig(BaseModel):
    """Constraints on the text, and the effort, if the template reads it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    effort: str | None = None
    format: OutputFormat | None = None


class TokensBody(BaseModel):
    """Of /v1/messages/count_tokens."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    messages: list[Message]
    system: Blocks | None = None
    tools: list[ClientTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: object = None
    speed: Literal["standard"] | None = None
    user_profile_id: object = None
    workspace_id: object = None

    def chat(self, reasons: bool, codec: Codec | None) -> Chat:
        """Convert it to a chat of OpenAI's.

        Args:
            reasons: Whether the model's template has marks of reasoning.
            codec: The model's tokenizer.

        Raises:
            BadInput: A part of it is not text, or cannot be honoured.
        """
        messages = list[dict[str, object]]()
        if self.system:
            messages.append({"role": "system", "content": _text(self.system, "system")})
        for number, message in enumerate(self.messages):
            messages += _turn(message, f"messages.{number}.content")
        tools = [{"type": "function", "function": {
            "name": tool.name, "parameters": tool.input_schema,
            **({"description": tool.description} if tool.description else {})}}
            for tool in self.tools or ()]
        return Chat.model_validate({
            "model": self.model, "messages": messages, **({"tools": tools} if tools else {}),
            **self._choice(), **self._thinking(reasons, codec), **self._output(),
            **self._sampling(),
        })  # fmt: skip

    def _choice(self) -> dict[str, object]:
        choice = self.tool_choice
        if choice is None:
            return {}
        if choice.name is not None and choice.type != "tool":
            raise BadInput(f'tool_choice was of type {choice.type!r} with a name; leave one out')
        named: object = {"auto": "auto", "any": "required", "none": "none"}.get(choice.type)
        if named is None:
            if choice.name is None:
                raise BadInput('tool_choice was of type "tool" without a name; give its name')
            named = {"type": "function", "function": {"name": choice.name}}
        return {"tool_choice": named,
                "parallel_tool_calls": False if choice.disable_parallel_tool_use else None}

    def _thinking(self, reasons: bool, codec: Codec | None) -> dict[str, object]:
        """`enable_thinking`, if the template reads it; otherwise nothing."""
        thinking = self.thinking
        if thinking is None:
            return {}
        wanted = thinking.type != "disabled"
        template = str(codec.tokenizer.chat_template) if codec is not None else ""
        if "enable_thinking" in template:
            return {"enable_thinking": wanted}
        if thinking.type == "enabled" and not reasons:
            raise BadInput("thinking was enabled, and this model writes none; leave it out")
        return {}

    def _output(self) -> dict[str, object]:
        config = self.output_config
        if config is None:
            return {}
        schema = config.format.schema_ if config.format is not None else None
        return {"reasoning_effort": config.effort, "response_format": schema and {
            "type": "json_schema", "json_schema": {"schema": schema}}}

    def _sampling(self) -> dict[str, object]:
        return {}


class MessagesBody(TokensBody):
    """Of /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1)]
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: Annotated[float | int, Field(ge=0, le=1)] | None = None
    top_k: int | None = None
    top_p: float | int | None = None
    seed: int | None = None
    priority: int | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    draftproof: DraftproofOptions = DraftproofOptions()
    metadata: object = None
    service_tier: object = None
    inference_geo: object = None
    diagnostics: object = None

    def _sampling(self) -> dict[str, object]:
        names = ("stream", "temperature", "top_k", "top_p", "seed", "priority", "cache_salt")
        options = {name: value for name in names if (value := getattr(self, name)) is not None}
        return {**options, "max_tokens": self.max_tokens, "stop": self.stop_sequences or [],
                "draftproof": self.draftproof}


def _text(content: object, where: str) -> str:
    """The text of blocks."""
    if isinstance(content, str):
        return content
    blocks = content if isinstance(content, list) else [content]
    return "".join(_block_text(block, f"{where}.{number}") for number, block in enumerate(blocks))


def _block_text(block: object, where: str) -> str:
    kind = block.get("type", "text") if isinstance(block, dict) else type(block).__name__
    text = block.get("text") if isinstance(block, dict) else None
    if not isinstance(block, dict) or kind != "text" or not isinstance(text, str):
        raise BadInput(f"{where} is a block of type {kind!r:.60}; only text is read here")
    check_keys(block, BLOCKS["text"], where)
    return text


def _turn(message: Message, where: str) -> list[dict[str, object]]:
    """A turn as OpenAI's messages. Results of tools become separate messages."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results, calls, text, thoughts = [], [], [], []
    for number, block in enumerate(message.content):
        kind, place = block.get("type", "text"), f"{where}.{number}"
        if kind in [*BLOCKS]:
            check_keys(block, BLOCKS[kind], place)
        if kind == "tool_result":
            content = _text(block.get("content") or "", f"{place}.content")
            results.append({"role": "tool", "content": content,
                            "tool_call_id": block.get("tool_use_id", "")})
        elif kind == "tool_use":
            name, arguments = block.get("name"), block.get("input", {})
            if not isinstance(name, str) or not isinstance(arguments, dict):
                raise BadInput(f"{place} needs a name, and an object as its input")
            calls.append({"id": block.get("id", ""), "type": "function", "function": {
                "name": name, "arguments": arguments}})
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking", "")))
        elif kind != "redacted_thinking":
            text.append(_block_text(block, place))
    turn: dict[str, object] = {"role": message.role, "content": "".join(text)}
    if calls:
        turn["tool_calls"] = calls
    if thoughts:
        turn["reasoning_content"] = "".join(thoughts)
    return [*results, *([turn] if text or calls or thoughts or not results else [])]
