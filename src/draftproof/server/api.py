"""The routes: OpenAI's completions, chats and responses, Anthropic's messages, streamed or not;
models, tokens, health, metrics, and a web page."""

from __future__ import annotations

import asyncio
import re
from base64 import b64encode
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import cache
from hashlib import sha256
from importlib.resources import files

import fastapi
from fastapi import FastAPI
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, StreamingResponse
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from draftproof.engine.engine import Engine
from draftproof.errors import BadInput
from draftproof.requests.request import Request
from draftproof.server import schema
from draftproof.server.access_log import ROWS, AccessLog
from draftproof.server.answer import Answer
from draftproof.server.base_answer import BaseAnswer
from draftproof.server.guard import KEY, LOOPBACK_ORIGIN, Access, Guard, Lifecycle
from draftproof.server.hosted_model import HostedModel, Limits
from draftproof.server.json_route import JSONRoute
from draftproof.server.messages_answer import MessagesAnswer
from draftproof.server.messages_request import MessagesBody, TokensBody
from draftproof.server.models import Models
from draftproof.server.output_reader import OutputReader
from draftproof.server.owners import Owners
from draftproof.server.problems import HANDLED, refusal
from draftproof.server.request_queue import RequestQueue
from draftproof.server.response_store import ResponseStore
from draftproof.server.responses_answer import ResponsesAnswer
from draftproof.server.responses_request import ResponsesBody

MakeAnswer = Callable[[HostedModel, list[Request], list[OutputReader]], BaseAnswer]


