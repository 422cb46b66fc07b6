"""Options that commands share; an engine's options are made from the fields of its config."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, get_origin

import typer

from draftproof.engine.config import EngineConfig, cli_fields

Command = Callable[..., None]


def with_options(**groups: tuple[str, ...] | None) -> Callable[[Command], Command]:
    """Add the options of `engine` and of `sampling` to a command: all of them, or those named.

    The command gets one argument per group: a mapping of the given options by field.
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
        parameters = sorted(
            [*kept, *[parameter for group in made.values() for parameter in group]],
            key=_panel_order,
        )

        @wraps(command)
        def run(**values: object) -> None:
            grouped: dict[str, dict[str, object]] = {group: {} for group in made}
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


PANELS = ("Output", "Many prompts", "Server", "Sampling", "Drafting", "Model", "Hardware")
"""Panels of a command's help that come last, in this order; those of the command come first."""


def _panel_order(parameter: inspect.Parameter) -> int:
    """The position of an option's panel; the command's own arguments and panels come first."""
    about = parameter.annotation.__metadata__[0] if get_origin(parameter.annotation) else None
    panel = getattr(about, "rich_help_panel", None)
    return 1 + PANELS.index(panel) if panel in PANELS else 0


def option(panel: str | None, metavar: str | None, help: str, *flags: str) -> object:
    """An option of a help panel. metavar: None for a flag."""
    return typer.Option(*flags, metavar=metavar or "", rich_help_panel=panel, help=help)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _parameter(name: str, kind: object, default: object, option: object) -> inspect.Parameter:
    """A keyword of a command in typer's form."""
    annotation, keyword = Annotated[kind, option], inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword, default=default, annotation=annotation)


def options_of(config: type) -> list[inspect.Parameter]:
    """The options among the fields of a dataclass."""
    made = []
    for field in cli_fields(config):
        about = field.metadata
        flags = about["flags"] or (flag(field.name),)
        declared = option(about["panel"], about["metavar"], about["help"], *flags)
        made.append(_parameter(field.name, about["type"], field.default, declared))
    return made


def _sampling(
    name: str, kind: type, metavar: str | None, help: str, flags: str = ""
) -> inspect.Parameter:
    declared = option("Sampling", metavar, help, flags or flag(name))
    return _parameter(name, kind if kind is bool else kind | None,
                      False if kind is bool else None, declared)


SAMPLING = [
    _sampling("max_new_tokens", int, "N", "Write at most N tokens. Default: what the model's "
              "generation_config says, else 128."),
    _sampling("min_new_tokens", int, "N", "Write at least N tokens before an end token. Default: "
              "0."),
    _sampling("temperature", float, "T", "Sampling temperature; 0 is greedy. Default: what the "
              "model's generation_config says, else 0."),
    _sampling("top_k", int, "K", "Sample from the K most likely tokens only; 0 is off. Default: "
              "the model's, else 0."),
    _sampling("top_p", float, "P", "Sample from the most likely tokens whose probabilities add "
              "up to P; 1 is off. Default: the model's, else 1."),
    _sampling("min_p", float, "P", "Sample from tokens at least P times as likely as the most "
              "likely one; 0 is off. Default: the model's, else 0."),
    _sampling("repetition_penalty", float, "X", "Penalise tokens that occur in the prompt or the "
              "text; 1 is off. Default: the model's, else 1."),
    _sampling("presence_penalty", float, "X", "Subtract X from the logits of tokens already "
              "written. Default: 0."),
    _sampling("frequency_penalty", float, "X", "Subtract X from a token's logit for each time it "
              "was written. Default: 0."),
    _sampling("no_repeat_ngram", int, "N", "Never repeat a sequence of N tokens; 0 is off. "
              "Default: the model's, else 0."),
    _sampling("seed", int, "S", "The same seed gives the same text, with any drafter. Default: 0."),
    _sampling("stop", list[str], "TEXT", "Stop before this text; repeatable."),
    _sampling("banned_words", list[str], "WORD", "Never write this; repeatable.", "--banned-word"),
    _sampling("logprobs", bool, None, "Report the log-probability of each token; needs --json or "
              "--out."),
    _sampling("top_logprobs", int, "N", "Also report the N most likely tokens at each position; "
              "needs --logprobs. Default: 0."),
]
"""Options of `Sampling`. Its module imports torch, which `--help` need not wait for."""
OPTIONS = {"engine": options_of(EngineConfig), "sampling": SAMPLING}
"""The options of each group of `with_options`."""

_output, _many = partial(option, "Output"), partial(option, "Many prompts")

_argument = partial(typer.Argument, show_default=False)
Model = Annotated[str, _argument(
    metavar="MODEL", help="The model: [bold]demo[/bold], a folder, a .gguf file or a hub id.")]
Text = Annotated[str | None, _argument(metavar="[PROMPT|-]", help="The prompt; - reads stdin.")]
PromptText = Annotated[str | None, option(None, "TEXT", "The prompt.", "--prompt", "-p")]
PromptFile = Annotated[Path | None, option(
    None, "FILE", "Read the prompt from a file, without its final line break.", "--prompt-file")]
Chat = Annotated[bool, option(None, None, "Apply the model's chat template to the prompt.",
                              "--chat")]
Samples = Annotated[int, option("Sampling", "N", "Write N samples of the prompt.", "--n")]
Bf16 = Annotated[bool, option("Model", None, "The same as --dtype bfloat16.", "--bf16")]
Compare = Annotated[bool, _output(None, "Decode without drafts first, and compare text and speed.",
                                  "--compare")]
Json = Annotated[bool, _output(None, "Write one JSON object to stdout, and nothing else.",
                               "--json")]
Plot = Annotated[Path | None, _output(
    "FILE", "Save a plot (.png, .svg or .pdf); a dark one if the name ends in -dark.", "--plot")]
Trace = Annotated[Path | None, _output(
    "HTML", "Save a page with the draft tree and the time of every round.", "--trace")]
Prompts = Annotated[Path | None, _many(
    "JSONL", 'A file of prompts: rows with "prompt", "messages", "turns" or "text".', "--prompts")]
Out = Annotated[Path | None, _many(
    "JSONL", "Write the results here, in order; those that are there already are kept.", "--out")]
Plan = Annotated[Path | None, option(
    "Drafting", "FILE", "Use the drafter and the draft tokens of a plan saved by plan --json.",
    "--plan")]
BatchSize = Annotated[int | None, _many(
    "B", "Run B prompts at a time. Default: 8.", "--batch-size")]
Ray = Annotated[int | None, _many(
    "WORKERS", "Run on Ray workers, each with its own copy of the model, at RAY_ADDRESS.",
    "--ray")]

_ENGINE = {parameter.name: parameter.annotation for parameter in OPTIONS["engine"]}
Dtype, Device = _ENGINE["dtype"], _ENGINE["device"]
