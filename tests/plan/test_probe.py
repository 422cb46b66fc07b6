"""What is timed: rounds of the engine, in blocks of one size, with the nodes that were read."""

from __future__ import annotations

import pytest
from tiny import prompts, target

import draftproof as dp
from draftproof.core.params import Sampling
from draftproof.drafters.medusa import MedusaHead
from draftproof.engine.engine import Engine
from draftproof.plan import probe as probing
from draftproof.plan.probe import RandomDrafter, by_size, probe, rounds


def test_probe_times_draft_sizes_in_blocks_and_random_drafts_are_rejected() -> None:
    engine, asked = Engine(target()), prompts(2, seed=1)
    noise, heads = RandomDrafter(target().vocab_size), MedusaHead.fresh(target(), num_heads=2)
    sizes = [[0, 1, 3], [0, 2]]
    result = rounds(engine, [noise, heads.drafter(target())], asked, Sampling(), sizes, 3)
    for blocks, few in zip(result, sizes, strict=True):
        assert [{item.size for item in block} for block in blocks] == [{n} for n in few + few[::-1]]
        assert {len(block) for block in blocks} == {3}
    assert all(entry.nodes == entry.size for block in result[0] for entry in block)
    assert {len(value) for value in by_size(result[0]).values()} == {4}
    assert all(item.drafting < item.seconds
               for value in by_size(result[1]).values() for item in value)


def test_rounds_are_timed_once_all_prompts_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftproof.engine.prefill.TOGETHER", 1)     # each is read alone
    engine = dp.load("demo", drafter="none")
    asked = [engine.requests.tokens("One day, a dog") for _ in range(3)]
    noise = RandomDrafter(engine.target.vocab_size)
    (timings,) = rounds(engine, [noise], asked, Sampling(), [[0, 2]], 3)
    assert [[entry.size for entry in block] for block in timings] == [[n] * 3 for n in (0, 2, 2, 0)]
    assert all(item.seconds > 0 and item.nodes == item.size for block in timings for item in block)


def test_a_machine_is_timed_at_every_batch_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "TIMES", 1)
    monkeypatch.setattr(probing, "SECONDS", 0.0)
    monkeypatch.setattr(probing, "LONG", 16)
    heads = {"heads": MedusaHead.fresh(target(), num_heads=2).drafter(target())}
    probed = probe(Engine(target()), prompts(2, seed=1), [4], [0.0, 0.7], [0, 2], heads)
    wanted = {(sampled, rows) for sampled in (False, True) for rows in (1, 2, 4)}
    plain = [timing for timing in probed.timed if not timing.drafter]
    assert {(timing.sampled, timing.rows) for timing in plain} == wanted
    assert {(item.sampled, item.rows) for item in probed.timed if item.drafter == "heads"} == wanted
    assert {timing.nodes for timing in plain} == {0, 2}
    for rows in (1, 2, 4):
        curve = [timing.seconds for timing in probed.timed if timing[:3] == ("", False, rows)]
        assert 0 < curve[0] <= curve[1]
