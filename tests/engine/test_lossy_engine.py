"""Lossy decoding: asked for by name, told per token, and greedy rows as exact as ever."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import pytest
import torch
from drafting import DRAFTERS, texts
from tiny import prompts, target

from draftproof.core.acceptance import RULES, Rule
from draftproof.core.params import Sampling
from draftproof.core.typical import Typical
from draftproof.drafters.base import Plain
from draftproof.engine.engine import Engine
from draftproof.errors import BadInput
from draftproof.verify.cases import SETUPS, TARGET, Case, CaseRequest, logits_after
from draftproof.verify.enumeration import DRAWS, Outcomes, decided
from draftproof.verify.exact import check_case

WARM = Sampling(temperature=1.0, seed=3)


def case_of(rule: Rule, setup: str, limit: int = 3) -> Case:
    ask = CaseRequest(Sampling(temperature=1.0), (1, 0), limit)
    return Case("typical", rule, SETUPS[setup], [ask])


@pytest.mark.parametrize("setup", ["chain", "tree of 3"])
def test_the_decoder_does_not_write_the_targets_distribution(setup: str) -> None:
    """By the enumeration that finds every exact rule below 1e-12."""
    assert check_case(case_of(RULES["match"], setup))[0] < 1e-12
    distance, _, wrong = check_case(case_of(Typical().rule, setup))
    assert distance > 0.05 and "total variation" in wrong


@pytest.mark.parametrize("setup", ["chain", "tree of 3", "lookup"])
def test_statistics_report_the_distance_of_the_text(setup: str) -> None:
    case = case_of(Typical().rule, setup, limit=4)
    distribution: defaultdict[tuple[int, ...], float] = defaultdict(float)
    told, plans = 0.0, torch.full((1, DRAWS), -1)
    while len(plans):
        outcomes = Outcomes(plans)
        sampler = decided(case, outcomes, len(plans))
        all_done = case.run([0], len(plans), len(plans), sampler)
        for done in all_done:
            probability = float(outcomes.mass[done.sample])
            distribution[tuple(done.tokens)] += probability
            told += probability * (done.stats.distance or 0.0)
        plans = torch.cat([plan for _, plan in outcomes.others]) if outcomes.others else plans[:0]
    assert sum(distribution.values()) == pytest.approx(1, abs=1e-12)
    wanted = expected_distance(distribution, own_distribution, 4)
    assert told == pytest.approx(wanted, abs=1e-12) and told > 0.05


def expected_distance(
    distribution: dict[tuple[int, ...], float], target: Any, length: int, vocab: int = 3
) -> float:
    """The expected sum of the distances of next-token distributions, from the distribution of whole
    texts alone."""
    total = 0.0
    for size in range(length):
        for prefix in itertools.product(range(vocab), repeat=size):
            mass = torch.zeros(vocab, dtype=torch.float64)
            for text, weight in distribution.items():
                if len(text) > size and text[:size] == prefix:
                    mass[text[size]] += weight
            if float(mass.sum()) > 0:
                apart = (mass / mass.sum() - target(prefix)).abs().sum() / 2
                total += float(mass.sum() * apart)
    return total


def own_distribution(text: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(logits_after(TARGET, (1, 0, *text)), dtype=torch.float64).softmax(-1)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_text_is_unchanged(drafter: str) -> None:
    asked = prompts(3)
    done = Engine(target(), DRAFTERS[drafter](target()), lossy=True).generate(
        asked, max_new_tokens=12)
    plain = Engine(target(), Plain()).generate(asked, max_new_tokens=12)
    assert [completion.tokens for completion in done] == [completion.tokens for completion in plain]
    assert {completion.stats.distance for completion in done} == {0.0}
    assert {completion.stats.distance_per_token for completion in plain} == {None}


def test_greedy_and_sampled_rows_share_a_batch() -> None:
    asked = prompts(4)
    wanted = [Sampling(logprobs=True), WARM, Sampling(repetition_penalty=1.3),
              Sampling(temperature=1.0, seed=9, logprobs=True)]
    plain = Engine(target(), Plain()).generate(asked, max_new_tokens=14, sampling=wanted)
    ours = Engine(target(), DRAFTERS["draft tree"](target()), lossy=Typical(epsilon=0.02)).generate(
        asked, max_new_tokens=14, sampling=wanted)
    for row in (0, 2):
        assert ours[row].tokens == plain[row].tokens and ours[row].stats.distance == 0.0
    for stats in (ours[1].stats, ours[3].stats):                        # only draft tokens stray
        assert stats.distance_per_token is not None and stats.accepted > 0
        assert 0 < stats.distance_per_token <= stats.accepted / stats.emitted
    assert ours[0].logprobs == pytest.approx(plain[0].logprobs, abs=1e-9)
    assert ours[3].logprobs and len(ours[3].logprobs) == 14 and max(ours[3].logprobs) <= 0


def test_distance_of_accepted_tokens_is_one_minus_their_probability() -> None:
    """1 - p(x) at drafted tokens: at temperature 1 by the unprocessed model."""
    engine = Engine(target(), DRAFTERS["target itself"](target()), lossy=Typical(epsilon=1e-6))
    wanted = Sampling(temperature=1.0, seed=2, logprobs=True)
    (done,) = engine.generate([prompts(1)[0]], max_new_tokens=2, sampling=wanted, n=1)
    assert done.stats.accepted == 1 and done.logprobs is not None  # cut after one drafted token
    strayed_by = 1 - torch.tensor(done.logprobs[1]).exp().item()
    assert done.stats.distance == pytest.approx(strayed_by, abs=1e-6)


def test_an_engine_adds_up_the_distances_of_its_texts() -> None:
    engine = Engine(target(), DRAFTERS["draft tree"](target()), lossy=True)
    done = engine.generate(prompts(3), max_new_tokens=10, sampling=WARM)
    told = sum(completion.stats.distance or 0.0 for completion in done)
    assert engine.stats.distance == pytest.approx(told) and told > 0


def test_the_same_request_gives_the_same_text() -> None:
    first, second = (texts(Engine(target(), DRAFTERS["draft tree"](target()), lossy=True),
                           prompts(3), max_new_tokens=10, sampling=WARM) for _ in range(2))
    assert first == second


def test_lossy_acceptance_must_be_requested_explicitly() -> None:
    for wrong in ({"acceptance": "typical"}, {"acceptance": "rejection", "lossy": True}):
        with pytest.raises(BadInput, match="lossy=True"):
            Engine(target(), **wrong)
    assert Engine(target(), lossy=True).acceptance == "typical"
    assert Engine(target(), lossy=False).acceptance == "match" and Engine(target()).lossy is None
