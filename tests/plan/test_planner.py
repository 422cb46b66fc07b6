"""A prediction's interval, memory and cost follow from its replay and its machine."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny import target

from draftproof.drafters.prompt_lookup import PromptLookup
from draftproof.engine.engine import Engine
from draftproof.plan.planner import PlanConfig, Planner

PROMPT = [5, 6, 7, 5, 6, 7]


def test_intervals_memory_and_cost_of_a_prediction() -> None:
    config = PlanConfig(batches=(1, 2), tokens=12, price=3.6, machine="gaudi3")
    planner = Planner(Engine(target()), {"prompt-lookup": PromptLookup()}, [PROMPT], [], config)
    planner.machine = replace(planner.machine, spread=0.25)
    single, double = (planner.predict("prompt-lookup", batch, 0.0, 2) for batch in (1, 2))
    assert (single.low, single.high) == pytest.approx(         # two standard errors
        (0.5 * single.speed_up, 1.5 * single.speed_up))
    length = len(planner.texts[0.0][0].tokens)
    assert double.memory - single.memory == length * planner.size.position_bytes
    assert single.memory == planner.size.bytes + length * planner.size.position_bytes
    assert single.cost == pytest.approx(3.6 / 3600 / single.tokens_per_second * 1e6)
