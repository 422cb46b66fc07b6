"""A plan as people and programs read it: one verdict, a table, JSON, pictures."""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from draftproof.errors import BadInput
from draftproof.plan.machine import as_json as machine_json
from draftproof.plan.planner import AUTO, PLAIN, Plan, Prediction, begin_with
from draftproof.plan.published import told

EVEN = 0.05
"""A speed-up that far from 1, or less, makes no difference."""


def judged(speed_up: float) -> str:
    """One of three verdicts."""
    if abs(speed_up - 1) <= EVEN:
        return f"makes no difference (±{EVEN:.0%})"
    return "pays" if speed_up > 1 else "does not pay"


def verdict(plan: Plan) -> str:
    """Whether drafting pays in the first setting, with what, and how much."""
    batch, heat = plan.config.batches[0], plan.config.temperatures[0]
    tried = [one for one in plan.predictions if one.drafter != PLAIN
             and (one.batch, one.temperature) == (batch, heat)]  # fmt: skip
    where = f"batch {batch}, " + (f"T = {heat:g}" if heat else "greedy")
    source = "" if plan.machine.measured else f"; {plan.machine.name} by figures, not measured"
    best = max(tried, key=lambda one: one.speed_up)
    found = judged(best.speed_up)
    at_best, advice = ("", "") if found == "pays" else ("at best ", "; use --drafter none")
    return (f"drafting {found}: {at_best}{best.drafter}, {_budget(best)}, {_interval(best)} as "
            f"fast as plain decoding ({where}{source}){advice}")  # fmt: skip


def table(plan: Plan) -> Table:
    """Of every drafter and setting the best budget."""
    rows = plan.rows()
    shown = Table(title=f"{Path(plan.model).name} on {plan.machine.name}", title_justify="left",
                  box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)  # fmt: skip
    columns = ["tokens\n/s", "speed-up (95 %)", "draft\nsize", "per\nround", "pays\nfrom", "GB"]
    paid = [name for name in ("cost", "energy") if any(getattr(one, name) for one in rows)]
    names = {"cost": "cost\n/1M", "energy": "kWh\n/1M"}
    shown.add_column("", overflow="fold", min_width=14)
    for name in [*columns, *(names[one] for one in paid)]:
        shown.add_column(name, justify="right", no_wrap=True, vertical="bottom")
    setting = None
    for one in rows:
        if setting != (one.temperature, one.batch):
            setting = one.temperature, one.batch
            shown.add_row(f"[dim]T {one.temperature:g}, batch {one.batch}[/]")
        plain = one.drafter == PLAIN
        even = f"{one.break_even:.0%}" if one.break_even is not None else ""
        cells = [f"{one.tokens_per_second:.1f}", "" if plain else _interval(one),
                 "" if plain else str(one.budget), f"{one.tokens_per_round:.2f}", even,
                 f"{one.memory / 1e9:.2f}"]  # fmt: skip
        cells += [f"{getattr(one, name):.2f}" for name in paid]
        shown.add_row(f"  {'plain' if plain else one.drafter}", *cells)
    return shown


def notes(plan: Plan) -> list[str]:
    """What else was found, in lines."""
    lines = [told(one) for one in plan.brackets]
    how = "timed here" if plan.machine.measured else "by figures, not measured"
    return [*lines, f"{plan.texts} texts of the target, replayed; rounds {how}"]


def as_json(plan: Plan, options: dict[str, Any]) -> str:
    """Every number; `read_start` and `read_machine` read it."""
    best = plan.best(plan.config.batches[0], plan.config.temperatures[0])
    body = {
        "verdict": verdict(plan), "model": plan.model, "best": asdict(best), "options": options,
        "predictions": [asdict(one) for one in plan.predictions],
        "brackets": [one._asdict() for one in plan.brackets], "curves": plan.curves,
        "start": plan.start,
        "machine": machine_json(plan.machine), "config": asdict(plan.config),
    }  # fmt: skip
    return json.dumps(body, indent=1) + "\n"


def read_start(file: Path) -> dict[str, Any]:
    """Options of an engine as a saved plan would have it: the drafter, and a budget that begins
    with what the plan found."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        name, options = found["best"]["drafter"], found["options"]
        if name == PLAIN or judged(found["best"]["speed_up"]) != "pays":
            return {"drafter": "none"}
        kind = "assistant_model" if name in options["assistant_model"] else "drafter"
        return {kind: name, "budget": begin_with(found["start"][name])}
    except OSError as error:
        why = f"there is no plan {file}"
        raise BadInput(f"{why}; draftproof plan --json FILE writes one") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{file} is no plan; draftproof plan --json FILE writes one") from error


def picture(plan: Plan) -> bytes:
    """What a round costs by drafted tokens, and the best speed-up by batch and temperature: PNG."""
    from matplotlib.figure import Figure

    batches, heats = plan.config.batches, plan.config.temperatures
    figure = Figure(figsize=(9, 3.6), layout="constrained", dpi=150)
    curve, heat = figure.subplots(1, 2)
    for batch, costs in plan.curves.items():
        curve.plot(list(costs), list(costs.values()), label=f"batch {batch}")
    curve.set(xlabel="draft tokens per row", ylabel="seconds of a round / of a plain one",
              title="what verifying costs", ylim=(0, None))  # fmt: skip
    curve.legend()
    best = [[plan.best(batch, one).speed_up for batch in batches] for one in heats]
    shown = heat.imshow(best, cmap="viridis", aspect="auto", vmin=1)
    heat.set_xticks(range(len(batches)), [str(batch) for batch in batches])
    heat.set_yticks(range(len(heats)), [f"{one:g}" for one in heats])
    for row, one in enumerate(heats):
        for column, batch in enumerate(batches):
            found = plan.best(batch, one)
            text = f"{found.speed_up:.2f}×\n{found.drafter}"
            heat.text(column, row, text, ha="center", va="center", fontsize=8,
                      bbox={"facecolor": "white", "alpha": 0.7, "linewidth": 0})  # fmt: skip
    heat.set(xlabel="batch", ylabel="temperature", title="best speed-up")
    figure.colorbar(shown, ax=heat)
    source = "timed" if plan.machine.measured else "by figures, not measured"
    figure.suptitle(f"{Path(plan.model).name} on {plan.machine.name}, {source}", fontsize=10)
    figure.savefig(out := io.BytesIO(), format="png")
    return out.getvalue()


def _interval(one: Prediction) -> str:
    return f"{one.speed_up:.2f}× ({one.low:.2f}–{one.high:.2f})"


def _budget(one: Prediction) -> str:
    if one.budget == AUTO:
        return "as many draft tokens as pay"
    return f"{one.budget} draft token{'s' * (one.budget != 1)} per round"
