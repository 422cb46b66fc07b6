"""Requests join, run, leave and are told apart: `Scheduler` and what `Engine` makes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
import torch
from drafting import DRAFTERS
from tiny import prompts
from tiny import target as tiny_target

from draftproof.core.params import Sampling
from draftproof.engine import background
from draftproof.engine.decoder import Decoder
from draftproof.engine.engine import Engine, Request, Scheduler, Status, Update
from draftproof.engine.load import load
from draftproof.errors import BadInput, Unavailable
from draftproof.model.target import Target

NEW = 12
PROMPTS = prompts(6, seed=4)
LONG = [number % 40 for number in range(300)]
"""Read in more than one chunk."""


def target() -> Target:
    model: Target = tiny_target("llama", max_position_embeddings=512)
    return model


def new_engine(drafter: str = "draft chain") -> Engine:
    return Engine(target(), DRAFTERS[drafter](target()), budget=3)


@cache
def expected(index: int) -> list[int]:
    """The tokens of a prompt that runs alone, without a drafter."""
    (completion,) = Engine(target()).generate(PROMPTS[index], max_new_tokens=NEW)
    return completion.tokens


def run(engine: Engine) -> list[Update]:
    """Step until nothing is left."""
    updates = list[Update]()
    while engine.has_unfinished_requests():
        updates += engine.step()
    return updates


def tokens_of(request: Request, updates: list[Update]) -> list[int]:
    """All new tokens that updates have brought to a request, in their order."""
    return [token for update in updates if update.request is request for token in update.tokens]


@pytest.mark.parametrize("drafter", ["plain", "draft chain"])
def test_updates_together_are_the_text_of_each_request(drafter: str) -> None:
    engine = new_engine(drafter)
    requests = [engine.add_request(prompt, max_new_tokens=NEW) for prompt in PROMPTS[:3]]
    updates = engine.step()
    requests += [engine.add_request(prompt, max_new_tokens=NEW) for prompt in PROMPTS[3:]]
    updates += run(engine)
    for index, request in enumerate(requests):
        assert tokens_of(request, updates) == expected(index)
        (last,) = [update for update in updates if update.request is request and update.finished]
        assert last.completion is not None and last.completion.tokens == expected(index)
        assert request.status is Status.FINISHED
    assert engine.step() == [] and not engine.has_unfinished_requests()


def test_a_request_goes_from_waiting_to_finished() -> None:
    engine = new_engine()
    short = engine.add_request(PROMPTS[0], max_new_tokens=2 * NEW)
    long = engine.add_request(LONG, max_new_tokens=NEW)
    assert short.status is long.status is Status.WAITING
    engine.step()
    assert short.status is Status.RUNNING and long.status is Status.WAITING
    engine.step()
    assert long.status is Status.PREFILLING and not long.sequences[0].tokens
    run(engine)
    assert short.status is long.status is Status.FINISHED


def test_lower_priorities_join_first_and_equals_in_their_order() -> None:
    engine = new_engine()
    scheduler = engine.scheduler
    requests = [engine.read(PROMPTS[0], max_new_tokens=2)[0] for _ in range(6)]
    for request, priority in zip(requests, (0, 5, 0, -1, 5, -1), strict=True):
        request.priority = priority
        scheduler.add(request)
    assert [requests.index(request) for request in scheduler.waiting] == [3, 5, 0, 2, 1, 4]
    run(engine)
    assert all(request.finished for request in requests)


def test_a_request_that_needs_many_rows_is_not_overtaken() -> None:
    engine = new_engine()
    scheduler = engine.scheduler = engine.new_scheduler(2, 64, interleave=True)
    first, wide, narrow = (engine.add_request(PROMPTS[0], max_new_tokens=new, n=n)
                           for new, n in ((NEW, 1), (2, 2), (2, 1)))
    while not first.finished:
        assert wide.status is narrow.status is Status.WAITING
        scheduler.step()
    updates = run(engine)
    ended = [update.request for update in updates if update.finished]
    assert ended == [wide, wide, narrow]


def test_a_request_that_needs_a_larger_batch_is_not_overtaken() -> None:
    engine = new_engine()
    engine.scheduler = engine.new_scheduler(3, 64, interleave=True)
    first, long, short = (engine.add_request(PROMPTS[0], max_new_tokens=new)
                          for new in (NEW, 80, 2))
    begun = list(dict.fromkeys(update.request.id for update in run(engine)))
    assert begun == [first.id, long.id, short.id]


def test_none_overtakes_a_long_request_where_prompts_are_read_together() -> None:
    """With our kernels, requests before and after the one that needs a larger batch could join at
    once."""
    engine = load("demo", drafter="none")
    scheduler = engine.scheduler = engine.new_scheduler(3, 64, interleave=True)
    first, long, short = (engine.add_request(PROMPTS[0], max_new_tokens=new)
                          for new in (4, 80, 2))
    scheduler.step()
    assert long.status is short.status is Status.WAITING and first.status is not Status.WAITING
    begun = list(dict.fromkeys(update.request.id for update in run(engine)))
    assert begun.index(long.id) < begun.index(short.id)


def test_requests_of_different_lengths_run_side_by_side() -> None:
    engine = new_engine()
    requests = [*engine.read(PROMPTS[0], max_new_tokens=2),
                *engine.read(PROMPTS[1], max_new_tokens=40)]
    with engine.scheduled(requests) as scheduler:
        for _ in requests:                                      # a prompt in each
            scheduler.step()
        assert [request.status for request in scheduler.running] == [Status.RUNNING] * 2


@pytest.mark.parametrize("interleave", [False, True])
def test_a_failed_step_forgets_the_prompt_that_was_being_read(interleave: bool) -> None:
    engine = new_engine()
    scheduler = engine.scheduler = engine.new_scheduler(2, 400, interleave=interleave)
    long = engine.add_request(LONG, max_new_tokens=NEW)
    scheduler.step()
    assert long.status is Status.PREFILLING
    scheduler.fail(RuntimeError("out of memory"))
    later = engine.add_request(PROMPTS[2], max_new_tokens=NEW)
    assert tokens_of(later, run(engine)) == expected(2)
    assert long.finished and not long.sequences[0].tokens


def test_seconds_of_updates_add_up_to_the_latency() -> None:
    engine = new_engine()
    request = engine.add_request(PROMPTS[0], max_new_tokens=NEW)
    updates = [update for update in run(engine) if update.request is request]
    assert len(updates) > 2 and updates[-1].latency > 0
    assert sum(update.seconds for update in updates) == pytest.approx(updates[-1].latency)


def waiting(engine: Engine) -> Request:
    return engine.add_request(LONG, max_new_tokens=NEW)


def prefilling(engine: Engine) -> Request:
    request = waiting(engine)
    engine.step()
    return request


def running(engine: Engine) -> Request:
    request = engine.add_request(PROMPTS[1], max_new_tokens=NEW)
    engine.step()
    return request


@pytest.mark.parametrize("begin", [waiting, prefilling, running], ids=lambda begin: begin.__name__)
@pytest.mark.parametrize("by_id", [False, True])
def test_abort_ends_a_request_and_no_other(
    begin: Callable[[Engine], Request], by_id: bool
) -> None:
    engine = new_engine()
    heard = list[Update]()
    other = engine.add_request(PROMPTS[0], max_new_tokens=NEW, on_update=heard.append)
    engine.step()
    request = begin(engine)
    assert request.status.value == begin.__name__
    engine.abort(request.id if by_id else request)
    later = engine.add_request(PROMPTS[2], max_new_tokens=NEW)
    rest = run(engine)
    assert request.status is Status.ABORTED and request.finished
    (last,) = [update for update in rest if update.request is request]
    assert last.completion is not None and last.completion.finish_reason == "abort"
    assert last.completion.tokens == request.sequences[0].tokens
    assert begin is running or not last.completion.tokens
    assert tokens_of(later, rest) == expected(2) and tokens_of(other, heard) == expected(0)


def test_abort_of_a_finished_or_unknown_request_does_nothing() -> None:
    engine = new_engine()
    request = engine.add_request(PROMPTS[0], max_new_tokens=NEW)
    run(engine)
    engine.abort(request)
    engine.scheduler.abort(request)
    engine.abort("no request has this id")
    other = engine.add_request(PROMPTS[1], max_new_tokens=NEW)
    updates = run(engine)
    assert request.status is Status.FINISHED and tokens_of(request, updates) == []
    assert request.sequences[0].finish_reason == "length"
    assert tokens_of(other, updates) == expected(1)


def test_an_id_names_one_request_while_it_has_not_ended() -> None:
    engine = new_engine()
    request = engine.add_request(PROMPTS[0], max_new_tokens=NEW, request_id="mine")
    with pytest.raises(BadInput, match="the request id 'mine' is in use"):
        engine.add_request(PROMPTS[1], request_id="mine")
    run(engine)
    assert request.id == "mine"
    engine.add_request(PROMPTS[1], max_new_tokens=1, request_id="mine")


def test_a_request_that_is_refused_does_not_wait() -> None:
    engine = new_engine()
    for prompt, n in (([], 1), ([99], 1), ([1], 0), ([1], 9)):
        with pytest.raises(BadInput):
            engine.add_request(prompt, n=n)
    assert not engine.has_unfinished_requests()


def test_samples_of_a_request_are_those_of_generate() -> None:
    engine, sampling = new_engine(), Sampling(temperature=0.9, seed=3)
    wanted = engine.generate(PROMPTS[0], max_new_tokens=NEW, sampling=sampling, n=3)
    request = engine.add_request(PROMPTS[0], max_new_tokens=NEW, sampling=sampling, n=3)
    done = [update for update in run(engine) if update.completion is not None]
    texts = {update.sample: update.completion.tokens for update in done if update.completion}
    assert texts == {sample: wanted[sample].tokens for sample in range(3)}
    assert {update.request for update in done} == {request}


@pytest.mark.parametrize("interleave", [False, True])
def test_a_longer_request_waits_and_then_has_room(interleave: bool) -> None:
    """The batch is made again when nothing runs; what comes after it does not overtake it."""
    engine = new_engine()
    scheduler = engine.new_scheduler(2, 32, interleave=interleave)
    short, long, last = engine.read([PROMPTS[0], LONG, PROMPTS[2]], max_new_tokens=NEW)
    for request in (short, long, last):
        scheduler.add(request)
    finished = list[Request]()
    while scheduler.has_unfinished_requests():
        assert long.status is Status.WAITING or short.finished
        finished += [update.request for update in scheduler.step() if update.finished]
    assert finished[0] is short and scheduler.length == len(LONG) + NEW
    (alone,) = Engine(target()).generate(LONG, max_new_tokens=NEW)
    texts = [request.sequences[0].tokens for request in (short, long, last)]
    assert texts == [expected(0), alone.tokens, expected(2)]


def test_no_more_rows_run_than_the_batch_has() -> None:
    scheduler = new_engine().new_scheduler(2, 64)
    requests = new_engine().read(PROMPTS, max_new_tokens=NEW)
    for request in requests:
        scheduler.add(request)
    most = 0
    while scheduler.has_unfinished_requests():
        scheduler.step()
        most = max(most, sum(request.status is Status.RUNNING for request in requests))
    assert most == 2
    assert [request.sequences[0].tokens for request in requests] == [*map(expected, range(6))]


def test_callbacks_receive_the_updates_of_step() -> None:
    engine, heard = new_engine(), list[Update]()
    first = engine.add_request(PROMPTS[0], max_new_tokens=NEW, on_update=heard.append)
    engine.add_request(PROMPTS[1], max_new_tokens=NEW)
    updates = run(engine)
    assert heard == [update for update in updates if update.request is first]
    assert heard[-1].finished and not any(update.finished for update in heard[:-1])


def broken(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next round of a scheduler fail."""
    def fail() -> None:
        raise RuntimeError("out of memory")

    assert scheduler.decoder is not None
    monkeypatch.setattr(scheduler.decoder, "step", fail)


