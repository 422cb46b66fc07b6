"""``draftproof chat``: a conversation in the terminal."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftproof.cli import options as opt
from draftproof.cli import show
from draftproof.cli.setup import engine_of, gaudi_words
from draftproof.engine.config import EngineConfig
from draftproof.errors import BadInput

if TYPE_CHECKING:
    from draftproof.core.params import Sampling
    from draftproof.engine.engine import Completion, Engine

MEMORY = 512 << 20
"""Bytes for the keys and values of what was said, so that it is read once."""
HELP = (
    "/reset forgets the conversation, /stats tells the figures of the last answer, /exit or Ctrl-D "
    "leaves"
)
System = Annotated[str | None, typer.Option(metavar="TEXT", help="A system message to begin with.")]


@opt.with_options(engine=None, sampling=None)
def chat(
    model: opt.Model, system: System = None, color: opt.When = opt.Color.auto,
    bf16: opt.Bf16 = False, *, engine: dict[str, Any], sampling: dict[str, Any],
) -> None:  # fmt: skip
    """Talk to a model; Ctrl-C ends an answer, and not the conversation."""
    from draftproof.engine.prefix_cache import PrefixCache

    config = EngineConfig(model, **gaudi_words(engine, bf16))
    if config.parallel is not None:
        raise BadInput("a conversation runs in one process; leave --parallel out")
    loaded = engine_of(config)
    loaded.prefixes = PrefixCache(MEMORY)
    wanted = replace(loaded.sampling, **sampling)
    begin = [{"role": "system", "content": system}] if system else []
    hello = [*begin, {"role": "user", "content": "Hello"}]
    loaded.check(hello, sampling=wanted)                                # has it a template?
    turns, last = list(begin), None
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
            turns = list(begin)
        elif said == "/stats":
            show.note(show.summary([last]) if last else "there was no answer yet")
        elif said.startswith("/"):
            show.note(HELP)
        elif said:
            try:
                asked = [*turns, {"role": "user", "content": said}]
                answer, last = _answer(loaded, asked, wanted, color)
            except BadInput as error:                           # the context is full, perhaps
                show.note(f"{error}; /reset begins anew", style="yellow")
                continue
            turns = [*asked, {"role": "assistant", "content": answer}]


def _answer(
    engine: Engine, turns: list[dict[str, str]], wanted: Sampling, color: opt.Color
) -> tuple[str, Completion | None]:
    """What the model says, as far as Ctrl-C lets it; and figures, if it came to an end."""
    writer, text, done = show.StreamWriter(sys.stdout, color), "", None
    try:
        for chunk in engine.stream(turns, sampling=wanted, max_new_tokens=wanted.max_new_tokens):
            writer.write(chunk)
            text, done = text + chunk.text, chunk.completion
    except KeyboardInterrupt:
        pass
    writer.end()
    return text, done.checked() if done else None
