"""The examinations that must see a planted bug, small. Each tells what is wrong, or ""."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch
from helpers.reference import distribution_of_run

from draftproof.core import noise
from draftproof.core.acceptance import RULES, KeyedChance
from draftproof.core.messages import Frontier
from draftproof.core.params import Sampling, SamplingParams
from draftproof.core.prefix import Prefix
from draftproof.core.sampling import Sampler
from draftproof.core.tree import TreeShape
from draftproof.drafters.draft_model import DraftModel
from draftproof.engine.budget import Budget
from draftproof.engine.engine import Engine
from draftproof.verify import sampling
from draftproof.verify.bits import prove_bits
from draftproof.verify.cases import (
    GRAMMARS,
    SETUPS,
    TARGET,
    Ask,
    Case,
    by_model,
    case,
    logits_behind,
    toy,
)
from draftproof.verify.enumeration import Distribution, enumerate_texts
from draftproof.verify.exact import examine
from draftproof.verify.statistics import g_test

ALL = Sampling(temperature=0.9, top_k=2, top_p=0.9, repetition_penalty=1.8, presence_penalty=0.3)
WORDS = {"stop": ("ab",), "stop_tokens": (2,), "min_new_tokens": 1}
MIXED = (
    Ask(Sampling(temperature=1.3, stop_tokens=(0,)), (2, 0, 1)),
    Ask(Sampling(repetition_penalty=1.4), (1,), 4),
    Ask(Sampling(temperature=0.8, top_k=2, stop=("ab",)), (0, 2), 2),
)


@cache
def law_cases() -> dict[str, Case]:
    """A few cases that see much, by name."""
    greedy = Sampling(repetition_penalty=2.0, frequency_penalty=0.7)
    free, own = Sampling(temperature=1.0), Sampling(temperature=0.9, repetition_penalty=1.3)
    bound = Sampling(temperature=1.0, stop_tokens=(2,), processors=(GRAMMARS["never twice"],))
    reject, match, block = RULES["rejection"], RULES["match"], RULES["block"]
    asks = [Ask(greedy, prompt, 9) for prompt in ((1, 0), (0,), (2, 2), (1,), (0, 2))]
    itself = by_model(TARGET, 2)
    cases = {
        "draft": case("", reject, SETUPS["chain"], Ask(free)),
        "block": case("", block, SETUPS["chain"], Ask(free)),
        "larger draft": case("", reject, SETUPS["larger draft"], Ask(free, (1,), 2)),
        "tree": case("", match, SETUPS["tree of 3"], Ask(free, (1,), 4)),
        "options": case("", reject, SETUPS["tree of 4"], Ask(ALL, (0, 1, 2), 4)),
        "ends": case("", reject, SETUPS["chain"], Ask(replace(free, **WORDS), (1,), 4)),
        "mixed": case("", reject, SETUPS["chain"], *MIXED),
        "penalties in a tree": case("", match, SETUPS["tree of 4"], *asks),
        "grammar": case("", match, SETUPS["tree of 3"], Ask(bound, (1, 0), 4)),
        "itself": case("", reject, itself, Ask(own, (1, 0), 4), itself=True),
    }
    return {name: replace(one, name=name) for name, one in cases.items()}


def reference(one: Case) -> list[Distribution]:
    """What plain Python says of a case; with a user's logits processor, plain decoding."""
    if any(ask.sampling.processors for ask in one.asks):
        return enumerate_texts(one.plain()).laws
    scores = partial(logits_behind, one.target)
    return [distribution_of_run(scores, ask.prompt, ask.sampling, ask.limit) for ask in one.asks]


@cache
def wanted(name: str) -> list[Distribution]:
    return reference(law_cases()[name])


def by_law(*names: str) -> str:
    """What enumeration finds wrong in these cases (none: in all)."""
    for name in names or law_cases():
        laws = wanted(name)
        if wrong := examine(law_cases()[name], laws)[2]:
            return wrong
    return ""


