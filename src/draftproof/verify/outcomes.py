"""What an engine under examination is asked, what may come of it, and the test of what came.

Knows samplers as functions and laws as tables; knows nothing of bugs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from draftproof.errors import BadInput
from draftproof.verify.bug_catalog import Array, normal
from draftproof.verify.statistics import FALSE_ALARM, GTest, g_test

Text = tuple[int, ...]
Law = Callable[[Sequence[Text]], Array]
"""Next-token probabilities [n, V] behind `n` texts of one length, the prompt included."""
Emit = Callable[[Text, Any], list[tuple[Any, Array]]]
"""Behind a text in some state of the round: states that follow, each with its part of the next token's probability."""
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


class Sampler(Protocol):
    """The engine under examination: `n` continuations of `prompt`, as new token ids; end tokens may be left out."""

    def __call__(self, prompt: list[int], n: int, seed: int) -> list[list[int]]: ...


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


@dataclass(frozen=True)
class Case:
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

    def outcomes(self, samples: int) -> Outcomes:
        """The tree of what may come, cut where it becomes rare."""
        found = Outcomes(self.length)
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
class Outcomes:
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

    def odds(self, tokens: int, emit: Emit | None = None) -> dict[Text, float]:
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
