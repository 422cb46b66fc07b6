"""Budgets of a round: drafts that end early, rows that share, the same text whatever is decided."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from drafting import DRAFTERS, Watch, commit_of, texts
from tiny import CPU, prompts, sampler_of, target
from torch import Tensor

from draftproof.cache.kv_cache import KVCache
from draftproof.core import sampling
from draftproof.core.messages import Frontier, Reading
from draftproof.core.noise import Role
from draftproof.core.params import Sampling
from draftproof.core.prefix import Prefix
from draftproof.core.sampling import Sampler
from draftproof.core.tree import TokenTree
from draftproof.drafters.prompt_lookup import PromptLookup
from draftproof.engine.budget import Adaptive, Budget, Fixed
from draftproof.engine.engine import Engine
from draftproof.engine.load import load
from draftproof.errors import BadInput
from draftproof.model.target import Target
from draftproof.requests.stats import Round, State

BOTH = [Sampling(), Sampling(temperature=0.9, seed=11)] * 3


class Wild(Budget):
    """Drafts at random, or always so many, and keeps what it is told."""

    def __init__(self, most: int, seed: int = 0, size: int | None = None) -> None:
        self.max_draft_tokens, self.size, self.dice = most, size, random.Random(seed)
        self.min_confidence = 1e-9 if size else 0.0          # drafts may end early, and rows share
        self.states, self.rounds = list[State](), list[Round]()

    def choose(self, state: State) -> int:
        self.states.append(state)
        wild = self.dice.choice((0, 0, 0, 1, 2, 3, self.max_draft_tokens))
        return wild if self.size is None else self.size

    def record(self, done: Round) -> None:
        self.rounds.append(done)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_no_sequence_of_budgets_changes_the_text(
    drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever rows share."""
    asked, wish = prompts(6, seed=3), {"max_new_tokens": 24, "sampling": BOTH, "batch_size": 3}
    wanted = texts(Engine(target()), asked, **wish)
    for budget in (Wild(9, 0), Wild(9, 1)):
        engine = Engine(target(), Watch(DRAFTERS[drafter](target())), budget=budget)
        assert texts(engine, asked, **wish) == wanted
    monkeypatch.setattr(Target, "ragged_batches", True)
    adaptive = Engine(target(), Watch(DRAFTERS[drafter](target())), budget=Adaptive(9))
    assert [texts(adaptive, asked, **wish) for _ in range(2)] == [wanted] * 2


class Peeking(Wild):
    """Cools down most of the time, asks nevertheless, and reads as much as it likes."""

    min_confidence = 1e-9

    def __init__(self, most: int, seed: int) -> None:
        super().__init__(most, seed)
        self.min_confidence, self.cooldown = 1e-9, 1
        self.read = list[tuple[int, int]]()             # nodes of a draft, and how many are read

    def peek(self, state: State) -> int:
        return self.choose(state)

    def worth_reading(self, confidence: Sequence[float]) -> int:
        assert all(0 <= chance <= 1 for chance in confidence)
        self.read.append((len(confidence), self.dice.choice((0, 1, 3, self.max_draft_tokens))))
        self.cooldown = 0 if self.read[-1][1] else self.cooldown
        return self.read[-1][1]

    def record(self, done: Round) -> None:
        super().record(done)
        self.cooldown = self.dice.choice((0, 3))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafts_read_in_a_cooldown_do_not_change_the_text(drafter: str, rows: int) -> None:
    """Of a tree, the likeliest nodes are read. Drafters with a KV cache are not asked."""
    asked, wish = prompts(6, seed=3), {"max_new_tokens": 24, "sampling": BOTH, "batch_size": rows}
    wanted = texts(Engine(target()), asked, **wish)
    budget = Peeking(9, 1)
    engine = Engine(target(), Watch(DRAFTERS[drafter](target())), budget=budget)
    assert texts(engine, asked, **wish) == wanted
    nodes = [sum(done.rows for done in budget.rounds), sum(done.drafted for done in budget.rounds)]
    assert nodes[1] <= 9 * nodes[0] and all(done.draft_seconds > 0 for done in budget.rounds)
    if drafter in ("medusa", "redrafter", "merged"):
        assert len({size for _, size in budget.read}) > 2


class SureChain(PromptLookup):
    """Always the same chain, and sure of it."""

    def propose(self, frontier: Frontier) -> TokenTree:
        root, size = frontier.prefix.root[:, None], min(3, frontier.max_draft_tokens)
        chain = TokenTree.chain(torch.cat([root, torch.ones_like(root).expand(-1, size)], 1))
        return replace(chain, confidence=torch.ones(len(root), 1 + size))