def by_bits(*wants: Sampling) -> str:
    """What a comparison with plain decoding on a small model finds wrong."""
    target, draft = toy(11, 6, 2), toy(12, 6)
    engine = Engine(target, DraftModel(draft, 6, TreeShape.branching((3, 2))))
    section = prove_bits(engine, new_tokens=8, exact_nodes=0, wants=wants)
    return "; ".join(section.failures)


def by_count(rule: str) -> str:
    """Whether 4,096 texts with the real noise are unlikely."""
    found = sampling.audited(sampling.trial(f"{rule}; chain; T 1"), 4096, 0)
    return ", ".join(check.name for check in found.checks if not check.passed)


def by_noise() -> str:
    """What the noise, looked at by itself, does wrong."""
    return next((name for name, p in sampling.noise_tests(0) if p < 1e-6), "")


def by_streams() -> str:
    """Random numbers used twice, and drafts of the target's own that were not accepted."""
    return next(sampling.broken_streams(0), "")


def by_draws() -> str:
    """Whether single draws and coins have the distribution they are asked for."""
    count, law = 1 << 13, torch.tensor([0.5, 0.22, 0.15, 0.1, 0.03], dtype=torch.float64)
    want = Sampling(temperature=1.0, seed=1)
    sampler = Sampler([SamplingParams(want, 1, sample=row) for row in range(count)])
    prefix = Prefix(torch.zeros(count, 12, dtype=torch.int64), torch.full((count,), 3))
    chance, ones = KeyedChance(Frontier(prefix, sampler, 2, drawn=True)), torch.ones(count)
    draws = {"draw": (chance.draw((3 * law).expand(count, -1), 2 * ones.long()), law)}
    for heads in (0.05, 0.5, 0.93):
        odds = torch.tensor([1 - heads, heads], dtype=torch.float64)
        draws[f"coin {heads}"] = chance.flip(heads * ones, 1).long(), odds
    for name, (seen, odds) in draws.items():
        if not g_test(torch.bincount(seen, minlength=len(odds)), odds).passed:
            return name
    for number, heads in ((0.0, 0.0), (1 - 2.0**-24, 1.0)):                # the ends of the scale
        fixed = lambda keys, at=number: torch.full(keys.shape[:-1], at)         # noqa: E731
        with patch.object(noise, "uniform", fixed):
            if not bool((chance.flip(heads * ones, 1).double() == heads).all()):
                return f"a coin of {heads}"
    return ""


class Script(Budget):
    """Draft tokens round by round, as written down; then none."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.most, self.left = max(sizes), list(sizes)

    def choose(self, state: Any) -> int:
        return self.left.pop(0) if self.left else 0


def accepted() -> list[int]:
    """How much of another model's drafts is accepted, by text: chains, trees, after pauses."""
    def count(budget: Any, *children: int) -> list[int]:
        shape = TreeShape.branching(children) if children else None
        target, draft = toy(11, 6, 2), toy(15, 6, 2)
        engine = Engine(target, DraftModel(draft, 6, shape), budget=budget)
        prompts, limits = [[3], [1, 2, 0, 1], [0, 0, 4]], (24, 9, 30)
        asked = [Sampling(max_new_tokens=limit) for limit in limits]
        return [one.stats.accepted for one in engine.generate(prompts, sampling=asked)]

    return [*count(3), *count(4, 2, 1), *count(Script([3, *[0] * 9, 3, 3, 0, 0, 3]))]


sound_accepted = cache(accepted)


def by_accepted() -> str:
    """Whether drafts are accepted as often as those of the sound code."""
    now, sound = accepted(), sound_accepted()
    return "" if now == sound else f"{now} accepted, {sound} before"


WATCHES: dict[str, Callable[..., str]] = {
    "law": by_law, "bits": by_bits, "count": by_count, "noise": by_noise, "streams": by_streams,
    "draws": by_draws, "accepted": by_accepted,
}
