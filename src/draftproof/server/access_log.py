"""The access log: one line per request."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draftproof.requests.sequence import SequenceState

LOGGER = logging.getLogger("draftproof.access")
ROWS = "draftproof.rows"
"""Key of a request's scope: the sequences that write its answer, by prompt."""
POLLED = ("/health", "/metrics")
"""Paths that are requested every few seconds; they are logged only at the level `debug`."""
GONE = 499
"""The status if the client left before there was one, as in nginx."""


class AccessLog:
    """Logs client, method, path, status, milliseconds, and tokens read and written."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        level = logging.DEBUG if scope.get("path") in POLLED else logging.INFO
        if scope["type"] != "http" or not LOGGER.isEnabledFor(level):
            await self.app(scope, receive, send)
            return
        status, began = GONE, time.perf_counter()

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except Exception:
            status = 500
            raise
        finally:
            seconds = time.perf_counter() - began
            LOGGER.log(level, "%s %s %s %d %.0f ms%s", _client(scope), scope["method"],
                       _path(scope), status, 1000 * seconds, _tokens(scope.get(ROWS, ())))


def _client(scope: Scope) -> str:
    return str((scope.get("client") or ("-",))[0])


def _path(scope: Scope) -> str:
    """The path as it was sent: percent-encoded, without control characters and query."""
    raw = scope.get("raw_path") or scope["path"].encode()
    return repr(raw[:200].decode("ascii", "backslashreplace"))[1:-1]


def _tokens(prompts: Sequence[Sequence[SequenceState]]) -> str:
    if not prompts:
        return ""
    read = sum(len(rows[0].prompt) for rows in prompts)
    written = sum(len(row.tokens) for rows in prompts for row in rows)
    return f" {read}+{written} tokens"
