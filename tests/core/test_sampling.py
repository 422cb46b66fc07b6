"""Sampling: every filter is transformers' own, rows do not see each other, and each tree node sees its own path."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import transformers as hf
from tiny import paths_of, random_logits, sampler_of
from torch import Tensor

from draftproof.core.noise import Role
from draftproof.core.sampling import Paths, Prefix, Sampling
from draftproof.core.tree import NOTHING, TokenTree, TreeShape
from draftproof.errors import BadInput

VOCAB = 12
TEXTS = [[1, 2, 3, 1, 2], [4, 4, 4], [0, 5, 6, 7, 5, 6, 7, 5, 6], [11, 0]]
PROMPT = 2

ONE_EACH: dict[str, tuple[Sampling, Callable[[], hf.LogitsProcessor]]] = {
    "temperature": (Sampling(temperature=0.7), lambda: hf.TemperatureLogitsWarper(0.7)),
    "hot": (Sampling(temperature=2.5), lambda: hf.TemperatureLogitsWarper(2.5)),
    "top_k": (Sampling(temperature=1.0, top_k=3), lambda: hf.TopKLogitsWarper(3)),
    "top_k above V": (Sampling(temperature=1.0, top_k=99), lambda: hf.TopKLogitsWarper(99)),
    "top_p": (Sampling(temperature=1.0, top_p=0.8), lambda: hf.TopPLogitsWarper(0.8)),
    "small top_p": (Sampling(temperature=1.0, top_p=1e-6), lambda: hf.TopPLogitsWarper(1e-6)),
    "min_p": (Sampling(temperature=1.0, min_p=0.1), lambda: hf.MinPLogitsWarper(0.1)),
    "repetition_penalty": (Sampling(repetition_penalty=1.7), lambda: hf.RepetitionPenaltyLogitsProcessor(1.7)),
    "repetition reward": (Sampling(repetition_penalty=0.6), lambda: hf.RepetitionPenaltyLogitsProcessor(0.6)),
    "no_repeat 1": (Sampling(no_repeat_ngram=1), lambda: hf.NoRepeatNGramLogitsProcessor(1)),
    "no_repeat 2": (Sampling(no_repeat_ngram=2), lambda: hf.NoRepeatNGramLogitsProcessor(2)),
    "no_repeat 3": (Sampling(no_repeat_ngram=3), lambda: hf.NoRepeatNGramLogitsProcessor(3)),
    "logit_bias": (
        Sampling(logit_bias={0: 2.0, 7: -100.0, 11: 0.5}),
        lambda: hf.SequenceBiasLogitsProcessor({(0,): 2.0, (7,): -100.0, (11,): 0.5}),
    ),
    "banned_words": (
        Sampling(banned_words=[[3], [1, 2, 9], [6, 8]]),
        lambda: hf.NoBadWordsLogitsProcessor([[3], [1, 2, 9], [6, 8]]),
    ),
    "min_new_tokens": (Sampling(min_new_tokens=3), lambda: hf.MinNewTokensLengthLogitsProcessor(PROMPT, 3, [5, 9])),
}
EVERYTHING = Sampling(
    temperature=0.8,
    top_k=7,
    top_p=0.9,
    min_p=0.02,
    repetition_penalty=1.3,
    no_repeat_ngram=2,
    logit_bias={2: 1.5},
    banned_words=[[8]],
    min_new_tokens=2,
    presence_penalty=0.4,
    frequency_penalty=-0.3,
)


@pytest.mark.parametrize("name", ONE_EACH)
@pytest.mark.parametrize("seed", range(3))
def test_each_filter_is_that_of_transformers(name: str, seed: int) -> None:
    sampling, theirs = ONE_EACH[name]
    for index, text in enumerate(TEXTS):
        scores = random_logits(1, VOCAB, seed=10 * seed + index)
        wanted = theirs()(torch.tensor([text]), scores.clone())
        torch.testing.assert_close(_filtered(sampling, text, scores), wanted, rtol=0, atol=1e-12)


def test_all_filters_together_in_the_order_of_transformers() -> None:
    want = replace(EVERYTHING, presence_penalty=0.0, frequency_penalty=0.0)
    for seed, text in itertools.product(range(5), TEXTS):
        scores = random_logits(1, VOCAB, seed=seed)
        chain = hf.LogitsProcessorList(
            [
                hf.SequenceBiasLogitsProcessor({(2,): 1.5}),
                hf.RepetitionPenaltyLogitsProcessor(1.3),
                hf.NoRepeatNGramLogitsProcessor(2),
                hf.NoBadWordsLogitsProcessor([[8]]),
                hf.MinNewTokensLengthLogitsProcessor(PROMPT, 2, [5, 9]),
                hf.TemperatureLogitsWarper(0.8),
                hf.TopKLogitsWarper(7),
                hf.TopPLogitsWarper(0.9),
                hf.MinPLogitsWarper(0.02),
            ]
        )
        torch.testing.assert_close(
            _filtered(want, text, scores), chain(torch.tensor([text]), scores.clone()), rtol=0, atol=1e-12
        )


def test_presence_and_frequency_count_new_tokens_only() -> None:
    for text in TEXTS:
        scores, wanted = random_logits(1, VOCAB), random_logits(1, VOCAB)
        for token in set(text[PROMPT:]):
            wanted[0, token] -= 0.7 + 0.3 * text[PROMPT:].count(token)
        found = _filtered(Sampling(presence_penalty=0.7, frequency_penalty=0.3), text, scores)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_rows_do_not_see_each_other() -> None:
    """A batch with every kind of wish equals each row alone, in filters, laws and races."""
    wants = [one[0] for one in ONE_EACH.values()] + [EVERYTHING, Sampling(), replace(EVERYTHING, temperature=0.0, seed=4)]
    texts = [TEXTS[index % len(TEXTS)] for index in range(len(wants))]
    logits = random_logits(len(wants), 1, VOCAB)
    together = sampler_of(*wants, prompt_length=PROMPT, stop_tokens=(5, 9))
    paths = paths_of(texts)
    for row, want in enumerate(wants):
        alone, own = sampler_of(want, prompt_length=PROMPT, stop_tokens=(5, 9)), paths_of([texts[row]])
        for ask in ("filtered", "probs", "pick"):
            found, wanted = getattr(together, ask)(logits, paths)[row], getattr(alone, ask)(logits[row : row + 1], own)[0]
            assert torch.equal(found, wanted), (ask, want)
        race = together.race(logits, paths, Role.DRAFT)[row]
        assert torch.equal(race, alone.race(logits[row : row + 1], own, Role.DRAFT)[0])


@pytest.mark.parametrize("want", [*(one[0] for one in ONE_EACH.values()), EVERYTHING], ids=[*ONE_EACH, "everything"])
def test_a_tree_node_is_processed_as_its_path(want: Sampling) -> None:
    """Penalties and bans see the node's own ancestors: verifying a tree equals decoding each path alone."""
    shape = TreeShape.branching((2, 2, 1))
    tokens = torch.randint(6, (2, len(shape)), generator=torch.Generator().manual_seed(1))
    texts = [[1, 2, 3, 1, 2], [4, 0, 4]]
    tokens[:, 0] = torch.tensor([2, 4])
    tree = TokenTree.shaped(tokens, shape)
    logits = random_logits(2, len(shape), VOCAB)
    sampler = sampler_of(want, want, prompt_length=PROMPT, stop_tokens=(5, 9))
    for first in (0, 3):
        found = sampler.filtered(logits[:, first:], Paths(paths_of(texts).prefix, tree, first))
        picks = sampler.pick(logits[:, first:], Paths(paths_of(texts).prefix, tree, first))
        for row, node in itertools.product(range(2), range(first, len(shape))):
            path = [*texts[row][:-1], *tokens[row, tree.ancestors[row, node]].tolist()]
            alone, own = sampler_of(want, prompt_length=PROMPT, stop_tokens=(5, 9)), paths_of([path])
            scores = logits[row, node].view(1, 1, -1)
            torch.testing.assert_close(found[row, node - first], alone.filtered(scores, own)[0, 0], rtol=0, atol=1e-12)
            assert picks[row, node - first] == alone.pick(scores, own)[0, 0]


