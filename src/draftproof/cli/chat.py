"""``draftproof chat``: a conversation in the terminal."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftproof.cli import options as opt
from draftproof.cli import show
from draftproof.cli.setup import alone_engine, config_of
from draftproof.errors import BadInput

if TYPE_CHECKING:
    from draftproof.core.params import Sampling
    from draftproof.engine.engine import Completion, Engine

HELP = (
    "/reset forgets the conversation, /stats tells the figures of the last answer, /exit or Ctrl-D "
    "leaves"
)
MaxLength = Annotated[int, typer.Option(
    min=2, metavar="N", help="Tokens of the conversation; an answer goes on to its end.")]
System = Annotated[str | None, typer.Option(metavar="TEXT", help="A system message to begin with.")]


@opt.with_options(engine=None, sampling=None)
def chat(
    model: opt.Model, system: System = None, max_model_len: MaxLength = 4096,
    bf16: opt.Bf16 = False, *, engine: dict[str, Any], sampling: dict[str, Any],
) -> None:  # fmt: skip
    """Talk to a model; Ctrl-C ends an answer, and not the conversation."""
    loaded = alone_engine(config_of(model, engine, bf16), "chat", 512 << 20)
    wanted = replace(loaded.sampling, **sampling)
    if wanted.max_new_tokens is None and wanted.max_length is None:
        wanted = replace(wanted, max_length=min(max_model_len, loaded.target.context))
    begin = [{"role": "system", "content": system}] if system else []
    loaded.check([*begin, {"role": "user", "content": "Hello"}], sampling=wanted)   # a template?
    turns, last = begin, None
    show.note(HELP)
    while True:
        try:
            said = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            show.note("(/exit or Ctrl-D leaves)")
            continue
        if said == "/exit":
            return
        if said == "/reset":
            turns = begin
        elif said == "/stats":
            show.note(show.summary([last]) if last else "there was no answer yet")
        elif said.startswith("/"):
            show.note(HELP)
        elif said:
            asked = [*turns, {"role": "user", "content": said}]
            try:
                answer, last = _answer(loaded, asked, wanted)
            except BadInput as error:                           # the context is full, perhaps
                show.note(f"{error}; /reset begins anew", style="yellow")
                continue
            turns = [*asked, {"role": "assistant", "content": answer}]


def _answer(
    engine: Engine, turns: list[dict[str, str]], wanted: Sampling
) -> tuple[str, Completion | None]:
    """What the model says, as far as Ctrl-C lets it; and figures, if it came to an end."""
    writer, text, done = show.StreamWriter(sys.stdout), "", None
    with suppress(KeyboardInterrupt):
        for chunk in engine.stream(turns, sampling=wanted):
            writer.write(chunk.pieces)
            text, done = text + chunk.text, chunk.completion
    writer.end()
    return text, done.checked() if done else None
