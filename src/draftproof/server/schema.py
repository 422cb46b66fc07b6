"""What requests may hold beside sampling options, which are read as those of a file of prompts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Body(BaseModel):
    """An object that may have more fields than these."""

    model_config = ConfigDict(extra="allow", strict=True)


class Function(Body):
    """A tool's name and, as a JSON schema, what it takes."""

    name: str
    parameters: dict[str, Any] | None = None


class Tool(Body):
    """A tool a chat offers, or the one that must be called."""

    type: Literal["function"] = "function"
    function: Function


class ResponseFormat(Body):
    """What the text must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] = {}


class Own(Body):
    """drafter: "none" writes without drafts. trees: streamed chunks tell what was drafted."""

    drafter: str = ""
    trees: bool = False


class Request(Body):
    """What both kinds of requests may hold."""

    model: str | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    stream_options: dict[str, bool] | None = None
    response_format: ResponseFormat | None = None
    draftproof: Own = Own()


class Completion(Request):
    """Of /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]


class Chat(Request):
    """Of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | Tool | None = None
    parallel_tool_calls: bool | None = None
