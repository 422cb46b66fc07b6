"""From trials to figures: speeds, paired ratios with intervals, acceptance, waits. Pure functions on what was recorded."""

from __future__ import annotations

import statistics
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import bootstrap

from draftproof.bench.measure import Bench, Setting, Trial
from draftproof.engine.stats import RoundStats

PLAIN, GENERATE = "plain", "transformers"
"""Names of the ways that others are compared with."""
CONFIDENCE = 0.95
Values = np.ndarray[Any, np.dtype[np.float64]]


class Ratio(NamedTuple):
    """Sum over sum, and its 95 % interval over the pairs."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, ours: list[float], plain: list[float]) -> Ratio:
        def of_sums(mine: Values, theirs: Values, axis: int = -1) -> Values:
            ratio: Values = np.sum(mine, axis=axis) / np.sum(theirs, axis=axis)
            return ratio

        data = (np.array(ours), np.array(plain))
        found = bootstrap(data, of_sums, paired=True, vectorized=True, method="percentile", rng=np.random.default_rng(0))
        return cls(float(of_sums(*data)), float(found.confidence_interval.low), float(found.confidence_interval.high))


@dataclass(frozen=True)
class Interval:
    """A median and where it lies with 95 % confidence; no bounds from fewer than two values."""

    median: float
    low: float | None = None
    high: float | None = None

    @property
    def bounds(self) -> str:
        return f"{self.low:.2f}–{self.high:.2f}" if self.low is not None else ""

    def __str__(self) -> str:
        return f"{self.median:.2f}×" + (f" ({self.bounds})" if self.bounds else "")


@dataclass(frozen=True)
class Sameness:
    """Texts compared with those of plain decoding. first: prompt and token, from 1, of the first difference."""

    compared: int
    same: int
    first: tuple[int, int] | None = None


@dataclass(frozen=True)
class Category:
    """One category's share of a way's rounds."""

    prompts: int
    tokens_per_round: float
    acceptance: float | None
    speed_up: float | None


@dataclass(frozen=True)
class Ceiling:
    """What the forwards alone allow: seconds per round of each, the speed they give, and how much of it was reached.

    efficiency: the part of the time that the forwards of a trial take alone, measured right behind it.
    """

    verify_seconds: float
    draft_seconds: float
    tokens_per_second: float
    decoding_tokens_per_second: float
    efficiency: Interval


@dataclass(frozen=True)
class Figures:
    """One way under one setting. Seconds unless the name says otherwise; None is what could not be told.

    tokens_per_second: all rows together, the prompt's reading included. speed_up, against_generate: of seconds per
    token, pair by pair, a pair being one group of prompts. against_one_row: of tokens per second, turn by turn. waits:
    before a token as a user sees chunks, so that a token that came with the one before waited for nothing; percentiles
    50, 95 and 99.
    """

    way: str
    setting: Setting
    trials: int
    texts: Sameness | None
    tokens_per_second: float
    speed_up: Interval | None
    against_generate: Interval | None
    against_one_row: Interval | None
    tokens_per_round: float
    rounds_by_tokens: dict[int, int]
    acceptance: float | None
    acceptance_by_position: list[float]
    categories: dict[str, Category]
    first_token: float
    waits: tuple[float, float, float] | None
    seconds_per_token: dict[str, float] | None
    weights: int
    memory: int | None
    joules_per_token: float | None
    cost_per_million: float | None
    ceiling: Ceiling | None


def figures(bench: Bench, categories: Sequence[str], price_per_hour: float | None = None) -> list[Figures]:
    """Of every way under every setting that has trials. categories: of each prompt, "" for none."""
    trials: dict[tuple[str, Setting], list[Trial]] = {}
    for trial in bench.trials:
        trials.setdefault((trial.way, trial.setting), []).append(trial)
    found = []
    for setting in bench.settings:
        plain, generate = trials.get((PLAIN, setting), []), trials.get((GENERATE, setting), [])
        for way in bench.able(setting):
            if (key := (way.name, setting)) in trials:
                alone = trials.get((way.name, setting._replace(batch=1)), []) if setting.batch > 1 else []
                memory = bench.memory.get(key)
                found.append(_figures(trials[key], plain, generate, alone, categories, way.weights, memory, price_per_hour))
    return found


def _figures(
    trials: Sequence[Trial],
    plain: Sequence[Trial],
    generate: Sequence[Trial],
    alone: Sequence[Trial],
    categories: Sequence[str],
    weights: int,
    memory: int | None,
    price: float | None,
) -> Figures:
    way, texts = trials[0].way, [text for trial in trials for text in trial.texts]
    rounds = Counter(tokens for text in texts for tokens in text.rounds)
    stats = _added(text.stats for text in texts)
    drafts = stats is not None and stats.drafted > 0
    speed = statistics.median(trial.tokens / trial.seconds for trial in trials)
    spent = [trial.joules for trial in trials if trial.joules is not None]
    return Figures(
        way=way,
        setting=trials[0].setting,
        trials=len(trials),
        texts=compared(trials, plain) if way != PLAIN else None,
        tokens_per_second=speed,
        speed_up=speed_up(trials, plain) if way != PLAIN else Interval(1.0),
        against_generate=speed_up(trials, generate),
        against_one_row=throughput_ratio(trials, alone),
        tokens_per_round=_mean(rounds),
        rounds_by_tokens=dict(sorted(rounds.items())),
        acceptance=stats.acceptance if stats is not None and drafts else None,
        acceptance_by_position=stats.acceptance_by_position if stats is not None and drafts else [],
        categories=by_category(trials, plain, categories),
        first_token=statistics.median(text.chunks[0].at for trial in trials for text in trial.first),
        waits=waits(trials),
        seconds_per_token=_by_part(trials),
        weights=weights,
        memory=memory,
        joules_per_token=sum(spent) / sum(trial.tokens for trial in trials) if len(spent) == len(trials) else None,
        cost_per_million=price / 3600 / speed * 1e6 if price is not None else None,
        ceiling=ceiling(trials),
    )


def compared(trials: Sequence[Trial], plain: Sequence[Trial]) -> Sameness | None:
    """Every text with what plain decoding first wrote for that prompt."""
    wrote: dict[int, list[int]] = {}
    for trial in plain:
        for prompt, text in zip(trial.prompts, trial.texts, strict=True):
            wrote.setdefault(prompt, text.tokens)
    pairs = [
        (prompt, text.tokens, wrote[prompt])
        for trial in trials
        for prompt, text in zip(trial.prompts, trial.texts, strict=True)
        if prompt in wrote
    ]
    differ = [(prompt + 1, place) for prompt, ours, theirs in pairs if (place := first_difference(ours, theirs)) is not None]
    return Sameness(len(pairs), len(pairs) - len(differ), min(differ, default=None)) if pairs else None


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """The first token, counted from 1, at which two texts differ; None if they are identical."""
    if list(ours) == list(theirs):
        return None
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False), 1) if a != b), min(len(ours), len(theirs)) + 1)


def speed_up(trials: Sequence[Trial], base: Sequence[Trial], prompts: Sequence[int] | None = None) -> Interval | None:
    """How many times fewer seconds per token: per group the median over turns of paired ratios, then their median.

    prompts: only groups all of whose prompts are among these.
    """
    theirs = {(trial.turn, trial.group): trial for trial in base}
    ratios: dict[int, list[float]] = {}
    for trial in trials:
        pair = theirs.get((trial.turn, trial.group))
        if pair is not None and (prompts is None or set(trial.prompts) <= set(prompts)):
            ratio = (pair.seconds / pair.tokens) / (trial.seconds / trial.tokens)
            ratios.setdefault(trial.group, []).append(ratio)
    return interval([statistics.median(some) for some in ratios.values()]) if ratios else None


def throughput_ratio(trials: Sequence[Trial], base: Sequence[Trial]) -> Interval | None:
    """How many times the tokens per second: the median over turns that both have, all prompts of a turn together."""
    ours, theirs = _throughputs(trials), _throughputs(base)
    ratios = [ours[turn] / theirs[turn] for turn in ours if turn in theirs]
    return interval(ratios) if ratios else None


def _throughputs(trials: Sequence[Trial]) -> dict[int, float]:
    """Tokens per second of each turn."""
    sums: dict[int, tuple[int, float]] = {}
    for trial in trials:
        tokens, seconds = sums.get(trial.turn, (0, 0.0))
        sums[trial.turn] = tokens + trial.tokens, seconds + trial.seconds
    return {turn: tokens / seconds for turn, (tokens, seconds) in sums.items()}


def interval(values: Sequence[float]) -> Interval:
    """The median, and a percentile bootstrap interval of it."""
    median = statistics.median(values)
    if len(values) < 2:
        return Interval(median)
    if min(values) == max(values):
        return Interval(median, median, median)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = bootstrap(
            (np.asarray(values),), np.median, confidence_level=CONFIDENCE, n_resamples=9999, method="percentile",
            random_state=np.random.default_rng(0),
        ).confidence_interval  # fmt: skip
    return Interval(median, float(found.low), float(found.high))


def waits(trials: Iterable[Trial]) -> tuple[float, float, float] | None:
    """Percentiles 50, 95 and 99 of the seconds before each token but the first chunk's, as a user sees chunks."""
    found: list[float] = []
    for trial in trials:
        for text in trial.texts:
            for before, chunk in zip(text.chunks, text.chunks[1:], strict=False):
                found += [chunk.at - before.at, *[0.0] * (chunk.tokens - 1)]
    if not found:
        return None
    low, high, highest = np.percentile(found, (50, 95, 99))
    return float(low), float(high), float(highest)


