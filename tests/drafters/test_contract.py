"""What any drafter must keep: a new one is added to `DRAFTERS` in drafting.py and held to all of this."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drafting import DRAFTERS, LEARNERS, Fading, Guess, Hinted, Oracle, Watch, assert_well_formed, texts
from tiny import CPU, VOCAB, prompts, sampler_of, target
from torch import Tensor

from draftproof.core.acceptance import RULES
from draftproof.core.messages import Accepted, Commit, Frontier, Reading
from draftproof.core.params import Sampling
from draftproof.core.prefix import Prefix
from draftproof.core.sampling import Sampler
from draftproof.core.tree import TokenTree, TreeShape
from draftproof.drafters.base import Drafter
from draftproof.drafters.draft_model import DraftModel
from draftproof.drafters.prompt_lookup import PromptLookup
from draftproof.engine.engine import Engine
from draftproof.errors import BadInput, DrafterMismatch

any_drafter = pytest.mark.parametrize("name", DRAFTERS)
CAPACITY = 96


class Stage:
    """A batch without a target: texts, the roots behind them, and a drafter that has observed them."""

    def __init__(self, drafter: Drafter, texts: list[list[int]], drawn: bool = False) -> None:
        self.drafter, self.drawn = drafter, drawn
        self.sampler = sampler_of(*[Sampling(temperature=1.0, seed=row) for row in range(len(texts))])
        self.tokens = torch.zeros(len(texts), CAPACITY, dtype=torch.int64)
        self.position = torch.tensor([len(text) - 1 for text in texts])
        drafter.start(8, CAPACITY, CPU)
        for row, text in enumerate(texts):
            self.tokens[row, : len(text)] = torch.tensor(text)
            drafter.observe(_prompt(drafter, row, text[:-1]))

    def propose(self, budget: int) -> TokenTree:
        with torch.inference_mode():
            frontier = Frontier(Prefix(self.tokens.clone(), self.position.clone()), self.sampler, budget, self.drawn)
            tree = self.drafter.propose(frontier)
        assert_well_formed(tree, frontier)
        return tree

    def commit(self, tree: TokenTree, seed: int) -> None:
        """Accept a random node of each row and go on with a random root."""
        dice = torch.Generator().manual_seed(seed)
        score = torch.where(tree.present, torch.rand(tree.tokens.shape, generator=dice), -1.0)
        last = score.argmax(1)
        count = tree.depths.gather(1, last[:, None])[:, 0] + 1
        accepted = Accepted(tree.path_to(last), count, torch.randint(VOCAB - 12, (len(last),), generator=dice))
        committed = torch.arange(CAPACITY) < self.position[:, None]
        before = torch.where(committed, _weights(self.tokens, torch.arange(CAPACITY)), 0).sum(1, keepdim=True)
        there = _weights(tree.tokens, self.position[:, None] + tree.depths)                     # [B, N]
        hidden = _states(self.drafter, before + (tree.ancestors * there[:, None]).sum(-1))
        commit = Commit.of(range(len(last)), tree, Reading(torch.zeros(1), hidden), accepted)
        with torch.inference_mode():
            self.drafter.observe(commit)
        for row in range(len(last)):
            start, size = int(self.position[row]), int(count[row])
            self.tokens[row, start : start + size] = commit.tokens[row, :size]
            self.tokens[row, start + size] = accepted.root[row]
        self.position += count

    def select(self, rows: list[int]) -> None:
        self.drafter.select(rows)
        self.tokens, self.position = self.tokens[rows], self.position[rows]
        self.sampler = Sampler([self.sampler.rows[row] for row in rows], ops=CPU)

    def texts(self) -> list[list[int]]:
        return [row[: place + 1].tolist() for row, place in zip(self.tokens, self.position.tolist(), strict=True)]


def long_enough(count: int, seed: int) -> list[list[int]]:
    return [[*text, 3, 1] for text in prompts(count, seed, vocab=VOCAB - 12)]


@any_drafter
@pytest.mark.parametrize("drawn", [False, True])
def test_a_proposal_depends_on_the_text_alone(name: str, drawn: bool) -> None:
    """After any history of commits and selections a drafter proposes what a fresh one does: memory is never stale."""
    if name == "guess" or name in LEARNERS:
        return
    stage = Stage(DRAFTERS[name](target()), long_enough(4, 1), drawn)
    for round_, budget in enumerate((4, 10, 0, 0, 3, 10, 1, 0, 10, 10)):
        tree = stage.propose(budget)
        other = Stage(DRAFTERS[name](target()), stage.texts(), drawn)
        other.sampler = stage.sampler
        fresh = other.propose(budget)
        assert torch.equal(tree.tokens, fresh.tokens) and torch.equal(tree.parents, fresh.parents), round_
        if tree.draft_probs is not None:
            torch.testing.assert_close(tree.draft_probs, fresh.draft_probs, rtol=0, atol=1e-9)
        stage.commit(tree, seed=round_)
        if round_ in (3, 6):
            stage.select([2, 0, 1, 1] if round_ == 3 else [3, 1])
        if round_ == 7:
            stage.drafter.observe(_prompt(stage.drafter, 2, [1, 2, 3, 4]))
            stage.tokens = torch.cat([stage.tokens, torch.tensor([[1, 2, 3, 4, 5, *[0] * (CAPACITY - 5)]])])
            stage.position = torch.cat([stage.position, torch.tensor([4])])
            stage.sampler = Sampler([*stage.sampler.rows, stage.sampler.rows[0]], ops=CPU)


def _prompt(drafter: Drafter, row: int, text: list[int]) -> Commit:
    whole, tokens = torch.arange(len(text))[None], torch.tensor([text])
    hidden = _states(drafter, _weights(tokens, whole).cumsum(1))
    return Commit([row], tokens, whole, torch.tensor([len(text)]), hidden)


def _weights(tokens: Tensor, places: Tensor) -> Tensor:
    """What each token adds to the sum that stands for its text."""
    return (tokens + 1) * (places * places + 3 * places + 5)


def _states(drafter: Drafter, sums: Tensor) -> Tensor | None:
    """[B, N, T, H] hidden states that depend on the text [B, N] stands for, at the layers the drafter taps."""
    if not drafter.hidden_layers:
        return None
    waves = torch.arange(1, target().hidden_size + 1) * torch.arange(1, len(drafter.hidden_layers) + 1)[:, None]      # [T, H]
    return torch.sin(sums[:, :, None, None].double() * waves * 0.7)


@any_drafter
def test_select_commutes_with_propose(name: str) -> None:
    """Proposing and then choosing rows equals choosing rows and then proposing; repeated rows included."""
    if name == "guess":
        return
    for rows in ([2, 0], [1], [0, 0, 2, 1, 2], [3, 2, 1, 0]):
        one, other = (Stage(DRAFTERS[name](target()), long_enough(4, 2)) for _ in range(2))
        for stage in (one, other):
            stage.commit(stage.propose(5), seed=3)
        wanted = one.propose(5)
        other.select(rows)
        assert torch.equal(other.propose(5).tokens, wanted.tokens[rows])


@any_drafter
@pytest.mark.parametrize("budget", [0, 1, 2, 3, 7, 30])
def test_the_budget_is_respected(name: str, budget: int) -> None:
    stage = Stage(DRAFTERS[name](target()), long_enough(3, 4))
    for round_ in range(3):
        stage.commit(stage.propose(budget), seed=round_)  # propose() checks the tree


DRAWERS = ("draft", "smaller vocabulary", "larger vocabulary", "target itself")
"""How they begin that can draw; the others always choose."""


@pytest.mark.parametrize("name", [name for name in DRAFTERS if name.startswith(DRAWERS)])
def test_drawn_tokens_carry_the_law_they_were_drawn_from(name: str) -> None:
    """Each law is a law, and every drawn token is possible under it; chosen tokens carry none."""
    assert Stage(DRAFTERS[name](target()), long_enough(3, 5)).propose(10).draft_probs is None
    tree = Stage(DRAFTERS[name](target()), long_enough(3, 5), drawn=True).propose(10)
    assert tree.draft_probs is not None
    law = tree.draft_probs[:, 1:]
    torch.testing.assert_close(law.sum(-1), torch.ones_like(law[..., 0]))
    confidence = law.gather(-1, tree.tokens[:, 1:, None].clamp(min=0))[..., 0]
    assert (confidence[tree.present[:, 1:]] > 0).all()


@any_drafter
def test_going_plain_for_a_while_and_back(name: str) -> None:
    asked, want = prompts(5, seed=6), Sampling(temperature=0.8, seed=2)
    wanted = texts(Engine(target()), asked, max_new_tokens=30, sampling=want)
    engine = Engine(target(), Watch(DRAFTERS[name](target())), budget=Fading(10))
    assert texts(engine, asked, max_new_tokens=30, sampling=want) == wanted


def test_one_that_knows_is_accepted_whole_and_one_that_errs_never() -> None:
    asked = prompts(4, seed=7)
    wanted = [tokens for tokens, _ in texts(Engine(target()), asked, max_new_tokens=25)]
    known = {tuple(prompt): answer for prompt, answer in zip(asked, wanted, strict=True)}
    for wrong in (False, True):
        done = Engine(target(), Watch(Oracle(known, wrong)), budget=5).generate(asked, max_new_tokens=25)
        assert [one.tokens for one in done] == wanted
        for one in done:
            assert one.stats.accepted == (0 if wrong else 20) and one.stats.rounds == (24 if wrong else 4)
    done = Engine(target(), Watch(Hinted(Oracle(known)))).generate(asked, max_new_tokens=25)
    assert [one.tokens for one in done] == wanted and all(one.stats.accepted > 8 for one in done)


def test_the_target_as_its_own_draft_is_accepted_whole() -> None:
    for sampling in (Sampling(), Sampling(temperature=1.0, seed=4)):
        for rule in RULES:
            drafter = DraftModel(target(), VOCAB)
            done = Engine(target(), drafter, acceptance=rule, budget=4).generate(
                prompts(3, seed=8), max_new_tokens=21, sampling=sampling
            )
            assert all(one.stats.rounds == 4 and one.stats.accepted == 16 for one in done), (rule, sampling.temperature)


def test_absent_nodes_are_harmless() -> None:
    """Ragged trees with gaps, in every rule: `Guess` proposes them, the text stays."""
    asked = prompts(6, seed=9)
    for rule in RULES:
        wanted = texts(Engine(target()), asked, max_new_tokens=20, sampling=Sampling(temperature=1.0))
        assert (
            texts(
                Engine(target(), Watch(Guess()), acceptance=rule), asked, max_new_tokens=20, sampling=Sampling(temperature=1.0)
            )
            == wanted
        )


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(BadInput, match="n-grams"):
        PromptLookup(longest=2, shortest=3)

    class NoTrees:
        name, vocab_size, context, reads_trees = "no-trees", 5, 9, False

    model: Any = NoTrees()
    with pytest.raises(DrafterMismatch, match="trees"):
        DraftModel(model, 5, TreeShape.branching((2,)))
    DraftModel(model, 5, TreeShape.chain(3))
    with pytest.raises(DrafterMismatch, match="children"):
        DraftModel(target(), VOCAB, TreeShape.branching((VOCAB + 1,)))
