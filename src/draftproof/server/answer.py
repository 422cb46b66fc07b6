"""One request's way through the scheduler, and what it is told: whole, or as events."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fastapi import Request
from fastapi.responses import JSONResponse

from draftproof.engine.engine import Completion
from draftproof.engine.sequence import SequenceState
from draftproof.errors import DraftproofError, Unavailable
from draftproof.model.tokenizer import Codec
from draftproof.server.metrics import Metrics
from draftproof.server.scheduler import Progress, Scheduler, Ticket, Tree
from draftproof.server.tools import Call, CallReader, Form

Hears = Callable[[Any], None]
PATIENCE = 0.5
"""Seconds between looks at whether the client of a whole answer is still there."""


class Wish(NamedTuple):
    """What an answer is to be beside its text. form: of tool calls, if they are to be read.
    drafter, trees: as the page asks."""

    chat: bool
    logprobs: bool = False
    stream: bool = False
    form: Form | None = None
    drafter: str = ""
    trees: bool = False


class Mailbox:
    """What the decoding thread tells the event loop, which wakes once for all that is there."""

    def __init__(self) -> None:
        self._letters, self._called = deque[tuple[Hears, Any]](), False

    def put(self, loop: asyncio.AbstractEventLoop, hears: Hears, news: Any) -> None:
        """Have the loop call `hears(news)`."""
        self._letters.append((hears, news))
        if not self._called:
            self._called = True
            try:
                loop.call_soon_threadsafe(self._empty)
            except RuntimeError:                        # the loop is closed: all are gone
                self._letters.clear()
                self._called = False

    def _empty(self) -> None:
        self._called = False                                # before: what comes now calls again
        while self._letters:
            hears, news = self._letters.popleft()
            hears(news)


class Service(NamedTuple):
    """What all answers share. timeout: seconds that a request may take, or None."""

    scheduler: Scheduler
    metrics: Metrics
    codec: Codec | None
    model: str
    timeout: float | None
    mailbox: Mailbox


@dataclass
class Answer:
    """The samples of one or more prompts: their tickets, and what came of them."""

    service: Service
    wish: Wish
    prompts: list[list[SequenceState]]
    news: asyncio.Queue[tuple[int, Progress]] = field(default_factory=asyncio.Queue)
    done: dict[int, Completion] = field(default_factory=dict)
    tickets: list[Ticket] = field(default_factory=list)
    readers: dict[int, CallReader] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.id = f"{'chatcmpl' if self.wish.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created, self.begun = int(time.time()), time.perf_counter()
        self.size = sum(map(len, self.prompts))

    def start(self) -> None:
        """Queue every prompt, or none."""
        loop, first, metrics = asyncio.get_running_loop(), 0, self.service.metrics
        try:
            for rows in self.prompts:
                self.tickets.append(self.service.scheduler.submit(
                    rows, self._listener(loop, first), drafter=self.wish.drafter,
                    trees=self.wish.trees,
                ))
                first += len(rows)
        except DraftproofError:
            self.cancel()
            raise
        metrics.add(metrics.prompt_tokens, sum(len(rows[0].prompt) for rows in self.prompts))

    def cancel(self) -> None:
        """Nobody listens any more."""
        for ticket in self.tickets:
            self.service.scheduler.cancel(ticket)

    def _listener(
        self, loop: asyncio.AbstractEventLoop, first: int
    ) -> Callable[[Progress], None]:
        """Tells the event loop of every round; of an answer in one piece, when it has ended: a loop
        that wakes takes the processor from the round."""
        held = list[tuple[int, Progress]]()

        def listen(progress: Progress) -> None:
            held.append((first + progress.sample, progress))
            if self.wish.stream or progress.completion is not None:
                self.service.mailbox.put(loop, self._hear, held[:])
                held.clear()

        return listen

    def _hear(self, news: list[tuple[int, Progress]]) -> None:
        for one in news:
            self.news.put_nowait(one)

    async def progress(
        self, request: Request | None = None
    ) -> AsyncIterator[tuple[int, Progress]]:
        """News until all samples are done. Raises Unavailable where one failed, or took too
        long."""
        metrics, timeout, last = self.service.metrics, self.service.timeout, dict[int, float]()
        try:
            while len(self.done) < self.size:
                try:
                    index, progress = await asyncio.wait_for(self.news.get(), PATIENCE)
                except TimeoutError:
                    if request is not None and await request.is_disconnected():
                        return
                    if timeout is not None and time.perf_counter() - self.begun > timeout:
                        raise Unavailable(
                            f"the request took more than {timeout:g} seconds", 504
                        ) from None
                    continue
                now = progress.at
                if index not in last:
                    metrics.seen(metrics.first_token, now - self.begun)
                elif progress.new:
                    metrics.seen(metrics.between, (now - last[index]) / len(progress.new))
                last[index], done = now, progress.completion
                if done is not None:
                    self.done[index] = done
                    metrics.ended_row(done.stats, len(done.tokens), done.finish_reason)
                    if done.error is not None:
                        raise done.error
                yield index, progress
            metrics.seen(metrics.latency, time.perf_counter() - self.begun)
        finally:
            self.cancel()

    async def whole(self, request: Request) -> dict[str, Any]:
        """The answer in one piece."""
        news: dict[int, list[Progress]] = {}
        async for index, progress in self.progress(request):
            news.setdefault(index, []).append(progress)
        choices = []
        for index, done in sorted(self.done.items()):
            text, calls, reason = self._read(index, done.text, done.finish_reason)
            said: dict[str, Any] = {"text": text}
            if self.wish.chat:
                told = {"tool_calls": [call.told() for call in calls]} if calls else {}
                content = text or (None if calls else "")
                said = {"message": {"role": "assistant", "content": content, **told}}
            choices.append(self._choice(index, said, reason, news[index]))
        kind = "chat.completion" if self.wish.chat else "text_completion"
        return self._body(choices, kind, usage=self._usage())

    async def events(self, with_usage: bool) -> AsyncIterator[str]:
        """The answer as server-sent events: a chunk for each round that brought text."""
        kind = "chat.completion.chunk" if self.wish.chat else "text_completion"
        begun = set[int]()
        try:
            async for index, progress in self.progress():
                if self.wish.chat and index not in begun:
                    begun.add(index)
                    role = {"delta": {"role": "assistant", "content": ""}}
                    yield _event(self._body([self._choice(index, role, None, [])], kind))
                done = progress.completion
                text = "".join(piece for piece, _ in progress.pieces)
                before = self.readers[index].calls if index in self.readers else 0
                text, calls, reason = self._read(index, text, done.finish_reason if done else None)
                said: dict[str, Any] = {"text": text}
                if self.wish.chat:
                    told = [call.told(before + place) for place, call in enumerate(calls)]
                    tools = {"tool_calls": told} if calls else {}
                    said = {"delta": ({"content": text} if text else {}) | tools}
                if text or calls or progress.tree or (self.wish.logprobs and progress.new):
                    choice = self._choice(index, said, None, [progress])
                    yield _event(self._body([choice], kind, draftproof=self._seen(progress)))
                if done is not None:
                    last: dict[str, Any] = {"delta": {}} if self.wish.chat else {"text": ""}
                    yield _event(self._body([self._choice(index, last, reason, [])], kind))
            if with_usage:
                yield _event(self._body([], kind, usage=self._usage()))
        except DraftproofError as error:
            body = problem(str(error), getattr(error, "status", 500)).body
            yield _event(json.loads(bytes(body)))
        yield "data: [DONE]\n\n"

    def _read(
        self, index: int, text: str, ended: str | None
    ) -> tuple[str, list[Call], str | None]:
        """What new text says and calls, and how the sample ended, if it did."""
        if self.wish.form is None:
            return text, [], ended
        reader = self.readers.setdefault(index, CallReader(self.wish.form))
        text, calls = reader.push(text, last=ended is not None)
        return text, calls, "tool_calls" if ended == "stop" and reader.calls else ended

    def _seen(self, progress: Progress) -> dict[str, Any]:
        """How new text came about, for the page."""
        tree = {"tree": self._drawn(progress.tree)} if progress.tree else {}
        return {"pieces": progress.pieces, "tokens": len(progress.new), **tree}

    def _drawn(self, tree: Tree) -> list[tuple[str, int, bool, str]]:
        """A draft's nodes with their text; those that are not there are left out."""
        places = [place for place, (token, *_) in enumerate(tree) if token >= 0]
        number = {place: count for count, place in enumerate(places)}
        kept = [tree[place] for place in places]
        texts = self._texts([token for token, *_ in kept])
        pairs = zip(texts, kept, strict=True)
        return [(text, number.get(node[1], -1), *node[2:]) for text, node in pairs]

    def _body(self, choices: list[dict[str, Any]], kind: str, **more: Any) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created,
                "model": self.service.model, "choices": choices, **more}

    def _choice(
        self, index: int, said: dict[str, Any], reason: str | None, news: Sequence[Progress]
    ) -> dict[str, Any]:
        return {"index": index, **said, "logprobs": self._scores(news), "finish_reason": reason}

    def _scores(self, news: Sequence[Progress]) -> dict[str, Any] | None:
        """Of new tokens, and of the likeliest in their places."""
        tokens = [token for one in news for token in one.new]
        if not self.wish.logprobs or not tokens:
            return None
        texts = self._texts(tokens)
        scores = [score for one in news for score in one.logprobs]
        top = [[(self._texts([token])[0], score) for token, score in likely]
               for one in news for likely in one.top] or [[]] * len(texts)
        both = list(zip(zip(texts, scores, strict=True), top, strict=True))
        if not self.wish.chat:
            offsets = [sum(map(len, texts[:place])) for place in range(len(texts))]
            named = [_by_text([*likely, own]) for own, likely in both]
            return {"tokens": texts, "token_logprobs": scores,
                    "top_logprobs": named if any(top) else None, "text_offset": offsets}
        content = []
        for own, likely in both:
            one, *others = ({"token": text, "logprob": score, "bytes": list(text.encode())}
                            for text, score in (own, *likely))
            content.append({**one, "top_logprobs": others})
        return {"content": content}

    def _texts(self, tokens: Sequence[int]) -> list[str]:
        codec = self.service.codec
        return [codec.tokenizer.decode([token]) if codec else str(token) for token in tokens]

    def _usage(self) -> dict[str, Any]:
        """What was read and written; and drafted, under OpenAI's names."""
        done = self.done.values()
        prompt = sum(len(rows[0].prompt) for rows in self.prompts)
        new = sum(len(one.tokens) for one in done)
        accepted = sum(one.stats.accepted for one in done)
        rejected = sum(one.stats.drafted for one in done) - accepted
        details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new,
                "completion_tokens_details": details}


def problem(message: str, status: int) -> JSONResponse:
    """An error as OpenAI's clients read it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    headers = {"Retry-After": "1"} if status in (429, 503) else None
    said = message.encode(errors="replace").decode()
    error = {"message": said, "type": kind, "param": None, "code": None}
    return JSONResponse({"error": error}, status, headers)


def _by_text(scores: Sequence[tuple[str, float]]) -> dict[str, float]:
    """By text; of tokens with the same one, the first."""
    kept: dict[str, float] = {}
    for text, score in scores:
        kept.setdefault(text, score)
    return kept


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
