"""What requests may hold, for the OpenAPI description; it is checked where it is read."""

from __future__ import annotations

from typing import Any

NUMBER, TEXT, FLAG = {"type": "number"}, {"type": "string"}, {"type": "boolean"}
COUNT = {"type": "integer", "minimum": 1}
TOP = {"type": "integer", "minimum": 0, "maximum": 20}
TOOL = {
    "type": "object", "required": ["type", "function"],
    "properties": {"type": {"const": "function"}, "function": {
        "type": "object", "required": ["name"],
        "properties": {"name": TEXT, "description": TEXT, "parameters": {"type": "object"}}}},
}  # fmt: skip
MESSAGE = {
    "type": "object", "required": ["role"],
    "properties": {
        "role": {"enum": ["system", "user", "assistant", "tool"]},
        "content": {"anyOf": [TEXT, {"type": "null"}, {"type": "array", "items": {
            "type": "object", "properties": {"type": {"const": "text"}, "text": TEXT}}}]},
        "tool_calls": {"type": "array", "items": {"type": "object"}}, "tool_call_id": TEXT,
    },
}  # fmt: skip
FORMAT = {"type": "object", "required": ["type"], "properties": {
    "type": {"enum": ["text", "json_object", "json_schema"]}, "json_schema": {
        "type": "object", "properties": {"name": TEXT, "schema": {"type": "object"}}}}}  # fmt: skip
COMMON = {
    "model": TEXT, "max_tokens": COUNT, "temperature": {"type": "number", "minimum": 0},
    "top_p": NUMBER, "top_k": {"type": "integer", "minimum": 0}, "min_p": NUMBER, "n": COUNT,
    "seed": {"type": "integer"}, "stop": {"anyOf": [TEXT, {"type": "array", "items": TEXT}]},
    "stream": FLAG, "stream_options": {"type": "object", "properties": {"include_usage": FLAG}},
    "presence_penalty": NUMBER, "frequency_penalty": NUMBER, "repetition_penalty": NUMBER,
    "logit_bias": {"type": "object", "additionalProperties": NUMBER}, "response_format": FORMAT,
    "draftproof": {"type": "object", "properties": {"drafter": TEXT, "trees": FLAG}},
}  # fmt: skip
CHOICE = {"anyOf": [{"enum": ["none", "auto", "required"]}, TOOL]}


def _body(needed: list[str], properties: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "required": needed, "properties": properties}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
PROMPT = {"anyOf": [TEXT, {"type": "array", "items": TEXT}, TOKENS]}
MESSAGES = {"type": "array", "items": MESSAGE, "minItems": 1}
COMPLETION = _body(["prompt"], {"prompt": PROMPT, "logprobs": TOP, **COMMON})
CHAT = _body(["messages"], {
    "messages": MESSAGES, "max_completion_tokens": COUNT, "logprobs": FLAG, "top_logprobs": TOP,
    "tools": {"type": "array", "items": TOOL}, "tool_choice": CHOICE, "parallel_tool_calls": FLAG,
    **COMMON,
})  # fmt: skip
TOKENIZE = _body([], {"prompt": TEXT, "messages": MESSAGES})
