"""One request's way through the scheduler, and what it is told: whole, or as events."""

from __future__ import annotations

import asyncio
import codecs
import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from fastapi import Request

from draftproof.engine.engine import Completion
from draftproof.engine.sequence import SequenceState
from draftproof.errors import DraftproofError, Unavailable
from draftproof.model.tokenizer import Codec
from draftproof.server.problems import problem
from draftproof.server.scheduler import Progress, Scheduler, Ticket, Tree
from draftproof.server.schema import Chat
from draftproof.server.schema import Request as Asked
from draftproof.server.tools import CallReader, Form


class Service(NamedTuple):
    """What all answers share. timeout: seconds that a request may take, or None."""

    scheduler: Scheduler
    codec: Codec | None
    model: str
    timeout: float | None


class Answer:
    """The samples of one or more prompts. form: of tool calls, if they are to be read."""

    def __init__(
        self, service: Service, asked: Asked, prompts: Sequence[Sequence[SequenceState]],
        form: Form | None = None,
    ) -> None:  # fmt: skip
        self.service, self.asked, self.chat = service, asked, isinstance(asked, Chat)
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created, self.begun = int(time.time()), time.perf_counter()
        self.kind = "chat.completion" if self.chat else "text_completion"
        if self.chat and asked.stream:
            self.kind += ".chunk"
        self.size = sum(map(len, prompts))
        self.prompt_tokens = sum(len(rows[0].prompt) for rows in prompts)
        self.logprobs = prompts[0][0].params.sampling.logprobs
        each = [row.prompt for rows in prompts for row in rows]
        self.offsets = [Offsets(service.codec, prompt) for prompt in each] if self.logprobs else []
        tools = asked.tools or () if isinstance(asked, Chat) else ()
        self.readers = [CallReader(form, tools) if form else None for _ in range(self.size)]
        self.begun_samples, self.done = set[int](), list[Completion]()
        self.news: asyncio.Queue[tuple[int, Progress]] = asyncio.Queue()
        how = bool(asked.stream), asked.draftproof.trees
        self.tickets = [Ticket(rows, partial(self._hear, place * len(rows)), *how)
                        for place, rows in enumerate(prompts)]

    def start(self) -> None:
        """Queue every prompt, or none."""
        try:
            for ticket in self.tickets:
                self.service.scheduler.submit(ticket, self.asked.draftproof.drafter)
        except DraftproofError:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Nobody listens any more: its rows are free before the next round."""
        for ticket in self.tickets:
            ticket.cancelled = True

    def _hear(self, first: int, progress: Progress) -> None:
        self.news.put_nowait((first + progress.sample, progress))

    async def progress(self, request: Request) -> AsyncIterator[tuple[int, Progress]]:
        """News until all samples are done. Raises Unavailable where one failed or took too long."""
        timeout = self.service.timeout
        try:
            while len(self.done) < self.size:
                if timeout is not None and time.perf_counter() - self.begun > timeout:
                    raise Unavailable(f"the request took more than {timeout:g} seconds", 504)
                try:
                    index, progress = await asyncio.wait_for(self.news.get(), 0.5)
                except TimeoutError:
                    if await request.is_disconnected():
                        return
                    continue
                if progress.completion is not None:
                    self.done.append(progress.completion.checked())
                yield index, progress
        finally:
            self.cancel()

    async def whole(self, request: Request) -> dict[str, Any]:
        """The answer in one piece."""
        news = {index: progress async for index, progress in self.progress(request)}
        choices = [self._choice(index, progress) for index, progress in sorted(news.items())]
        return self._body(choices, usage=self._usage())

    async def events(self, request: Request) -> AsyncIterator[str]:
        """The answer as server-sent events: a chunk for each round that brought something."""
        try:
            async for index, progress in self.progress(request):
                asked = "draftproof" in self.asked.model_fields_set
                seen = {"draftproof": self._seen(progress)} if asked else {}
                yield _event(self._body([self._choice(index, progress)], **seen))
            if self.asked.stream_options and self.asked.stream_options.include_usage:
                yield _event(self._body([], usage=self._usage()))
        except DraftproofError as error:
            failed = problem(str(error), getattr(error, "status", 500), error.code)
            yield _event(json.loads(bytes(failed.body)))
        yield "data: [DONE]\n\n"

    def _choice(self, index: int, progress: Progress) -> dict[str, Any]:
        """What is new of a sample: all of it, or a chunk."""
        done, reader, calls = progress.completion, self.readers[index], list[dict[str, Any]]()
        text = "".join(piece for piece, _ in progress.pieces)
        reason = done.finish_reason if done else None
        if reader is not None:
            text, calls = reader.push(text, last=done is not None)
            reason = "tool_calls" if calls and reason == "stop" else reason
        said: dict[str, Any] = {"text": text}
        if self.chat:
            role = {} if index in self.begun_samples else {"role": "assistant"}
            self.begun_samples.add(index)
            tools = {"tool_calls": calls} if calls else {}
            message = {**role, "content": text or (None if calls else ""), **tools}
            said = {"delta" if self.asked.stream else "message": message}
        scores = self._scores(progress, index) if self.logprobs and progress.tokens else None
        return {"index": index, **said, "logprobs": scores, "finish_reason": reason}

    def _seen(self, progress: Progress) -> dict[str, Any]:
        """How new text came about, for the page."""
        tree = {"tree": self._drawn(progress.tree)} if progress.tree else {}
        return {"pieces": progress.pieces, "tokens": len(progress.tokens), **tree}

    def _drawn(self, tree: Tree) -> list[tuple[str, int, bool, str]]:
        """A draft's nodes with their text; those that are not there are left out."""
        places = [place for place, (token, *_) in enumerate(tree) if token >= 0]
        number = {place: count for count, place in enumerate(places)}
        return [(self._text(tree[place][0]), number.get(tree[place][1], -1), *tree[place][2:])
                for place in places]

    def _body(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {"id": self.id, "object": self.kind, "created": self.created,
                "model": self.service.model, "choices": choices, **more}

    def _scores(self, progress: Progress, index: int | None = None) -> dict[str, Any]:
        """Of new tokens, and of the likeliest in their places.

        Args:
            progress: The new tokens.
            index: The sample among those of all prompts; by default the one of the first prompt.
        """
        codec, tokens, scores = self.service.codec, progress.tokens, progress.logprobs
        top = progress.top or [[]] * len(tokens)
        if self.chat:
            def described(token: int, score: float) -> dict[str, Any]:
                data = codec.token_bytes[token] if codec else str(token).encode()
                return {"token": self._text(token), "logprob": score, "bytes": list(data)}

            return {"content": [
                {**described(token, score), "top_logprobs": [described(*pair) for pair in likely]}
                for token, score, likely in zip(tokens, scores, top, strict=True)]}
        offsets = self.offsets[progress.sample if index is None else index]
        named = [self._named([(token, score), *likely])
                 for token, score, likely in zip(tokens, scores, top, strict=True)]
        return {"tokens": [self._text(token) for token in tokens], "token_logprobs": scores,
                "text_offset": [offsets.add(token) for token in tokens],
                "top_logprobs": named if progress.top else None}

    def _named(self, scored: Sequence[tuple[int, float]]) -> dict[str, float]:
        """Log-probabilities by text; a second token of the same text is named by its id."""
        named = dict[str, float]()
        for token, score in dict(scored).items():
            text = self._text(token)
            named[f"token_id:{token}" if text in named else text] = score
        return named

    def _text(self, token: int) -> str:
        """A token by itself; a part of a character by its bytes, as OpenAI names it."""
        codec = self.service.codec
        return codec.token_bytes.text(token) if codec else str(token)

    def _usage(self) -> dict[str, Any]:
        """What was read and written; and drafted, under OpenAI's names."""
        new = sum(len(one.tokens) for one in self.done)
        accepted = sum(one.stats.accepted for one in self.done)
        rejected = sum(one.stats.drafted for one in self.done) - accepted
        details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": new,
                "total_tokens": self.prompt_tokens + new, "completion_tokens_details": details}


class Offsets:
    """Where each token of an answer begins in its text: in the character that it is a part of.

    Args:
        codec: The model's tokenizer, or None: a token is as long as its number then.
        prompt: May end inside a character, which the answer completes.
    """

    def __init__(self, codec: Codec | None, prompt: Sequence[int]) -> None:
        self._codec, self._length = codec, 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token in prompt[-4:] if codec else ():
            self._decoder.decode(codec.token_bytes[token] if codec else b"")

    def add(self, token: int) -> int:
        """The offset of the next token, in characters."""
        start = self._length
        if self._codec is None:
            self._length += len(str(token))
        elif token not in self._codec.special_tokens:
            self._length += len(self._decoder.decode(self._codec.token_bytes[token]))
        return start


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
