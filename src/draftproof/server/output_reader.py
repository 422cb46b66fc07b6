"""Split a sample's text while it is written: reasoning, answer, and tool calls."""

from __future__ import annotations

from collections.abc import Sequence

from draftproof.server.call_forms import ToolCall
from draftproof.server.reasoning import (
    CHANNEL_MARKS,
    CHANNELS,
    ChannelReader,
    Marks,
    ReasoningReader,
)
from draftproof.server.schema import Tool
from draftproof.server.tools import CallReader, Form, as_client


class OutputReader:
    """Splits the text of one sample."""

    def __init__(
        self, marks: Marks | None, inside: bool, form: Form | None, tools: Sequence[Tool] = (), *,
        shown: bool = True, splits: bool = True,
    ) -> None:  # fmt: skip
        """
        Args:
            marks: The model's marks of reasoning, or None.
            inside: Whether the prompt has opened the reasoning.
            form: How the model writes calls; None if no tools are offered.
            tools: The tools that are offered.
            shown: Whether the client wants the reasoning.
            splits: Whether reasoning is separated; otherwise it is part of the answer.
        """
        self.channels = ChannelReader() if marks == CHANNELS else None
        pair = marks if marks != CHANNELS else None
        self._reasoning = ReasoningReader(pair, inside) if pair is not None else None
        self._calls = CallReader(form, tools) if form and not self.channels else None
        self._shown, self._splits, self._count = shown, splits, 0
        parts = [*(pair or ())] + ([form.begin, form.separator, form.between or "", form.end]
                                   if form is not None else [])
        self.marks = "".join(CHANNEL_MARKS if self.channels else parts)
        """Texts with the names of special tokens that must be shown."""

    def push(self, text: str, last: bool) -> tuple[str, str, list[ToolCall]]:
        """The new reasoning, text of the answer, and tool calls in OpenAI's format.

        Args:
            text: What the model has written since the last call.
            last: Whether it has ended. Before, what may still become a mark is held back.
        """
        if self.channels is not None:
            reasoning, answer, read = self.channels.push(text, last)
            calls = [as_client(self._count + index, call) for index, call in enumerate(read)]
            self._count += len(calls)
            if not self._splits:
                return "", reasoning + answer, calls
            return reasoning if self._shown else "", answer, calls
        reasoning, answer, calls = "", text, []
        if self._reasoning is not None:
            reasoning, answer = self._reasoning.push(text, last)
        if self._calls is not None:
            answer, calls = self._calls.push(answer, last)
        return reasoning if self._shown else "", answer, calls
