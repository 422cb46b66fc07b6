"""``draftproof audit``: somebody else's engine under examination. Exit code 0 unbiased, 1 biased, 2 no verdict."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from draftproof import __version__
from draftproof.cli import options as opt
from draftproof.cli import show
from draftproof.errors import BadInput, DraftproofError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

    from draftproof.core.params import Sampling
    from draftproof.verify.audit import Audit
    from draftproof.verify.bug_match import Drafting
    from draftproof.verify.outcomes import Sampler as Engine

PROMPT = "Once upon a time"


def _engine(metavar: str, text: str, *names: str) -> Any:
    return typer.Option(*names, metavar=metavar, rich_help_panel="Whose engine", help=text)


def _test(metavar: str, text: str, *names: str) -> Any:
    return typer.Option(*names, metavar=metavar, rich_help_panel="Test", help=text)


def audit(
    hf: Annotated[str | None, _engine("MODEL", "transformers' assisted generation with this target.", "--hf")] = None,
    hf_style: Annotated[str | None, _engine("STYLE", "... on a tiny random pair: draft-model or gemma4.")] = None,
    endpoint: Annotated[str | None, _engine("URL", "An OpenAI-compatible server.")] = None,
    python: Annotated[str | None, _engine("MODULE:NAME", "Your function sample(prompt, n, seed).")] = None,
    model: Annotated[str | None, _engine("NAME", "The model's name on the server; with --python: its local copy.")] = None,
    reference: Annotated[str | None, _engine("MODEL", "Local copy of the served model: the known law.")] = None,
    assistant_model: Annotated[str | None, _engine("MODEL", "The draft model; otherwise only used to name the bug.")] = None,
    num_assistant_tokens: opt.DraftTokens = None,
    prompt: Annotated[str | None, _test("TEXT", "What the texts continue.", "--prompt", "-p")] = None,
    prompt_tokens: Annotated[str | None, _test("1,2,3", "... as token ids.")] = None,
    length: Annotated[int | None, _test("N", "New tokens per text; 3, with a large vocabulary 2.")] = None,
    samples: Annotated[int, _test("N", "Texts to draw.")] = 4000,
    temperature: Annotated[float, _test("T", "0 is greedy.")] = 1.0,
    top_k: Annotated[int, _test("K", "0 is off.")] = 0,
    top_p: Annotated[float, _test("P", "1 is off.")] = 1.0,
    seed: Annotated[int, _test("S", "First seed; every call of the engine gets the next one.")] = 0,
    json_: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there.")] = None,
    dtype: opt.Dtype = "float32",
    device: opt.Device = None,
) -> None:
    """Test somebody else's engine against its model's exact law: is its speculative decoding unbiased?"""
    with _no_verdict():
        if sum(source is not None for source in (hf, hf_style, endpoint, python)) != 1:
            raise BadInput("give one engine to audit: --hf MODEL, --hf-style STYLE, --endpoint URL or --python MODULE:NAME")
        from transformers.utils import logging

        from draftproof.core.params import Sampling

        logging.set_verbosity_error()

        wanted = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
        plan = _Plan(wanted, length, num_assistant_tokens, dtype or "float32", device, prompt, prompt_tokens)
        with show.status("loading ..."):
            if endpoint is not None:
                job = plan.endpoint(endpoint, model, reference, assistant_model)
            elif python is not None:
                job = plan.python(python, model, assistant_model)
            else:
                job = plan.hf(hf, hf_style, assistant_model)
        start = time.perf_counter()
        found = _examined(job, wanted, samples, seed)
        seconds = time.perf_counter() - start
        if json_ is not None:
            json_.write_text(json.dumps({**found.as_dict(), **_circumstances(job, seed, seconds)}, indent=1) + "\n")
    _print(Console(highlight=False), job.title, found, seconds)
    raise typer.Exit(1 if found.biased else 0)


@contextmanager
def _no_verdict() -> Iterator[None]:
    """Whatever prevents a verdict is one sentence and exit code 2: 1 always means biased."""
    try:
        yield
    except (DraftproofError, OSError) as error:
        print(f"draftproof: {' '.join(str(error).split())}", file=sys.stderr)
        raise typer.Exit(2) from None


@dataclass(frozen=True)
class _Job:
    """An engine, ready to be examined."""

    title: str
    engine: Engine
    law: Any
    prompt: list[int]
    length: int
    ends: tuple[int, ...] = ()
    opaque: frozenset[int] = frozenset()
    drafting: Drafting | None = None
    others: dict[str, Any] | None = None
    simpler: Sequence[Any] = ()


@dataclass(frozen=True)
class _Plan:
    """The options that all engines share."""

    wanted: Sampling
    length: int | None
    tokens: int | None
    dtype: str
    device: str | None
    text: str | None
    ids: str | None

    def hf(self, name: str | None, style: str | None, assistant_name: str | None) -> _Job:
        from draftproof.model.loading import load_model, stop_tokens
        from draftproof.verify import adapters

        if style is not None:
            title, (model, assistant) = f"a tiny random {style} pair", adapters.tiny_pair(style)
        elif name is None or assistant_name is None:
            raise BadInput("--hf needs the assistant too; add --assistant-model MODEL")
        else:
            title, model = f"{name} with assistant {assistant_name}", load_model(name, self.dtype, self.device)
            assistant = adapters.load_assistant(assistant_name, self.dtype, self.device)
        import transformers

        law, length, ends = adapters.ModelLaw(model, self.wanted), self._length(model), stop_tokens(model)

        def engine(wanted: Sampling) -> Engine:
            return adapters.Assisted(model, assistant, wanted, length, self.tokens, ends)

        return _Job(
            f"transformers {transformers.__version__}, {type(assistant).__name__}: {title}", engine(self.wanted), law,
            self._prompt(name, model), length, ends,
            drafting=adapters.assistant_drafting(model, assistant, self.wanted, self.tokens),
            others=adapters.mistaken_laws(law), simpler=adapters.simpler_settings(law, engine),
        )  # fmt: skip

    def endpoint(self, url: str, name: str | None, reference: str | None, assistant_name: str | None) -> _Job:
        from draftproof.model.loading import load_model, load_tokenizer, stop_tokens
        from draftproof.verify import adapters

        if name is None or reference is None:
            raise BadInput("--endpoint needs --model NAME (its name on the server) and --reference MODEL (a local copy of it)")
        model, tokenizer = load_model(reference, self.dtype, self.device), load_tokenizer(reference)
        if tokenizer is None:
            raise BadInput(f"there is no tokenizer in {reference}; tokens of a server are told apart by it")
        vocabulary = adapters.Vocabulary(tokenizer, min(len(tokenizer), int(model.config.get_text_config().vocab_size)))
        length, law = self._length(model), adapters.ModelLaw(model, self.wanted)

        def engine(wanted: Sampling) -> Engine:
            return adapters.Endpoint(url, name, wanted, length, vocabulary)

        return _Job(
            f"{name} at {url}", engine(self.wanted), vocabulary.merged(law), self._prompt(reference, model), length,
            stop_tokens(model), vocabulary.shared, self._drafting(assistant_name),
            {bug: vocabulary.merged(wrong) for bug, wrong in adapters.mistaken_laws(law).items()},
            [setting._replace(law=vocabulary.merged(setting.law)) for setting in adapters.simpler_settings(law, engine)],
        )  # fmt: skip

    def python(self, name: str, model_name: str | None, assistant_name: str | None) -> _Job:
        from draftproof.model.loading import load_model, stop_tokens
        from draftproof.verify import adapters

        if model_name is None:
            raise BadInput("--python needs --model MODEL, a local copy of the model whose law the function should have")
        engine, model = adapters.from_module(name), load_model(model_name, self.dtype, self.device)
        law = adapters.ModelLaw(model, self.wanted)
        return _Job(
            name, engine, law, self._prompt(model_name, model), self._length(model), stop_tokens(model),
            drafting=self._drafting(assistant_name), others=adapters.mistaken_laws(law),
        )  # fmt: skip

    def _drafting(self, name: str | None) -> Drafting | None:
        """The law of a draft model that the engine is said to use."""
        from draftproof.model.loading import load_model
        from draftproof.verify.adapters import ModelLaw
        from draftproof.verify.bug_match import Drafting

        if name is None:
            return None
        drawn = replace(self.wanted, temperature=self.wanted.temperature or 1.0)
        law = ModelLaw(load_model(name, self.dtype, self.device), drawn)
        return Drafting(law, law.under(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0), self.tokens)

    def _length(self, model: PreTrainedModel) -> int:
        small = int(model.config.get_text_config().vocab_size) <= 64
        return self.length if self.length is not None else 3 if small else 2

    def _prompt(self, name: str | None, model: PreTrainedModel) -> list[int]:
        from draftproof.model.loading import load_tokenizer

        if self.text is not None and self.ids is not None:
            raise BadInput("both --prompt and --prompt-tokens were given; give one of them")
        vocab = int(model.config.get_text_config().vocab_size)
        tokenizer = load_tokenizer(name) if name is not None and self.ids is None else None
        if tokenizer is not None:
            return [int(token) for token in tokenizer(self.text if self.text is not None else PROMPT)["input_ids"]]
        if self.text is not None:
            raise BadInput("the model has no tokenizer; give the prompt as token ids with --prompt-tokens 1,2,3")
        try:
            ids = [int(part) for part in (self.ids or "1,2,3").split(",")]
        except ValueError:
            ids = [-1]
        if min(ids) < 0 or max(ids) >= vocab:
            raise BadInput(f"prompt_tokens was {self.ids!r}; give token ids from 0 to {vocab - 1}, such as 1,2,3")
        return ids


def _examined(job: _Job, wanted: Sampling, samples: int, seed: int) -> Audit:
    """The audit, with a bar."""
    from draftproof.verify import adapters
    from draftproof.verify.audit import audit as examine

    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeRemainingColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("drawing texts", total=samples)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, description="drawing texts" if done < total else "looking for the smallest case")

        return examine(
            job.engine, job.law, job.prompt, length=job.length, samples=samples, seed=seed, ends=job.ends, opaque=job.opaque,
            drafting=job.drafting, others=job.others, simpler=job.simpler, setting=adapters.named(wanted), progress=progress,
        )  # fmt: skip


def _circumstances(job: _Job, seed: int, seconds: float) -> dict[str, Any]:
    import torch
    import transformers

    versions = {"draftproof": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    return {"engine": job.title, "seed": seed, "seconds": seconds, "versions": versions}


def _print(console: Console, title: str, found: Audit, seconds: float) -> None:
    """The verdict first, then the figures."""
    joint = found.joint
    style, word = ("bold red", "BIASED") if found.biased else ("bold green", "UNBIASED")
    seen = f"total variation {joint.tv:.3f}, true one between {joint.low:.3f} and {joint.high:.3f} (99 %)"
    console.print(f"{word}: {title}", style=style, markup=False)
    console.print(f"{seen}; {found.setting}, {found.samples} texts of {found.length} tokens, {seconds:.0f} s", markup=False)
    table = Table(box=SIMPLE_HEAD)
    for name in ("test", "p-value", "total variation", "would find", "verdict", "control"):
        table.add_column(name, justify="left" if name == "test" else "right")
    for check in found.checks:
        tv, finds = (f"{check.test.tv:.3f}", f"{check.test.detects:.3f}") if check.test else ("", "")
        verdict = "[green]passed[/]" if check.passed else "[bold red]failed[/]"
        table.add_row(check.name, f"{check.p_value:.2g}", tv, finds, verdict, "caught" if check.control else "missed")
    console.print(table)
    for check in found.checks:
        if not check.passed and check.test is None:
            console.print(f"{check.name}: {check.detail}", markup=False)
    if (case := found.smallest) is not None:
        tokens = "first token" if case.tokens == 1 else f"first {case.tokens} tokens"
        console.print(
            f"Smallest failing case: the {tokens} behind {list(case.prompt)}, {case.setting}: "
            f"total variation {case.tv:.3f}, p = {case.p_value:.2g} from {case.samples} texts", markup=False,
        )  # fmt: skip
    for likeness in found.resembles:
        fits = "fits what was seen" if likeness.p_value > 1e-6 else "nearer than the right law, but does not fit"
        console.print(f"Resembles: {likeness.bug}; its law is {likeness.tv:.3f} away and {fits}", markup=False)
    for line in found.notes:
        console.print(f"Note: {line}", markup=False)
    console.print(
        f"A correct engine is accused about {found.false_alarm:.0e} of the time; a wrong one of a total variation of "
        f"{joint.detects:.3f} or more is caught with probability 0.999.", style="dim",
    )  # fmt: skip
