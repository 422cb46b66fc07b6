"""Prompts are read alike alone, side by side and between rounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from batches import Counted, admit, decoder, read_elsewhere, running
from drafting import DRAFTERS, LEARNERS
from tiny import prompts, target

from draftproof.cache.kv_cache import KVCache
from draftproof.core.messages import Commit
from draftproof.core.tree import TokenTree
from draftproof.drafters.prompt_lookup import PromptLookup
from draftproof.engine.prefill import SHORT
from draftproof.forward.fused_forward import NODES
from draftproof.model.target import Target


class Roomy(Counted):
    """The cache must hold every read: else operators read it, whose last bits are others."""

    def read(self, tree: TokenTree, cache: KVCache, **options: Any) -> Any:
        assert cache.holds(tree.tokens.shape[1])
        return super().read(tree, cache, **options)


def test_prompts_are_read_identically_next_to_any_others() -> None:
    """A row begins while another fills the cache nearly to the end."""
    batched = decoder(PromptLookup(), rows=2, budget=3, ours=Roomy(target()), capacity=64)
    admit(batched, [running(list(range(2, 10)), limit=50)])
    while len(batched.running[0].tokens) < 44:
        batched.step()
    admit(batched, [running(list(range(2, 22)), limit=8)])
    while batched.running:
        batched.step()


@pytest.mark.parametrize("name", DRAFTERS)
def test_prompts_that_come_together_are_read_in_one_pass(name: str) -> None:
    """Shorter ones padded, with several samples, two that end at once: all learn the same."""
    asked = [prompt[: 3 + 4 * index] for index, prompt in enumerate(prompts(4, seed=3))]
    results = []
    for together in (True, False):
        requests = [[running(prompt, limit=limit, temperature=0.8, seed=limit, sample=sample)
                     for sample in range(1 + limit % 2)]
                    for prompt, limit in zip(asked, (20, 31, 25, 1), strict=True)]
        counting = Counted(target())
        batched = decoder(DRAFTERS[name](target()), rows=8, budget=6, ours=counting)
        admit(batched, [running(asked[3], limit=6)])                 # somebody is there before them
        batched.step()
        counting.reads.clear()
        for batch in [requests] if together else [[request] for request in requests]:
            admit(batched, *batch)
        assert len(counting.reads) == (1 if together else 4)
        unread = batched.drafter.unread(len(batched.batch.pending))
        while batched.running:
            batched.step()
        assert not batched.batch.cache.lengths.any(), "an empty batch has an empty cache"
        rows = [row for request in requests for row in request]
        counts = [(row.tokens, row.stats.rounds, row.stats.drafted) for row in rows]
        results.append((unread, counts))
    assert results[0] == results[1]


def test_short_prompts_are_read_together_where_padding_costs_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    short, long, longer = ([3] * tokens for tokens in (3, 60, 70))
    reader = decoder(PromptLookup(), rows=6).prompts
    assert [reader.admissible(waiting) for waiting in ([], [short], [short] * 3)] == [0, 1, 1]
    monkeypatch.setattr(Target, "ragged_batches", True)
    reader = decoder(PromptLookup(), rows=6).prompts
    assert SHORT <= NODES, "they are read by the same layers as alone"
    assert [reader.admissible([short] * count) for count in (3, 6)] == [3, 6]
    assert reader.admissible([long] * 6) == 4, "five would be 300 with padding"
    assert reader.admissible([longer] * 2) == reader.admissible([short, longer]) == 1


@pytest.mark.parametrize("name", ["plain", "draft tree", "portfolio, medusa", "redrafter"])
def test_a_long_prompt_is_read_between_rounds(name: str) -> None:
    """Others go on, end and join between its chunks; nothing differs from a prompt read at once."""
    results, long = [], [2 + number * number % 29 for number in range(50)]
    for next_to in (True, False):
        asked = [running(prompt, limit=limit, temperature=0.8, seed=limit)
                 for prompt, limit in zip(prompts(3, longest=9), (40, 3, 20), strict=True)]
        samples = [running(long, limit=9, temperature=0.8, seed=4, sample=each) for each in (0, 1)]
        counting = Counted(target())
        batched = decoder(DRAFTERS[name](target()), budget=3, ours=counting)
        batched.prompts.chunk = 16
        admit(batched, asked[:1])
        admit(batched, asked[1:2])
        assert batched.prompts.is_long(long) and not batched.prompts.is_long(asked[0].prompt)
        for number, _ in enumerate(read_elsewhere(batched, samples) if next_to else range(3)):
            before = len(asked[0].tokens)
            batched.step()
            assert len(asked[0].tokens) > before
            if number == 1:
                admit(batched, asked[2:])
        if not next_to:
            admit(batched, samples)
        assert number == 2 and counting.reads[-1][0].shape == (1, 50 % 16)
        batch = batched.batch
        state = batched.drafter.unread(len(batch.pending)), batch.cache.lengths.tolist()
        while batched.running:
            batched.step()
        rows = [*asked, *samples]
        rounds = [row.stats.rounds for row in rows] if name not in LEARNERS else []
        results.append((state, [row.tokens for row in rows], rounds))
    assert results[0] == results[1]


def test_short_chunks_of_a_prompt_are_observed_together() -> None:
    """A drafter is told of a prompt in few pieces, however small the chunks were."""
    told, long = list[int](), [2 + number * number % 29 for number in range(150)]

    class Told(PromptLookup):
        def observe(self, commit: Commit) -> None:
            told.append(commit.tokens.shape[1])

    batched = decoder(Told(), capacity=256)
    prefill = batched.prefill([[running(long, limit=2)]], elsewhere=True)
    with torch.inference_mode():
        while not prefill.finished:
            prefill.read(7)
    batched.read(prefill)
    assert len(told) <= -(-len(long) // SHORT) + 1 and sum(told) == len(long)
