"""Audit: does an engine draw from the distribution it should? If not, how far is it off?

Short texts are drawn and compared with the exact distribution of the model, prefix by prefix.

    found = audit(sample, law, prompt=[1, 2, 3])
    print(found.biased, found.joint.tv)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from draftproof.errors import BadInput
from draftproof.verify import statistics
from draftproof.verify.statistics import FALSE_ALARM, POWER, Array, GTest, g_test, too_equal

Text = tuple[int, ...]
Law = Callable[[Sequence[Text]], Array]
"""Next-token probabilities [n, V] behind `n` texts of one length, the prompt included."""
Draw = Callable[[list[int], int, int], list[list[int]]]
"""The engine: ``draw(prompt, n, seed)`` gives `n` continuations as new token ids."""

RARE, IMPOSSIBLE, CUT = -1, -2, -3
"""In the place of a token: a rare one, one of probability zero, none although nothing had ended."""
FEWEST, CHUNK, KEEP, CONTEXTS = 200, 100, 20, 512
"""Samples at least; samples per call; expected count from which an outcome has a cell of its own;
texts behind which the law is asked for."""


class Check(NamedTuple):
    """One test. control: the same test on samples made wrong on purpose, which must fail."""

    name: str
    p_value: float
    control: bool
    detail: str = ""
    test: GTest | None = None

    @property
    def passed(self) -> bool:
        return self.p_value >= FALSE_ALARM


@dataclass(frozen=True)
class Audit:
    """What an examination found."""

    checks: tuple[Check, ...]
    samples: int
    length: int
    prompt: Text

    @property
    def biased(self) -> bool:
        return not all(check.passed for check in self.checks)

    @property
    def joint(self) -> GTest:
        """The G-test of the longest texts."""
        return [check.test for check in self.checks if check.test is not None][-1]

    @property
    def false_alarm(self) -> float:
        """How often a correct engine is accused by any of the checks, at most."""
        return FALSE_ALARM * len(self.checks)

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        tests = [
            {**check._asdict(), "passed": check.passed, "test": check.test and check.test._asdict()}
            for check in self.checks
        ]
        verdict = {"verdict": "biased" if self.biased else "unbiased", "power": POWER}
        joint = {**self.joint._asdict(), "false_alarm": self.false_alarm}
        return {**verdict, **joint, **asdict(self), "checks": tests}


def audit(
    sampler: Any, law: Law, prompt: Sequence[int], *, length: int = 3, samples: int = 4000,
    seed: int = 0, ends: Sequence[int] = (), opaque: frozenset[int] = frozenset(),
    at_once: int = CHUNK,
) -> Audit:
    """Draw `samples` continuations of `length` tokens and test them against the law.

    sampler: a `Draw`, or an object with a method `sample` like it. ends: end tokens, which count as
    one. opaque: tokens behind which the law is not known (several share one name). at_once: samples
    per call. Raises BadInput if the request cannot be judged, too few samples included.
    """
    if not prompt:
        raise BadInput("the prompt is empty; give at least one token")
    if length < 1:
        raise BadInput(f"length was {length}; test at least 1 token")
    if samples < FEWEST:
        seen = f"which see a distance of {statistics.detectable(FEWEST, 8):.2f}"
        raise BadInput(f"samples was {samples}; take at least {FEWEST}, {seen}")
    draw: Draw = getattr(sampler, "sample", sampler)
    outcomes = Outcomes(law, tuple(prompt), length, samples, tuple(ends), opaque)
    texts: list[Text] = []
    while len(texts) < samples:
        n = min(at_once, samples - len(texts))
        texts += _asked(draw, list(prompt), n, seed + len(texts) // at_once)
    clean = [outcomes.clean(text) for text in texts]
    checks = [outcomes.check(clean, tokens, seed) for tokens in range(1, length + 1)]
    checks += [*_repeats(texts, at_once), *([_after_the_end(texts, ends)] if ends else [])]
    for check in checks:
        if not check.control:
            more = f"the control of {check.name!r} passes; take at least {4 * samples}"
            raise BadInput(f"{samples} samples are too few: {more}")
    return Audit(tuple(checks), samples, length, tuple(prompt))


def _asked(draw: Draw, prompt: list[int], n: int, seed: int) -> list[Text]:
    """One call of the sampler, its answer checked."""
    came = draw(prompt, n, seed)
    try:
        texts = [tuple(int(token) for token in text) for text in came]
    except (TypeError, ValueError) as error:
        kind = type(came).__name__
        raise BadInput(f"the sampler must return lists of token ids; it returned {kind}") from error
    if len(texts) != n:
        raise BadInput(f"the sampler was asked for {n} texts and returned {len(texts)}")
    return texts


class Outcomes:
    """What may come behind a prompt, cut where it becomes rare.

    laws: next-token probabilities by text. mass: of the texts that have a cell of their own; where
    a text leaves them, its cell ends in RARE or IMPOSSIBLE.
    """

    def __init__(
        self, law: Law, prompt: Text, length: int, samples: int, ends: Text,
        opaque: frozenset[int],
    ) -> None:
        self.length, self.ends = length, ends
        self.laws: dict[Text, Array] = {}
        self.mass: dict[Text, float] = {(): 1.0}
        level: list[Text] = [()]
        while level:
            rows = np.asarray(law([prompt + text for text in level]), float).copy()      # [n, V]
            if len(ends) > 1:                                       # one end token stands for all
                rows[:, ends[0]] = rows[:, list(ends)].sum(1)
                rows[:, list(ends[1:])] = 0
            below: list[Text] = []
            for text, row in zip(level, rows, strict=True):
                if abs(row.sum() - 1) > 1e-4:
                    said = f"behind {text} it sums to {row.sum():g}"
                    raise BadInput(f"the law must sum to one; {said}")
                self.laws[text] = row / row.sum()
                for token in np.flatnonzero(self.mass[text] * row * samples >= KEEP).tolist():
                    self.mass[*text, token] = self.mass[text] * float(self.laws[text][token])
                    if len(text) + 1 < length and token not in {*ends, *opaque}:
                        below.append((*text, token))
            below.sort(key=lambda text: -self.mass[text])
            level = below[: CONTEXTS - len(self.laws)]

    def clean(self, text: Text) -> Text:
        """A text up to its end or `length`; one end token stands for all, and for none."""
        stop = next((place for place, token in enumerate(text) if token in self.ends), None)
        if stop is not None:
            return (*text[:stop], self.ends[0])[: self.length]
        if len(text) < self.length:
            return (*text, self.ends[0] if self.ends else CUT)
        return text[: self.length]

    def cell(self, text: Text, tokens: int) -> Text:
        """The cell of the first `tokens` tokens of a text."""
        for place, token in enumerate(text[:tokens]):
            law = self.laws.get(text[:place])
            if law is None:
                return text[:place]
            if not 0 <= token < len(law) or law[token] == 0:
                return (*text[:place], IMPOSSIBLE)
            if text[: place + 1] not in self.mass:
                return (*text[:place], RARE)
        return text[:tokens]

    def cells(self, tokens: int) -> dict[Text, float]:
        """Probability of every cell of the first `tokens` tokens."""
        cells = {(*text, RARE): self.mass[text] for text in self.laws if len(text) < tokens}
        for text, mass in self.mass.items():
            if 0 < len(text) <= tokens:
                cells[*text[:-1], RARE] -= mass
                if len(text) == tokens or text not in self.laws:
                    cells[text] = mass
        return {cell: max(0.0, mass) for cell, mass in cells.items()}

    def check(self, texts: Sequence[Text], tokens: int, seed: int) -> Check:
        """The G-test of the first `tokens` tokens; its control is a law as wrong as it detects."""
        law, seen = self.cells(tokens), Counter(self.cell(text, tokens) for text in texts)
        cells = sorted(law.keys() | seen.keys())
        expected = np.array([law.get(cell, 0.0) for cell in cells])
        expected /= expected.sum()
        test = g_test([seen[cell] for cell in cells], expected)
        tilted = _tilted(expected, 1.2 * test.detects)
        wrong = np.random.default_rng(seed).multinomial(len(texts), tilted)
        seen_wrong = test.cells < 2 or not g_test(wrong, expected).passed
        name = "first token" if tokens == 1 else f"first {tokens} tokens"
        return Check(name, test.p_value, seen_wrong, f"{test.cells} cells", test)


def _tilted(law: Array, tv: float) -> Array:
    """A law at this distance: half of the mass gains what the other half loses, hardest to see."""
    order = np.argsort(law)                             # the smaller part gains: it stays positive
    gains = np.zeros(len(law), bool)
    gains[order[np.cumsum(law[order]) <= 0.5]] = True
    mass = float(law[gains].sum())
    if not 0 < mass < 1:
        return law
    moved = min(tv, 1 - mass)
    tilted = np.where(gains, law * (1 + moved / mass), law * (1 - moved / (1 - mass)))
    return np.asarray(tilted / tilted.sum())


def _repeats(texts: Sequence[Text], at_once: int) -> list[Check]:
    """Do neighbours, or calls with different seeds, repeat each other more often than by chance?"""
    equal = sum(count * (count - 1) for count in Counter(texts).values())
    rate = equal / (len(texts) * (len(texts) - 1))
    if rate > 0.9:
        return []                                       # nearly always the same text
    starts = range(0, len(texts) - at_once + 1, at_once)
    calls = [texts[start : start + at_once] for start in starts]
    pairs_of = {
        "neighbours": list(zip(texts[::2], texts[1::2], strict=False)),
        "calls with different seeds": [
            pair for one, two in zip(calls[::2], calls[1::2], strict=False)
            for pair in zip(one, two, strict=True)
        ],
    }
    control = too_equal(len(texts) // 2, len(texts) // 2, rate) < FALSE_ALARM
    checks = []
    for name, pairs in pairs_of.items():
        same = sum(one == two for one, two in pairs)
        detail = f"{same} of {len(pairs)} pairs are the same, {rate * len(pairs):.1f} expected"
        p_value = too_equal(same, len(pairs), rate)
        checks.append(Check(f"independence of {name}", p_value, control, detail))
    return checks


def _after_the_end(texts: Sequence[Text], ends: Sequence[int]) -> Check:
    """Nothing but end tokens may follow an end token."""
    def overruns(text: Text) -> bool:
        stop = next((place for place, token in enumerate(text) if token in ends), len(text))
        return any(token not in ends for token in text[stop:])

    wrong = sum(map(overruns, texts))
    detail = f"{wrong} texts go on after their end token"
    return Check("end of text", float(not wrong), overruns((ends[0], CUT)), detail)
