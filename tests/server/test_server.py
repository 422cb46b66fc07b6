"""The server: every answer is the text its request has alone, whatever runs at the same time;
nothing a client sends breaks it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import httpx
import openai
import pytest
from asking import KEY, PROMPTS, alone

import draftproof as dp
from draftproof.requests.stats import RoundStats
from draftproof.server.hosted_model import default_sampling
from draftproof.server.metrics import Metrics

JSON = {"Content-Type": "application/json"}
ROOT = Path(__file__).parents[2]


def test_many_requests_at_once_have_the_texts_they_have_alone(
    server: Any, client: openai.OpenAI
) -> None:
    dice = Random(0)
    asked = [(dice.choice(PROMPTS), dice.randrange(1, 30), dice.choice([0.0, 0.8]),
              dice.randrange(99), dice.random() < 0.5) for _ in range(40)]

    def ask(prompt: str, new: int, temperature: float, seed: int, stream: bool) -> str:
        done: Any = client.completions.create(
            model="demo", prompt=prompt, max_tokens=new, temperature=temperature, seed=seed,
            stream=stream, extra_body={"draftproof": {"drafter": "none" if seed % 8 == 0 else ""}},
        )
        return "".join(item.choices[0].text for item in done) if stream else done.choices[0].text

    with ThreadPoolExecutor(12) as pool:
        texts = list(pool.map(lambda item: ask(*item), asked))
    for text, (prompt, new, temperature, seed, _) in zip(texts, asked, strict=True):
        assert text == alone(server, prompt, new, temperature=temperature, seed=seed)
    assert not server.queue.running and not server.queue.waiting


def test_samples_stops_and_log_probabilities(server: Any, client: openai.OpenAI) -> None:
    done = client.completions.create(model="demo", prompt=PROMPTS[:2], n=2, max_tokens=12,
                                     temperature=0.9, seed=3, logprobs=1)
    assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
    first, second, third, _ = done.choices
    assert first.text == alone(server, PROMPTS[0], 12, temperature=0.9, seed=3) != second.text
    scores = third.logprobs
    assert scores and scores.token_logprobs and len(scores.tokens or []) == 12
    assert len(scores.token_logprobs) == 12 and max(scores.token_logprobs) <= 0
    offsets = [choice.logprobs.text_offset for choice in done.choices if choice.logprobs]
    assert [offset[0] for offset in offsets if offset] == [0] * 4, "each has a text of its own"
    assert done.usage and done.usage.completion_tokens == 48
    details = done.usage.completion_tokens_details
    assert details and details.accepted_prediction_tokens
    asked: dict[str, Any] = {"model": "demo", "prompt": PROMPTS[0]}
    stopped = client.completions.create(**asked, max_tokens=40, temperature=0, stop=["girl"])
    assert stopped.choices[0].finish_reason == "stop" and "girl" not in stopped.choices[0].text
    other = [client.completions.create(**asked, max_tokens=20, temperature=1) for _ in range(3)]
    texts = {item.choices[0].text for item in other}
    assert len(texts) > 1, "without a seed, another text each time"


def test_chats_stream_roles_text_and_usage(
    server: Any, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{{ messages[0]['content'] }}"
    monkeypatch.setattr(server.engine.codec.tokenizer, "chat_template", template)
    asked: dict[str, Any] = {"model": "demo", "temperature": 0, "messages": [
        {"role": "user", "content": [{"type": "text", "text": "The dog"}]}]}
    whole = client.chat.completions.create(**asked, max_tokens=9)
    assert whole.choices[0].message.content == alone(server, "The dog", 9)
    news = list(client.chat.completions.create(
        **asked, max_completion_tokens=9, logprobs=True, stream=True,
        stream_options={"include_usage": True},
    ))
    choices = [item.choices[0] for item in news if item.choices]
    text = "".join(choice.delta.content or "" for choice in choices)
    assert text == whole.choices[0].message.content
    assert choices[0].delta.role == "assistant"
    assert news[-1].usage and news[-1].usage.completion_tokens == 9
    assert sum(len(choice.logprobs.content or []) for choice in choices if choice.logprobs) == 9


def test_usage_is_sent_with_every_chunk_on_request(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    news: list[Any] = list(client.completions.create(
        model="demo", prompt=PROMPTS[:2], max_tokens=6, temperature=0, stream=True,
        stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in news]
    assert counts == sorted(counts) and counts[-1] == counts[-2] == 12
    assert all(chunk.usage.prompt_tokens == news[-1].usage.prompt_tokens for chunk in news)


def test_usage_counts_accepted_and_rejected_draft_tokens(
    server: Any, client: openai.OpenAI
) -> None:
    (alone,) = server.engine.generate(PROMPTS[1], max_new_tokens=20)
    done = client.completions.create(model="demo", prompt=PROMPTS[1], max_tokens=20, temperature=0)
    assert done.usage and (details := done.usage.completion_tokens_details)
    rejected = alone.stats.drafted - alone.stats.accepted
    assert details.accepted_prediction_tokens == alone.stats.accepted
    assert details.rejected_prediction_tokens == rejected > 0


@pytest.mark.parametrize("chat", [False, True])
def test_the_likeliest_tokens_are_the_same_with_and_without_drafts(
    server: Any, http: httpx.Client, monkeypatch: pytest.MonkeyPatch, chat: bool
) -> None:
    template = "{{ messages[0]['content'] }}"
    monkeypatch.setattr(server.engine.codec.tokenizer, "chat_template", template)
    route, mine = "completions", {"prompt": PROMPTS[0], "logprobs": 5}
    if chat:
        messages = [{"role": "user", "content": PROMPTS[0]}]
        route = "chat/completions"
        mine = {"messages": messages, "logprobs": True, "top_logprobs": 5}
    body = {"max_tokens": 20, "temperature": 1, "seed": 5, **mine}
    items = []
    for drafter in ("", "none"):
        answer = http.post(f"/v1/{route}", json={**body, "draftproof": {"drafter": drafter}})
        told = answer.json()["choices"][0]["logprobs"]
        if chat:
            items.append([
                {item["token"]: item["logprob"] for item in (place, *place["top_logprobs"])}
                for place in told["content"]])
        else:
            own_scores = zip(told["top_logprobs"], told["tokens"], told["token_logprobs"],
                             strict=True)
            assert all(top[token] == score for top, token, score in own_scores)
            items.append(told["top_logprobs"])
    assert len(items[0]) == 20 and all(5 <= len(item) <= 6 for item in items[0])
    assert items[0] == [pytest.approx(item, abs=1e-9) for item in items[1]]


def test_stream_includes_drafts_on_request(http: httpx.Client, server: Any) -> None:
    """Each round's tree, with the path that was accepted: the text is what the paths say."""
    body = {"prompt": PROMPTS[0], "max_tokens": 20, "temperature": 0, "stream": True,
            "draftproof": {"trees": True}}
    text, trees, drafted = "", list[Any](), 0
    for line in http.post("/v1/completions", json=body).text.split("\n\n"):
        output = json.loads(line[6:]) if line.startswith("data: {") else {"choices": []}
        text += "".join(choice["text"] for choice in output["choices"])
        trees += [output["draftproof"]["tree"]] if "tree" in output.get("draftproof", {}) else []
    assert text == alone(server, PROMPTS[0], 20)
    for tree in trees:
        drafted += len(tree) - 1
        assert tree[0][1:3] == [-1, True]
        assert all(tree[parent][2] or not accepted for _, parent, accepted, _ in tree[1:])
        assert all(item[3] == "draft-model" for item in tree[1:])
    assert drafted > 10
    words = "".join(node for tree in trees for node, _, accepted, _ in tree if accepted)
    assert words.replace(" ", "")[:40] == text.replace(" ", "")[:40]


