"""Answers in the format of OpenAI's Responses API: items of reasoning, text, and calls."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import fastapi

from draftproof.errors import DraftproofError
from draftproof.requests.request import Request
from draftproof.server.answer import logprobs_of
from draftproof.server.base_answer import BaseAnswer, Piece, event
from draftproof.server.call_forms import ToolCall
from draftproof.server.hosted_model import HostedModel
from draftproof.server.output_reader import OutputReader
from draftproof.server.response_store import Keep
from draftproof.server.responses_request import NamedFunction, ResponsesBody


class ResponsesAnswer(BaseAnswer):
    """One response. Items are streamed as they grow, and sent complete at their end."""

    def __init__(
        self, hosted: HostedModel, body: ResponsesBody, requests: list[Request],
        readers: list[OutputReader], keep: Keep | None,
    ) -> None:  # fmt: skip
        super().__init__(hosted, requests, readers, body.stream, body.draftproof.drafter)
        self.body, self.keep, self.id = body, keep, f"resp_{uuid.uuid4().hex}"
        self.items, self._sequence = list[dict[str, Any]](), 0
        self._open = False                              # whether the last item still grows
        self._finish: str | None = None
        self._scores = list[dict[str, object]]()        # of tokens whose text has not been sent

    async def complete(self, request: fastapi.Request) -> dict[str, object]:
        async for piece in self.pieces(request):
            self.count_reasoning(piece.reasoning)
            for _ in self._grow(piece):                 # events that are not sent
                pass
        for _ in self._close():
            pass
        return self._ended()

    async def events(self, request: fastapi.Request) -> AsyncIterator[str]:
        """Numbered events, each with a change."""
        yield self._told("response.created", response=self._response("in_progress"))
        yield self._told("response.in_progress", response=self._response("in_progress"))
        try:
            async for piece in self.pieces(request):
                for told in self._grow(piece):
                    yield told
            for told in self._close():
                yield told
            response = self._ended()
            yield self._told(f"response.{response['status']}", response=response)
        except DraftproofError as error:
            failed = {**self._response("failed"), "error": {
                "code": "server_error", "message": str(error)}}
            yield self._told("response.failed", response=failed)

    def _grow(self, piece: Piece) -> Iterator[str]:
        self._finish = piece.finish_reason
        if self.body.wants_logprobs:
            self._scores += logprobs_of(self.codec, piece.update)
        if piece.reasoning:
            yield from self._begin("reasoning")
            yield from self._add("reasoning_text", piece.reasoning)
        if piece.text:
            yield from self._begin("message")
            yield from self._add("output_text", piece.text)
        for call in piece.calls:
            yield from self._close()
            yield from self._call(call)

    def _begin(self, kind: str) -> Iterator[str]:
        """Extend an item of this kind; first complete an item of another kind."""
        if self._open and self.items[-1]["type"] == kind:
            return
        yield from self._close()
        item: dict[str, object] = {"id": f"{'rs' if kind == 'reasoning' else 'msg'}_"
                                      f"{uuid.uuid4().hex}", "type": kind, "status": "in_progress"}
        more: dict[str, object] = {"summary": []} if kind == "reasoning" else {"role": "assistant"}
        item |= more
        part = ({"type": "reasoning_text", "text": ""} if kind == "reasoning" else
                {"type": "output_text", "text": "", "annotations": [], "logprobs": []})
        self.items.append(item)
        self._open = True
        yield self._item("response.output_item.added", {**item, "content": []})
        item["content"] = [part]
        yield self._part("response.content_part.added", part=dict(part))

    def _add(self, kind: str, text: str) -> Iterator[str]:
        part = self.items[-1]["content"][0]
        part["text"] += text
        more = {"logprobs": self._scored(part)} if kind == "output_text" else {}
        yield self._part(f"response.{kind}.delta", delta=text, **more)

    def _scored(self, part: dict[str, Any]) -> list[dict[str, object]]:
        """Add the log-probabilities that have not been sent to a part; return them."""
        scores, self._scores = self._scores, []
        part["logprobs"] += scores
        return scores

    def _close(self) -> Iterator[str]:
        """Complete the current item."""
        if not self._open:
            return
        item, self._open = self.items[-1], False
        part = item["content"][0]
        item["status"] = "incomplete" if self._finish == "length" else "completed"
        more = {}
        if part["type"] == "output_text":
            self._scored(part)                          # of tokens without text, such as the end
            more = {"logprobs": part["logprobs"]}
        yield self._part(f"response.{part['type']}.done", text=part["text"], **more)
        yield self._part("response.content_part.done", part=part)
        yield self._item("response.output_item.done", item)

    def _call(self, call: ToolCall) -> Iterator[str]:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        item: dict[str, object] = {
            "id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "call_id": call["id"],
            "name": name, "arguments": "", "status": "in_progress",
        }  # fmt: skip
        self.items.append(item)
        yield self._item("response.output_item.added", dict(item))
        about = {"item_id": item["id"], "output_index": len(self.items) - 1}
        yield self._told("response.function_call_arguments.delta", delta=arguments, **about)
        yield self._told("response.function_call_arguments.done", arguments=arguments, name=name,
                         **about)
        item |= {"arguments": arguments, "status": "completed"}
        yield self._item("response.output_item.done", item)

    def _ended(self) -> dict[str, object]:
        """The finished response; stored if the request allows it."""
        cut = self._finish == "length"
        response = self._response("incomplete" if cut else "completed")
        if cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        if self.keep is not None and self._finish is not None:
            self.keep(response, self._messages())
        return response

    def _messages(self) -> list[dict[str, object]]:
        """The assistant's output, as a chat message."""
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        for item in self.items:
            if item["type"] == "message":
                message["content"] += item["content"][0]["text"]
            elif item["type"] == "reasoning":
                before = message.get("reasoning_content", "")
                message["reasoning_content"] = before + item["content"][0]["text"]
            else:
                message.setdefault("tool_calls", []).append({
                    "id": item["call_id"], "type": "function", "function": {
                        "name": item["name"], "arguments": item["arguments"]}})
        return [message]

    def _response(self, status: str) -> dict[str, object]:
        body, done = self.body, status not in ("in_progress", "failed")
        fields = {name: getattr(body, name) for name in (
            "instructions", "previous_response_id", "temperature", "top_p", "max_output_tokens",
            "metadata", "user")}
        sampling = self.requests[0].sampling
        fields |= {"temperature": sampling.temperature, "top_p": sampling.top_p,
                   "metadata": body.metadata or {}}
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
        choice: object = body.tool_choice or "auto"
        if isinstance(choice, NamedFunction):
            choice = choice.model_dump()
        text = body.text.model_dump(by_alias=True, exclude_none=True) if body.text else {}
        return {
            "id": self.id, "object": "response", "created_at": self.created, "status": status,
            "model": self.hosted.name, "output": list(self.items), "error": None,
            "incomplete_details": None, **fields, "tools": tools,
            "tool_choice": choice, "truncation": "disabled",
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "store": self.keep is not None, "background": False,
            "text": {"format": {"type": "text"}, **text},
            "reasoning": body.reasoning.model_dump() if body.reasoning else None,
            "usage": self._usage() if done else None,
        }  # fmt: skip

    def _usage(self) -> dict[str, object]:
        usage = self.usage()
        return {"input_tokens": usage.prompt, "input_tokens_details": {
                    "cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": usage.new,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning},
                "total_tokens": usage.prompt + usage.new}

    def _item(self, kind: str, item: dict[str, object]) -> str:
        return self._told(kind, output_index=len(self.items) - 1, item=item)

    def _part(self, kind: str, **fields: object) -> str:
        return self._told(kind, item_id=self.items[-1]["id"], output_index=len(self.items) - 1,
                          content_index=0, **fields)

    def _told(self, kind: str, **fields: object) -> str:
        self._sequence += 1
        return event({"type": kind, "sequence_number": self._sequence - 1, **fields}, kind)
