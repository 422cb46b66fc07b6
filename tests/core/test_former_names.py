"""Programs that use a former name go on running, with a warning that names the present one."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import draftproof as dp
from draftproof.requests.stats import State

BUDGET = {"most": "max_draft_tokens", "floor": "min_confidence", "rest": "cooldown"}
DRAFTER = {"default_budget": "max_draft_tokens", "wants_top": "top_k_needed",
           "reads_every_state": "needs_all_hidden"}
FRONTIER = {"budget": "max_draft_tokens", "drawn": "needs_draft_probs", "floor": "min_confidence",
            "most": "row_limit"}


def choose(self: Any, state: State) -> int:
    return int(self.max_draft_tokens)


@pytest.mark.parametrize(("base", "former", "name"), [
    *[(dp.Budget, *pair) for pair in BUDGET.items()],
    *[(dp.Plain, *pair) for pair in DRAFTER.items()],
])
def test_a_class_may_assign_a_former_name(base: type, former: str, name: str) -> None:
    with pytest.warns(FutureWarning, match=name):
        mine: Any = type("Mine", (base,), {former: 3, "choose": choose})
    made, child = mine(), type("Child", (mine,), {})()
    assert (getattr(mine, name), getattr(made, name), getattr(child, name)) == (3, 3, 3)
    with pytest.warns(FutureWarning, match=name):
        setattr(made, former, 4)
    with pytest.warns(FutureWarning, match=former):
        assert (getattr(made, former), getattr(made, name)) == (4, 4)


@pytest.mark.parametrize(("former", "name"), FRONTIER.items())
def test_a_frontier_has_its_former_names(former: str, name: str) -> None:
    prefix: Any = None
    frontier = dp.Frontier(prefix, prefix, 5, True, True, 0.5, 7)
    with pytest.warns(FutureWarning, match=name):
        assert getattr(frontier, former) == getattr(frontier, name)


def test_former_keywords() -> None:
    with pytest.warns(FutureWarning, match="min_confidence"):
        assert dp.Fixed(4, floor=0.5).min_confidence == 0.5     # type: ignore[call-arg]
    with pytest.warns(FutureWarning, match="max_draft_tokens"):
        assert dp.Adaptive(most=6).max_draft_tokens == 6        # type: ignore[call-arg]


def test_defining_the_classes_warns_of_nothing() -> None:
    """`dataclass` looks at every attribute of a class, and users see what an import warns of."""
    code = "import draftproof, draftproof.engine.load"
    subprocess.run([sys.executable, "-W", "error::FutureWarning:draftproof", "-W",
                    "error::FutureWarning:dataclasses", "-c", code], check=True)
