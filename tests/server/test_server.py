"""The server: every answer is the text its request has alone, whatever runs beside it; nothing a client sends breaks it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import httpx
import openai
import pytest
import uvicorn

import draftproof as dp
from draftproof.server.api import Server

PROMPTS = ["Once upon a time", "Lily and Tom", "The dog", "One day, a boy found a big red ball in the park and"]
KEY = "secret"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server of the demo with its draft model, at a port of its own (`server.url`)."""
    made = Server(dp.load("demo", assistant_model="demo-draft", budget=4), "demo", rows=4, queue=40, length=256, key=KEY, price=1.0)
    listener = uvicorn.Server(uvicorn.Config(made.app(), port=0, log_level="error"))
    thread = threading.Thread(target=lambda: asyncio.run(listener.serve()))
    thread.start()
    while not listener.started:
        time.sleep(0.01)
    made.url = f"http://127.0.0.1:{listener.servers[0].sockets[0].getsockname()[1]}"      # type: ignore[attr-defined]
    yield made
    listener.should_exit = True
    thread.join()
    made.scheduler.close()


@pytest.fixture
def client(server: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)


@pytest.fixture
def http(server: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60) as made:
        yield made


def alone(server: Server, prompt: str, new: int, **sampling: Any) -> str:
    """The text of a request with nothing beside it, plainly decoded."""
    plain = dp.Engine(server.engine.target, codec=server.engine.codec, stop_tokens=server.engine.stop_tokens)
    return plain.generate(prompt, max_new_tokens=new, sampling=dp.Sampling(**sampling))[0].text


def test_many_requests_at_once_have_the_texts_they_have_alone(server: Server, client: openai.OpenAI) -> None:
    dice = Random(0)
    asked = [(dice.choice(PROMPTS), dice.randrange(1, 30), dice.choice([0.0, 0.8]), dice.randrange(99), dice.random() < 0.5)
             for _ in range(40)]

    def ask(prompt: str, new: int, temperature: float, seed: int, stream: bool) -> str:
        done = client.completions.create(model="demo", prompt=prompt, max_tokens=new, temperature=temperature, seed=seed,
                                         stream=stream)
        return "".join(one.choices[0].text for one in done) if stream else done.choices[0].text

    with ThreadPoolExecutor(12) as pool:
        texts = list(pool.map(lambda one: ask(*one), asked))
    for text, (prompt, new, temperature, seed, _) in zip(texts, asked, strict=True):
        assert text == alone(server, prompt, new, temperature=temperature, seed=seed)
    assert not server.scheduler.running and not server.scheduler.waiting


def test_samples_stops_and_log_probabilities(server: Server, client: openai.OpenAI) -> None:
    done = client.completions.create(model="demo", prompt=PROMPTS[:2], n=2, max_tokens=12, temperature=0.9, seed=3, logprobs=1)
    assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
    assert done.choices[0].text == alone(server, PROMPTS[0], 12, temperature=0.9, seed=3) != done.choices[1].text
    scores = done.choices[2].logprobs
    assert scores and len(scores.token_logprobs or []) == len(scores.tokens or []) == 12 and max(scores.token_logprobs) <= 0
    assert done.usage and done.usage.completion_tokens == 48
    details = done.usage.completion_tokens_details
    assert details and details.accepted_prediction_tokens
    stopped = client.completions.create(model="demo", prompt=PROMPTS[0], max_tokens=40, temperature=0, stop=["girl"])
    assert stopped.choices[0].finish_reason == "stop" and "girl" not in stopped.choices[0].text
    other = [client.completions.create(model="demo", prompt=PROMPTS[0], max_tokens=20, temperature=1).choices[0].text
             for _ in range(3)]
    assert len(set(other)) > 1, "without a seed, another text each time"


def test_chats_stream_roles_text_and_usage(server: Server, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.engine.codec.tokenizer, "chat_template", "{{ messages[0]['content'] }}")
    messages = [{"role": "user", "content": [{"type": "text", "text": "The dog"}]}]
    whole = client.chat.completions.create(model="demo", messages=messages, max_tokens=9, temperature=0)
    assert whole.choices[0].message.content == alone(server, "The dog", 9)
    news = list(client.chat.completions.create(model="demo", messages=messages, max_completion_tokens=9, temperature=0, logprobs=True,
                                               stream=True, stream_options={"include_usage": True}))
    assert "".join(one.choices[0].delta.content or "" for one in news if one.choices) == whole.choices[0].message.content
    assert news[0].choices[0].delta.role == "assistant" and news[-1].usage and news[-1].usage.completion_tokens == 9
    assert sum(len(one.choices[0].logprobs.content) for one in news if one.choices and one.choices[0].logprobs) == 9
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(model="demo", messages=messages, tools=[{"type": "function", "function": {"name": "f"}}])


