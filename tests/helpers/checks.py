"""The checks that must see a planted bug, small. Each tells what is wrong, or ""."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch

from draftproof.core import noise
from draftproof.core.acceptance import RULES
from draftproof.core.params import Sampling, SamplingParams
from draftproof.core.prefix import Prefix
from draftproof.core.sampling import Sampler
from draftproof.core.tree import TreeShape
from draftproof.drafters.draft_model import DraftModel
from draftproof.engine.budget import Budget
from draftproof.engine.engine import Engine
from draftproof.verify import sampling
from draftproof.verify.audit import g_test
from draftproof.verify.bits import prove_bits
from draftproof.verify.cases import (
    GRAMMARS,
    SETUPS,
    TARGET,
    Case,
    CaseRequest,
    by_model,
    logits_after,
    toy,
)
from draftproof.verify.enumeration import Distribution, enumerate_texts
from draftproof.verify.exact import check_case
from draftproof.verify.reference import distribution_of_run

FREE, ENDING = Sampling(temperature=1.0), Sampling(temperature=1.0, stop_tokens=(2,))
GREEDY = Sampling(repetition_penalty=2.0, frequency_penalty=0.7)
ALL = Sampling(temperature=1.6, top_k=2, top_p=0.7, repetition_penalty=1.8, presence_penalty=0.3)
MIXED = (
    CaseRequest(Sampling(temperature=1.3, stop_tokens=(0,)), (2, 0, 1)),
    CaseRequest(Sampling(repetition_penalty=1.4), (1,), 4),
    CaseRequest(Sampling(temperature=0.8, top_k=2, stop=("ab",)), (0, 2), 2),
)
DISTRIBUTION_CASES = {
    name: Case(name, RULES[rule], SETUPS.get(setup) or by_model(TARGET, 2), asks,
               self_draft=setup == "itself")
    for name, rule, setup, *asks in (
        ("draft", "rejection", "chain", CaseRequest(FREE)),
        ("block", "block", "chain", CaseRequest(FREE)),
        ("larger draft", "rejection", "larger draft", CaseRequest(FREE, (1,), 2)),
        ("tree", "match", "tree of 3", CaseRequest(FREE, (1,), 4)),
        ("options", "rejection", "tree of 4", CaseRequest(ALL, (0, 1, 2), 4)),
        ("ends", "rejection", "chain",
         CaseRequest(replace(ENDING, stop=("ab",), min_new_tokens=1), (1,), 4)),
        ("mixed", "rejection", "chain", *MIXED),
        ("penalties in a tree", "match", "tree of 4",
         *(CaseRequest(GREEDY, prompt, 9) for prompt in ((1, 0), (0,), (2, 2), (1,), (0, 2)))),
        ("grammar", "match", "tree of 3",
         CaseRequest(replace(ENDING, processors=(GRAMMARS["never twice"],)), (1, 0), 4)),
        ("itself", "rejection", "itself",
         CaseRequest(Sampling(temperature=0.9, repetition_penalty=1.3), (1, 0), 4)),
    )
}  # fmt: skip
"""A few cases that see much, by name."""


def reference(case: Case) -> list[Distribution]:
    """What plain Python says of a case; with a user's logits processor, plain decoding."""
    if any(ask.sampling.processors for ask in case.requests):
        return enumerate_texts(case.plain()).distributions
    scores = partial(logits_after, case.target)
    return [distribution_of_run(scores, request.prompt, request.sampling, request.limit)
            for request in case.requests]


@cache
def wanted(name: str) -> list[Distribution]:
    return reference(DISTRIBUTION_CASES[name])


def by_distribution(name: str) -> str:
    """What enumeration finds wrong in this case."""
    return check_case(DISTRIBUTION_CASES[name], wanted(name))[2]


def by_bits(*wants: Sampling) -> str:
    """What a comparison with plain decoding on a small model finds wrong."""
    draft = DraftModel(toy(12, 6), 6, TreeShape.branching((3, 2)))
    engine = Engine(toy(11, 6, 2), draft)
    return "; ".join(prove_bits(engine, new_tokens=8, exact_nodes=0, wants=wants).failures)


def by_count(rule: str) -> str:
    """Whether 4,096 texts with the real noise are unlikely."""
    result = sampling.audited(sampling.trial(f"{rule}; chain; T 1"), 4096, 0)
    return ", ".join(check.name for check in result.checks if not check.passed)


def by_noise() -> str:
    """What the noise, looked at by itself, does wrong."""
    return next((name for name, p in sampling.noise_tests(0) if p < 1e-6), "")


def by_streams() -> str:
    """Random numbers used twice."""
    drawn = (name for name, rule in RULES.items() if rule.needs_draft_probs)
    return "used twice" if any(sampling.draws_used_twice(name, 0) for name in drawn) else ""


def by_draws() -> str:
    """Whether draws have their distribution, a coin of 0 never falls and one of 1 always does, at
    the ends of what is drawn."""
    count, probs = 1 << 13, torch.tensor([0.5, 0.22, 0.15, 0.1, 0.03], dtype=torch.float64)
    want, depth = Sampling(temperature=1.0, seed=1), torch.full((count,), 2)
    sampler = Sampler([SamplingParams(want, 1, sample=row) for row in range(count)])
    prefix = Prefix(torch.zeros(count, 12, dtype=torch.int64), depth)
    chance = sampler.chance(prefix)
    if not g_test(torch.bincount(chance.draw((3 * probs).expand(count, -1), depth)), probs).passed:
        return "draw"
    for heads in (0.05, 0.5, 0.93):
        seen = chance.flip(torch.full((count,), heads), 1).long()
        coin = torch.tensor([1 - heads, heads], dtype=torch.float64)
        if not g_test(torch.bincount(seen, minlength=2), coin).passed:
            return f"a coin of {heads}"
    for number, heads in ((0.0, 0.0), (1 - 2.0**-24, 1.0)):
        with patch.object(noise, "uniform", lambda _, at=number: torch.full((count, 1), at)):
            if not bool((chance.flip(torch.full((count,), heads), 1) == heads).all()):
                return f"a coin of {heads}"
    return ""


class Script(Budget):
    """Draft tokens round by round, as written down; then none."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.max_draft_tokens, self.left = max(sizes), list(sizes)

    def choose(self, state: Any) -> int:
        return self.left.pop(0) if self.left else 0


def accepted() -> list[int]:
    """How much of another model's drafts is accepted, by text: chains, trees, after pauses."""
    def count(budget: Any, shape: TreeShape | None = None) -> list[int]:
        engine = Engine(toy(11, 6, 2), DraftModel(toy(15, 6, 2), 6, shape), budget=budget)
        prompts, limits = [[3], [1, 2, 0, 1], [0, 0, 4]], (24, 9, 30)
        asked = [Sampling(max_new_tokens=limit) for limit in limits]
        return [item.stats.accepted for item in engine.generate(prompts, sampling=asked)]

    pauses = Script([3, *[0] * 9, 3, 3, 0, 0, 3])
    return [*count(3), *count(4, TreeShape.branching((2, 1))), *count(pauses)]


sound_accepted = cache(accepted)


def by_accepted() -> str:
    """Whether drafts are accepted as often as those of the sound code."""
    now, sound = accepted(), sound_accepted()
    return "" if now == sound else f"{now} accepted, {sound} before"


WATCHES: dict[str, Callable[..., str]] = {
    "distribution": by_distribution, "bits": by_bits, "count": by_count, "noise": by_noise,
    "streams": by_streams,
    "draws": by_draws, "accepted": by_accepted,
}
