"""Several texts of one engine, or of one drafter, at a time: each is what it is alone."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from itertools import zip_longest
from threading import Thread

import pytest
from drafting import DRAFTERS, Guess, accepted_share
from tiny import prompts, target

from draftproof.engine.engine import Completion, Engine

LENGTH = 14
LONG, SHORT, LAST = prompts(9, seed=3)[6:]
Texts = list[list[int]]


def streamed(engine: Engine, *asked: list[int]) -> Texts:
    """Streams in turn, a chunk of each."""
    ends: list[Completion | None] = [None] * len(asked)
    streams = [engine.stream(prompt, max_new_tokens=LENGTH) for prompt in asked]
    for chunks in zip_longest(*streams):
        for place, chunk in enumerate(chunks):
            ends[place] = (chunk.completion if chunk is not None and chunk.completion
                           else ends[place])
    return [end.tokens for end in ends if end is not None]


def generated(engine: Engine, *asked: list[int]) -> Texts:
    return [one.tokens for one in engine.generate(asked, max_new_tokens=LENGTH)]


def in_turn(engine: Engine) -> Texts:
    return streamed(engine, LONG, SHORT, LAST)


def inside(engine: Engine) -> Texts:
    """A batch in the middle of a stream, whose rows are more."""
    stream = engine.stream(LONG, max_new_tokens=LENGTH)
    next(stream), next(stream)
    others = generated(engine, SHORT, LAST)
    *_, last = stream
    assert last.completion is not None
    return [last.completion.tokens, *others]


def left_half_way(engine: Engine) -> Texts:
    """A stream and a batch that nobody reads to the end, and that are still there."""
    stream, batch = engine.stream(LAST), engine.as_completed([SHORT, LONG, LAST], batch_size=2)
    next(stream), next(stream), next(batch)
    found = generated(engine, LONG, SHORT, LAST)
    next(stream)
    return found


def two_engines(engine: Engine) -> Texts:
    """One drafter in both."""
    other, stream = (Engine(engine.target, engine.drafter),
                     engine.stream(LONG, max_new_tokens=LENGTH))
    next(stream)
    others = generated(other, SHORT, LAST)
    *_, last = stream
    assert last.completion is not None
    return [last.completion.tokens, *others]


def two_threads(engine: Engine) -> Texts:
    found: dict[int, Texts] = {}

    def run(place: int, *asked: list[int]) -> None:
        found[place] = generated(engine, *asked)

    threads = [Thread(target=run, args=(0, LONG)), Thread(target=run, args=(1, SHORT, LAST))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [*found[0], *found[1]]


WITH_MEMORY = ["suffix", "recycling", "portfolio", "portfolio, medusa", "draft chain", "draft tree",
               "target itself", "medusa", "redrafter"]  # fmt: skip


@pytest.mark.parametrize("drafter", WITH_MEMORY)
def test_texts_that_run_at_the_same_time(drafter: str) -> None:
    engine = Engine(target(), DRAFTERS[drafter](target()))
    alone = generated(engine, LONG, SHORT, LAST)
    ways: tuple[Callable[[Engine], Texts], ...] = (in_turn, inside, left_half_way, two_engines,
                                                   two_threads)
    for way in ways:
        assert way(engine) == alone, way.__name__


def test_what_a_drafter_learned_outlasts_a_run_and_an_open_stream() -> None:
    """Of the same text, with another one open: more is accepted the second time."""
    engine = Engine(target(), DRAFTERS["suffix"](target()))
    stream = engine.stream(SHORT)
    next(stream)
    first, second = (engine.generate([LONG], max_new_tokens=LENGTH) for _ in range(2))
    assert accepted_share(second) > accepted_share(first)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_goes_on() -> None:
    engine = Engine(target(), Guess())
    alone, (reads, writes) = generated(engine, LONG), os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            os.write(writes, bytes(generated(engine, LONG)[0]))
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert os.read(reads, 1000) == bytes(alone[0])
