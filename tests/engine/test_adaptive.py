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

from draftproof.engine.budget import DEBT, RATE, STALE, Adaptive, presets
from draftproof.engine.stats import Round, State

Luck = Callable[[int, int, int], float]
"""Chance that a draft token is accepted: by tokens so far, its depth, and how many were drafted."""
Noise = Callable[[random.Random], float]


def busy(dice: random.Random) -> float:
    """A machine that others use: 8 % of noise, and a stall now and then."""
    return dice.lognormvariate(0, 0.08) * (5 if dice.random() < 0.003 else 1)


@dataclass
class World:
    """costs: plain steps of a round by its size and the tokens so far. prompt: tokens that a
    drafter
    must read, for `setup` plain steps."""

    luck: Luck
    costs: Callable[[int, int], float]
    noise: Noise = lambda dice: 1.0
    prompt: int = 0
    setup: float = 0.0
    seed: int = 0
    time: float = 0.0
    written: int = 0
    sizes: list[int] = field(default_factory=list)

    def accepted(self, dice: random.Random, size: int) -> list[int]:
        """Numbers of the nodes of a chain that are accepted."""
        count = 0
        while count < size and dice.random() < self.luck(self.written, count, size):
            count += 1
        return list(range(1, count + 1))

    def run(self, budget: Adaptive, tokens: int) -> World:
        """One text."""
        dice, clock = random.Random(self.seed + self.written), random.Random(self.seed)
        end, unread = self.written + tokens, self.prompt
        while self.written < end:
            size = budget.choose(State(1, 100, end - self.written, unread))
            took = self.costs(size, self.written) + (self.setup if size and unread else 0.0)
            found = self.accepted(dice, size)
            unread = 0 if size else unread + (1 if unread else 0)
            emitted = min(len(found) + 1, end - self.written)
            budget.record(Round(size, 1, found, emitted, 0.01 * took * self.noise(clock)))
            self.time, self.written = self.time + took, self.written + emitted
            self.sizes.append(size)
        return self

    @property
    def per_token(self) -> float:
        return self.time / self.written


def world(luck: Luck | float, draft: float, verify: float = 0.02, **more: object) -> World:
    """Each drafted token takes `draft` plain steps to make and `verify` to check."""
    chance: Luck = luck if callable(luck) else lambda written, depth, size: luck
    costs = lambda size, written: 1 + (draft + verify) * size  # noqa: E731
    return World(chance, costs, **more)  # type: ignore[arg-type]


def runs(luck: Luck | float, draft: float, tokens: int, **more: object) -> list[float]:
    """Plain steps per token of some seeds, on a busy machine."""
    return [
        world(luck, draft, noise=busy, seed=1000 * seed, **more).run(Adaptive(8), tokens).per_token
        for seed in range(6)
    ]


def best(alpha: float, draft: float) -> float:
    """Plain steps per token of the best fixed size."""
    tokens = {size: (1 - alpha ** (size + 1)) / (1 - alpha) for size in presets(8)}
    return min((1 + (draft + 0.02) * size) / tokens[size] for size in tokens)


ALPHAS, DRAFTS = (0.0, 0.2, 0.4, 0.6, 0.8, 0.95), (0.02, 0.1, 0.25, 1.0)


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("alpha", ALPHAS)
def test_it_finds_the_best_size_and_loses_little_where_none_pays(
    alpha: float, draft: float
) -> None:
    found = statistics.mean(runs(alpha, draft, 1024))
    assert found < max(1.075 * best(alpha, draft), 1.016 if best(alpha, draft) >= 0.97 else 0.0)


@pytest.mark.parametrize("tokens", [96, 1024])
def test_that_one_node_does_not_pay_says_nothing_of_eight(tokens: int) -> None:
    """To draft at all costs a step, a node little: heads, or many cheap drafters together."""
    costs = lambda size, written: 1 + (1 + 0.05 * size if size else 0.0)  # noqa: E731
    chance: Luck = lambda written, depth, size: 0.7  # noqa: E731
    worlds = [World(chance, costs, noise=busy, seed=1000 * seed) for seed in range(12)]
    found = statistics.mean(one.run(Adaptive(8), tokens).per_token for one in worlds)
    assert found < 0.96, "1.01 where it stays with one node, 0.75 with eight in every round"


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("alpha", ALPHAS)
def test_one_short_text_of_a_cold_engine_loses_little(alpha: float, draft: float) -> None:
    assert statistics.mean(runs(alpha, draft, 48)) < 1.05