MISTAKES: tuple[tuple[Any, str], ...] = (
    ({}, '"prompt" is missing'),
    ([], "object"),
    ({"prompt": ""}, "empty"),
    ({"prompt": 3}, '"prompt" was 3; it must be a valid string, or a valid list'),
    ({"prompt": [99999]}, "99999"),
    ({"prompt": "\ud800"}, "surrogate"),
    ({"prompt": "word " * 400}, "tokens"),
    ({"prompt": "a", "max_tokens": -2}, "max_new_tokens"),
    ({"prompt": "a", "sampling_params": {"n": 3}}, "next to the prompt"),
    ({"prompt": "a", "n": 10**7}, "10000000"),
    ({"prompt": ["a"] * 41}, "41 prompts"),
    ({"prompt": "a", "n": None, "stop": [3]}, "stop"),
    ({"prompt": "a", "model": "gpt"}, "gpt"),
    ({"prompt": "a", "stream": "yes"}, "stream"),
    ({"prompt": "a", "tools": [{}]}, "tools"),
    ({"prompt": "a", "draftproof": {"drafter": "none of these"}}, "none of these"),
    ({"prompt": "a", "chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
    ({"prompt": "a", "response_format": {"type": "xml"}}, "json_schema"),
    ({"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {
        "schema": {"type": "nonsense"}}}}, "nonsense"),
    ({"prompt": "a", "response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
)  # fmt: skip


@pytest.mark.parametrize(("body", "word"), MISTAKES)
def test_invalid_requests_get_a_one_sentence_error(
    http: httpx.Client, body: Any, word: str
) -> None:
    answer = http.post("/v1/completions", content=json.dumps(body), headers=JSON)
    assert answer.status_code == (404 if word == "gpt" else 400)
    assert word in answer.json()["error"]["message"]


def test_missing_key_invalid_json_unknown_route_and_large_body_are_rejected(
    server: Any, http: httpx.Client
) -> None:
    route = "/v1/completions"
    assert httpx.get(f"{server.url}/v1/models").status_code == 401
    assert http.get("/v1/models").json()["data"][0]["id"] == "demo"
    cut = http.post(route, content=b"{", headers=JSON)
    assert cut.status_code == 400 and "must be JSON" in cut.json()["error"]["message"]
    assert "/v1/none" in http.get("/v1/none").json()["error"]["message"]
    assert http.post(route, content=b" " * (9 << 20)).status_code == 413
    assert http.get("/health").json() == {"status": "ok"} and "</html>" in http.get("/").text
    for path in ("/", "/health", "/metrics", "/v1/models", "/v1/models/demo"):
        head, whole = http.head(path), http.get(path)
        assert head.status_code == whole.status_code == 200 and head.content == b""
    assert http.get("/v1/models/demo").json() == http.get("/v1/models").json()["data"][0]
    parts = (part for part in (b'{"prompt": "The dog", ', b'"max_tokens": 2}'))
    assert http.post(route, content=parts, headers=JSON).status_code == 200
    assert http.post("/tokenize", json={"prompt": "The dog"}).json()["count"] == 2
    assert http.post("/tokenize", json={"prompt": PROMPTS}).status_code == 400
    wrong = http.post("/tokenize", json={"messages": 5})
    assert '"messages" was 5' in wrong.json()["error"]["message"]
    chat = {"messages": [{"role": "user", "content": "a"}],
            "tools": [{"type": "function", "function": {"name": "f"}}]}
    assert http.post("/v1/chat/completions", json=chat).status_code == 400      # no chat template
    assert route in http.get("/openapi.json").json()["paths"]


@pytest.mark.parametrize(("path", "body", "status", "code"), [
    ("completions", {"prompt": "word " * 400}, 400, "context_length_exceeded"),
    ("completions", {"prompt": "word " * 4000}, 400, "context_length_exceeded"),
    ("completions", {"prompt": "a", "model": "org/gpt"}, 404, "model_not_found"),
    ("models/org/gpt", None, 404, "model_not_found"),
    ("embeddings", {"input": "a", "model": "demo"}, 400, None),
])  # fmt: skip
def test_errors_have_machine_readable_codes(
    http: httpx.Client, path: str, body: Any, status: int, code: str | None
) -> None:
    answer = http.post(f"/v1/{path}", json=body) if body else http.get(f"/v1/{path}")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code)
    if code == "context_length_exceeded":               # the limit of the server, not the model's
        assert "256" in error["message"] and "--max-model-len" in error["message"]


def test_allowed_origins_may_send_requests(server: Any, http: httpx.Client) -> None:
    asked = {"Access-Control-Request-Method": "POST",
             "Access-Control-Request-Headers": "authorization,content-type"}
    for origin, known in (("https://chat.example", True), ("http://localhost:3000", True),
                          ("https://evil.example", False)):
        preflight = httpx.options(f"{server.url}/v1/completions",
                                  headers={"Origin": origin, **asked})
        allowed = preflight.headers.get("Access-Control-Allow-Origin")
        assert preflight.is_success == known and (allowed == origin) == known
        answer = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1},
                           headers={"Origin": origin})
        assert answer.status_code == (200 if known else 403)
        assert (answer.headers.get("Access-Control-Allow-Origin") == origin) == known


