"""Grammars and tool calls: the mask is a function of each node's text; the same text with and
without drafting; calls are read wherever the text is cut."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import openai
import pytest
import torch
from asking import PROMPTS

import draftproof as dp
from draftproof.core.params import RuleContext
from draftproof.errors import BadInput
from draftproof.server.grammar import KEPT, Grammars
from draftproof.server.json_schema import json_rule
from draftproof.server.schema import Chat, ResponseFormat
from draftproof.server.tools import HERMES, LLAMA, MISTRAL, CallReader, Form, call_grammar

pytest.importorskip("llguidance")
SCHEMA = {
    "type": "object", "additionalProperties": False, "required": ["who", "age", "likes"],
    "properties": {
        "who": {"enum": ["Lily", "Tom", "the big red dog", "the big red ball"]},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
        "likes": {"type": "array", "maxItems": 3, "items": {"type": "string", "maxLength": 12}},
    },
}  # fmt: skip
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": {
        "type": "object", "additionalProperties": False, "required": ["place"],
        "properties": {"place": {"enum": ["park", "house"]}}}}} for name in ("go", "look")
]  # fmt: skip
TEMPLATE = (
    "{% for tool in tools %}{{ tool.function.name }} {% endfor %}"
    "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>\n{% endfor %}{% endfor %}"
)
CALL = '{"name": "go", "arguments": {"place": "päark"}}'


@pytest.fixture(scope="module")
def grammars(server: Any) -> Grammars:
    return Grammars(server.engine.codec, server.engine.target.vocab_size, (0,))


def test_forced_tokens_are_all_that_is_allowed_in_turn(grammars: Grammars) -> None:
    """The mask after a text allows the bytes of what is forced, and often nothing else."""
    dice, request = Random(3), RuleContext([1, 2, 3], 99, (0,), torch.device("cpu"))
    made = grammars.lark(f"start: {json_rule(SCHEMA)}").make(request)
    scores, text, count = torch.zeros(1, grammars.vocab), [1, 2, 3], 0
    for _ in range(40):
        forced = made.forced(text)
        for token in forced or [-1]:
            allowed = made(torch.tensor([text]), scores)[0].isfinite().nonzero()[:, 0].tolist()
            text.append(token if forced else dice.choice(allowed))
            assert text[-1] in allowed
            count += len(forced) > 0
        if text[-1] == 0:
            break
    assert count > 10


def test_a_mask_depends_on_the_text_alone(grammars: Grammars) -> None:
    """Asked about the nodes of any tree, in any order, it says what a fresh one says."""
    dice, request = Random(1), RuleContext([1, 2, 3], 99, (0,), torch.device("cpu"))
    rule, scores = grammars.lark(f"start: {json_rule(SCHEMA)}"), torch.zeros(1, grammars.vocab)
    asked, text = rule.make(request), [1, 2, 3]
    for _ in range(150):
        fresh = rule.make(request)(torch.tensor([text]), scores)
        assert torch.equal(asked(torch.tensor([text]), scores), fresh)
        allowed = fresh[0].isfinite().nonzero()[:, 0].tolist()
        assert allowed
        strange = dice.random() < 0.1
        text = [*text, dice.randrange(4096) if strange else dice.choice(allowed)]
        if dice.random() < 0.4 or len(allowed) == grammars.vocab:       # or after what is wrong
            text = text[: 3 + dice.randrange(len(text) - 2)]


def test_the_end_tokens_of_a_request_may_come_where_the_text_may_end(grammars: Grammars) -> None:
    """Also those that the model has not, and the model's own only if the request has them."""
    rule, scores = grammars.lark('start: "a" "b"?'), torch.zeros(1, grammars.vocab)
    encode = grammars.codec.encode if grammars.codec else lambda *_: []
    (a,), other = encode("a", special=False)[-1:], 77
    for ends in ((0,), (other,), (0, other)):
        processor = rule.make(RuleContext([1, 2], 99, ends, torch.device("cpu")))
        for text, may_end in (([1, 2], False), ([1, 2, a], True)):
            allowed = processor(torch.tensor([text]), scores)[0].isfinite()
            assert [bool(allowed[end]) for end in (0, other)] == [
                may_end and end in ends for end in (0, other)]