SPITEFUL: dict[str, Luck] = {
    "always wrong": lambda written, depth, size: 0.0,
    "right for 50 tokens, then wrong": lambda written, depth, size: float(written < 50),
    "right and wrong by turns": lambda written, depth, size: float(written // 300 % 2 == 0),
    "alternating": lambda written, depth, size: float(written % 2),
    "long drafts are wrong": lambda written, depth, size: float(size < 8),
    "the first is right": lambda written, depth, size: float(depth == 0),
    "right while nobody drafts much": lambda written, depth, size: float(size == 2),
}


@pytest.mark.parametrize("luck", SPITEFUL)
@pytest.mark.parametrize("draft", [0.02, 0.2, 0.5])
def test_no_sequence_of_drafts_costs_more_than_was_promised(luck: str, draft: float) -> None:
    """The debt and its rate, and at most one round beyond them."""
    one = world(SPITEFUL[luck], draft).run(Adaptive(8), 1200)
    assert one.time <= (1 + RATE) * one.written + DEBT + (draft + 0.02) * 8
    assert any(one.sizes), "it never drafted: that proves nothing"


@pytest.mark.parametrize(("debt", "rate"), [(0.0, 0.0), (3.0, 0.0)])
def test_a_debt_of_nothing_risks_nothing(debt: float, rate: float) -> None:
    one = world(0.0, 0.2).run(Adaptive(8, debt=debt, rate=rate), 600)
    assert one.time <= (1 + rate) * one.written + debt + 0.22 * 8


@pytest.mark.parametrize("draft", [0.1, 0.25])
def test_it_follows_drafts_that_turn_good_and_bad(draft: float) -> None:
    turning: Luck = lambda written, depth, size: 0.0 if written // 512 % 2 else 0.9  # noqa: E731
    assert statistics.mean(runs(turning, draft, 4096)) < (0.75 if draft < 0.2 else 0.85)


def test_a_slow_machine_is_not_a_slow_drafter() -> None:
    """From the middle on everything takes three times as long: drafting goes on."""
    one, budget = world(0.85, 0.05), Adaptive(8)
    one.noise = lambda dice: 1.0 if one.written < 500 else 3.0
    assert one.run(budget, 1500).per_token < 0.4
    assert budget.now.mean[0] == pytest.approx(0.03, rel=0.2)


def test_a_drafter_that_becomes_slow_is_given_up() -> None:
    one = world(0.8, 0.1)
    one.costs = lambda size, written: (1 + 0.12 * size) * (10 if size and written > 600 else 1)
    one.run(Adaptive(8), 1500)
    assert any(one.sizes[:60]) and one.sizes[-300:].count(0) > 285


def test_a_drafter_slower_than_the_target_is_tried_and_left() -> None:
    one = world(0.9, 3.0).run(Adaptive(8), 2000)
    assert 0 < sum(size > 0 for size in one.sizes) < 16 and one.per_token < 1.016


@pytest.mark.parametrize(("which", "drafts"), [(0, 1), (1, 1), (2, 1), (4, 1), (30, 3)])
@pytest.mark.parametrize("steps", [5.0, 100.0])
def test_a_machine_that_stood_still_for_a_moment_drafts_on(
    which: int, drafts: int, steps: float
) -> None:
    """One of the first drafts, or several, took far too long, by no fault of the drafter's."""
    for seed in range(4):
        one, still = world(0.85, 0.05, seed=1000 * seed), iter([0.0] * which + [steps] * drafts)
        one.costs = lambda size, _, still=still: 1 + 0.07 * size + (size and next(still, 0.0))
        budget = Adaptive(8)
        begun, written = one.run(budget, 300).time, one.written
        one.run(budget, 1000)
        assert (one.time - begun) / (one.written - written) < (0.38 if drafts == 1 else 0.4)


def test_a_plain_round_is_measured_now_and_then() -> None:
    """Seldom, and more seldom the better it is known."""
    sizes = world(0.9, 0.05).run(Adaptive(8), 9000).sizes
    plain = [place for place, size in enumerate(sizes[:-1]) if size == 0 and place > 2]
    apart = [later - place for place, later in pairwise(plain)]
    assert plain[0] < 40 and apart == sorted(apart) and 96 < apart[-1] <= STALE + 1


def test_a_first_plain_round_that_was_slow_is_not_what_plain_rounds_take() -> None:
    """What a machine does once, at its first round, would make any draft seem quick."""
    one = world(0.2, 0.2, noise=lambda dice: 3.0 if not one.sizes else 1.0)
    assert one.run(Adaptive(8), 400).per_token < 1.03


def test_a_drafter_that_seldom_finds_something_is_known_by_what_it_costs_then() -> None:
    """Most of its rounds are as cheap as plain ones, and those in which it drafts too dear."""
    one, found = world(0.0, 0.0), random.Random(3)
    one.costs = lambda size, _: 1 + (1.5 if size and found.random() < 0.3 else 0.02 * (size > 0))
    assert one.run(Adaptive(8), 3000).per_token < 1.02


@pytest.mark.parametrize(("good", "bad", "most"), [(0.95, 0.5, 0.77), (0.97, 0.3, 0.88)])
def test_what_was_gained_may_be_lost_again(good: float, bad: float, most: float) -> None:
    """A draft model whose drafts are good and bad by passages, on short texts, of which it reads
    each prompt first: two misses are a debt of three plain steps, and no reason to stop."""
    dice = random.Random(1)
    passages = [dice.random() < 0.8 for _ in range(400)]
    luck: Luck = lambda written, depth, size: (  # noqa: E731
        good if passages[(written + depth) // 10] else bad)
    budget, one = Adaptive(10), world(luck, 0.36, noise=busy, prompt=120, setup=2.5)
    for _ in range(48):
        one.run(budget, 64)
    assert one.per_token < most


@pytest.mark.parametrize(("alpha", "draft", "prompt", "setup", "most"),
                         [(0.8, 0.1, 20, 4.0, 0.5), (0.85, 0.05, 1000, 20.0, 0.5),
                          (0.02, 0.2, 500, 6.0, 1.02), (0.9, 0.9, 500, 6.0, 1.02)])
def test_what_a_drafter_must_read_first_is_weighed(
    alpha: float, draft: float, prompt: int, setup: float, most: float
) -> None:
    """Good drafts earn it in each text; where they do not, it is not begun again and again."""
    budget, one = Adaptive(8), world(alpha, draft, prompt=prompt, setup=setup)
    for _ in range(24):
        one.run(budget, 128)
    assert one.per_token < most


def test_nothing_is_read_first_for_a_few_tokens() -> None:
    budget, one = Adaptive(8), world(0.85, 0.05, prompt=1000, setup=20.0)
    one.run(budget, 400)
    assert any(size > 0 for size in one.sizes[-50:])
    few = world(0.85, 0.05, prompt=1000, setup=20.0).run(budget, 12)
    assert not any(few.sizes)


def test_trees_are_known_by_their_nodes() -> None:
    """Half the first nodes are accepted and few beyond the fifth: a draft of five it is, of ten."""
    dice, budget, sizes = random.Random(0), Adaptive(10), []
    for _ in range(400):
        size = budget.choose(State(1, 100, 1000.0))
        found = [node for node in range(1, size + 1)
                 if dice.random() < (0.4 if node <= 5 else 0.01)]
        budget.record(Round(size, 1, found, 1 + len(found), 0.01 * (1 + 0.05 * size), chain=False))
        sizes.append(size)
    assert statistics.mode(sizes[100:]) == 5


def test_batches_of_other_shapes_begin_with_what_is_known() -> None:
    """Relative costs are taken over once a plain round of the new shape was measured twice."""
    budget = Adaptive(8)
    world(0.9, 0.05).run(budget, 300)
    chosen = []
    for _ in range(6):
        chosen.append(budget.choose(State(8, 100, 100.0)))
        budget.record(Round(chosen[-1], 8, [], 8, 0.03 * (1 + 0.07 * chosen[-1])))
    assert chosen[:2] == [0, 0] and chosen[2] >= 5


def test_sizes_to_choose_from() -> None:
    assert presets(0) == (0,) and presets(1) == (0, 1) and presets(5) == (0, 1, 2, 3, 5)
    assert presets(16) == (0, 1, 2, 3, 5, 7, 10, 14, 16) and presets(63)[-2:] == (57, 63)
