"""Filters are those of transformers; rows are alone, and each node sees its own path."""

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
from draftproof.core.params import Sampling, SamplingParams
from draftproof.core.prefix import Paths
from draftproof.core.processors import LogitsProcessors
from draftproof.core.tree import TokenTree, TreeShape

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
    "top_p that rounds to 0": (Sampling(temperature=1.0, top_p=1e-20),
                               lambda: hf.TopPLogitsWarper(1e-20)),
    "min_p": (Sampling(temperature=1.0, min_p=0.1), lambda: hf.MinPLogitsWarper(0.1)),
    "repetition_penalty": (Sampling(repetition_penalty=1.7),
                           lambda: hf.RepetitionPenaltyLogitsProcessor(1.7)),
    "repetition reward": (Sampling(repetition_penalty=0.6),
                          lambda: hf.RepetitionPenaltyLogitsProcessor(0.6)),
    "no_repeat 1": (Sampling(no_repeat_ngram=1), lambda: hf.NoRepeatNGramLogitsProcessor(1)),
    "no_repeat 2": (Sampling(no_repeat_ngram=2), lambda: hf.NoRepeatNGramLogitsProcessor(2)),
    "no_repeat 3": (Sampling(no_repeat_ngram=3), lambda: hf.NoRepeatNGramLogitsProcessor(3)),
    "logit_bias": (Sampling(logit_bias={0: 2.0, 7: -100.0, 11: 0.5}),
                   lambda: hf.SequenceBiasLogitsProcessor({(0,): 2.0, (7,): -100.0, (11,): 0.5})),
    "banned_words": (Sampling(banned_words=[[3], [1, 2, 9], [6, 8]]),
                     lambda: hf.NoBadWordsLogitsProcessor([[3], [1, 2, 9], [6, 8]])),
    "min_new_tokens": (Sampling(min_new_tokens=3),
                       lambda: hf.MinNewTokensLengthLogitsProcessor(PROMPT, 3, [5, 9]))
}
EVERYTHING = Sampling(temperature=0.8, top_k=7, top_p=0.9, min_p=0.02, repetition_penalty=1.3,
                      no_repeat_ngram=2, logit_bias={2: 1.5}, banned_words=[[8]], min_new_tokens=2,
                      presence_penalty=0.4, frequency_penalty=-0.3)


@pytest.mark.parametrize("name", ONE_EACH)
@pytest.mark.parametrize("seed", range(3))
def test_each_filter_matches_transformers(name: str, seed: int) -> None:
    sampling, theirs = ONE_EACH[name]
    for index, text in enumerate(TEXTS):
        scores = random_logits(1, VOCAB, seed=10 * seed + index)
        wanted = theirs()(torch.tensor([text]), scores.clone())
        torch.testing.assert_close(_filtered(sampling, text, scores), wanted, rtol=0, atol=1e-12)


def test_banned_words_need_memory_per_token_only() -> None:
    """A table of all words by the longest one took 80 GB for a request of a few megabytes."""
    words = [(token % VOCAB,) for token in range(500)] + [(1,) * 2000, (2, 3), (4, 3)]
    processors = LogitsProcessors([SamplingParams(Sampling(), 0, banned=tuple(words))])
    held = sum(table.numel() for group in processors._banned for table in group)
    assert held <= 2 * sum(map(len, words))


def test_combined_filters_match_the_order_in_transformers() -> None:
    want = replace(EVERYTHING, presence_penalty=0.0, frequency_penalty=0.0)
    for seed, text in itertools.product(range(5), TEXTS):
        scores = random_logits(1, VOCAB, seed=seed)
        chain = hf.LogitsProcessorList([hf.SequenceBiasLogitsProcessor({(2,): 1.5}),
                                        hf.RepetitionPenaltyLogitsProcessor(1.3),
                                        hf.NoRepeatNGramLogitsProcessor(2),
                                        hf.NoBadWordsLogitsProcessor([[8]]),
                                        hf.MinNewTokensLengthLogitsProcessor(PROMPT, 2, [5, 9]),
                                        hf.TemperatureLogitsWarper(0.8), hf.TopKLogitsWarper(7),
                                        hf.TopPLogitsWarper(0.9), hf.MinPLogitsWarper(0.02)])
        torch.testing.assert_close(_filtered(want, text, scores),
                                   chain(torch.tensor([text]), scores.clone()), rtol=0, atol=1e-12)


