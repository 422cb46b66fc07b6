"""The verdict of a plan respects its own interval."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftproof.engine.budget import Adaptive
from draftproof.plan.machine import Machine
from draftproof.plan.planner import AUTO, Plan, PlanConfig, Prediction, learned
from draftproof.plan.report import judged, read_start, verdict


@pytest.mark.parametrize(("speed_up", "low", "high", "verdict"), [
    (1.06, 0.93, 1.18, "makes no difference that can be measured with 2 texts"),
    (1.5, 1.2, 1.9, "pays"), (0.8, 0.7, 0.9, "does not pay"),
    (0.8, 0.6, 1.1, "makes no difference that can be measured with 2 texts"),
    (1.02, 1.01, 1.03, "makes no difference (±5%)"),
])
def test_no_gain_is_claimed_that_lies_within_the_noise(
    speed_up: float, low: float, high: float, verdict: str
) -> None:
    assert judged(speed_up, low, high, 2) == verdict


@pytest.mark.parametrize(("low", "drafter"), [(0.9, "none"), (1.1, "suffix")])
def test_a_run_begins_with_a_plans_drafter_only_if_it_pays(
    low: float, drafter: str, tmp_path: Path
) -> None:
    best = {"drafter": "suffix", "speed_up": 1.3, "low": low, "high": 1.5}
    saved = {"best": best, "texts": 2, "options": {"assistant_model": []},
             "start": {"suffix": learned(Adaptive(4))}}
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(saved))
    assert read_start(file)["drafter"] == drafter


@pytest.mark.parametrize(("speed_up", "low", "advice"), [
    (1.5, 1.2, None), (1.5, 0.9, "give more prompts, or use --drafter none"),
    (1.02, 0.9, "; use --drafter none"), (0.7, 0.6, "; use --drafter none"),
])
def test_a_verdict_advises_what_to_do(speed_up: float, low: float, advice: str | None) -> None:
    best = Prediction("suffix", 1, 0.0, AUTO, 2.0, 20.0, speed_up, low, speed_up + 0.1, [], 1e9,
                      None)  # fmt: skip
    text = verdict(Plan("model", PlanConfig(), Machine("here", "model", ()), 2, [best], {}))
    assert text.endswith(advice or "greedy)")
    assert ("at best" in text) == (advice is not None)
