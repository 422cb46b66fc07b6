"""The options that commands share: their names, help and panels. Knows typer, nothing of models."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer


class Acceptance(StrEnum):
    """Which drafted tokens stand."""

    match = "match"
    rejection = "rejection"
    block = "block"


class Parallel(StrEnum):
    """What shards a target."""

    tensor = "tensor"
    deepspeed = "deepspeed"


class Color(StrEnum):
    """When to colour."""

    auto = "auto"
    always = "always"
    never = "never"



def _in(panel: str | None, metavar: str | None, text: str, *names: str) -> Any:
    """An option of a help panel."""
    return typer.Option(*names, metavar=metavar, rich_help_panel=panel, help=text)


_drafting, _sampling = partial(_in, "Drafting"), partial(_in, "Sampling")
_where, _output, _many = partial(_in, "Model"), partial(_in, "Output"), partial(_in, "Many prompts")

Model = Annotated[str, typer.Argument(help="[bold]demo[/bold], a folder, or a hub id such as org/model.", show_default=False)]
Text = Annotated[str | None, typer.Argument(metavar="[PROMPT|-]", help="The prompt; - reads stdin.", show_default=False)]
PromptText = Annotated[str | None, _in(None, "TEXT", "The prompt.", "--prompt", "-p")]
PromptFile = Annotated[Path | None, _in(None, "FILE", "The prompt, without its last line break.")]
Chat = Annotated[bool, _in(None, None, "Wrap the prompt in the model's chat template.", "--chat")]

AssistantModel = Annotated[str | None, _drafting("MODEL", "Draft with this smaller model: demo-draft, folder, hub id.")]
DrafterName = Annotated[
    str | None,
    _drafting(
        "NAME",
        "portfolio (default), prompt-lookup, suffix, recycling, none, medusa, redrafter, self-int8, self-layers:N, a folder; "
        "several as one: medusa+suffix.",
        "--drafter",
    ),
]
DraftTokens = Annotated[
    int | None, _drafting("K", "Draft K tokens in every round; without it, as many as pay.", "--num-assistant-tokens")
]
DraftTree = Annotated[str | None, _drafting("TREE", "Children per node, level by level (3,2,1), or a published tree.")]
Rule = Annotated[
    Acceptance | None,
    _drafting("RULE", "match (default): the same text; rejection, block: the same law.", "--acceptance"),
]
Lossy = Annotated[
    str | None, _drafting("typical[:E,D]", "Give up the target's law: what is likely enough stands.", "--lossy")
]

NewTokens = Annotated[int | None, _sampling("N", "Length limit.")]
MinNewTokens = Annotated[int | None, _sampling("N", "No end token before so many.")]
Temperature = Annotated[float | None, _sampling("T", "0 is greedy.")]
TopK = Annotated[int | None, _sampling("K", "Only the K most likely tokens; 0 is off.")]
TopP = Annotated[float | None, _sampling("P", "Only the likeliest tokens of mass P; 1 is off.")]
MinP = Annotated[float | None, _sampling("P", "Only tokens P times as likely as the likeliest; 0 is off.")]
Repetition = Annotated[float | None, _sampling("X", "Over prompt and new tokens; 1 is off.")]
Presence = Annotated[float | None, _sampling("X", "Over new tokens; 0 is off.")]
Frequency = Annotated[float | None, _sampling("X", "Over new tokens; 0 is off.")]
NoRepeat = Annotated[int | None, _sampling("N", "No n-gram of this size twice; 0 is off.")]
Seed = Annotated[int | None, _sampling("S", "Same seed, same text, with any drafter.")]
Stop = Annotated[list[str] | None, _sampling("TEXT", "End before this text; repeatable.")]
Banned = Annotated[list[str] | None, _sampling("WORD", "Never write this; repeatable.", "--banned-word")]
Samples = Annotated[int, _sampling("N", "Samples of the prompt.", "--n")]

Dtype = Annotated[str | None, _where("DTYPE", "bfloat16, float16, float32 or float64.")]
Device = Annotated[str | None, _where("DEVICE", "cpu, cuda, cuda:1, hpu, ...")]
Bf16 = Annotated[bool, _where(None, "The same as --dtype bfloat16.", "--bf16")]
Graphs = Annotated[
    bool, _where(None, "Record forwards and replay them: on a Gaudi, or on the --device given.", "--use-hpu-graphs")
]
Compile = Annotated[bool, _where(None, "Have torch.compile make the forwards; the first text waits for it.", "--compile")]
Bucket = Annotated[int | None, _where("N", "Closed shapes, with room for texts in multiples of N tokens.", "--bucket-size")]
Quantize = Annotated[str | None, _where("KIND", "int8, int4 or fp8 weights: faster, and another text.")]
QuantizeDraft = Annotated[str | None, _where("KIND", "The same for the draft model: faster, the same text; none: as it is.")]
KvCache = Annotated[str | None, _where("KIND", "int8 or fp8 keys and values: half the memory, and another text.")]

Sharding = Annotated[
    Parallel | None,
    _where("ENGINE", "Shard the model over the ranks of torchrun: tensor (transformers' own) or deepspeed.", "--parallel"),
]

Compare = Annotated[bool, _output(None, "Decode plainly first; compare speed and tokens.", "--compare")]
Json = Annotated[bool, _output(None, "One JSON object on stdout, nothing else.", "--json")]
Logprobs = Annotated[bool, _output(None, "With --json or --out: log-probability of each token.", "--logprobs")]
When = Annotated[Color, _output("WHEN", "Colour accepted draft tokens: auto, always, never.", "--color")]

Prompts = Annotated[Path | None, _many("JSONL", 'Rows with "prompt", "messages", "turns" or "text".')]
Out = Annotated[Path | None, _many("JSONL", "Where results go, in order; resumed if it exists.")]
BatchSize = Annotated[int | None, _many("B", "Rows at a time; 8 if not given.")]
Ray = Annotated[int | None, _many("WORKERS", "On so many Ray workers, a model each; RAY_ADDRESS names the cluster.", "--ray")]
