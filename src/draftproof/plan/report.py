"""Reports of a plan for people and programs: one verdict, a table, JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from draftproof.errors import BadInput
from draftproof.plan.planner import AUTO, PLAIN, Plan, Prediction, begin_with

EVEN = 0.05
"""A speed-up this close to 1 makes no difference."""


def judged(speed_up: float, low: float, high: float, texts: int) -> str:
    """One of four verdicts on a speed-up with interval `low` to `high`, over `texts` texts."""
    if abs(speed_up - 1) <= EVEN:
        return f"makes no difference (±{EVEN:.0%})"
    if low <= 1 <= high:
        return f"makes no difference that can be measured with {texts} text{'s' * (texts != 1)}"
    return "pays" if speed_up > 1 else "does not pay"


def verdict(plan: Plan) -> str:
    """Whether drafting pays in the first setting, with which drafter, and how much."""
    best = plan.best(drafted=True)
    temperature = f"T = {best.temperature:g}" if best.temperature else "greedy"
    source = "" if plan.machine.measured else f"; {plan.machine.name} calculated, not measured"
    size = f"{best.budget} draft token{'s' * (best.budget != 1)} per round"
    size = "as many draft tokens as pay" if best.budget == AUTO else size
    finding = judged(best.speed_up, best.low, best.high, plan.texts)
    at_best, advice = ("", "") if finding == "pays" else ("at best ", "; use --drafter none")
    if best.low <= 1 <= best.high and abs(best.speed_up - 1) > EVEN:
        advice = "; give more prompts, or use --drafter none"
    return (f"drafting {finding}: {at_best}{best.drafter}, {size}, {_interval(best)} as fast as "
            f"plain decoding (batch {best.batch}, {temperature}{source}){advice}")  # fmt: skip


def table(plan: Plan) -> Table:
    """The best budget of every drafter and setting."""
    shown = Table(title=f"{Path(plan.model).name} on {plan.machine.name}", title_justify="left",
                  box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)  # fmt: skip
    shown.add_column("", overflow="fold", min_width=14)
    columns = ["tok/s", "speed-up (95 %)", "draft", "tok/round", "GB"]
    for name in columns + ["cost/1M"] * (plan.config.price is not None):
        shown.add_column(name, justify="right", no_wrap=True, vertical="bottom")
    setting = None
    for prediction in plan.rows():
        if setting != (prediction.temperature, prediction.batch):
            setting = prediction.temperature, prediction.batch
            shown.add_row(f"[dim]T {prediction.temperature:g}, batch {prediction.batch}[/]")
        plain = prediction.drafter == PLAIN
        cells = [f"{prediction.tokens_per_second:.1f}", "" if plain else _interval(prediction),
                 "" if plain else str(prediction.budget), f"{prediction.tokens_per_round:.2f}",
                 f"{prediction.memory / 1e9:.2f}"]  # fmt: skip
        cells += [f"{prediction.cost:.2f}"] if prediction.cost is not None else []
        shown.add_row(f"  {'plain' if plain else prediction.drafter}", *cells)
    return shown


def note(plan: Plan) -> str:
    """The basis of the figures."""
    how = "timed here" if plan.machine.measured else "calculated, not measured"
    return f"{plan.texts} texts of the target, replayed; rounds {how}"


def as_json(plan: Plan, options: dict[str, object]) -> str:
    """All numbers, for `read_start` and `read_machine`."""
    body = asdict(plan) | {"verdict": verdict(plan), "best": asdict(plan.best()),
                           "options": options}  # fmt: skip
    return json.dumps(body, indent=1) + "\n"


def read_start(file: Path) -> dict[str, object]:
    """An engine's options from a saved plan: the drafter, and a budget that starts from the plan's
    results."""
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
        name, options = saved["best"]["drafter"], saved["options"]
        best, texts = saved["best"], saved.get("texts", 0)
        interval = best["low"], best["high"]
        if name == PLAIN or judged(best["speed_up"], *interval, texts) != "pays":
            return {"drafter": "none"}
        kind = "assistant_model" if name in options["assistant_model"] else "drafter"
        return {kind: name, "budget": begin_with(saved["start"][name])}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{file} is no plan; draftproof plan --json FILE writes one") from error


def _interval(prediction: Prediction) -> str:
    return f"{prediction.speed_up:.2f}× ({prediction.low:.2f}–{prediction.high:.2f})"
