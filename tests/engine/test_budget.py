"""Budgets of a round: drafts that end early, rows that share, the same text whatever is decided."""

from __future__ import annotations

import random
from typing import Any

import pytest
from drafting import DRAFTERS, Watch, texts
from tiny import prompts, target

from draftproof.core.messages import Frontier, Reading
from draftproof.core.params import Sampling
from draftproof.core.tree import TokenTree
from draftproof.drafters.base import Plain
from draftproof.drafters.draft_model import DraftModel
from draftproof.engine.budget import Adaptive, Budget, Fixed
from draftproof.engine.engine import Engine, usual_budget
from draftproof.engine.stats import Round, State
from draftproof.errors import BadInput
from draftproof.model.kv_cache import KVCache
from draftproof.model.target import Target


class Wild(Budget):
    """Drafts at random, and keeps what it is told."""

    def __init__(self, most: int, seed: int) -> None:
        self.most, self.dice = most, random.Random(seed)
        self.states: list[State] = []
        self.rounds: list[Round] = []

    def choose(self, state: State) -> int:
        self.states.append(state)
        return self.dice.choice((0, 0, 0, 1, 2, 3, self.most))

    def record(self, done: Round) -> None:
        self.rounds.append(done)


class Unsure(Wild):
    """Two tokens per row, of which one row may have more, while drafts may be accepted."""

    floor = 1e-9

    def __init__(self, most: int) -> None:
        super().__init__(most, 0)

    def choose(self, state: State) -> int:
        return 2


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.9, seed=11)],
                         ids=["greedy", "sampled"])
def test_no_sequence_of_budgets_changes_the_text(
    drafter: str, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever rows share."""
    asked = prompts(5, seed=3)
    wanted = texts(Engine(target(), Plain()), asked, max_new_tokens=24, sampling=sampling)
    for seed in range(2):
        engine = Engine(target(), Watch(DRAFTERS[drafter](target())), budget=Wild(9, seed))
        assert texts(engine, asked, max_new_tokens=24, sampling=sampling, batch_size=3) == wanted
    monkeypatch.setattr(Target, "skips_absent", True)
    adaptive = Engine(target(), Watch(DRAFTERS[drafter](target())), budget=Adaptive(9))
    asked_again = {"max_new_tokens": 24, "sampling": sampling, "batch_size": 3}
    assert [texts(adaptive, asked, **asked_again) for _ in range(2)] == [wanted] * 2


def test_a_budget_is_told_what_came_of_its_rounds() -> None:
    """Sizes as chosen, emitted tokens that add up, accepted nodes within the draft, seconds."""
    budget = Wild(6, 1)
    engine = Engine(target(), DRAFTERS["target itself"](target()), budget=budget)
    done = engine.generate(prompts(3, seed=5), max_new_tokens=30, batch_size=1)
    assert sum(one.emitted for one in budget.rounds) == sum(one.stats.emitted for one in done)
    assert sum(len(one.accepted) for one in budget.rounds) >= sum(
        one.stats.accepted for one in done
    )
    assert all(one.chain and list(one.accepted) == [*range(1, one.size + 1)] and one.seconds > 0
               for one in budget.rounds)
    spent = sum(engine.clock.seconds[part] for part in ("draft", "verify", "decide"))
    assert sum(one.seconds for one in budget.rounds) > 0 and spent > 0
    assert all(state.rows == 1 and 0 < state.remaining < 30 for state in budget.states)


def test_a_budget_is_told_what_a_draft_model_has_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After plain rounds as well, of which the drafter itself may learn later."""
    budget = Wild(3, 1)
    monkeypatch.setattr(budget, "choose", lambda state: budget.states.append(state) or 0)
    prompt = prompts(1, seed=2)[0]
    Engine(target(), DRAFTERS["draft chain"](target()), budget=budget).generate(
        [prompt], max_new_tokens=8
    )
    found = [(state.unread, state.context) for state in budget.states]
    assert found == [(len(prompt) - 1 + turn, len(prompt) + 1 + turn) for turn in range(7)]


def test_the_default_measures() -> None:
    assert isinstance(usual_budget(DRAFTERS["prompt-lookup"](target())), Adaptive)
    assert usual_budget(Plain()).most == 0


def test_bad_budgets_are_refused() -> None:
    for wrong, word in ((lambda: Fixed(-1), "-1 draft tokens"),
                        (lambda: Adaptive(-2), "-2 draft tokens"),
                        (lambda: Fixed(4, 1.0), "floor of 1.0"),
                        (lambda: Adaptive(5, debt=-1), "debt")):
        with pytest.raises(BadInput, match=word):
            wrong()


@pytest.mark.parametrize("drafter", ["draft chain", "redrafter"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=5)],
                         ids=["greedy", "sampled"])
