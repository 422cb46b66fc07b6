"""The OpenAI API over a scheduler: completions and chats, streamed or whole; models, tokens,
health, metrics, and a page."""

from __future__ import annotations

import hmac
import secrets
import time
from dataclasses import replace
from importlib.resources import files
from typing import Annotated, Any

from fastapi import Body, FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, StreamingResponse
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from draftproof.core.params import Sampling
from draftproof.engine.engine import Engine
from draftproof.engine.prompts import Prompt
from draftproof.engine.rows import messages_of, prompt_of, refuse_unhonoured, sampling_of
from draftproof.engine.sequence import SequenceState
from draftproof.errors import BadInput, DraftproofError, Unavailable
from draftproof.server import schema
from draftproof.server.answer import Answer, Mailbox, Service, Wish, problem
from draftproof.server.grammar import Grammars, response_rule
from draftproof.server.metrics import Metrics
from draftproof.server.scheduler import Scheduler
from draftproof.server.tools import Tools

Sent = Annotated[dict[str, Any], Body()]
"""A JSON object."""
BODY = 8 << 20
"""Bytes of a request."""
OWN = ("response_format", "tools", "tool_choice")
"""Fields honoured here that no file of prompts may have; all but the first in chats alone."""


class Server:
    """An engine behind an API.

    model: the name clients use. timeout: seconds of a request, or None. key: required, if given.
    """

    def __init__(
        self, engine: Engine, model: str, *, rows: int = 8, queue: int = 256, length: int = 4096,
        timeout: float | None = None, key: str | None = None, price: float | None = None,
    ) -> None:  # fmt: skip
        self.engine, self.model, self.key = engine, model, key
        plain = _plain(engine)
        self.scheduler = Scheduler(engine, plain, rows=rows, queue=queue, length=length)
        self.metrics = Metrics(self.scheduler, model, price, engine.prefixes)
        self.grammars = Grammars(engine.codec, engine.target.vocab_size, engine.stop_tokens)
        shared = (self.scheduler, self.metrics, engine.codec, model, timeout)
        self.service = Service(*shared, Mailbox())
        self.created = int(time.time())

    def app(self) -> FastAPI:
        """The routes."""
        about = "Speculative decoding that changes no answer."
        app = FastAPI(title="draftproof", description=about, docs_url=None, redoc_url=None)
        app.add_middleware(Guard, key=self.key)         # an HTTP one would copy what is streamed
        app.exception_handler(DraftproofError)(_refusal)
        app.exception_handler(RequestValidationError)(_misread)
        app.post("/v1/completions", openapi_extra=schema.COMPLETION)(self.completions)
        app.post("/v1/chat/completions", openapi_extra=schema.CHAT)(self.chat)
        app.post("/tokenize", openapi_extra=schema.TOKENIZE)(self.tokenize)
        app.get("/v1/models")(self.models)
        app.get("/health")(self.health)
        app.get("/metrics", response_class=PlainTextResponse)(self.prometheus)
        app.get("/", response_class=HTMLResponse)(self.page)
        return app

    async def completions(self, request: Request, body: Sent) -> Response:
        """OpenAI's text completions."""
        given = body.get("prompt")
        parts = [given]
        if isinstance(given, list) and given and not isinstance(given[0], int):
            parts = given
        prompts = [{**body, "prompt": one} for one in parts]
        wish = Wish(False, **_own_wishes(body))
        return await self._answer(request, body, [prompt_of(one, False) for one in prompts], wish)

    async def chat(self, request: Request, body: Sent) -> Response:
        """OpenAI's chat completions."""
        prompt, tools = await run_in_threadpool(self._chat, body)
        form = tools.form if tools else None
        wish = Wish(True, form=form, **_own_wishes(body))
        return await self._answer(request, body, [prompt], wish, tools)

    async def tokenize(self, body: Sent) -> dict[str, Any]:
        """The token ids of a prompt, or of messages in the model's template."""
        if "messages" in body:
            tokens, _ = await run_in_threadpool(self._chat, body)
        else:
            rows = await run_in_threadpool(self._rows, prompt_of(body, False), Sampling(), 1, 1)
            tokens = list(rows[0].prompt)
        length = self.scheduler.length
        return {"tokens": tokens, "count": len(tokens), "max_model_len": length}

    async def models(self) -> dict[str, Any]:
        """The one model, and the drafters that may write with it."""
        about = {"id": self.model, "object": "model", "created": self.created,
                 "owned_by": "draftproof", "max_model_len": self.scheduler.length,
                 "drafter": self.engine.drafter.name, "drafters": list(self.scheduler.lanes)}
        return {"object": "list", "data": [about]}

    async def health(self) -> JSONResponse:
        """200 while requests are taken."""
        if self.scheduler.closing:
            return JSONResponse({"status": "stopping"}, 503)
        return JSONResponse({"status": "ok"})

    async def prometheus(self) -> PlainTextResponse:
        """Prometheus' text format."""
        return PlainTextResponse(self.metrics.text())

    async def page(self) -> HTMLResponse:
        """A page to try it."""
        return HTMLResponse((files("draftproof.server") / "page.html").read_text())

    def _chat(self, body: dict[str, Any]) -> tuple[list[int], Tools | None]:
        """The tokens of a chat in the model's template, and the tools it may call."""
        if "messages" not in body:
            raise BadInput(
                'the request has no "messages"; give a list of objects with "role" and "content"'
            )
        messages, codec = messages_of(body["messages"]), self.engine.codec
        if codec is None:
            raise BadInput("a chat was given but the model has no tokenizer; give token ids")
        tools = Tools.of(body, codec)
        return codec.encode_chat(messages, tools.given if tools else None), tools

    def _rows(
        self, prompt: Prompt, sampling: Sampling, n: int, limit: int | None = None
    ) -> list[SequenceState]:
        """The samples of a prompt, checked."""
        with self.engine.lock:
            ((*rows,),) = self.engine.requests.read([prompt], limit, sampling, n)
        return rows

    def _sampling(self, body: dict[str, Any], chat: bool, tools: Tools | None) -> Sampling:
        """What a request asks for beside its prompt; a grammar among it."""
        own = OWN if chat else OWN[:1]
        refuse_unhonoured({name: value for name, value in body.items() if name not in own})
        rest = {name: value for name, value in body.items() if name not in ("n", "messages")}
        sampling = sampling_of(self.engine.sampling, rest)
        if sampling.temperature and body.get("seed") is None:   # another text each time
            sampling = replace(sampling, seed=secrets.randbits(62))
        rule = tools.rule(body, self.grammars) if tools else None
        rule = rule or response_rule(body.get("response_format"), self.grammars)
        rules = (*sampling.logits_rules, *([rule] if rule else []))
        return replace(sampling, logits_rules=rules)

    async def _answer(
        self, request: Request, body: dict[str, Any], prompts: list[Prompt], wish: Wish,
        tools: Tools | None = None,
    ) -> Response:  # fmt: skip
        if body.get("model") not in (None, self.model):
            there = f"there is no model {str(body['model'])[:99]!r} here; this is {self.model}"
            return problem(there, 404)
        n, stream = _whole(body, "n", 1), body.get("stream") or False
        options = body.get("stream_options") or {}
        if not isinstance(stream, bool) or not isinstance(options, dict):
            raise BadInput("stream must be true or false, and stream_options an object")
        sampling = await run_in_threadpool(self._sampling, body, wish.chat, tools)
        rows = [await run_in_threadpool(self._rows, prompt, sampling, n) for prompt in prompts]
        wish = wish._replace(logprobs=sampling.logprobs, stream=stream)
        answer = Answer(self.service, wish, rows)
        answer.start()
        if stream:
            events = answer.events(bool(options.get("include_usage")))
            return StreamingResponse(events, media_type="text/event-stream")
        return JSONResponse(await answer.whole(request))


