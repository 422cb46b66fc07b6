"""OpenAI's Responses API, asked by its own client and by its agents, unmodified."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import httpx
import openai
import pytest
from asking import KEY, OTHER_KEY, PROMPTS, TOOL_TEMPLATE, alone

from draftproof.errors import Unavailable
from draftproof.server.base_answer import Piece
from draftproof.server.reasoning import Marks
from draftproof.server.response_store import ResponseStore
from draftproof.server.responses_answer import ResponsesAnswer
from draftproof.server.responses_request import ResponsesBody, read_items

PAINT: Any = {"type": "function", "name": "paint", "parameters": {
    "type": "object", "required": ["colour"], "additionalProperties": False,
    "properties": {"colour": {"enum": ["red", "blue"]}}}}


@pytest.fixture
def responses(
    server: Any, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """The client's responses, of a model whose template writes contents and Hermes calls."""
    monkeypatch.setattr(server.engine.codec.tokenizer, "chat_template", TOOL_TEMPLATE)
    yield client.responses


def ask(inputs: Any = PROMPTS[0], **more: Any) -> dict[str, Any]:
    return {"model": "demo", "max_output_tokens": 20, "temperature": 0, "input": inputs, **more}


def test_responses_equal_the_chat_text(server: Any, responses: Any) -> None:
    answer = responses.create(**ask())
    assert answer.output_text == alone(server, PROMPTS[0], 20)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.usage.output_tokens == 20
    items = [{"role": "user", "content": [{"type": "input_text", "text": PROMPTS[0]}]}]
    assert responses.create(**ask(items)).output_text == answer.output_text
    before = responses.create(**ask("upon a time", instructions="Once "))
    assert before.output_text == answer.output_text
    schema = {"type": "json_schema", "name": "x", "schema": PAINT["parameters"]}
    told = responses.create(**ask(text={"format": schema}, max_output_tokens=60))
    assert told.status == "completed"
    assert json.loads(told.output_text)["colour"] in ("red", "blue")


def test_streams_add_up_to_the_response(responses: Any) -> None:
    whole = responses.create(**ask())
    events = list(responses.create(**ask(stream=True)))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    final = events[-1].response
    assert text == whole.output_text == final.output_text
    assert (events[0].type, events[-1].type) == ("response.created", "response.incomplete")
    with responses.stream(**ask(extra_body={"stop": ["."]}, max_output_tokens=90)) as stream:
        final = stream.get_final_response()
    assert final.status == "completed" and text.startswith(final.output_text)


def test_a_stream_has_the_log_probabilities_of_every_token(server: Any, responses: Any) -> None:
    """Also of tokens whose text comes later, since it may begin a stop string, and of the last."""
    begun = alone(server, PROMPTS[0], 20)[4:16]
    asked = ask(include=["message.output_text.logprobs"], extra_body={
        "stop": [f"{begun}zzz"], "draftproof": {"drafter": "none"}})
    (whole,), *_ = (item.content for item in responses.create(**asked).output)
    events = list(responses.create(**asked, stream=True))
    assert [token.token for token in whole.logprobs] and whole.text.count(begun)
    streamed = [(score.token, score.logprob) for event in events
                if event.type == "response.output_text.delta" for score in event.logprobs]
    assert streamed == [(score.token, score.logprob) for score in whole.logprobs]
    assert events[-1].response.output[0].content[0].logprobs == whole.logprobs


