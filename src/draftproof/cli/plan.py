"""``draftproof plan``: predicts whether drafting pays, with which drafter, and how much."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from draftproof.cli import options as opt
from draftproof.cli import show
from draftproof.cli.bench import numbers
from draftproof.cli.setup import must_decode_alone, must_have_folders
from draftproof.errors import BadInput
from draftproof.plots.style import check_plot_file

if TYPE_CHECKING:
    from draftproof.engine.engine import Engine
    from draftproof.plan.recording import Text

ENGINE = ("dtype", "device", "quantize", "quantize_draft", "kv_cache")
Names = list[str] | None
_ask = partial(opt.option, "What is planned")
Logs = Annotated[Path | None, _ask(
    "FILE", "Rows of prompts with completions that the model wrote.")]
Machine = Annotated[str | None, _ask(
    "FILE|NAME", "Predict for another machine: a saved plan, a file of figures, or h100, a100, l4, "
    "gaudi2, gaudi3, ... Default: this one.")]


@opt.with_options(engine=ENGINE)
def plan(
    model: opt.Model, prompts: opt.Prompts = None, logs: Logs = None,
    assistant_model: Annotated[Names, _ask("MODEL", "Plan with a draft model; repeatable.")] = None,
    drafter: Annotated[Names, _ask("NAME", "Plan with a drafter, named as in run; repeatable.",
                                            "--drafter")] = None,
    batch: Annotated[str, _ask("1,4,8", "Batch sizes.")] = "1",
    temperature: Annotated[str, _ask("0,0.7", "Temperatures; 0 is greedy.")] = "0",
    tokens: Annotated[int, _ask("N", "Let the target write N tokens per prompt.")] = 64,
    max_prompts: Annotated[int, _ask("N", "Use at most N prompts, and N logs.")] = 8,
    machine: Machine = None, chat: opt.Chat = False,
    price_per_hour: Annotated[float | None, _ask(
        "X", "Machine price per hour, for cost per token. Default: none.")] = None,
    json_: Annotated[Path | None, _ask("FILE", "Save the plan, for run --plan.", "--json")] = None,
    plot: opt.Plot = None, *, engine: dict[str, object],
) -> None:  # fmt: skip
    """Predict speed, cost and memory of drafters on your prompts, without running them."""
    from draftproof.bench.methods import load_methods
    from draftproof.bench.workloads import built_in, read_prompts, that_fit
    from draftproof.plan import report
    from draftproof.plan.planner import PlanConfig, Planner

    batches, temperatures = numbers("batch", batch, int), numbers("temperature", temperature, float)
    for name, value in (("batch", min(batches)), ("tokens", tokens), ("max_prompts", max_prompts),
                        ("price_per_hour", price_per_hour)):  # fmt: skip
        if value is not None and not value > 0:
            raise BadInput(f"{name} was {value}; it must be above 0")
    must_have_folders(json_, plot)
    check_plot_file(plot)
    known, texts = built_in(model)
    assistants = assistant_model or []
    drafters = drafter or ([] if assistants else known)
    file = prompts or (None if logs else texts)
    rows = read_prompts(file, chat) if file else []
    with show.status("loading ...") as status:
        plain, methods = load_methods(model, drafters, assistants, **engine)
        must_decode_alone(plain, "plan")
        fitting = that_fit(plain, rows, tokens)
        written = _logs(logs, plain, chat)[:max_prompts] if logs else []
        named = {method.name: method.engine.drafter for method in methods[1:]}
        config = PlanConfig(tuple(batches), tuple(temperatures), tokens, price_per_hour, machine)
        few = fitting[:max_prompts]
        result = Planner(plain, named, few, written, config, status.update).plan()
    console = show.page()
    console.print(report.verdict(result), style="bold", markup=False)
    console.print(report.table(result))
    console.print(report.note(result), style="dim", markup=False)
    if plot is not None:
        from draftproof.plan.plot import plot as draw

        draw(result, plot)
    if json_ is not None:
        names = [name for name in named if name not in assistants]
        options = {"assistant_model": assistants, "drafter": names, **engine}
        json_.write_text(report.as_json(result, options), encoding="utf-8")


def _logs(file: Path, plain: Engine, chat: bool) -> list[Text]:
    """Read texts with their prompts; the prompt of a plain text is its beginning."""
    from draftproof.plan.recording import Text
    from draftproof.training.rows import OPENING, tokenized
    from draftproof.training.texts import read

    if plain.codec is None:
        raise BadInput(f"{plain.target.name} has no tokenizer; it is needed to read the logs")
    texts = []
    for document in read([file], chat, note=show.note):
        for tokens, mask in tokenized(document, plain.codec, None):
            first, end = mask.index(True), len(mask) - mask[::-1].index(True)
            prompt = first or min(OPENING, end // 2)
            if end - prompt > 1 and end < plain.target.context:
                texts.append(Text(tokens[:end], prompt, plain.sampling))
    if not texts:
        raise BadInput(f"{file} has no text after a prompt; give rows with prompt and completion")
    return texts