def ceiling(trials: Sequence[Trial]) -> Ceiling | None:
    """The speed of rounds that take their bare forwards and nothing else, and the part of it that rounds reached.

    Both speeds are of all rows together, without the reading of prompts. The part is taken pair by pair, of each trial whose
    forwards were measured behind it, so that a machine that changes its speed changes both: per group the median over
    turns, then their median.
    """
    rounds, speeds, parts = 0, list[float](), dict[int, list[float]]()
    for trial in trials:
        emitted, reads = sum(sum(text.rounds) for text in trial.texts), sum(trial.reads.get("target", {}).values())
        rounds += reads
        if trial.parts is not None and emitted and trial.seconds > trial.parts["prefill"]:
            decoding = trial.seconds - trial.parts["prefill"]
            speeds.append(emitted / decoding)
            if trial.bare is not None:
                parts.setdefault(trial.group, []).append(reads * sum(trial.bare) / decoding)
    if not parts or not rounds:
        return None
    bare = [trial.bare for trial in trials if trial.bare is not None]
    verify, draft = statistics.median(one.verify for one in bare), statistics.median(one.draft for one in bare)
    per_round = sum(sum(text.rounds) for trial in trials for text in trial.texts) / rounds
    efficiency = interval([statistics.median(some) for some in parts.values()])
    return Ceiling(verify, draft, per_round / (verify + draft), statistics.median(speeds), efficiency)


