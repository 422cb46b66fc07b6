"""Anthropic's messages, asked by its own client: whole and streamed, with tools and thinking."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from asking import KEY, PROMPTS, TOOL_TEMPLATE, alone

from draftproof.errors import BadInput
from draftproof.server.messages_answer import MessagesAnswer
from draftproof.server.messages_request import TokensBody
from draftproof.server.reasoning import Marks

anthropic = pytest.importorskip("anthropic", reason="the anthropic client is not installed")

COLOUR: Any = {"name": "paint", "description": "Paints.", "input_schema": {
    "type": "object", "required": ["colour"], "additionalProperties": False,
    "properties": {"colour": {"enum": ["red", "blue"]}}}}


@pytest.fixture
def messages(server: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The client's messages, of a model whose template writes contents and Hermes calls."""
    monkeypatch.setattr(server.engine.codec.tokenizer, "chat_template", TOOL_TEMPLATE)
    with anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0) as client:
        yield client.messages


def body(prompt: Any = PROMPTS[0], **more: Any) -> dict[str, Any]:
    return {"model": "demo", "max_tokens": 20, "messages": [{"role": "user", "content": prompt}],
            **more}


def ask(prompt: Any = PROMPTS[0], **more: Any) -> dict[str, Any]:
    """Greedy: the client's newest versions have no parameter for the temperature."""
    return body(prompt, extra_body={"temperature": 0}, **more)


def test_messages_equal_the_chat_text(server: Any, messages: Any) -> None:
    answer = messages.create(**ask())
    assert answer.content[0].text == alone(server, PROMPTS[0], 20)
    assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", 20)
    parts: Any = [{"type": "text", "text": "Once upon"}, {"type": "text", "text": " a time"}]
    assert messages.create(**ask(parts)).content[0].text == answer.content[0].text
    system = messages.create(**ask("upon a time", system="Once "))
    assert system.content[0].text == answer.content[0].text
    cut = messages.create(**ask(stop_sequences=["zebra", "girl"], max_tokens=40))
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", "girl")
    assert "girl" not in cut.content[0].text
    assert messages.count_tokens(
        model="demo", messages=ask()["messages"]
    ).input_tokens == answer.usage.input_tokens


def test_an_end_token_is_no_stop_sequence(
    server: Any, messages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (plain,) = server.engine.generate(PROMPTS[0], max_new_tokens=9)
    requests = server.engine.requests
    monkeypatch.setitem(server.engine.__dict__, "requests",
                        replace(requests, stop_tokens=(plain.tokens[5],)))
    answer = messages.create(**ask(stop_sequences=["zebra"]))
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert answer.usage.output_tokens == plain.tokens.index(plain.tokens[5]) + 1


@pytest.mark.parametrize(("reason", "wanted"), [
    ("tool_calls", "tool_use"), ("stop", "stop_sequence"), ("length", "max_tokens")])
def test_a_call_before_a_stop_sequence_is_to_be_answered(reason: str, wanted: str) -> None:
    """The client waits for no result of a tool if it reads "stop_sequence"."""
    answer: Any = object.__new__(MessagesAnswer)
    ended = SimpleNamespace(stop_string="</done>" if reason != "length" else None)
    answer.requests = [SimpleNamespace(sequences=[ended])]
    piece: Any = SimpleNamespace(finish_reason=reason)
    assert answer._reason(piece) == wanted


def test_streams_add_up_to_the_message(messages: Any) -> None:
    whole = messages.create(**ask())
    with messages.stream(**ask()) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 20)
    with messages.stream(**ask(stop_sequences=["zebra", "girl"], max_tokens=40)) as stream:
        final = stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", "girl")


def test_a_tool_is_called_and_its_result_is_read(messages: Any) -> None:
    asked = ask(tools=[COLOUR], tool_choice={"type": "any"}, max_tokens=60)
    whole = messages.create(**asked)
    (call,) = whole.content
    assert whole.stop_reason == "tool_use" and call.name == "paint"
    assert call.input["colour"] in ("red", "blue")
    schema = {"type": "json_schema", "schema": COLOUR["input_schema"]}
    told = messages.create(**ask(output_config={"format": schema}, max_tokens=60))
    assert json.loads(told.content[0].text)["colour"] in ("red", "blue")
    with messages.stream(**asked) as stream:
        (streamed,) = stream.get_final_message().content
    assert (streamed.name, streamed.input) == (call.name, call.input)
    turns = [*asked["messages"], {"role": "assistant", "content": whole.content},
             {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id,
                                           "content": "It is painted."}]}]
    after = messages.create(**{**asked, "messages": turns, "tool_choice": {"type": "auto"}})
    assert after.usage.input_tokens > whole.usage.input_tokens and after.content