def test_drafts_end_where_they_are_unlikely_to_stand(drafter: str, sampling: Sampling) -> None:
    """A higher floor drafts fewer tokens, of which more stand; the text is the same."""
    asked = prompts(6, seed=4)
    wanted = texts(Engine(target()), asked, max_new_tokens=24, sampling=sampling)
    shares, drafted = [], []
    for floor in (0.0, 0.5, 0.99):
        engine = Engine(target(), Watch(DRAFTERS[drafter](target())), budget=Fixed(6, floor))
        alone = [engine.generate([text], max_new_tokens=24, sampling=sampling)[0] for text in asked]
        assert [(one.tokens, one.finish_reason) for one in alone] == wanted
        drafted.append(sum(one.stats.drafted for one in alone))
        shares.append(sum(one.stats.accepted for one in alone) / drafted[-1])
    assert drafted[0] > drafted[1] >= drafted[2] > 0 and shares[2] >= shares[0]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.9, seed=11)],
                         ids=["greedy", "sampled"])
def test_rows_of_a_batch_share_a_budget(
    sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a row drafts beyond its part another does not; alone there is nobody to share with."""
    monkeypatch.setattr(Target, "skips_absent", True)
    asked, budget, sizes = prompts(6, seed=4), Unsure(6), []
    wanted = texts(Engine(target()), asked, max_new_tokens=24, sampling=sampling)
    engine = Engine(target(), DRAFTERS["target itself"](target()), budget=budget)
    read = engine.target.read

    def noted(tree: TokenTree, cache: KVCache, **options: Any) -> Reading:
        # no draft's read, no prompt
        if "hidden_layers" in options and cache.lengths.all() and tree.tokens.shape[1] > 1:
            sizes.append(tree.sizes)
        return read(tree, cache, **options)

    monkeypatch.setattr(engine.target, "read", noted)
    assert texts(engine, asked, max_new_tokens=24, sampling=sampling, batch_size=3) == wanted
    shared = [one for one in sizes if len(one) > 1]
    assert all(sum(one) <= 2 * len(one) for one in shared) and any(
        max(one) > 2 > min(one) for one in shared
    )
    assert max(map(max, shared)) <= 4 and all(max(one) <= 2 for one in sizes if len(one) == 1)
    batches = [one for one in budget.rounds if one.rows > 1]
    assert all(not one.chain and set(one.accepted) <= {1, 2} for one in batches if one.accepted)
    assert all(one.chain for one in budget.rounds if one.rows == 1)
    told = [node for one in batches for node in one.accepted]
    assert told.count(1) >= told.count(2) > 0, "and what is drafted stands"


@pytest.mark.parametrize(("rule", "most", "room", "floor"),
                         [("match", 6, 4, 1e-9), ("match", 3, 3, 1e-9), ("rejection", 6, 2, 0.0)])
def test_a_row_may_have_a_little_more(
    rule: str, most: int, room: int, floor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never more than memory was set aside for; and where a rule weighs the law of drafts, none may
    look at what it drew."""
    monkeypatch.setattr(Target, "skips_absent", True)
    drafter, asked = DRAFTERS["draft chain"](target()), list[Frontier]()
    propose = DraftModel.propose

    def noted(self: DraftModel, frontier: Frontier) -> TokenTree:
        asked.append(frontier)
        return propose(self, frontier)

    monkeypatch.setattr(DraftModel, "propose", noted)
    engine = Engine(target(), drafter, acceptance=rule, budget=Unsure(most))
    for together in (3, 1):
        engine.generate(prompts(3, seed=4), max_new_tokens=20, batch_size=together)
    rooms = {(min(2, len(one.prefix.position)), one.max_nodes, one.floor) for one in asked}
    assert rooms == {(1, 2, floor), (2, room, floor)} and all(one.budget == 2 for one in asked)
    assert all(one.prefix.ahead == one.max_nodes for one in asked)
