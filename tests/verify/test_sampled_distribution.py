"""Counting: the section passes, wrong rules and repeated noise fail it, statistics are right."""

from __future__ import annotations

import numpy as np
import pytest

from draftproof.core.acceptance import RULES, accept_by_rejection, weighing
from draftproof.core.params import Sampling
from draftproof.core.sampling import Sampler
from draftproof.verify import exact, sampling
from draftproof.verify.audit import detectable, g_test, too_equal
from draftproof.verify.cases import Case, CaseRequest
from draftproof.verify.sampling import OURS, SETUPS, WANTS, prove_sampling


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the tests of the noise, which test_mutants runs."""
    monkeypatch.setattr(sampling, "noise_tests", lambda seed: iter([("noise", 1.0)]))


@pytest.mark.parametrize("rule", [accept_by_rejection, exact.wrong_draft_probs])
def test_a_rule_can_be_proved_and_a_wrong_one_is_found(quiet: None, rule) -> None:
    requests = [CaseRequest(Sampling(temperature=1.0), (3,), 4)]
    cases = [Case("given", weighing(rule), SETUPS["chain"], requests, OURS)]
    section = prove_sampling(sequences=4096, cases=cases)
    assert bool(section.failures) == (rule is not accept_by_rejection)
    assert section.figures["sequences"] == 4096 and section.figures["detects"] < 0.1


def test_a_planted_mistake_that_is_not_seen_fails_the_section(
    quiet: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "TRIALS", sampling.TRIALS[:1])
    section = prove_sampling(quick=True, sequences=6144)
    assert not section.failures and section.figures["planted_mistake"] < 1e-6
    monkeypatch.setattr(sampling, "SharedNoise", Sampler)
    assert "blind" in prove_sampling(quick=True, sequences=1024).failures[0]


def test_every_trial_names_a_rule_a_setup_and_what_is_asked() -> None:
    for words in sampling.TRIALS:
        rule, _, want = words.split("; ")
        assert rule in RULES and sampling.trial(words).requests[0].sampling == WANTS[want]


def test_the_g_test_is_calibrated_and_excuses_nothing_impossible() -> None:
    dice = np.random.default_rng(0)
    probs = dice.dirichlet(np.ones(20))
    values = [g_test(dice.multinomial(5000, probs), probs).p_value for _ in range(200)]
    assert 0.4 < np.mean(values) < 0.6 and np.mean(np.array(values) < 0.05) < 0.1
    assert g_test([999_999, 1], [1.0, 0.0]).p_value == 0


def test_the_g_test_finds_what_it_promises() -> None:
    dice, distribution = np.random.default_rng(1), np.full(16, 1 / 16)
    off = detectable(8000, 16)
    wrong = distribution + off * 2 / 16 * np.array([1.0, -1.0] * 8)
    assert np.abs(wrong - distribution).sum() / 2 == pytest.approx(off)
    assert all(not g_test(dice.multinomial(8000, wrong), distribution).passed for _ in range(30))
    assert detectable(10_000, 50) == pytest.approx(detectable(40_000, 50) * 2, rel=1e-6)
    assert detectable(10_000, 50) < detectable(10_000, 200)


def test_equal_pairs() -> None:
    assert too_equal(0, 100, 0.1) == 1.0 and too_equal(100, 100, 0.1) < 1e-90
    assert 0.1 < too_equal(10, 100, 0.1) < 0.9