def test_a_failed_step_ends_running_requests_and_keeps_waiting_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, heard = new_engine(), list[Update]()
    engine.scheduler = engine.new_scheduler(1, 64)
    request = engine.add_request(PROMPTS[0], max_new_tokens=NEW, on_update=heard.append)
    later = engine.add_request(PROMPTS[1], max_new_tokens=NEW)
    engine.step()
    broken(engine.scheduler, monkeypatch)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step()
    last = heard[-1].completion
    assert last is not None and last.finish_reason == "error" and request.finished
    with pytest.raises(Unavailable, match="the round failed: out of memory"):
        last.checked()
    assert tokens_of(later, run(engine)) == expected(1)


def test_a_request_whose_batch_cannot_be_made_ends_with_the_error() -> None:
    """Otherwise it would wait, and fail in each step, for ever."""
    def no_memory(rows: int, tokens: int) -> Decoder:
        raise RuntimeError("out of memory")

    scheduler = Scheduler(no_memory, rows=2, length=32)
    first, second = (scheduler.add(request) for request in new_engine().read(PROMPTS[:2]))
    with pytest.raises(RuntimeError) as error:
        scheduler.step()
    (update,) = scheduler.fail(error.value)
    assert update.completion is not None and update.completion.finish_reason == "error"
    assert update.request is first and first.finished and scheduler.requests() == [second]


