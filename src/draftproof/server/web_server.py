"""The serving process: sockets, time limits for slow clients, and shutdown."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import logging
import os
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from draftproof.errors import BadInput
from draftproof.server.guard import LARGEST_HEAD, Lifecycle

if TYPE_CHECKING:
    from types import FrameType

LOGGER = logging.getLogger("draftproof.server")
READ_SECONDS = 60.0
"""Seconds within which a request must have arrived, its body included."""
STALL_SECONDS = 60.0
"""Seconds after which a client that reads nothing is disconnected."""
KEEP_ALIVE_SECONDS = 15
"""Seconds that a connection may be idle after a response."""
CLOSING_SECONDS = 3
"""Seconds for the last bytes of responses, after everything has ended."""
NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
M_ARENA_MAX = -8
"""The option of mallopt (malloc.h of glibc)."""
QUIET_SECONDS = 60.0
"""Seconds between two log lines about connections that cannot be accepted."""


class Connection(HttpToolsProtocol):
    """A connection with limits on the time and headers of requests, and on slow readers."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._reading: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._head: int | None = 0                  # bytes of unfinished headers, if any

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._reading = self.loop.call_later(READ_SECONDS, self._too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._reading, self._stalled):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        idle = self.cycle is None or self.cycle.response_complete
        if self._reading is None and idle:
            self._reading = self.loop.call_later(READ_SECONDS, self._too_slow)
            self._head = 0
        super().data_received(data)
        if self._head is not None:
            self._head += len(data)
            if self._head > LARGEST_HEAD:
                self._refuse(b"431 Request Header Fields Too Large")

    def on_headers_complete(self) -> None:
        self._head = None
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(STALL_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
        super().resume_writing()

    @property
    def unfinished(self) -> bool:
        """Whether a request has no complete response yet."""
        return self.cycle is not None and not self.cycle.response_complete

    def _too_slow(self) -> None:
        self._refuse(b"408 Request Timeout")

    def _refuse(self, status: bytes) -> None:
        """Close; send the reason if no response has begun."""
        if self.transport.is_closing():
            return
        if self.cycle is None or not self.cycle.response_started or self.cycle.response_complete:
            self.transport.write(b"HTTP/1.1 " + status + b"\r\nContent-Length: 0\r\n"
                                 b"Connection: close\r\n\r\n")
        self.transport.close()


class WebServer(uvicorn.Server):
    """Serves until a signal; then it drains: running requests may finish, no new ones are accepted.

    While it drains, /health and all other routes answer 503. A second signal ends it at once.
    """

    def __init__(self, app: FastAPI, lifecycle: Lifecycle, drain_seconds: float) -> None:
        """
        Args:
            app: The application.
            lifecycle: Counts the running requests, and holds the flag for draining.
            drain_seconds: How long requests may run after the signal.
        """
        config = uvicorn.Config(
            app, http=Connection, log_config=None, access_log=False, lifespan="on",
            server_header=False, timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=CLOSING_SECONDS,
        )  # fmt: skip
        super().__init__(config)
        self.lifecycle, self.drain_seconds = lifecycle, drain_seconds
        self._signalled: float | None = None
        self._complained = -QUIET_SECONDS

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._signalled is not None:
            os._exit(1)
        self._signalled, self.lifecycle.draining = time.monotonic(), True
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(self._loop_error)
        await super().startup(sockets)

    async def on_tick(self, counter: int) -> bool:
        """Called ten times per second; true ends the server."""
        ending = await super().on_tick(counter)
        if not ending or self._signalled is None:
            return ending
        late = time.monotonic() - self._signalled > self.drain_seconds
        if late and self.lifecycle.running:
            LOGGER.warning("%d requests were cut off after %g seconds", self.lifecycle.running,
                           self.drain_seconds)
        return late or not self.lifecycle.running

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for connection in list(self.server_state.connections):
            if isinstance(connection, Connection) and connection.unfinished:
                connection.transport.abort()        # half a request, or cut off
        await super().shutdown(sockets)

    def _loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        """Log one line per minute where asyncio would log a traceback for each connection."""
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in NO_DESCRIPTORS):
            loop.default_exception_handler(context)
        elif time.monotonic() - self._complained >= QUIET_SECONDS:
            self._complained = time.monotonic()
            LOGGER.warning("connections cannot be accepted: %s", error.strerror)


def listen(host: str, port: int) -> tuple[socket.socket, str]:
    """A listening socket and its URL.

    It listens at once, since two sockets may be bound to one port as long as neither listens.

    Raises:
        BadInput: The address cannot be bound.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    if os.name == "posix":                          # elsewhere others could take the port
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        why = f"{error.strerror or error}; choose another --port or --host"
        raise BadInput(f"cannot listen at {host}:{port}: {why}") from error
    name = f"[{host}]" if ":" in host else host
    return listener, f"http://{name}:{listener.getsockname()[1]}/"


def share_heap() -> None:
    """Let all threads allocate from one heap, where the C library is glibc.

    Otherwise each thread that reads requests gets an arena of its own, which keeps what was freed
    in it. To be called before threads are started."""
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)


def raise_descriptor_limit(wanted: int = 65536) -> None:
    """Raise the limit of open connections to the system's maximum for this process."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