def test_the_page_runs_what_is_in_it_and_nothing_else(http: httpx.Client) -> None:
    answer = http.get("/")
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    for tag in ("script", "style"):
        inside = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", answer.text, re.DOTALL)
        assert len(inside) == 1
        digest = base64.b64encode(hashlib.sha256(inside[0].encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert not re.search(r"""<[^>]* (style|on\w+)=["']""", answer.text)


def test_without_a_limit_the_text_goes_on_to_the_end_of_the_context(http: httpx.Client) -> None:
    body = {"prompt": [5, 6, 7], "temperature": 0, "logit_bias": {"0": -100}, "n": 2}
    answer = http.post("/v1/completions", json=body).json()
    assert answer["usage"]["completion_tokens"] == 2 * (256 - 3)
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}


def test_without_a_temperature_it_is_one_unless_the_model_says(
    server: Any, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"prompt": PROMPTS[0], "max_tokens": 20, "seed": 3}

    def text(**more: Any) -> str:
        answer = http.post("/v1/completions", json={**body, **more}).json()
        return str(answer["choices"][0]["text"])

    assert text() == text(temperature=1) != text(temperature=0)
    engine, config = server.engine, server.engine.target.model.generation_config
    assert default_sampling(engine).temperature == 1
    monkeypatch.setattr(engine, "sampling", dp.Sampling(temperature=0.6))
    assert default_sampling(engine).temperature == 0.6
    monkeypatch.setattr(engine, "sampling", dp.Sampling())
    monkeypatch.setattr(config, "do_sample", False)
    assert default_sampling(engine).temperature == 0


def test_disconnected_clients_are_excluded_from_latencies() -> None:
    metrics = Metrics("m")
    for reason, counted in (("stop", 1), ("length", 2), ("abort", 2), ("error", 2)):
        metrics.ended(dp.Completion("", [1], reason, None, RoundStats()), 0.5)
        told = metrics.text().decode()
        assert f'request_latency_seconds_count{{model_name="m"}} {counted}.0' in told
        assert f'finished_reason="{reason}"' in told


def test_metrics_count_drafts_and_compute_cost_per_hour(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    now, stats = time.time(), RoundStats()
    metrics = Metrics("m", 3.0)
    for width in (0, 0, 4):
        stats.record(width, width, width, width, width + 1)
    metrics.ended(dp.Completion("", [1] * 1000, "stop", None, stats), 0.5)
    monkeypatch.setattr(time, "time", lambda: now + 7200)
    told = metrics.text().decode()
    for name, value in (("vllm:spec_decode_num_drafts_total", 1), ("vllm:generation_tokens_total",
                        1000), ("draftproof:target_forwards_total", 3),
                        ("vllm:spec_decode_num_draft_tokens_total", 4)):
        assert f'{name}{{model_name="m"}} {value}.0' in told
    (cost,) = re.findall(r"cost_per_million_tokens{[^}]*} (\S+)", told)
    assert float(cost) == pytest.approx(3 * 2 * 1000, rel=0.01)


def test_dashboard_queries_use_exported_metrics(http: httpx.Client) -> None:
    body = {"prompt": PROMPTS[0], "max_tokens": 30, "temperature": 0}
    assert http.post("/v1/completions", json=body).status_code == 200
    told = http.get("/metrics").text
    names = set(re.findall(r"^((?:vllm|draftproof):\w+)\{([^}]*)\}", told, re.M))
    known = {name: set(re.findall(r'(\w+)="', labels)) for name, labels in sorted(names)}
    dashboard = json.loads((ROOT / "deploy" / "grafana.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(asked) > 10
    for expression in asked:
        used = re.findall(r"((?:vllm|draftproof):\w+)\{(\w+)=~", expression)
        assert used and all(label in known[name] for name, label in used)
        grouped = re.findall(r"by \((\w+)\)", expression)
        assert all(any(label in known[name] for name, _ in used) for label in grouped)


def test_a_disconnected_client_frees_its_row_and_a_full_queue_returns_429(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More wait than may: 429, with a Retry-After. All leave: nothing runs or waits, since each
    request that was admitted is aborted."""
    aborted, abort = list[object](), server.queue.abort
    monkeypatch.setattr(server.queue, "abort", lambda request, *rest: (
        aborted.append(request), abort(request, *rest))[1])
    body = {"prompt": PROMPTS[0], "max_tokens": 240, "temperature": 0, "logit_bias": {"0": -100},
            "stream": True}

    async def run() -> list[int]:
        key = {"Authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(base_url=server.url, headers=key, timeout=60) as client:
            calls = [asyncio.create_task(client.post("/v1/completions", json=body))
                     for _ in range(60)]
            done, running = await asyncio.wait(calls, timeout=30,
                                               return_when=asyncio.FIRST_COMPLETED)
            codes = [call.result().status_code for call in done]
            for call in running:
                call.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        return codes

    codes = asyncio.run(run())
    assert 429 in codes and 200 not in codes
    end = time.monotonic() + 30
    while (server.queue.running or server.queue.waiting) and time.monotonic() < end:
        time.sleep(0.05)
    assert not server.queue.running and not server.queue.waiting
    assert len(aborted) >= 60 - len(codes)


def test_a_failed_round_affects_only_its_requests(
    server: Any, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        monkeypatch.undo()
        raise RuntimeError("[enforce fail] can't allocate memory")

    asked: dict[str, Any] = {"model": "demo", "prompt": PROMPTS[0], "max_tokens": 5,
                             "temperature": 0}
    monkeypatch.setattr("draftproof.engine.decoder.Decoder.prefill", broken)
    with pytest.raises(openai.InternalServerError, match="allocate"):
        client.completions.create(**asked)
    assert client.completions.create(**asked).choices[0].text == alone(server, PROMPTS[0], 5)


def test_a_timed_out_request_returns_504(
    server: Any, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what nobody waits for is no longer written."""
    queue, ended = server.queue, list[object]()
    abort = queue.abort

    def noted(request: Any, drafter: str = "") -> None:
        ended.append(request)
        abort(request, drafter)

    monkeypatch.setattr(queue, "abort", noted)
    monkeypatch.setattr(server.first, "limits", replace(server.first.limits, timeout=0.0))
    with pytest.raises(openai.APIStatusError, match="more than 0 seconds") as told:
        client.completions.create(model="demo", prompt=PROMPTS[0])
    assert told.value.status_code == 504 and ended


@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGINT] * 2])
def test_a_signal_drains_the_server_and_a_second_one_stops_it(signals: list[int]) -> None:
    """The first comes when the first token has, so that the test waits for no clock."""
    command = [sys.executable, "-m", "draftproof", "serve", "demo", "--drafter", "none",
               "--max-model-len", "900", "--port", "0", "--shutdown-timeout", "250"]
    twice = len(signals) == 2
    body = {"prompt": PROMPTS[0], "max_tokens": 800 if twice else 100, "temperature": 0,
            "logit_bias": {"0": -100}, "stream": True}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        result = (re.search(r"http://127\.0\.0\.1:\d+", line) for line in process.stderr)
        url = next(item.group() for item in result if item)
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as answer:
            lines, ended = answer.iter_lines(), False
            assert next(lines).startswith("data: {")
            for number in signals:
                process.send_signal(number)
                with contextlib.suppress(httpx.TransportError):
                    while twice and httpx.get(f"{url}/health").status_code == 200:
                        time.sleep(0.02)                # until it has heard the first
            with contextlib.suppress(httpx.TransportError):
                ended = [line for line in lines if line][-1] == "data: [DONE]"
        assert ended == (not twice) and process.wait(60) == int(twice)
        assert "Error" not in process.stderr.read()
