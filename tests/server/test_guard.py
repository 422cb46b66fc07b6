"""Who may use the server: keys, hosts, pages of other origins, and how much a request may hold."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient

from draftproof.server.access_log import AccessLog
from draftproof.server.guard import LARGEST_BODY, Access, Guard, Lifecycle

HOME = "http://127.0.0.1:8000"


def client(lifecycle: Lifecycle | None = None, **access: Any) -> TestClient:
    """Of an application that says how many bytes it was sent."""
    app = FastAPI()
    app.add_middleware(Guard, access=Access(**access), lifecycle=lifecycle or Lifecycle())
    app.add_middleware(AccessLog)

    async def size(request: Request) -> int:
        return len(await request.body())

    for path in ("/", "/health", "/metrics", "/v1/completions"):
        app.api_route(path, methods=["GET", "POST"])(size)
    return TestClient(app, base_url=HOME)


@pytest.mark.parametrize(("sent", "status"), [
    ({}, 401), ({"Authorization": "Bearer wrong"}, 401), ({"Authorization": "Bearer"}, 401),
    ({"Authorization": "Basic first"}, 401), ({"Authorization": "first"}, 401),
    ({"Authorization": "Bearer first"}, 200), ({"Authorization": "bearer first"}, 200),
    ({"Authorization": "BEARER  first"}, 200), ({"X-Api-Key": "first"}, 200),
    ({"Authorization": "Bearer schlüssel".encode()}, 200),
])  # fmt: skip
def test_every_route_but_the_page_and_health_needs_a_key(sent: Any, status: int) -> None:
    asked = client(keys=["first", "schlüssel"])
    for path in ("/v1/completions", "/metrics"):
        answer = asked.get(path, headers=sent)
        assert answer.status_code == status
        if status == 401:
            assert answer.json()["error"]["code"] == "invalid_api_key"
    assert asked.get("/").status_code == asked.get("/health").status_code == 200


@pytest.mark.parametrize(("host", "status"), [
    ("127.0.0.1:8000", 200), ("localhost", 200), ("[::1]:8000", 200), ("app.localhost:1", 200),
    ("box.example", 200), ("evil.example:8000", 403), ("127.0.0.1.evil.example", 403),
    ("", 403), ("[", 403), ("localhost@evil.example", 403), ("evil-localhost:8000", 403),
])  # fmt: skip
def test_foreign_host_headers_are_refused(host: str, status: int) -> None:
    """A page whose own name resolves to 127.0.0.1 (DNS rebinding) sends that name."""
    asked = client(hosts=["127.0.0.1", "box.example"])
    assert asked.get("/", headers={"Host": host}).status_code == status
    assert client().get("/", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(("origin", "status"), [
    (None, 200), (HOME, 200), ("http://localhost:3000", 200), ("https://[::1]:1", 200),
    ("https://chat.example", 200), ("https://evil.example", 403), ("null", 403),
    ("http://localhost.evil.example", 403), ("http://localhost:3000.evil.example", 403),
    ("https://chat.example.evil.example", 403),
])  # fmt: skip
def test_cross_origin_requests_are_refused(origin: str | None, status: int) -> None:
    asked = client(origins=["https://chat.example"])
    headers = {"Origin": origin} if origin else {}
    assert asked.post("/v1/completions", content=b"{}", headers=headers).status_code == status
    assert asked.get("/v1/completions", headers=headers).status_code == 200
    anybody = client(origins=["*"])
    assert anybody.post("/v1/completions", content=b"{}", headers=headers).status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_request_bodies_have_a_size_limit(chunked: bool) -> None:
    asked = client()
    for size, status in ((0, 200), (70_000, 200), (LARGEST_BODY, 200), (LARGEST_BODY + 1, 413)):
        body = b" " * size
        parts = iter([body[:50_000], body[50_000:]]) if chunked else body
        answer = asked.post("/v1/completions", content=parts)
        assert answer.status_code == status
        assert status != 200 or answer.json() == size
    assert "8,388,608" in answer.json()["error"]["message"]


def test_request_headers_have_a_size_limit() -> None:
    answer = client().get("/", headers={"X-Long": "a" * 70_000})
    assert answer.status_code == 431 and "65,536" in answer.json()["error"]["message"]


def test_a_draining_server_reports_it_and_rejects_requests() -> None:
    lifecycle = Lifecycle()
    asked = client(lifecycle)
    assert asked.post("/v1/completions", content=b"").status_code == 200
    lifecycle.draining = True
    answer = asked.post("/v1/completions", content=b"")
    assert answer.status_code == 503 and "Retry-After" in answer.headers
    assert asked.get("/health").status_code == 200 and lifecycle.running == 0


def test_the_access_log_has_a_line_for_each_request(caplog: pytest.LogCaptureFixture) -> None:
    asked = client(keys=["first"])
    with caplog.at_level(logging.INFO, "draftproof.access"):
        asked.get("/metrics")
        asked.get("/health")                                   # both polled: no lines
        asked.post("/v1/completions?secret=1", content=b"")
        asked.get("/no%0Apath", headers={"Authorization": "Bearer first"})
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split()[1:4] for line in lines] == [
        ["POST", "/v1/completions", "401"], ["GET", "/no%0Apath", "404"]]
    assert all(line.endswith(" ms") for line in lines)


def test_concurrent_requests_are_limited_per_key() -> None:
    app, lifecycle, entered = FastAPI(), Lifecycle(), asyncio.Event()

    async def wait(request: Request) -> None:
        if (await request.body()) == b"wait":
            await entered.wait()

    app.post("/v1/completions")(wait)
    app.get("/v1/models")(wait)
    guarded = Guard(app, Access(["a", "b"], most=2), lifecycle)

    async def run() -> None:
        transport = httpx.ASGITransport(guarded)                            # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url=HOME) as sender:
            def ask(key: str, body: bytes = b"", method: str = "POST") -> Any:
                path = "/v1/completions" if method == "POST" else "/v1/models"
                return sender.request(method, path, content=body,
                                      headers={"Authorization": f"Bearer {key}"})

            waiting = [asyncio.create_task(ask("a", b"wait")) for _ in range(2)]
            while lifecycle.running < 2:
                await asyncio.sleep(0)
            refused = await ask("a")
            assert refused.status_code == 429 and refused.headers["Retry-After"] == "1"
            assert "2 requests of this key" in refused.json()["error"]["message"]
            assert (await ask("b")).status_code == (await ask("a", b"", "GET")).status_code == 200
            entered.set()
            assert [(await item).status_code for item in waiting] == [200, 200]
            assert (await ask("a")).status_code == 200

    asyncio.run(run())


def test_failed_requests_release_their_slot() -> None:
    async def fails(*asgi: Any) -> None:
        raise RuntimeError("a bug")

    lifecycle = Lifecycle()
    asked = TestClient(Guard(fails, Access(most=1), lifecycle), HOME, False)
    assert [asked.post("/v1/completions").status_code for _ in range(2)] == [500, 500]
    assert lifecycle.running == 0
