"""Tool calls: the form of a template is what it writes for a call, read back; what the model wrote
reaches the client unchanged, wherever the text is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import AutoTokenizer

from draftproof.errors import BadInput
from draftproof.model.loading import embedded
from draftproof.server.schema import Chat
from draftproof.server.tools import HERMES, LLAMA, MISTRAL, CallReader, Form, offered
from draftproof.tokenizer.codec import Codec

TOOLS: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}}]
ARGUMENTS: dict[str, Any] = {"city": "Tórshavn, \"north\"", "days": 3}


def template(call: str, begin: str = "", end: str = "") -> str:
    """A chat template that writes `call` for each call `c`, within `begin` and `end`."""
    return (
        "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
        "{% for m in messages %}<|{{ m.role }}|>{% if m.tool_calls %}" + begin
        + "{% for c in m.tool_calls %}{% set f = c.function %}" + call + "{% endfor %}" + end
        + "{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )


def entry(name: str = "name", arguments: str = "arguments") -> str:
    return f'{{"{name}": "{{{{ f.name }}}}", "{arguments}": {{{{ f.arguments | tojson }}}}}}'


COMMA = "{{ ', ' if not loop.last }}"
PAIRS = ("{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key>\n<arg_value>"
         "{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}")
PARAMETERS = ("{% for k, v in f.arguments.items() %}<parameter={{ k }}>\n"
              "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}")
KEYWORDS = ("{% for k, v in f.arguments.items() %}{{ ', ' if not loop.first }}{{ k }}="
            "{{ v | tojson }}{% endfor %}")
FORMS = {
    "Hermes": template(f"<tool_call>\n{entry()}\n</tool_call>\n"),
    "Llama 3": template(entry(arguments="parameters")),
    "Mistral, lists": template(entry() + COMMA, "[TOOL_CALLS][", "]"),
    "Mistral, names": template("[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}"),
    "GLM": template("<tool_call>{{ f.name }}\n" + PAIRS + "</tool_call>\n"),
    "Qwen coder": template("<tool_call>\n<function={{ f.name }}>\n" + PARAMETERS
                           + "</function>\n</tool_call>"),
    "Command R7B": template(
        entry("tool_name", "parameters").replace("{", '{"tool_call_id": "0", ', 1) + COMMA,
        "<|START_THINKING|><|END_THINKING|><|START_ACTION|>[\n", "\n]<|END_ACTION|>"),
    "Hunyuan": template("<tool_call>{{ f.name }}\n```json\n{{ f.arguments | tojson }}\n```"
                        "</tool_call>", "<tool_calls>", "</tool_calls>"),
    "DeepSeek": template(
        "<calls_begin><call_begin>{{ 'function<sep>' + f.name + '\n```json\n' + f.arguments "
        "+ '\n```' }}<call_end>", "", "<calls_end>"),
    "Llama 4": template("{{ f.name }}(" + KEYWORDS + ")" + COMMA, "[", "]"),
    "Granite": template(entry() + COMMA, "<|tool_call|>[", "]"),
    "Phi": template(entry() + COMMA, "<|tool_call|>[", "]<|/tool_call|>"),
}  # fmt: skip


def codec(text: str) -> Codec:
    tokenizer = AutoTokenizer.from_pretrained(embedded("demo"))
    tokenizer.chat_template = text
    return Codec(tokenizer)


def read(form: Form, written: str, step: int = 0, tools: Any = TOOLS) -> tuple[str, list[Any]]:
    """What is said, and the calls, of a text that comes in parts of `step` characters."""
    chat = Chat(messages=[], tools=tools)
    reader, output, calls, step = CallReader(form, chat.tools or ()), "", [], step or len(written)
    for start in range(0, len(written), step):
        more, new = reader.push(written[start : start + step], last=start + step >= len(written))
        output, calls = output + more, calls + new
    return output, [(call["function"]["name"], json.loads(call["function"]["arguments"]))
                  for call in calls]


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("count", [1, 2])
def test_tool_calls_written_by_a_template_are_parsed(name: str, count: int) -> None:
    tokenizer = codec(FORMS[name])
    chat = Chat(messages=[{"role": "user", "content": "x"}], tools=TOOLS)
    _, form = offered(chat, tokenizer)
    assert form is not None
    arguments = json.dumps(ARGUMENTS) if form.text_arguments else ARGUMENTS
    call = {"type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    if name in ("Llama 3", "DeepSeek") and count == 2:
        pytest.skip("one call at a time")
    start = tokenizer.chat_text(chat.messages, TOOLS)
    full = tokenizer.chat_text([*chat.messages, {"role": "assistant", "content": "", "tool_calls": [
        call] * count}], TOOLS, answer=False)
    written = full[len(start) :].removesuffix("<|end|>")
    for step in (0, 1, 7):
        output, calls = read(form, written, step)
        assert calls == [("get_weather", ARGUMENTS)] * count, (form, written)
        assert output.replace("<|START_THINKING|><|END_THINKING|>", "") == ""


@pytest.mark.parametrize("text", [
    template("<call>{{ f.name }};{{ f.arguments | length }}</call>"),
    template("{{ f.name }}"), template("{{ f.nothing.at_all }}"), "{{ messages }}",
])  # fmt: skip
def test_templates_with_unparsable_tool_calls_are_refused(text: str) -> None:
    with pytest.raises(BadInput, match="chat template"):
        offered(Chat(messages=[], tools=TOOLS), codec(text))


@pytest.mark.parametrize("step", [0, 1, 5])
@pytest.mark.parametrize("text", [
    "a </tool_call> b", "<tool_call>", "<tool_call>\n{}\n</tool_call>", "say [TOOL_CALLS] then",
    '"]}', "\ud83d",
])  # fmt: skip
def test_marks_inside_strings_are_text(text: str, step: int) -> None:
    arguments = {"path": "a.md", "text": text}
    call = json.dumps({"name": "write_file", "arguments": arguments})
    for form, written in ((HERMES, f"<tool_call>\n{call}\n</tool_call>"),
                          (HERMES, f"I use <tool_call> so: <tool_call>\n{call}\n</tool_call>"),
                          (MISTRAL, f"[TOOL_CALLS][{call}]"), (HERMES, f"<tool_call>{call}")):
        assert read(form, written, step)[1] == [("write_file", arguments)]


OPTIONAL: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "null"}]}


@pytest.mark.parametrize(("schema", "written", "wanted"), [
    ({"type": "string"}, "12", "12"), ({"type": "string"}, "null", "null"),
    ({"type": "string"}, '"quoted"', '"quoted"'), ({"type": "integer"}, "12", 12),
    (OPTIONAL, "12", "12"), (OPTIONAL, "null", None), (OPTIONAL, "true", "true"),
    (OPTIONAL, "[1]", "[1]"), (OPTIONAL, '"quoted"', '"quoted"'), (OPTIONAL, "no JSON", "no JSON"),
    ({"type": ["string", "null"]}, "12", "12"), ({"type": ["string", "integer"]}, "12", 12),
    ({"oneOf": [{"type": "string"}, {"type": "number"}]}, "1.5", 1.5),
    ({"type": ["string", "integer"]}, "1.5", "1.5"), ({"type": ["string", "number"]}, "12", 12),
    ({"type": "boolean"}, "true", True), ({}, "12", 12), ({}, "word", "word"),
    ({"anyOf": "no list", "type": {}}, "12", 12),
])  # fmt: skip
def test_values_without_quotes_are_of_the_kinds_that_the_schema_allows(
    schema: dict[str, Any], written: str, wanted: object
) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {
        "type": "object", "properties": {"x": schema}}}}]
    coder = Form("<tool_call>", "</function> </tool_call>", "parameter")
    glm = Form("<tool_call>", "</tool_call>", "arg_key")
    for form, text in (
        (coder, f"<tool_call><function=f><parameter=x>\n{written}\n</parameter></function>"),
        (glm, f"<tool_call>f<arg_key>x</arg_key><arg_value>{written}</arg_value></tool_call>"),
    ):
        (call,) = read(form, text, tools=tools)[1]
        assert call == ("f", {"x": wanted}) and type(call[1]["x"]) is type(wanted)


@pytest.mark.parametrize(("arguments", "wanted"), [
    ("null", {}), ('"{\\"a\\": 1}"', {"a": 1}), ('""', {}), (None, {}), ("{}", {}),
    ('{"a": NaN}', None), ('{"a": 1e400}', None), ('{"a": -Infinity}', None), ("[1]", None),
    ('"no JSON"', None), ("3", None),
])  # fmt: skip
def test_arguments_are_an_object_and_json(arguments: str | None, wanted: Any) -> None:
    """What is no JSON is no call: it stays text, and never reaches a client as arguments."""
    body = "" if arguments is None else f', "arguments": {arguments}'
    written = f'<tool_call>\n{{"name": "f"{body}}}\n</tool_call>'
    output, calls = read(HERMES, written)
    assert calls == ([] if wanted is None else [("f", wanted)])
    assert bool(output) == (wanted is None)
    assert read(LLAMA, '{"name": "f", "parameters": {"a": 1}} and text')[1] == []