def test_neither_tokenizers_nor_grammars_are_kept_without_limit(grammars: Grammars) -> None:
    """A set of end tokens cost 80 MiB, for ever."""
    made, tables = Grammars(grammars.codec, grammars.vocab, (0,)), list[Any]()
    for number in range(3 * KEPT):
        rule = made.lark(f'start: "a" "{number}"')
        rule.make(RuleContext([1], 9, (0, number), torch.device("cpu")))
        tables += made._tokenizers
        assert len(made._compiled) <= KEPT
    assert all(table is tables[0] for table in tables)
    assert made.lark('start: "a" "0"') and len(made._compiled) == KEPT
    with pytest.raises(dp.DraftproofError, match="at most 262,144"):
        made.lark("start: " + json_rule({"const": "a" * 300_000}))


def test_a_response_format_is_a_rule_unless_it_allows_any_text(grammars: Grammars) -> None:
    """As programs ask that use the grammars without the server."""
    assert grammars.response(None) is grammars.response(ResponseFormat(type="text")) is None
    rule = grammars.response(ResponseFormat(type="json_object"))
    assert rule is not None
    made = rule.make(RuleContext([1], 9, (0,), torch.device("cpu")))
    allowed = made(torch.tensor([[1]]), torch.zeros(1, grammars.vocab))[0].isfinite()
    assert grammars.codec is not None
    texts = grammars.codec.tokenizer.batch_decode(allowed.nonzero())
    assert texts and all(text.startswith("{") for text in texts)


@pytest.mark.parametrize("temperature", [0.0, 1.2])
@pytest.mark.parametrize("acceptance", ["match", "block"])
@pytest.mark.parametrize("drafter", [{"assistant_model": "demo-draft"}, {"drafter": "demo-medusa"}])
def test_text_is_the_same_with_and_without_drafting(
    grammars: Grammars, drafter: Any, acceptance: str, temperature: float
) -> None:
    engine = dp.load("demo", budget=5, acceptance=acceptance, **drafter)
    plain = dp.Engine(engine.target, codec=engine.codec, stop_tokens=engine.stop_tokens)
    rule = grammars.lark(f"start: {json_rule(SCHEMA)}")
    sampling = dp.Sampling(temperature=temperature, seed=7, logits_rules=[rule])
    drafted = engine.generate(PROMPTS, max_new_tokens=60, sampling=sampling)
    alone = plain.generate(PROMPTS, max_new_tokens=60, sampling=sampling)
    if acceptance == "match" or temperature == 0:
        assert [draft.tokens for draft in drafted] == [item.tokens for item in alone]
    assert sum(draft.stats.accepted for draft in drafted) > 15
    for done in (*drafted, *alone):
        report = json.loads(done.text)
        assert done.finish_reason == "stop" and set(report) == set(SCHEMA["required"])
        assert report["who"] in SCHEMA["properties"]["who"]["enum"] and 1 <= report["age"] <= 99


def test_a_response_keeps_to_the_schema_it_was_asked_for(client: openai.OpenAI) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "who", "schema": SCHEMA}}
    done = client.completions.create(model="demo", prompt=PROMPTS[0], max_tokens=90, temperature=1,
                                     n=3, extra_body={"response_format": wanted})
    assert all(json.loads(choice.text)["age"] for choice in done.choices)
    cut = client.completions.create(model="demo", prompt=PROMPTS[0], max_tokens=6, temperature=0,
                                    extra_body={"response_format": {"type": "json_object"}})
    assert cut.choices[0].text.startswith("{") and cut.choices[0].finish_reason == "length"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