class Guard:
    """Lets in who has the key, with bodies of a size that is known and allowed."""

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self.app, self.key = app, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (wrong := self._problem(Headers(scope=scope), scope)):
            await wrong(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _problem(self, headers: Headers, scope: Scope) -> Response | None:
        given = headers.get("authorization", "").removeprefix("Bearer ").encode()
        wanted = self.key.encode() if self.key is not None else given
        if scope["path"].startswith("/v1") and not hmac.compare_digest(given, wanted):
            return problem("the API key is missing or wrong; send it as a bearer token", 401)
        size = headers.get("content-length", "")
        if scope["method"] == "POST" and (not size.isdecimal() or int(size) > BODY):
            wrong = 413 if size.isdecimal() else 411
            return problem(f"a body needs a Content-Length of at most {BODY} bytes", wrong)
        return None


def _plain(engine: Engine) -> Engine:
    """The same target, with nothing drafted: what a speed is compared with."""
    exact = engine.acceptance if engine.lossy is None else "match"
    plain = Engine(engine.target, codec=engine.codec, acceptance=exact, shapes=engine.shapes)
    plain.lock, plain.prefixes = engine.lock, engine.prefixes
    return plain


def _own_wishes(body: dict[str, Any]) -> dict[str, Any]:
    """What a request asks for that OpenAI's do not: the page does."""
    asked = body.get("draftproof") or {}
    drafter = asked.get("drafter") or "" if isinstance(asked, dict) else None
    if not isinstance(drafter, str):
        raise BadInput('"draftproof" must be an object; of "drafter", a name, and "trees"')
    return {"drafter": drafter, "trees": bool(asked.get("trees"))}


def _whole(body: dict[str, Any], name: str, usual: int) -> int:
    value = usual if body.get(name) is None else body[name]
    if type(value) is not int or value < 1:
        raise BadInput(f"{name} was {str(value)[:99]!r}; it must be a whole number of at least 1")
    return value


async def _refusal(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, BadInput):
        return problem(str(error), 400)
    return problem(str(error), error.status if isinstance(error, Unavailable) else 500)


async def _misread(request: Request, error: Exception) -> JSONResponse:
    return problem("the body must be a JSON object", 400)
