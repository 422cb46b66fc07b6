"""What `draftproof plan` predicts against what is measured, a configuration after the other.

    python recipes/figures/plan_against_measured.py FILE.jsonl --model MODEL --drafter portfolio
        --assistant-model DRAFT --batch 1,4 --temperature 0,0.7 --budgets 2,5,auto
    python recipes/figures/plan_against_measured.py FILE.jsonl --plot plan.png     # the table

For each batch and temperature the target writes its texts, the machine is timed and every budget of
every drafter is predicted, before any of them runs; then plain decoding and all of them write the
same texts in turn, and the speed-up measured is the ratio of the medians. Each batch and
temperature is appended to FILE, and what is there is not measured again, so a run may be stopped
and go on. A verdict is right if the measured speed-up lies where it says: above 1, below 1, or
within 5 % of 1.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import draftproof as dp
from draftproof.bench.methods import load_methods
from draftproof.bench.workloads import GENERAL, STORIES, read_prompts
from draftproof.engine.budget import Adaptive
from draftproof.plan.planner import AUTO, PLAIN, PlanConfig, Planner, is_light
from draftproof.plan.report import EVEN, judged

KEY = ("model", "drafter", "budget", "batch", "temperature", "texts")
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--quantize", choices=("int8", "int4"))
    parser.add_argument("--assistant-model", action="append", default=[])
    parser.add_argument("--drafter", action="append", default=[])
    parser.add_argument("--prompts", type=Path, help="JSONL; else the built-in ones")
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--count", type=int, default=8, help="how many prompts")
    parser.add_argument("--batch", default="1")
    parser.add_argument("--temperature", default="0")
    parser.add_argument("--budgets", default="2,5,auto")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    if given.model:
        measure(given)
    report(rows_of(given.file), given.plot)


def rows_of(file: Path) -> list[Row]:
    if not file.is_file():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def measure(given: argparse.Namespace) -> None:
    """Every configuration that the options name and the file lacks."""
    known = {tuple(row[name] for name in KEY) for row in rows_of(given.file)}
    name = Path(given.model).name + (f", {given.quantize}" if given.quantize else "")
    budgets = [one if one == AUTO else int(one) for one in given.budgets.split(",")]
    texts = given.prompts.stem if given.prompts else "built-in"
    plain, methods = load_methods(given.model, given.drafter, given.assistant_model,
                                  quantize=given.quantize)
    gc.freeze()
    file = given.prompts or (STORIES if given.model == "demo" else GENERAL)
    prompts = [plain.requests.tokens(one)
               for one in read_prompts(file, given.chat)[: given.count]]
    drafters = {one.name: one.engine.drafter for one in methods[1:]}
    for heat in map(float, given.temperature.split(",")):
        for batch in map(int, given.batch.split(",")):
            asked = [(drafter, budget) for drafter in drafters for budget in budgets
                     if (name, Path(drafter).name, budget, batch, heat, texts) not in known]
            if not asked:
                continue
            start, config = time.time(), PlanConfig((batch,), (heat,), given.new_tokens)
            wanted = {one: drafters[one] for one, _ in asked}
            planner = Planner(plain, wanted, prompts, [], config)
            found = [planner.predict(one, batch, heat, budget) for one, budget in asked]
            planned = time.time() - start
            seconds = written(plain, drafters, asked, planner.repeated(heat, batch), batch,
                              given.rounds)
            with given.file.open("a", encoding="utf-8") as out:
                for (drafter, budget), one in zip(asked, found, strict=True):
                    base, ours = median(seconds[PLAIN, 0]), median(seconds[drafter, budget])
                    row = {"model": name, "drafter": Path(drafter).name, "budget": budget,
                           "batch": batch, "temperature": heat, "texts": texts,
                           "predicted": one.speed_up, "measured": base / ours,
                           "low": one.low, "high": one.high, "plan_seconds": planned,
                           "tokens_per_round": one.tokens_per_round, "plain": seconds[PLAIN, 0],
                           "drafted": seconds[drafter, budget],
                           "predicted_tokens_per_second": one.tokens_per_second}
                    out.write(json.dumps(row) + "\n")


def adaptive(drafter: dp.Drafter, budget: int | str) -> dp.Budget | None:
    return Adaptive(drafter.max_draft_tokens) if budget == AUTO else None


def written(plain: Any, drafters: Any, asked: Any, texts: Any, batch: int, rounds: int) -> Any:
    """Seconds per token of plain decoding and of each configuration, in turn."""
    prompts = [text.tokens[: text.prompt] for text in texts]
    samplings = [text.sampling for text in texts]
    most = max(len(text.tokens) - text.prompt for text in texts)

    def timed(name: str, budget: int | str, count: int, new_tokens: int) -> float:
        drafter = drafters.get(name) or dp.Plain()
        drafter = copy.deepcopy(drafter) if is_light(name) else drafter
        size = adaptive(drafter, budget) or budget
        engine = dp.Engine(plain.target, drafter, budget=size, stop_tokens=plain.stop_tokens)
        start = time.perf_counter()
        done = engine.generate(prompts[:count], sampling=samplings[:count], batch_size=batch,
                               max_new_tokens=new_tokens)
        return (time.perf_counter() - start) / sum(len(one.tokens) for one in done)

    seconds: dict[Any, list[float]] = {one: [] for one in [(PLAIN, 0), *asked]}
    for one in seconds:
        timed(*one, 1, 8)                                               # warms up
    for number in range(rounds):
        for one in list(seconds)[:: -1 if number % 2 else 1]:
            seconds[one].append(timed(*one, len(prompts), most))
    return seconds


def errors(row: Row) -> float:
    return row["predicted"] / row["measured"] - 1


def is_right(row: Row) -> bool:
    """Whether the measured speed-up lies where the verdict says."""
    said, measured = judged(row["predicted"]), row["measured"]
    return {"pays": measured > 1, "does not pay": measured < 1}.get(said, abs(measured - 1) <= EVEN)


def report(rows: list[Row], plot: Path | None) -> None:
    """A line per configuration, and what they come to by model and in all."""
    for row in rows:
        what = f"{row['model']}, {row['drafter']}, K = {row['budget']}, batch {row['batch']}"
        ups = f"predicted {row['predicted']:.2f}, measured {row['measured']:.2f}"
        mark = "" if is_right(row) else "  WRONG"
        print(f"{what}, T = {row['temperature']:g}: {ups} ({errors(row):+.1%}){mark}")
    print("\n| model | configurations | mean error | largest | verdict right |")
    print("|---|---|---|---|---|")
    for model in [*dict.fromkeys(row["model"] for row in rows), "all"]:
        own = [row for row in rows if model in ("all", row["model"])]
        off, right = [abs(errors(row)) for row in own], sum(map(is_right, own))
        if own:
            print(f"| {model} | {len(own)} | {sum(off) / len(off):.1%} | {max(off):.1%} | "
                  f"{right} of {len(own)} |")
    if plot is not None and rows:
        picture(rows, plot)


def picture(rows: list[Row], file: Path) -> None:
    """Predicted against measured, a colour per model."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 5.4), layout="constrained", dpi=130)
    axes = figure.subplots()
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        axes.scatter([row["measured"] for row in own], [row["predicted"] for row in own], s=18,
                     label=f"{model} ({len(own)})")
    ends = [0.9 * min(row["measured"] for row in rows), 1.1 * max(row["measured"] for row in rows)]
    axes.plot(ends, ends, color="black", linewidth=1)
    for share in (0.85, 1.15):
        axes.plot(ends, [share * end for end in ends], color="grey", linewidth=1, linestyle=":")
    axes.axvline(1, color="lightgrey", linewidth=1, zorder=0)
    axes.axhline(1, color="lightgrey", linewidth=1, zorder=0)
    axes.set(xscale="log", yscale="log", xlabel="measured speed-up", ylabel="predicted speed-up",
             title=f"{len(rows)} configurations; dotted: 15 % off")
    ticks = [one for one in (0.3, 0.5, 0.7, 1, 1.5, 2, 3, 4, 6) if ends[0] <= one <= ends[1]]
    axes.set_xticks(ticks, [f"{one:g}" for one in ticks])
    axes.set_yticks(ticks, [f"{one:g}" for one in ticks])
    axes.minorticks_off()
    axes.legend(fontsize=8)
    figure.savefig(file, format="png")


if __name__ == "__main__":
    main()
