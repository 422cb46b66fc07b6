"""Audit: does somebody else's sampler draw from the law it should? If not: how far off, in which smallest case, like which bug.

Knows samplers as functions and laws as tables; knows nothing of models, servers or how the tokens are made (`adapters` does).

    found = audit(sample, law, prompt=[1, 2, 3])
    print(found.biased, found.tv, found.smallest, found.resembles)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from draftproof.errors import BadInput
from draftproof.proof.gtest import FALSE_ALARM, POWER, GTest, detectable, g_test
from draftproof.proof.signatures import MISTAKES, NO_BONUS, RIGHT, Array, Mistake, normal

Text = tuple[int, ...]
Law = Callable[[Sequence[Text]], Array]
"""Next-token probabilities [n, V] behind `n` texts of one length, the prompt included."""
Progress = Callable[[int, int], None]
"""Told after every call of the sampler: samples so far, samples in all."""

RARE, IMPOSSIBLE, CUT = -1, -2, -3
"""In the place of a token: one of the rare ones, one of probability zero, none although the text had not ended."""
CHUNK = 100
"""Samples per call of the sampler; every call has its own seed."""
KEEP = 20
"""Expected count from which an outcome has a cell of its own: enough for the chi-squared law of a G-test to hold at 1e-6."""
CONTEXTS = 512
"""Texts behind which the law is asked for, at most."""
FEWEST = 200


class Sampler(Protocol):
    """The engine under examination: `n` continuations of `prompt`, as new token ids; end tokens may be left out."""

    def __call__(self, prompt: list[int], n: int, seed: int) -> list[list[int]]: ...


class Setting(NamedTuple):
    """A simpler way to ask the same engine, and the law that holds then; the search for the smallest case tries it."""

    name: str
    sampler: Sampler
    law: Law


class Drafting(NamedTuple):
    """What is known of the drafts, to name a bug: their law as drawn and before any warping, and tokens per round."""

    law: Law
    raw: Law | None = None
    tokens: int | None = None


class Check(NamedTuple):
    """One test. control: the same test on samples made wrong on purpose, which must fail (False: it did not)."""

    name: str
    p_value: float
    control: bool
    detail: str = ""
    test: GTest | None = None

    @property
    def passed(self) -> bool:
        return self.p_value >= FALSE_ALARM


class Smallest(NamedTuple):
    """The smallest case that still fails: simplest setting, shortest prompt, fewest tokens."""

    setting: str
    prompt: Text
    tokens: int
    tv: float
    p_value: float
    samples: int


class Likeness(NamedTuple):
    """A known bug, how far its law is from what was seen, and the G-test of what was seen against it (high: explained)."""

    bug: str
    tv: float
    p_value: float


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
    case = _Case(draw, law, tuple(prompt), length, tuple(ends), opaque)
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
    resembles = (*_plain_to_see(texts, found), *_nearest(case, outcomes, case.clean(texts), drafting, others or {}))
    return Audit(**{**_fields(found), "smallest": smallest, "resembles": resembles})


@dataclass(frozen=True)
class _Case:
    """An engine, the law it should have, and what it is asked."""

    sampler: Sampler
    law: Law
    prompt: Text
    length: int
    ends: Text
    opaque: frozenset[int]

    def drawn(self, samples: int, seed: int, progress: Progress | None = None) -> list[Text]:
        """`samples` texts as they come, with a new seed for every call."""
        texts: list[Text] = []
        while len(texts) < samples:
            n = min(CHUNK, samples - len(texts))
            texts += self.ask(n, seed + len(texts) // CHUNK)
            if progress is not None:
                progress(len(texts), samples)
        return texts

    def ask(self, n: int, seed: int) -> list[Text]:
        """One call of the sampler, its answer checked."""
        came = self.sampler(list(self.prompt), n, seed)
        try:
            texts = [tuple(int(token) for token in text) for text in came]
        except (TypeError, ValueError) as error:
            raise BadInput(f"the sampler must return lists of token ids; it returned {type(came).__name__}") from error
        if len(texts) != n:
            raise BadInput(f"the sampler was asked for {n} texts and returned {len(texts)}")
        return texts

    def clean(self, texts: Sequence[Text]) -> list[Text]:
        """Texts up to their end or `length`; one end token stands for all, and for none."""
        return [self._clean(text) for text in texts]

    def _clean(self, text: Text) -> Text:
        stop = next((place for place, token in enumerate(text) if token in self.ends), None)
        if stop is not None:
            return (*text[:stop], self.ends[0])[: self.length]
        if len(text) < self.length:
            return (*text, self.ends[0] if self.ends else CUT)
        return text[: self.length]

    def rows(self, law: Law, texts: Sequence[Text]) -> Array:
        """[n, V] `law` behind `texts`, all end tokens put together."""
        rows = np.asarray(law([self.prompt + text for text in texts]), float).copy()
        if len(self.ends) > 1:
            rows[:, self.ends[0]] = rows[:, list(self.ends)].sum(1)
            rows[:, list(self.ends[1:])] = 0
        return rows

    def outcomes(self, samples: int) -> _Outcomes:
        """The tree of what may come, cut where it becomes rare."""
        found = _Outcomes(self.length)
        level: dict[Text, float] = {(): 1.0}
        while level:
            rows = self.rows(self.law, list(level))
            if not np.allclose(rows.sum(1), 1, atol=1e-4):
                worst = int(np.abs(rows.sum(1) - 1).argmax())
                raise BadInput(f"the law must sum to one; behind {list(level)[worst]} it sums to {rows[worst].sum():g}")
            below: dict[Text, float] = {}
            for (text, odds), row in zip(level.items(), rows, strict=True):
                own = np.flatnonzero(odds * row * samples >= KEEP)
                found.laws[text], found.own[text] = row / row.sum(), own
                below |= {(*text, int(token)): odds * row[token] for token in own if token not in (*self.ends, *self.opaque)}
            room = CONTEXTS - len(found.laws)
            likely = sorted(below, key=lambda text: -below[text])[:room]
            level = {text: below[text] for text in likely if len(text) < self.length}
        return found

    def notes(self, seed: int) -> list[str]:
        """What is worth knowing and no bias."""
        same = self.ask(8, seed + 10**6) == self.ask(8, seed + 10**6)
        return [] if same else ["the same seed gives another text: seeds are not honoured (the law is not touched by that)"]


@dataclass
class _Outcomes:
    """What may come behind a prompt. A cell is a text, or a text with RARE or IMPOSSIBLE in the place of its last token."""

    length: int
    laws: dict[Text, Array] = field(default_factory=dict)
    own: dict[Text, NDArray[np.intp]] = field(default_factory=dict)

    def cell(self, text: Text, tokens: int) -> Text:
        """The cell of the first `tokens` tokens of a text."""
        for place, token in enumerate(text[:tokens]):
            law = self.laws.get(text[:place])
            if law is None:
                return text[:place]
            if not 0 <= token < len(law) or law[token] == 0:
                return (*text[:place], IMPOSSIBLE)
            if token not in self.own[text[:place]]:
                return (*text[:place], RARE)
        return text[:tokens]

    def odds(self, tokens: int, emit: _Emit | None = None) -> dict[Text, float]:
        """Probability of every cell of the first `tokens` tokens, under the law itself or under a loop that emits otherwise."""
        cells: dict[Text, float] = defaultdict(float)
        states: dict[tuple[Text, Any], float] = {((), None): 1.0}
        while states:
            below: dict[tuple[Text, Any], float] = defaultdict(float)
            for (text, round_), mass in states.items():
                law, own = self.laws[text], self.own[text]
                for state, row in emit(text, round_) if emit else [(None, law)]:
                    kept = mass * row[own]
                    cells[(*text, IMPOSSIBLE)] += mass * float(row[law == 0].sum())
                    cells[(*text, RARE)] += max(0.0, mass * float(row[law > 0].sum()) - float(kept.sum()))
                    for token, odds in zip(own.tolist(), kept.tolist(), strict=True):
                        child = (*text, token)
                        if len(child) < tokens and child in self.laws:
                            below[child, state] += odds
                        else:
                            cells[child] += odds
            states = {state: mass for state, mass in below.items() if mass > 0}
        return cells

    def check(self, texts: Sequence[Text], tokens: int, seed: int) -> Check:
        """The G-test of the first `tokens` tokens, and its control: a law as wrong as the test should see."""
        law = self.odds(tokens)
        seen = Counter(self.cell(text, tokens) for text in texts)
        cells = sorted(law.keys() | seen.keys())
        expected = np.array([law.get(cell, 0.0) for cell in cells])
        expected /= expected.sum()
        test = g_test([seen[cell] for cell in cells], expected)
        wrong = np.random.default_rng(seed).multinomial(len(texts), _tilted(expected, 1.2 * test.detects))
        control = g_test(wrong, expected) if test.cells > 1 else g_test([*(0 for _ in expected), 1], [*expected, 0])
        name = "first token" if tokens == 1 else f"first {tokens} tokens"
        return Check(name, test.p_value, not control.passed, f"{test.cells} cells", test)


def _tilted(law: Array, tv: float) -> Array:
    """A law at this distance: about half of the mass gains what the other half loses, the direction hardest to see."""
    order = np.argsort(law)                                             # the smaller part gains: it cannot become negative
    gains = np.zeros(len(law), bool)
    gains[order[np.cumsum(law[order]) <= 0.5]] = True
    gains &= law > 0
    mass = float(law[gains].sum())
    if not 0 < mass < 1:
        return law
    moved = min(tv, 1 - mass)
    tilted: Array = np.where(gains, law * (1 + moved / mass), law * (1 - moved / (1 - mass)))
    return normal(tilted)


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


def _after_the_end(texts: Sequence[Text], case: _Case) -> list[Check]:
    """Nothing but end tokens may follow an end token."""

    def overruns(text: Text) -> bool:
        stop = next((place for place, token in enumerate(text) if token in case.ends), len(text))
        return any(token not in case.ends for token in text[stop:])

    wrong = sum(map(overruns, texts))
    planted = (case.ends[0], next(token for token in range(len(case.ends) + 1) if token not in case.ends))
    ended = sum(case.ends[0] in text for text in case.clean(texts))
    detail = f"{wrong} texts go on after their end token; {ended} ended"
    return [Check("end of text", 0.0 if wrong else 1.0, overruns(planted), detail)]


def _smallest(case: _Case, found: Audit, simpler: Sequence[Setting], seed: int) -> Smallest | None:
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
            tried = _Case(draw, setting.law, prompt, case.length, case.ends, case.opaque)
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


# Which known bug it resembles -----------------------------------------------------------------------------------

_Emit = Callable[[Text, Any], list[tuple[Any, Array]]]
"""Behind a text in some state of the round: states that follow, each with its part of the next token's probability."""


