"""The answer to a request of HTTP: whole, or as events."""

from __future__ import annotations

import asyncio
import codecs
import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

import fastapi

from draftproof.engine.engine import Completion
from draftproof.engine.request import DraftTree, Request, Update
from draftproof.errors import DraftproofError, Unavailable
from draftproof.server.problems import problem
from draftproof.server.request_queue import RequestQueue
from draftproof.server.schema import Chat, GenerationBody
from draftproof.server.tools import CallReader, Form
from draftproof.tokenizer.codec import Codec


class Service(NamedTuple):
    """What all answers share. timeout: seconds that a request may take, or None."""

    queue: RequestQueue
    codec: Codec | None
    model: str
    timeout: float | None


class Answer:
    """The samples of one or more requests. form: of tool calls, if they are to be read."""

    def __init__(
        self, service: Service, asked: GenerationBody, requests: Sequence[Request],
        form: Form | None = None,
    ) -> None:  # fmt: skip
        self.service, self.asked, self.chat = service, asked, isinstance(asked, Chat)
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created, self.begun = int(time.time()), time.perf_counter()
        self.kind = "chat.completion" if self.chat else "text_completion"
        if self.chat and asked.stream:
            self.kind += ".chunk"
        self.requests = requests
        self.size = sum(len(request.sequences) for request in requests)
        self.prompt_tokens = sum(len(request.prompt) for request in requests)
        self.logprobs = requests[0].sampling.logprobs
        each = [request.prompt for request in requests for _ in request.sequences]
        self.offsets = [Offsets(service.codec, prompt) for prompt in each] if self.logprobs else []
        tools = asked.tools or () if isinstance(asked, Chat) else ()
        self.readers = [CallReader(form, tools) if form else None for _ in range(self.size)]
        self.begun_samples, self.done = set[int](), list[Completion]()
        self.updates: asyncio.Queue[Update] = asyncio.Queue()

    @property
    def tickets(self) -> Sequence[Request]:
        """The requests, by the attribute's former name."""
        return self.requests

    def start(self) -> None:
        """Queue every request, or none."""
        options, stream = self.asked.draftproof, bool(self.asked.stream)
        try:
            for request in self.requests:
                request.draft_trees = options.trees
                self.service.queue.submit(
                    request, self.updates.put_nowait, stream, options.drafter
                )
        except DraftproofError:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Nobody listens any more: its rows are free before the next round."""
        for request in self.requests:
            self.service.queue.abort(request, self.asked.draftproof.drafter)

    async def progress(self, request: fastapi.Request) -> AsyncIterator[tuple[int, Update]]:
        """Updates, each with the number of its choice, until all samples are done.

        Raises:
            Unavailable: A request failed or took too long.
        """
        timeout = self.service.timeout
        try:
            while len(self.done) < self.size:
                if timeout is not None and time.perf_counter() - self.begun > timeout:
                    raise Unavailable(f"the request took more than {timeout:g} seconds", 504)
                try:
                    update = await asyncio.wait_for(self.updates.get(), 0.5)
                except TimeoutError:
                    if await request.is_disconnected():
                        return
                    continue
                if update.completion is not None:
                    self.done.append(update.completion.checked())
                n = len(update.request.sequences)
                yield update.request.index * n + update.sample, update
        finally:
            self.cancel()

    async def whole(self, request: fastapi.Request) -> dict[str, Any]:
        """The answer in one piece."""
        updates = {index: update async for index, update in self.progress(request)}
        choices = [self._choice(index, update) for index, update in sorted(updates.items())]
        return self._body(choices, usage=self._usage())

    async def events(self, request: fastapi.Request) -> AsyncIterator[str]:
        """The answer as server-sent events: a chunk for each round that brought something."""
        try:
            async for index, update in self.progress(request):
                asked = "draftproof" in self.asked.model_fields_set
                seen = {"draftproof": self._seen(update)} if asked else {}
                yield _event(self._body([self._choice(index, update)], **seen))
            if self.asked.stream_options and self.asked.stream_options.include_usage:
                yield _event(self._body([], usage=self._usage()))
        except DraftproofError as error:
            failed = problem(str(error), getattr(error, "status", 500), error.code)
            yield _event(json.loads(bytes(failed.body)))
        yield "data: [DONE]\n\n"

    def _choice(self, index: int, update: Update) -> dict[str, Any]:
        """What is new of a sample: all of it, or a chunk."""
        done, reader, calls = update.completion, self.readers[index], list[dict[str, Any]]()
        text = update.text
        reason = done.finish_reason if done else None
        if reader is not None:
            text, calls = reader.push(text, last=done is not None)
            reason = "tool_calls" if calls and reason == "stop" else reason
        content: dict[str, Any] = {"text": text}
        if self.chat:
            role = {} if index in self.begun_samples else {"role": "assistant"}
            self.begun_samples.add(index)
            tools = {"tool_calls": calls} if calls else {}
            message = {**role, "content": text or (None if calls else ""), **tools}
            content = {"delta" if self.asked.stream else "message": message}
        scores = self._scores(update, index) if self.logprobs and update.tokens else None
        return {"index": index, **content, "logprobs": scores, "finish_reason": reason}

    def _seen(self, update: Update) -> dict[str, Any]:
        """How new text came about, for the page."""
        tree = {"tree": self._drawn(update.tree)} if update.tree else {}
        return {"pieces": update.pieces, "tokens": len(update.tokens), **tree}

    def _drawn(self, tree: DraftTree) -> list[tuple[str, int, bool, str]]:
        """A draft's nodes with their text; those that are not there are left out."""
        places = [place for place, (token, *_) in enumerate(tree) if token >= 0]
        number = {place: count for count, place in enumerate(places)}
        return [(self._text(tree[place][0]), number.get(tree[place][1], -1), *tree[place][2:])
                for place in places]

    def _body(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {"id": self.id, "object": self.kind, "created": self.created,
                "model": self.service.model, "choices": choices, **more}

    def _scores(self, update: Update, index: int | None = None) -> dict[str, Any]:
        """Of new tokens, and of the likeliest in their places.

        Args:
            update: The new tokens.
            index: The sample among those of all prompts; by default the one of the first prompt.
        """
        codec, tokens, scores = self.service.codec, update.tokens, update.logprobs
        top = update.top_logprobs or [[]] * len(tokens)
        if self.chat:
            def described(token: int, score: float) -> dict[str, Any]:
                data = codec.token_bytes[token] if codec else str(token).encode()
                return {"token": self._text(token), "logprob": score, "bytes": list(data)}

            return {"content": [
                {**described(token, score), "top_logprobs": [described(*pair) for pair in likely]}
                for token, score, likely in zip(tokens, scores, top, strict=True)]}
        offsets = self.offsets[update.sample if index is None else index]
        named = [self._named([(token, score), *likely])
                 for token, score, likely in zip(tokens, scores, top, strict=True)]
        return {"tokens": [self._text(token) for token in tokens], "token_logprobs": scores,
                "text_offset": [offsets.add(token) for token in tokens],
                "top_logprobs": named if update.top_logprobs else None}

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
        new = sum(len(completion.tokens) for completion in self.done)
        accepted = sum(completion.stats.accepted for completion in self.done)
        rejected = sum(completion.stats.drafted for completion in self.done) - accepted
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
