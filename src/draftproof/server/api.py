"""The OpenAI API over a scheduler: completions and chats, streamed or whole; models, tokens, health, metrics."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import Any

from fastapi import Body, FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, StreamingResponse
from starlette.responses import Response

from draftproof.core.params import Sampling
from draftproof.engine.engine import Completion, Engine
from draftproof.engine.prompts import Prompt
from draftproof.engine.rows import prompt_of, refuse_unhonoured, sampling_of
from draftproof.engine.sequence import SequenceState
from draftproof.errors import BadInput, DraftproofError, Unavailable
from draftproof.server.metrics import Metrics
from draftproof.server.scheduler import Progress, Scheduler

BODY = 8 << 20
"""Bytes of a request."""
PATIENCE = 0.5
"""Seconds between looks at whether the client of a whole answer is still there."""


class Server:
    """An engine behind an API. model: the name clients use. timeout: seconds of a request, or None. key: required, if given."""

    def __init__(
        self, engine: Engine, model: str, *, rows: int = 8, queue: int = 256, length: int = 4096,
        timeout: float | None = None, key: str | None = None, price: float | None = None,
    ) -> None:  # fmt: skip
        self.engine, self.model, self.timeout, self.key = engine, model, timeout, key
        self.scheduler = Scheduler(engine, rows=rows, queue=queue, length=length)
        self.metrics = Metrics(self.scheduler, model, price)
        self.created = int(time.time())

    def app(self) -> FastAPI:
        """The routes."""
        app = FastAPI(title="draftproof", description="Speculative decoding that changes no answer.")
        app.middleware("http")(self._guard)
        app.exception_handler(DraftproofError)(_refusal)
        app.exception_handler(RequestValidationError)(_misread)
        app.post("/v1/completions")(self.completions)
        app.post("/v1/chat/completions")(self.chat)
        app.post("/tokenize")(self.tokenize)
        app.get("/v1/models")(self.models)
        app.get("/health")(self.health)
        app.get("/metrics", response_class=PlainTextResponse)(self.prometheus)
        app.get("/", response_class=HTMLResponse)(self.page)
        return app

    async def completions(self, request: Request, body: dict[str, Any] = Body()) -> Response:  # noqa: B008
        """OpenAI's text completions."""
        given = body.get("prompt")
        several = given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]
        return await self._answer(request, body, [{**body, "prompt": one} for one in several], chat=False)

    async def chat(self, request: Request, body: dict[str, Any] = Body()) -> Response:  # noqa: B008
        """OpenAI's chat completions."""
        if "messages" not in body:
            raise BadInput('the request has no "messages"; give a list of objects with "role" and "content"')
        return await self._answer(request, body, [{"messages": body["messages"]}], chat=True)

    async def tokenize(self, body: dict[str, Any] = Body()) -> dict[str, Any]:  # noqa: B008
        """The token ids of a prompt, or of messages in the model's template."""
        rows = await run_in_threadpool(self._rows, body, self.engine.sampling, 1, 1)
        return {"tokens": rows[0].prompt, "count": len(rows[0].prompt), "max_model_len": self.scheduler.length}

    async def models(self) -> dict[str, Any]:
        """The one model."""
        about = {"id": self.model, "object": "model", "created": self.created, "owned_by": "draftproof",
                 "max_model_len": self.scheduler.length}
        return {"object": "list", "data": [about]}

    async def health(self) -> JSONResponse:
        """200 while requests are taken."""
        return JSONResponse({"status": "stopping" if self.scheduler.closing else "ok"}, 503 if self.scheduler.closing else 200)

    async def prometheus(self) -> PlainTextResponse:
        """Prometheus' text format."""
        return PlainTextResponse(self.metrics.text())

    async def page(self) -> HTMLResponse:
        """A page to try it."""
        return HTMLResponse((files("draftproof.server") / "page.html").read_text())

    async def _guard(self, request: Request, call: Callable[[Request], Any]) -> Response:
        """The key, and the size of what is sent."""
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self.key is not None and request.url.path.startswith("/v1") and not hmac.compare_digest(given.encode(), self.key.encode()):
            return _problem("the API key is missing or wrong; send it as a bearer token", 401)
        size = request.headers.get("content-length", "")
        if request.method == "POST" and (not size.isdecimal() or int(size) > BODY):
            return _problem(f"a body needs a Content-Length of at most {BODY} bytes", 411 if not size else 413)
        answer: Response = await call(request)
        return answer

    def _rows(self, asked: dict[str, Any], sampling: Sampling, n: int, new_tokens: int | None) -> list[SequenceState]:
        """The samples of a prompt, checked."""
        prompt: Prompt = prompt_of(asked, chat=False)
        with self.engine.lock:
            ((*rows,),) = self.engine.requests.read([prompt], new_tokens, sampling, n)
        return rows

    async def _answer(self, request: Request, body: dict[str, Any], prompts: list[dict[str, Any]], chat: bool) -> Response:
        if body.get("model") not in (None, self.model):
            return _problem(f"there is no model {str(body['model'])[:99]!r} here; this is {self.model}", 404)
        refuse_unhonoured(body)
        n, stream, options = _whole(body, "n", 1), body.get("stream") or False, body.get("stream_options") or {}
        if not isinstance(stream, bool) or not isinstance(options, dict):
            raise BadInput("stream must be true or false, and stream_options an object")
        if body.get("top_logprobs") or (not chat and type(body.get("logprobs")) is int and body["logprobs"] > 1):
            raise BadInput("alternatives to the tokens written (top_logprobs) were asked for and are not honoured here")
        asked = {name: value for name, value in body.items() if name not in ("n", "messages", "prompt")}
        sampling = sampling_of(self.engine.sampling, asked)
        if sampling.temperature and body.get("seed") is None:           # who names no seed expects another text each time
            sampling = replace(sampling, seed=secrets.randbits(62))
        lists = [await run_in_threadpool(self._rows, prompt, sampling, n, None) for prompt in prompts]
        answer = _Answer(self, chat, sampling.logprobs, lists)
        answer.start()
        if stream:
            return StreamingResponse(answer.events(bool(options.get("include_usage"))), media_type="text/event-stream")
        return JSONResponse(await answer.whole(request))


