"""``draftproof audit``: tests an engine. Exit code 0 unbiased, 1 biased, 2 no verdict."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftproof import __version__
from draftproof.cli import options as opt
from draftproof.cli import show
from draftproof.cli.setup import must_have_folders
from draftproof.errors import BadInput, DraftproofError

if TYPE_CHECKING:
    from draftproof.verify.audit import Audit, Distribution

_option = partial(opt.option, None)


OPENINGS = ("Once upon a", "The", "I", "My favourite", "In the morning", "She said that")
"""Candidates for the prompt. The one that the most different tokens are likely to follow is
used."""
WEAK = 5
"""With fewer different texts, a test has little power."""


def audit(
    ctx: typer.Context,
    hf: Annotated[str | None, _option(
        "MODEL", "Audit transformers' assisted generation of this model.", "--hf")] = None,
    endpoint: Annotated[str | None, _option("URL", "Audit an OpenAI-compatible server.")] = None,
    python: Annotated[str | None, _option(
        "MODULE:NAME", "Audit a function sample(prompt, n, seed) of your own.")] = None,
    model: Annotated[str | None, _option(
        "NAME", "With --endpoint, the model's name there; with --python, a local copy of it.",
    )] = None,
    reference: Annotated[str | None, _option("MODEL", "A local copy of the served model.")] = None,
    assistant_model: Annotated[str | None, _option("MODEL", "The draft model, with --hf.")] = None,
    num_assistant_tokens: Annotated[
        int | None,
        _option("K", "Draft K tokens per round. Default: as transformers does."),
    ] = None,
    prompt: Annotated[str | None, _option(
        "TEXT", "The text to continue. Default: an opening that many tokens may follow.",
        "--prompt", "-p")] = None,
    length: Annotated[int | None, _option(
        "N", "Write N tokens. Default: 3, or 2 with a large vocabulary.")] = None,
    samples: Annotated[int, _option("N", "Draw N texts.")] = 4000,
    temperature: Annotated[float, _option("T", "Sampling temperature; 0 is greedy.")] = 1.0,
    top_k: Annotated[int, _option("K", "Sample from the K most likely tokens; 0 is off.")] = 0,
    top_p: Annotated[float, _option(
        "P", "Sample from the most likely tokens that add up to P; 1 is off.")] = 1.0,
    seed: Annotated[int, _option("S", "Seed of the first call; each call adds 1.")] = 0,
    json_: Annotated[Path | None, _option("FILE", "Save the figures as JSON.", "--json")] = None,
    dtype: opt.Dtype = "float32",
    device: opt.Device = None,
) -> None:
    """Test whether another engine samples from its model's exact distribution."""
    try:
        must_have_folders(json_)
        with show.loading("loading the model"):
            title, result = _audited(SimpleNamespace(**ctx.params))
    except Exception as error:                          # 1 always means biased
        if not isinstance(error, (DraftproofError, OSError)):
            traceback.print_exc()
        print(f"draftproof: {show.one_line(str(error))}", file=sys.stderr)
        raise typer.Exit(2) from None
    if json_ is not None:
        verdict = {"engine": title, "verdict": "biased" if result.biased else "unbiased"}
        about = {"samples": samples, "seed": seed, "draftproof": __version__}
        checks = [{**check._asdict(), "passed": check.passed} for check in result.checks]
        text = json.dumps({**verdict, **about, "checks": checks}, indent=1) + "\n"
        json_.write_text(text, encoding="utf-8")
    _show(title, result, samples)
    raise typer.Exit(int(result.biased))


