"""What a bench leaves behind: tables, JSON with every number, one page of HTML. Knows no models and draws nothing."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from draftproof.bench.figures import GENERATE, PLAIN, Category, Figures, Interval
from draftproof.bench.measure import Bench, Setting, Shape, Trial
from draftproof.engine.cost_curve import CostCurve

FORMAT = 2
"""Of the JSON; it grows when a field changes its meaning."""
NEVER = "–"
"""Stands where a figure could not be told."""
BROAD = 1400
"""Pixels beyond which a picture takes the whole width of the page."""
POSITIONS = 10
"""Draft positions shown in a table; JSON has all."""


class Grid(NamedTuple):
    """A table: what it shows, its columns (a title may have several lines), its rows; the first column names the way."""

    title: str
    columns: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Report:
    """Everything that was measured, and where.

    about: model, drafters, prompts and other settings as they were asked for. costs: by rows, what reads of several
    nodes take. interrupted: some runs are missing.
    """

    about: Mapping[str, Any]
    machine: Mapping[str, Any]
    bench: Bench
    figures: Sequence[Figures]
    costs: Mapping[int, CostCurve]
    interrupted: bool = False

    @property
    def name(self) -> str:
        """The model, and that it was made heavier if it was."""
        heavier = self.about.get("inflated_to")
        return f"{self.about['model']}, inflated to {heavier}" if heavier else str(self.about["model"])

    @property
    def settings(self) -> list[Setting]:
        """Those with figures."""
        return list(dict.fromkeys(figures.setting for figures in self.figures))

    def of(self, setting: Setting) -> list[Figures]:
        return [figures for figures in self.figures if figures.setting == setting]

    def summary(self) -> Grid:
        """Every way under every setting: how many times as fast as plain decoding, and whether with the same text."""
        ways = dict.fromkeys(figures.way for figures in self.figures if figures.way != PLAIN)
        found = {(figures.way, figures.setting): _in_short(figures) for figures in self.figures}
        body = [[way, *(found.get((way, setting), "") for setting in self.settings)] for way in ways]
        return Grid(f"{self.name}: times as fast as plain decoding", ["", *(one.title for one in self.settings)], body)

    def tables(self, setting: Setting) -> list[Grid]:
        """Of one setting: speed, what a user waits for, where the time goes, what was accepted."""
        rows, title = self.of(setting), f"{self.name}: {setting.title}"
        grids = [
            _grid(f"{title}, {self._extent(rows)}", rows, _SPEED),
            _grid(f"{title}: what a user waits for, in ms, and what it takes", rows, _USE),
            _parts(f"{title}: where the time goes, in ms per token", rows),
            _positions(f"{title}: accepted, by position in the draft", rows),
            _categories(f"{title}: tokens per round by category, and accepted", rows),
        ]
        return [_without_empty(grid) for grid in grids if grid.rows]

    def notes(self) -> list[str]:
        """What must be said beside the figures."""
        found = []
        if self.interrupted:
            found.append(f"Interrupted: {len(self.bench.trials)} runs were measured, some are missing.")
        if self.about.get("inflated_to"):
            found.append(
                f"The model is inflated: blocks that add nothing make it as heavy as one of {self.about['inflated_to']} "
                "parameters. Its text, and what is accepted, are those of the small model."
            )
        found += [f"Quantised: {line}." for line in self.about.get("quantised", ())]
        for figures in self.figures:
            if figures.texts is not None and figures.texts.first is not None:
                found.append(self._difference(figures))
        for setting in self.bench.settings:
            unable = [way.name for way in self.bench.ways if way not in self.bench.able(setting)]
            found += [f"{name} cannot write {setting.batch} texts side by side and sat out." for name in unable]
        if self.bench.energy is not None and self.bench.energy.unreadable:
            found.append(f"Energy: unreadable, {self.bench.energy.unreadable}.")
        if (load := self.machine.get("load_average") or 0.0) > (self.machine["cores"] or 1):
            found.append(f"The machine was busy when this began: a load of {load:.1f} on {self.machine['cores']} cores.")
        if self.machine["device"] != "cpu":
            found.append("On an accelerator the parts are seconds of the host: queued work counts where it was waited for.")
        return list(dict.fromkeys(found))

    def as_json(self) -> str:
        """Everything, for machines."""
        body = {
            "format": FORMAT,
            "name": self.name,
            "interrupted": self.interrupted,
            "about": dict(self.about),
            "machine": dict(self.machine),
            "notes": self.notes(),
            "figures": [_machine_readable(figures) for figures in self.figures],
            "costs": {str(rows): asdict(curve) for rows, curve in self.costs.items()},
            "trials": [_trial(trial) for trial in self.bench.trials],
        }
        return json.dumps(body, indent=1, default=str, allow_nan=False) + "\n"

    def as_html(self, plots: Mapping[str, bytes]) -> str:
        """One page with the plots (PNG, by title) inside it."""
        title = f"draftproof bench: {self.name}"
        parts = [f"<header><h1>{_safe(self.name)}</h1><p>{_safe(self._where())}</p></header>"]
        parts.append(f"<div class=head>{_html_table(self.summary())}</div>")
        parts.append("<section class=plots>" + "".join(_figure(name, png) for name, png in plots.items()) + "</section>")
        for setting in self.settings:
            parts.append(f"<h2>{_safe(f'{self.name}: {setting.title}')}</h2>")
            parts += [_html_table(grid) for grid in self.tables(setting)]
        parts.append("<h2>Beside the figures</h2><ul>" + "".join(f"<li>{_safe(note)}" for note in self.notes()) + "</ul>")
        parts.append("<h2>How it was measured</h2><ul>" + "".join(f"<li>{_safe(line)}" for line in METHOD) + "</ul>")
        for heading, facts in (("Settings", self.about), ("Machine", self.machine)):
            parts.append(f"<h2>{heading}</h2>{_facts(facts)}")
        body = "\n".join(parts)
        return (
            f"<!doctype html>\n<html lang=en>\n<meta charset=utf-8>\n<meta name=viewport content='width=device-width'>\n"
            f"<title>{_safe(title)}</title>\n<style>{_STYLE}</style>\n<main>\n{body}\n</main>\n</html>\n"
        )

    def _extent(self, rows: Sequence[Figures]) -> str:
        count, turns = len(self.bench.prompts), self.bench.turns
        return f"{count} prompt{'s' * (count != 1)} × {self.bench.new_tokens} tokens × {turns} turn{'s' * (turns != 1)}"

    def _where(self) -> str:
        machine = self.machine
        return (
            f"{self.about['workload']} · {self.about['dtype']} on {machine['device_name']} · {machine['threads']} of "
            f"{machine['cores']} cores · {self.about['date']}"
        )

    def _difference(self, figures: Figures) -> str:
        """Where a text first differs, and why that may be."""
        assert figures.texts is not None and figures.texts.first is not None
        prompt, token = figures.texts.first
        said = f"{figures.way}, {figures.setting.title}: differs from plain at token {token} of prompt {prompt}"
        if figures.way.startswith(GENERATE) and figures.setting.temperature > 0:
            return f"{said}; transformers draws with random numbers of its own."
        if self.about.get("acceptance", "match") != "match" and figures.setting.temperature > 0:
            return f"{said}; with --acceptance {self.about['acceptance']} it is the law that is the same."
        if self.about["dtype"] in ("bfloat16", "float16"):
            return f"{said}; in {self.about['dtype']} a near-tie may fall either way when the shape of a forward changes."
        return f"{said}."


METHOD = (
    "All ways run in one process, on the same prompts with the same seeds. Each prompt (each group of prompts, with a batch) "
    "is written by every way in turn, and the order of the ways turns by one place from group to group, so that a change of "
    "the machine's speed hits all alike; with several batches or temperatures, their prompts are mixed in each turn. Each way "
    "first runs twice untimed.",
    "Texts are compared before speeds: every text with what plain decoding wrote for that prompt, token by token.",
    "Tokens per second: new tokens over wall time, the reading of the prompt included; the median over runs.",
    "Speed-up: seconds per new token of plain decoding over those of the drafter, the same prompt in the same turn; the median "
    "over turns for each prompt, then the median over prompts, with a 95 % percentile bootstrap interval over prompts.",
    "Against one row: tokens per second of all prompts of a turn, over those of the same way with batch 1 in that turn; the "
    "median over turns, with an interval over turns.",
    "Tokens per round: tokens emitted per forward of the target, the last round included, the prompt's forward not. Accepted: "
    "of the draft positions that were reached, the share that stood.",
    "First token, waits: when a user sees tokens, from the call on. Tokens of one round come together: the first of them "
    "waited, the others did not. Percentiles are over tokens.",
    "Ceiling: tokens per round over the seconds of the bare forwards (the target's, and the draft model's or heads') at the "
    "very shapes that rounds used, each measured alone right behind a run, as often as that takes at most a fifth of the time. "
    "Reached: the bare forwards of a run over that run, prompts excluded; median and interval as for the speed-up.",
    "Memory: bytes of all weights, and the highest point of a run above what was held before it.",
)


_Cell = Callable[[Figures], str]


def _percent(value: float | None) -> str:
    return NEVER if value is None else f"{100 * value:.0f} %"


def _milli(value: float | None) -> str:
    return NEVER if value is None else f"{1000 * value:.2f}" if value < 0.1 else f"{1000 * value:.0f}"


def _speed(value: float) -> str:
    return f"{value:.0f}" if value >= 20 else f"{value:.2f}" if value < 2 else f"{value:.1f}"


def _same(figures: Figures) -> str:
    texts = figures.texts
    return "" if texts is None else "yes" if texts.same == texts.compared else f"{texts.same} of {texts.compared}"


def _in_short(figures: Figures) -> str:
    same = "" if figures.texts is None else "same text" if figures.texts.first is None else f"{_same(figures)} texts the same"
    return f"{figures.speed_up or NEVER}, {same}" if same else str(figures.speed_up or NEVER)


_SPEED: dict[str, _Cell] = {
    "same\ntext": _same,
    "tokens/s": lambda figures: _speed(figures.tokens_per_second),
    "speed-up": lambda figures: NEVER if figures.speed_up is None else f"{figures.speed_up.median:.2f}×",
    "95 %": lambda figures: "" if figures.speed_up is None else figures.speed_up.bounds,
    "against\ngenerate": lambda figures: "" if figures.against_generate is None else f"{figures.against_generate.median:.2f}×",
    "against\none row": lambda figures: str(figures.against_one_row or ""),
    "tokens/\nround": lambda figures: f"{figures.tokens_per_round:.2f}",
    "accepted": lambda figures: "" if figures.acceptance is None else _percent(figures.acceptance),
}
_USE: dict[str, _Cell] = {
    "first\ntoken": lambda figures: _milli(figures.first_token),
    "wait\np50": lambda figures: _milli(figures.waits[0] if figures.waits else None),
    "p95": lambda figures: _milli(figures.waits[1] if figures.waits else None),
    "p99": lambda figures: _milli(figures.waits[2] if figures.waits else None),
    "MiB, weights\nand run": lambda figures: f"{figures.weights / 2**20:.0f} + "
    + (NEVER if figures.memory is None else f"{figures.memory / 2**20:.0f}"),
    "joules/\ntoken": lambda figures: "" if figures.joules_per_token is None else f"{figures.joules_per_token:.3g}",
    "cost/\nmillion": lambda figures: "" if figures.cost_per_million is None else f"{figures.cost_per_million:.3g}",
}


def _grid(title: str, rows: Sequence[Figures], cells: Mapping[str, _Cell]) -> Grid:
    return Grid(title, ["", *cells], [[figures.way, *(cell(figures) for cell in cells.values())] for figures in rows])


def _parts(title: str, rows: Sequence[Figures]) -> Grid:
    """Where the time of a token goes, and what the forwards alone would allow."""
    told = [(figures, figures.seconds_per_token) for figures in rows if figures.seconds_per_token is not None]
    names = list(told[0][1]) if told else []
    body = []
    for figures, parts in told:
        found = figures.ceiling
        most = [NEVER, NEVER, ""] if found is None else [_speed(found.tokens_per_second), *_reached(found.efficiency)]
        body.append([figures.way, *(_milli(parts[name]) for name in names), _milli(sum(parts.values())), *most])
    return Grid(title, ["", *names, "all", "ceiling,\ntokens/s", "reached", "95 %"], body)


def _reached(part: Interval) -> tuple[str, str]:
    bounds = "" if part.low is None or part.high is None else f"{100 * part.low:.0f}–{100 * part.high:.0f} %"
    return _percent(part.median), bounds


def _positions(title: str, rows: Sequence[Figures]) -> Grid:
    deepest = min(POSITIONS, max((len(figures.acceptance_by_position) for figures in rows), default=0))
    body = []
    for figures in rows:
        if shares := [_percent(share) for share in figures.acceptance_by_position[:deepest]]:
            body.append([figures.way, *shares, *[""] * (deepest - len(shares))])
    return Grid(title, ["", *map(str, range(1, deepest + 1))], body)


def _categories(title: str, rows: Sequence[Figures]) -> Grid:
    names = list(dict.fromkeys(name for figures in rows for name in figures.categories))
    if len(names) < 2:
        return Grid(title, [], [])
    body = []
    for figures in rows:
        if figures.way != PLAIN:
            body.append([figures.way, *(_category(figures.categories.get(name)) for name in names)])
    return Grid(title, ["", *names], body)


def _category(found: Category | None) -> str:
    if found is None:
        return ""
    return f"{found.tokens_per_round:.2f}" + (f" ({_percent(found.acceptance)})" if found.acceptance is not None else "")


def _without_empty(grid: Grid) -> Grid:
    """Less the columns in which nothing stands."""
    kept = [0, *(place for place in range(1, len(grid.columns)) if any(row[place] for row in grid.rows))]
    return Grid(grid.title, [grid.columns[place] for place in kept], [[row[place] for place in kept] for row in grid.rows])


def _machine_readable(figures: Figures) -> dict[str, Any]:
    body = asdict(figures)
    body["setting"] = figures.setting._asdict()
    body["waits"] = dict(zip(("p50", "p95", "p99"), figures.waits, strict=True)) if figures.waits else None
    return body


def _trial(trial: Trial) -> dict[str, Any]:
    body = asdict(trial)
    body["setting"] = trial.setting._asdict()
    del body["spent"]
    body["parts"] = trial.parts
    body["bare"] = trial.bare._asdict() if trial.bare is not None else None
    body["reads"] = {model: _shapes(shapes) for model, shapes in trial.reads.items()}
    return body


def _shapes(shapes: Mapping[Shape, int]) -> list[dict[str, int]]:
    return [{**shape._asdict(), "count": count} for shape, count in shapes.items()]


def _safe(text: str) -> str:
    return html.escape(text)


def _figure(name: str, png: bytes) -> str:
    data = base64.b64encode(png).decode()
    wide = " class=broad" if int.from_bytes(png[16:20]) > BROAD else ""
    return f"<figure{wide}><img alt='{_safe(name)}' src='data:image/png;base64,{data}'></figure>"


def _html_table(grid: Grid) -> str:
    head = "".join(f"<th>{_safe(name)}".replace("\n", "<br>") for name in grid.columns)
    body = "".join("<tr>" + "".join(f"<td>{_safe(cell)}" for cell in row) for row in grid.rows)
    title = grid.title.rpartition(": ")[2]
    return f"<h3>{_safe(title)}</h3><div class=wide><table><tr>{head}{body}</table></div>"


def _facts(facts: Mapping[str, Any]) -> str:
    def told(value: Any) -> str:
        if isinstance(value, Mapping):
            return " · ".join(f"{key} {told(inner)}" for key, inner in value.items())
        return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)

    there = [(key.replace("_", " "), told(value)) for key, value in facts.items() if value is not None]
    cells = "".join(f"<tr><td>{_safe(key)}<td>{_safe(value)}" for key, value in there)
    return f"<table class=facts>{cells}</table>"


_STYLE = (
    "body{font:15px/1.55 system-ui,-apple-system,'Segoe UI',sans-serif;color:#1f2328;background:#fff;margin:0}"
    "main{max-width:72rem;margin:2.5rem auto;padding:0 1.5rem}"
    "h1{font-size:1.7rem;margin:0}header p{color:#57606a;margin:.2rem 0 0}"
    "h2{font-size:1.2rem;margin:2.4rem 0 .6rem;border-bottom:1px solid #d8dee4;padding-bottom:.3rem}"
    "h3{font-size:.85rem;font-weight:600;color:#57606a;margin:1.3rem 0 .3rem}"
    "ul{padding-left:1.2rem}li{margin:.25rem 0}.head{margin:1.2rem 0;padding:.2rem 1rem .8rem;background:#f3f6fa}"
    ".head h3{margin-top:.8rem}.head td{border-color:#e2e8f0}.broad{grid-column:1/-1}"
    ".plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(26rem,1fr));gap:1.2rem;margin:1.6rem 0}"
    "figure{margin:0;border:1px solid #e4e8ec;border-radius:6px;padding:.6rem}img{width:100%;height:auto;display:block}"
    ".wide{overflow-x:auto}table{border-collapse:collapse;font-size:13.5px;font-variant-numeric:tabular-nums}"
    "th{text-align:right;font-weight:600;color:#57606a;padding:.25rem .8rem;border-bottom:1px solid #c9d1d9}"
    "th{vertical-align:bottom}"
    "td{text-align:right;padding:.25rem .8rem;border-bottom:1px solid #eef1f4;white-space:nowrap}"
    "th:first-child,td:first-child{text-align:left;padding-left:0}"
    ".facts td{white-space:normal;text-align:left;vertical-align:top}.facts td:first-child{color:#57606a;width:12rem}"
)
