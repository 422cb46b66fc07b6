"""A server of the demo with its draft model, at a port of its own, and clients of it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from asking import KEY, OTHER_KEY

import draftproof as dp
from draftproof.engine.prefix_cache import PrefixCache
from draftproof.server.api import Server
from draftproof.server.guard import Access


@pytest.fixture(scope="session")
def server() -> Iterator[Any]:
    """Running; its address is `server.url`."""
    engine = dp.load("demo", assistant_model="demo-draft", budget=4)
    engine.prefixes = PrefixCache(8 << 20)
    made: Any = Server(engine, "demo", rows=4, queue=40, length=256, price=1.0,
                       access=Access([KEY, OTHER_KEY], origins=["https://chat.example"]))
    listener = uvicorn.Server(uvicorn.Config(made.app(), port=0, log_level="error"))
    thread = threading.Thread(target=lambda: asyncio.run(listener.serve()))
    thread.start()
    while not listener.started:
        time.sleep(0.01)
    made.url = f"http://127.0.0.1:{listener.servers[0].sockets[0].getsockname()[1]}"
    yield made
    listener.should_exit = True
    thread.join()


@pytest.fixture
def client(server: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)


@pytest.fixture
def http(server: Any) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as made:
        yield made
