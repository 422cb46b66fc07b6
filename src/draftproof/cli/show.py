"""Output for users: coloured text as it is written, tables, figures in one line, and JSON."""

from __future__ import annotations

import codecs
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.status import Status
from rich.table import Table

from draftproof.cli.foreign_bars import no_foreign_bars
from draftproof.core.progress import listening

if TYPE_CHECKING:
    from draftproof.engine.engine import Completion
    from draftproof.requests.stats import RoundStats

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def harmless(text: str) -> str:
    """`text` without control characters, so that it cannot control a terminal."""
    return _CONTROL.sub("\ufffd", text)


def one_line(sentence: str) -> str:
    """A sentence for stderr, harmless and on one line."""
    return harmless(" ".join(sentence.split()))


def page(stderr: bool = False) -> Console:
    """The console of a command; lines are wrapped only on a terminal."""
    made = Console(stderr=stderr, highlight=False)
    made.soft_wrap = not made.is_terminal
    return made


def table(title: str | None, first: str, *others: str) -> Table:
    """A table with a first column of words and other columns of numbers."""
    made = Table(first, title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for name in others:
        made.add_column(name, justify="right")
    return made


def bars(*columns: ProgressColumn) -> Progress:
    """Progress bars on stderr, if it is a terminal."""
    console = page(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def note(text: str, style: str = "dim") -> None:
    """Print a line on stderr, which is wrapped at words only on a terminal."""
    page(stderr=True).print(harmless(text), style=style, markup=False)


def status(text: str) -> Status:
    """Show `text` and a spinner while the block runs, if stderr is a terminal."""
    return page(stderr=True).status(text)


def print_json(value: object) -> None:
    """Print a JSON object on stdout, escaped if stdout's encoding lacks Unicode's characters."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        is_utf8 = codecs.lookup(encoding).name == "utf-8"
    except LookupError:
        is_utf8 = False
    print(json.dumps(value, ensure_ascii=not is_utf8))


@contextmanager
def loading(text: str) -> Iterator[Callable[[str], None]]:
    """Show the current task and its time on stderr while the block runs, if it is a terminal.

    Other libraries' bars appear as part of it, or not at all. Yields a function that sets the text.
    """
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(20), TimeElapsedColumn()
    with bars(*columns) as progress:
        task = progress.add_task(harmless(text), total=None)

        def doing(what: str) -> None:
            progress.update(task, description=harmless(what), total=None, completed=0)

        def advance(what: str, done: float, total: float | None) -> None:
            shown = {"description": harmless(what)} if what else {}
            progress.update(task, completed=done, total=total, **shown)     # type: ignore[arg-type]

        with listening(doing), no_foreign_bars(advance):
            yield doing


class StreamWriter:
    """Writes a stream of text, with accepted draft tokens in green where colours are shown.

    On a terminal, control characters become the replacement character. wrap: break lines of a
    terminal between words; words are shown when they are complete.
    """

    def __init__(self, out: IO[str], *, wrap: bool = False) -> None:
        self.out, self._open = out, False                       # whether a line is open
        self._wraps, self._column = wrap and out.isatty(), 0
        self._word: list[tuple[str, str]] = []                  # pieces of the unfinished word
        colours = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self.coloured = out.isatty() and colours

    def write(self, pieces: Sequence[tuple[str, str]]) -> None:
        """Write pieces of text, each with its drafter or ""."""
        for piece, drafter in pieces:
            piece = harmless(piece) if self.out.isatty() else piece
            for part in re.findall(r"\s|\S+", piece) if self._wraps else [piece]:
                if self._wraps and not part.isspace():
                    self._word.append((part, drafter))
                else:
                    self._end_word()
                    self._put(part, drafter)
            self._open = not piece.endswith("\n") if piece else self._open
        self.out.flush()

    def _put(self, text: str, drafter: str) -> None:
        self.out.write(f"\x1b[32m{text}\x1b[0m" if self.coloured and drafter else text)
        self._column = 0 if text.endswith("\n") else self._column + cell_len(text)

    def _end_word(self) -> None:
        """Show the completed word, on the next line if it does not fit this one."""
        width = sum(cell_len(text) for text, _ in self._word)
        columns = shutil.get_terminal_size().columns
        if self._word and self._column and self._column + width > columns:
            self.out.write("\n")
            self._column = 0
        for text, drafter in self._word:
            self._put(text, drafter)
        self._word = []

    def end(self) -> None:
        """Finish the last line."""
        self._end_word()
        self._column = 0
        self.out.write("\n" if self._open else "")
        self.out.flush()


def sum_stats(completions: Sequence[Completion]) -> RoundStats:
    """The counts of all rows of a batch, and the seconds of the longest."""
    from draftproof.requests.stats import RoundStats

    total = RoundStats()
    for completion in completions:
        total.add(completion.stats)
    every = [completion.stats.seconds for completion in completions]
    total.seconds = max(every, key=lambda seconds: sum(seconds.values()), default=total.seconds)
    return total


def per_token(completions: Sequence[Completion]) -> float:
    """Seconds per new token."""
    tokens = sum(len(completion.tokens) for completion in completions)
    return sum(sum_stats(completions).seconds.values()) / max(1, tokens)


def summary(completions: Sequence[Completion], seconds: float | None = None) -> str:
    """Tokens, speed, tokens per round, acceptance, and time by part, in one line."""
    stats = sum_stats(completions)
    tokens = sum(len(completion.tokens) for completion in completions)
    total = sum(stats.seconds.values()) if seconds is None else seconds
    figures = [f"{tokens} token{'s' * (tokens != 1)}", f"{tokens / max(total, 1e-9):.1f} tokens/s"]
    if stats.rounds:
        figures.append(f"{stats.tokens_per_round:.2f} tokens/round")
    if stats.drafted:
        figures.append(f"{stats.acceptance:.0%} accepted")
        figures += [f"{stats.plain_share:.0%} of the rounds plain"] if stats.plain_share else []
    if seconds is None:
        figures.append(", ".join(f"{part} {took:.2f} s" for part, took in stats.seconds.items()))
    return " · ".join(figures)


def lossy_distance(stats: RoundStats) -> None:
    """Print the distance from the target on a line after lossy decoding; nothing otherwise."""
    if stats.distance_per_token is not None:
        distance = f"{stats.distance_per_token:.2f} per token (mean total variation)"
        note(f"lossy: distance from the target's distribution: {distance}", style="yellow")


def completion(done: Completion) -> dict[str, object]:
    """A completion for JSON."""
    stats = {name: getattr(done.stats, name) for name in (
        "rounds", "emitted", "drafted", "accepted", "tokens_per_round", "acceptance",
        "acceptance_by_position", "seconds", "plain_share", "distance_per_token")}
    facts = {
        "text": done.text, "tokens": done.tokens, "finish_reason": done.finish_reason,
        "error": str(done.error) if done.error is not None else None, "logprobs": done.logprobs,
        "top_logprobs": done.top_logprobs,
        "stats": {name: value for name, value in stats.items() if value is not None},
    }  # fmt: skip
    return {name: value for name, value in facts.items() if value is not None}
