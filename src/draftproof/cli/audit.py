"""``draftproof audit``: an engine examined. Exit code 0 unbiased, 1 biased, 2 no verdict."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from draftproof import __version__
from draftproof.cli import options as opt
from draftproof.cli import show
from draftproof.errors import BadInput, DraftproofError

PROMPT = "Once upon a time"


def _option(metavar: str, text: str, *names: str) -> Any:
    return typer.Option(*names, metavar=metavar, help=text)


def audit(
    ctx: typer.Context,
    hf: Annotated[str | None, _option("MODEL", "transformers' assistant mode.", "--hf")] = None,
    endpoint: Annotated[str | None, _option("URL", "An OpenAI-compatible server.")] = None,
    python: Annotated[str | None, _option("MODULE:NAME", "Your sample(prompt, n, seed).")] = None,
    model: Annotated[str | None, _option("NAME", "Server: its model; else a local copy.")] = None,
    reference: Annotated[str | None, _option("MODEL", "Local copy of the served model.")] = None,
    assistant_model: Annotated[str | None, _option("MODEL", "The draft model, with --hf.")] = None,
    num_assistant_tokens: opt.DraftTokens = None,
    prompt: Annotated[str | None, _option("TEXT", "What texts continue.", "--prompt", "-p")] = None,
    prompt_tokens: Annotated[str | None, _option("1,2,3", "... as token ids.")] = None,
    length: Annotated[int | None, _option("N", "New tokens; 3, with a large vocabulary 2.")] = None,
    samples: Annotated[int, _option("N", "Texts to draw.")] = 4000,
    temperature: Annotated[float, _option("T", "0 is greedy.")] = 1.0,
    top_k: Annotated[int, _option("K", "0 is off.")] = 0,
    top_p: Annotated[float, _option("P", "1 is off.")] = 1.0,
    seed: Annotated[int, _option("S", "First seed; every call gets the next one.")] = 0,
    json_: Annotated[Path | None, _option("FILE", "Write figures there.", "--json")] = None,
    dtype: opt.Dtype = "float32",
    device: opt.Device = None,
) -> None:
    """Test somebody else's engine against its model's exact distribution: is it unbiased?"""
    with _no_verdict(), show.status("drawing texts ..."):
        _check(ctx.params)
        from draftproof.core.params import Sampling
        from draftproof.model.loading import load_model, load_tokenizer, stop_tokens
        from draftproof.verify import audit as audits
        from draftproof.verify import engines

        want = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
        name = str(hf or reference or model)
        engine = engines.from_module(python) if python else None
        known = load_model(name, dtype, device)
        if known.config.is_encoder_decoder:
            raise BadInput(f"{name} is an encoder-decoder, of which audit does not know the law")
        vocab, tokenizer = int(known.config.get_text_config().vocab_size), load_tokenizer(name)
        law: Any = engines.ModelLaw(known, want)
        ends, opaque = stop_tokens(known), frozenset[int]()
        length = length if length is not None else 3 if vocab <= 64 else 2
        if hf is not None:
            draft = load_model(str(assistant_model), dtype, device)
            engine = engines.assisted(known, draft, want, length, num_assistant_tokens, ends)
        elif endpoint is not None:
            if tokenizer is None:
                raise BadInput(f"there is no tokenizer in {name}; it tells a server's tokens apart")
            words = engines.Vocabulary(tokenizer, min(len(tokenizer), vocab))
            engine = engines.Endpoint(endpoint, str(model), want, length, words)
            law, opaque = words.merged(law), words.shared
        ids = _prompt(prompt, prompt_tokens, tokenizer, vocab)
        found = audits.audit(
            engine, law, ids, length=length, samples=samples, seed=seed, ends=ends, opaque=opaque
        )
        title = python or endpoint or f"transformers, {hf} with assistant {assistant_model}"
        if json_ is not None:
            about = {"engine": title, "seed": seed, "draftproof": __version__}
            json_.write_text(json.dumps({**found.as_dict(), **about}, indent=1, default=str) + "\n")
    _print(title, found)
    raise typer.Exit(1 if found.biased else 0)


def _check(given: dict[str, Any]) -> None:
    """One engine, and what is needed to judge it."""
    hf, endpoint, python = (given[name] for name in ("hf", "endpoint", "python"))
    if sum(source is not None for source in (hf, endpoint, python)) != 1:
        raise BadInput("give one engine: --hf MODEL, --endpoint URL or --python MODULE:NAME")
    if hf is not None and given["assistant_model"] is None:
        raise BadInput("--hf needs the assistant too; add --assistant-model MODEL")
    if endpoint is not None and None in (given["model"], given["reference"]):
        raise BadInput("--endpoint needs --model NAME and --reference MODEL, its local copy")
    if python is not None and given["model"] is None:
        raise BadInput("--python needs --model MODEL, a local copy of the model")


@contextmanager
def _no_verdict() -> Iterator[None]:
    """Whatever prevents a verdict is one sentence and exit code 2: 1 always means biased."""
    try:
        yield
    except (DraftproofError, OSError) as error:
        print(f"draftproof: {show.one_line(str(error))}", file=sys.stderr)
        raise typer.Exit(2) from None


def _prompt(text: str | None, ids: str | None, tokenizer: Any, vocab: int) -> list[int]:
    if text is not None and ids is not None:
        raise BadInput("both --prompt and --prompt-tokens were given; give one of them")
    if tokenizer is not None and ids is None:
        return [int(token) for token in tokenizer(PROMPT if text is None else text)["input_ids"]]
    if text is not None:
        raise BadInput("the model has no tokenizer; give the prompt with --prompt-tokens 1,2,3")
    parts = (ids or "1,2,3").split(",")
    numbers = [int(part) if part.strip().isdecimal() else -1 for part in parts]
    if min(numbers) < 0 or max(numbers) >= vocab:
        last = vocab - 1
        raise BadInput(f"prompt_tokens was {ids!r}; give token ids from 0 to {last}, such as 1,2,3")
    return numbers


def _print(title: str, found: Any) -> None:
    """The verdict first, then the figures."""
    console, joint = show.page(), found.joint
    style, word = ("bold red", "BIASED") if found.biased else ("bold green", "UNBIASED")
    console.print(f"{word}: {title}", style=style, markup=False)
    interval = f"true one between {joint.low:.3f} and {joint.high:.3f} (99 %)"
    figures = f"total variation {joint.tv:.3f}, {interval}; {found.samples} texts"
    console.print(figures, markup=False)
    table = show.table(None, "test", "p-value", "verdict", "control", "detail")
    for check in found.checks:
        verdict = "[green]passed[/]" if check.passed else "[bold red]failed[/]"
        control = "caught" if check.control else "missed"
        table.add_row(check.name, f"{check.p_value:.2g}", verdict, control, check.detail)
    console.print(table)
    console.print(
        f"A correct engine is accused about {found.false_alarm:.0e} of the time; a wrong one of a "
        f"total variation of {joint.detects:.3f} or more is caught with probability 0.999.",
        style="dim",
    )
