"""Rounds, watched: what a budget is asked and told, and that no sequence of its answers changes a text."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from drafting import DRAFTERS, Guess, Oracle, Watch, texts
from test_decoder import Counted
from tiny import VOCAB, prompts, target

from draftproof.core.messages import Frontier
from draftproof.core.params import Sampling
from draftproof.core.tree import TokenTree
from draftproof.drafters.base import Drafter
from draftproof.drafters.draft_model import DraftModel
from draftproof.drafters.plain import Plain
from draftproof.drafters.prompt_lookup import PromptLookup
from draftproof.engine import stats
from draftproof.engine.adaptive import Adaptive
from draftproof.engine.budget import Ahead, Fixed, Learner, Round
from draftproof.engine.decoder import Decoder
from draftproof.engine.engine import Engine, usual_budget
from draftproof.engine.sequence import SequenceState
from draftproof.engine.stats import RoundStats
from draftproof.model.target import Target


class Wild:
    """Learns nothing, drafts at random, and is always curious."""

    def __init__(self, most: int, seed: int) -> None:
        self.most, self.dice, self.plain_step, self.resting, self.holding = most, random.Random(seed), 0.0, 0, 0
        self.begun, self.dozes = 0, False
        self.rounds: list[Round] = []
        self.seen: list[Round] = []
        self.aheads: list[Ahead] = []

    def nodes(self, stats: RoundStats, rows: int) -> int:
        return self.dice.choice((0, 0, 0, 1, 2, 3, self.most))

    def begin(self) -> None:
        self.begun += 1

    def rested(self, rounds: int, seconds: float) -> None:
        assert self.dozes, "it never rests"

    def held(self, done: Round, given: Sequence[int]) -> None:
        raise AssertionError("it never keeps a choice")

    def steady(self, ahead: Ahead) -> int | None:
        return None

    def expect(self, ahead: Ahead) -> None:
        self.aheads.append(ahead)

    def learn(self, done: Round) -> None:
        self.rounds.append(done)

    def curiosity(self) -> int:
        return self.most

    def glimpse(self, nodes: int, seen: Round) -> None:
        self.seen.append(seen)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.9, seed=11)], ids=["greedy", "sampled"])
def test_no_sequence_of_budgets_changes_the_text(drafter: str, sampling: Sampling) -> None:
    asked = prompts(5, seed=3)
    wanted = texts(Engine(target(), Plain()), asked, max_new_tokens=24, sampling=sampling)
    for seed in range(2):
        engine = Engine(target(), Watch(DRAFTERS[drafter](target())), budget=Wild(9, seed))
        assert texts(engine, asked, max_new_tokens=24, sampling=sampling, batch_size=3) == wanted
        assert isinstance(engine.budget, Learner)
    adaptive = Engine(target(), DRAFTERS[drafter](target()), budget=Adaptive(9))
    assert [texts(adaptive, asked, max_new_tokens=24, sampling=sampling) for _ in range(2)] == [wanted] * 2


class Unsure(Wild):
    """So many tokens per row, of which one row may have more, for as long as drafts may stand."""

    floor = 1e-9

    def nodes(self, stats: RoundStats, rows: int) -> int:
        return 2

    def curiosity(self) -> int:
        return 0


@pytest.mark.parametrize("plain", [False, True])
def test_a_plain_round_of_a_batch_makes_no_noise_for_drafts(plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Target, "skips_absent", True)
    budget, seen, frontier = Unsure(6, 0), list[int](), Decoder._frontier
    budget.nodes = lambda stats, rows: 0 if plain else 2  # type: ignore[method-assign]

    def noted(self: Decoder, nodes: int) -> Frontier:
        seen.append(frontier(self, nodes).room)
        return frontier(self, nodes)

    monkeypatch.setattr(Decoder, "_frontier", noted)
    Engine(target(), DRAFTERS["draft chain"](target()), budget=budget).generate(prompts(2), max_new_tokens=6, batch_size=2)
    assert set(seen) == ({0} if plain else {2, 4})


def test_peeking_changes_nothing_either() -> None:
    """A free drafter that is asked and not read writes the same; what it would have got is counted right."""
    asked = prompts(4, seed=7)
    wanted = [tokens for tokens, _ in texts(Engine(target(), Plain()), asked, max_new_tokens=25)]
    for wrong in (False, True):
        oracle = Oracle({tuple(prompt): answer for prompt, answer in zip(asked, wanted, strict=True)}, wrong)
        oracle.free = True
        budget = Wild(5, 1)
        budget.nodes = lambda stats, rows: 0  # type: ignore[method-assign]
        done = Engine(target(), Watched(oracle), budget=budget).generate(asked, max_new_tokens=25)
        assert [one.tokens for one in done] == wanted and all(one.stats.plain_share == 1 for one in done)
        assert len(budget.seen) >= 3
        for seen in budget.seen:
            assert seen.stood == ([0] * 5 if wrong else [seen.rows] * 5) and seen.emitted == 0
            assert seen.nodes == ([] if wrong else [1, 2, 3, 4, 5] * seen.rows)
        assert any(seen.rows == 4 for seen in budget.seen)


class Watched(Watch):
    """As `Watch`, and free."""

    free = True


def test_a_budget_is_told_what_a_draft_model_has_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """After plain rounds as well, of which it learns later: to ask for a number is no reason to tell it of them."""
    budget, told = Wild(3, 1), list[int]()
    budget.nodes = lambda stats, rows: 0  # type: ignore[method-assign]
    prompt, drafter = prompts(1, seed=2)[0], DRAFTERS["draft chain"](target())
    observe = drafter.observe
    monkeypatch.setattr(drafter, "observe", lambda commit: told.append(commit.tokens.shape[1]) or observe(commit))
    Engine(target(), drafter, budget=budget).generate([prompt], max_new_tokens=9)
    assert told == [len(prompt), 8]
    unread = [ahead.unread for ahead in budget.aheads]
    assert unread == list(range(unread[0], unread[0] + 8)) and unread[0] >= len(prompt) - 1


def test_a_budget_is_told_where_a_text_begins() -> None:
    """In its first round and no other, also while it rests."""
    for rests in (False, True):
        budget = Wild(3, 1)
        budget.resting = budget.dozes = rests
        engine = Engine(target(), PromptLookup(), budget=budget)
        engine.generate(prompts(4, seed=2), max_new_tokens=12, batch_size=1)
        assert budget.begun == 4


def test_what_passes_while_a_budget_rests_is_not_told() -> None:
    """Each round is told with its own seconds, not with those of rounds before it that nobody watched."""
    budget = Wild(3, 1)
    budget.nodes, budget.dozes = lambda stats, rows: 0, True  # type: ignore[method-assign]
    rests = itertools.cycle((True, True, True, False))
    engine = Engine(target(), Silent(), budget=budget)
    for _ in engine.rounds(prompts(1, seed=2), max_new_tokens=40):
        budget.resting = next(rests)
    told = sum(one.seconds for one in budget.rounds)
    assert 8 <= len(budget.rounds) <= 11
    assert 0 < told < 0.6 * (engine.clock.total - engine.clock.seconds["prefill"])


@pytest.mark.parametrize("together", [1, 3])
def test_rounds_that_nobody_watches_are_reckoned_as_well(together: int) -> None:
    """Of every row, whoever else begins or ends meanwhile."""
    budget = Wild(3, 1)
    budget.nodes, budget.dozes = lambda stats, rows: 0, True  # type: ignore[method-assign]
    rests = itertools.cycle((True, True, True, False))
    budget.plain_step = 2.0
    engine, seen = Engine(target(), Silent(), budget=budget), list[SequenceState]()
    asked = [Sampling(max_new_tokens=count) for count in (5, 9, 14, 2, 7)]
    for rows in engine.rounds(prompts(5, seed=2), sampling=asked, batch_size=together):
        budget.resting, seen = next(rests), seen or rows
    assert [len(row.tokens) for row in seen] == [5, 9, 14, 2, 7] and len(budget.rounds) < 12
    assert all(row.stats.plain_seconds == 2.0 * row.stats.emitted > 0 for row in seen)


class Slow(Wild):
    """Thinks for long, and always drafts."""

    def nodes(self, stats: RoundStats, rows: int) -> int:
        time.sleep(0.01)
        return 2


def test_what_thinking_takes_is_told_apart_from_drafts() -> None:
    """What the drafter takes is a cost of its drafts."""
    drafter = DRAFTERS["draft chain"](target())
    propose = drafter.propose
    drafter.propose = lambda frontier: (time.sleep(0.02), propose(frontier))[1]  # type: ignore[method-assign]
    budget = Slow(6, 1)
    Engine(target(), drafter, budget=budget).generate(prompts(1), max_new_tokens=16)
    assert all(one.drafting >= 0.01 and one.seconds - one.drafting >= 0.02 for one in budget.rounds)
    assert statistics.median(one.drafting for one in budget.rounds) < 0.02


def test_whatever_a_round_takes_that_is_decided_is_told_with_the_next() -> None:
    """Not only what the budget thinks before it and learns behind it."""

    class Musing(Wild):
        def begin(self) -> None:
            time.sleep(0.02)

        def nodes(self, stats: RoundStats, rows: int) -> int:
            return 0

        def curiosity(self) -> int:
            return 0

    budget = Musing(3, 1)
    engine = Engine(target(), Silent(), budget=budget)
    engine.generate(prompts(1, seed=2), max_new_tokens=6)
    first, second, *rest = (one.drafting for one in budget.rounds)
    assert 0.02 <= second <= engine.clock.seconds["draft"] and max(first, statistics.median(rest)) < 0.02


class Sleepy(Wild):
    """Never drafts, and rests for five rounds behind each that it was told of."""

    asked = slept = 0

    def __init__(self, most: int, seed: int) -> None:
        super().__init__(most, seed)
        self.took = list[float]()

    def nodes(self, stats: RoundStats, rows: int) -> int:
        assert not self.resting
        self.asked += 1
        return 0

    def rested(self, rounds: int, seconds: float) -> None:
        assert 0 < rounds <= 5
        self.slept += rounds
        self.took.append(seconds)
        self.resting -= rounds

    def learn(self, done: Round) -> None:
        super().learn(done)
        time.sleep(0.004)
        self.resting = 5

    def glimpse(self, nodes: int, seen: Round) -> None:
        super().glimpse(nodes, seen)
        self.resting = 0

    def curiosity(self) -> int:
        return 0


@pytest.mark.parametrize("together", [1, 3])
def test_most_rounds_of_a_rest_are_not_asked_for(together: int) -> None:
    """They are told all the same and reckoned for every row, whoever begins or ends, and when nobody listens any more."""
    budget, counts = Sleepy(3, 1), (5, 9, 14, 2, 7)
    budget.plain_step = 2.0
    engine, seen = Engine(target(), Silent(), budget=budget), list[SequenceState]()
    asked = [Sampling(max_new_tokens=count) for count in counts]
    for rows in engine.rounds(prompts(5, seed=2), sampling=asked, batch_size=together):
        seen = seen or rows
    assert [len(row.tokens) for row in seen] == list(counts) and budget.begun > 0
    assert all(row.stats.plain_seconds == 2.0 * row.stats.emitted > 0 for row in seen)
    assert all(one.drafting >= 0.004 for one in budget.rounds[1:]), "what was learned from is told with the next round"
    told, whole = sum(one.seconds for one in budget.rounds), engine.clock.total - engine.clock.seconds["prefill"]
    assert told < 0.8 * whole, "rounds of a rest are told with no other"
    made = sum(row.stats.rounds for row in seen) if together == 1 else budget.asked + budget.slept
    assert budget.asked + budget.slept == made and budget.slept > 5 and len(budget.rounds) <= budget.asked < made / 2 + 5
    going = engine.rounds(prompts(1, seed=2), max_new_tokens=40)
    (row,) = next(going)
    while row.stats.rounds < 9:
        next(going)
    going.close()
    assert row.stats.plain_seconds == 2.0 * row.stats.emitted == 18


def test_a_rest_may_begin_behind_a_draft() -> None:
    """Its rounds are plain, and none of them is asked for."""

    class Once(Sleepy):
        def nodes(self, stats: RoundStats, rows: int) -> int:
            return super().nodes(stats, rows) + 3

    budget = Once(3, 1)
    engine = Engine(target(), Guess(), budget=budget)
    (done,) = engine.generate(prompts(1, seed=2), max_new_tokens=40)
    drafted, plain = done.stats.by_width[3], done.stats.by_width[0]
    assert drafted >= 5 and 5 * (drafted - 1) <= plain == budget.slept <= 5 * drafted
    assert budget.asked == drafted


def test_what_rounds_of_a_rest_took_is_told_by_their_median(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stood still in one of them, and what a drafter does meanwhile, say nothing of a plain step."""
    budget, drafter, now = Sleepy(3, 1), Silent(), [0.0]
    monkeypatch.setattr(stats, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    class Slow(Counted):
        def read(self, tree: TokenTree, cache: object, **options: object) -> object:
            now[0] += 60.0 if len(self.reads) % 6 == 3 else 1.0
            return super().read(tree, cache, **options)  # type: ignore[arg-type]

    def looked_back(decoder: Decoder, tokens: int) -> None:
        now[0] += 20.0

    monkeypatch.setattr(Decoder, "repeating", looked_back)
    drafter.free = True
    engine = Engine(Slow(target()), drafter, budget=budget)
    engine.generate(prompts(1, seed=2), max_new_tokens=40)
    assert engine.clock.seconds["draft"] >= 100 and len(budget.took) >= 5
    assert sum(seconds != 1.0 for seconds in budget.took) <= 1, "the last rest may be a single round"


class Steady(Wild):
    """Always drafts three tokens, and keeps to that for four rounds behind each that it was told of."""

    def __init__(self, most: int, seed: int) -> None:
        super().__init__(most, seed)
        self.asked, self.kept = 0, list[tuple[Round, list[int]]]()

    def nodes(self, stats: RoundStats, rows: int) -> int:
        self.asked, self.holding = self.asked + 1, 0
        return 3

    def learn(self, done: Round) -> None:
        super().learn(done)
        self.holding = 4

    def held(self, done: Round, given: Sequence[int]) -> None:
        self.kept.append((done, list(given)))
        time.sleep(0.05)

    def curiosity(self) -> int:
        return 0


@pytest.mark.parametrize("drafter", ["target itself", "target itself, tree", "redrafter"])
@pytest.mark.parametrize("together", [1, 3])
def test_most_rounds_of_a_kept_choice_are_not_asked_for(together: int, drafter: str) -> None:
    """They are told together, and reckoned for every row, whoever begins or ends; the text is the same."""
    budget, counts = Steady(6, 1), (65, 59, 84, 2, 67)
    budget.plain_step = 2.0
    asked = [Sampling(max_new_tokens=count) for count in counts]
    wanted = texts(Engine(target()), prompts(5, seed=2), sampling=asked)
    engine, seen = Engine(target(), DRAFTERS[drafter](target()), budget=budget), list[SequenceState]()
    for rows in engine.rounds(prompts(5, seed=2), sampling=asked, batch_size=together):
        seen = seen or rows
    assert [(row.tokens, row.finish_reason) for row in seen] == wanted
    assert all(row.stats.plain_seconds == 2.0 * row.stats.emitted > 0 for row in seen)
    held, told = [done for done, _ in budget.kept], [*budget.rounds, *(done for done, _ in budget.kept)]
    assert len(budget.rounds) == budget.asked and held and sum(len(given) for _, given in budget.kept) > budget.asked
    assert all(len(given) <= 4 and sum(given) == done.emitted for done, given in budget.kept)
    assert engine.clock.seconds["draft"] >= 0.05 * len(held), "to learn from them is drafting"
    stats = RoundStats()
    for row in seen:
        stats.add(row.stats)
    assert sum(done.emitted for done in told) == stats.emitted and sum(done.rows for done in told) == stats.rounds
    assert stats.by_width.get(0, 0) == 0, "what is kept is what was chosen"
    for ours, theirs in (("tried", stats.tried_at), ("stood", stats.accepted_at)):
        assert [sum(depth) for depth in itertools.zip_longest(*(getattr(one, ours) for one in told), fillvalue=0)] == theirs
    assert {done.nodes is None for done in held} == {done.nodes is None for done in budget.rounds}
    assert all(done.nodes is None or len(done.nodes) == sum(done.stood) for done in held)
    assert {done.chain for done in held} == {done.chain for done in budget.rounds}


class Welcoming(Steady):
    """Lets prompts be read beside so many nodes; None: never."""

    def __init__(self, nodes: int | None) -> None:
        super().__init__(6, 1)
        self.beside, self.plain_step, self.asked_aside = nodes, 2.0, list[Ahead]()
        self.plain = list[tuple[int, float]]()

    def steady(self, ahead: Ahead) -> int | None:
        self.asked_aside.append(ahead)
        return self.beside

    def rested(self, rounds: int, seconds: float) -> None:
        self.plain.append((rounds, seconds))


@pytest.mark.parametrize("nodes", [None, 0, 3])
def test_a_budget_says_whether_prompts_are_read_beside_drafts(nodes: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a round is told like one of a rest or of a kept choice, but for its seconds; without any texts are the same."""
    monkeypatch.setattr(Target, "skips_absent", True)
    asked = [Sampling(max_new_tokens=count) for count in (65, 9, 34, 2, 67, 20)]
    wanted = texts(Engine(target()), prompts(6, seed=2), sampling=asked)
    budget, own, seen = Welcoming(nodes), Counted(target()), list[SequenceState]()
    engine = Engine(own, DRAFTERS["target itself"](target()), budget=budget)
    for rows in engine.rounds(prompts(6, seed=2), sampling=asked, batch_size=3):
        seen = seen or rows
    assert [(row.tokens, row.finish_reason) for row in seen] == wanted
    assert all(row.stats.plain_seconds == 2.0 * row.stats.emitted for row in seen)
    unclocked = [(done, given) for done, given in budget.kept if not done.seconds]
    assert len(unclocked) == (len(budget.asked_aside) if nodes == 3 else 0) and all(len(given) == 1 for _, given in unclocked)
    assert budget.plain == ([(1, 0.0)] * len(budget.asked_aside) if nodes == 0 else [])
    assert all(ahead.rows == 2 and ahead.remaining > 0 for ahead in budget.asked_aside) and len(budget.asked_aside) == 3
    alone = [tokens.tolist() for tokens, _ in own.reads if tokens.tolist() in [[prompt] for prompt in prompts(6, seed=2)]]
    assert len(alone) == (3 if nodes is None else 0), "the first three come together"
    assert (engine.clock.seconds["prefill"] > 0) and len(budget.rounds) == budget.asked
    stats = RoundStats()
    for row in seen:
        stats.add(row.stats)
    told = [*budget.rounds, *(done for done, _ in budget.kept)]
    assert sum(done.emitted for done in told) == stats.emitted - (stats.by_width.get(0, 0) if nodes == 0 else 0)


class Nothing(Drafter):
    """Is asked, and has nothing to propose."""

    name = "nothing"

    def propose(self, frontier: Frontier) -> TokenTree:
        return TokenTree.root(frontier.prefix.root)


def test_what_rounds_of_a_kept_choice_took_is_told_by_their_median(monkeypatch: pytest.MonkeyPatch) -> None:
    budget, now = Steady(3, 1), [0.0]
    monkeypatch.setattr(stats, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    class Slow(Counted):
        def read(self, tree: TokenTree, cache: object, **options: object) -> object:
            now[0] += 60.0 if len(self.reads) % 6 == 3 else 1.0
            return super().read(tree, cache, **options)  # type: ignore[arg-type]

    Engine(Slow(target()), Nothing(), budget=budget).generate(prompts(1, seed=2), max_new_tokens=40)
    assert len(budget.kept) >= 6 and all(done.seconds == 1.0 for done, given in budget.kept if len(given) > 2)


def test_a_row_that_repeats_itself_is_seen_at_rest() -> None:
    """By what it wrote, without a proposal; for a drafter that costs nothing to look at."""
    pi, seven = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [3, 1, 4, 1, 5, 9, 2, 10, 3, 1, 4, 1, 5, 9, 2, 11]
    for drafter, circle, looks in ((PromptLookup(), pi, True), (Silent(), pi, False), (PromptLookup(), seven, False)):
        budget, before = Sleepy(3, 1), circle * 2 if circle is pi else []
        count = 40 if circle is pi else len(circle) - 1
        Engine(Circling(target(), circle), drafter, budget=budget).generate([[*before, circle[0]]], max_new_tokens=count)
        assert budget.slept >= 8 and bool(budget.seen) == looks, "seven tokens are not enough"
        for seen in budget.seen:
            assert seen.rows == 1 and seen.tried == seen.stood == [1] * 5 and seen.nodes == [1, 2, 3, 4, 5] and seen.chain


class Circling(Counted):
    """A target that writes these tokens again and again."""

    def __init__(self, inner: Target, circle: list[int]) -> None:
        super().__init__(inner)
        self.circle = circle

    def read(self, tree: TokenTree, cache: object, **options: object) -> object:
        lengths = cache.lengths.clone()  # type: ignore[attr-defined]
        reading = super().read(tree, cache, **options)  # type: ignore[arg-type]
        place = (lengths[:, None] + tree.depths)[:, -reading.logits.shape[1] :]  # type: ignore[attr-defined]
        wanted = torch.tensor(self.circle)[(place + 1) % len(self.circle)]
        logits = torch.zeros_like(reading.logits).scatter_(-1, wanted[..., None], 1.0)  # type: ignore[attr-defined]
        return reading._replace(logits=logits)  # type: ignore[attr-defined]


def test_rounds_are_reported_as_they_were() -> None:
    asked, budget = prompts(5, seed=2), Wild(6, 4)
    done = Engine(target(), DRAFTERS["target itself"](target()), budget=budget).generate(
        asked, max_new_tokens=30, sampling=Sampling(temperature=0.5, stop_tokens=[5])
    )
    assert sum(one.emitted for one in budget.rounds) == sum(len(one.tokens) - 1 for one in done)
    assert sum(one.rows for one in budget.rounds) == sum(one.stats.rounds for one in done)
    assert budget.begun == 1, "all texts began in the first round"
    for name, at in (("tried", "tried_at"), ("stood", "accepted_at")):
        told = [sum(column) for column in itertools.zip_longest(*(getattr(one, name) for one in budget.rounds), fillvalue=0)]
        kept = [sum(column) for column in itertools.zip_longest(*(getattr(one.stats, at) for one in done), fillvalue=0)]
        assert told == kept and sum(kept) > 0
    assert all(one.chain and 0 <= one.drafting < one.seconds for one in budget.rounds)
    assert any(ahead.unread > 8 for ahead in budget.aheads) and any(ahead.unread == 0 for ahead in budget.aheads)
    assert budget.aheads[0].remaining == 29 and max(ahead.context for ahead in budget.aheads) <= 30 + max(map(len, asked))
    for one in done:
        assert sum(one.stats.by_width.values()) == one.stats.rounds and set(one.stats.by_width) <= {0, 1, 2, 3, 6}


class Silent(Drafter):
    """Must not be asked."""

    name = "silent"

    def propose(self, frontier: Frontier) -> TokenTree:
        raise AssertionError("a round without a draft asks nobody")


def test_a_round_without_a_draft_is_a_plain_round() -> None:
    """Same reads, same bits of every logit, and nobody is asked."""
    asked, reads = prompts(3, seed=1), []
    for drafter in (Plain(), Silent()):
        own = Reads(target())
        done = Engine(own, drafter, budget=Fixed(0)).generate(asked, max_new_tokens=12)
        reads.append(([one.tokens for one in done], own.shapes, torch.cat(own.logits)))
    assert reads[0][:2] == reads[1][:2] and torch.equal(reads[0][2], reads[1][2])


class Reads(Counted):
    """A target that writes down the shapes it reads and the logits it gives."""

    def __init__(self, inner: object) -> None:
        super().__init__(inner)  # type: ignore[arg-type]
        self.shapes: list[tuple[int, ...]] = []
        self.logits: list[torch.Tensor] = []

    def read(self, tree: TokenTree, cache: object, **options: object) -> object:
        reading = super().read(tree, cache, **options)  # type: ignore[arg-type]
        self.shapes.append(tuple(tree.tokens.shape))
        self.logits.append(reading.logits.flatten())
        return reading


def test_plain_rounds_read_nothing_of_a_draft_model() -> None:
    """And afterwards it catches up: with the root in one read if it missed a few tokens, else in one read more."""
    for plain, wanted in ((1, [4]), (3, [8]), (6, [8]), (7, [7, 2])):
        own = Counted(target(seed=1))
        drafter = DraftModel(own, VOCAB)
        budget = Wild(5, 0)
        sizes = iter([5, *[0] * plain, 5, *[0] * 99])
        budget.nodes = lambda stats, rows, sizes=sizes: next(sizes)  # type: ignore[method-assign,misc]
        marks: list[int] = []
        budget.learn = lambda done, own=own, marks=marks: marks.append(len(own.reads))  # type: ignore[method-assign,misc]
        Engine(target(), drafter, budget=budget).generate([[3, 4, 5], [6, 7, 8]], max_new_tokens=30)
        assert marks[0] == marks[plain] and marks[plain + 1] > marks[plain] and marks[-1] == marks[plain + 1]
        late = [tokens.shape[1] for tokens, _ in own.reads[marks[plain] : marks[plain + 1]]]
        assert late[: len(wanted)] == wanted and len(late) == 5 + len(wanted) - 1


def test_the_default_measures() -> None:
    assert isinstance(usual_budget(PromptLookup()), Adaptive) and usual_budget(Plain()) == Fixed(0)
    engine = Engine(target(), PromptLookup(), budget=usual_budget(PromptLookup()))
    (done,) = engine.generate([[3, 4, 5, 3, 4, 5, 3, 4]], max_new_tokens=60)
    stats = done.stats
    assert stats.by_width and stats.plain_seconds > 0 and stats.debt is not None
    assert stats.plain_seconds < 50 * sum(stats.seconds.values())
