"""Compare the predictions of `draftproof plan` with measurements, one configuration at a time.

    python recipes/figures/plan_against_measured.py FILE.jsonl --model MODEL --drafter portfolio
        --assistant-model DRAFT --batch 1,4 --temperature 0,0.7 --budgets 2,5,auto
    python recipes/figures/plan_against_measured.py FILE.jsonl --plot plan.png     # the table

For each batch size and temperature the target writes its texts, the machine is timed, and every
budget of every drafter is predicted before any of them runs. Then plain decoding and all of them
write the same texts in turn; the measured speed-up is the ratio of the medians. The rows of each
batch size and temperature are appended to FILE, and rows in FILE are not measured again, so a run
may be stopped and resumed. A verdict is right if the measured speed-up agrees with it: above 1,
below 1, or within 5 % of 1 (or within the predicted interval, if that contains 1).
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
    parser.add_argument("--prompts", type=Path, help="JSONL file; default: the built-in prompts")
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--count", type=int, default=8, help="number of prompts")
    parser.add_argument("--batch", default="1")
    parser.add_argument("--temperature", default="0")
    parser.add_argument("--budgets", default="2,5,auto")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    if options.model:
        measure(options)
    report(rows_of(options.file), options.plot)


def rows_of(file: Path) -> list[Row]:
    if not file.is_file():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def measure(options: argparse.Namespace) -> None:
    """Measure every configuration that the options name and the file lacks."""
    known = {tuple(row[name] for name in KEY) for row in rows_of(options.file)}
    name = Path(options.model).name + (f", {options.quantize}" if options.quantize else "")
    budgets = [budget if budget == AUTO else int(budget) for budget in options.budgets.split(",")]
    texts = options.prompts.stem if options.prompts else "built-in"
    plain, methods = load_methods(options.model, options.drafter, options.assistant_model,
                                  quantize=options.quantize)
    gc.freeze()
    file = options.prompts or (STORIES if options.model == "demo" else GENERAL)
    prompts = [plain.requests.tokens(prompt)
               for prompt in read_prompts(file, options.chat)[: options.count]]
    drafters = {method.name: method.engine.drafter for method in methods[1:]}
    for temperature in map(float, options.temperature.split(",")):
        for batch in map(int, options.batch.split(",")):
            missing = [(drafter, budget) for drafter in drafters for budget in budgets
                       if (name, Path(drafter).name, budget, batch, temperature, texts)
                       not in known]
            if not missing:
                continue
            start = time.time()
            config = PlanConfig((batch,), (temperature,), options.new_tokens)
            wanted = {drafter: drafters[drafter] for drafter, _ in missing}
            planner = Planner(plain, wanted, prompts, [], config)
            predictions = [planner.predict(drafter, batch, temperature, budget)
                           for drafter, budget in missing]
            planned = time.time() - start
            seconds = written(plain, drafters, missing, planner.repeated(temperature, batch),
                              batch, options.rounds)
            with options.file.open("a", encoding="utf-8") as out:
                for (drafter, budget), prediction in zip(missing, predictions, strict=True):
                    base, drafted = median(seconds[PLAIN, 0]), median(seconds[drafter, budget])
                    row = {"model": name, "drafter": Path(drafter).name, "budget": budget,
                           "batch": batch, "temperature": temperature, "texts": texts,
                           "prompts": len(prompts), "predicted": prediction.speed_up,
                           "measured": base / drafted, "low": prediction.low,
                           "high": prediction.high, "plan_seconds": planned,
                           "tokens_per_round": prediction.tokens_per_round,
                           "plain": seconds[PLAIN, 0], "drafted": seconds[drafter, budget],
                           "predicted_tokens_per_second": prediction.tokens_per_second}
                    out.write(json.dumps(row) + "\n")


def adaptive(drafter: dp.Drafter, budget: int | str) -> dp.Budget | None:
    return Adaptive(drafter.max_draft_tokens) if budget == AUTO else None


def written(
    plain: Any, drafters: Any, configurations: Any, texts: Any, batch: int, rounds: int
) -> Any:
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
        completions = engine.generate(prompts[:count], sampling=samplings[:count],
                                      batch_size=batch, max_new_tokens=new_tokens)
        spent = time.perf_counter() - start
        return spent / sum(len(completion.tokens) for completion in completions)

    seconds: dict[Any, list[float]] = {pair: [] for pair in [(PLAIN, 0), *configurations]}
    for name, budget in seconds:
        timed(name, budget, 1, 8)                                       # warms up
    for number in range(rounds):
        for name, budget in list(seconds)[:: -1 if number % 2 else 1]:
            seconds[name, budget].append(timed(name, budget, len(prompts), most))
    return seconds


def errors(row: Row) -> float:
    return row["predicted"] / row["measured"] - 1


def is_right(row: Row) -> bool:
    """Whether the measured speed-up agrees with the verdict."""
    interval, measured = (row["low"], row["high"]), row["measured"]
    verdict = judged(row["predicted"], *interval, row["prompts"])
    if verdict in ("pays", "does not pay"):
        return bool(measured > 1) == (verdict == "pays")
    return bool(abs(measured - 1) <= EVEN or interval[0] <= measured <= interval[1])


def report(rows: list[Row], plot: Path | None) -> None:
    """Print a line per configuration, and a summary by model and over all of them."""
    for row in rows:
        what = f"{row['model']}, {row['drafter']}, K = {row['budget']}, batch {row['batch']}"
        ups = f"predicted {row['predicted']:.2f}, measured {row['measured']:.2f}"
        mark = "" if is_right(row) else "  WRONG"
        print(f"{what}, T = {row['temperature']:g}: {ups} ({errors(row):+.1%}){mark}")
    print("\n| model | configurations | mean error | largest | verdict right |")
    print("|---|---|---|---|---|")
    for model in [*dict.fromkeys(row["model"] for row in rows), "all"]:
        of_model = [row for row in rows if model in ("all", row["model"])]
        off, right = [abs(errors(row)) for row in of_model], sum(map(is_right, of_model))
        if of_model:
            print(f"| {model} | {len(of_model)} | {sum(off) / len(off):.1%} | {max(off):.1%} | "
                  f"{right} of {len(of_model)} |")
    if plot is not None and rows:
        picture(rows, plot)


def picture(rows: list[Row], file: Path) -> None:
    """Plot predicted against measured speed-ups, with a colour per model."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 5.4), layout="constrained", dpi=130)
    axes = figure.subplots()
    for model in dict.fromkeys(row["model"] for row in rows):
        of_model = [row for row in rows if row["model"] == model]
        axes.scatter([row["measured"] for row in of_model], [row["predicted"] for row in of_model],
                     s=18, label=f"{model} ({len(of_model)})")
    ends = [0.9 * min(row["measured"] for row in rows), 1.1 * max(row["measured"] for row in rows)]
    axes.plot(ends, ends, color="black", linewidth=1)
    for share in (0.85, 1.15):
        axes.plot(ends, [share * end for end in ends], color="grey", linewidth=1, linestyle=":")
    axes.axvline(1, color="lightgrey", linewidth=1, zorder=0)
    axes.axhline(1, color="lightgrey", linewidth=1, zorder=0)
    axes.set(xscale="log", yscale="log", xlabel="measured speed-up", ylabel="predicted speed-up",
             title=f"{len(rows)} configurations; dotted: 15 % off")
    ticks = [tick for tick in (0.3, 0.5, 0.7, 1, 1.5, 2, 3, 4, 6) if ends[0] <= tick <= ends[1]]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.legend(fontsize=8)
    figure.savefig(file, format="png")


if __name__ == "__main__":
    main()
