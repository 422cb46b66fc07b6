"""Keys within the parts of a request, and values out of range: honoured, refused by name, or known
to change nothing. What the server has answered is accepted as a part of the next request."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from asking import PROMPTS, TOOL_TEMPLATE

from draftproof.server import request_keys
from draftproof.server.reasoning import Marks

SCHEMA = {"type": "object", "required": ["colour"], "additionalProperties": False,
          "properties": {"colour": {"enum": ["red", "blue"]}}}
FUNCTION = {"name": "paint", "description": "Paints.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"id": "1", "type": "function", "function": {"name": "paint", "arguments": "{}"}}
USER = {"role": "user", "content": "a"}
ROUTES = {"c": "/v1/completions", "chat": "/v1/chat/completions", "r": "/v1/responses",
          "m": "/v1/messages"}


@pytest.fixture(autouse=True)
def template(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chat template that writes contents, one more key, and Hermes calls."""
    monkeypatch.setattr(server.engine.codec.tokenizer, "chat_template",
                        TOOL_TEMPLATE + "{# m.weather, 'observation' #}")


def chat(*messages: Any, **more: Any) -> dict[str, Any]:
    return {"messages": list(messages) or [USER], **more}


def turn(*blocks: Any, role: str = "user", **more: Any) -> dict[str, Any]:
    return chat({"role": role, "content": list(blocks)}, **more)


