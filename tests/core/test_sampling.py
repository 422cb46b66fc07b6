"""Sampling: what is chosen, the noise that is kept for it, and what is refused."""

from __future__ import annotations

import pytest
import torch
from tiny import CPU, paths_of, random_logits, sampler_of

from draftproof.core.noise import Role
from draftproof.core.ops import TORCH
from draftproof.core.params import Sampling
from draftproof.core.prefix import Paths, Prefix
from draftproof.core.tree import NO_TOKEN, TokenTree, TreeShape
from draftproof.errors import BadInput

VOCAB = 12
TEXTS = [[1, 2, 3, 1, 2], [4, 4, 4], [0, 5, 6, 7, 5, 6, 7, 5, 6], [11, 0]]


def test_greedy_ignores_warpers_and_noise() -> None:
    logits = random_logits(4, 1, VOCAB)
    paths = paths_of(TEXTS)
    for warped in (Sampling(), Sampling(top_k=1, seed=9), Sampling(top_p=0.01),
                   Sampling(min_p=1.0, seed=3)):
        sampler = sampler_of(*[warped] * 4)
        assert torch.equal(sampler.filtered(logits, paths), logits)
        assert torch.equal(sampler.sample(logits, paths), logits.argmax(-1))
        assert torch.equal(sampler.probs(logits, paths),
                           torch.nn.functional.one_hot(logits.argmax(-1), VOCAB).double())


def test_distribution_is_softmax_and_one_hot_where_greedy() -> None:
    logits = random_logits(2, 1, VOCAB)
    sampler = sampler_of(Sampling(temperature=0.5), Sampling())
    distribution = sampler.probs(logits, paths_of(TEXTS[:2]))
    torch.testing.assert_close(distribution[0], (logits[0] / 0.5).softmax(-1))
    assert distribution[1].max() == 1 and distribution[1].sum() == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("broken", ["banned", "nan"])
def test_rows_without_an_allowed_token_pick_none(temperature: float, broken: str) -> None:
    """Everything forbidden, or NaN: NO_TOKEN by every way of choosing, never a quiet token 0."""
    logits = random_logits(2, 1, VOCAB)
    if broken == "nan":
        logits[1, 0, 3] = torch.nan
    want = Sampling(temperature=temperature)
    everything = Sampling(temperature=temperature, banned_words=[[token] for token in range(VOCAB)])
    sampler = sampler_of(want, everything if broken == "banned" else want)
    target_tokens = sampler.sample(logits, paths_of(TEXTS[:2]))
    assert target_tokens[0] != NO_TOKEN and target_tokens[1] == NO_TOKEN
    distribution = sampler.probs(logits, paths_of(TEXTS[:2]))
    assert distribution[0].isfinite().all() and distribution[1].isnan().any()


def test_ties_fall_to_the_lower_token() -> None:
    logits = torch.zeros(1, 1, VOCAB)
    logits[0, 0, [4, 7]] = 1.0
    assert sampler_of(Sampling()).sample(logits, paths_of([[1]])) == 4
    assert sampler_of(Sampling()).probs(logits, paths_of([[1]])).argmax() == 4


def test_half_precision_logits_are_computed_in_float32() -> None:
    logits = random_logits(1, 1, VOCAB).bfloat16()
    distribution = sampler_of(Sampling(temperature=1.3)).probs(logits, paths_of([[1]]))
    assert distribution.dtype == torch.float32


def test_cached_noise_belongs_to_its_position() -> None:
    """Rows move by different steps, back to earlier positions, and reach further than was asked."""
    wants = [Sampling(temperature=1.5, seed=row) for row in range(3)]
    kept, vocab, made = sampler_of(*wants, ops=CPU), 100, list[torch.Tensor]()
    text = torch.zeros(3, 200, dtype=torch.int64)
    rounds = [((3, 5, 9), 4), ((4, 9, 10), 4), ((7, 9, 15), 4), ((8, 10, 16), 40), ((2, 11, 17), 4),
              ((2, 11, 17), 4)]
    for turn, (moved, ahead) in enumerate(rounds):
        prefix = Prefix(text, torch.tensor(moved), ahead)
        tree = TokenTree.shaped(torch.randint(0, vocab, (3, 7)), TreeShape.branching((2, 2)))
        logits = torch.randn(3, 7, vocab, generator=torch.Generator().manual_seed(turn)).bfloat16()
        for paths in (Paths(prefix, tree),
                      Paths(prefix, TokenTree.chain(tree.tokens[:, :1].expand(-1, 1 + ahead)))):
            output = logits[:, :1].expand(-1, 1 + ahead, -1) if paths.tree.is_chain else logits
            assert torch.equal(kept.sample(output, paths),
                               sampler_of(*wants, ops=TORCH).sample(output, paths))
        draft_sampling = kept.draft_sampling(prefix, ahead, vocab, 0.0)
        assert (draft_sampling is not None and draft_sampling.noise is not None
                and draft_sampling.places is not None)
        made.append(draft_sampling.noise)                       # alive: no address comes twice
        noise = draft_sampling.noise.flatten(0, 1)[draft_sampling.places + 1]
        fresh, pair = sampler_of(*wants, ops=TORCH), Paths(prefix, TokenTree.chain(text[:, :2]))
        wanted = fresh.gumbel_logits(torch.zeros(3, 2, vocab), pair, Role.TARGET)
        torch.testing.assert_close(noise, wanted[:, 1], rtol=1e-5, atol=1e-5)
    assert len({noise.data_ptr() for noise in made}) == len(rounds) - 1


