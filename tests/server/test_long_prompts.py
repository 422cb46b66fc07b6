"""A long prompt is read together with the texts of others: they go on between its chunks, and every
text is the one its request has alone."""

from __future__ import annotations

from typing import Any

import pytest
from asking import PROMPTS

import draftproof as dp
from draftproof.engine.engine import Engine, Request, Status, Update
from draftproof.engine.prefix_cache import PrefixCache

LONG = "One day, Lily and Tom went to the big park with a red ball and a small dog. " * 5
ASKED = [(PROMPTS[0], 80, 1), (LONG, 8, 2), (PROMPTS[1] + LONG, 8, 1), (PROMPTS[2], 3, 1)]
CHUNK = 32


class Load:
    """A scheduler as the server has it, run by hand, and the updates of each request."""

    def __init__(self, engine: Engine) -> None:
        self.updates = list[list[Update]]()
        self.engine, self.scheduler = engine, engine.new_scheduler(4, 400, interleave=True)
        decoder = self.scheduler.decoder = engine.decoder(4, 400)
        decoder.prompts.chunk = CHUNK

    def submit(self, prompt: str, new: int, n: int) -> Request:
        sampling = dp.Sampling(temperature=0.8, seed=len(prompt), logprobs=True)
        (request,) = self.engine.read([prompt], max_new_tokens=new, sampling=sampling, n=n)
        self.updates.append([])
        request.on_update = self.updates[-1].append
        return self.scheduler.add(request)

    def finish(self) -> list[list[tuple[int, list[int], list[float] | None]]]:
        """Sample, tokens and log-probabilities of each request's texts."""
        while self.scheduler.has_unfinished_requests():
            self.scheduler.step()
        done = [[item.completion for item in told if item.completion] for told in self.updates]
        return [sorted((item.sample, item.tokens, item.logprobs) for item in texts)
                for texts in done]


@pytest.mark.parametrize("options", [{"assistant_model": "demo-draft"}, {"drafter": "demo-medusa"}])
def test_running_streams_continue_between_prompt_chunks(options: dict[str, str]) -> None:
    engine = dp.load("demo", budget=4, **options)                           # type: ignore[arg-type]
    plain = dp.Engine(engine.target, codec=engine.codec, stop_tokens=engine.stop_tokens)
    load, rounds, together = Load(engine), 0, list[object]()
    read_with_chunk = engine.target.read_with_chunk
    engine.target.read_with_chunk = lambda *asked: (                    # type: ignore[method-assign]
        together.append(both := read_with_chunk(*asked)) or both)       # type: ignore[func-returns-value]
    load.submit(*ASKED[0])
    load.scheduler.step()
    for item in ASKED[1:]:
        load.submit(*item)
    while not load.updates[1]:
        before = len(load.updates[0])
        load.scheduler.step()
        assert len(load.updates[0]) == before + 1, "the text that runs has a round for every chunk"
        rounds += 1
    assert rounds >= -(-len(load.scheduler.running[1].prompt) // CHUNK) > 2
    assert not load.updates[2] and not load.updates[3], "in turn"
    if engine.target.ragged_batches:
        assert together and None not in together, "the weights are read once for both"
    written = load.finish()
    for item, texts in zip(ASKED, written, strict=True):
        alone = Load(plain)
        alone.submit(*item)
        assert alone.finish() == [texts]
    engine.prefixes = PrefixCache(32 << 20)
    again = Load(engine)
    for _ in range(2):
        again.submit(*ASKED[1])
        assert again.finish()[-1] == written[1]
    assert engine.prefixes.hits == engine.target.ragged_batches


def test_a_cached_prefix_survives_reuse_of_its_row() -> None:
    """Another prompt is read into the same row before the first text ends; then the first again."""
    engine = dp.load("demo", drafter="none")
    engine.prefixes = PrefixCache(32 << 20)
    together = Load(engine)
    for item in ((LONG, 80, 1), (PROMPTS[1] + LONG, 8, 1), (LONG, 8, 1)):
        together.submit(*item)
        while not together.updates[-1]:
            together.scheduler.step()
    assert together.updates[0][-1].completion is None, "the first text still runs"
    first, _, last = together.finish()
    assert engine.prefixes.hits == engine.target.ragged_batches
    assert (last[0][1], last[0][2]) == (first[0][1][:8], (first[0][2] or [])[:8])


def test_cancelling_during_prefill_frees_the_rows(server: Any) -> None:
    load = Load(server.engine)
    left, stays = load.submit(*ASKED[1]), load.submit(*ASKED[2])
    load.scheduler.step()
    assert (left.status, stays.status) == (Status.PREFILLING, Status.WAITING)
    load.scheduler.abort(left)
    load.finish()
    assert (left.status, stays.status) == (Status.ABORTED, Status.FINISHED)
    assert [update.completion.finish_reason for update in load.updates[0] if update.completion] == [
        "abort"] * 2
    assert stays.sequences[0].finish_reason in ("stop", "length")
