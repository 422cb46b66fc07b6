"""The adaptive budget: never slower than was promised, nearly as fast as the best fixed size.

`World` is decoding without models: what drafts are worth and what rounds cost is given, and time is
counted in plain steps.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from draftproof.engine.budget import DEBT, PEEK_RATE, RATE, STALE, Adaptive, presets
from draftproof.requests.stats import Round, State

Luck = Callable[[int, int, int], float]
"""Chance that a draft token is accepted: by tokens so far, its depth, and how many were drafted."""


def busy(dice: random.Random) -> float:
    """A machine that others use: 8 % of noise, and a stall now and then."""
    return dice.lognormvariate(0, 0.08) * (5 if dice.random() < 0.003 else 1)


@dataclass
class World:
    """costs: plain steps of a round by its size and the tokens so far. prompt: tokens that a
    drafter must read, for `setup` plain steps. neighbour: whether another process runs at so many
    tokens; rounds then take twice as long, and the longer one is, the likelier it is interrupted.
    sure: the confidence of each node, by tokens so far. asking: plain steps of a proposal.
    """

    luck: Luck
    costs: Callable[[int, int], float]
    noise: Callable[[random.Random], float] = lambda dice: 1.0
    prompt: int = 0
    setup: float = 0.0
    neighbour: Callable[[int], bool] = lambda written: False
    sure: Callable[[int], float] = lambda written: 0.0
    asking: float = 0.0
    seed: int = 0
    time: float = 0.0
    written: int = 0
    sizes: list[int] = field(default_factory=list)

    def run(self, budget: Adaptive, tokens: int) -> World:
        """One text."""
        dice, clock = random.Random(self.seed + self.written), random.Random(self.seed)
        end, unread = self.written + tokens, self.prompt
        while self.written < end:
            state, count = State(1, 100, end - self.written, unread), 0
            size = asked = budget.peek(state) if budget.cooldown else budget.choose(state)
            if budget.cooldown and asked:
                size = budget.worth_reading([self.sure(self.written)] * asked)
            asking = self.asking if asked else 0.0
            took = self.costs(size, self.written) + (self.setup if size and unread else 0.0)
            took += asking
            while count < size and dice.random() < self.luck(self.written, count, size):
                count += 1
            unread = 0 if size else unread + (1 if unread else 0)
            emitted, seconds = min(count + 1, end - self.written), 0.01 * took * self.noise(clock)
            if self.neighbour(self.written):
                seconds = 2 * seconds + 0.06 * (clock.random() > 0.85**took)
            budget.record(Round(size, 1, range(1, count + 1), emitted, seconds, drafted=size,
                                draft_seconds=0.01 * asking))
            self.time, self.written = self.time + took, self.written + emitted
            self.sizes.append(size)
        return self

    @property
    def per_token(self) -> float:
        return self.time / self.written


def world(luck: Luck | float, draft: float, **more: object) -> World:
    """Each drafted token takes `draft` plain steps to make, and a fiftieth to check."""
    chance: Luck = luck if callable(luck) else lambda written, depth, size: luck
    return World(chance, lambda size, _: 1 + (draft + 0.02) * size, **more)  # type: ignore


def runs(luck: Luck | float, draft: float, tokens: int) -> float:
    """Plain steps per token on a busy machine; the mean of some seeds."""
    branches = (world(luck, draft, noise=busy, seed=1000 * seed) for seed in range(6))
    return statistics.mean(branche.run(Adaptive(8), tokens).per_token for branche in branches)


@pytest.mark.parametrize("draft", (0.02, 0.1, 0.25, 1.0))
@pytest.mark.parametrize("alpha", (0.0, 0.2, 0.4, 0.6, 0.8, 0.95))
def test_it_finds_the_best_draft_size_at_little_cost(alpha: float, draft: float) -> None:
    """Also where none pays, and in a short text of a cold engine."""
    tokens = {size: (1 - alpha ** (size + 1)) / (1 - alpha) for size in presets(8)}
    best = min((1 + (draft + 0.02) * size) / tokens[size] for size in tokens)
    assert runs(alpha, draft, 1024) < max(1.075 * best, 1.016 if best >= 0.97 else 0.0)
    assert runs(alpha, draft, 48) < 1.05


@pytest.mark.parametrize("tokens", [96, 1024])
def test_a_bad_small_size_does_not_rule_out_large_sizes(tokens: int) -> None:
    """To draft at all costs a step, a node little: heads, or many cheap drafters together."""
    def simulated(seed: int) -> World:
        return World(lambda written, depth, size: 0.7, noise=busy, seed=1000 * seed,
                     costs=lambda size, written: 1 + (1 + 0.05 * size if size else 0.0))

    result = statistics.mean(
        simulated(seed).run(Adaptive(8), tokens).per_token for seed in range(12))
    assert result < 0.96, "1.01 where it stays with one node, 0.75 with eight in every round"


SPITEFUL: dict[str, Luck] = {
    "always wrong": lambda written, depth, size: 0.0,
    "right for 50 tokens, then wrong": lambda written, depth, size: float(written < 50),
    "right and wrong by turns": lambda written, depth, size: float(written // 300 % 2 == 0),
    "long drafts are wrong": lambda written, depth, size: float(size < 8),
    "right while nobody drafts much": lambda written, depth, size: float(size == 2),
}


@pytest.mark.parametrize("luck", SPITEFUL)
@pytest.mark.parametrize("draft", [0.02, 0.2, 0.5])
@pytest.mark.parametrize(("debt", "rate"), [(DEBT, RATE), (0.0, 0.0)])
def test_the_loss_of_any_sequence_of_drafts_is_bounded(
    luck: str, draft: float, debt: float, rate: float
) -> None:
    """The debt and its rate, and at most one round beyond them."""
    result = world(SPITEFUL[luck], draft).run(Adaptive(8, debt=debt, rate=rate), 1200)
    assert result.time <= (1 + rate) * result.written + debt + (draft + 0.02) * 8
    assert any(result.sizes) or not debt, "it never drafted: that proves nothing"


def test_confident_drafts_are_noticed_in_a_cooldown() -> None:
    """Nothing can be drafted until the text repeats itself. The debt is not repaid by then."""
    late: Luck = lambda written, depth, size: float(written >= 60)  # noqa: E731

    def simulated(sure: float) -> list[float]:
        return [world(late, 0.1, noise=busy, seed=1000 * seed, asking=0.05,
                      sure=lambda written: sure * (written >= 60)).run(Adaptive(8), 160).per_token
                for seed in range(8)]

    assert max(simulated(0.95)) < 0.62 < 0.7 < statistics.mean(simulated(0.0))


def test_dear_drafters_are_seldom_asked_in_a_cooldown() -> None:
    """Their proposals take no more than a share of the time, and none if they must read first."""
    for asking, unread in ((0.05, 0), (2.0, 0), (0.05, 20)):
        trial, budget = world(0.0, 0.1, asking=asking), Adaptive(8)
        trial.run(budget, 200)
        before, budget.cooldown = trial.time, 16
        peeks = 0
        for _ in range(1000):
            budget.cooldown = 16
            peeks += budget.peek(State(1, 100, 100.0, unread)) > 0
            spent = 0.01 * asking * (budget.peek_limit > 0)
            budget.record(Round(0, 1, [], 1, 0.01, draft_seconds=spent))
        assert trial.time == before and peeks * asking <= 1.05 * 1000 * PEEK_RATE
        assert (peeks > 0) == (unread == 0 and asking < 1)


def cooling() -> Adaptive:
    """A budget that has given up a useless drafter, and may ask it again."""
    budget = Adaptive(8)
    trial = world(0.0, 0.1, asking=0.05)
    trial.run(budget, 200)
    while not (budget.cooldown and budget.peek(State(1, 100, 100.0))):
        budget.cooldown = 16
        budget.record(Round(0, 1, [], 1, 0.01))
    return budget


def test_a_round_that_failed_after_a_peek_changes_nothing() -> None:
    """It is not recorded, and the next one is of a shape that was never measured."""
    budget = cooling()
    assert budget.worth_reading([0.9] * 8)
    assert budget.choose(State(2, 2000, 100.0)) == 0
    budget.record(Round(0, 2, [], 2, 0.01, draft_seconds=0.001))


def test_a_stall_in_a_peek_does_not_end_peeks() -> None:
    budget = cooling()
    budget.record(Round(0, 1, [], 1, 10.0, draft_seconds=10.0))
    peeks = 0
    for _ in range(200):
        budget.cooldown = 16
        peeks += budget.peek(State(1, 100, 100.0)) > 0
        budget.record(Round(0, 1, [], 1, 0.01, draft_seconds=0.0005 * (budget.peek_limit > 0)))
    assert peeks > 5


def test_nodes_are_never_thought_to_cost_nothing() -> None:
    """Plain rounds were slow when they were measured."""
    budget = Adaptive(8)
    for _ in range(600):
        size = budget.choose(State(1, 100, 100.0))
        budget.record(Round(size, 1, [1] * (size > 0), 2, 0.01, drafted=size))
    assert budget.per_node > 0.003


@pytest.mark.parametrize("asking", [0.0, 0.05])
def test_wrong_confidence_costs_no_more_than_the_debt(asking: float) -> None:
    """It is sure, and never right."""
    trial = world(0.0, 0.1, asking=asking, sure=lambda written: 0.9).run(Adaptive(8), 1200)
    assert trial.time <= (1 + RATE + PEEK_RATE) * trial.written + DEBT + 0.12 * 8 + asking
    assert any(trial.sizes)


@pytest.mark.parametrize(("draft", "most"), [(0.1, 0.75), (0.25, 0.85)])
def test_it_adapts_when_drafts_become_good_or_bad(draft: float, most: float) -> None:
    turning: Luck = lambda written, depth, size: 0.0 if written // 512 % 2 else 0.9  # noqa: E731
    assert runs(turning, draft, 4096) < most


def test_a_slow_machine_is_not_mistaken_for_a_slow_drafter() -> None:
    """From the middle on everything takes three times as long, and drafting goes on; where drafts
    alone become slow, or are slower than the target, it does not."""
    result, budget = world(0.85, 0.05), Adaptive(8)
    result.noise = lambda dice: 1.0 if result.written < 500 else 3.0
    assert result.run(budget, 1500).per_token < 0.4
    assert budget.now.mean[0] == pytest.approx(0.03, rel=0.2)
    result = world(0.8, 0.1)
    result.costs = lambda size, written: (1 + 0.12 * size) * (10 if size and written > 600 else 1)
    result.run(Adaptive(8), 1500)
    assert any(result.sizes[:60]) and result.sizes[-300:].count(0) > 285
    result = world(0.9, 3.0).run(Adaptive(8), 2000)
    assert 0 < sum(size > 0 for size in result.sizes) < 16 and result.per_token < 1.016


@pytest.mark.parametrize(("alpha", "draft"), [(0.8, 0.08), (0.7, 0.18), (0.5, 0.05)])
def test_a_busy_machine_does_not_reduce_drafting(alpha: float, draft: float) -> None:
    """All the time, or for some hundred tokens now and then."""
    shares = list[float]()
    for neighbour in (lambda _: False, lambda _: True, lambda written: written // 300 % 2 == 1):
        worlds = [world(alpha, draft, noise=busy, neighbour=neighbour, seed=1000 * seed)
                  .run(Adaptive(8), 1500) for seed in range(4)]
        shares.append(statistics.mean(size > 0 for trial in worlds for size in trial.sizes[32:]))
    assert shares[0] > 0.93 and min(shares) > shares[0] - 0.05


@pytest.mark.parametrize("draft", [0.1, 0.4])
def test_on_a_busy_machine_useless_drafts_are_given_up(draft: float) -> None:
    """Also such as paid before, and became slow when the machine did."""
    worlds = [world(0.1, draft, noise=busy, neighbour=lambda written: written > 200,
                    seed=1000 * seed).run(Adaptive(8), 1500) for seed in range(6)]
    assert statistics.mean(simulated.per_token for simulated in worlds) < 1.025
    late, tokens = world(0.8, draft, noise=busy, neighbour=lambda written: written > 600), 1500
    late.costs = lambda size, written: (1 + draft * size) * (5 if size and written > 600 else 1)
    late.run(Adaptive(8), tokens)
    assert any(late.sizes[:60]) and late.sizes[-300:].count(0) > 285


@pytest.mark.parametrize(("which", "drafts"), [(0, 1), (1, 1), (2, 1), (4, 1), (30, 3)])
@pytest.mark.parametrize("steps", [5.0, 100.0])
def test_a_brief_stall_does_not_stop_drafting(
    which: int, drafts: int, steps: float
) -> None:
    """One of the first drafts, or several, took far too long, by no fault of the drafter's."""
    for seed in range(4):
        trial, still = world(0.85, 0.05, seed=1000 * seed), iter([0.0] * which + [steps] * drafts)
        trial.costs = lambda size, _, still=still: 1 + 0.07 * size + (size and next(still, 0.0))
        budget = Adaptive(8)
        begun, written = trial.run(budget, 300).time, trial.written
        trial.run(budget, 1000)
        assert (trial.time - begun) / (trial.written - written) < (0.38 if drafts == 1 else 0.4)


