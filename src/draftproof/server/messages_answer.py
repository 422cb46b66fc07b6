"""Answers in the format of Anthropic's messages."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Iterator

import fastapi

from draftproof.errors import DraftproofError
from draftproof.requests.request import Request
from draftproof.server.base_answer import BaseAnswer, Piece, event
from draftproof.server.hosted_model import HostedModel
from draftproof.server.messages_request import MessagesBody
from draftproof.server.output_reader import OutputReader
from draftproof.server.problems import MESSAGES, error_body, status_of

STOPS = {"length": "max_tokens", "tool_calls": "tool_use"}
"""Anthropic's stop reasons for OpenAI's finish reasons; any other is the end of the turn."""


class MessagesAnswer(BaseAnswer):
    """Blocks of thinking, text and tool use."""

    def __init__(
        self, hosted: HostedModel, body: MessagesBody, requests: list[Request],
        readers: list[OutputReader],
    ) -> None:  # fmt: skip
        super().__init__(hosted, requests, readers, body.stream, body.draftproof.drafter)
        self.id = f"msg_{uuid.uuid4().hex}"
        self._open, self._count = "", 0                 # the current block; number of blocks

    async def complete(self, request: fastapi.Request) -> dict[str, object]:
        blocks, reason = list[dict[str, object]](), "end_turn"
        async for piece in self.pieces(request):
            reason = self._reason(piece)
            if piece.reasoning:
                blocks.append({"type": "thinking", "thinking": piece.reasoning, "signature": ""})
            if piece.text:
                blocks.append({"type": "text", "text": piece.text})
            blocks += [{"type": "tool_use", "id": call["id"], "name": call["function"]["name"],
                        "input": json.loads(call["function"]["arguments"])}
                       for call in piece.calls]
        return self._message(blocks, reason)

    async def events(self, request: fastapi.Request) -> AsyncIterator[str]:
        """Events of blocks: each begins, grows and ends before the next."""
        try:
            yield _told("message_start", message=self._message([], None))
            reason = "end_turn"
            async for piece in self.pieces(request):
                reason = self._reason(piece)
                for told in self._grow(piece):
                    yield told
            for told in self._close():
                yield told
            delta = {"stop_reason": reason, "stop_sequence": self._stop_string()}
            yield _told("message_delta", delta=delta, usage=self._usage())
            yield _told("message_stop")
        except DraftproofError as error:
            yield event(error_body(str(error), status_of(error), None, MESSAGES), "error")

    def _grow(self, piece: Piece) -> Iterator[str]:
        if piece.reasoning:
            yield from self._begin("thinking", {"thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": piece.reasoning})
        if piece.text:
            yield from self._begin("text", {"text": ""})
            yield self._delta({"type": "text_delta", "text": piece.text})
        for call in piece.calls:
            yield from self._close()
            yield from self._begin("tool_use", {
                "id": call["id"], "name": call["function"]["name"], "input": {}})
            arguments = call["function"]["arguments"]
            yield self._delta({"type": "input_json_delta", "partial_json": arguments})

    def _begin(self, kind: str, fields: dict[str, object]) -> Iterator[str]:
        if self._open == kind:
            return
        yield from self._close()
        self._open = kind
        yield _told("content_block_start", index=self._count,
                    content_block={"type": kind, **fields})

    def _delta(self, delta: dict[str, object]) -> str:
        return _told("content_block_delta", index=self._count, delta=delta)

    def _close(self) -> Iterator[str]:
        if self._open:
            if self._open == "thinking":
                yield self._delta({"type": "signature_delta", "signature": ""})
            yield _told("content_block_stop", index=self._count)
            self._open, self._count = "", self._count + 1

    def _stop_string(self) -> str | None:
        return self.requests[0].sequences[0].stop_string

    def _reason(self, piece: Piece) -> str:
        if self._stop_string() is not None and piece.finish_reason == "stop":
            return "stop_sequence"
        return STOPS.get(piece.finish_reason or "", "end_turn")

    def _message(self, blocks: list[dict[str, object]], reason: str | None) -> dict[str, object]:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self.hosted.name,
                "content": blocks, "stop_reason": reason,
                "stop_sequence": self._stop_string() if reason else None, "usage": self._usage()}

    def _usage(self) -> dict[str, object]:
        usage = self.usage()
        return {"input_tokens": usage.prompt, "output_tokens": usage.new,
                "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}


def _told(kind: str, **fields: object) -> str:
    return event({"type": kind, **fields}, kind)
