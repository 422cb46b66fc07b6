"""A long prompt is read beside the texts of others: they go on between its chunks, and every text
is the one its request has alone."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from asking import PROMPTS

import draftproof as dp
from draftproof.engine.engine import Engine
from draftproof.engine.prefix_cache import PrefixCache
from draftproof.server.metrics import Metrics
from draftproof.server.scheduler import Lane, Progress, Ticket

LONG = "One day, Lily and Tom went to the big park with a red ball and a small dog. " * 5
ASKED = [(PROMPTS[0], 40, 1), (LONG, 8, 2), (PROMPTS[1] + LONG, 8, 1), (PROMPTS[2], 3, 1)]
CHUNK = 32


class Load:
    """A lane, run by hand, and what it told of each request."""

    def __init__(self, engine: Engine) -> None:
        self.told = list[list[Progress]]()
        self.lane = Lane(engine, 4, 400, Metrics("demo"), lambda news: [
            ticket.hears(progress) for ticket, progress in news])
        self.lane.decoder = engine.decoder(4, 400)
        self.lane.decoder.prompts.chunk = CHUNK

    def submit(self, prompt: str, new: int, n: int) -> Ticket:
        sampling = dp.Sampling(temperature=0.8, seed=len(prompt), logprobs=True)
        (rows,) = self.lane.engine.requests.read([prompt], new, sampling, n)
        self.told.append([])
        ticket = Ticket(rows, self.told[-1].append, streams=True)
        self.lane.waiting.append(ticket)
        return ticket

    def round(self) -> None:
        self.lane.round(threading.Condition())

    def finish(self) -> list[list[tuple[int, list[int], list[float] | None]]]:
        """Sample, tokens and log-probabilities of each request's texts."""
        while self.lane.busy:
            self.round()
        done = [[one.completion for one in told if one.completion] for told in self.told]
        return [sorted((one.sample, one.tokens, one.logprobs) for one in texts) for texts in done]


@pytest.mark.parametrize("options", [{"assistant_model": "demo-draft"}, {"drafter": "demo-medusa"}])
def test_others_go_on_between_the_chunks(options: dict[str, str]) -> None:
    engine = dp.load("demo", budget=4, **options)                           # type: ignore[arg-type]
    plain = dp.Engine(engine.target, codec=engine.codec, stop_tokens=engine.stop_tokens)
    load, rounds = Load(engine), 0
    load.submit(*ASKED[0])
    load.round()
    for one in ASKED[1:]:
        load.submit(*one)
    while not load.told[1]:
        before = len(load.told[0])
        load.round()
        assert len(load.told[0]) == before + 1, "the text that runs has a round for every chunk"
        rounds += 1
    assert rounds == -(-len(load.lane.running[1].rows[0].prompt) // CHUNK) > 2
    assert not load.told[2] and not load.told[3], "in turn"
    written = load.finish()
    for one, texts in zip(ASKED, written, strict=True):
        alone = Load(plain)
        alone.submit(*one)
        assert alone.finish() == [texts]
    engine.prefixes = PrefixCache(32 << 20)
    again = Load(engine)
    for _ in range(2):
        again.submit(*ASKED[1])
        assert again.finish()[-1] == written[1]
    assert engine.prefixes.hits == engine.target.skips_absent


def test_whoever_leaves_before_the_last_chunk_frees_the_rows(server: Any) -> None:
    load = Load(server.engine)
    left, stays = load.submit(*ASKED[1]), load.submit(*ASKED[2])
    load.round()
    assert load.lane.reading is not None and load.lane.reading[0] is left
    left.cancelled = True
    load.finish()
    assert stays.rows[0].finish_reason in ("stop", "length") and load.lane.reading is None
