"""The queue of a model: its limit, and what it counts."""

from __future__ import annotations

import asyncio
import re

import pytest
from asking import PROMPTS

import draftproof as dp
from draftproof.errors import Unavailable
from draftproof.requests.request import Update
from draftproof.server.hosted_model import HostedModel, Limits
from draftproof.server.metrics import Metrics
from draftproof.server.request_queue import Worker
from draftproof.server.schema import Completion


def hosted(drafter: str = "none", **limits: int) -> HostedModel:
    engine = dp.load("demo", drafter=drafter)
    return HostedModel(engine, "demo", Limits(length=64, **limits), Worker(), Metrics("demo"))


def test_a_queue_takes_exactly_as_many_requests_as_its_limit() -> None:
    model, news = hosted(rows=1, queue=2), list[Update]()

    async def run() -> None:
        with model.engine.lock:                                 # no step takes place: all wait
            for count in range(3):
                body = Completion.model_validate({"prompt": PROMPTS[count], "max_tokens": 2})
                (request,), _ = model.read(body)
                if count < 2:
                    model.queue.submit(request, news.append, False)
                else:
                    with pytest.raises(Unavailable, match="2 requests are already waiting"):
                        model.queue.submit(request, news.append, False)
            assert len(model.queue.waiting) == 2
        while len(news) < 2:
            await asyncio.sleep(0.01)

    asyncio.run(run())
    assert [update.finished for update in news] == [True, True]


def test_each_sample_has_one_first_token_and_the_rest_in_between() -> None:
    model, news = hosted(rows=2, queue=2), list[Update]()
    body = {"prompt": PROMPTS[0], "max_tokens": 5, "temperature": 1, "seed": 3, "n": 2}

    async def run() -> None:
        (request,), _ = model.read(Completion.model_validate(body))
        model.queue.submit(request, news.append, True)
        while sum(update.finished for update in news) < 2:
            await asyncio.sleep(0.01)

    asyncio.run(run())
    told = model.metrics.text().decode()
    counts = {name: float(count) for name, count in re.findall(
        r"^vllm:(time_to_first_token_seconds|inter_token_latency_seconds)_count\S* (\S+)$", told,
        re.M)}
    assert counts == {"time_to_first_token_seconds": 2, "inter_token_latency_seconds": 8}


def test_the_seconds_of_a_round_are_shared_by_its_tokens() -> None:
    """Otherwise drafting would seem to make each token later, though it comes sooner."""
    model, news = hosted("prompt-lookup", rows=1, queue=1), list[Update]()
    body = {"prompt": "one two one two one two one two", "max_tokens": 24, "temperature": 0}

    async def run() -> None:
        (request,), _ = model.read(Completion.model_validate(body))
        model.queue.submit(request, news.append, True)
        while not any(update.finished for update in news):
            await asyncio.sleep(0.01)

    asyncio.run(run())
    later = news[1:]
    assert any(len(update.tokens) > 1 for update in later)
    (total,) = re.findall(r"^vllm:inter_token_latency_seconds_sum\S* (\S+)$",
                          model.metrics.text().decode(), re.M)
    expected = sum(update.seconds / len(update.tokens) for update in later if update.tokens)
    assert float(total) == pytest.approx(expected)
