"""The ``draftproof`` command and its subcommands; a failure is one sentence and an exit code.

Exit codes: 0 done · 1 failed · 2 wrong usage · 130 interrupted. Does not import torch.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from draftproof import __version__
from draftproof.cli import show
from draftproof.cli.audit import audit
from draftproof.cli.bench import bench
from draftproof.cli.chat import chat
from draftproof.cli.demo import demo
from draftproof.cli.doctor import doctor
from draftproof.cli.examples import epilog
from draftproof.cli.plan import plan
from draftproof.cli.prove import prove
from draftproof.cli.run import run
from draftproof.cli.serve import serve
from draftproof.cli.train import train
from draftproof.errors import BadInput, DraftproofError, is_out_of_memory

OUT_OF_MEMORY = (
    "out of memory; use a smaller model, --quantize int8, a smaller batch or fewer --max-new-tokens"
)


class Interrupted(Exception):
    """Ctrl-C, as an error that typer does not handle in its own way."""


class Command(TyperCommand):
    """A subcommand whose ``--help`` is shown as a flag, like others."""

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)
        if option is not None:
            option.metavar = ""
        return option


class Commands(TyperGroup):
    """A group of subcommands that turns interrupts into `Interrupted`."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            raise Interrupted(str(stop) or "interrupted") from None


app = typer.Typer(
    name="draftproof",
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"],
                      "token_normalize_func": lambda name: name.replace("_", "-")},
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
PANELS = {
    "Write text": (run, chat, serve),
    "Make it faster": (demo, bench, plan, train),
    "Check it": (doctor, prove, audit),
}
"""The commands, as `draftproof --help` lists them."""
for panel, commands in PANELS.items():
    for command in commands:
        app.command(cls=Command, rich_help_panel=panel, epilog=epilog(command.__name__))(command)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"draftproof {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Lossless speculative decoding: the text that a model would write alone, faster."""


def main() -> None:
    """Run the command line; every expected failure ends in one sentence on stderr."""
    # These libraries raise their errors as exceptions; log lines and warnings only repeat them.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):
            stream.reconfigure(errors="replace")        # type: ignore[union-attr]
    nowhere = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    sys.stdout, sys.stderr = sys.stdout or nowhere, sys.stderr or nowhere   # replace closed streams
    sys.stdin = sys.stdin or os.fdopen(os.open(os.devnull, os.O_RDONLY))
    try:
        app(prog_name="draftproof")
    except DraftproofError as error:
        if is_out_of_memory(error):
            _leave(OUT_OF_MEMORY, 1)
        _leave(str(error), 2 if isinstance(error, BadInput) else 1)
    except (Interrupted, KeyboardInterrupt) as stop:
        _leave(str(stop) or "interrupted", 130)
    except BrokenPipeError:                             # the reader is gone: discard the rest
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        if is_out_of_memory(error):
            _leave(OUT_OF_MEMORY, 1)
        wrong_name = isinstance(error, (FileNotFoundError, IsADirectoryError, NotADirectoryError))
        text = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        _leave(text, 2 if wrong_name else 1)
    except (MemoryError, RuntimeError) as error:        # PyTorch's is a RuntimeError
        if not is_out_of_memory(error):
            raise
        _leave(OUT_OF_MEMORY, 1)


def _leave(sentence: str, code: int) -> NoReturn:
    """Print the reason on stderr, on one line, and exit."""
    sys.stdout.flush()
    print(f"draftproof: {show.one_line(sentence)}", file=sys.stderr)
    sys.exit(code)
