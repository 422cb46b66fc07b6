"""Prompts are read alike alone, side by side and beside a round, where that costs nothing."""

from __future__ import annotations

from typing import Any

import pytest
from batches import Counted, Script, decoder, running
from drafting import DRAFTERS, LEARNERS, Oracle
from tiny import prompts, target

from draftproof.core.acceptance import RULES
from draftproof.core.ops import TORCH
from draftproof.core.tree import TokenTree
from draftproof.drafters.prompt_lookup import PromptLookup
from draftproof.engine.budget import Fixed
from draftproof.engine.decoder import Decoder
from draftproof.engine.prefill import SHORT
from draftproof.model.fused_forward import NODES
from draftproof.model.kv_cache import KVCache
from draftproof.model.target import Target


class Roomy(Counted):
    """The cache must hold every read: else operators read it, whose last bits are others."""

    def read(self, tree: TokenTree, cache: KVCache, **options: Any) -> Any:
        assert cache.holds(tree.tokens.shape[1])
        return super().read(tree, cache, **options)


def test_a_prompt_is_read_alike_however_long_the_others_are() -> None:
    """A row begins while another fills the cache nearly to the end."""
    one = Decoder(Roomy(target()), PromptLookup(), RULES["match"], Fixed(3), 2, 64)
    one.admit([running(list(range(2, 10)), limit=50)])
    while len(one.running[0].tokens) < 44:
        one.step()
    one.admit([running(list(range(2, 22)), limit=8)])
    while one.running:
        one.step()


@pytest.mark.parametrize("name", DRAFTERS)
def test_prompts_that_come_together_are_read_in_one_pass(name: str) -> None:
    """Shorter ones padded, with several samples, two that end at once: all learn the same."""
    asked, limits = ([prompt[: 3 + 4 * index] for index, prompt in enumerate(prompts(4, seed=3))],
                     (20, 30, 25, 1))
    found = []
    for together in (True, False):
        requests = [[running(prompt, limit=limit, temperature=0.8, seed=index, sample=sample)
                     for sample in range(1 + index % 2)]
                    for index, (prompt, limit) in enumerate(zip(asked, limits, strict=True))]
        own = Counted(target())
        one = decoder(DRAFTERS[name](target()), rows=7, budget=6, own=own)
        one.admit([running(asked[3], limit=6)])  # somebody is there before them
        one.step()
        own.reads.clear()
        if together:
            one.admit(*requests)
            assert [tokens.shape for tokens, _ in own.reads] == [
                (4, max(len(prompt) for prompt in asked))
            ]
        for request in [] if together else requests:
            one.admit(request)
        assert len(own.reads) == (1 if together else 4)
        unread = one.drafter.unread()
        while one.running:
            one.step()
        assert not one.batch.cache.lengths.any(), "an empty batch has an empty cache"
        found.append((unread,
                      [(row.tokens, row.stats.rounds, row.stats.drafted) for request in requests
                       for row in request]))
    assert found[0] == found[1]


def test_prompts_that_are_read_together_are_read_by_the_same_layers_as_alone() -> None:
    assert SHORT <= NODES


def test_short_prompts_are_read_together_where_padding_costs_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = decoder(PromptLookup(), rows=6)
    short, long, longer = ([running([3] * tokens)] for tokens in (3, 60, 70))
    twice = [running([3, 4, 5]), running([3, 4, 5], sample=1)]
    assert [one.admissible(waiting) for waiting in ([], [short], [short] * 3, [long] * 9)] == [
        0, 1, 1, 1
    ]
    monkeypatch.setattr(Target, "skips_absent", True)
    assert [one.admissible([short] * count) for count in (3, 6, 9)] == [3, 6, 6]
    assert (one.admissible([twice] * 4) == 3
            and one.admissible([short, short, [*twice, *twice, *short]]) == 2)
    assert one.admissible([long] * 6) == 4 and one.admissible([*[short] * 4, long]) == 4, (
        "five would be 300 with padding"
    )
    assert one.admissible([longer] * 2) == 1 and one.admissible([short, longer]) == 1
    one.admit([running([3, 4, 5]) for _ in range(5)])
    assert one.admissible([short, short]) == 1 and one.admissible([twice, short]) == 0
    one.prompts.ops = TORCH
    assert one.admissible([short, short]) == 1


