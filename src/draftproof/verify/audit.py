"""Audit: does somebody else's sampler draw from the law it should? If not: how far off, in which smallest case, like which bug.

Knows samplers as functions and laws as tables; knows nothing of models, servers or how the tokens are made (`adapters` does).

    found = audit(sample, law, prompt=[1, 2, 3])
    print(found.biased, found.tv, found.smallest, found.resembles)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple

from scipy import stats

from draftproof.errors import BadInput
from draftproof.verify.bug_match import Drafting, Likeness, nearest
from draftproof.verify.outcomes import CHUNK, Case, Check, Law, Progress, Sampler, Text
from draftproof.verify.statistics import FALSE_ALARM, POWER, GTest, detectable

FEWEST = 200
"""Samples with which anything can be said at all."""


class Setting(NamedTuple):
    """A simpler way to ask the same engine, and the law that holds then; the search for the smallest case tries it."""

    name: str
    sampler: Sampler
    law: Law


class Smallest(NamedTuple):
    """The smallest case that still fails: simplest setting, shortest prompt, fewest tokens."""

    setting: str
    prompt: Text
    tokens: int
    tv: float
    p_value: float
    samples: int


@dataclass(frozen=True)
class Audit:
    """What an examination found. tv, low, high: of the longest texts; `detects`: the total variation it surely finds."""

    checks: tuple[Check, ...]
    samples: int
    length: int
    prompt: Text
    setting: str
    smallest: Smallest | None = None
    resembles: tuple[Likeness, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def biased(self) -> bool:
        return not all(check.passed for check in self.checks)

    @cached_property
    def joint(self) -> GTest:
        """The G-test of the longest texts."""
        return [check.test for check in self.checks if check.test is not None][-1]

    @property
    def false_alarm(self) -> float:
        """How often a correct engine is accused by any of the checks, at most."""
        return FALSE_ALARM * len(self.checks)

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        joint = self.joint
        tested = {name: value for name, value in asdict(self).items() if name not in ("checks", "smallest", "resembles")}
        checks = [
            {**check._asdict(), "passed": check.passed, "test": check.test._asdict() if check.test else None}
            for check in self.checks
        ]
        return {
            "verdict": "biased" if self.biased else "unbiased",
            "tv": joint.tv,
            "tv_interval_99": [joint.low, joint.high],
            "p_value": joint.p_value,
            "detects": joint.detects,
            "power": POWER,
            "false_alarm": self.false_alarm,
            **tested,
            "smallest": self.smallest._asdict() if self.smallest else None,
            "resembles": [likeness._asdict() for likeness in self.resembles],
            "checks": checks,
        }


def audit(
    sampler: Sampler,
    law: Law,
    prompt: Sequence[int],
    *,
    length: int = 3,
    samples: int = 4000,
    seed: int = 0,
    ends: Sequence[int] = (),
    opaque: frozenset[int] = frozenset(),
    drafting: Drafting | None = None,
    others: Mapping[str, Law] | None = None,
    simpler: Sequence[Setting] = (),
    setting: str = "as given",
    progress: Progress | None = None,
) -> Audit:
    """Draw `samples` continuations of `length` tokens and test them against the law, prefix by prefix.

    ends: end tokens; all count as one. opaque: tokens behind which the law is not known (several share one name).
    drafting, others: laws to compare a biased engine with: its drafts, and whole laws by the name of their bug.
    """
    draw: Sampler = getattr(sampler, "sample", sampler)
    _check_request(prompt, length, samples)
    case = Case(draw, law, tuple(prompt), length, tuple(ends), opaque)
    texts = case.drawn(samples, seed, progress)
    outcomes = case.outcomes(samples)
    checks = [outcomes.check(case.clean(texts), tokens, seed) for tokens in range(1, length + 1)]
    checks += _repeats(texts) + (_after_the_end(texts, case) if ends else [])
    for check in checks:
        if not check.control:
            raise BadInput(f"{samples} samples are too few: the control of {check.name!r} passes; take at least {4 * samples}")
    notes = tuple(case.notes(seed))
    found = Audit(tuple(checks), samples, length, case.prompt, setting, notes=notes)
    if not found.biased:
        return found
    smallest = _smallest(case, found, simpler, seed)
    resembles = (*_plain_to_see(texts, found), *nearest(case, outcomes, case.clean(texts), drafting, others or {}))
    return Audit(**{**_fields(found), "smallest": smallest, "resembles": resembles})


def _repeats(texts: Sequence[Text]) -> list[Check]:
    """Do neighbours, or whole calls, repeat each other more often than independent draws would?"""
    rate = sum(count * (count - 1) for count in Counter(texts).values()) / (len(texts) * (len(texts) - 1))
    if rate > 0.9:
        return []                                                       # nearly always the same text: nothing to see
    calls = [texts[start : start + CHUNK] for start in range(0, len(texts) - CHUNK + 1, CHUNK)]
    ways = {
        "neighbours": list(zip(texts[::2], texts[1::2], strict=False)),
        "calls with different seeds": [pair for one, two in zip(calls[::2], calls[1::2], strict=False)
                                       for pair in zip(one, two, strict=True)],
    }  # fmt: skip
    copied = float(stats.binom.sf(len(ways["neighbours"]) - 1, len(ways["neighbours"]), rate))
    checks = []
    for name, pairs in ways.items():
        same = sum(one == two for one, two in pairs)
        p_value = float(stats.binom.sf(same - 1, len(pairs), rate)) if same else 1.0
        detail = f"{same} of {len(pairs)} pairs are the same, {rate * len(pairs):.1f} expected"
        checks.append(Check(f"independence of {name}", p_value, copied < FALSE_ALARM, detail))
    return checks


def _after_the_end(texts: Sequence[Text], case: Case) -> list[Check]:
    """Nothing but end tokens may follow an end token."""

    def overruns(text: Text) -> bool:
        stop = next((place for place, token in enumerate(text) if token in case.ends), len(text))
        return any(token not in case.ends for token in text[stop:])

    wrong = sum(map(overruns, texts))
    planted = (case.ends[0], next(token for token in range(len(case.ends) + 1) if token not in case.ends))
    ended = sum(case.ends[0] in text for text in case.clean(texts))
    detail = f"{wrong} texts go on after their end token; {ended} ended"
    return [Check("end of text", 0.0 if wrong else 1.0, overruns(planted), detail)]


def _smallest(case: Case, found: Audit, simpler: Sequence[Setting], seed: int) -> Smallest | None:
    """The first failure, from the simplest setting and the shortest prompt on; with as many samples as the bias needs."""
    failed = [check for check in found.checks if not check.passed and check.test is not None]
    if not failed:
        return None
    few = max(FEWEST, min(_enough(check.test) for check in failed if check.test))
    prompts = sorted({case.prompt[-1:], case.prompt[-(len(case.prompt) // 2 + 1) :], case.prompt}, key=len)
    for setting in (*simpler, Setting(found.setting, case.sampler, case.law)):
        for prompt in prompts:
            if prompt == case.prompt and setting.sampler is case.sampler:
                break                                                   # that one is known
            draw: Sampler = getattr(setting.sampler, "sample", setting.sampler)
            tried = Case(draw, setting.law, prompt, case.length, case.ends, case.opaque)
            outcomes, texts = tried.outcomes(few), tried.clean(tried.drawn(few, seed + 10**7))
            for tokens in range(1, case.length + 1):
                check = outcomes.check(texts, tokens, seed)
                if check.test is not None and not check.passed:
                    return Smallest(setting.name, prompt, tokens, check.test.tv, check.p_value, few)
    first = failed[0]
    assert first.test is not None
    tokens = 1 + [check.name for check in found.checks].index(first.name)
    return Smallest(found.setting, case.prompt, tokens, first.test.tv, first.p_value, found.samples)


def _enough(test: GTest) -> int:
    """Samples with which a bias as clear as this one is surely found again."""
    if test.p_value == 0:
        return FEWEST
    freedom = test.cells - 1
    shift = float(stats.chi2.isf(test.p_value, freedom)) - freedom           # noncentrality; proportional to the samples
    needed = test.samples * (2 * test.detects) ** 2                                 # what the test surely finds
    return int(min(test.samples, 1.5 * test.samples * needed / shift))


def _plain_to_see(texts: Sequence[Text], found: Audit) -> tuple[Likeness, ...]:
    """Bugs that need no law to be recognised."""
    failed = {check.name for check in found.checks if not check.passed}
    bugs = {
        "every sample is the same text: a constant seed, or greedy decoding": len(set(texts)) == 1,
        "seeds ignored: calls with different seeds repeat each other": "independence of calls with different seeds" in failed,
        "texts of one call repeat each other": "independence of neighbours" in failed,
        "tokens after the end token are returned": "end of text" in failed,
    }
    return tuple(Likeness(bug, 0.0, 1.0) for bug, true in bugs.items() if true)


def _fields(found: Audit) -> dict[str, Any]:
    return {name: getattr(found, name) for name in Audit.__dataclass_fields__}


def _check_request(prompt: Sequence[int], length: int, samples: int) -> None:
    if not prompt:
        raise BadInput("the prompt is empty; give at least one token")
    if length < 1:
        raise BadInput(f"length was {length}; test at least 1 token")
    if samples < FEWEST:
        raise BadInput(f"samples was {samples}; take at least {FEWEST}, which see a distance of {detectable(FEWEST, 8):.2f}")
