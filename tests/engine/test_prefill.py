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


def test_a_prompt_is_read_alike_however_long_the_others_are() -> None:
    """A row begins while another fills the cache nearly to the end."""
    one = decoder(PromptLookup(), rows=2, budget=3, own=Roomy(target()), capacity=64)
    admit(one, [running(list(range(2, 10)), limit=50)])
    while len(one.running[0].tokens) < 44:
        one.step()
    admit(one, [running(list(range(2, 22)), limit=8)])
    while one.running:
        one.step()


@pytest.mark.parametrize("name", DRAFTERS)
def test_prompts_that_come_together_are_read_in_one_pass(name: str) -> None:
    """Shorter ones padded, with several samples, two that end at once: all learn the same."""
    asked = [prompt[: 3 + 4 * index] for index, prompt in enumerate(prompts(4, seed=3))]
    found = []
    for together in (True, False):
        requests = [[running(prompt, limit=limit, temperature=0.8, seed=limit, sample=sample)
                     for sample in range(1 + limit % 2)]
                    for prompt, limit in zip(asked, (20, 31, 25, 1), strict=True)]
        own = Counted(target())
        one = decoder(DRAFTERS[name](target()), rows=8, budget=6, own=own)
        admit(one, [running(asked[3], limit=6)])                 # somebody is there before them
        one.step()
        own.reads.clear()
        for batch in [requests] if together else [[request] for request in requests]:
            admit(one, *batch)
        assert len(own.reads) == (1 if together else 4)
        unread = one.drafter.unread(len(one.batch.pending))
        while one.running:
            one.step()
        assert not one.batch.cache.lengths.any(), "an empty batch has an empty cache"
        rows = [row for request in requests for row in request]
        found.append((unread, [(row.tokens, row.stats.rounds, row.stats.drafted) for row in rows]))
    assert found[0] == found[1]


def test_short_prompts_are_read_together_where_padding_costs_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    short, long, longer = ([3] * tokens for tokens in (3, 60, 70))
    one = decoder(PromptLookup(), rows=6).prompts
    assert [one.admissible(waiting) for waiting in ([], [short], [short] * 3)] == [0, 1, 1]
    monkeypatch.setattr(Target, "ragged_batches", True)
    one = decoder(PromptLookup(), rows=6).prompts
    assert SHORT <= NODES, "they are read by the same layers as alone"
    assert [one.admissible([short] * count) for count in (3, 6)] == [3, 6]
    assert one.admissible([long] * 6) == 4, "five would be 300 with padding"
    assert one.admissible([longer] * 2) == one.admissible([short, longer]) == 1


@pytest.mark.parametrize("name", ["plain", "draft tree", "portfolio, medusa", "redrafter"])
def test_a_long_prompt_is_read_between_rounds(name: str) -> None:
    """Others go on, end and join between its chunks; nothing differs from a prompt read at once."""
    found, long = [], [2 + number * number % 29 for number in range(50)]
    for beside in (True, False):
        asked = [running(prompt, limit=limit, temperature=0.8, seed=limit)
                 for prompt, limit in zip(prompts(3, longest=9), (40, 3, 20), strict=True)]
        samples = [running(long, limit=9, temperature=0.8, seed=4, sample=one) for one in (0, 1)]
        own = Counted(target())
        one = decoder(DRAFTERS[name](target()), budget=3, own=own)
        one.prompts.chunk = 16
        admit(one, asked[:1])
        admit(one, asked[1:2])
        assert one.prompts.is_long(long) and not one.prompts.is_long(asked[0].prompt)
        for number, _ in enumerate(read_elsewhere(one, samples) if beside else range(3)):
            before = len(asked[0].tokens)
            one.step()
            assert len(asked[0].tokens) > before
            if number == 1:
                admit(one, asked[2:])
        if not beside:
            admit(one, samples)
        assert number == 2 and own.reads[-1][0].shape == (1, 50 % 16)
        state = one.drafter.unread(len(one.batch.pending)), one.batch.cache.lengths.tolist()
        while one.running:
            one.step()
        rows = [*asked, *samples]
        rounds = [row.stats.rounds for row in rows] if name not in LEARNERS else []
        found.append((state, [row.tokens for row in rows], rounds))
    assert found[0] == found[1]


def test_short_chunks_of_a_prompt_are_observed_together() -> None:
    """A drafter is told of a prompt in few pieces, however small the chunks were."""
    told, long = list[int](), [2 + number * number % 29 for number in range(150)]

    class Told(PromptLookup):
        def observe(self, commit: Commit) -> None:
            told.append(commit.tokens.shape[1])

    one = decoder(Told(), capacity=256)
    prefill = one.prefill([[running(long, limit=2)]], elsewhere=True)
    with torch.inference_mode():
        while not prefill.finished:
            prefill.read(7)
    one.read(prefill)
    assert len(told) <= -(-len(long) // SHORT) + 1 and sum(told) == len(long)