def _show(title: str, result: Audit, samples: int) -> None:
    """Show the verdict, a table of the tests, and their power."""
    style, word = ("bold red", "BIASED") if result.biased else ("bold green", "UNBIASED")
    if not result.biased and result.joint.cells < WEAK:
        style = "bold yellow"
        word = (f"UNBIASED, but a weak test ({result.joint.cells} different texts; give a --prompt "
                "that can go on in more ways, or a higher --temperature)")  # fmt: skip
    console, table = show.page(), show.table(None, "test", "p-value", "verdict", "detail")
    console.print(f"{word}: {title}", style=style, markup=False)
    for check in result.checks:
        passed = "[green]passed[/]" if check.passed else "[bold red]failed[/]"
        table.add_row(check.name, f"{check.p_value:.2g}", passed, check.detail)
    console.print(table)
    console.print(
        f"{samples} texts, total variation {result.joint.tv:.3f}. A correct engine is accused "
        f"about {1e-6 * len(result.checks):.0e} of the time; a wrong one of a total variation of "
        f"{result.joint.detects:.3f} or more is caught with probability 0.999.", style="dim",
    )  # fmt: skip


def _choices(distribution: Distribution, prompt: Sequence[int], samples: int) -> int:
    """The number of first tokens that are likely enough to be counted one by one."""
    return int((distribution([tuple(prompt)])[0] * samples >= 20).sum())


def _audited(options: SimpleNamespace) -> tuple[str, Audit]:
    """A description of the engine, and its audit. options: the command's options by name."""
    from draftproof.core.params import Sampling
    from draftproof.model.loading import load_model, load_tokenizer, stop_tokens
    from draftproof.verify import audit as audits
    from draftproof.verify.user_sampler import from_module

    hf, endpoint, python = options.hf, options.endpoint, options.python
    assistant = options.assistant_model
    length, tokens = options.length, options.num_assistant_tokens
    if sum(source is not None for source in (hf, endpoint, python)) != 1:
        raise BadInput("give one engine: --hf MODEL, --endpoint URL or --python MODULE:NAME")
    needed = ["--assistant-model"] if hf else ["--model", "--reference"][: 1 + bool(endpoint)]
    flags = {"--assistant-model": assistant, "--model": options.model,
             "--reference": options.reference,
             "--num-assistant-tokens": None if hf else tokens}
    for name, value in flags.items():
        if (name in needed) != (value is not None):
            raise BadInput(f"this engine needs {name} too" if value is None else
                           f"{name} is not for this engine; leave it out")
    for name, number in (("length", length), ("num_assistant_tokens", tokens)):
        if number is not None and number < 1:
            raise BadInput(f"{name} was {number}; it must be at least 1")
    want = Sampling(temperature=options.temperature, top_k=options.top_k, top_p=options.top_p)
    engine: Any = from_module(python) if python else None
    name = hf or options.reference or options.model
    known, tokenizer = load_model(name, options.dtype, options.device), load_tokenizer(name)
    if known.config.is_encoder_decoder:
        raise BadInput(f"{name} is an encoder-decoder, which audit does not support")
    vocab, ends = int(known.config.get_text_config().vocab_size), stop_tokens(known)
    distribution, opaque = audits.model_distribution(known, want), frozenset[int]()
    length = length or (3 if vocab <= 64 else 2)
    if hf:
        draft = load_model(assistant, options.dtype, options.device)
        engine = audits.assisted(known, draft, want, length, tokens, ends)
    elif endpoint:
        if tokenizer is None:
            raise BadInput(f"there is no tokenizer in {name}; it splits a server's text")
        size = min(len(tokenizer), vocab)
        engine = audits.Endpoint(endpoint, options.model, want, length, tokenizer, size)
        distribution, opaque = engine.merged(distribution), engine.shared
    if tokenizer is None and options.prompt is not None:
        raise BadInput(f"there is no tokenizer in {name} to encode --prompt; leave --prompt out")
    texts = OPENINGS if options.prompt is None else (options.prompt,)
    prompts = [(1, 2, 3)] if tokenizer is None else [tokenizer(text)["input_ids"] for text in texts]
    ids = max(prompts, key=lambda prompt: _choices(distribution, prompt, options.samples))
    result = audits.audit(
        engine, distribution, list(map(int, ids)), length=length, samples=options.samples,
        seed=options.seed, ends=ends, opaque=opaque,
    )  # fmt: skip
    return python or endpoint or f"transformers, {hf} with assistant {assistant}", result
