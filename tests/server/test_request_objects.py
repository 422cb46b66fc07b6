"""Through how few objects a chat request goes to the scheduler and back."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import fastapi
import httpx
import pytest

import draftproof as dp
from draftproof.requests import stats
from draftproof.server.api import Server
from draftproof.server.base_answer import BaseAnswer
from draftproof.server.request_queue import Worker

ROOT = Path(dp.__file__).parent
CLASSES = ("draftproof.server.", "draftproof.requests.")
"""Where the classes are whose objects carry a request. `Sampling`, of core, is a value of one."""
FUNCTIONS = tuple(str(ROOT / part) for part in (
    "server", "requests", "engine/engine.py", "engine/background.py", "engine/scheduler.py"))
"""Where the functions are through which a request goes; the decoder knows only sequences."""
LAST = (Worker._deliver.__code__, BaseAnswer._taken_apart.__code__)
"""Where the first update leaves the decoding thread, and where it arrives in that of the server."""


def is_counted(value: Any) -> bool:
    """Whether a value may carry a request: not the framework's HTTP request, nor statistics."""
    module = str(type(value).__module__)
    return (module.startswith(CLASSES) and module != stats.__name__
            and not isinstance(value, fastapi.Request))


def test_a_chat_request_needs_few_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes of objects made for the request that functions of ours hand each other, as arguments
    or results, from the HTTP body until the first update is back in the answer."""
    engine = dp.load("demo", drafter="none")
    assert engine.codec is not None
    monkeypatch.setattr(engine.codec.tokenizer, "chat_template", "{{ messages[0].content }}")
    app = Server(engine, "demo", rows=2, length=64).app()
    kinds, past = set[str](), set[int]()

    def note(frame: FrameType, event: str, arg: Any) -> None:
        code, thread = frame.f_code, threading.get_ident()
        if (event not in ("call", "return") or thread in past
                or not code.co_filename.startswith(FUNCTIONS)):
            return
        if code in LAST:
            past.add(thread)
        count = code.co_argcount + code.co_kwonlyargcount
        values = [arg] if event == "return" else [
            frame.f_locals.get(name) for name in code.co_varnames[:count]]
        values += [part for value in values if type(value) in (list, tuple) for part in value]
        kinds.update(type(value).__name__ for value in values
                     if is_counted(value) and id(value) not in before)

    async def post(path: str, **options: object) -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://a") as to:
            messages = [{"role": "user", "content": "Once"}]
            return await to.post(path, json={"messages": messages, **options})

    asyncio.run(post("/tokenize"))              # makes what all requests share
    gc.unfreeze()                               # frozen objects would not be listed
    before = {id(value): value for value in gc.get_objects() if is_counted(value)}
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        response = asyncio.run(post("/v1/chat/completions", max_tokens=3, stream=True))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)              # type: ignore[arg-type]
    assert response.status_code == 200 and len(past) == 2
    assert kinds == {"Chat", "Request", "SequenceState", "Update", "Answer"}
