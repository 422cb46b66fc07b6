"""Counting: the quick section passes, controls fail at the same size, and statistics are right where answers are known."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from draftproof.core import acceptance, noise
from draftproof.core.acceptance import RULES
from draftproof.verify import exact, sampling
from draftproof.verify.gtest import FALSE_ALARM, detectable, g_test, tv_interval
from draftproof.verify.sampling import OURS, QUICK_SEQUENCES, WANTS, Trial, exact_law, judged, prove_sampling, toy

FEW = (Trial("rejection", "chain", 3), Trial("match", "tree 2-1", 4, "penalised, ending"))


def test_the_quick_section_passes() -> None:
    section = prove_sampling(quick=True, trials=FEW)
    assert section.passed, section.failures
    figures = section.figures
    assert figures["sequences"] == len(FEW) * QUICK_SEQUENCES
    assert figures["detects_in_one_set_up"] < 0.07 and figures["false_alarm_in_all"] < 1e-3
    assert all(p < FALSE_ALARM for p in figures["controls"].values()) and len(figures["controls"]) >= 2


def test_another_rule_can_be_proved_and_a_wrong_one_is_found() -> None:
    trial = [Trial("given", "chain", 2)]
    sound = {"given": exact.weighing(acceptance.accept_by_rejection)}
    assert prove_sampling(quick=True, rules=sound, trials=trial, controls=False, sequences=4096).passed
    assert "given" not in RULES
    wrong = {"given": exact.weighing(exact.boastful)}
    assert not prove_sampling(quick=True, rules=wrong, trials=trial, controls=False, sequences=4096).passed


def test_streams_that_are_shared_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert min(sampling.stream_tests(1 << 14, 3).values()) > FALSE_ALARM
    own = noise.stream
    monkeypatch.setattr(noise, "stream", lambda keys, role, *rest, **how: own(keys, noise.Role.TARGET, *rest, **how))
    assert sampling.stream_tests(1 << 12, 3)["DRAFT and RECOVER (samples)"] == 0
    assert sampling.draws_used_twice("rejection", 0) > 0


def test_single_draws_have_their_law(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = sampling.dice_tests(1 << 14, 1)
    assert min(sound.values()) > FALSE_ALARM and len(sound) >= 10
    own = noise.gumbel
    monkeypatch.setattr(noise, "gumbel", lambda *args, **how: -own(*args, **how))
    assert max(sampling.dice_tests(1 << 14, 1)[name] for name in ("the target's pick", "the replacement")) < FALSE_ALARM


def test_no_draw_is_used_twice_and_the_target_accepts_itself() -> None:
    for rule in RULES:
        assert sampling.self_acceptance(rule, 5) == 1
    assert sampling.draws_used_twice("rejection", 5) == sampling.draws_used_twice("block", 5) == 0


def test_the_law_of_the_toy_is_a_law_of_texts() -> None:
    for want in WANTS.values():
        law = exact_law(toy(OURS), want)
        assert sum(law.values()) == pytest.approx(1)
    assert max(map(len, law)) == sampling.LENGTH and min(map(len, law)) < sampling.LENGTH       # the last want may end early


def test_impossible_texts_are_never_excused() -> None:
    assert judged(Counter({(0,): 999_999, (9,): 1}), {(0,): 1.0}).p_value == 0


# The G-test -----------------------------------------------------------------------------------------------------------


def test_the_g_test_is_calibrated() -> None:
    dice = np.random.default_rng(0)
    law = dice.dirichlet(np.ones(20))
    values = [g_test(dice.multinomial(5000, law), law).p_value for _ in range(300)]
    assert 0.4 < np.mean(values) < 0.6 and np.mean(np.array(values) < 0.05) < 0.1


def test_the_g_test_finds_what_it_promises() -> None:
    dice = np.random.default_rng(1)
    law = np.full(16, 1 / 16)
    off = detectable(8000, 16)
    wrong = law + off * 2 / 16 * np.array([1.0, -1.0] * 8)
    assert np.abs(wrong - law).sum() / 2 == pytest.approx(off)
    assert all(not g_test(dice.multinomial(8000, wrong), law).passed for _ in range(50))


def test_more_samples_see_more() -> None:
    assert detectable(10_000, 50) == pytest.approx(detectable(40_000, 50) * 2, rel=1e-6)
    assert detectable(10_000, 50) < detectable(10_000, 200)


def test_the_interval_holds_the_truth() -> None:
    dice = np.random.default_rng(2)
    law, true = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.35, 0.25])
    hits = 0
    for _ in range(40):
        low, high = tv_interval(dice.multinomial(4000, true), law)
        hits += low <= 0.1 <= high
    assert hits >= 37
    low, _ = tv_interval(dice.multinomial(4000, law), law)
    assert low < 0.005


def test_independence_on_known_cases() -> None:
    dice = torch.Generator().manual_seed(0)
    one, other = torch.rand(2, 1 << 15, generator=dice).double()
    assert sampling._independent(one, other) > 1e-4
    assert sampling._independent(one, one) < 1e-30
    assert sampling._independent(one, (0.8 * other + 0.2 * one)) < FALSE_ALARM
