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


def test_sizes_follow_each_other_in_blocks_and_noise_is_never_right() -> None:
    engine, asked = Engine(target()), prompts(2, seed=1)
    noise, heads = RandomDrafter(target().vocab_size), MedusaHead.fresh(target(), num_heads=2)
    sizes = [[0, 1, 3], [0, 2]]
    found = rounds(engine, [noise, heads.drafter(target())], asked, Sampling(), sizes, 3)
    for blocks, some in zip(found, sizes, strict=True):
        assert [{one.size for one in block} for block in blocks] == [{n} for n in some + some[::-1]]
        assert {len(block) for block in blocks} == {3}
    assert all(one.nodes == one.size for block in found[0] for one in block)
    assert {len(some) for some in by_size(found[0]).values()} == {4}
    assert all(one.drafting < one.seconds for some in by_size(found[1]).values() for one in some)


def test_rounds_are_timed_once_all_prompts_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftproof.engine.prefill.TOGETHER", 1)     # each is read alone
    engine = dp.load("demo", drafter="none")
    asked = [engine.requests.tokens("One day, a dog") for _ in range(3)]
    noise = RandomDrafter(engine.target.vocab_size)
    (timings,) = rounds(engine, [noise], asked, Sampling(), [[0, 2]], 3)
    assert [[one.size for one in block] for block in timings] == [[n] * 3 for n in (0, 2, 2, 0)]
    assert all(one.seconds > 0 and one.nodes == one.size for block in timings for one in block)


def test_a_machine_is_timed_at_every_batch_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "TIMES", 1)
    monkeypatch.setattr(probing, "SECONDS", 0.0)
    monkeypatch.setattr(probing, "LONG", 16)
    heads = {"heads": MedusaHead.fresh(target(), num_heads=2).drafter(target())}
    found = probe(Engine(target()), prompts(2, seed=1), [4], [0.0, 0.7], [0, 2], heads)
    wanted = {(sampled, rows) for sampled in (False, True) for rows in (1, 2, 4)}
    assert {(one.sampled, one.rows) for one in found.timed if not one.drafter} == wanted
    assert {(one.sampled, one.rows) for one in found.timed if one.drafter == "heads"} == wanted
    assert {one.nodes for one in found.timed if not one.drafter} == {0, 2}
    for rows in (1, 2, 4):
        curve = [one.seconds for one in found.timed if one[:3] == ("", False, rows)]
        assert 0 < curve[0] <= curve[1]