def test_scratch_behind_the_root_is_not_text() -> None:
    paths = paths_of([[1, 2, 3]])
    dirty = paths_of([[1, 2, 3]])
    dirty.prefix.tokens[0, 3:] = 7
    logits = random_logits(1, 1, VOCAB)
    sampler = sampler_of(EVERYTHING, prompt_length=1)
    assert torch.equal(sampler.filtered(logits, paths), sampler.filtered(logits, dirty))


def test_user_processors_see_one_unpadded_prefix_at_a_time() -> None:
    seen: list[list[int]] = []

    def processor(text: Tensor, scores: Tensor) -> Tensor:
        seen.append(text[0].tolist())
        return scores + text[0, -1]

    tree = TokenTree.chain(torch.tensor([[3, 8, 9]]))
    logits = random_logits(1, 3, VOCAB)
    found = sampler_of(Sampling(processors=[processor])).filtered(logits, paths_of([[1, 2, 3]], tree))
    assert seen == [[1, 2, 3], [1, 2, 3, 8], [1, 2, 3, 8, 9]]
    torch.testing.assert_close(found, logits + torch.tensor([3, 8, 9])[:, None])


# The choice ---------------------------------------------------------------------------------------------------------------


def test_greedy_ignores_warpers_and_noise() -> None:
    logits = random_logits(4, 1, VOCAB)
    paths = paths_of(TEXTS)
    for warped in (Sampling(), Sampling(top_k=1, seed=9), Sampling(top_p=0.01), Sampling(min_p=1.0, seed=3)):
        sampler = sampler_of(*[warped] * 4)
        assert torch.equal(sampler.filtered(logits, paths), logits)
        assert torch.equal(sampler.pick(logits, paths), logits.argmax(-1))
        assert torch.equal(sampler.probs(logits, paths), torch.nn.functional.one_hot(logits.argmax(-1), VOCAB).double())


