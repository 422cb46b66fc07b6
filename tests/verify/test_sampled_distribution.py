"""Counting: the section passes, wrong rules and repeated noise fail it, statistics are right."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from draftproof.core import acceptance
from draftproof.core.acceptance import RULES
from draftproof.verify import exact, sampling
from draftproof.verify.sampling import OURS, WANTS, Trial, exact_law, judged, prove_sampling, toy
from draftproof.verify.statistics import detectable, g_test, too_equal, tv_interval


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the tests of the noise, which test_mutants runs."""
    monkeypatch.setattr(sampling, "noise_tests", lambda seed: iter([("noise", 1.0)]))


def test_a_rule_can_be_proved_and_a_wrong_one_is_found(quiet: None) -> None:
    trials = [Trial("given", "chain", 2)]
    sound = {"given": exact.weighing(acceptance.accept_by_rejection)}
    section = prove_sampling(sequences=4096, rules=sound, trials=trials)
    assert section.passed and section.figures["sequences"] == 4096 and "given" not in RULES
    assert section.figures["detects"] < 0.1
    wrong = {"given": exact.weighing(exact.wrong_draft_law)}
    assert not prove_sampling(sequences=4096, rules=wrong, trials=trials).passed


def test_a_planted_mistake_that_is_not_seen_fails_the_section(
    quiet: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "QUICK_TRIALS", sampling.TRIALS[2:3])
    section = prove_sampling(quick=True, sequences=6144)
    assert section.passed and section.figures["planted_mistake"] < 1e-6, section.failures
    from contextlib import nullcontext

    monkeypatch.setattr(sampling, "shared_noise", nullcontext)
    assert "blind" in prove_sampling(quick=True, sequences=1024).failures[0]


def test_a_broken_rule_is_a_failure_not_a_traceback(quiet: None) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("by nothing")

    rules = {"broken": RULES["rejection"]._replace(accept=broken)}  # type: ignore[arg-type]
    section = prove_sampling(sequences=64, rules=rules, trials=[Trial("broken", "chain", 2)])
    assert not section.passed and "ZeroDivisionError: by nothing" in section.failures[0]


def test_the_law_of_the_toy_is_what_its_own_forward_says() -> None:
    for want in WANTS.values():
        assert sum(exact_law(want).values()) == pytest.approx(1)
    law, own = exact_law(WANTS["T 1"]), toy(OURS).model
    for text in ((0, 1, 2, 3), (3, 3, 0, 1)):
        with torch.inference_mode():
            read = own(torch.tensor([[3, *text]])).logits[0, :-1].softmax(-1)
        assert law[text] == pytest.approx(float(read[range(4), text].prod()), rel=1e-9)
    assert min(map(len, exact_law(WANTS["penalised, ending"]))) < sampling.LENGTH


# Statistics

def test_impossible_texts_are_never_excused() -> None:
    assert judged(Counter({(0,): 999_999, (9,): 1}), {(0,): 1.0}).p_value == 0


def test_the_g_test_is_calibrated() -> None:
    dice = np.random.default_rng(0)
    law = dice.dirichlet(np.ones(20))
    values = [g_test(dice.multinomial(5000, law), law).p_value for _ in range(200)]
    assert 0.4 < np.mean(values) < 0.6 and np.mean(np.array(values) < 0.05) < 0.1


def test_the_g_test_finds_what_it_promises() -> None:
    dice, law = np.random.default_rng(1), np.full(16, 1 / 16)
    off = detectable(8000, 16)
    wrong = law + off * 2 / 16 * np.array([1.0, -1.0] * 8)
    assert np.abs(wrong - law).sum() / 2 == pytest.approx(off)
    assert all(not g_test(dice.multinomial(8000, wrong), law).passed for _ in range(30))
    assert detectable(10_000, 50) == pytest.approx(detectable(40_000, 50) * 2, rel=1e-6)
    assert detectable(10_000, 50) < detectable(10_000, 200)


def test_the_interval_holds_the_truth() -> None:
    dice = np.random.default_rng(2)
    law, true = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.35, 0.25])
    ranges = [tv_interval(dice.multinomial(4000, true), law)[1:] for _ in range(30)]
    assert sum(low <= 0.1 <= high for low, high in ranges) >= 28
    assert tv_interval(dice.multinomial(4000, law), law)[1] < 0.005


def test_equal_pairs() -> None:
    assert too_equal(0, 100, 0.1) == 1.0 and too_equal(100, 100, 0.1) < 1e-90
    assert 0.1 < too_equal(10, 100, 0.1) < 0.9
