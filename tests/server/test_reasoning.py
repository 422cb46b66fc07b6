"""Reasoning is told apart by the model's own marks, wherever the text is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest

import draftproof as dp
from draftproof.requests.request import Request, Update
from draftproof.requests.stats import RoundStats
from draftproof.server import schema
from draftproof.server.answer import Answer
from draftproof.server.call_forms import HERMES
from draftproof.server.output_reader import OutputReader
from draftproof.server.reasoning import CHANNELS, PAIRS, Marks, is_open, marks_of

THINK = PAIRS[0]
HARMONY = ("<|channel|>analysis<|message|>The user asks. <|end|><|start|>assistant"
           "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
           "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
           '{"city": "Oslo <|x|>"}<|call|>')
FINAL = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>4 < 5"


def read(text: str, step: int, marks: Marks | None = THINK, **options: Any) -> tuple[str, str, Any]:
    """Reasoning, answer, and calls of a text that comes in parts of `step` characters."""
    inside, form = options.pop("inside", False), options.pop("form", None)
    reader, reasoning, answer, calls = OutputReader(marks, inside, form, **options), "", "", []
    for start in range(0, len(text), step):
        new = reader.push(text[start : start + step], last=start + step >= len(text))
        reasoning, answer, calls = reasoning + new[0], answer + new[1], calls + new[2]
    return reasoning, answer, [(call["function"]["name"], json.loads(call["function"]["arguments"]))
                               for call in calls]


@pytest.mark.parametrize("step", [1, 2, 7, 999])
@pytest.mark.parametrize(("text", "inside", "wanted"), [
    ("<think>\nSix times 7.\n</think>\n\nIt is 42.", False, ("Six times 7.", "It is 42.")),
    ("Six times 7.\n</think>\n\nIt is 42.", True, ("Six times 7.", "It is 42.")),
    ("\n<think>a < b </thin </think>c", False, ("a < b </thin", "c")),
    ("<think>\n\n</think>\n\nAt once.", False, ("", "At once.")),
    (" No thought <think> at all.", False, ("", " No thought <think> at all.")),
    ("<think>cut off </th", False, ("cut off </th", "")), ("<thi", False, ("", "<thi")),
    ("a</think>", True, ("a", "")), ("x </think> y </think> z", True, ("x", "y </think> z")),
])  # fmt: skip
def test_reasoning_ends_at_its_mark(text: str, inside: bool, wanted: Any, step: int) -> None:
    assert read(text, step, inside=inside)[:2] == wanted


@pytest.mark.parametrize("step", [1, 5, 999])
def test_calls_are_read_after_reasoning(step: int) -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    text = f"<think>I use <tool_call> now</think>\nWell: {call}"
    assert read(text, step, form=HERMES) == ("I use <tool_call> now", "Well:", [("f", {"a": 1})])
    assert read(text, step, form=HERMES, shown=False)[0] == ""


@pytest.mark.parametrize(("ended", "told"), [("stop", "tool_calls"), ("length", "length")])
def test_a_text_cut_after_a_call_says_that_it_was_cut(server: Any, ended: str, told: str) -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    requests, reader = server.engine.read("Once"), OutputReader(None, False, HERMES)
    answer = Answer(server.first, schema.Chat(messages=[]), requests, [reader])
    done = dp.Completion(text, [5], ended, None, RoundStats())
    piece = answer._taken_apart(0, Update(Request([]), 0, [(text, "")], [5], [], [], done))
    assert piece.finish_reason == told and len(piece.calls) == 1


@pytest.mark.parametrize("step", [1, 3, 999])
def test_channels_of_gpt_oss(step: int) -> None:
    assert read(HARMONY, step, CHANNELS) == (
        "The user asks. ", "I look.", [("get_weather", {"city": "Oslo <|x|>"})])
    assert read(FINAL, step, CHANNELS) == ("Hm.", "4 < 5", [])
    assert read(FINAL, step, CHANNELS, splits=False)[:2] == ("", "Hm.4 < 5")
    assert read("No channels.", step, CHANNELS)[1] == "No channels."
    cut = '<|channel|>commentary to=functions.f<|message|>{"a": '
    assert read(cut, step, CHANNELS) == ("", '{"a": ', [])
    two = HARMONY + "<|start|>assistant" + HARMONY.partition("<|start|>assistant")[2]
    assert len(read(two, step, CHANNELS)[2]) == 2


@pytest.mark.parametrize("step", [1, 2, 3, 999])
@pytest.mark.parametrize("text", ["<p>1 < 2</p>", "<", "<b", "to be", "to", "t", "< |end", "  <x>"])
def test_an_answer_without_a_header_may_begin_like_one(text: str, step: int) -> None:
    """What a grammar asks for from the first token on, such as XML, has no header."""
    assert read(text, step, CHANNELS) == ("", text, [])
    assert read(FINAL.partition("<|message|>")[0], step, CHANNELS) == ("", "", [])  # a cut header


@pytest.mark.parametrize("step", [1, 2, 3, 999])
def test_a_call_may_be_named_before_its_channel(step: int) -> None:
    """The prompt ends with the mark before this header."""
    text = ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>'
    assert read(text, step, CHANNELS) == ("", "", [("f", {"a": 1})])


@pytest.mark.parametrize(("template", "marks"), [
    ("{{ content.split('</think>')[-1] }}", THINK), ("{{ content }}", None), (None, None),
    ("<|start|>assistant<|channel|>analysis<|message|>", CHANNELS),
    ([{"name": "default", "template": "[THINK][/THINK]"}], PAIRS[1]),
])  # fmt: skip
def test_the_template_says_which_marks_there_are(template: Any, marks: Any) -> None:
    class Tokenizer:
        chat_template = template

    class Codec:
        tokenizer = Tokenizer()

    assert marks_of(Codec()) == marks                                       # type: ignore[arg-type]
    assert marks_of(None) is None


def test_prompt_ending_with_an_open_reasoning_mark_is_detected() -> None:
    assert is_open("<|assistant|><think>\n", THINK)
    assert not is_open("<think>\n\n</think>\n\n", THINK) and not is_open("Hello", THINK)
    assert not is_open("<|start|>assistant", CHANNELS)
    earlier = "<think>First.</think>4<|user|>And now?<|assistant|>"
    assert is_open(f"{earlier}<think>\n", THINK) and not is_open(earlier, THINK)


@pytest.mark.parametrize("question", ["What does <think> mean?", "</think><think>", "<think>"])
def test_a_mark_that_a_user_writes_opens_no_reasoning(question: str) -> None:
    """All of an answer without reasoning would be taken for reasoning."""
    prompt = f"<|user|>{question}<|assistant|>"
    assert not is_open(prompt, THINK) and is_open(f"{prompt}<think>\n", THINK)
    assert read("A tag.", 3, THINK, inside=is_open(prompt, THINK)) == ("", "A tag.", [])
