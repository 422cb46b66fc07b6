"""A budget that one rank asks: it learns as any other, and every rank is told before every round."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
from drafting import Oracle
from tiny import prompts, target

import draftproof as dp
from draftproof.engine.adaptive import RATE, STAKE
from draftproof.engine.budget import Learner, Round
from draftproof.engine.engine import Engine
from draftproof.engine.pace import CostTable
from draftproof.engine.ranks import Led
from draftproof.engine.stats import RoundStats

NEW = 90


def led(leads: bool = True) -> Led:
    """By a recorded cost table, in a group that hears what it says."""
    budget = dp.Adaptive(8, costs=CostTable.of({0: 1.0, 2: 1.2, 4: 1.4, 8: 1.8}))
    return Led(budget, SimpleNamespace(leads=leads, number=lambda number: number))  # type: ignore[arg-type]


@pytest.mark.parametrize("leads", [True, False])
def test_it_is_told_what_any_budget_is_told_that_learns(leads: bool) -> None:
    assert isinstance(led(leads), Learner)


@pytest.mark.parametrize("wrong", [False, True])
def test_it_drafts_where_that_pays_and_rests_where_it_does_not(wrong: bool) -> None:
    asked = prompts(3, seed=5)
    plain = Engine(target(), dp.Plain()).generate(asked, max_new_tokens=NEW, batch_size=1)
    oracle = Oracle({tuple(prompt): one.tokens for prompt, one in zip(asked, plain, strict=True)}, wrong)
    budget, said = led(), Counter[str]()
    learn, nodes = budget.budget.learn, budget.budget.nodes  # type: ignore[attr-defined]

    def told(done: Round) -> None:
        said["told"] += 1
        learn(done)

    def decided(stats: RoundStats, rows: int) -> int:
        said["asked"] += 1
        return int(nodes(stats, rows))

    budget.budget.learn, budget.budget.nodes = told, decided  # type: ignore[attr-defined,method-assign]
    done = Engine(target(), oracle, budget=budget).generate(asked, max_new_tokens=NEW, batch_size=1)
    assert [one.tokens for one in done] == [one.tokens for one in plain]
    rounds = sum(one.stats.rounds for one in done)
    assert said["asked"] == rounds, "some rank would wait"
    if wrong:
        assert said["told"] < rounds / 2 and sum(one.stats.drafted for one in done) > 0
        assert budget.budget.bank.debt <= RATE * rounds + STAKE  # type: ignore[attr-defined]
    else:
        assert said["told"] == rounds < 0.5 * 3 * NEW


def test_nobody_looks_in_a_rest() -> None:
    budget = led()
    budget.budget.curiosity = lambda: 3  # type: ignore[attr-defined]
    looks = []
    for rest in (0, 5):
        budget.budget._rest = rest  # type: ignore[attr-defined]
        looks.append(budget.curiosity())
    assert looks == [3, 0] and led(leads=False).curiosity() == 0
