"""``draftproof chat``: a conversation in the terminal."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftproof.cli import options as opt
from draftproof.cli import show
from draftproof.cli.setup import alone_engine, config_of, start_pytorch
from draftproof.errors import BadInput

if TYPE_CHECKING:
    from draftproof.core.params import Sampling
    from draftproof.engine.engine import Completion, Engine

HELP = (
    "/reset forgets the conversation, /stats shows the speed of the last answer, /help shows this, "
    "/exit or Ctrl-D leaves; Ctrl-C stops an answer. Start chat with --system TEXT to set a system "
    "message"
)
MaxLength = Annotated[int, typer.Option(
    min=2, metavar="N", help="The most tokens of the whole conversation, answers included.")]
COMMANDS = ("/reset", "/stats", "/help", "/exit", "/quit")
System = Annotated[str | None, typer.Option(metavar="TEXT", help="The system message.")]


@opt.with_options(engine=None, sampling=None)
def chat(
    model: opt.Model, system: System = None, max_model_len: MaxLength = 4096,
    bf16: opt.Bf16 = False, *, engine: dict[str, object], sampling: dict[str, Any],
) -> None:  # fmt: skip
    """Chat with a model; Ctrl-C stops the answer, not the conversation."""
    config = config_of(model, engine, bf16)
    start_pytorch(config, sampling)
    loaded = alone_engine(config, "chat", 512 << 20)
    length = min(max_model_len, loaded.target.context)
    wanted = _to_the_end(replace(loaded.sampling, **sampling), length)
    opening = [{"role": "system", "content": system}] if system else []
    _must_chat(loaded, [*opening, {"role": "user", "content": "Hello"}], wanted)
    _edit_lines()
    show.note(f"{loaded.target.name}, drafts by {loaded.drafter.name}. {HELP}")
    turns, last = opening, None
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            show.note("(/exit or Ctrl-D leaves)")
            continue
        command = line.lower()
        if command in ("/exit", "/quit", "exit", "quit"):
            return
        if command == "/reset":
            turns = opening
            show.note("the conversation is forgotten")
        elif command == "/stats":
            show.note(show.summary([last]) if last else "there was no answer yet")
        elif command == "/help":
            show.note(HELP)
        elif _is_command(command):
            show.note(f"there is no command {line.split()[0]}. {HELP}")
        elif line:
            messages = [*turns, {"role": "user", "content": line}]
            try:
                answer, last = _answer(loaded, messages, wanted)
            except BadInput as error:                           # perhaps the context is full
                show.note(f"{error}; /reset begins a new conversation", style="yellow")
                continue
            turns = [*messages, {"role": "assistant", "content": answer}]


def _is_command(line: str) -> bool:
    """Whether a line is meant as a command, such as /hlep; a path such as /etc/hosts is text."""
    return line.startswith("/") and bool(get_close_matches(line, COMMANDS, 1, 0.6))


def _to_the_end(sampling: Sampling, length: int) -> Sampling:
    """Let answers end where the model ends them or the context is full, unless a limit is set."""
    if sampling.max_new_tokens is None and sampling.max_length is None:
        return replace(sampling, max_length=length)
    return sampling


def _must_chat(engine: Engine, turns: list[dict[str, str]], sampling: Sampling) -> None:
    """Raise BadInput for a model that has no chat template."""
    try:
        engine.check(turns, sampling=sampling)
    except BadInput as error:
        if "has no chat template" not in str(error):
            raise
        name = engine.target.name
        raise BadInput(
            f"{name} is a base model: it has no chat template, and only continues text. Name an "
            f"instruction-tuned model, or run: draftproof run {name} -p TEXT"
        ) from error


def _edit_lines() -> None:
    """Let `input` edit lines and keep a history, where the platform supports that."""
    if sys.stdin.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401


def _answer(
    engine: Engine, turns: list[dict[str, str]], sampling: Sampling
) -> tuple[str, Completion | None]:
    """The model's answer up to Ctrl-C, and its figures if it is complete."""
    writer, text, done = show.StreamWriter(sys.stdout, wrap=True), "", None
    with suppress(KeyboardInterrupt):
        for chunk in engine.stream(turns, sampling=sampling):
            writer.write(chunk.pieces)
            text, done = text + chunk.text, chunk.completion
    writer.end()
    return text, done.checked() if done else None
