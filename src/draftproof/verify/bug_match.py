"""Which known bug a biased engine resembles: laws of speculative loops with one mistake each, computed for this very engine."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from draftproof.verify.bug_catalog import MISTAKES, NO_BONUS, RIGHT, Array, Mistake
from draftproof.verify.outcomes import Case, Emit, Law, Outcomes, Text
from draftproof.verify.statistics import g_test


class Drafting(NamedTuple):
    """What is known of the drafts, to name a bug: their law as drawn and before any warping, and tokens per round."""

    law: Law
    raw: Law | None = None
    tokens: int | None = None


class Likeness(NamedTuple):
    """A known bug, how far its law is from what was seen, and the G-test of what was seen against it (high: explained)."""

    bug: str
    tv: float
    p_value: float


def nearest(
    case: Case, outcomes: Outcomes, texts: Sequence[Text], drafting: Drafting | None, others: Mapping[str, Law], most: int = 3
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


def _loop(
    case: Case, outcomes: Outcomes, drafts: _Drafts, mistake: Mistake | None, tokens: int, spare: int, late: bool
) -> Emit:
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


def _behind(case: Case, outcomes: Outcomes, law: Law) -> dict[Text, Array]:
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