def test_presence_and_frequency_count_new_tokens_only() -> None:
    for text in TEXTS:
        scores, wanted = random_logits(1, VOCAB), random_logits(1, VOCAB)
        for token in set(text[PROMPT:]):
            wanted[0, token] -= 0.7 + 0.3 * text[PROMPT:].count(token)
        result = _filtered(Sampling(presence_penalty=0.7, frequency_penalty=0.3), text, scores)
        torch.testing.assert_close(result, wanted, rtol=0, atol=1e-12)


def test_rows_are_independent() -> None:
    """A batch with every kind of wish equals each row alone, in filters, distributions and
    races."""
    wants = [value[0] for value in ONE_EACH.values()] + [EVERYTHING, Sampling(),
                                                     replace(EVERYTHING, temperature=0.0, seed=4)]
    texts = [TEXTS[index % len(TEXTS)] for index in range(len(wants))]
    logits = random_logits(len(wants), 1, VOCAB)
    together = sampler_of(*wants, prompt_length=PROMPT, stop_tokens=(5, 9))
    paths = paths_of(texts)
    for row, want in enumerate(wants):
        alone, ours = (sampler_of(want, prompt_length=PROMPT, stop_tokens=(5, 9)),
                      paths_of([texts[row]]))
        for ask in ("filtered", "probs", "sample"):
            result, wanted = (getattr(together, ask)(logits, paths)[row],
                             getattr(alone, ask)(logits[row : row + 1], ours)[0])
            assert torch.equal(result, wanted), (ask, want)
        gumbel_logits = together.gumbel_logits(logits, paths, Role.DRAFT)[row]
        assert torch.equal(gumbel_logits,
                           alone.gumbel_logits(logits[row : row + 1], ours, Role.DRAFT)[0])


@pytest.mark.parametrize("want", [*(value[0] for value in ONE_EACH.values()), EVERYTHING],
                         ids=[*ONE_EACH, "everything"])
def test_a_tree_node_is_processed_as_its_path(want: Sampling) -> None:
    """Penalties and bans see the node's own ancestors: a tree equals each path alone."""
    shape = TreeShape.branching((2, 2, 1))
    tokens = torch.randint(6, (2, len(shape)), generator=torch.Generator().manual_seed(1))
    texts = [[1, 2, 3, 1, 2], [4, 0, 4]]
    tokens[:, 0] = torch.tensor([2, 4])
    tree = TokenTree.shaped(tokens, shape)
    logits = random_logits(2, len(shape), VOCAB)
    sampler = sampler_of(want, want, prompt_length=PROMPT, stop_tokens=(5, 9))
    for first in (0, 3):
        result = sampler.filtered(logits[:, first:], Paths(paths_of(texts).prefix, tree, first))
        target_tokens = sampler.sample(logits[:, first:],
                                       Paths(paths_of(texts).prefix, tree, first))
        for row, node in itertools.product(range(2), range(first, len(shape))):
            path = [*texts[row][:-1], *tokens[row, tree.ancestors[row, node]].tolist()]
            alone, ours = (sampler_of(want, prompt_length=PROMPT, stop_tokens=(5, 9)),
                          paths_of([path]))
            scores = logits[row, node].view(1, 1, -1)
            filtered = alone.filtered(scores, ours)[0, 0]
            torch.testing.assert_close(result[row, node - first], filtered, rtol=0, atol=1e-12)
            assert target_tokens[row, node - first] == alone.sample(scores, ours)[0, 0]


def test_slots_after_the_root_are_not_text() -> None:
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
    result = sampler_of(Sampling(processors=[processor])).filtered(
        logits, paths_of([[1, 2, 3]], tree)
    )
    assert seen == [[1, 2, 3], [1, 2, 3, 8], [1, 2, 3, 8, 9]]
    torch.testing.assert_close(result, logits + torch.tensor([3, 8, 9])[:, None])


def _filtered(want: Sampling, text: list[int], scores: Tensor) -> Tensor:
    """[1, V] as our sampler processes the scores after `text`."""
    sampler = sampler_of(want, prompt_length=PROMPT, stop_tokens=(5, 9))
    return sampler.filtered(scores.view(1, 1, -1), paths_of([text]))[:, 0]


@pytest.mark.parametrize("text", [[7], [7, 7], [0], [0, 0, 0]])
def test_a_banned_word_is_not_matched_before_the_text_begins(text: list[int]) -> None:
    """What is not there is no token, whichever token the text begins with."""
    words = [[7, 7, 7, 5], [0, 0, 4], [0, 0, 0, 0, 3], [7, 7, 2]]
    scores = random_logits(1, VOCAB)
    wanted = hf.NoBadWordsLogitsProcessor(words)(torch.tensor([text]), scores.clone())
    result = _filtered(Sampling(banned_words=words), text, scores)
    torch.testing.assert_close(result, wanted, rtol=0, atol=1e-12)