def by_category(trials: Sequence[Trial], plain: Sequence[Trial], categories: Sequence[str]) -> dict[str, Category]:
    """Each category on its own; its speed-up only where whole groups belong to it."""
    found = {}
    for name in dict.fromkeys(category for category in categories if category):
        members = [prompt for prompt, category in enumerate(categories) if category == name]
        texts = [
            text
            for trial in trials
            for prompt, text in zip(trial.prompts, trial.texts, strict=True)
            if prompt in members
        ]
        if texts:
            stats = _added(text.stats for text in texts)
            ratio = speed_up(trials, plain, members)
            found[name] = Category(
                len(members),
                _mean(Counter(tokens for text in texts for tokens in text.rounds)),
                stats.acceptance if stats is not None and stats.drafted else None,
                ratio.median if ratio else None,
            )
    return found


def _added(several: Iterable[RoundStats | None]) -> RoundStats | None:
    """The sum of statistics; None if any is missing."""
    total = RoundStats()
    for one in several:
        if one is None:
            return None
        total.add(one)
    return total


def _mean(counts: Counter[int]) -> float:
    return sum(tokens * count for tokens, count in counts.items()) / max(1, counts.total())


def _by_part(trials: Sequence[Trial]) -> dict[str, float] | None:
    """Seconds per token of all rows together, by part: medians over trials."""
    told = [(parts, trial.tokens) for trial in trials if (parts := trial.parts) is not None]
    if len(told) < len(trials):
        return None
    return {part: statistics.median(parts[part] / tokens for parts, tokens in told) for part in told[0][0]}
