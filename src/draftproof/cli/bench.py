"""``draftproof bench``: plain decoding and drafters in turn, in the open. Knows options, files and the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from draftproof.cli import options as opt
from draftproof.cli import show
from draftproof.cli.rows import prompt_of
from draftproof.cli.setup import as_chat, lost
from draftproof.engine.config import TRAINING_FREE
from draftproof.errors import BadInput

if TYPE_CHECKING:
    from draftproof.bench.measure import Bench, Way
    from draftproof.bench.report import Grid, Report
    from draftproof.bench.workloads import Workload
    from draftproof.engine.cost_curve import CostCurve
    from draftproof.engine.engine import Engine
    from draftproof.model.loading import PreTrainedModel
    from draftproof.model.target import Target

N = TypeVar("N", int, float)

WIDE = 100
"""Columns of a terminal in which every name has room."""
WIDEST = 256
"""Rows × nodes up to which the cost of a forward is measured."""


class Against(StrEnum):
    """Whose decoding is measured as well."""

    transformers = "transformers"


def _plan(metavar: str | None, text: str, *names: str) -> Any:
    return typer.Option(*names, metavar=metavar, rich_help_panel="What is measured", help=text)


def _file(metavar: str, text: str, *names: str) -> Any:
    return typer.Option(*names, metavar=metavar, rich_help_panel="Output", help=text)


Model = Annotated[str, typer.Argument(help="[bold]demo[/bold] (default), a folder, or a hub id.", show_default=False)]
Drafters = Annotated[list[str] | None, _plan("NAME", "A drafter, as in run; repeatable.", "--drafter")]
Assistants = Annotated[list[str] | None, _plan("MODEL", "A draft model; repeatable.", "--assistant-model")]
SpecBench = Annotated[Path | None, _plan("JSONL", "Spec-Bench's question.jsonl; MT-bench counts as one task.")]
Categories = Annotated[list[str] | None, _plan("NAME", "Only prompts of this category; repeatable.", "--category")]
Limit = Annotated[int | None, _plan("N", "Only the first N prompts of each category.")]
Batches = Annotated[str, _plan("1,4,8", "Rows side by side; several are measured one after the other.")]
Temperatures = Annotated[str, _plan("0,0.7", "0 is greedy.")]
NewTokens = Annotated[int, _plan("N", "New tokens per prompt.")]
Turns = Annotated[int, _plan("R", "How often each prompt is written by each.")]
SeedOf = Annotated[int, _plan("S", "Of the sampling.")]
AgainstWhom = Annotated[Against | None, _plan("transformers", "Measure transformers' generate too, plain and assisted.")]
Inflate = Annotated[str | None, _plan("0.5B", "Make the model as heavy as one of this size, its text unchanged.")]
Price = Annotated[float | None, _plan("X", "What an hour of this machine costs: gives the cost per million tokens.")]
JsonFile = Annotated[Path | None, _file("FILE", "Every number.", "--json")]
HtmlFile = Annotated[Path | None, _file("FILE", "One page with tables and plots.", "--html")]
PlotsFolder = Annotated[Path | None, _file("FOLDER", "The plots, as PNG.", "--plots")]


@dataclass(frozen=True)
class _Plan:
    """What the options ask for, checked."""

    model: str
    drafters: list[str]
    assistants: list[str]
    num_assistant_tokens: int | None
    acceptance: str
    batches: list[int]
    temperatures: list[float]
    new_tokens: int
    turns: int
    seed: int
    against: bool
    inflate: str | None
    price: float | None
    dtype: str | None
    device: str | None
    quantize: str | None
    quantize_draft: str | None
    kv_cache: str | None

    def __post_init__(self) -> None:
        drafted = 1 if self.num_assistant_tokens is None else self.num_assistant_tokens
        counts = {"new_tokens": self.new_tokens, "rounds": self.turns, "num_assistant_tokens": drafted}
        for name, value in {**counts, "batch": min(self.batches)}.items():
            if value < 1:
                raise BadInput(f"{name} was {value}; it must be at least 1")
        if self.quantize_draft and not self.with_models:
            raise BadInput("--quantize-draft is for draft models; name one with --assistant-model or --drafter")
        if self.price is not None and not self.price > 0:
            raise BadInput(f"price_per_hour was {self.price}; it must be above 0")
        for given in (self.drafters, self.assistants):
            twice = next((name for place, name in enumerate(given) if name in given[:place]), None)
            if twice is not None:
                raise BadInput(f"{twice} was given twice; once is enough")

    @property
    def with_models(self) -> list[str]:
        """Those that draft with a model, one of their own or the target."""
        return [*self.assistants, *(name for name in self.drafters if not {*name.split("+")} <= {*TRAINING_FREE, "medusa", "redrafter"})]


def bench(
    model: Model = "demo",
    drafter: Drafters = None,
    assistant_model: Assistants = None,
    num_assistant_tokens: opt.DraftTokens = None,
    acceptance: opt.Rule = None,
    prompts: opt.Prompts = None,
    spec_bench: SpecBench = None,
    category: Categories = None,
    limit: Limit = None,
    chat: opt.Chat = False,
    batch: Batches = "1",
    temperature: Temperatures = "0",
    new_tokens: NewTokens = 128,
    rounds: Turns = 3,
    seed: SeedOf = 0,
    against: AgainstWhom = None,
    inflate: Inflate = None,
    price_per_hour: Price = None,
    json_: JsonFile = None,
    html: HtmlFile = None,
    plots: PlotsFolder = None,
    dtype: opt.Dtype = None,
    device: opt.Device = None,
    quantize: opt.Quantize = None,
    quantize_draft: opt.QuantizeDraft = None,
    kv_cache: opt.KvCache = None,
) -> None:
    """Measure plain decoding and drafters on the same prompts, in turn, and compare their texts first."""
    from draftproof.bench.workloads import chosen

    files = _Files(json_, html, plots)
    drafters, assistants = _racers(model, drafter, assistant_model)
    plan = _Plan(
        model, drafters, assistants, num_assistant_tokens, acceptance or "match", _numbers("batch", batch, int),
        _numbers("temperature", temperature, float), new_tokens, rounds, seed, against is not None, inflate, price_per_hour,
        dtype, device, quantize, quantize_draft, kv_cache,
    )  # fmt: skip
    workload = chosen(_workload(model, prompts, spec_bench, chat), category or [], limit)
    report = _measured(plan, workload)
    _print(report)
    files.write(report)
    if report.interrupted:
        count, total = len(report.bench.trials), report.bench.runs
        raise KeyboardInterrupt(f"interrupted after {count} of {total} runs; the figures are of these")


@dataclass(frozen=True)
class _Files:
    """Where the report goes; checked before anything runs."""

    json: Path | None
    html: Path | None
    plots: Path | None

    def __post_init__(self) -> None:
        for file in (self.json, self.html):
            if file is not None and not file.absolute().parent.is_dir():
                raise BadInput(f"there is no folder {file.absolute().parent} for {file.name}; make it first")
        if self.html is not None or self.plots is not None:
            from draftproof.bench.plots import must_be_there

            must_be_there()

    def write(self, report: Report) -> None:
        if not report.figures:
            return
        if self.json is not None:
            self.json.write_text(report.as_json(), encoding="utf-8")
        if self.html is None and self.plots is None:
            return
        from draftproof.bench.plots import draw

        pictures = draw(report)
        if self.html is not None:
            self.html.write_text(report.as_html(pictures), encoding="utf-8")
        if self.plots is not None:
            self.plots.mkdir(parents=True, exist_ok=True)
            for name, png in pictures.items():
                (self.plots / f"{name}.png").write_bytes(png)


def _numbers(name: str, text: str, kind: Callable[[str], N]) -> list[N]:
    """Several numbers from "1,4,8", each once."""
    try:
        values = [kind(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 0:
        raise BadInput(f"{name} was {text!r}; give one number or several, such as 1,4,8")
    return list(dict.fromkeys(values))


def _racers(model: str, drafters: Sequence[str] | None, assistants: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """Who is measured besides plain decoding; for the demo, when nobody is named, what comes with it."""
    if drafters or assistants:
        return [name for name in drafters or () if name != "none"], list(assistants or ())
    return (["portfolio", "medusa", "redrafter"], ["demo-draft"]) if _is_demo(model) else (["portfolio"], [])


def _is_demo(model: str) -> bool:
    from draftproof.model.loading import embedded, resolve

    return resolve(model) == str(embedded("demo"))


def _workload(model: str, prompts: Path | None, spec_bench: Path | None, chat: bool) -> Workload:
    from draftproof.bench.workloads import GENERAL, STORIES, Workload, read

    if prompts is not None and spec_bench is not None:
        raise BadInput("both --prompts and --spec-bench were given; give one of them")
    file = prompts or spec_bench
    if file is not None:
        return read(file, lambda row: cast(Any, prompt_of(row, chat)), tasks=spec_bench is not None)
    built_in = STORIES if _is_demo(model) else GENERAL
    if not chat:
        return built_in
    return Workload(built_in.name, tuple(replace(q, prompt=as_chat(str(q.prompt))) for q in built_in.questions))


def _measured(plan: _Plan, workload: Workload) -> Report:
    """Load, run, compute; an interrupt ends the run and leaves what was measured."""
    from draftproof.bench.figures import figures
    from draftproof.bench.machine import Energy, facts
    from draftproof.bench.measure import Bench, Setting
    from draftproof.bench.report import Report
    from draftproof.bench.workloads import Workload

    with show.status("loading ..."):
        first = _plain(plan)
        target, base = first.target, replace(first.sampling, seed=plan.seed)
        kept = [(question, tokens) for question in workload.questions
                if len(tokens := _encoded(first, question.prompt)) + plan.new_tokens <= target.context]  # fmt: skip
        if not kept:
            raise BadInput(f"no prompt leaves room for {plan.new_tokens} new tokens in a context of {target.context}")
        left_out = len(workload.questions) - len(kept)
        workload = Workload(workload.name, tuple(question for question, _ in kept))
        ways = [*_our_ways(plan, first), *(_their_ways(plan) if plan.against else [])]
    settings = [Setting(batch, temperature) for temperature in plan.temperatures for batch in plan.batches]
    run = Bench(
        ways, [tokens for _, tokens in kept], settings, base, plan.new_tokens, plan.turns, target.device,
        energy=Energy(target.device),
    )  # fmt: skip
    machine = facts(target.device)
    costs, interrupted = _run(run, target)
    about = _about(plan, workload, left_out, run, target) | {"quantised": lost(first)}
    found = figures(run, [question.category for question in workload.questions], plan.price)
    return Report(about, machine, run, found, costs, interrupted)


def _run(run: Bench, target: Target) -> tuple[dict[int, CostCurve], bool]:
    """The runs with a bar; then what forwards of several tokens cost. The flag says whether they were interrupted."""
    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    rows = list(dict.fromkeys(setting.batch for setting in run.settings))
    costs: dict[int, CostCurve] = {}
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=run.total + len(rows))
        begun = iter(range(run.total + len(rows)))

        def tick(doing: str) -> None:
            bar.update(task, completed=next(begun), description=doing)

        try:
            run.run(tick)
            for count in rows:
                tick(f"cost of forwards, {count} row{'s' * (count != 1)}")
                costs[count] = _curve(target, count)
        except KeyboardInterrupt:
            return costs, True
    return costs, False


def _curve(target: Target, rows: int) -> CostCurve:
    from draftproof.engine.cost_curve import WIDTHS, measure_costs

    return measure_costs(target, [width for width in WIDTHS if width == 1 or rows * width <= WIDEST], rows=rows)


def _plain(plan: _Plan) -> Engine:
    """Plain decoding of the model, inflated if that was asked for."""
    from draftproof.engine.load import load

    if plan.inflate is None:
        engine = load(
            plan.model, drafter="none", dtype=plan.dtype, device=plan.device, quantize=plan.quantize, kv_cache=plan.kv_cache
        )
    else:
        from draftproof.model.packed_linear import pack_linears

        heavy = _heavy(plan)
        if plan.quantize is None:
            pack_linears(heavy)
        engine = load(heavy, drafter="none", quantize=plan.quantize, kv_cache=plan.kv_cache)
    if engine.codec is None:
        raise BadInput(f"{plan.model} has no tokenizer; put one beside the model, its prompts are texts")
    return engine


def _heavy(plan: _Plan) -> PreTrainedModel:
    """The model as transformers loads it, inflated if that was asked for."""
    from draftproof.bench.inflate import inflated

    return inflated(plan.model, plan.inflate, plan.dtype, plan.device)


def _our_ways(plan: _Plan, first: Engine) -> list[Way]:
    """Plain decoding and every drafter around one target."""
    from draftproof.bench.figures import PLAIN
    from draftproof.bench.ours import Ours
    from draftproof.drafters.draft_model import SELF
    from draftproof.engine.load import load

    codec = first.codec
    asked: list[tuple[str, dict[str, Any]]] = [(name, {"drafter": name}) for name in plan.drafters]
    asked += [(name, {"assistant_model": name}) for name in plan.assistants]
    engines = []
    for source, how in asked:
        model, quantize = first.target.model, None
        if plan.quantize is not None and source.startswith(SELF):          # it drafts with what is not quantised yet
            model, quantize = _heavy(plan), plan.quantize
        engine = load(
            model, tokenizer=codec.tokenizer if codec else None, dtype=plan.dtype, budget=plan.num_assistant_tokens,
            acceptance=plan.acceptance, quantize=quantize, kv_cache=plan.kv_cache,
            quantize_draft=plan.quantize_draft if source in plan.with_models else None, **how,
        )  # fmt: skip
        engines.append((source, engine))
    kinds = [engine.drafter.name for _, engine in engines]
    ways: list[Way] = [Ours(PLAIN, first)]
    for source, engine in engines:
        kind = engine.drafter.name
        ways.append(Ours(kind if kinds.count(kind) == 1 else f"{kind} {Path(source).name}", engine))
    return ways


def _their_ways(plan: _Plan) -> list[Way]:
    """transformers' generate, plain and with every draft model."""
    from draftproof.bench.against_transformers import Generate
    from draftproof.bench.figures import GENERATE
    from draftproof.model.loading import load_model

    model = _heavy(plan)
    ways: list[Way] = [Generate(GENERATE, model)]
    for name in plan.assistants:
        label = f"{GENERATE} assisted" + (f" {Path(name).name}" if len(plan.assistants) > 1 else "")
        ways.append(Generate(label, model, load_model(name, plan.dtype, plan.device)))
    return ways