@pytest.mark.parametrize(("body", "status", "word"), [
    ({}, 400, "prompt"), ([], 400, "JSON object"), ({"prompt": ""}, 400, "empty"), ({"prompt": 3}, 400, "text"), ({"prompt": [99999]}, 400, "99999"),
    ({"prompt": "a", "max_tokens": -1}, 400, "max_new_tokens"), ({"prompt": "a", "temperature": "hot"}, 400, "temperature"),
    ({"prompt": "a", "n": 99}, 400, "99"), ({"prompt": "a", "n": None, "stop": [3]}, 400, "stop"), ({"prompt": "a", "model": "gpt"}, 404, "gpt"),
    ({"prompt": "a", "response_format": {"type": "json_object"}}, 400, "response_format"), ({"prompt": "\ud800"}, 400, "surrogate"),
    ({"prompt": "word " * 400}, 400, "tokens"), ({"prompt": "a", "stream": "yes"}, 400, "stream"),
    ({"prompt": "a", "logprobs": 5}, 400, "top_logprobs"),
    ({"prompt": "a", "logit_bias": {"x": 1}}, 400, "logit_bias"), ({"messages": []}, 400, "prompt"), ({"prompt": [["a"]]}, 400, "text"),
])  # fmt: skip
def test_what_cannot_be_answered_is_refused_in_one_sentence(http: httpx.Client, body: Any, status: int, word: str) -> None:
    answer = http.post("/v1/completions", content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert answer.status_code == status
    assert word in answer.json()["error"]["message"]


def test_the_key_the_size_and_the_other_routes(server: Any, http: httpx.Client) -> None:
    assert httpx.get(f"{server.url}/v1/models").status_code == 401
    assert http.get("/v1/models").json()["data"][0]["id"] == "demo"
    assert http.post("/v1/completions", content=b"{", headers={"Content-Type": "application/json"}).status_code == 400
    assert http.post("/v1/completions", content=iter([b"{}"])).status_code == 411
    assert http.post("/v1/completions", content=b" " * (9 << 20)).status_code == 413
    assert http.get("/health").json() == {"status": "ok"} and "</html>" in http.get("/").text
    assert http.post("/tokenize", json={"prompt": "The dog"}).json()["count"] == 2
    assert http.post("/v1/completions", json={"prompt": "The dog", "max_tokens": 6, "temperature": 0}).status_code == 200
    told = http.get("/metrics").text
    for name in ("vllm:spec_decode_num_accepted_tokens_total", "vllm:time_to_first_token_seconds_count",
                 "vllm:num_requests_running", "draftproof:cost_per_million_tokens"):
        assert f'{name}{{model_name="demo"}}' in told


def test_whoever_leaves_frees_a_row_and_a_full_queue_says_so(server: Any) -> None:
    """More wait than may: 429, with a Retry-After. All leave: nothing runs or waits."""
    async def run() -> list[int]:
        async with httpx.AsyncClient(base_url=server.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60) as client:
            body = {"prompt": PROMPTS[0], "max_tokens": 240, "temperature": 0, "logit_bias": {"0": -100}, "stream": True}
            calls = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(60)]
            done, running = await asyncio.wait(calls, timeout=30, return_when=asyncio.FIRST_COMPLETED)
            codes = [call.result().status_code for call in done]
            for call in running:
                call.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        return codes

    assert 429 in asyncio.run(run())
    end = time.monotonic() + 30
    while (server.scheduler.running or server.scheduler.waiting) and time.monotonic() < end:
        time.sleep(0.05)
    assert not server.scheduler.running and not server.scheduler.waiting


def test_a_round_that_fails_fails_those_in_it_and_no_others(server: Server, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        monkeypatch.undo()
        raise RuntimeError("[enforce fail] can't allocate memory")

    monkeypatch.setattr("draftproof.engine.decoder.Decoder.admit", broken)
    with pytest.raises(openai.InternalServerError, match="allocate"):
        client.completions.create(model="demo", prompt=PROMPTS[0], max_tokens=5, temperature=0)
    done = client.completions.create(model="demo", prompt=PROMPTS[0], max_tokens=5, temperature=0)
    assert done.choices[0].text == alone(server, PROMPTS[0], 5)


def test_sigterm_lets_what_runs_finish_and_ends_with_zero() -> None:
    command = [sys.executable, "-m", "draftproof", "serve", "demo", "--drafter", "none", "--port", "0", "--max-model-len", "900"]
    port = 18000 + os.getpid() % 2000
    command[command.index("0")] = str(port)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None and "serving demo" in process.stderr.readline()
        url, answers = f"http://127.0.0.1:{port}", list[httpx.Response]()
        for _ in range(100):
            try:
                httpx.get(f"{url}/health")
                break
            except httpx.ConnectError:
                time.sleep(0.1)
        body = {"prompt": PROMPTS[0], "max_tokens": 800, "temperature": 0, "logit_bias": {"0": -100}}
        thread = threading.Thread(target=lambda: answers.append(httpx.post(f"{url}/v1/completions", json=body, timeout=60)))
        thread.start()
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        thread.join()
        assert answers[0].status_code == 200 and answers[0].json()["usage"]["completion_tokens"] > 100
        assert process.wait(30) == 0