def test_short_prompts_may_join_in_a_round_where_padding_costs_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, short, long = decoder(PromptLookup()), [running([3] * SHORT)], [running([3] * (SHORT + 1))]
    monkeypatch.setattr(Target, "skips_absent", True)
    assert not one.takes([short]), "nobody runs"
    one.admit([running([3, 4, 5])])
    assert one.takes([short]) and one.takes([short, [*short, *short]])
    assert not one.takes([long]) and not one.takes([short, long])
    one.prompts.ops = TORCH
    assert not one.takes([short])
    one.prompts.ops = one.ops
    monkeypatch.setattr(Target, "skips_absent", False)
    assert not one.takes([short])


@pytest.mark.parametrize("sizes", [(6,), (0, 6), (0, 0, 2)], ids=str)
@pytest.mark.parametrize("name", DRAFTERS)
def test_who_joins_in_a_round_begins_as_behind_it(name: str, sizes: tuple[int, ...]) -> None:
    """In each round some join: long and short ones, with several samples, one that ends at once,
    where others just ended.

    Rows have another order then, so drafters that learn from all of them draft something else."""
    limits, found = (20, 1, 7, 30, 12, 5, 9, 15, 3), []
    for beside in (True, False):
        requests = [
            [running(prompt[: 3 + 2 * index], limit=limit, temperature=0.8, seed=index,
                     sample=sample)
             for sample in samples]
            for index, (prompt, limit) in enumerate(zip(prompts(9, seed=3), limits, strict=True))
            for samples in [range(1 + index % 2)]
        ]
        own, waiting, unread = Counted(target()), list(requests), list[int]()
        one = decoder(DRAFTERS[name](target()), rows=5, budget=Script(sizes * 40), own=own)
        one.admit(waiting.pop(0))
        while one.running:
            free = 5 - len(one.running)
            coming = [waiting.pop(0) for _ in range(min(2, len(waiting), free // 2))]
            own.reads.clear()
            if beside:
                one.step(coming)
                assert len(own.reads) == 1
            else:
                one.step()
                if coming:
                    one.admit(*coming)
            unread.append(one.drafter.unread())
            for place, row in enumerate(one.running):
                text = [*row.prompt, *row.tokens]
                assert (int(one.batch.cache.lengths[place]) == len(text) - 1
                        and one.batch.text[place, : len(text)].tolist() == text)
        assert not waiting and not one.batch.cache.lengths.any()
        rows = [row for request in requests for row in request]
        rounds = ([(row.stats.rounds, row.stats.drafted) for row in rows] if name not in LEARNERS
                  else [])
        found.append((unread, [row.tokens for row in rows], rounds))
    assert found[0] == found[1]


@pytest.mark.parametrize(("committed", "nodes", "apart"),
                         [(44, 3, False), (45, 3, True), (20, SHORT - 1, False), (20, SHORT, True)])
def test_who_joins_is_read_apart_where_there_is_no_room(
    committed: int, nodes: int, apart: bool
) -> None:
    """Where the longest row leaves too little, or a draft is wider than fused layers read."""
    own, joins = Counted(target()), running([5] * 20, limit=8)
    one = Decoder(own, Oracle({}), RULES["match"], Script([nodes]), 2, 64 if nodes == 3 else 128)
    one.admit([running([3] * committed, limit=9)])
    own.reads.clear()
    one.step([[joins]])
    assert [tokens.shape for tokens, _ in own.reads] == ([(1, nodes + 1), (1, 20)] if apart
                                                         else [(2, max(20, nodes + 1))])
    assert len(one.running) == 2 and len(joins.tokens) == 1


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
        one.prompts._chunk = 16
        one.admit(asked[:1])
        one.admit(asked[1:2])
        assert one.is_long(samples) and not one.is_long(asked[:1])
        chunks, counts = one.read_beside(samples) if beside else iter(range(3)), list[int]()
        for number, _ in enumerate(chunks):
            one.step()
            counts.append(len(asked[0].tokens))
            if number == 1:
                one.admit(asked[2:])
        assert len(counts) == 3 and counts[0] < counts[1] < counts[2]
        if not beside:
            one.admit(samples)
        assert own.reads[-1][0].shape == (1, 50 % 16)
        state = one.drafter.unread(), one.batch.cache.lengths.tolist()
        while one.running:
            one.step()
        rows = [*asked, *samples]
        rounds = [row.stats.rounds for row in rows] if name not in LEARNERS else []
        found.append((state, [row.tokens for row in rows], rounds))
    assert found[0] == found[1]