def test_a_chain_that_is_read_in_a_cooldown_stays_a_chain() -> None:
    """A budget expects other acceptance of trees."""
    budget = Peeking(9, 1)
    Engine(target(), SureChain(), budget=budget).generate(prompts(1, seed=3), max_new_tokens=40)
    whole = [done for done in budget.rounds if done.drafted == 3]
    assert len(whole) > 3 and all(done.chain for done in whole)


class Resting(Wild):
    """Drafts, and says in the same breath that the next rounds are plain."""

    def choose(self, state: State) -> int:
        self.cooldown = 2
        return 4

    def record(self, done: Round) -> None:
        super().record(done)
        self.cooldown -= 1


def test_a_cooldown_begins_after_the_round_that_it_is_set_in() -> None:
    budget = Resting(4)
    Engine(target(), DRAFTERS["medusa"](target()), budget=budget).generate(
        prompts(1, seed=3), max_new_tokens=20)
    assert [done.size for done in budget.rounds][:4] == [4, 0, 4, 0]


def test_each_round_that_asks_in_a_cooldown_is_recorded() -> None:
    """Also while the chunks of a prompt are read next to a running text."""
    class Strict(Peeking):
        peeks, unrecorded = 0, False

        def peek(self, state: State) -> int:
            assert not self.unrecorded
            self.unrecorded = (size := super().peek(state)) > 0
            self.peeks += self.unrecorded
            return size

        def record(self, done: Round) -> None:
            super().record(done)
            self.cooldown, self.unrecorded = 3, False

    budget = Strict(9, 1)
    engine = load("demo", drafter="portfolio", budget=budget)
    words = "the cat sat on the mat and the dog sat on the mat and "
    (first,) = engine.read([words * 3], max_new_tokens=90, sampling=Sampling())
    (second,) = engine.read([words * 24], max_new_tokens=8)
    scheduler = engine.new_scheduler(4, 1500, interleave=True)
    scheduler.add(first)
    for step in range(400):
        if step == 4:
            scheduler.add(second)
        if not scheduler.has_unfinished_requests():
            break
        scheduler.step()
    assert budget.peeks > 2


class Reckless(Wild):
    """Chooses more than it said it would."""

    def choose(self, state: State) -> int:
        return 10**6


def test_budgets_keep_their_word() -> None:
    engine = Engine(target(), PromptLookup(), budget=Reckless(4))
    with pytest.raises(BadInput, match="chose 1000000 draft tokens; it may choose 0 to"):
        engine.generate(prompts(1, seed=3), max_new_tokens=8)


@pytest.mark.parametrize("drafter", ["prompt-lookup", "suffix", "recycling", "portfolio"])
def test_kernels_refuse_drafts_larger_than_their_memory(drafter: str) -> None:
    """They keep nodes on the stack. An engine refuses such a budget before."""
    made = DRAFTERS[drafter](target())
    made.start(1, 64, CPU)
    made.observe(commit_of([0], [[1, 2, 1, 2]]))
    prefix = Prefix(torch.tensor([[1, 2, 1, 2, 1] + [0] * 59]), torch.tensor([4]))
    if CPU.library is not None:
        with pytest.raises(BadInput, match="the kernels draft at most 1536"):
            made.propose(Frontier(prefix, sampler_of(Sampling()), 100_000))
    most = made.propose(Frontier(prefix, sampler_of(Sampling()), 1023))
    assert most.tokens.shape[1] <= 1024
    with pytest.raises(BadInput, match="fewer than 1024"):
        Engine(target(max_position_embeddings=4096), made, budget=1024)


def test_a_draft_without_nodes_is_read_as_plain_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree takes other paths, with masks and gathers."""
    model, trees = target(), list[TokenTree]()
    read = model.read

    def watched(tree: TokenTree, *rest: Any, **more: Any) -> Reading:
        trees.append(tree)
        return read(tree, *rest, **more)

    monkeypatch.setattr(model, "read", watched)
    Engine(model, PromptLookup(16, 16), budget=4).generate(prompts(1, seed=3), max_new_tokens=8)
    assert len(trees) > 6 and all(tree.is_chain for tree in trees)


def test_noise_is_made_only_for_what_was_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for the most that might have been."""
    made = list[int]()

    class Counting(Sampler):
        def _made(self, position: Tensor, reach: int, role: Role, vocab: int) -> Tensor:
            made.append(reach)
            return super()._made(position, reach, role, vocab)

    monkeypatch.setattr(sampling, "LARGEST", 0)                 # no noise in advance
    wish = {"max_new_tokens": 12, "sampling": Sampling(temperature=1.0, seed=2)}
    for drafter, reach in (("nothing", 1), ("prompt-lookup", 3)):
        silent = PromptLookup(16, 16) if drafter == "nothing" else DRAFTERS[drafter](target())
        engine = Engine(target(), Watch(silent), budget=Fixed(2), sampler=Counting)
        asked = [prompt * 3 for prompt in prompts(2, seed=4)]
        made.clear()
        assert texts(engine, asked, **wish) == texts(Engine(target()), asked, **wish)
        assert made and max(made) == reach