TEXT = {"type": "text", "text": "a"}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": "a"}
USE = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
ITEM = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("chat", chat({**USER, "contents": "b"}), "contents"),
    ("chat", chat({**USER, "images": ["b"]}), "images"),
    ("chat", chat(USER, {**USER, "role": "alien"}), "alien"),
    ("chat", chat({**USER, "content": [{**TEXT, "detail": "b"}]}), "detail"),
    ("chat", chat({"role": "assistant", "tool_calls": [{**CALL, "result": 1}]}), "result"),
    ("chat", chat({"role": "assistant", "tool_calls": [
        {**CALL, "function": {**CALL["function"], "args": 1}}]}), "args"),  # type: ignore[dict-item]
    ("chat", chat({"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]}), "custom"),
    ("chat", chat({"role": "assistant", "content": "a", "audio": {"id": "b"}}), "audio"),
    ("chat", chat({"role": "assistant", "content": "a", "function_call": {"name": "b"}}),
     "function_call"),
    ("chat", chat({"role": "assistant", "content": "a", "prefix": True}), "prefix"),
    ("chat", chat(tools=[{**TOOL, "fn": 1}]), "fn"),
    ("chat", chat(tools=[{**TOOL, "function": {**FUNCTION, "params": {}}}]), "params"),
    ("chat", chat(tools=[TOOL], tool_choice={**TOOL, "mode": "auto"}), "mode"),
    ("chat", chat(response_format={"type": "json_object", "scheme": SCHEMA}), "scheme"),
    ("chat", chat(response_format={"type": "json_schema", "json_schema": {
        "schema": SCHEMA, "strct": True}}), "strct"),
    ("chat", chat(response_format={"type": "text", "schema": SCHEMA}), "schema"),
    ("r", {"input": [{**USER, "contents": "b"}]}, "contents"),
    ("r", {"input": [{**USER, "role": "alien"}]}, "alien"),
    ("r", {"input": [{**USER, "content": [{"type": "input_text", "text": "a", "b": 1}]}]}, "'b'"),
    ("r", {"input": [USER, {**ITEM, "args": 1}]}, "args"),
    ("r", {"input": [USER, {**ITEM, "namespace": "b"}]}, "namespace"),
    ("r", {"input": [USER, {**ITEM, "arguments": "{"}]}, "tool_calls"),
    ("r", {"input": [USER, {"type": "function_call_output", "call_id": "1", "outputs": "a"}]},
     "outputs"),
    ("r", {"input": [{"type": "reasoning", "summary": [], "text": "a"}, USER]}, "text"),
    ("r", {"input": "a", "tools": [{"type": "function", **FUNCTION, "params": {}}]}, "params"),
    ("r", {"input": "a", "tools": [{"type": "function", **FUNCTION}], "tool_choice": "paint"},
     "tool_choice"),
    ("r", {"input": "a", "tools": [{"type": "function", **FUNCTION}],
           "tool_choice": {"type": "function", "name": "paint", "mode": "auto"}}, "mode"),
    ("r", {"input": "a", "text": {"format": {"type": "json_schema", "schema": SCHEMA, "b": 1}}},
     "text.format"),
    ("r", {"input": "a", "include": ["everything"]}, "everything"),
    ("r", {"input": "a", "stream": True, "stream_options": {"usage": True}}, "usage"),
    ("r", {"input": "a", "top_logprobs": 2}, "top_logprobs"),
    ("m", chat({"role": "system", "content": "a"}, USER), "system"),
    ("m", chat({**USER, "role": "alien"}), "alien"),
    ("m", chat({**USER, "name": "a"}), "name"),
    ("m", chat(temperature=2), "less than or equal to 1"),
    ("m", turn({**TEXT, "detail": "b"}), "detail"),
    ("m", chat(system=[{**TEXT, "detail": "b"}]), "detail"),
    ("m", turn({**RESULT, "output": "b"}), "output"),
    ("m", turn({**RESULT, "content": [{**TEXT, "detail": "b"}]}), "detail"),
    ("m", turn({**USE, "arguments": {}}, role="assistant"), "arguments"),
    ("m", turn({**USE, "input": "{}"}, role="assistant"), "input"),
    ("m", turn({"type": "thinking", "text": "a"}, TEXT, role="assistant"), "text"),
    ("m", chat(tools=[{"name": "f", "input_schema": SCHEMA}],
               tool_choice={"type": "auto", "name": "f"}), "name"),
    ("m", chat(max_tokens=2.5), "max_tokens"),
    ("c", {"presence_penalty": 2.5}, "from -2 to 2"), ("c", {"frequency_penalty": -3}, "-3"),
    ("c", {"seed": 2**70}, str(2**70)), ("c", {"seed": -(2**63) - 1}, "seed"),
    ("m", chat(seed=2**63), "seed"), ("r", {"input": "a", "seed": 2**63}, "seed"),
]  # fmt: skip


@pytest.mark.parametrize(("route", "body", "word"), REFUSED)
def test_unsupported_fields_are_named(
    http: httpx.Client, route: str, body: dict[str, Any], word: str
) -> None:
    asked = {**{"c": {"prompt": "a"}, "m": {"max_tokens": 1}}.get(route, {}), **body}
    answer = http.post(ROUTES[route], json=asked)
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert word in message and "\n" not in message and len(message) < 400


@pytest.mark.parametrize(("text", "word"), [
    ('{"prompt": "a", "max_tokens": 1, "temperature": 0, "temperature": 1}', '"temperature"'),
    ('{"prompt": "a", "max_tokens": 1, "logit_bias": {"5": 1, "5": 2}}', '"5"'),
    ('{"prompt": "a", "max_tokens": 1, "temperature": NaN}', "NaN"),
    ('{"prompt": "a", "seed": 1' + 5000 * "0" + "}", "number"),
    ('{"prompt": ' + 100_000 * "[" + "}", "deep"), ('{"prompt": "a",}', "JSON"),
])  # fmt: skip
def test_json_that_readers_understand_differently_is_refused(
    http: httpx.Client, text: str, word: str
) -> None:
    answer = http.post("/v1/completions", content=text,
                       headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert word in (message := answer.json()["error"]["message"]) and len(message) < 300


def test_fields_of_official_clients_are_accepted(http: httpx.Client) -> None:
    """Fields of the official clients' types, and what other servers' answers have."""
    nothing = dict.fromkeys(("refusal", "audio", "function_call", "annotations", "name"))
    for message in (
        {**USER, "name": "b", "cache_control": {"type": "ephemeral"}}, {**USER, "weather": "b"},
        {**USER, "role": "developer"}, {**USER, "role": "observation"},
        {"role": "assistant", "content": None, "tool_calls": [{**CALL, "index": 0}], **nothing},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": None},
        {"role": "assistant", "content": "a", "reasoning": "hm", "parsed": {"a": 1}},
        {"role": "tool", "tool_call_id": "1", "name": "paint", "content": [
            {**TEXT, "cache_control": {"type": "ephemeral"}, "annotations": []}]},
    ):
        response = http.post("/tokenize", json=chat(USER, message))
        assert response.status_code == 200, response.text


def test_keys_of_the_official_types_are_known() -> None:
    """Each is accepted, at least as null."""
    chats = pytest.importorskip("openai.types.chat")
    items = pytest.importorskip("openai.types.responses")
    anthropic = pytest.importorskip("anthropic.types")
    for keys, types in (
        (request_keys.MESSAGE, [*(getattr(chats, f"ChatCompletion{role}MessageParam") for role in (
            "System", "User", "Assistant", "Tool", "Developer")), chats.ChatCompletionMessage]),
        (request_keys.TEXT_PART, [chats.ChatCompletionContentPartTextParam,
                                  items.ResponseInputTextParam, items.ResponseOutputTextParam]),
        (request_keys.CALL, [chats.ChatCompletionMessageFunctionToolCallParam]),
        (request_keys.ITEMS["message"], [items.EasyInputMessageParam,
                                         items.ResponseOutputMessageParam]),
        (request_keys.ITEMS["function_call"], [items.ResponseFunctionToolCallParam]),
        (request_keys.FUNCTION_TOOL, [items.FunctionToolParam]),
        (request_keys.ITEMS["reasoning"], [items.ResponseReasoningItemParam]),
        (request_keys.BLOCKS["text"], [anthropic.TextBlockParam, anthropic.TextBlock]),
        (request_keys.BLOCKS["tool_use"], [anthropic.ToolUseBlockParam, anthropic.ToolUseBlock]),
        (request_keys.BLOCKS["tool_result"], [anthropic.ToolResultBlockParam]),
        (request_keys.BLOCKS["thinking"], [anthropic.ThinkingBlockParam]),
    ):
        names = {name for kind in types for name in getattr(kind, "model_fields", None)
                 or kind.__annotations__}
        assert names and names <= {*keys.known, *keys.empty}


def test_an_answer_is_accepted_in_the_next_request(
    server: Any, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.first, "marks", Marks("zzz", "."))
    asked = f"{PROMPTS[0]} zzz"
    options = {"max_tokens": 60, "temperature": 0}
    for more in ({}, {"max_tokens": 3}, {
        "tools": [TOOL], "tool_choice": "required", "logprobs": True
    }):
        first = {"role": "user", "content": asked}
        body = chat(first, **{**options, **more})
        answer = http.post(ROUTES["chat"], json=body).json()["choices"][0]["message"]
        again = http.post(ROUTES["chat"], json={**body, **chat(first, answer, USER)})
        assert again.status_code == 200, again.text
        body = {"input": [first], "max_output_tokens": body["max_tokens"], "temperature": 0}
        if "tools" in more:
            body |= {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"}
        output = http.post(ROUTES["r"], json=body).json()["output"]
        again = http.post(ROUTES["r"], json={**body, "input": [first, *output, USER]})
        assert again.status_code == 200, again.text
        body = chat(first, max_tokens=body["max_output_tokens"], temperature=0)
        if "tools" in more:
            body |= {"tools": [{"name": "paint", "input_schema": SCHEMA}],
                     "tool_choice": {"type": "any"}}
        answer = http.post(ROUTES["m"], json=body).json()
        turns = {"role": answer["role"], "content": answer["content"]}
        again = http.post(ROUTES["m"], json={**body, **chat(first, turns, USER)})
        assert again.status_code == 200, json.dumps(turns) + again.text