class Server:
    """The models of a server, and its routes."""

    def __init__(
        self, engine: Engine, model: str, *, rows: int = 8, queue: int = 256, length: int = 4096,
        timeout: float | None = None, access: Access | None = None, price: float | None = None,
        shared: bool = False, models: Models | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            engine: Writes the answers of the first model.
            model: The name that clients use, also in errors.
            rows: Rows that run at a time.
            queue: Requests that may wait.
            length: Tokens of a prompt and its answer; the model's context bounds them.
            timeout: Seconds that a request may take, or None.
            access: Who may use it; None: everybody.
            price: Price of the machine per hour, for the metrics.
            shared: Let all keys draft from each other's texts.
            models: Further models, with their own limits.
        """
        self.access, self.lifecycle = access or Access(), Lifecycle()
        self.models = models or Models(Limits(rows, queue, length, timeout), price=price)
        self.models.first = model
        self.models.host(model, engine)
        self.owners, self.responses = Owners(shared), ResponseStore()

    @property
    def first(self) -> HostedModel:
        """The model for requests that name none."""
        return self.models.loaded[self.models.first]

    @property
    def service(self) -> HostedModel:
        """The former name of the first model."""
        return self.first

    @property
    def engine(self) -> Engine:
        """Of the first model."""
        return self.first.engine

    @property
    def model(self) -> str:
        """The name of the first model."""
        return self.models.first

    @property
    def queue(self) -> RequestQueue:
        """Of the first model."""
        return self.first.queue

    def app(self) -> FastAPI:
        """The routes, inside the middleware that guards and logs them."""
        about = "Speculative decoding that changes no answer."
        app = FastAPI(title="draftproof", description=about, docs_url=None, redoc_url=None,
                      lifespan=self._lifespan)
        app.router.route_class = JSONRoute
        # the last one added runs first; HTTP middlewares would copy streams
        app.add_middleware(Guard, access=self.access, lifecycle=self.lifecycle)
        app.add_middleware(
            CORSMiddleware, allow_origins=list(self.access.origins), allow_headers=["*"],
            allow_origin_regex=LOOPBACK_ORIGIN, allow_methods=["GET", "HEAD", "POST", "DELETE"],
        )  # fmt: skip
        app.add_middleware(AccessLog)
        for kind in HANDLED:
            app.exception_handler(kind)(refusal)
        app.post("/v1/completions", response_model=None)(self.completions)
        app.post("/v1/chat/completions", response_model=None)(self.chat)
        app.post("/v1/responses", response_model=None)(self.create_response)
        app.delete("/v1/responses/{name}")(self.delete_response)
        app.post("/v1/messages", response_model=None)(self.messages)
        app.post("/v1/messages/count_tokens")(self.count_tokens)
        app.post("/v1/embeddings")(self.embeddings)
        app.post("/tokenize")(self.tokenize)
        _readable(app, "/v1/responses/{name}", self.response)
        _readable(app, "/v1/models", self.list_models)
        _readable(app, "/v1/models/{name:path}", self.named_model)
        _readable(app, "/health", self.health)
        _readable(app, "/metrics", self.models.registry.text, PlainTextResponse)
        _readable(app, "/", self.page, HTMLResponse)
        return app

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(self.models.unload_idle())
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    async def completions(self, request: fastapi.Request, body: schema.Completion) -> Response:
        """OpenAI's text completions."""
        return await self._answer(
            request, body, lambda hosted, *read: Answer(hosted, body, *read))

    async def chat(self, request: fastapi.Request, body: schema.Chat) -> Response:
        """OpenAI's chat completions."""
        return await self._answer(
            request, body, lambda hosted, *read: Answer(hosted, body, *read))

    async def messages(self, request: fastapi.Request, body: MessagesBody) -> Response:
        """Anthropic's messages."""
        hosted = await self.models.get(body.model)
        return await self._answer(
            request, body.chat(hosted.marks is not None, hosted.engine.codec),
            lambda hosted, *read: MessagesAnswer(hosted, body, *read))

    async def create_response(self, request: fastapi.Request, body: ResponsesBody) -> Response:
        """OpenAI's responses."""
        owner = self._owner(request, None)
        earlier = self.responses.messages(owner, body.previous_response_id)
        chat = body.chat(earlier)

        def make(
            hosted: HostedModel, requests: list[Request], readers: list[OutputReader]
        ) -> BaseAnswer:
            stored = body.store is not False
            keep = self.responses.keeper(owner, body.conversation(earlier)) if stored else None
            return ResponsesAnswer(hosted, body, requests, readers, keep)

        return await self._answer(request, chat, make)

    async def response(self, request: fastapi.Request, name: str) -> dict[str, object]:
        """A stored response."""
        return self.responses.get(self._owner(request, None), name)

    async def delete_response(self, request: fastapi.Request, name: str) -> dict[str, object]:
        """Delete a stored response."""
        self.responses.delete(self._owner(request, None), name)
        return {"id": name, "object": "response", "deleted": True}

    async def count_tokens(self, body: TokensBody) -> dict[str, int]:
        """Count the tokens of a request to /v1/messages."""
        hosted = await self.models.get(body.model)
        chat = body.chat(hosted.marks is not None, hosted.engine.codec)
        (request,), _ = await run_in_threadpool(hosted.read, chat)
        return {"input_tokens": len(request.prompt)}

    async def tokenize(self, body: schema.Completion | schema.Chat) -> dict[str, object]:
        """The token ids of a prompt, or of messages in the model's template."""
        hosted = await self.models.get(body.model)
        requests, _ = await run_in_threadpool(hosted.read, body)
        if len(requests) > 1:
            raise BadInput(f"{len(requests)} prompts were given; give one")
        tokens, length = list(requests[0].prompt), hosted.queue.length
        return {"tokens": tokens, "count": len(tokens), "max_model_len": length}

    def list_models(self) -> dict[str, object]:
        """The models, and the drafters of those that are loaded."""
        return {"object": "list", "data": [self._about(name) for name in self.models.names()]}

    def named_model(self, name: str) -> dict[str, object]:
        """A model by its name."""
        return self._about(self.models.check(name))

    async def embeddings(self) -> None:
        """OpenAI's embeddings: refused, since these models write text."""
        raise BadInput(f"{self.model} writes text and makes no embeddings; ask another server")

    async def health(self) -> JSONResponse:
        """200 while requests are accepted; 503 while the last ones finish."""
        draining = self.lifecycle.draining
        status = "draining" if draining else "ok"
        return JSONResponse({"status": status}, 503 if draining else 200)

    async def page(self) -> HTMLResponse:
        """A web page to try the model."""
        text, policy = _page()
        return HTMLResponse(text, headers={
            "Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
        })  # fmt: skip

    def _about(self, name: str) -> dict[str, object]:
        hosted, source = self.models.loaded.get(name), self.models.sources.get(name)
        drafts = "your texts" if self.access.keys and not self.owners.shared else "all texts"
        return {
            "id": name, "object": "model", "created": self.models.created,
            "owned_by": "draftproof", "loaded": hosted is not None, "drafts_from": drafts,
            **({"parent": source.parent} if source is not None and source.parent else {}),
            **(hosted.about() if hosted is not None else {}),
        }  # fmt: skip

    def _owner(self, request: fastapi.Request, salt: str | None) -> int:
        return self.owners.number(request.scope.get(KEY) or "", salt or "")

    def _read(self, body: schema.GenerationBody) -> Answer:
        """The former name: an answer of the first model that has not been started."""
        return Answer(self.first, body, *self.first.read(body))

    async def _answer(
        self, request: fastapi.Request, body: schema.GenerationBody, make: MakeAnswer
    ) -> Response:
        hosted = await self.models.get(body.model)
        hosted.readings += 1      # keeps the model loaded
        try:
            owner = self._owner(request, body.cache_salt)
            answer = make(hosted, *await run_in_threadpool(hosted.read, body, owner))
            request.scope[ROWS] = [each.sequences for each in answer.requests]
            longest = max(len(each.prompt) for each in answer.requests)
            if longest >= hosted.queue.length:
                raise hosted.too_long(longest)
            answer.start()
        finally:
            hosted.readings -= 1
        if answer.stream:
            return StreamingResponse(answer.events(request), media_type="text/event-stream")
        return JSONResponse(await answer.complete(request))


def _readable(
    app: FastAPI, path: str, answer: Callable[..., object], kind: type[Response] = JSONResponse
) -> None:
    """A route for GET, and for HEAD without the body."""
    app.get(path, response_class=kind, response_model=None)(answer)
    app.head(path, response_class=kind, response_model=None, include_in_schema=False)(answer)


@cache
def _page() -> tuple[str, str]:
    """The page, with a policy that lets the browser run only its own scripts."""
    text = (files("draftproof.server") / "page.html").read_text(encoding="utf-8")
    hashes = []
    for tag in ("script", "style"):
        (inside,) = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", text, re.DOTALL)
        digest = b64encode(sha256(inside.encode()).digest()).decode()
        hashes.append(f"{tag}-src 'sha256-{digest}'")
    policy = ["default-src 'none'", *hashes, "img-src data:", "connect-src 'self'",
              "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"]
    return text, "; ".join(policy)