def test_law_is_softmax_and_one_hot_where_greedy() -> None:
    logits = random_logits(2, 1, VOCAB)
    law = sampler_of(Sampling(temperature=0.5), Sampling()).probs(logits, paths_of(TEXTS[:2]))
    torch.testing.assert_close(law[0], (logits[0] / 0.5).softmax(-1))
    assert law[1].max() == 1 and law[1].sum() == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("broken", ["banned", "nan"])
def test_nothing_can_be_picked(temperature: float, broken: str) -> None:
    """Everything forbidden, or NaN: NOTHING by every way of choosing, never a quiet token 0."""
    logits = random_logits(2, 1, VOCAB)
    if broken == "nan":
        logits[1, 0, 3] = torch.nan
    want = Sampling(temperature=temperature)
    everything = Sampling(temperature=temperature, banned_words=[[token] for token in range(VOCAB)])
    sampler = sampler_of(want, everything if broken == "banned" else want)
    picks = sampler.pick(logits, paths_of(TEXTS[:2]))
    assert picks[0] != NOTHING and picks[1] == NOTHING
    law = sampler.probs(logits, paths_of(TEXTS[:2]))
    assert law[0].isfinite().all() and law[1].isnan().any()


def test_ties_fall_to_the_lower_token() -> None:
    logits = torch.zeros(1, 1, VOCAB)
    logits[0, 0, [4, 7]] = 1.0
    assert sampler_of(Sampling()).pick(logits, paths_of([[1]])) == 4
    assert sampler_of(Sampling()).probs(logits, paths_of([[1]])).argmax() == 4


def test_half_precision_logits_are_weighed_in_float32() -> None:
    law = sampler_of(Sampling(temperature=1.3)).probs(random_logits(1, 1, VOCAB).bfloat16(), paths_of([[1]]))
    assert law.dtype == torch.float32


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"temperature": "hot"},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_k": 2.5},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": 1.5},
        {"repetition_penalty": 0},
        {"no_repeat_ngram": -1},
        {"min_new_tokens": -1},
        {"max_new_tokens": 0},
        {"stop": [""]},
        {"banned_words": [[]]},
        {"temperature": True},
        {"presence_penalty": float("nan")},
        {"frequency_penalty": "much"},
        {"max_new_tokens": 1.5},
        {"seed": 1.5},
        {"seed": "x"},
        {"logit_bias": {1: float("nan")}},
    ],
    ids=str,
)
def test_a_wish_that_cannot_be_honoured_is_one_sentence(wrong: dict[str, object]) -> None:
    with pytest.raises(BadInput) as error:
        Sampling(**wrong)
    message = str(error.value)
    assert next(iter(wrong)) in message and "\n" not in message and len(message) < 200


def test_unknown_wishes_are_refused() -> None:
    with pytest.raises(TypeError):
        Sampling(temprature=1.0)


def _filtered(want: Sampling, text: list[int], scores: Tensor) -> Tensor:
    """[1, V] as our sampler processes the scores behind `text`."""
    sampler = sampler_of(want, prompt_length=PROMPT, stop_tokens=(5, 9))
    return sampler.filtered(scores.view(1, 1, -1), paths_of([text]))[:, 0]


