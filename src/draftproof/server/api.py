"""The OpenAI API over a scheduler: completions and chats, streamed or whole; models, tokens,
health, metrics, and a page."""

from __future__ import annotations

import hmac
import re
import secrets
import time
from dataclasses import replace
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, StreamingResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from draftproof.engine.engine import Engine
from draftproof.engine.rows import messages_of, refuse_unrecognized, sampling_of
from draftproof.errors import BadInput, DraftproofError, Unavailable
from draftproof.server import constraints, schema
from draftproof.server.answer import Answer, Service, problem
from draftproof.server.grammar import Grammars
from draftproof.server.metrics import Metrics
from draftproof.server.scheduler import Scheduler
from draftproof.server.tools import call_rule, offered

LARGEST_BODY = 8 << 20


class Server:
    """An engine behind an API.

    model: the name clients use. timeout: seconds of a request, or None. key: required, if given.
    """

    def __init__(
        self, engine: Engine, model: str, *, rows: int = 8, queue: int = 256, length: int = 4096,
        timeout: float | None = None, key: str | None = None, price: float | None = None,
    ) -> None:  # fmt: skip
        self.engine, self.model, self.key, self.created = engine, model, key, int(time.time())
        self.metrics = Metrics(model, price)
        if engine.prefixes is not None:
            self.metrics.watch("vllm:prefix_cache_hits_total", "Tokens of prompts not read.",
                               lambda: engine.prefixes.reused if engine.prefixes else 0)
        exact = engine.acceptance if engine.lossy is None else "match"
        plain = Engine(engine.target, codec=engine.codec, acceptance=exact, shapes=engine.shapes)
        plain.lock, plain.prefixes = engine.lock, engine.prefixes
        self.scheduler = Scheduler(engine, plain, self.metrics, rows=rows, queue=queue,
                                   length=length)
        self.grammars = Grammars(engine.codec, engine.target.vocab_size, engine.stop_tokens)
        self.service = Service(self.scheduler, engine.codec, model, timeout)

    def app(self) -> FastAPI:
        """The routes."""
        about = "Speculative decoding that changes no answer."
        app = FastAPI(title="draftproof", description=about, docs_url=None, redoc_url=None)
        app.add_middleware(Guard, key=self.key)         # an HTTP one would copy what is streamed
        for kind in (DraftproofError, RequestValidationError, HTTPException):
            app.exception_handler(kind)(_refusal)
        app.post("/v1/completions", response_model=None)(self.completions)
        app.post("/v1/chat/completions", response_model=None)(self.chat)
        app.post("/tokenize")(self.tokenize)
        app.get("/v1/models")(self.models)
        app.get("/health")(self.health)
        app.get("/metrics", response_class=PlainTextResponse)(self.metrics.text)
        app.get("/", response_class=HTMLResponse)(self.page)
        return app

    async def completions(self, request: Request, body: schema.Completion) -> Response:
        """OpenAI's text completions."""
        return await self._answer(request, body)

    async def chat(self, request: Request, body: schema.Chat) -> Response:
        """OpenAI's chat completions."""
        return await self._answer(request, body)

    def tokenize(self, body: schema.Completion | schema.Chat) -> dict[str, Any]:
        """The token ids of a prompt, or of messages in the model's template."""
        first, *others = self._read(body).tickets
        if others:
            raise BadInput(f"{1 + len(others)} prompts were given; give one")
        tokens, length = list(first.rows[0].prompt), self.scheduler.length
        return {"tokens": tokens, "count": len(tokens), "max_model_len": length}

    def models(self) -> dict[str, Any]:
        """The one model, and the drafters that may write with it."""
        about = {"id": self.model, "object": "model", "created": self.created,
                 "owned_by": "draftproof", "max_model_len": self.scheduler.length,
                 "drafter": self.engine.drafter.name, "drafters": list(self.scheduler.lanes)}
        return {"object": "list", "data": [about]}

    async def health(self) -> dict[str, str]:
        """200 while requests are taken."""
        return {"status": "ok"}

    async def page(self) -> str:
        """A page to try it."""
        return (files("draftproof.server") / "page.html").read_text(encoding="utf-8")

    async def _answer(
        self, request: Request, body: schema.Completion | schema.Chat
    ) -> Response:
        if body.model not in (None, self.model):
            there = f"there is no model {str(body.model)[:99]!r} here; this is {self.model}"
            raise Unavailable(there, 404)
        answer = await run_in_threadpool(self._read, body)
        answer.start()
        if body.stream:
            return StreamingResponse(answer.events(request), media_type="text/event-stream")
        return JSONResponse(await answer.whole(request))

    def _read(self, body: schema.Completion | schema.Chat) -> Answer:
        """A request's samples, checked; a grammar among their rules if it asks for one."""
        (asked, rest), form = constraints.split(body.model_extra or {}), None
        refuse_unrecognized(rest, self.engine.sampling)
        sampling = sampling_of(self.engine.sampling, rest)
        if sampling.temperature and rest.get("seed") in (None, -1):  # another text each time
            sampling = replace(sampling, seed=secrets.randbits(62))
        rule = constraints.constraint(body.response_format, asked, self.grammars)
        if isinstance(body, schema.Completion):
            prompts: Any = body.prompt or ""
        else:
            prompts = messages_of(body.messages)
            tools, form = offered(body, self.engine.codec)
            options = body.template_options()
            if (form is not None or options) and self.engine.codec is not None:
                prompts = [self.engine.codec.encode_chat(prompts, tools or None, options)]
            if form is not None:
                rule = call_rule(body, form, self.grammars) or rule
        sampling = replace(sampling, logits_rules=(*sampling.logits_rules, *filter(None, [rule])))
        prompts, n = self.engine.requests.several(prompts), body.n or 1
        self.scheduler.check(body.draftproof.drafter, len(prompts), n)
        with self.engine.lock:
            rows = self.engine.requests.read(prompts, None, sampling, n)
        return Answer(self.service, body, rows, form)


