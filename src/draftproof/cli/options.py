"""The options that commands share; those of an engine are made from the fields of its config."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from draftproof.engine.config import EngineConfig, cli_fields

Command = Callable[..., None]


def with_options(**groups: tuple[str, ...] | None) -> Callable[[Command], Command]:
    """Give a command the options of `engine` and of `sampling`: all of them, or those named.

    The command gets one argument per group: a mapping with what was given, by field.
    """

    def decorate(command: Command) -> Command:
        declared = inspect.signature(command, eval_str=True).parameters
        made = {
            group: [
                parameter
                for parameter in OPTIONS[group]
                if names is None or parameter.name in names
            ]
            for group, names in groups.items()
        }
        kept = [
            parameter.replace(kind=parameter.KEYWORD_ONLY)
            for parameter in declared.values()
            if parameter.name not in made
        ]
        parameters = [*kept, *[parameter for group in made.values() for parameter in group]]

        @wraps(command)
        def run(**values: Any) -> None:
            grouped: dict[str, dict[str, Any]] = {group: {} for group in made}
            for group, ones in made.items():
                for parameter in ones:
                    value = values.pop(parameter.name)
                    if not (value is None or value is False or value == []):
                        grouped[group][parameter.name] = value
            command(**values, **grouped)

        run.__signature__ = inspect.Signature(parameters)       # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def option(panel: str | None, metavar: str | None, help: str, *flags: str) -> Any:
    """An option of a help panel."""
    return typer.Option(*flags, metavar=metavar, rich_help_panel=panel, help=help)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _parameter(name: str, kind: Any, default: Any, option: Any) -> inspect.Parameter:
    """A keyword of a command, as typer reads it."""
    annotation, keyword = Annotated[kind, option], inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword, default=default, annotation=annotation)


def options_of(config: type) -> list[inspect.Parameter]:
    """The fields of a dataclass that are options."""
    made = []
    for field in cli_fields(config):
        about = field.metadata
        flags = about["flags"] or (flag(field.name),)
        declared = option(about["panel"], about["metavar"], about["help"], *flags)
        made.append(_parameter(field.name, about["type"], field.default, declared))
    return made


def _sampling(
    name: str, kind: Any, metavar: str | None, help: str, flags: str = ""
) -> inspect.Parameter:
    declared = option("Sampling", metavar, help, flags or flag(name))
    return _parameter(name, kind if kind is bool else kind | None,
                      False if kind is bool else None, declared)


SAMPLING = [
    _sampling("max_new_tokens", int, "N", "Length limit."),
    _sampling("min_new_tokens", int, "N", "No end token before so many."),
    _sampling("temperature", float, "T", "0 is greedy."),
    _sampling("top_k", int, "K", "Only the K most likely tokens; 0 is off."),
    _sampling("top_p", float, "P", "Only the likeliest tokens of mass P; 1 is off."),
    _sampling("min_p", float, "P", "Only tokens P times as likely as the likeliest; 0 is off."),
    _sampling("repetition_penalty", float, "X", "Over prompt and new tokens; 1 is off."),
    _sampling("presence_penalty", float, "X", "Over new tokens; 0 is off."),
    _sampling("frequency_penalty", float, "X", "Over new tokens; 0 is off."),
    _sampling("no_repeat_ngram", int, "N", "No n-gram of this size twice; 0 is off."),
    _sampling("seed", int, "S", "Same seed, same text, with any drafter."),
    _sampling("stop", list[str], "TEXT", "End before this text; repeatable."),
    _sampling("banned_words", list[str], "WORD", "Never write this; repeatable.", "--banned-word"),
    _sampling("logprobs", bool, None, "With --json or --out: log-probability of each token."),
    _sampling("top_logprobs", int, "N", "With --logprobs: the N likeliest tokens in its place."),
]
"""Of `Sampling`, whose module imports torch: `--help` does not wait for it."""
OPTIONS = {"engine": options_of(EngineConfig), "sampling": SAMPLING}
"""By group of `with_options`."""

_output, _many = partial(option, "Output"), partial(option, "Many prompts")

_argument = partial(typer.Argument, show_default=False)
Model = Annotated[str, _argument(help="[bold]demo[/bold], a folder, or a hub id: org/model.")]
Text = Annotated[str | None, _argument(metavar="[PROMPT|-]", help="The prompt; - reads stdin.")]
PromptText = Annotated[str | None, option(None, "TEXT", "The prompt.", "--prompt", "-p")]
PromptFile = Annotated[
    Path | None, option(None, "FILE", "The prompt, without its last line break.", "--prompt-file")
]
Chat = Annotated[bool, option(None, None, "Put the prompt in the chat template.", "--chat")]
Samples = Annotated[int, option("Sampling", "N", "Samples of the prompt.", "--n")]
Bf16 = Annotated[bool, option("Model", None, "The same as --dtype bfloat16.", "--bf16")]
Compare = Annotated[bool, _output(None, "Decode plainly first, and compare.", "--compare")]
Json = Annotated[bool, _output(None, "One JSON object on stdout, nothing else.", "--json")]
Plot = Annotated[Path | None, _output(
    "FILE", "A picture: .png, .svg or .pdf; a name that ends in -dark gets a dark one.", "--plot")]
Trace = Annotated[Path | None, _output(
    "HTML", "A page with each round's draft tree, and where the time went.", "--trace")]
Prompts = Annotated[
    Path | None, _many("JSONL", 'Rows with "prompt", "messages", "turns" or "text".', "--prompts")
]
Out = Annotated[Path | None, _many("JSONL", "For results, in order; resumed if there.", "--out")]
Plan = Annotated[
    Path | None, option("Drafting", "FILE", "Begin as plan --json FILE found best.", "--plan")
]
BatchSize = Annotated[int | None, _many("B", "Rows at a time; 8 if not given.", "--batch-size")]
Ray = Annotated[
    int | None, _many("WORKERS", "On Ray workers, a model each; RAY_ADDRESS says where.", "--ray")
]

_ENGINE = {parameter.name: parameter.annotation for parameter in OPTIONS["engine"]}
Dtype, Device = _ENGINE["dtype"], _ENGINE["device"]