@dataclass
class _Answer:
    """One request's way through the scheduler: its tickets, and what came of them."""

    server: Server
    chat: bool
    logprobs: bool
    prompts: list[list[SequenceState]]
    news: asyncio.Queue[tuple[int, Progress]] = field(default_factory=asyncio.Queue)
    done: dict[int, Completion] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created, self.begun = int(time.time()), time.perf_counter()
        self.size = sum(map(len, self.prompts))
        self.tickets: list[Any] = []

    def start(self) -> None:
        """Queue every prompt, or none."""
        loop, first = asyncio.get_running_loop(), 0
        server = self.server
        try:
            for rows in self.prompts:
                self.tickets.append(server.scheduler.submit(rows, self._listener(loop, first)))
                first += len(rows)
        except DraftproofError:
            self.cancel()
            raise
        server.metrics.add(server.metrics.prompt_tokens, sum(len(rows[0].prompt) for rows in self.prompts))

    def cancel(self) -> None:
        for ticket in self.tickets:
            self.server.scheduler.cancel(ticket)

    def _listener(self, loop: asyncio.AbstractEventLoop, first: int) -> Callable[[Progress], None]:
        def listen(progress: Progress) -> None:
            with contextlib.suppress(RuntimeError):             # the loop is closed: nobody is there
                loop.call_soon_threadsafe(self.news.put_nowait, (first + progress.sample, progress))

        return listen

    async def progress(self, request: Request | None = None) -> AsyncIterator[tuple[int, Progress]]:
        """News until all samples are done. Raises Unavailable where one failed, or took too long."""
        metrics, timeout, last = self.server.metrics, self.server.timeout, dict[int, float]()
        try:
            while len(self.done) < self.size:
                try:
                    index, progress = await asyncio.wait_for(self.news.get(), PATIENCE)
                except TimeoutError:
                    if request is not None and await request.is_disconnected():
                        return
                    if timeout is not None and time.perf_counter() - self.begun > timeout:
                        raise Unavailable(f"the request took more than {timeout:g} seconds", 504) from None
                    continue
                now = time.perf_counter()
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
        scored: dict[int, list[Progress]] = {}
        async for index, progress in self.progress(request):
            scored.setdefault(index, []).append(progress)
        choices = [self._choice(index, done.text, done.finish_reason, scored[index], whole=True)
                   for index, done in sorted(self.done.items())]
        return self._body(choices, "chat.completion" if self.chat else "text_completion", usage=self._usage())

    async def events(self, with_usage: bool) -> AsyncIterator[str]:
        """The answer as server-sent events: a chunk for each round that brought text."""
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        begun = set[int]()
        try:
            async for index, progress in self.progress():
                if self.chat and index not in begun:
                    begun.add(index)
                    yield _event(self._body([{"index": index, "delta": {"role": "assistant", "content": ""},
                                              "finish_reason": None}], kind))
                text = "".join(piece for piece, _ in progress.pieces)
                if text or (self.logprobs and progress.new):
                    drafted = {"draftproof": {"pieces": progress.pieces}}
                    yield _event(self._body([self._choice(index, text, None, [progress])], kind) | drafted)
                if progress.completion is not None:
                    yield _event(self._body([self._choice(index, "", progress.completion.finish_reason, [])], kind))
            if with_usage:
                yield _event(self._body([], kind, usage=self._usage()))
        except DraftproofError as error:
            yield _event(json.loads(bytes(_problem(str(error), getattr(error, "status", 500)).body)))
        yield "data: [DONE]\n\n"

    def _body(self, choices: list[dict[str, Any]], kind: str, **more: Any) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.server.model, "choices": choices, **more}

    def _choice(self, index: int, text: str, reason: str | None, news: list[Progress], whole: bool = False) -> dict[str, Any]:
        said: dict[str, Any] = {"text": text}
        if self.chat:
            said = {"message": {"role": "assistant", "content": text}} if whole else {"delta": {"content": text} if text else {}}
        scores = self._scores([token for one in news for token in one.new], [score for one in news for score in one.logprobs])
        return {"index": index, **said, "logprobs": scores, "finish_reason": reason}

    def _scores(self, tokens: list[int], scores: list[float]) -> dict[str, Any] | None:
        if not self.logprobs or not tokens:
            return None
        codec = self.server.engine.codec
        texts = [codec.tokenizer.decode([token]) if codec else str(token) for token in tokens]
        if not self.chat:
            return {"tokens": texts, "token_logprobs": scores, "top_logprobs": None,
                    "text_offset": [sum(map(len, texts[:place])) for place in range(len(texts))]}
        return {"content": [{"token": text, "logprob": score, "bytes": list(text.encode()), "top_logprobs": []}
                            for text, score in zip(texts, scores, strict=True)]}

    def _usage(self) -> dict[str, Any]:
        prompt, new = sum(len(rows[0].prompt) for rows in self.prompts), sum(len(done.tokens) for done in self.done.values())
        accepted, drafted = (sum(getattr(done.stats, name) for done in self.done.values()) for name in ("accepted", "drafted"))
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new,
                "completion_tokens_details": {"accepted_prediction_tokens": accepted,
                                              "rejected_prediction_tokens": drafted - accepted}}


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


def _whole(body: dict[str, Any], name: str, usual: int) -> int:
    value = usual if body.get(name) is None else body[name]
    if type(value) is not int or value < 1:
        raise BadInput(f"{name} was {str(value)[:99]!r}; it must be a whole number of at least 1")
    return value


def _problem(message: str, status: int) -> JSONResponse:
    """An error as OpenAI's clients read it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    headers = {"Retry-After": "1"} if status in (429, 503) else None
    error = {"message": message.encode(errors="replace").decode(), "type": kind, "param": None, "code": None}
    return JSONResponse({"error": error}, status, headers)


async def _refusal(request: Request, error: Exception) -> JSONResponse:
    status = 400 if isinstance(error, BadInput) else error.status if isinstance(error, Unavailable) else 500
    return _problem(str(error), status)


async def _misread(request: Request, error: Exception) -> JSONResponse:
    return _problem("the body must be a JSON object", 400)