class Guard:
    """Lets in who has the key, with bodies of a size that is known and allowed."""

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self.app, self.key = app, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app: ASGIApp = self.app
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            given = headers.get("authorization", "").removeprefix("Bearer ").encode()
            wanted = self.key.encode() if self.key is not None else given
            size = headers.get("content-length", "")
            if scope["path"].startswith("/v1") and not hmac.compare_digest(given, wanted):
                why = "the API key is missing or wrong; send it as a bearer token"
                app = problem(why, 401)
            elif scope["method"] == "POST" and not (
                size.isdecimal() and int(size) <= LARGEST_BODY
            ):
                why = f"a body needs a Content-Length of at most {LARGEST_BODY} bytes"
                app = problem(why, 413)
        await app(scope, receive, send)


async def _refusal(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, RequestValidationError):
        return problem(_misread(error), 400)
    if isinstance(error, HTTPException):
        return problem(f"{request.method} {request.url.path}: {error.detail}", error.status_code)
    status = 400 if isinstance(error, BadInput) else getattr(error, "status", 500)
    return problem(str(error), status)


def _misread(error: RequestValidationError) -> str:
    """Which field is wrong, what it was, and what it may be."""
    first, *others = sorted(error.errors(), key=lambda one: one["type"] == "missing")
    path = [str(part) for part in first["loc"][1:]]
    where = ".".join(part for part in path if not re.match(r"[A-Z]|str$|.*\[", part))
    if first["type"] == "json_invalid" or not where:
        why = first.get("ctx", {}).get("error", "an object, with Content-Type: application/json")
        return f"the body must be JSON: {why}"
    if first["type"] == "extra_forbidden":
        return f"Unrecognized request argument: {where}"
    if first["type"] == "missing":
        return f'"{where}" is missing'
    same = [one for one in (first, *others) if one["loc"][1] == first["loc"][1]]
    wanted = dict.fromkeys(one["msg"].removeprefix("Input should be ") for one in same)
    return f'"{where}" was {first["input"]!r:.99}; it must be {", or ".join(wanted)}'
