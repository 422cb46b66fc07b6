"""The rules for any drafter: a new one joins `DRAFTERS` in drafting.py and is held to all of
this."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import drafting
import pytest
import torch
from drafting import DRAFTERS, LEARNERS, Guess, Oracle, Watch, commit_of, per_round, texts
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
from draftproof.drafters.suffix import SuffixDrafter
from draftproof.drafters.token_recycling import TokenRecycling
from draftproof.engine.engine import Engine
from draftproof.errors import BadInput, DrafterMismatch

any_drafter = pytest.mark.parametrize("name", DRAFTERS)
HEADS = [name for name in DRAFTERS if name.startswith(("medusa", "redrafter"))]
CAPACITY = 96


def _penalise(tokens: Tensor, scores: Tensor) -> Tensor:
    places = torch.arange(scores.shape[-1]) + tokens[:, -1:]
    return torch.where(places % 3 == 0, scores - 1.0, scores)


PARAMS = [Sampling(), Sampling(temperature=1.0, seed=5), Sampling(temperature=0.5, seed=1),
          Sampling(temperature=0.9, top_k=4, seed=2), Sampling(temperature=1.1, top_p=0.7, seed=3),
          Sampling(temperature=1.0, min_p=0.2, seed=4), Sampling(repetition_penalty=1.4),
          Sampling(temperature=0.8, presence_penalty=0.9, frequency_penalty=0.5, seed=6),
          Sampling(no_repeat_ngram=2), Sampling(logit_bias={3: 2.5, 5: float("-inf"), 7: -4.0}),
          Sampling(banned_words=[[23], [0, 27]]),
          Sampling(min_new_tokens=9, stop_tokens=tuple(range(0, VOCAB, 6))),
          Sampling(temperature=1.0, min_new_tokens=6, stop_tokens=[1, 2, 3], seed=7),
          Sampling(processors=[_penalise])]


@lru_cache(maxsize=1)
def plain_texts() -> list[tuple[list[int], str]]:
    params = [item for item in PARAMS for _ in range(2)]
    return texts(Engine(target()), prompts(len(params)), max_new_tokens=24, sampling=params)


@any_drafter
def test_text_equals_plain_decoding(name: str) -> None:
    """Every sampling parameter, ragged prompts, in fewer rows than texts: rows join and leave."""
    params = [item for item in PARAMS for _ in range(2)]
    greedy = texts(Engine(target()), prompts(len(params)), max_new_tokens=24)
    changed = [item != other for item, other in zip(plain_texts(), greedy, strict=True)]
    assert all(any(changed[2 * index : 2 * index + 2]) for index in range(1, len(PARAMS)))
    engine = Engine(target(), Watch(DRAFTERS[name](target())))
    options = {"max_new_tokens": 24, "sampling": params, "batch_size": 5}
    assert texts(engine, prompts(len(params)), **options) == plain_texts()


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_correct_heads_are_accepted(name: str, temperature: float) -> None:
    """Equality would mean little if nothing were accepted: heads draft what they were fitted to."""
    engine, want = Engine(target(), DRAFTERS[name](target())), Sampling(temperature, seed=5)
    done = engine.generate(prompts(8), max_new_tokens=40, sampling=want)
    assert sum(item.stats.accepted for item in done) > sum(item.stats.rounds for item in done)


class Stage:
    """A batch without a target: texts, the roots after them, and a drafter that observed them."""

    def __init__(self, drafter: Drafter, texts: list[list[int]], drawn: bool = False) -> None:
        self.drafter, self.drawn = drafter, drawn
        self.sampler = sampler_of(*[Sampling(temperature=1.0, seed=row)
                                    for row in range(len(texts))])
        self.tokens = torch.zeros(len(texts), CAPACITY, dtype=torch.int64)
        self.position = torch.tensor([len(text) - 1 for text in texts])
        drafter.start(8, CAPACITY, CPU)
        for row, text in enumerate(texts):
            self.tokens[row, : len(text)] = torch.tensor(text)
            drafter.observe(_prompt(drafter, row, text[:-1]))

    def propose(self, budget: int) -> TokenTree:
        with torch.inference_mode():
            prefix = Prefix(self.tokens.clone(), self.position.clone())
            frontier = Frontier(prefix, self.sampler, budget, self.drawn)
            root = TokenTree.root(prefix.root)
            tree = self.drafter.propose(frontier) if budget else root   # as the decoder asks
        drafting.assert_well_formed(tree, frontier)
        return tree

    def commit(self, tree: TokenTree, seed: int) -> None:
        """Accept a random node of each row and continue with a random root."""
        dice = torch.Generator().manual_seed(seed)
        score = torch.where(tree.present, torch.rand(tree.tokens.shape, generator=dice), -1.0)
        last = score.argmax(1)
        count = tree.depths.gather(1, last[:, None])[:, 0] + 1
        root = torch.randint(VOCAB - 12, (len(last),), generator=dice)
        accepted = Accepted(tree.path_to(last), count, root)
        committed, places = torch.arange(CAPACITY) < self.position[:, None], torch.arange(CAPACITY)
        before = torch.where(committed, _weights(self.tokens, places), 0).sum(1, keepdim=True)
        there = _weights(tree.tokens, self.position[:, None] + tree.depths)  # [B, N]
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

    def join(self, text: list[int]) -> None:
        self.drafter.observe(_prompt(self.drafter, len(self.position), text[:-1]))
        self.tokens = torch.cat([self.tokens,
                                 torch.tensor([[*text, *[0] * (CAPACITY - len(text))]])])
        self.position = torch.cat([self.position, torch.tensor([len(text) - 1])])
        self.sampler = Sampler([*self.sampler.rows, self.sampler.rows[0]], ops=CPU)

    def texts(self) -> list[list[int]]:
        position = self.position.tolist()
        return [row[: place + 1].tolist() for row, place in zip(self.tokens, position, strict=True)]


def long_enough(count: int, seed: int) -> list[list[int]]:
    return [[*text, 3, 1] for text in prompts(count, seed, vocab=VOCAB - 12)]


def _prompt(drafter: Drafter, row: int, text: list[int]) -> Commit:
    weights = _weights(torch.tensor([text]), torch.arange(len(text)))
    return commit_of([row], [text], _states(drafter, weights.cumsum(1)))


def _weights(tokens: Tensor, places: Tensor) -> Tensor:
    """What each token adds to the sum that stands for its text."""
    return (tokens + 1) * (places * places + 3 * places + 5)


def _states(drafter: Drafter, sums: Tensor) -> Tensor | None:
    """[B, N, T, H] hidden states at the drafter's layers that depend on the text's sum [B, N]."""
    if not drafter.hidden_layers:
        return None
    layers = torch.arange(1, len(drafter.hidden_layers) + 1)[:, None]
    waves = torch.arange(1, target().hidden_size + 1) * layers                              # [T, H]
    return torch.sin(sums[:, :, None, None].double() * waves * 0.7)


def depends_on_the_text_alone(make: Callable[[], Drafter], drawn: bool, draws: bool) -> None:
    """After any commits, selections and plain rounds it proposes what a fresh one does: no stale
    memory. Drawn tokens, and they alone, carry a distribution under which all of them are
    possible."""
    stage = Stage(make(), long_enough(4, 1), drawn)
    for round_, budget in enumerate((4, 10, 0, 0, 3, 10, 1, 0, 10, 10)):
        tree = stage.propose(budget)
        other = Stage(make(), stage.texts(), drawn)
        other.sampler = stage.sampler
        fresh = other.propose(budget)
        assert torch.equal(tree.tokens, fresh.tokens), round_
        assert torch.equal(tree.parents, fresh.parents), round_
        assert (tree.draft_probs is not None) == (drawn and draws and budget > 0)
        if tree.draft_probs is not None:
            torch.testing.assert_close(tree.draft_probs, fresh.draft_probs, rtol=0, atol=1e-9)
            distribution = tree.draft_probs[:, 1:]
            torch.testing.assert_close(distribution.sum(-1), torch.ones_like(distribution[..., 0]))
            picked = distribution.gather(-1, tree.tokens[:, 1:, None].clamp(min=0))[..., 0]
            assert (picked[tree.present[:, 1:]] > 0).all()
        stage.commit(tree, seed=round_)
        if round_ in (3, 6):
            stage.select([2, 0, 1, 1] if round_ == 3 else [3, 1])
        if round_ == 7:
            stage.join([1, 2, 3, 4, 5])


DRAWERS = ("draft", "smaller vocabulary", "larger vocabulary", "target itself")
"""How names begin of drafters that can draw; the others always choose."""


@pytest.mark.parametrize("name", [item for item in DRAFTERS if item not in ("guess", *LEARNERS)])
@pytest.mark.parametrize("drawn", [False, True])
def test_proposals_depend_only_on_the_text(name: str, drawn: bool) -> None:
    depends_on_the_text_alone(lambda: DRAFTERS[name](target()), drawn, name.startswith(DRAWERS))


@any_drafter
def test_select_commutes_with_propose(name: str) -> None:
    """Proposing and then choosing rows equals choosing rows first; repeated rows too."""
    if name == "guess":
        return
    for rows in ([2, 0], [1], [0, 0, 2, 1, 2], [3, 2, 1, 0]):
        item, other = (Stage(DRAFTERS[name](target()), long_enough(4, 2)) for _ in range(2))
        for stage in (item, other):
            stage.commit(stage.propose(5), seed=3)
        wanted = item.propose(5)
        other.select(rows)
        assert torch.equal(other.propose(5).tokens, wanted.tokens[rows])


@any_drafter
@pytest.mark.parametrize("budget", [1, 3, 30])
def test_the_budget_is_respected(name: str, budget: int) -> None:
    stage = Stage(DRAFTERS[name](target()), long_enough(3, 4))
    for round_ in range(3):
        stage.commit(stage.propose(budget), seed=round_)                # propose() checks the tree


def test_correct_drafts_are_accepted_and_wrong_ones_never() -> None:
    asked = prompts(4, seed=7)
    wanted = [tokens for tokens, _ in texts(Engine(target()), asked, max_new_tokens=25)]
    known = {tuple(prompt): answer for prompt, answer in zip(asked, wanted, strict=True)}
    for wrong in (False, True):
        engine = Engine(target(), Watch(Oracle(known, wrong)), budget=5)
        done = engine.generate(asked, max_new_tokens=25)
        assert [completion.tokens for completion in done] == wanted
        for item in done:
            assert (item.stats.accepted, item.stats.rounds) == ((0, 24) if wrong else (20, 4))
            assert item.stats.acceptance_by_position == ([0.0] if wrong else [1.0] * 5)
    engine = Engine(target(), Watch(drafting.Hinted(Oracle(known))))
    done = engine.generate(asked, max_new_tokens=25)
    assert [each.tokens for each in done] == wanted
    assert all(each.stats.accepted > 8 for each in done)


@pytest.mark.parametrize("rule", RULES)
def test_drafts_of_the_target_itself_are_fully_accepted(rule: str) -> None:
    for sampling in (Sampling(), Sampling(temperature=1.0, seed=4)):
        engine = Engine(target(), DraftModel(target(), VOCAB), acceptance=rule, budget=4)
        done = engine.generate(prompts(3, seed=8), max_new_tokens=21, sampling=sampling)
        assert all(completion.stats.rounds == 4 and completion.stats.accepted == 16
                   for completion in done), sampling.temperature


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_takes_chosen_tokens(rule: str) -> None:
    """Ragged trees with gaps, and the trees of heads: the text stays."""
    asked, want = prompts(6, seed=9), Sampling(temperature=1.0)
    wanted = texts(Engine(target()), asked, max_new_tokens=20, sampling=want)
    for drafter in (Guess(), DRAFTERS["redrafter"](target())):
        engine = Engine(target(), Watch(drafter), acceptance=rule, budget=8)
        assert texts(engine, asked, max_new_tokens=20, sampling=want) == wanted


@pytest.mark.usefixtures("lookup")
@pytest.mark.parametrize(("kind", "least"), [(SuffixDrafter, 4), (TokenRecycling, 1.5)])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_repeated_texts_are_drafted_from_memory(
    kind: Any, least: float, temperature: float
) -> None:
    """The same requests again: the same text, in fewer rounds."""
    want = Sampling(temperature=temperature, seed=3)
    asked, options = prompts(5, seed=5), {"max_new_tokens": 40, "sampling": want}
    wanted = [completion.tokens for completion in Engine(target()).generate(asked, **options)]
    engine, rates = Engine(target(), Watch(kind()), budget=7), []
    for _ in range(2):
        done = engine.generate(asked, **options, batch_size=3)
        assert [completion.tokens for completion in done] == wanted
        rates.append(per_round(done))
    assert rates[1] > least and rates[1] > (2 * rates[0] if least == 4 else rates[0] + 0.1)


class NoTrees:
    name, vocab_size, context, reads_trees = "no-trees", 5, 9, False


@pytest.mark.parametrize(("make", "why"), [
    (lambda: PromptLookup(longest=2, shortest=3), "n-grams"),
    (lambda: SuffixDrafter(memory=0), "memory"), (lambda: TokenRecycling(memory=0), "memory"),
    (lambda: DraftModel(NoTrees(), 5, TreeShape.branching((2,))), "trees")
])  # fmt: skip
def test_mismatched_drafters_are_refused(make: Any, why: str) -> None:
    with pytest.raises((BadInput, DrafterMismatch), match=why):
        make()
