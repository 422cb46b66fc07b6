"""What an engine offers beside `generate` and `stream`: ids, asyncio, totals, and an end."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from tiny import model, prompts, target

import draftproof as dp
from draftproof.drafters.prompt_lookup import PromptLookup
from draftproof.engine.engine import Engine
from draftproof.errors import BadInput

NEW = 12


def engine(**options: Any) -> Engine:
    return Engine(target(), PromptLookup(), **options)


def padded(texts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, texts))
    ids = [[0] * (width - len(text)) + text for text in texts]
    mask = [[0] * (width - len(text)) + [1] * len(text) for text in texts]
    return torch.tensor(ids), torch.tensor(mask)


@pytest.mark.parametrize("n", [1, 2])
def test_ids_come_as_from_transformers(n: int) -> None:
    ids, mask = padded(prompts(4, seed=3))
    theirs = model().generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False,
                              eos_token_id=[5, 6, 8], pad_token_id=0)
    sampling = dp.Sampling(stop_tokens=(5, 6, 8))
    ours = engine().generate_ids(ids, mask, max_new_tokens=NEW, sampling=sampling, n=n)
    assert torch.equal(ours, theirs.repeat_interleave(n, 0))
    alone = engine().generate_ids(ids[1][mask[1] == 1], max_new_tokens=NEW, sampling=sampling)
    assert alone[0, mask[1].sum() :].tolist() == theirs[1, ids.shape[1] :].tolist()[: len(alone[0])]
    with pytest.raises(BadInput, match="pad batches on the left"):
        engine().generate_ids(ids, mask.flip(1))


def test_the_loop_is_free_while_text_comes() -> None:
    """Several streams give the texts of `stream`; no round runs in the loop's thread."""
    one, asked, home = engine(), prompts(3, seed=1), threading.get_ident()
    wanted = [one.generate([text], max_new_tokens=40)[0].tokens for text in asked]
    steps, within = one.decoder, set[int]()

    def decoder(*size: int) -> Any:
        within.add(threading.get_ident())
        return steps(*size)

    one.decoder = decoder  # type: ignore[method-assign]

    async def read(text: list[int]) -> list[int]:
        chunks = [chunk async for chunk in one.astream(text, max_new_tokens=40)]
        assert chunks[-1].completion is not None
        return chunks[-1].completion.tokens

    async def main() -> tuple[list[list[int]], int]:
        readers, turns = asyncio.gather(*map(read, asked)), 0
        while not readers.done():
            await asyncio.sleep(0)
            turns += 1
        return await readers, turns

    found, turns = asyncio.run(main())
    assert found == wanted and turns > 100 and within and home not in within


@pytest.mark.parametrize("how", ["cancelled", "closed"])
def test_a_stream_that_nobody_reads_frees_its_row(how: str) -> None:
    one = engine()
    make, held = one.decoder, list[weakref.ref[Any]]()

    def decoder(*size: int) -> Any:
        made = make(*size)
        held.append(weakref.ref(made.batch))
        return made

    one.decoder = decoder  # type: ignore[method-assign]

    async def main() -> None:
        stream = one.astream([1, 2, 3], max_new_tokens=200)
        if how == "closed":
            for _ in range(3):
                assert (await anext(stream)).completion is None
            await stream.aclose()  # type: ignore[attr-defined]
            return

        async def read() -> None:
            for _ in range(3):
                await anext(stream)
            begun.set()
            async for _ in stream:
                pass

        begun = asyncio.Event()
        reader = asyncio.create_task(read())
        await begun.wait()
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader

    asyncio.run(main())
    one._thread.submit(gc.collect).result(timeout=20)                 # behind the round that ran
    assert held and held[0]() is None
    assert 0 < one.stats.rounds < 100, "what it did is counted, and no more was done"


def test_errors_reach_who_awaits() -> None:
    async def main() -> None:
        async for _ in engine().astream([1, 10**6]):
            pass

    with pytest.raises(BadInput, match="token id 1000000"):
        asyncio.run(main())


def test_totals_are_the_sum_of_all_calls() -> None:
    with engine(budget=3) as one:
        assert one.stats.rounds == 0
        done = one.generate(prompts(3, seed=2), n=2, max_new_tokens=NEW)
        done += [chunk.completion for chunk in one.stream([1, 2], max_new_tokens=NEW) if
                 chunk.completion]
        total = one.stats
        for name in ("rounds", "emitted", "drafted", "accepted", "reached"):
            assert getattr(total, name) == sum(getattr(each.stats, name) for each in done), name
        assert sum(total.tried_at) == sum(sum(each.stats.tried_at) for each in done)
        longest = max(sum(each.stats.seconds.values()) for each in done)
        assert longest < sum(total.seconds.values()), "wall time of two calls"
        assert one.generate([[1, 2]], max_new_tokens=0 + NEW)[0].tokens == done[-1].tokens


def test_a_closed_engine_refuses_and_holds_no_model() -> None:
    own = dp.load(model(), drafter="none")
    seen, running = weakref.ref(own.target), own.stream([1, 2, 3], max_new_tokens=4)
    next(running)
    with own as same:
        assert same is own
    tokens = [chunk.completion.tokens for chunk in running if chunk.completion]
    assert len(tokens[0]) == 4, "what ran goes on"
    del running
    gc.collect()
    assert seen() is None
    with pytest.raises(BadInput, match="closed"):
        own.generate([[1, 2]])