def test_thinking_is_separated_from_the_answer(
    server: Any, messages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt opens it; the text up to the first full stop is thinking."""
    monkeypatch.setattr(server.first, "marks", Marks("zzz", "."))
    prompt, thinking = f"{PROMPTS[0]} zzz", {"type": "enabled", "budget_tokens": 1024}
    text = alone(server, prompt, 60)
    before, _, rest = text.partition(".")
    assert before and rest.strip()
    asked = ask(prompt, max_tokens=60, thinking=thinking)
    whole = messages.create(**asked)
    assert [block.type for block in whole.content] == ["thinking", "text"]
    assert whole.content[0].thinking == before.strip()
    assert whole.content[1].text == rest.lstrip()
    with messages.stream(**asked) as stream:
        final = stream.get_final_message()
    assert final.content[0].thinking == before.strip() and final.content[1].text == rest.lstrip()


def test_errors_have_the_anthropic_format(server: Any, messages: Any, http: httpx.Client) -> None:
    with pytest.raises(anthropic.NotFoundError, match="no model 'gpt'"):
        messages.create(**{**ask(), "model": "gpt"})
    wrong = anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0)
    with wrong, pytest.raises(anthropic.AuthenticationError):
        wrong.messages.create(**ask())
    image = [{"type": "image", "source": {"type": "url", "url": "x"}}]
    for asked, word in (
        ({**body(), "max_tokens": None}, "max_tokens"), (body(image), "image"),
        (body(mcp_servers=[{"url": "x"}]), "mcp_servers"),
        (body(tools=[{"type": "web_search_20250305", "name": "web_search"}]), "tools"),
        (body(output_config={"effort": "high"}), "reasoning_effort"),
    ):
        answer = http.post("/v1/messages", json=asked)
        error = answer.json()
        assert answer.status_code == 400 and error["type"] == "error"
        assert error["error"]["type"] == "invalid_request_error"
        assert word in error["error"]["message"]


def test_turns_become_messages_of_a_chat() -> None:
    blocks: Any = [
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "a"},
            {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "r"}]},
            {"type": "text", "text": "b"}]},
    ]
    chat = TokensBody(messages=blocks, system="s").chat(True, None)
    assert [message["role"] for message in chat.messages] == ["system", "assistant", "tool", "user"]
    assert chat.messages[1]["reasoning_content"] == "hm"
    assert chat.messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert chat.messages[2] == {"role": "tool", "content": "r", "tool_call_id": "1"}
    thinks: Any = {"type": "enabled", "budget_tokens": 1024}
    with pytest.raises(BadInput, match="thinking"):
        TokensBody(messages=blocks, thinking=thinks).chat(False, None)


@pytest.mark.parametrize(("kind", "thinks"), [
    ("enabled", True), ("adaptive", True), ("between_tools", True), ("disabled", False),
])  # fmt: skip
def test_a_template_is_told_whether_to_think(
    server: Any, monkeypatch: pytest.MonkeyPatch, kind: str, thinks: bool
) -> None:
    codec = server.engine.codec
    template = f"{TOOL_TEMPLATE}{{{{ enable_thinking }}}}"
    monkeypatch.setattr(codec.tokenizer, "chat_template", template)
    asked = TokensBody.model_validate(
        {"messages": [{"role": "user", "content": "Why?"}], "thinking": {"type": kind}})
    chat = asked.chat(True, codec)
    assert chat.template_options() == {"enable_thinking": thinks}


@pytest.mark.parametrize("kind", ["auto", "any", "tool"])
def test_calls_side_by_side_can_be_forbidden(kind: str) -> None:
    choice: dict[str, Any] = {"type": kind, **({"name": "paint"} if kind == "tool" else {})}
    for forbidden in (True, False):
        asked = TokensBody.model_validate({
            "messages": [{"role": "user", "content": "Paint."}], "tools": [COLOUR],
            "tool_choice": {**choice, "disable_parallel_tool_use": forbidden}})
        assert (asked.chat(True, None).parallel_tool_calls is False) is forbidden