def test_budgets_receive_the_results_of_their_rounds() -> None:
    """Sizes as chosen, emitted tokens that add up, accepted nodes within the draft, seconds."""
    budget = Wild(6, 1)
    engine = Engine(target(), DRAFTERS["target itself"](target()), budget=budget)
    done = engine.generate(prompts(3, seed=5), max_new_tokens=30, batch_size=1)
    assert sum(seen.emitted for seen in budget.rounds) == sum(text.stats.emitted for text in done)
    assert all(seen.chain and list(seen.accepted) == [*range(1, seen.size + 1)] and seen.seconds > 0
               for seen in budget.rounds)
    assert all(state.rows == 1 and 0 < state.remaining < 30 for state in budget.states)


def test_budgets_receive_the_unread_tokens_of_a_draft_model() -> None:
    """After plain rounds as well, of which the drafter itself may learn later."""
    budget, (prompt,) = Wild(3, size=0), prompts(1, seed=2)
    Engine(target(), DRAFTERS["draft chain"](target()), budget=budget).generate(
        [prompt], max_new_tokens=8)
    results = [(state.unread, state.context) for state in budget.states]
    assert results == [(len(prompt) - 1 + turn, len(prompt) + 1 + turn) for turn in range(7)]


@pytest.mark.parametrize("drafter", ["draft chain", "redrafter"])
def test_drafts_end_where_acceptance_is_unlikely(drafter: str) -> None:
    """A higher floor drafts fewer tokens, of which more stand; the text is the same."""
    asked, shares, drafted = prompts(6, seed=4), list[float](), list[int]()
    wish = {"max_new_tokens": 24, "sampling": BOTH, "batch_size": 1}
    wanted = texts(Engine(target()), asked, **wish)
    for floor in (0.0, 0.5, 0.99):
        engine = Engine(target(), Watch(DRAFTERS[drafter](target())), budget=Fixed(6, floor))
        done = engine.generate(asked, **wish)
        assert [(completion.tokens, completion.finish_reason) for completion in done] == wanted
        drafted.append(sum(completion.stats.drafted for completion in done))
        shares.append(sum(completion.stats.accepted for completion in done) / drafted[-1])
    assert drafted[0] > drafted[1] >= drafted[2] > 0 and shares[2] >= shares[0]


def test_rows_of_a_batch_share_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a row drafts beyond its part another does not; two tokens more than all on average are
    set aside for. Alone there is nobody to share with."""
    monkeypatch.setattr(Target, "ragged_batches", True)
    asked, budget, sizes = prompts(6, seed=4), Wild(6, size=2), list[list[int]]()
    wish = {"max_new_tokens": 24, "sampling": BOTH, "batch_size": 3}
    wanted = texts(Engine(target()), asked, **wish)
    engine = Engine(target(), DRAFTERS["target itself"](target()), budget=budget)
    read = engine.target.read

    def noted(tree: TokenTree, cache: KVCache, **options: Any) -> Reading:
        # no draft's read, no prompt
        if "hidden_layers" in options and cache.lengths.all() and tree.tokens.shape[1] > 1:
            sizes.append(tree.sizes)
        return read(tree, cache, **options)

    monkeypatch.setattr(engine.target, "read", noted)
    assert texts(engine, asked, **wish) == wanted
    shared = [size for size in sizes if len(size) > 1]
    assert all(sum(sizes) <= 2 * len(sizes) and max(sizes) <= 4 for sizes in shared)
    assert any(max(sizes) > 2 > min(sizes) for sizes in shared)
    assert all(max(size) <= 2 for size in sizes if len(size) == 1)
    told = [node for done in budget.rounds if done.rows > 1 for node in done.accepted]
    assert set(told) == {1, 2} and told.count(1) >= told.count(2), "and what is drafted stands"
    assert all(done.chain == (done.rows == 1) for done in budget.rounds)