def test_the_end_token_has_a_log_probability_though_it_has_no_text(
    server: Any, responses: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (end,) = server.engine.stop_tokens
    ending = replace(server.first.sampling, logit_bias={end: 1000.0}, min_new_tokens=5)
    monkeypatch.setattr(server.first, "sampling", ending)
    asked = ask(include=["message.output_text.logprobs"], extra_body={
        "draftproof": {"drafter": "none"}})
    *_, last = responses.create(**asked, stream=True)
    for response in (responses.create(**asked), last.response):
        (item,) = response.output
        assert len(item.content[0].logprobs) == response.usage.output_tokens == 6


def test_only_the_owner_can_continue_a_response(server: Any, responses: Any) -> None:
    first = responses.create(**ask())
    after = responses.create(**ask(" Then", previous_response_id=first.id))
    assert after.output_text == alone(server, PROMPTS[0] + first.output_text + " Then", 20)
    assert responses.retrieve(first.id).output_text == first.output_text
    other = openai.OpenAI(base_url=f"{server.url}/v1", api_key=OTHER_KEY, max_retries=0)
    with other, pytest.raises(openai.NotFoundError, match="keeps the latest responses"):
        other.responses.create(**ask(" Then", previous_response_id=first.id))
    responses.delete(first.id)
    unkept = responses.create(**ask(store=False))
    for name in (first.id, unkept.id):
        with pytest.raises(openai.NotFoundError):
            responses.create(**ask(" Then", previous_response_id=name))


@pytest.mark.parametrize("role", ["system", "developer"])
def test_messages_stay_in_the_conversation_and_instructions_do_not(
    server: Any, responses: Any, role: str
) -> None:
    opening, more = PROMPTS[0].split(" ", 1)
    items = [{"role": role, "content": f"{opening} "}, {"role": "user", "content": more}]
    for inputs, before in ((items, PROMPTS[0]), (more, more)):
        instructions = {} if inputs is items else {"instructions": f"{opening} "}
        first = responses.create(**ask(inputs, **instructions))
        assert first.output_text == alone(server, PROMPTS[0], 20)
        after = responses.create(**ask(" Then", previous_response_id=first.id))
        assert after.output_text == alone(server, before + first.output_text + " Then", 20)


def test_function_calls_and_reasoning_are_separated(
    server: Any, responses: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ask(tools=[PAINT], tool_choice="required", max_output_tokens=60)
    (call,) = responses.create(**asked).output
    assert call.type == "function_call" and json.loads(call.arguments)["colour"]
    events = list(responses.create(**asked, stream=True))
    (again,) = events[-1].response.output
    assert (again.name, again.arguments) == (call.name, call.arguments)
    turns = [{"role": "user", "content": PROMPTS[0]}, call.model_dump(exclude_none=True),
             {"type": "function_call_output", "call_id": call.call_id, "output": "painted"}]
    assert responses.create(**ask(turns, tools=[PAINT])).output_text
    monkeypatch.setattr(server.first, "marks", Marks("zzz", "."))
    whole = responses.create(**ask(f"{PROMPTS[0]} zzz", max_output_tokens=60))
    before, _, rest = alone(server, f"{PROMPTS[0]} zzz", 60).partition(".")
    assert [item.type for item in whole.output] == ["reasoning", "message"]
    assert whole.output[0].content[0].text == before.strip()
    assert whole.output_text == rest.lstrip()
    assert whole.usage.output_tokens_details.reasoning_tokens > 0


@pytest.mark.parametrize(("asked", "word"), [
    ({"tools": [{"type": "web_search"}]}, "web_search"), ({"background": True}, "background"),
    ({"conversation": "c"}, "conversation"), ({"truncation": "auto"}, "truncation"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input_image"),
])  # fmt: skip
def test_unsupported_options_are_refused(
    responses: Any, http: httpx.Client, asked: dict[str, Any], word: str
) -> None:
    answer = http.post("/v1/responses", json=ask(**asked) if "input" not in asked else
                       {**ask(), **asked})
    assert answer.status_code == 400 and word in answer.json()["error"]["message"]


def test_items_become_messages() -> None:
    items = [{"role": "developer", "content": "s"}, {"role": "user", "content": "a"},
             {"type": "reasoning", "summary": [], "content": [
                 {"type": "reasoning_text", "text": "hm"}]},
             {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
             {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
             {"type": "function_call_output", "call_id": "1", "output": "r"}]
    messages = read_items(items)
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool"]
    assert messages[2]["reasoning_content"] == "hm"
    assert [call["id"] for call in messages[2]["tool_calls"]] == ["1", "2"]


def test_all_items_of_a_response_are_in_the_conversation(server: Any) -> None:
    """A model may think and write in turn, as gpt-oss does."""
    requests = server.engine.read(["a"], max_new_tokens=1)
    answer = ResponsesAnswer(server.first, ResponsesBody(input="a"), requests, [], None)
    for reasoning, text in (("First. ", "I look."), ("Then. ", ""), ("Last.", " It is 4.")):
        assert list(answer._grow(Piece(0, None, reasoning, text, [], None)))
    assert [item["type"] for item in answer.items] == ["reasoning", "message"] * 2
    (message,) = answer._messages()
    assert message["content"] == "I look. It is 4."
    assert message["reasoning_content"] == "First. Then. Last."


def test_stored_responses_are_limited() -> None:
    store = ResponseStore(limit=2500)
    keep = store.keeper(1, [{"role": "user", "content": "a"}])
    for number in range(4):
        keep({"id": str(number), "text": "x" * 900}, [{"role": "assistant", "content": "b"}])
    assert [message["role"] for message in store.messages(1, "3")] == ["user", "assistant"]
    for owner, name in ((1, "0"), (2, "3")):
        with pytest.raises(Unavailable):
            store.get(owner, name)
    store.get(1, "2")                               # so "3" is dropped before it
    keep({"id": "4", "text": "x" * 900}, [])
    assert store.get(1, "2")["id"] == "2"
    store.delete(1, "4")                            # its bytes are free
    keep({"id": "5", "text": "x" * 900}, [])
    assert store.get(1, "2")["id"] == "2"


def test_an_agent_calls_a_tool_and_answers(
    server: Any, responses: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents = pytest.importorskip("agents", reason="openai-agents is not installed")
    painted = []

    def paint(colour: Literal["red", "blue"]) -> str:
        """Paint the house."""
        painted.append(colour)
        return f"It is {colour} now."

    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
    for kind in (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel):
        agent = agents.Agent(
            name="painter", instructions="Paint.", tools=[agents.function_tool(paint)],
            model=kind(model="demo", openai_client=client),
            model_settings=agents.ModelSettings(
                tool_choice="required", max_tokens=90, temperature=0, parallel_tool_calls=False,
                extra_body={"stop": ["."]}),
        )  # fmt: skip
        painted.clear()
        done = agents.Runner.run_sync(agent, PROMPTS[0])
        assert len(painted) == 1 and painted[0] in ("red", "blue") and done.final_output
