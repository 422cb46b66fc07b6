"""``draftproof bench``: plain decoding and drafters on the same prompts, interleaved."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from draftproof.cli import options as opt
from draftproof.cli import show
from draftproof.cli.setup import lost, must_have_folders
from draftproof.errors import BadInput
from draftproof.plots.style import check_plot_file

N = TypeVar("N", int, float)
Names = list[str] | None
ENGINE = ("budget", "acceptance", "dtype", "device", "quantize", "quantize_draft", "kv_cache")
_plan = partial(opt.option, "What is measured")


@opt.with_options(engine=ENGINE)
def bench(
    ctx: typer.Context,
    model: opt.Model = "demo",
    drafter: Annotated[Names, _plan("NAME", "Measure a drafter, named as in run; repeatable.",
                                             "--drafter")] = None,
    assistant_model: Annotated[Names, _plan("MODEL", "Measure a draft model; repeatable.")] = None,
    prompts: opt.Prompts = None,
    limit: Annotated[int | None, _plan("N", "Use the first N prompts only. Default: all.")] = None,
    chat: opt.Chat = False,
    batch: Annotated[str, _plan("1,4,8", "Batch sizes to measure.")] = "1",
    temperature: Annotated[str, _plan("0,0.7", "Temperatures to measure; 0 is greedy.")] = "0",
    new_tokens: Annotated[int, _plan("N", "Write N tokens per prompt.")] = 128,
    rounds: Annotated[int, _plan("R", "Complete each prompt R times with each method.")] = 3,
    seed: Annotated[int, _plan("S", "Sampling seed.")] = 0,
    json_: Annotated[Path | None, _plan("FILE", "Save all results as JSON.", "--json")] = None,
    plot: opt.Plot = None,
    *,
    engine: dict[str, object],
) -> None:
    """Compare drafters with plain decoding on the same prompts: first the texts, then the speed."""
    from draftproof.bench import report
    from draftproof.bench.measure import Bench, Setting
    from draftproof.bench.methods import load_methods
    from draftproof.bench.workloads import built_in, read_prompts, that_fit

    batches, temperatures = numbers("batch", batch, int), numbers("temperature", temperature, float)
    for name, value in (("batch", min(batches)), ("new_tokens", new_tokens), ("rounds", rounds),
                        ("limit", limit)):  # fmt: skip
        if value is not None and value < 1:
            raise BadInput(f"{name} was {value}; it must be at least 1")
    must_have_folders(json_, plot)
    check_plot_file(plot)
    known, texts = built_in(model)
    file, assistants = prompts or texts, assistant_model or []
    chosen = read_prompts(file, chat)[:limit]
    with show.status("loading ...") as status:
        plain, methods = load_methods(model, drafter or ([] if assistants else known), assistants,
                                      **engine)
        fitting = that_fit(plain, chosen, new_tokens)
        settings = [Setting(rows, degree) for degree in temperatures for rows in batches]
        run = Bench(methods, fitting, settings, replace(plain.sampling, seed=seed), new_tokens,
                    rounds)
        about = ctx.params | {
            "machine": report.machine_facts(plain.target.device), "quantised": lost(plain),
            "workload": f"{len(fitting)} of the {len(chosen)} prompts of {file.name}"}
        with suppress(KeyboardInterrupt):
            run.run(lambda name: status.update(f"{len(run.trials)} of {run.total}: {name}"))
    figures = report.compute(run)
    console = show.page()
    console.print(report.table(figures, model))
    console.print("\n".join(report.notes(figures, about)), style="dim", markup=False)
    if json_ is not None:
        json_.write_text(report.as_json(run, figures, about), encoding="utf-8")
    if plot is not None and figures:
        from draftproof.bench.plot import plot as draw

        draw(figures, plot, f"{Path(model).name}: {about['workload']}, {new_tokens} new tokens")
    if len(run.trials) < run.total:
        raise KeyboardInterrupt(f"interrupted after {len(run.trials)} of {run.total} runs")


def numbers(name: str, text: str, kind: Callable[[str], N]) -> list[N]:
    """Parse distinct numbers such as "1,4,8"."""
    try:
        values = list(dict.fromkeys(kind(part) for part in text.split(",")))
    except ValueError:
        values = []
    if not values or min(values) < 0:
        raise BadInput(f"{name} was {text!r}; give one number or several, such as 1,4,8")
    return values
