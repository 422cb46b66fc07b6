"""The process that serves: slow clients are closed, it ends when told to, and a port is one's."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from draftproof.errors import BadInput
from draftproof.server import web_server
from draftproof.server.guard import Access, Guard, Lifecycle
from draftproof.server.web_server import WebServer, listen

HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"
MUCH = bytes(32 << 20)
"""More than sockets hold for a client that does not read."""


class Running:
    """A server of a small application in a thread."""

    def __init__(self, drain_seconds: float = 30) -> None:
        lifecycle, self.go_on = Lifecycle(), asyncio.Event()
        app = FastAPI()
        app.add_middleware(Guard, access=Access(), lifecycle=lifecycle)

        async def size(request: Request) -> int:
            return len(await request.body())

        async def parts(first: bytes) -> Any:
            yield first
            await self.go_on.wait()
            yield b"last"

        app.post("/")(size)
        app.get("/health")(lambda: lifecycle.draining)
        app.get("/stream", response_model=None)(lambda: StreamingResponse(parts(b"first")))
        app.get("/much", response_model=None)(lambda: StreamingResponse(parts(MUCH)))
        listener, self.url = listen("127.0.0.1", 0)
        self.port = listener.getsockname()[1]
        self.server = WebServer(app, lifecycle, drain_seconds)
        self.thread = threading.Thread(
            target=lambda: asyncio.run(self.server.serve([listener])), daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)

    def connect(self, sent: bytes) -> socket.socket:
        made = socket.create_connection(("127.0.0.1", self.port), 30)
        made.sendall(sent)
        return made

    def end(self) -> None:
        self.server.handle_exit(15, None)

    @property
    def ended(self) -> bool:
        self.thread.join(60)
        return not self.thread.is_alive()


@pytest.fixture
def running() -> Iterator[Running]:
    made = Running()
    yield made
    if not made.server.should_exit:
        made.end()
    assert made.ended


@pytest.mark.parametrize(("sent", "status"), [
    (b"", b"408"), (b"POST / HT", b"408"), (HEAD[:-2], b"408"), (HEAD + b"1234", b"408"),
    (b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET", b"200"), (b"\r\n", b"408"),
])  # fmt: skip
def test_a_client_that_does_not_finish_its_request_is_closed(
    monkeypatch: pytest.MonkeyPatch, running: Running, sent: bytes, status: bytes
) -> None:
    monkeypatch.setattr(web_server, "READ_SECONDS", 0.3)
    monkeypatch.setattr(running.server.config, "timeout_keep_alive", 0.3)
    with running.connect(sent) as client:
        answer = b""
        while part := client.recv(9999):                # until it is closed
            answer += part
    assert answer.startswith(b"HTTP/1.1 " + status)


@pytest.mark.parametrize("reads", [True, False])
def test_only_a_client_that_reads_nothing_for_long_is_disconnected(
    running: Running, monkeypatch: pytest.MonkeyPatch, reads: bool
) -> None:
    """A pause is forgiven: the answer may take longer afterwards."""
    monkeypatch.setattr(web_server, "STALL_SECONDS", 1.0)
    with httpx.stream("GET", f"{running.url}much", timeout=30) as stream:
        parts, size = stream.iter_raw(), 0
        time.sleep(0.1)
        while reads and size < len(MUCH):
            size += len(next(parts))
        time.sleep(1.6)
        running.server.servers[0].get_loop().call_soon_threadsafe(running.go_on.set)
        if reads:
            assert b"".join(parts) == b"last"
        else:
            with pytest.raises(httpx.TransportError):
                b"".join(parts)


def test_headers_without_an_end_are_refused(running: Running) -> None:
    with running.connect(b"GET / HTTP/1.1\r\nX: ") as client:
        client.sendall(b"a" * 70_000)
        assert client.recv(99).startswith(b"HTTP/1.1 431")


@pytest.mark.parametrize("sent", [b"", b"POST / HT", HEAD + b"1234"])
def test_a_signal_ends_it_though_a_client_sends_nothing_more(running: Running, sent: bytes) -> None:
    with running.connect(sent):
        time.sleep(0.2)
        running.end()
        assert running.ended


def test_a_signal_lets_a_stream_end_and_health_says_what_goes_on(running: Running) -> None:
    with httpx.stream("GET", f"{running.url}stream", timeout=30) as stream:
        parts = stream.iter_raw()
        assert next(parts) == b"first"
        assert httpx.get(f"{running.url}health").json() is False
        running.end()
        assert httpx.get(f"{running.url}health").json() is True
        assert httpx.post(running.url, content=b"a").status_code == 503
        assert running.thread.is_alive()
        running.server.servers[0].get_loop().call_soon_threadsafe(running.go_on.set)
        assert b"".join(parts) == b"last"
    assert running.ended


def test_an_endless_stream_is_cut_off_at_shutdown() -> None:
    running = Running(drain_seconds=0.3)
    with httpx.stream("GET", f"{running.url}stream", timeout=30) as stream:
        parts = stream.iter_raw()
        assert next(parts) == b"first"
        running.end()
        with pytest.raises(httpx.RemoteProtocolError):
            next(parts)
    assert running.ended


def test_without_descriptors_the_log_has_one_line(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    error, loop = OSError(errno.EMFILE, "Too many open files"), asyncio.new_event_loop()
    for _ in range(1000):
        running.server._loop_error(loop, {"message": "accept", "exception": error})
    loop.close()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_a_port_in_use_is_refused_and_a_free_one_is_bound() -> None:
    listener, url = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    with listener, pytest.raises(BadInput, match=f"{port}.*--port"):
        listen("127.0.0.1", port)
    assert url == f"http://127.0.0.1:{port}/"