def _loop(
    case: _Case, outcomes: _Outcomes, drafts: _Drafts, mistake: Mistake | None, tokens: int, spare: int, late: bool
) -> _Emit:
    """A speculative loop with a mistake. spare: tokens never drafted at the end; late: nothing is drafted in round one."""
    right = mistake or RIGHT

    def start(length: int) -> tuple[int, int]:
        return 0, max(0, min(tokens, case.length - length - spare))

    def emit(text: Text, state: Any) -> list[tuple[Any, Array]]:
        place, drafted = state or ((0, 0) if late else start(0))
        p = outcomes.laws[text]
        if place >= drafted:
            return [(start(len(text) + 1), outcomes.laws[text[:-1]] if mistake is None and place else p)]
        with np.errstate(all="ignore"):
            accepted, replaced = right(p, drafts.law[text], drafts.raw[text], place)
        return [((place + 1, drafted), accepted), (start(len(text) + 1), replaced)]

    return emit


class _Drafts(NamedTuple):
    """The draft's law behind every text whose law is known, as drawn and before warping."""

    law: dict[Text, Array]
    raw: dict[Text, Array]


def _nearest(
    case: _Case, outcomes: _Outcomes, texts: Sequence[Text], drafting: Drafting | None, others: Mapping[str, Law], most: int = 3
) -> tuple[Likeness, ...]:
    """The known bugs whose law, computed for this very engine, is nearest to what was seen; nearer than the right one."""
    known: dict[str, list[dict[Text, float]]] = defaultdict(list)
    for name, law in others.items():
        rows = _behind(case, outcomes, law)
        known[name] = [outcomes.odds(case.length, lambda text, _, rows=rows: [(None, rows[text])])]     # type: ignore[misc]
    if drafting is not None:
        drawn = _behind(case, outcomes, drafting.law)
        drafts = _Drafts(drawn, _behind(case, outcomes, drafting.raw) if drafting.raw else drawn)
        counts = [drafting.tokens] if drafting.tokens else range(1, case.length + 1)
        for name, mistake in {**MISTAKES, NO_BONUS: None}.items():
            known[name] = [
                outcomes.odds(case.length, _loop(case, outcomes, drafts, mistake, count, spare, late))
                for count in counts for spare in (0, 1) for late in (False, True)
            ]  # fmt: skip
    seen = Counter(outcomes.cell(text, case.length) for text in texts)
    right = _distance(seen, outcomes.odds(case.length))
    ranked = []
    for name, laws in known.items():
        distance, best = min(((_distance(seen, law), law) for law in laws), key=lambda pair: pair[0])
        ranked.append((distance, name, best))
    ranked.sort(key=lambda entry: entry[:2])
    found: list[Likeness] = []
    told: list[dict[Text, float]] = []
    for distance, name, best in ranked:
        if len(found) < most and distance < 0.7 * right and all(_apart(best, other) > 1e-9 for other in told):
            told.append(best)
            cells = sorted(best.keys() | seen.keys())
            expected = np.array([best.get(cell, 0.0) for cell in cells])
            found.append(Likeness(name, distance, g_test([seen[cell] for cell in cells], expected / expected.sum()).p_value))
    return tuple(found)


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


