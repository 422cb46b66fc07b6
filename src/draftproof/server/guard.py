"""Checks of every request before a route gets it: its key, its origin, and its size.

A stranger's web page can send requests to a server on its visitor's machine. Two checks stop it:
the Host header, which contains the page's own name if this was made to resolve to 127.0.0.1 (DNS
rebinding), and the Origin header of requests that change something.
"""

from __future__ import annotations

import hmac
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draftproof.server.problems import problem

LARGEST_BODY = 8 << 20
"""The most bytes of a request's body."""
LARGEST_HEAD = 64 << 10
"""The most bytes of a request's headers."""
OPEN = ("/", "/health")
"""Paths that need no API key."""
SAFE = ("GET", "HEAD", "OPTIONS")
KEY = "draftproof.key"
"""Key of a request's scope: its API key; "" if none is needed."""
LOOPBACK_ORIGIN = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"
"""Pages of this machine; they may use the server."""


@dataclass
class Lifecycle:
    """State that is shared by the guard and the serving process.

    Attributes:
        running: Requests whose response is not complete.
        draining: The server ends when these have ended; it accepts no others.
    """

    running: int = 0
    draining: bool = False


@dataclass(frozen=True)
class Access:
    """Who may use a server.

    Attributes:
        keys: API keys; if empty, everybody may use it.
        hosts: Allowed Host names in addition to those of this machine; None: any.
        origins: Allowed origins of web pages in addition to this machine; "*": any.
        most: The most requests of one key, running or waiting; None: no limit.
    """

    keys: Sequence[str] = ()
    hosts: Sequence[str] | None = None
    origins: Sequence[str] = ()
    most: int | None = None

    def refuses(self, scope: Scope) -> tuple[str, int] | None:
        """Why a request is refused, with the HTTP status; None if it is allowed."""
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if self.hosts is not None and not self._knows_host(host):
            return (f"the Host header names {host[:99]!r}, and this server is not known by that "
                    "name; start it with --allowed-hosts NAME"), 403
        if scope["method"] not in SAFE and origin is not None and not self._knows(origin, host):
            return (f"a page of {origin[:99]!r} may not use this server; start it with "
                    "--allowed-origins ORIGIN"), 403
        scope[KEY] = key = self._key(scope)
        if scope["method"] != "OPTIONS" and scope["path"] not in OPEN and key is None:
            return "the API key is missing or wrong; send it as a bearer token", 401
        return None

    def _knows_host(self, host: str) -> bool:
        name = ""
        with suppress(ValueError):
            name = urlsplit(f"//{host}").hostname or ""
        return "*" in (self.hosts or ()) or is_loopback(name) or name in (self.hosts or ())

    def _knows(self, origin: str, host: str) -> bool:
        if "*" in self.origins or origin in self.origins or re.fullmatch(LOOPBACK_ORIGIN, origin):
            return True
        return origin.partition("://")[2] == host != ""

    def _key(self, scope: Scope) -> str | None:
        """The key that was sent; "" if none is needed, None if it is missing or wrong.

        Keys are compared as bytes, so they may contain UTF-8."""
        if not self.keys:
            return ""
        sent = b""
        for name, value in scope["headers"]:
            scheme, _, credentials = value.partition(b" ")
            if name == b"authorization" and scheme.lower() == b"bearer":
                sent = credentials.strip()
            elif name == b"x-api-key":                              # Anthropic's clients
                sent = value.strip()
        matches = [key for key in self.keys if hmac.compare_digest(sent, key.encode())]
        return matches[0] if matches else None


class Guard:
    """Refuses requests according to `Access`, and reads bodies up to a limit."""

    def __init__(self, app: ASGIApp, access: Access, lifecycle: Lifecycle) -> None:
        self.app, self.access, self.lifecycle = app, access, lifecycle
        self._running = Counter[str]()                  # requests by key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        close = {"Connection": "close"}                 # the rest is not read
        head = sum(len(name) + len(value) for name, value in scope["headers"])
        if head + len(scope.get("raw_path") or b"") > LARGEST_HEAD:
            why = f"the headers have {head:,} bytes; this server reads at most {LARGEST_HEAD:,}"
            await problem(why, 431, headers=close, path=scope["path"])(scope, receive, send)
        elif refused := self.access.refuses(scope):
            await problem(*refused, headers=close, path=scope["path"])(scope, receive, send)
        elif self.lifecycle.draining and scope["path"] != "/health":
            ending = problem("the server is shutting down", 503, path=scope["path"])
            await ending(scope, receive, send)
        elif scope["method"] in SAFE:
            await self._run(scope, receive, send)
        elif self._running[scope[KEY]] == self.access.most:
            why = f"{self.access.most} requests of this key are running; wait until one has ended"
            await problem(why, 429, headers=close, path=scope["path"])(scope, receive, send)
        else:
            await self._count(scope, receive, send)

    async def _count(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = scope[KEY]
        self._running[key] += 1
        try:
            await self._read_and_run(scope, receive, send)
        finally:
            self._running[key] -= 1
            if not self._running[key]:
                del self._running[key]

    async def _read_and_run(self, scope: Scope, receive: Receive, send: Send) -> None:
        size, body = Headers(scope=scope).get("content-length", ""), bytearray()
        too_large = size.isdecimal() and int(size) > LARGEST_BODY
        more = not too_large
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            too_large = len(body) > LARGEST_BODY
            more = message.get("more_body", False) and not too_large
        if too_large:
            why = f"the body is larger than the {LARGEST_BODY:,} bytes that this server reads"
            close = {"Connection": "close"}
            await problem(why, 413, headers=close, path=scope["path"])(scope, receive, send)
            return
        whole: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]
        del body

        async def replay() -> Message:
            return whole.pop() if whole else await receive()

        await self._run(scope, replay, send)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.lifecycle.running += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self.lifecycle.running -= 1


def is_loopback(host: str) -> bool:
    """Whether a name or address is this machine."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
