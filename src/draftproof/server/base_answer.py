"""The samples of an HTTP request while they are written. Each API has its own format for them."""

from __future__ import annotations

import asyncio
import json
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import fastapi

from draftproof.engine.engine import Completion
from draftproof.errors import DraftproofError, Unavailable
from draftproof.requests.request import Request, Update
from draftproof.server.call_forms import ToolCall
from draftproof.server.hosted_model import HostedModel
from draftproof.server.output_reader import OutputReader

if TYPE_CHECKING:
    from draftproof.tokenizer.codec import Codec


class Piece(NamedTuple):
    """The new part of a sample.

    Attributes:
        number: Its index among the samples of all prompts.
        update: The scheduler's update.
        reasoning: New reasoning.
        text: New text of the answer.
        calls: Tool calls in OpenAI's format.
        finish_reason: OpenAI's name of why it ended; None while it runs.
    """

    number: int
    update: Update
    reasoning: str
    text: str
    calls: list[ToolCall]
    finish_reason: str | None


class Usage(NamedTuple):
    """Tokens of a request."""

    prompt: int
    new: int
    reasoning: int
    accepted: int
    rejected: int


class BaseAnswer(ABC):
    """The samples of one or more requests, each of one prompt."""

    def __init__(
        self, hosted: HostedModel, requests: list[Request], readers: Sequence[OutputReader],
        stream: bool | None, drafter: str,
    ) -> None:  # fmt: skip
        """
        Args:
            hosted: The model that writes.
            requests: One for each prompt.
            readers: They split each sample's text; empty if all of it is the answer.
            stream: Whether the client wants every update.
            drafter: "" or "none".
        """
        self.hosted, self.stream, self.drafter = hosted, bool(stream), drafter
        self.created, self.begun = int(time.time()), time.perf_counter()
        self.requests, self.readers = requests, readers
        self.size = sum(len(request.sequences) for request in self.requests)
        self.done, self.updates = list[Completion](), asyncio.Queue[Update | None]()
        self._reasoned = 0                              # tokens

    @property
    def tickets(self) -> list[Request]:
        """The requests, by their former name."""
        return self.requests

    @property
    def codec(self) -> Codec | None:
        """The model's tokenizer, or None."""
        return self.hosted.engine.codec

    def start(self) -> None:
        """Queue all requests, or none."""
        try:
            for request in self.requests:
                put = self.updates.put_nowait
                self.hosted.queue.submit(request, put, self.stream, self.drafter)
        except DraftproofError:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Abort the requests: their rows are free before the next round."""
        for request in self.requests:
            self.hosted.queue.abort(request, self.drafter)

    @abstractmethod
    async def complete(self, request: fastapi.Request) -> dict[str, object]:
        """The answer in one piece."""

    @abstractmethod
    def events(self, request: fastapi.Request) -> AsyncIterator[str]:
        """The answer as server-sent events."""

    async def pieces(self, request: fastapi.Request) -> AsyncIterator[Piece]:
        """New parts, until all samples are done or the client has left.

        Raises:
            Unavailable: A request failed or took too long.
        """
        async for index, update in self._progress(request):
            yield self._taken_apart(index, update)

    async def _progress(self, request: fastapi.Request) -> AsyncIterator[tuple[int, Update]]:
        """Updates with the index of their sample. Whatever ends the stream early puts None into the
        queue, so this is the only thing to wait for."""
        timeout, loop = self.hosted.limits.timeout, asyncio.get_running_loop()
        watcher, timer = loop.create_task(self._watch(request)), None
        if timeout is not None:
            left = timeout - (time.perf_counter() - self.begun)
            timer = loop.call_later(left, self.updates.put_nowait, None)
        try:
            while len(self.done) < self.size:
                update = await self.updates.get()
                if update is None:
                    if watcher.done():
                        return
                    raise Unavailable(f"the request took more than {timeout:g} seconds", 504)
                if update.completion is not None:
                    self.done.append(update.completion.checked())
                n = len(update.request.sequences)
                yield update.request.index * n + update.sample, update
        finally:
            watcher.cancel()
            if timer is not None:
                timer.cancel()
            self.cancel()

    async def _watch(self, request: fastapi.Request) -> None:
        """Wait until the client has left."""
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.updates.put_nowait(None)

    def _taken_apart(self, index: int, update: Update) -> Piece:
        done = update.completion
        reason = done.finish_reason if done else None
        if not self.readers:
            return Piece(index, update, "", update.text, [], reason)
        reasoning, text, calls = self.readers[index].push(update.text, last=done is not None)
        if reasoning and self.stream:
            self._reasoned += len(update.tokens)
        if calls and reason == "stop":
            reason = "tool_calls"
        return Piece(index, update, reasoning, text, calls, reason)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(request.prompt) for request in self.requests)

    def usage(self) -> Usage:
        """Tokens that were read, written and drafted so far."""
        accepted = sum(done.stats.accepted for done in self.done)
        return Usage(
            self.prompt_tokens, sum(len(done.tokens) for done in self.done), self._reasoned,
            accepted, sum(done.stats.drafted for done in self.done) - accepted,
        )  # fmt: skip

    def count_reasoning(self, text: str) -> None:
        """Count the reasoning tokens of an answer that is not streamed."""
        if text and self.codec is not None:
            self._reasoned += len(self.codec.encode(text, special=False))


def event(body: dict[str, object], name: str = "") -> str:
    """A server-sent event."""
    data = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    return f"event: {name}\ndata: {data}\n\n" if name else f"data: {data}\n\n"