@pytest.mark.parametrize("vocab", [12, 100, 4096])
@pytest.mark.parametrize("heats", [(0.0, 0.0, 0.0), (0.7, 0.7, 0.7), (0.0, 0.4, 1.8)])
def test_the_best_are_those_of_the_race(heats: tuple[float, ...], vocab: int) -> None:
    """By a kernel, where there is one, as by operators: tokens, their chances, and nothing where there is none."""
    wants = [Sampling(temperature=heat, seed=row) for row, heat in enumerate(heats)]
    tree = TokenTree.shaped(torch.randint(0, 12, (3, 7)), TreeShape.branching((2, 2)))
    paths = Paths(paths_of(TEXTS[:3]).prefix, tree)
    logits = 4 * torch.randn(3, 7, vocab, generator=torch.Generator().manual_seed(1))
    logits[0, 1], logits[1, 2, 3], logits[2, 4, 2:] = -torch.inf, torch.nan, -torch.inf
    logits = logits.bfloat16()
    for first in (0, 3):
        some = Paths(paths.prefix, tree, first)
        asked = logits[:, first:]
        found, wanted = (sampler_of(*wants, at_hand=at_hand).best(asked, some, 5) for at_hand in (True, False))
        torch.testing.assert_close(found[0].float(), wanted[0].float(), rtol=1e-4, atol=1e-4)
        race = sampler_of(*wants).race(asked, some, Role.TARGET)
        there = wanted[0] > -torch.inf
        won, meant = race.gather(-1, found[1]), race.gather(-1, wanted[1])
        torch.testing.assert_close(won[there], meant[there], rtol=1e-5, atol=1e-5)      # equals may come in any order
        assert all(len(set(row)) == 5 for row in found[1][there.all(-1)].tolist())


@pytest.mark.parametrize("heats", [(0.0, 0.0, 0.0), (1.0, 1.0, 1.0), (0.7, 0.7, 0.7), (0.0, 0.3, 1.8)])
def test_a_kernel_picks_what_operators_pick(heats: tuple[float, ...]) -> None:
    """To the bit: of equals, of which bfloat16 has many, the first; nothing where nothing is allowed or one logit is NaN."""
    wants = [Sampling(temperature=heat, seed=row) for row, heat in enumerate(heats)]
    for trial, vocab in enumerate((1, 12, 16, 100, 4096, 4100)):
        tree = TokenTree.shaped(torch.randint(0, 12, (3, 7)), TreeShape.branching((2, 2)))
        paths = Paths(paths_of(TEXTS[:3]).prefix, tree)
        logits = torch.randn(3, 7, vocab, generator=torch.Generator().manual_seed(trial))
        logits[0, 1], logits[1, 2, vocab // 2], logits[2, 4, 1:], logits[2, 5] = -torch.inf, torch.nan, -torch.inf, 1.0
        found, wanted = (sampler_of(*wants, at_hand=at_hand).pick(logits.bfloat16(), paths) for at_hand in (True, False))
        assert torch.equal(found, wanted)
        assert found[0, 1] == found[1, 2] == NOTHING and (heats[2] or found[2, 5] == 0)


def test_noise_kept_from_round_to_round_is_that_of_its_position() -> None:
    """Rows move by different steps, back to earlier positions, and reach further ahead than was asked before."""
    wants = [Sampling(temperature=1.5, seed=row) for row in range(3)]
    kept, vocab, made = sampler_of(*wants, at_hand=True), 100, set()
    text = torch.zeros(3, 200, dtype=torch.int64)
    rounds = [((3, 5, 9), 4), ((4, 9, 10), 4), ((7, 9, 15), 4), ((8, 10, 16), 40), ((2, 11, 17), 4)]
    for turn, (moved, ahead) in enumerate(rounds):
        prefix = Prefix(text, torch.tensor(moved), ahead)
        tree = TokenTree.shaped(torch.randint(0, vocab, (3, 7)), TreeShape.branching((2, 2)))
        logits = torch.randn(3, 7, vocab, generator=torch.Generator().manual_seed(turn)).bfloat16()
        for paths in (Paths(prefix, tree), Paths(prefix, TokenTree.chain(tree.tokens[:, :1].expand(-1, 1 + ahead)))):
            said = logits[:, :1].expand(-1, 1 + ahead, -1) if paths.tree.is_chain else logits
            assert torch.equal(kept.pick(said, paths), sampler_of(*wants, at_hand=False).pick(said, paths))
        contest = kept.contest(prefix, ahead, vocab, 0.0)
        assert contest is not None and contest.noise is not None and contest.places is not None
        made.add(contest.noise.data_ptr())
        noise = contest.noise.flatten(0, 1)[contest.places + 1]
        fresh, pair = sampler_of(*wants, at_hand=False), Paths(prefix, TokenTree.chain(text[:, :2]))
        wanted = fresh.race(torch.zeros(3, 2, vocab), pair, Role.TARGET)
        torch.testing.assert_close(noise, wanted[:, 1], rtol=1e-5, atol=1e-5)
    assert 1 < len(made) < 5