def _encoded(engine: Engine, prompt: Any) -> list[int]:
    assert engine.codec is not None
    return engine.codec.encode(prompt) if isinstance(prompt, str) else engine.codec.encode_chat(prompt)


def _about(plan: _Plan, workload: Workload, left_out: int, run: Bench, target: Target) -> dict[str, Any]:
    """What was asked for and what became of it."""
    bytes_as_loaded = target.quantization.before if target.quantization is not None else run.ways[0].weights
    return {
        "date": str(date.today()),
        "model": plan.model,
        "inflated_to": plan.inflate,
        "parameters": bytes_as_loaded // target.dtype.itemsize,
        "ways": [way.name for way in run.ways],
        "drafters": plan.drafters,
        "assistant_models": plan.assistants,
        "draft_tokens": plan.num_assistant_tokens,
        "acceptance": plan.acceptance,
        "workload": f"{len(workload.questions)} prompts: {workload.name}",
        "categories": workload.categories,
        "prompts_left_out_as_too_long": left_out,
        "new_tokens": plan.new_tokens,
        "turns": plan.turns,
        "batches": plan.batches,
        "temperatures": plan.temperatures,
        "seed": plan.seed,
        "dtype": str(target.dtype).removeprefix("torch."),
        "price_per_hour": plan.price,
        "context": target.context,
    }


def _print(report: Report) -> None:
    console = Console(highlight=False)
    for setting in report.settings:
        for grid in report.tables(setting):
            console.print(grid.title, style="bold", markup=False)
            console.print(_table(grid, console.width < WIDE))
    for note in report.notes():
        console.print(note, style="dim", markup=False)


def _table(grid: Grid, narrow: bool) -> Table:
    """Rich's table; where there is little room, names of several words stand below each other."""
    table = Table(box=SIMPLE_HEAD, padding=0, pad_edge=False)
    for place, name in enumerate(grid.columns):
        table.add_column(name, justify="right" if place else "left", vertical="bottom", no_wrap=True)
    for way, *cells in grid.rows:
        table.add_row(way.replace(" ", "\n") if narrow else way, *cells)
    return table
