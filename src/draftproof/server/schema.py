"""Fields of requests other than sampling options, which are parsed like those of a file of
prompts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class Strict(BaseModel):
    """An object without further fields."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Function(Strict):
    """A tool's name, and JSON schemas of its arguments and results."""

    name: str
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None
    returns: object = Field(None, alias="return")


class Tool(Strict):
    """A tool that a chat offers, or the one that must be called."""

    type: Literal["function"] = "function"
    function: Function
    cache_control: object = None


class JSONSchema(Strict):
    """A schema; its name and description change nothing, and it is always strict."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, object] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """Constraints on the text; llama.cpp's clients put the schema next to the type."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None
    schema_: dict[str, object] | None = Field(None, alias="schema")


class StreamOptions(Strict):
    """include_usage: a last chunk has the usage; with continuous_usage_stats every chunk has it.
    include_obfuscation is ignored."""

    include_usage: bool = False
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class DraftproofOptions(Strict):
    """drafter: "none" writes without drafts. trees: streamed chunks contain the draft trees."""

    drafter: str = ""
    trees: bool = False


class GenerationBody(BaseModel):
    """Fields of completions and chats; all other fields are sampling options.

    priority: lower ones run first. cache_salt: nothing is shared with requests of another salt.
    """

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    priority: int | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    draftproof: DraftproofOptions = DraftproofOptions()


class Completion(GenerationBody):
    """Of /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]


class Chat(GenerationBody):
    """Of /v1/chat/completions."""

    messages: list[dict[str, object]]
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | Tool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, object] | None = None
    documents: list[dict[str, object]] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    reasoning_format: Literal["none", "auto", "deepseek", "deepseek-legacy"] | None = None

    @property
    def splits_reasoning(self) -> bool:
        """Whether reasoning is separated from the answer."""
        return self.separate_reasoning is not False and self.reasoning_format != "none"

    def template_options(self) -> dict[str, object]:
        """Variables of the chat template other than messages and tools."""
        options = {"documents": self.documents or None, "enable_thinking": self.enable_thinking,
                   "reasoning_effort": self.reasoning_effort, **(self.chat_template_kwargs or {})}
        return {name: value for name, value in options.items() if value is not None}