@pytest.mark.parametrize("rows", [1, 2])
def test_noise_is_regenerated_before_it_runs_out(rows: int) -> None:
    """Rows move one token at a time, so drafts end at every place of the noise that is kept."""
    wants, ahead = [Sampling(temperature=1.0, seed=row) for row in range(rows)], 3
    kept, fresh = (sampler_of(*wants, ops=ops) for ops in (CPU, TORCH))
    text = torch.zeros(rows, 200, dtype=torch.int64)
    logits = torch.zeros(rows, 1 + ahead, 64, dtype=torch.bfloat16)
    for moved in range(130):
        prefix = Prefix(text, moved + torch.arange(rows), ahead)
        paths = Paths(prefix, TokenTree.chain(text[:, : 1 + ahead]))
        assert torch.equal(kept.sample(logits, paths), fresh.sample(logits, paths))


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -1}, {"temperature": float("nan")}, {"temperature": "hot"},
     {"temperature": float("inf")}, {"top_k": -1}, {"top_k": 2.5}, {"top_p": 0.0}, {"top_p": 1.1},
     {"min_p": -0.1}, {"min_p": 1.5}, {"repetition_penalty": 0}, {"no_repeat_ngram": -1},
     {"min_new_tokens": -1}, {"max_new_tokens": 0}, {"stop": [""]}, {"banned_words": [[]]},
     {"temperature": True}, {"presence_penalty": float("nan")}, {"frequency_penalty": "much"},
     {"max_new_tokens": 1.5}, {"seed": 1.5}, {"seed": "x"}, {"logit_bias": {1: float("nan")}},
     {"logit_bias": [[5, 1]]}, {"logit_bias": {"a": 1}}, {"logprobs": "yes"}, {"top_logprobs": 2},
     {"top_logprobs": 21, "logprobs": True}, {"stop": [5]}, {"stop": 5}, {"stop": None},
     {"stop_tokens": 5}, {"stop_tokens": ["a"]}, {"stop_tokens": "ab"}, {"banned_words": [5]},
     {"banned_words": [["a"]]}, {"banned_words": b"x"}, {"processors": 5},
     {"processors": len}, {"stop_when": [5]}, {"stop": ["a"] * 1001}, {"stop": ["a" * 1001]},
     {"banned_words": [[1]] * 10_001}, {"banned_words": [[1] * 100_001]},
     {"banned_words": ["é" * 50_001]}],
    ids=lambda wrong: f"{wrong!r:.40}"
)
def test_invalid_settings_are_reported_in_one_sentence(wrong: dict[str, object]) -> None:
    with pytest.raises(BadInput) as error:
        Sampling(**wrong)
    message = str(error.value)
    assert next(iter(wrong)) in message and "\n" not in message and len(message) < 300


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(TypeError):
        Sampling(temprature=1.0)


def test_integers_are_accepted_as_floats() -> None:
    """A kernel that reads floats was handed the integer 1 as a temperature once."""
    names = ("temperature", "top_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    sampling = Sampling(**dict.fromkeys(names, 1))
    assert all(type(getattr(sampling, name)) is float for name in names)


def test_nodes_of_a_round_use_independent_noise() -> None:
    """Far beyond the drafts of other tests: coins that deep nodes share bias long drafts alone."""
    rows, nodes = 64, 24
    sampler = sampler_of(*(Sampling(temperature=1.0, seed=seed) for seed in range(rows)))
    position = torch.full((rows,), 5)
    chance = sampler.chance(Prefix(torch.zeros(rows, 9, dtype=torch.int64), position))
    even = torch.full((rows,), 0.5)
    coins = torch.stack([chance.flip(even, node) for node in range(1, nodes + 1)])
    assert len(torch.unique(coins, dim=0)) == nodes
    weights = torch.ones(rows, 512)
    tokens = torch.stack([chance.draw(weights, position * 0 + depth) for depth in range(nodes)])
    assert len(torch.unique(tokens, dim=0)) == nodes
