"""Computes figures from trials: comparisons of texts, speeds with intervals; a table, JSON."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from statistics import median
from typing import Any

import numpy as np
import psutil
import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from scipy.stats import bootstrap

from draftproof.bench.measure import PLAIN, Bench, Setting, Trial
from draftproof.model.device import Device, versions
from draftproof.requests.completion import first_difference
from draftproof.requests.stats import RoundStats


@dataclass(frozen=True)
class Interval:
    """A median and its 95 % percentile bootstrap interval; no bounds from fewer than two values."""

    median: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        if len(values) < 2 or min(values) == max(values):
            return cls(median(values))
        data, generator = (np.asarray(values),), np.random.default_rng(0)
        interval = bootstrap(
            data, np.median, method="percentile", rng=generator
        ).confidence_interval
        return cls(median(values), float(interval.low), float(interval.high))

    def __str__(self) -> str:
        bounds = f" ({self.low:.2f}–{self.high:.2f})" if self.low is not None else ""
        return f"{self.median:.2f}×{bounds}"


@dataclass(frozen=True)
class Figures:
    """The figures of one method under one setting; None if unknown.

    texts, same: the number of texts compared with plain decoding's, and of equal ones.
    first_difference: prompt and token, from 1. tokens_per_second: of all rows, including prompts;
    median of trials. speed_up: plain decoding's seconds per token divided by these, pair by pair:
    the median over rounds for each group of prompts, then over groups. first_token: seconds.
    """

    method: str
    setting: Setting
    texts: int
    same: int
    first_difference: tuple[int, int] | None
    tokens_per_second: float
    speed_up: Interval | None
    tokens_per_round: float | None
    acceptance: float | None
    acceptance_by_position: list[float]
    first_token: float | None


def compute(bench: Bench) -> list[Figures]:
    """The figures of each setting and method with trials, in order."""
    by_method: dict[tuple[Setting, str], list[Trial]] = {}
    for trial in bench.trials:
        by_method.setdefault((trial.setting, trial.method), []).append(trial)
    order = [(setting, method.name) for setting in bench.settings for method in bench.methods]
    return [
        _figures(by_method[key], by_method.get((key[0], PLAIN), []))
        for key in order
        if key in by_method
    ]


def _figures(trials: list[Trial], plain: list[Trial]) -> Figures:
    """Compare texts and seconds with those of plain decoding in the same round."""
    base = {(trial.round, trial.group): trial for trial in plain}
    pairs = [(trial, base[key]) for trial in trials if (key := (trial.round, trial.group)) in base]
    differ, ratios, stats = list[tuple[int, int]](), dict[int, list[float]](), RoundStats()
    for ours, theirs in pairs:
        ratio = theirs.seconds / theirs.count * ours.count / ours.seconds
        ratios.setdefault(ours.group, []).append(ratio)
        differ += [(ours.prompts[i] + 1, place) for i, text in enumerate(ours.tokens)
                   if (place := first_difference(text, theirs.tokens[i])) is not None]
    for trial in trials:
        stats.add(trial.stats)
    texts = sum(len(ours.tokens) for ours, _ in pairs)
    firsts = [trial.first_token for trial in trials if trial.first_token is not None]
    return Figures(
        trials[0].method, trials[0].setting, texts, texts - len(differ), min(differ, default=None),
        median(trial.count / trial.seconds for trial in trials),
        Interval.of([median(values) for values in ratios.values()]) if ratios else None,
        stats.tokens_per_round if stats.rounds else None,
        stats.acceptance if stats.drafted else None, stats.acceptance_by_position,
        median(firsts) if firsts else None)


def machine_facts(device: torch.device) -> dict[str, object]:
    """The conditions on which figures depend besides the models."""
    return versions() | {
        "device": f"{Device(device).name} ({device}, {torch.get_num_threads()} threads)",
        "cores": psutil.cpu_count(logical=False), "load_average": psutil.getloadavg()[0],
        "memory_gib": psutil.virtual_memory().total / 2**30, "system": platform.platform()}


def table(figures: Sequence[Figures], title: str) -> Table:
    """All settings in one table that fits 80 columns."""
    shown = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0, pad_edge=False)
    shown.add_column("", overflow="fold", min_width=18)
    for name in ("tokens/s", "speed-up (95 %)", "tokens/\nround", "accep-\nted", "first\nms",
                 "same\ntext"):
        shown.add_column(name, justify="right", no_wrap=True, vertical="bottom")
    for setting, group in groupby(figures, key=lambda figure: figure.setting):
        shown.add_row(f"[dim]{setting}[/]")
        for figure in group:
            first = 1000 * figure.first_token if figure.first_token is not None else None
            numbers = ((figure.tokens_per_second, "{:.1f}"), (figure.speed_up, "{}"),
                       (figure.tokens_per_round, "{:.2f}"), (figure.acceptance, "{:.0%}"),
                       (first, "{:.0f}"), (f"{figure.same}/{figure.texts}", "{}"))
            cells = ["" if value is None else form.format(value) for value, form in numbers]
            shown.add_row(f"  {figure.method}", *cells)
    return shown


def notes(figures: Sequence[Figures], about: Mapping[str, Any]) -> list[str]:
    """Notes to the table, in lines, with differences first."""
    differ = [f"{figure.method}, {figure.setting}: differs from plain decoding at token {place[1]} "
              f"of prompt {place[0]}" for figure in figures if (place := figure.first_difference)]
    run = "{workload}, {new_tokens} new tokens, {rounds} rounds; {machine[device]}"
    return [*differ, *about["quantised"], run.format(**about)]


def as_json(bench: Bench, figures: Sequence[Figures], about: Mapping[str, object]) -> str:
    """All numbers: the conditions, figures, and trials with their tokens."""
    body = {"about": about, "figures": [asdict(figure) for figure in figures],
            "trials": [asdict(trial) for trial in bench.trials]}
    return json.dumps(body, indent=1, default=str) + "\n"