def test_tools_are_called_whole_and_streamed(
    server: Any, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, choice: Any
) -> None:
    monkeypatch.setattr(server.engine.codec.tokenizer, "chat_template", TEMPLATE)
    messages: Any = [
        {"role": "user", "content": PROMPTS[0]},
        {"role": "assistant", "content": None, "tool_calls": [{
            "id": "a", "type": "function", "function": {
                "name": "go", "arguments": '{"place": "park"}'}}]},
        {"role": "tool", "tool_call_id": "a", "content": "done"},
    ]
    asked: dict[str, Any] = {"model": "demo", "messages": messages, "tools": TOOLS, "seed": 3,
                             "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 90}
    whole = client.chat.completions.create(**asked).choices[0]
    assert whole.finish_reason == "tool_calls" and whole.message.content is None
    (call,) = whole.message.tool_calls or []
    assert call.type == "function" and call.function.name in ("go", "look")[choice != "required":]
    assert json.loads(call.function.arguments)["place"] in ("park", "house")
    news = [item.choices[0] for item in client.chat.completions.create(**asked, stream=True)]
    (streamed,) = [item for new in news for item in new.delta.tool_calls or []]
    assert streamed.function and streamed.index == 0 and streamed.id
    assert streamed.function.model_dump() == call.function.model_dump()
    assert news[-1].finish_reason == "tool_calls" and not any(new.delta.content for new in news)
    for wrong in ({"tool_choice": {"function": {"name": "no"}}}, {"tools": []}):
        with pytest.raises(openai.BadRequestError, match="tool_choice"):
            client.chat.completions.create(**(asked | wrong))
    monkeypatch.setattr(server.engine.codec.tokenizer, "chat_template", "{{ messages }}")
    with pytest.raises(openai.BadRequestError, match="template"):
        client.chat.completions.create(**asked)


@pytest.mark.parametrize("form", [HERMES, MISTRAL])
@pytest.mark.parametrize(("wanted", "several"), [
    ({}, True), ({"parallel_tool_calls": True}, True), ({"parallel_tool_calls": False}, False),
])  # fmt: skip
def test_a_second_call_is_possible_unless_it_was_forbidden(
    server: Any, grammars: Grammars, form: Form, wanted: dict[str, bool], several: bool
) -> None:
    codec = server.engine.codec
    body = Chat.model_validate({"messages": [], "tools": TOOLS, "tool_choice": "required"} | wanted)
    made = grammars.lark(call_grammar(body, form, codec)).make(
        RuleContext([1], 99, (0,), torch.device("cpu")))  # fmt: skip
    call, between = CALL.replace("ä", ""), ", " if form.listed else form.between
    calls = f"{call}{between}{call}"
    text = f"{form.begin}{f'[{calls}]' if form.listed else calls}{form.end}"
    tokens = [1, *codec.encode(text, special=False)]
    scores = torch.zeros(1, grammars.vocab)
    follows = [bool(made(torch.tensor([tokens[:size]]), scores)[0, tokens[size]].isfinite())
               for size in range(1, len(tokens))]
    assert all(follows) is several


@pytest.mark.parametrize(("form", "text", "output", "calls"), [
    (HERMES, "Just text < tool_ {\n ", "Just text < tool_ {\n ", 0),
    (HERMES, f"I look.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{CALL}</tool_call>",
     "I look.", 2),
    (HERMES, f"<tool_call>\n{CALL}", "", 1),
    (HERMES, f"<tool_call>{CALL}</tool_call>\nNow I wait.", "", 1),
    (HERMES, "<tool_call>\nno JSON\n</tool_call> so", "<tool_call>\nno JSON\n</tool_call> so", 0),
    (HERMES, "a <tool_call>{", "a <tool_call>{", 0),
    (HERMES, f"{CALL}\n{CALL}", "", 2),
    (HERMES, '{"name": "no call"}', '{"name": "no call"}', 0),
    (MISTRAL, f"[TOOL_CALLS][{CALL}, {CALL}]", "", 2),
    (MISTRAL, "[a list]", "[a list]", 0),
    (LLAMA, CALL.replace("arguments", "parameters"), "", 1),
    (LLAMA, '{"name": 3}', '{"name": 3}', 0),
])  # fmt: skip
def test_calls_are_read_wherever_the_text_is_cut(
    form: Form, text: str, output: str, calls: int
) -> None:
    for size in range(1, len(text) + 1):
        reader, out = CallReader(form), ""
        for start in range(0, len(text), size):
            more, none = reader.push(text[start : start + size], last=False)
            out += more
            assert not none
        more, result = reader.push("", last=True)
        assert out + more == output and len(result) == calls
        for call in result:
            assert call["function"] == {"name": "go", "arguments": '{"place": "päark"}'}


WIDE = 2**53 + 1


@pytest.mark.parametrize("schema, keyword", [
    ({"type": "integer", "minimum": WIDE, "maximum": WIDE}, "minimum"),
    ({"properties": {"enum": {"exclusiveMaximum": -WIDE}}}, "exclusiveMaximum"),
    ({"$defs": {"id": {"anyOf": [{"multipleOf": WIDE}]}}}, "multipleOf"),
    ({"items": {"const": {"id": [WIDE]}}}, "const"), ({"enum": [1, WIDE]}, "enum"),
])  # fmt: skip
def test_integers_that_a_grammar_would_round_are_refused(
    schema: dict[str, Any], keyword: str
) -> None:
    with pytest.raises(BadInput, match=rf"has {keyword} -?{WIDE}, beyond 2\^53"):
        json_rule(schema)


def test_large_integers_are_accepted_where_they_are_exact_or_unused() -> None:
    json_rule({"type": "integer", "default": WIDE, "maximum": 2**53, "enum": [True, 7, -(2**53)]})
    json_rule({"properties": {"minimum": {"type": "integer", "examples": [WIDE]}}})
