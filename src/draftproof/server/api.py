"""The OpenAI API over a scheduler: completions and chats, streamed or whole; models, tokens,
health, metrics, and a page."""

from __future__ import annotations

import re
import secrets
import time
from base64 import b64encode
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, StreamingResponse
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from draftproof.core.params import Sampling
from draftproof.engine.engine import Engine
from draftproof.engine.rows import messages_of, refuse_unrecognized, sampling_of
from draftproof.errors import BadInput, ContextTooLong, Unavailable
from draftproof.server import constraints, schema
from draftproof.server.access_log import ROWS, AccessLog
from draftproof.server.answer import Answer, Service
from draftproof.server.grammar import Grammars
from draftproof.server.guard import LOOPBACK_ORIGIN, Access, Guard, Lifecycle
from draftproof.server.metrics import Metrics
from draftproof.server.problems import HANDLED, refusal
from draftproof.server.request_queue import RequestQueue
from draftproof.server.tools import call_messages, call_rule, offered, show_marks


class Server:
    """An engine and what the API tells of it."""

    def __init__(
        self, engine: Engine, model: str, *, rows: int = 8, queue: int = 256, length: int = 4096,
        timeout: float | None = None, access: Access | None = None, price: float | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            engine: Writes the answers.
            model: The name that clients use; errors name the model so, too.
            rows: Rows that run at a time.
            queue: Requests that may wait.
            length: Tokens of a prompt and its answer; the model's context bounds them.
            timeout: Seconds that a request may take, or None.
            access: Who may use it; None lets everybody.
            price: Of an hour of the machine, for the metrics.
        """
        self.engine, self.model, self.created = engine, model, int(time.time())
        self.access, self.lifecycle = access or Access(), Lifecycle()
        engine.target.name = model
        if engine.codec is not None:
            engine.codec.name = model
        self.metrics = Metrics(model, price)
        if engine.prefixes is not None:
            self.metrics.watch("vllm:prefix_cache_hits_total", "Tokens of prompts not read.",
                               lambda: engine.prefixes.reused if engine.prefixes else 0)
        exact = engine.acceptance if engine.lossy is None else "match"
        plain = Engine(engine.target, codec=engine.codec, acceptance=exact, shapes=engine.shapes)
        plain.lock, plain.prefixes = engine.lock, engine.prefixes
        self.queue = RequestQueue(engine, plain, self.metrics, rows=rows, limit=queue,
                                  length=length)
        self.grammars = Grammars(engine.codec, engine.target.vocab_size, engine.stop_tokens)
        self.service = Service(self.queue, engine.codec, model, timeout)
        self.sampling = default_sampling(engine)

    def app(self) -> FastAPI:
        """The routes, within the middleware that guards and logs them."""
        about = "Speculative decoding that changes no answer."
        app = FastAPI(title="draftproof", description=about, docs_url=None, redoc_url=None)
        # the last one added is the first one asked; HTTP middlewares would copy what is streamed
        app.add_middleware(Guard, access=self.access, lifecycle=self.lifecycle)
        app.add_middleware(
            CORSMiddleware, allow_origins=list(self.access.origins), allow_headers=["*"],
            allow_origin_regex=LOOPBACK_ORIGIN, allow_methods=["GET", "HEAD", "POST"],
        )  # fmt: skip
        app.add_middleware(AccessLog)
        for kind in HANDLED:
            app.exception_handler(kind)(refusal)
        app.post("/v1/completions", response_model=None)(self.completions)
        app.post("/v1/chat/completions", response_model=None)(self.chat)
        app.post("/v1/embeddings")(self.embeddings)
        app.post("/tokenize")(self.tokenize)
        _readable(app, "/v1/models", self.models)
        _readable(app, "/v1/models/{name:path}", self.named_model)
        _readable(app, "/health", self.health)
        _readable(app, "/metrics", self.metrics.text, PlainTextResponse)
        _readable(app, "/", self.page, HTMLResponse)
        return app

    async def completions(self, request: Request, body: schema.Completion) -> Response:
        """OpenAI's text completions."""
        return await self._answer(request, body)

    async def chat(self, request: Request, body: schema.Chat) -> Response:
        """OpenAI's chat completions."""
        return await self._answer(request, body)

    def tokenize(self, body: schema.Completion | schema.Chat) -> dict[str, Any]:
        """The token ids of a prompt, or of messages in the model's template."""
        first, *others = self._read(body).requests
        if others:
            raise BadInput(f"{1 + len(others)} prompts were given; give one")
        tokens, length = list(first.prompt), self.queue.length
        return {"tokens": tokens, "count": len(tokens), "max_model_len": length}

    def models(self) -> dict[str, Any]:
        """The one model, and the drafters that may write with it."""
        about = {"id": self.model, "object": "model", "created": self.created,
                 "owned_by": "draftproof", "max_model_len": self.queue.length,
                 "drafter": self.engine.drafter.name, "drafters": list(self.queue.schedulers)}
        return {"object": "list", "data": [about]}

    def named_model(self, name: str) -> dict[str, Any]:
        """The model of a name, if that is this one."""
        self._must_be_here(name)
        return dict(self.models()["data"][0])

    def embeddings(self) -> None:
        """OpenAI's embeddings, which a model that writes text has not."""
        raise BadInput(f"{self.model} writes text and makes no embeddings; ask another server")

    async def health(self) -> JSONResponse:
        """200 while requests are taken; 503 while the last ones are finished."""
        draining = self.lifecycle.draining
        status = "draining" if draining else "ok"
        return JSONResponse({"status": status}, 503 if draining else 200)

    async def page(self) -> HTMLResponse:
        """A page to try it."""
        text, policy = _page()
        return HTMLResponse(text, headers={
            "Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
        })  # fmt: skip

    def _must_be_here(self, model: str | None) -> None:
        if model not in (None, self.model):
            why = f"there is no model {str(model)[:99]!r} here; this is {self.model}"
            raise Unavailable(why, 404, "model_not_found")

    def _too_long(self, tokens: int) -> ContextTooLong:
        return ContextTooLong(
            f"the prompt has {tokens} tokens; this server takes {self.queue.length} tokens of "
            "prompt and answer together (--max-model-len)", tokens
        )  # fmt: skip

    async def _answer(
        self, request: Request, body: schema.Completion | schema.Chat
    ) -> Response:
        self._must_be_here(body.model)
        answer = await run_in_threadpool(self._read, body)
        request.scope[ROWS] = [pending.sequences for pending in answer.requests]
        if (
            longest := max(len(pending.prompt) for pending in answer.requests)
        ) >= self.queue.length:
            raise self._too_long(longest)
        answer.start()
        if body.stream:
            return StreamingResponse(answer.events(request), media_type="text/event-stream")
        return JSONResponse(await answer.whole(request))

    def _read(self, body: schema.Completion | schema.Chat) -> Answer:
        """A request's samples, checked; a grammar among their rules if it asks for one."""
        (asked, rest), form = constraints.split(body.model_extra or {}), None
        refuse_unrecognized(rest, self.engine.sampling)
        sampling = sampling_of(self.sampling, rest)
        if sampling.temperature and rest.get("seed") in (None, -1):  # another text each time
            sampling = replace(sampling, seed=secrets.randbits(62))
        rule = constraints.constraint(body.response_format, asked, self.grammars)
        if isinstance(body, schema.Completion):
            prompts: Any = body.prompt or ""
        else:
            prompts = messages_of(body.messages)
            tools, form = offered(body, self.engine.codec)
            options = body.template_options()
            prompts = call_messages(prompts, form)
            if (form is not None or options) and self.engine.codec is not None:
                prompts = [self.engine.codec.encode_chat(prompts, tools or None, options)]
            if form is not None:
                rule = call_rule(body, form, self.grammars) or rule
        sampling = replace(sampling, logits_rules=(*sampling.logits_rules, *filter(None, [rule])))
        prompts, n = self.engine.requests.several(prompts), body.n or 1
        self.queue.check(body.draftproof.drafter, len(prompts), n)
        limited = sampling.max_new_tokens is not None or sampling.max_length is not None
        limit = None if limited else self.queue.length
        try:
            requests = self.engine.read(prompts, max_new_tokens=limit, sampling=sampling, n=n)
        except ContextTooLong as error:
            raise self._too_long(error.tokens) from None
        if form is not None and self.engine.codec is not None:
            show_marks(requests, form, self.engine.codec)
        return Answer(self.service, body, requests, form)


def _readable(
    app: FastAPI, path: str, answer: Callable[..., Any], kind: type[Response] = JSONResponse
) -> None:
    """A route for GET, and for HEAD, whose body is left out."""
    app.get(path, response_class=kind, response_model=None)(answer)
    app.head(path, response_class=kind, response_model=None, include_in_schema=False)(answer)


def default_sampling(engine: Engine) -> Sampling:
    """What a request that names no temperature gets: 1, as OpenAI's clients expect, unless the
    model's own configuration says otherwise."""
    config = getattr(engine.target.model, "generation_config", None)
    says = engine.sampling.temperature > 0 or getattr(config, "do_sample", None) is False
    return engine.sampling if says else replace(engine.sampling, temperature=1.0)


@cache
def _page() -> tuple[str, str]:
    """The page, and the policy that lets a browser run what is in it and nothing else."""
    text = (files("draftproof.server") / "page.html").read_text(encoding="utf-8")
    hashes = []
    for tag in ("script", "style"):
        (inside,) = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", text, re.DOTALL)
        digest = b64encode(sha256(inside.encode()).digest()).decode()
        hashes.append(f"{tag}-src 'sha256-{digest}'")
    policy = ["default-src 'none'", *hashes, "img-src data:", "connect-src 'self'",
              "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"]
    return text, "; ".join(policy)
