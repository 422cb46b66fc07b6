"""Several texts of one engine, or of one drafter, at a time: each is what it is alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest

import pytest
from drafting import DRAFTERS, Guess, accepted_share
from tiny import prompts, target

from draftproof.engine.engine import Chunk, Engine

LENGTH = 14
LONG, SHORT, LAST = prompts(9, seed=3)[6:]
Texts = list[list[int]]


def generated(engine: Engine, *asked: list[int]) -> Texts:
    return [completion.tokens for completion in engine.generate(asked, max_new_tokens=LENGTH)]


def end(chunks: Iterable[Chunk | None]) -> list[int]:
    """The tokens of the last of a stream's chunks."""
    *_, last = (chunk for chunk in chunks if chunk is not None)
    assert last.completion is not None
    return last.completion.tokens


def in_turn(engine: Engine) -> Texts:
    """A chunk of each stream."""
    streams = [engine.stream(text, max_new_tokens=LENGTH) for text in (LONG, SHORT, LAST)]
    return [end(chunks) for chunks in zip(*zip_longest(*streams), strict=True)]


def inside(engine: Engine) -> Texts:
    """A batch, whose rows are more, and one of another engine, in the middle of a stream."""
    stream = engine.stream(LONG, max_new_tokens=LENGTH)
    next(stream), next(stream)
    (short,), (last,) = generated(engine, SHORT), generated(
        Engine(engine.target, engine.drafter), LAST)
    generated(engine, SHORT, LAST)
    return [end(stream), short, last]


def with_unfinished_streams(engine: Engine) -> Texts:
    """A stream and a batch that nobody reads to the end, and that are still there."""
    stream, batch = engine.stream(LAST), engine.as_completed([SHORT, LONG, LAST], batch_size=2)
    next(stream), next(stream), next(batch)
    result = generated(engine, LONG, SHORT, LAST)
    next(stream)
    return result


def two_threads(engine: Engine) -> Texts:
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(generated, engine, LONG)
        second = pool.submit(generated, engine, SHORT, LAST)
    return [*first.result(), *second.result()]


@pytest.mark.parametrize("drafter", [
    "suffix", "recycling", "portfolio, medusa", "draft chain", "draft tree", "target itself",
    "redrafter"])  # fmt: skip
def test_texts_that_run_at_the_same_time(drafter: str) -> None:
    engine = Engine(target(), DRAFTERS[drafter](target()))
    alone = generated(engine, LONG, SHORT, LAST)
    for way in (in_turn, inside, with_unfinished_streams, two_threads):
        assert way(engine) == alone, way.__name__


def test_learned_state_survives_runs_and_open_streams() -> None:
    """Of the same text, with another one open: more is accepted the second time."""
    engine = Engine(target(), DRAFTERS["suffix"](target()))
    stream = engine.stream(SHORT)
    next(stream)
    first, second = (engine.generate([LONG], max_new_tokens=LENGTH) for _ in range(2))
    assert accepted_share(second) > accepted_share(first)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_generation_works_in_a_forked_process() -> None:
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


def test_a_stream_that_another_thread_read_may_be_open_at_exit() -> None:
    """Its clean-up would run while the interpreter frees tensors, which torch aborts."""
    program = """if True:
        import threading
        import draftproof as dp
        stream = dp.load("demo").stream("Once upon a time", max_new_tokens=200)
        next(stream)
        thread = threading.Thread(target=lambda: next(stream))
        thread.start()
        thread.join()
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
