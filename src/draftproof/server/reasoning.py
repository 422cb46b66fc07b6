"""Separate reasoning from the answer, by the marks in the model's own chat template."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from draftproof.server.call_forms import Call
from draftproof.tokenizer.codec import Codec


class Marks(NamedTuple):
    """The marks before and after reasoning."""

    begin: str
    end: str


PAIRS = (
    Marks("<think>", "</think>"),                               # Qwen, DeepSeek, GLM, MiniMax
    Marks("[THINK]", "[/THINK]"),                               # Magistral
    Marks("<|START_THINKING|>", "<|END_THINKING|>"),            # Command A and R7B
    Marks("<seed:think>", "</seed:think>"),                     # Seed-OSS
    Marks("◁think▷", "◁/think▷"),                               # Kimi
    Marks("<|channel>thought", "<channel|>"),                   # Gemma 4
)
CHANNELS = Marks("<|channel|>", "<|message|>")
"""gpt-oss: each message of an answer has a header with its channel."""
CHANNEL_MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>",
                 "<|return|>")
HEADERS = (*CHANNEL_MARKS, "to=")
"""What a header of a message begins with, where the mark before it is in the prompt."""


def marks_of(codec: Codec | None) -> Marks | None:
    """The marks of a model's reasoning; None if its chat template has none."""
    template = codec.tokenizer.chat_template if codec is not None else None
    if not template:
        return None
    text = template if isinstance(template, str) else json.dumps(template, ensure_ascii=False)
    if all(mark in text for mark in CHANNELS):
        return CHANNELS
    return next((marks for marks in PAIRS if marks.end in text), None)


def is_open(prompt: str, marks: Marks) -> bool:
    """Whether a prompt ends with the mark of reasoning, so that the answer continues it. Marks in
    its messages, which a user may have written, open nothing."""
    return marks != CHANNELS and prompt.rstrip().endswith(marks.begin)


class ReasoningReader:
    """Splits a text, while it is written, into reasoning and the rest.

    Args:
        marks: The model's marks.
        inside: Whether the prompt has opened the reasoning already.
    """

    def __init__(self, marks: Marks, inside: bool) -> None:
        self.marks, self._held = marks, ""
        self._state = "inside" if inside else "before"
        self._begun = False

    def push(self, text: str, last: bool) -> tuple[str, str]:
        """The reasoning and the rest that are certain; at the end of the text, everything."""
        self._held += text
        if self._state == "before":
            self._open(last)
        reasoning = self._reasoning(last) if self._state == "inside" else ""
        if self._state == "between":                # blank lines between the two belong to neither
            self._held = self._held.lstrip()
            self._state = "after" if self._held else "between"
        rest = ""
        if self._state == "after":
            rest, self._held = self._held, ""
        return reasoning, rest

    def _open(self, last: bool) -> None:
        """Whether the text begins with reasoning, as soon as that is certain."""
        start = self._held.lstrip()
        if start.startswith(self.marks.begin):
            self._held, self._state = start[len(self.marks.begin) :], "inside"
        elif last or not self.marks.begin.startswith(start):
            self._state = "after"

    def _reasoning(self, last: bool) -> str:
        place = self._held.find(self.marks.end)
        if place >= 0:
            reasoning, self._held = self._held[:place], self._held[place + len(self.marks.end) :]
            self._state = "between"
            return self._trimmed(reasoning.rstrip())
        if last:
            reasoning, self._held = self._held, ""
            return self._trimmed(reasoning.rstrip())
        cut = len(self._held) - _overlap(self._held, self.marks.end)
        cut = len(self._held[:cut].rstrip())        # blanks before the end mark are left out
        reasoning, self._held = self._held[:cut], self._held[cut:]
        return self._trimmed(reasoning)

    def _trimmed(self, reasoning: str) -> str:
        """Reasoning without blank lines at its beginning."""
        reasoning = reasoning if self._begun else reasoning.lstrip()
        self._begun = self._begun or bool(reasoning)
        return reasoning


class ChannelReader:
    """Reads the messages of gpt-oss: the channel "analysis" is reasoning, messages to a function
    are calls, all others are the answer."""

    def __init__(self) -> None:
        self._held, self._header, self._body = "", True, ""
        self._kind, self._name = "text", ""

    def push(self, text: str, last: bool) -> tuple[str, str, list[Call]]:
        """The reasoning, the answer and the calls that are certain."""
        self._held += text
        reasoning, answer, calls = "", "", list[Call]()
        while True:
            if self._header and not self._read_header(last):
                break
            ends = re.search(r"<\|(?:end|call|return|start|channel)\|>", self._held)
            cut = len(self._held) if last else len(self._held) - max(
                _overlap(self._held, mark) for mark in CHANNEL_MARKS)
            new = self._held[: ends.start() if ends else cut]
            self._held = self._held[len(new) :]
            if self._kind == "call":
                self._body += new
            elif self._kind == "analysis":
                reasoning += new
            else:
                answer += new
            if self._kind == "call" and (ends or last):
                call = _call(self._name, self._body)
                calls += [call] if call else []
                answer += "" if call else self._body        # invalid JSON stays text
                self._body = ""
            if not ends:
                break
            self._header = True
            closes = ends[0] in ("<|end|>", "<|call|>", "<|return|>")
            self._held = self._held[len(ends[0]) if closes else 0 :]
        return reasoning, answer, calls

    def _read_header(self, last: bool) -> bool:
        """Remove a message's header, if it is complete."""
        start = self._held.lstrip()
        if not start:
            return False
        if not start.startswith(HEADERS):
            if not last and any(mark.startswith(start) for mark in HEADERS):
                return False
            self._header, self._kind = False, "text"        # no header: the answer itself
            return True
        head, mark, body = start.partition(CHANNELS.end)
        if not mark:
            if last:
                self._held = ""
            return False
        recipient = re.search(r"to=functions\.([\w.-]+)", head)
        self._name = recipient[1] if recipient else ""
        analysis = "<|channel|>analysis" in head
        self._kind = "call" if recipient else "analysis" if analysis else "text"
        self._held, self._header = body, False
        return True


def _call(name: str, body: str) -> Call | None:
    try:
        arguments = json.loads(body or "{}")
    except (ValueError, RecursionError):
        return None
    return (name, arguments) if isinstance(arguments, dict) else None


def _overlap(text: str, mark: str) -> int:
    """How many characters at the end of a text may be the beginning of a mark."""
    sizes = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(mark[:size])), 0)