def test_plain_rounds_are_remeasured_regularly() -> None:
    """Seldom, and more seldom the better it is known. One that was slow because it was the first
    would make any draft seem quick."""
    sizes = world(0.9, 0.05).run(Adaptive(8), 9000).sizes
    plain = [place for place, size in enumerate(sizes[:-1]) if size == 0 and place > 2]
    apart = [later - place for place, later in pairwise(plain)]
    assert plain[0] < 40 and apart == sorted(apart) and 96 < apart[-1] <= STALE + 1
    simulated = world(0.2, 0.2, noise=lambda dice: 3.0 if not simulated.sizes else 1.0)
    assert simulated.run(Adaptive(8), 400).per_token < 1.03


@pytest.mark.parametrize(("good", "bad", "most"), [(0.95, 0.5, 0.77), (0.97, 0.3, 0.88)])
def test_earlier_gains_may_be_spent(good: float, bad: float, most: float) -> None:
    """A draft model whose drafts are good and bad by passages, on short texts, of which it reads
    each prompt first: two misses are a debt of three plain steps, and no reason to stop."""
    dice = random.Random(1)
    passages = [dice.random() < 0.8 for _ in range(400)]
    luck: Luck = lambda written, depth, size: (  # noqa: E731
        good if passages[(written + depth) // 10] else bad)
    budget, simulated = Adaptive(10), world(luck, 0.36, noise=busy, prompt=120, setup=2.5)
    for _ in range(48):
        simulated.run(budget, 64)
    assert simulated.per_token < most


@pytest.mark.parametrize(("alpha", "draft", "prompt", "setup", "most"),
                         [(0.8, 0.1, 20, 4.0, 0.5), (0.85, 0.05, 1000, 20.0, 0.5),
                          (0.02, 0.2, 500, 6.0, 1.02), (0.9, 0.9, 500, 6.0, 1.02)])
def test_catch_up_reading_counts_as_a_cost(
    alpha: float, draft: float, prompt: int, setup: float, most: float
) -> None:
    """Good drafts earn it in each text; where they do not, or for a few tokens, it is not begun
    again and again."""
    budget, simulated = Adaptive(8), world(alpha, draft, prompt=prompt, setup=setup)
    for _ in range(24):
        simulated.run(budget, 128)
    assert simulated.per_token < most
    if setup == 20:
        assert not any(world(alpha, draft, prompt=prompt, setup=setup).run(budget, 12).sizes)


def test_tree_costs_depend_on_their_nodes() -> None:
    """Half the first nodes are accepted and few beyond the fifth: a draft of five it is, of ten. In
    a batch of another shape so it is once a plain round was measured twice."""
    dice, budget, sizes = random.Random(0), Adaptive(10), []
    for _ in range(400):
        size = budget.choose(State(1, 100, 1000.0))
        accepted = [node for node in range(1, size + 1)
                 if dice.random() < (0.4 if node <= 5 else 0.01)]
        seconds = 0.01 * (1 + 0.05 * size)
        budget.record(Round(size, 1, accepted, 1 + len(accepted), seconds, chain=False))
        sizes.append(size)
    assert statistics.mode(sizes[100:]) == 5
    chosen = []
    for _ in range(3):
        chosen.append(budget.choose(State(8, 100, 100.0)))
        budget.record(Round(chosen[-1], 8, [], 8, 0.03 * (1 + 0.05 * chosen[-1])))
    assert chosen == [0, 0, 5]


@pytest.mark.parametrize("most", [0, 1, 5, 16, 64])
def test_within_a_limit_it_drafts_the_largest_size_that_it_knows(most: int) -> None:
    budget = Adaptive(most)
    for limit in range(most + 9):
        assert budget.at_most(limit) == max(size for size in presets(most) if size <= limit)
