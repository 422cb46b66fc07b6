"""Routes whose bodies are JSON that every reader understands alike."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from draftproof.requests.json_text import read_json


class _JSONRequest(Request):
    """A request that refuses a key twice in one object, and NaN."""

    async def json(self) -> Any:
        return read_json(await self.body())


class JSONRoute(APIRoute):
    """A route that reads its body by `read_json`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_JSONRequest(request.scope, request.receive))

        return handle
