"""The options that commands share. Those of an engine and of sampling are made from the fields of their dataclasses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from draftproof.engine.config import EngineConfig, cli_fields


class Color(StrEnum):
    """When to colour."""

    auto = "auto"
    always = "always"
    never = "never"


def with_options(**groups: tuple[str, ...] | None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of `engine` and of `sampling`: all of them, or those named.

    The command gets one argument per group: a mapping with what was given, by field.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command).parameters
        hints = get_type_hints(command, include_extras=True)
        kept = [one.replace(annotation=hints[name]) for name, one in own.items() if name not in groups]
        made = {group: _parameters(OPTIONS[group], names) for group, names in groups.items()}
        parameters = [*kept, *[one for group in made.values() for one in group]]

        @wraps(command)
        def run(**given: Any) -> None:
            said = {group: {one.name: given.pop(one.name) for one in ones} for group, ones in made.items()}
            command(**given, **{group: _given(values) for group, values in said.items()})

        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters]
        )
        run.__annotations__ = {one.name: one.annotation for one in parameters}
        return run

    return decorate


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    """What was said: None, an empty list and a flag that was not set say nothing."""
    return {name: value for name, value in values.items() if not (value is None or value is False or value == [])}


@dataclass(frozen=True)
class _Option:
    name: str
    type: Any
    default: Any
    option: Any


def _parameters(options: list[_Option], names: tuple[str, ...] | None) -> list[inspect.Parameter]:
    return [
        inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=Annotated[one.type, one.option])
        for one in options
        if names is None or one.name in names
    ]


def options_of(config: type) -> list[_Option]:
    """The fields of a dataclass that are options."""
    options = []
    for one in cli_fields(config):
        told = one.metadata
        flags = told["flags"] or ("--" + one.name.replace("_", "-"),)
        made = typer.Option(*flags, metavar=told["metavar"], rich_help_panel=told["panel"], help=told["help"])
        options.append(_Option(one.name, told["type"], one.default, made))
    return options


def option(panel: str | None, metavar: str | None, help: str, *flags: str) -> Any:
    """An option of a help panel."""
    return typer.Option(*flags, metavar=metavar, rich_help_panel=panel, help=help)


def _sampling_options() -> list[_Option]:
    rows: list[tuple[str, Any, str | None, str, tuple[str, ...]]] = [
        ("max_new_tokens", int, "N", "Length limit.", ()),
        ("min_new_tokens", int, "N", "No end token before so many.", ()),
        ("temperature", float, "T", "0 is greedy.", ()),
        ("top_k", int, "K", "Only the K most likely tokens; 0 is off.", ()),
        ("top_p", float, "P", "Only the likeliest tokens of mass P; 1 is off.", ()),
        ("min_p", float, "P", "Only tokens P times as likely as the likeliest; 0 is off.", ()),
        ("repetition_penalty", float, "X", "Over prompt and new tokens; 1 is off.", ()),
        ("presence_penalty", float, "X", "Over new tokens; 0 is off.", ()),
        ("frequency_penalty", float, "X", "Over new tokens; 0 is off.", ()),
        ("no_repeat_ngram", int, "N", "No n-gram of this size twice; 0 is off.", ()),
        ("seed", int, "S", "Same seed, same text, with any drafter.", ()),
        ("stop", list[str], "TEXT", "End before this text; repeatable.", ()),
        ("banned_words", list[str], "WORD", "Never write this; repeatable.", ("--banned-word",)),
        ("logprobs", bool, None, "With --json or --out: log-probability of each token.", ("--logprobs",)),
    ]
    return [
        _Option(
            name, bool if kind is bool else kind | None, False if kind is bool else None,
            option("Sampling", metavar, help, *(flags or ("--" + name.replace("_", "-"),))),
        )
        for name, kind, metavar, help, flags in rows
    ]  # fmt: skip


OPTIONS = {"engine": options_of(EngineConfig), "sampling": _sampling_options()}
"""By group of `with_options`."""

_output, _many = partial(option, "Output"), partial(option, "Many prompts")

Model = Annotated[str, typer.Argument(help="[bold]demo[/bold], a folder, or a hub id such as org/model.", show_default=False)]
Text = Annotated[str | None, typer.Argument(metavar="[PROMPT|-]", help="The prompt; - reads stdin.", show_default=False)]
PromptText = Annotated[str | None, option(None, "TEXT", "The prompt.", "--prompt", "-p")]
PromptFile = Annotated[Path | None, option(None, "FILE", "The prompt, without its last line break.", "--prompt-file")]
Chat = Annotated[bool, option(None, None, "Wrap the prompt in the model's chat template.", "--chat")]
Samples = Annotated[int, option("Sampling", "N", "Samples of the prompt.", "--n")]
Bf16 = Annotated[bool, option("Model", None, "The same as --dtype bfloat16.", "--bf16")]
Compare = Annotated[bool, _output(None, "Decode plainly first; compare speed and tokens.", "--compare")]
Json = Annotated[bool, _output(None, "One JSON object on stdout, nothing else.", "--json")]
When = Annotated[Color, _output("WHEN", "Colour accepted draft tokens: auto, always, never.", "--color")]
Prompts = Annotated[Path | None, _many("JSONL", 'Rows with "prompt", "messages", "turns" or "text".', "--prompts")]
Out = Annotated[Path | None, _many("JSONL", "Where results go, in order; resumed if it exists.", "--out")]
BatchSize = Annotated[int | None, _many("B", "Rows at a time; 8 if not given.", "--batch-size")]
Ray = Annotated[int | None, _many("WORKERS", "On so many Ray workers, a model each; RAY_ADDRESS names the cluster.", "--ray")]

_ENGINE = {one.name: one.option for one in OPTIONS["engine"]}
AssistantModel = Annotated[str | None, _ENGINE["assistant_model"]]
DrafterName = Annotated[str | None, _ENGINE["drafter"]]
DraftTokens = Annotated[int | None, _ENGINE["budget"]]
DraftTree = Annotated[str | None, _ENGINE["draft_tree"]]
Rule = Annotated[str | None, _ENGINE["acceptance"]]
Dtype = Annotated[str | None, _ENGINE["dtype"]]
Device = Annotated[str | None, _ENGINE["device"]]
Quantize = Annotated[str | None, _ENGINE["quantize"]]
QuantizeDraft = Annotated[str | None, _ENGINE["quantize_draft"]]
KvCache = Annotated[str | None, _ENGINE["kv_cache"]]