def _behind(case: _Case, outcomes: _Outcomes, law: Law) -> dict[Text, Array]:
    """`law` behind every text of the tree, level by level."""
    found: dict[Text, Array] = {}
    for tokens in range(case.length):
        level = [text for text in outcomes.laws if len(text) == tokens]
        found |= dict(zip(level, case.rows(law, level), strict=True)) if level else {}
    return found


def _apart(one: Mapping[Text, float], other: Mapping[Text, float]) -> float:
    return sum(abs(one.get(cell, 0.0) - other.get(cell, 0.0)) for cell in one.keys() | other.keys()) / 2


def _distance(seen: Counter[Text], law: Mapping[Text, float]) -> float:
    return _apart({cell: count / seen.total() for cell, count in seen.items()}, law)


def _fields(found: Audit) -> dict[str, Any]:
    return {name: getattr(found, name) for name in Audit.__dataclass_fields__}


def _check_request(prompt: Sequence[int], length: int, samples: int) -> None:
    if not prompt:
        raise BadInput("the prompt is empty; give at least one token")
    if length < 1:
        raise BadInput(f"length was {length}; test at least 1 token")
    if samples < FEWEST:
        raise BadInput(f"samples was {samples}; take at least {FEWEST}, which see a distance of {detectable(FEWEST, 8):.2f}")