def test_a_chunk_that_fails_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = new_engine()
    request = prefilling(engine)

    def fail(prefill: object) -> bool:
        raise RuntimeError("out of memory")

    assert engine.scheduler.decoder is not None
    monkeypatch.setattr(engine.scheduler.decoder, "read", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step()
    later = engine.add_request(PROMPTS[1], max_new_tokens=NEW)
    assert tokens_of(later, run(engine)) == expected(1)
    assert request.status is Status.FINISHED


def test_seconds_are_counted_once() -> None:
    """Those of updates add up to the latency, those of several runs to what the clock says."""
    engine = new_engine()
    for prompt in PROMPTS[:2]:
        engine.add_request(prompt, max_new_tokens=NEW)
        updates = run(engine)
        assert sum(update.seconds for update in updates) == pytest.approx(updates[-1].latency)
        assert engine.stats.seconds == pytest.approx(engine.scheduler.clock.seconds)


def test_several_threads_add_and_abort_while_one_steps() -> None:
    engine = new_engine()
    aborted = [engine.add_request(LONG, max_new_tokens=NEW) for _ in range(3)]

    def add(index: int) -> Request:
        engine.abort(aborted[index % 3])
        return engine.add_request(PROMPTS[index], max_new_tokens=NEW)

    with ThreadPoolExecutor(3) as pool:
        added = [pool.submit(add, index) for index in range(6)]
        updates = list[Update]()
        while engine.has_unfinished_requests() or not all(future.done() for future in added):
            updates += engine.step()
    updates += run(engine)
    for index, future in enumerate(added):
        assert tokens_of(future.result(), updates) == expected(index)
    assert all(request.status is Status.ABORTED for request in aborted)


def test_async_streams_run_concurrently() -> None:
    engine = new_engine()

    async def text(index: int) -> list[int]:
        stream = engine.astream(PROMPTS[index], max_new_tokens=NEW)
        return [token async for update in stream for token in update.tokens]

    async def all_texts() -> list[list[int]]:
        return await asyncio.wait_for(asyncio.gather(*map(text, range(6))), 120)

    assert asyncio.run(all_texts()) == [*map(expected, range(6))]


@pytest.mark.parametrize("cancelled", [False, True])
def test_leaving_an_async_stream_aborts_it(cancelled: bool) -> None:
    engine = new_engine("plain")

    async def leave() -> Request:
        stream = engine.astream(PROMPTS[0], max_new_tokens=200)
        request = (await anext(stream)).request
        if cancelled:
            rest = asyncio.ensure_future(_exhaust(stream))
            await asyncio.sleep(0)
            rest.cancel()
            await asyncio.gather(rest, return_exceptions=True)
        await stream.aclose()                                       # type: ignore[attr-defined]
        while engine.has_unfinished_requests():
            await asyncio.sleep(0.01)
        return request

    async def _exhaust(stream: object) -> None:
        async for _ in stream:                                      # type: ignore[attr-defined]
            pass

    request = asyncio.run(asyncio.wait_for(leave(), 120))
    assert request.status is Status.ABORTED
    assert len(request.sequences[0].tokens) < 200


def test_async_streams_go_on_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """In which the thread that decodes has ended."""
    monkeypatch.setattr(background, "IDLE_SECONDS", 0.01)
    engine = new_engine()

    async def streamed() -> list[int]:
        stream = engine.astream(PROMPTS[0], max_new_tokens=NEW)
        return [token async for update in stream for token in update.tokens]

    for _ in range(2):
        assert asyncio.run(asyncio.wait_for(streamed(), 20)) == expected(0)
        if (thread := engine._background._thread) is not None:
            thread.join(20)


def test_async_streams_raise_request_errors() -> None:
    async def first() -> Update:
        return await anext(new_engine().astream([]))

    with pytest.raises(BadInput, match="the prompt is empty"):
        asyncio.run(first())


def test_generate_ids_takes_lists_and_tensors() -> None:
    engine = new_engine()
    assert engine.generate_ids(PROMPTS, max_new_tokens=NEW) == [*map(expected, range(6))]
    pair = torch.tensor([LONG[:5], LONG[5:10]])
    texts = [completion.tokens for completion in engine.generate(pair.tolist(), max_new_tokens=3)]
    assert engine.generate_ids(pair, max_new_tokens=3) == texts
    assert engine.generate_ids([], max_new_tokens=3) == []
    for wrong in ([1, 2], ["text"], torch.tensor([1, 2])):
        with pytest.raises(BadInput, match="a list of prompts, each a list of token ids"):
            engine.generate_ids(wrong)                              # type: ignore[arg-type]
