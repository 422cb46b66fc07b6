"""``draftproof prove``: proves losslessness in sections with verdicts; writes a certificate."""

from __future__ import annotations

from datetime import date
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from draftproof.cli import options as opt
from draftproof.cli import show
from draftproof.cli.setup import engine_of, lost, must_decode_alone, must_have_folders
from draftproof.engine.config import EngineConfig
from draftproof.errors import BadInput

if TYPE_CHECKING:
    from draftproof.engine.engine import Engine
    from draftproof.verify.report import Report, Section, Tick

Part = StrEnum(
    "Part", ["distribution", "sampling", "bits", "configurations", "architectures", "mutants"]
)
"""The sections of the proof."""
QUICK = tuple(part for part in Part if part is not Part.mutants)
_option = partial(opt.option, None)
Sections = list[Part] | None
NAMES = (
    "assistant_model", "drafter", "budget", "draft_tree", "dtype", "device", "quantize",
    "quantize_draft", "kv_cache", "trust_remote_code",
)  # fmt: skip


@opt.with_options(engine=NAMES)
def prove(
    model: opt.Model = "demo",
    quick: Annotated[bool, _option(
        None, "Run smaller versions of all sections, in two minutes.", "--quick")] = False,
    section: Annotated[Sections, _option(
        "NAME", f"Run only this section: {', '.join(Part)}; repeatable. Default: all.")] = None,
    mutant: Annotated[list[str] | None, _option(
        "WORD", "Plant only the bugs that have WORD in their names; repeatable.")] = None,
    fuzz: Annotated[float | None, _option(
        "MINUTES", "Run random requests on random models instead; 0 minutes is one round.",
    )] = None,
    seed: Annotated[int, _option("S", "Seed of the random numbers.")] = 0,
    json_: Annotated[Path | None, _option("FILE", "Save the report as JSON.", "--json")] = None,
    html: Annotated[Path | None, _option("FILE", "Save the certificate as a web page.")] = None,
    *,
    engine: dict[str, Any],
) -> None:
    """Prove that decoding is lossless: distributions, samples, bits, all kinds of models."""
    must_have_folders(json_, html)
    if model == "demo" and not engine.keys() & {"drafter", "assistant_model"}:
        engine["assistant_model"] = "demo-draft"
    setup = EngineConfig(model, **engine)
    names = [part.value for part in section or (QUICK if quick else Part)]
    if fuzz is not None:
        if section or quick or mutant or fuzz < 0:
            raise BadInput("--fuzz takes minutes, 0 or more, and no --section, --quick or --mutant")
        names = ["fuzz"]
    report = _run(setup, quick, names, seed, mutant or [], fuzz or 0.0)
    if json_ is not None:
        json_.write_text(report.as_json(), encoding="utf-8")
    if html is not None:
        from draftproof.verify.certificate import page

        html.write_text(page(report), encoding="utf-8")
    if not report.passed:
        raise typer.Exit(1)


def _run(
    setup: EngineConfig, quick: bool, names: list[str], seed: int, mutants: list[str],
    minutes: float,
) -> Report:  # fmt: skip
    """Run the sections with a progress bar on stderr; print each verdict, then the overall one."""
    from draftproof.model.device import versions
    from draftproof.verify.fuzz import prove_fuzz
    from draftproof.verify.prove import prove as prove_sections
    from draftproof.verify.report import Report

    done: list[Section] = []
    about: dict[str, object] = {
        "date": date.today().isoformat(), "extent": "quick" if quick else "full", "seed": seed,
        "sections": ", ".join(names), **versions(),
    }  # fmt: skip

    def engine() -> Engine:
        loaded = must_decode_alone(engine_of(setup), "prove")
        about.update(_described(setup, loaded))
        return loaded

    options: dict[str, Any] = {
        "dtype": setup.dtype, "quantize": setup.quantize, "device": setup.device
    }  # fmt: skip
    fuzz = partial(prove_fuzz, str(setup.model), minutes, seed=seed, **options)
    out, styles = show.page(), ("bold green", "bold red")
    columns = TextColumn("{task.fields[section]:13}"), BarColumn(30), TimeElapsedColumn()
    with show.bars(*columns, TextColumn("{task.description}")) as bars:
        tick = partial(_bar, bars)
        for section in prove_sections(
            engine, names, quick=quick, seed=seed, progress=tick, mutants=mutants, fuzz=fuzz
        ):
            done.append(section)
            for task in bars.task_ids:
                bars.remove_task(task)
            out.print(str(section), style=styles[bool(section.failures)], markup=False)
            for failure in section.failures:
                out.print(f"     {failure}", style="red", markup=False)
    report = Report(done, about)
    out.print(str(report), style=styles[not report.passed], markup=False)
    return report


def _bar(bars: Progress, name: str) -> Tick:
    """A progress bar for one section."""
    task = bars.add_task("", total=1.0, section=name)
    return lambda share, doing: bars.update(task, completed=share, description=doing)


def _described(setup: EngineConfig, engine: Engine) -> dict[str, object]:
    """A description of the model."""
    assistant = setup.assistant_model
    return {
        "model": setup.model,
        "drafter": engine.drafter.name + (f" ({assistant})" if assistant else ""),
        "draft_tokens": engine.budget.max_draft_tokens,
        "device": str(engine.target.device),
        "dtype": str(engine.target.dtype).removeprefix("torch."),
        **({"quantised": "; ".join(lines)} if (lines := lost(engine)) else {}),
    }
