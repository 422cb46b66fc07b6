"""What a request may hold: every field is honoured, refused by name, or known to be harmless."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest
from asking import PROMPTS

from draftproof.requests.foreign_options import HARMLESS
from draftproof.server.messages_request import MessagesBody
from draftproof.server.responses_request import ResponsesBody
from draftproof.server.schema import Completion, DraftproofOptions

BODY = {"prompt": PROMPTS[0], "max_tokens": 24, "temperature": 0}
SCHEMA = {"type": "object", "additionalProperties": False, "required": ["a"],
          "properties": {"a": {"enum": ["x", "y"]}}}
UNKNOWN: dict[str, Any] = {
    "regexp": "[0-9]", "max_token": 3, "dry_multiplier": 0.8, "samplers": ["top_k"], "lora": [1],
    "eos_token_id": 0, "skip_special_tokens": False, "add_special_tokens": False, "answer": "42",
    "truncate_prompt_tokens": 5, "stop_regex": "a", "documents": [{"text": "a"}],
    "draftproof": {"tree": True}, "stream_options": {"include_usage": True},
    "enable_thinking": False,
}  # fmt: skip


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_fields_are_refused_by_name(http: httpx.Client, name: str) -> None:
    answer = http.post("/v1/completions", json={**BODY, name: UNKNOWN[name]})
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert name in message and "\n" not in message


@pytest.mark.parametrize("api", ["messages", "responses"])
def test_what_other_apis_ask_for_reaches_the_chat(api: str) -> None:
    """The salt above all: without it texts of others may be drafted from."""
    asked = {"model": "m", "stream": True, "temperature": 0.5, "top_p": 0.6, "top_k": 7, "seed": 8,
             "priority": 9, "cache_salt": "s", "draftproof": {"drafter": "none", "trees": True}}
    if api == "messages":
        chat = MessagesBody.model_validate({
            **asked, "messages": [{"role": "user", "content": "a"}], "max_tokens": 10,
            "stop_sequences": ["x"]}).chat(False, None)
    else:
        chat = ResponsesBody.model_validate({
            **asked, "input": "a", "max_output_tokens": 10, "stop": ["x"]}).chat([])
    asked |= {"max_tokens": 10, "stop": ["x"],
              "draftproof": DraftproofOptions(drafter="none", trees=True)}
    assert {name: getattr(chat, name) for name in asked} == asked


@pytest.mark.parametrize("asked", [{}, {"seed": None}, {"seed": -1}])
def test_without_a_seed_each_request_gets_another(server: Any, asked: dict[str, Any]) -> None:
    """-1 asks for none, as in llama.cpp and others."""
    body = Completion.model_validate({**BODY, "temperature": 1, **asked})
    seeds = {request.sampling.seed for _ in range(3) for request in server.first.read(body)[0]}
    assert len(seeds) == 3
    for seed in (5, 0):
        ((request,), _) = server.first.read(
            Completion.model_validate({**BODY, "temperature": 1, "seed": seed}))
        assert request.sampling.seed == seed


def test_a_limit_of_prompt_and_text_together_is_honoured(server: Any) -> None:
    body = Completion.model_validate({"prompt": PROMPTS[0], "max_length": 20})
    (request,), _ = server.first.read(body)
    assert request.max_length == 20 > len(request.prompt)


def test_fields_without_effect_on_the_answer_are_accepted(http: httpx.Client) -> None:
    harmless = {**dict.fromkeys(HARMLESS, 1), "cache_salt": "a"}
    neutral = {"top_k": -1, "skip_special_tokens": True, "n_probs": 0, "best_of": 1, "echo": False,
               "stop_token_ids": [], "mirostat": 0, "logit_bias": None, "ignore_eos": False}
    answer = http.post("/v1/completions", json={**BODY, **harmless, **neutral})
    plain = http.post("/v1/completions", json=BODY)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == plain.json()["choices"][0]["text"]


@pytest.mark.parametrize(("asked", "pattern"), [
    ({"regex": "[0-9]{3}/[a-c]"}, "[0-9]{3}/[a-c]"),
    ({"guided_regex": "^(yes|no)$"}, "yes|no"),
    ({"structured_outputs": {"regex": r"a\/\$"}}, r"a/\$"),
    ({"ebnf": 'root ::= "a" ("b" | "c") "d"'}, "a[bc]d"),
    ({"grammar": 'root ::= [0-9] "!"'}, "[0-9]!"),
    ({"guided_grammar": 'start: "q" | "r"'}, "q|r"),
    ({"guided_choice": ['red "fish"', "blü"]}, 'red "fish"|blü'),
    ({"structured_outputs": {"choice": ["one"]}}, "one"),
    ({"json_schema": SCHEMA}, '{"a": "[xy]"}'),
    ({"guided_json": json.dumps(SCHEMA)}, '{"a": "[xy]"}'),
    ({"structured_outputs": {"json": SCHEMA}}, '{"a": "[xy]"}'),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, '{"a": "[xy]"}'),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, '{"a": "[xy]"}'),
])  # fmt: skip
def test_grammar_options_of_other_servers_are_understood(
    http: httpx.Client, asked: dict[str, Any], pattern: str
) -> None:
    pytest.importorskip("llguidance")
    answer = http.post("/v1/completions", json={**BODY, **asked, "max_tokens": 40})
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    assert re.fullmatch(pattern, choice["text"]), choice


@pytest.mark.parametrize(("asked", "why"), [
    ({"regex": "("}, "regex"), ({"regex": 5}, "text"), ({"guided_choice": "a"}, "list"),
    ({"structured_outputs": {"tag": 1}}, "'tag'"), ({"structural_tag": {"a": 1}}, "structural_tag"),
    ({"structured_outputs": 5}, "object"), ({"guided_json": "{"}, "JSON"), ({"ebnf": "=="}, "read"),
    ({"regex": "a", "ebnf": "b"}, "give one"), ({"json_schema": [1]}, "object"),
    ({"regex": "a", "response_format": {"type": "json_object"}}, "give one"),
])  # fmt: skip
def test_constraints_that_cannot_be_followed(
    http: httpx.Client, asked: dict[str, Any], why: str
) -> None:
    pytest.importorskip("llguidance")
    answer = http.post("/v1/completions", json={**BODY, **asked})
    assert answer.status_code == 400 and why in answer.json()["error"]["message"]


def test_chat_template_arguments_are_passed_to_the_template(
    server: Any, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it never reads is refused: it would change nothing, silently."""
    template = ("{% for m in messages %}{{ m.content }}{% endfor %}"
                "{% if enable_thinking is false %} no{% endif %}"
                "{% for d in documents or [] %} {{ d.text }}{% endfor %}")
    monkeypatch.setattr(server.engine.codec.tokenizer, "chat_template", template)
    body = {"messages": [{"role": "user", "content": "The dog"}]}
    decode = server.engine.codec.tokenizer.decode
    for more, text in (
        ({}, "The dog"), ({"enable_thinking": False}, "The dog no"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "The dog no"),
        ({"documents": [{"text": "ran"}]}, "The dog ran"),
    ):
        response = http.post("/tokenize", json={**body, **more})
        assert response.status_code == 200 and text == decode(response.json()["tokens"]).strip()
    for more, name in (
        ({"chat_template_kwargs": {"thinking": True}}, "thinking"),
        ({"chat_template_kwargs": {"tokenize": True}}, "tokenize"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
    ):
        refused = http.post("/v1/chat/completions", json={**body, **more})
        assert refused.status_code == 400 and name in refused.json()["error"]["message"]
