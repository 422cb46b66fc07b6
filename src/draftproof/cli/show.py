"""What a person sees: coloured text as it comes, tables, figures in one line, and JSON."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.color import ColorSystem
from rich.console import Console, ConsoleOptions
from rich.progress import Progress, ProgressColumn
from rich.segment import Segment
from rich.status import Status
from rich.style import Style
from rich.table import Table

from draftproof.cli.options import Color

if TYPE_CHECKING:
    from draftproof.engine.engine import Chunk, Completion
    from draftproof.engine.stats import RoundStats

ACCEPTED = "green"
"""The colour of accepted draft tokens."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def harmless(text: str) -> str:
    """`text` without control characters: nothing may steer a terminal."""
    return _CONTROL.sub("\ufffd", text)


def one_line(sentence: str) -> str:
    """A sentence for stderr: harmless, and on one line."""
    return harmless(" ".join(sentence.split()))


class Page(Console):
    """A rich console that shows no control characters of the texts it is given."""

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(harmless(segment.text), segment.style)


def page(stderr: bool = False, **options: Any) -> Page:
    """Where a command prints; lines keep their length but on a terminal."""
    made = Page(stderr=stderr, highlight=False, **options)
    made.soft_wrap = not made.is_terminal
    return made


def table(title: str | None, first: str, *others: str) -> Table:
    """A table whose first column is of words, the others of numbers."""
    made = Table(first, title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for name in others:
        made.add_column(name, justify="right")
    return made


def bars(*columns: ProgressColumn) -> Progress:
    """Progress on stderr, if that is a terminal."""
    console = page(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def as_json(found: Any) -> str:
    """One line of JSON, without the control characters that JSON leaves as they are."""
    line = json.dumps(found, ensure_ascii=False)
    return re.sub(r"[\x7f-\x9f]", lambda found: f"\\u{ord(found[0]):04x}", line)


class StreamWriter:
    """Writes a stream of text; accepted draft tokens in colour where colours can be seen.

    On a terminal, control characters show as the replacement character.
    """

    def __init__(self, out: IO[str], when: Color = Color.auto, started: bool = False) -> None:
        terminal = out.isatty()
        seen = terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self.out, self.coloured = out, when is Color.always or (when is Color.auto and seen)
        self.terminal, self._open = terminal, started              # whether a line is open
        self._style = Style.parse(ACCEPTED)

    def write(self, chunk: Chunk) -> None:
        for piece, drafted in chunk.pieces:
            piece = harmless(piece) if self.terminal else piece
            coloured = self._style.render(piece, color_system=ColorSystem.STANDARD)
            self.out.write(coloured if self.coloured and drafted else piece)
            self._open = not piece.endswith("\n") if piece else self._open
        self.out.flush()

    def end(self) -> None:
        """Finish the last line."""
        self.out.write("\n" if self._open else "")
        self.out.flush()
        self._open = False


def note(text: str, style: str = "dim") -> None:
    """One line on stderr; wrapped at words only on a terminal."""
    page(stderr=True).print(text, style=style, markup=False)


def status(text: str) -> Status:
    """While the block runs: `text` and a spinner on stderr, if it is a terminal."""
    return page(stderr=True).status(text)


def added(completions: Sequence[Completion]) -> RoundStats:
    """Statistics of completions that ran one after the other."""
    from draftproof.engine.stats import RoundStats

    total = RoundStats()
    for completion in completions:
        total.add(completion.stats)
    return total


def together(completions: Sequence[Completion]) -> RoundStats:
    """Counts of all rows that ran side by side, seconds of the one that ran longest."""
    total = added(completions)
    longest = max(completions, key=lambda completion: sum(completion.stats.seconds.values()))
    total.seconds = dict(longest.stats.seconds)
    return total


def summary(completions: Sequence[Completion]) -> str:
    """Tokens, speed, tokens per round, acceptance and where the time went, in one line."""
    stats, tokens = together(completions), sum(len(completion.tokens) for completion in completions)
    total = sum(stats.seconds.values())
    parts = ", ".join(f"{part} {seconds:.2f} s" for part, seconds in stats.seconds.items())
    figures = [f"{tokens} token{'s' * (tokens != 1)}", f"{tokens / max(total, 1e-9):.1f} tokens/s"]
    if stats.rounds:
        figures.append(f"{stats.tokens_per_round:.2f} tokens/round")
    if stats.drafted:
        figures.append(f"{stats.acceptance:.0%} accepted")
        figures += [f"{stats.plain_share:.0%} of the rounds plain"] if stats.plain_share else []
    return " · ".join([*figures, parts])


def lossy_distance(stats: RoundStats) -> None:
    """After lossy decoding, how far it went, on a line of its own; after exact decoding nothing."""
    if stats.distance_per_token is not None:
        distance = f"{stats.distance_per_token:.2f} per token (mean total variation)"
        note(f"lossy: distance from the target's law: {distance}", style="yellow")


def per_token(completions: Sequence[Completion]) -> float:
    """Seconds per new token."""
    tokens = sum(len(completion.tokens) for completion in completions)
    return sum(together(completions).seconds.values()) / max(1, tokens)


def completion(done: Completion) -> dict[str, Any]:
    """A completion for JSON."""
    return {
        "text": done.text, "tokens": done.tokens, "finish_reason": done.finish_reason,
        **({"error": str(done.error)} if done.error is not None else {}),
        **({"logprobs": done.logprobs} if done.logprobs is not None else {}),
        **({"top_logprobs": done.top_logprobs} if done.top_logprobs is not None else {}),
        "stats": figures(done.stats),
    }  # fmt: skip


def figures(stats: RoundStats) -> dict[str, object]:
    """Statistics for JSON."""
    names = [
        "rounds", "emitted", "drafted", "accepted", "tokens_per_round", "acceptance",
        "acceptance_by_position", "seconds", "plain_share",
    ]  # fmt: skip
    names += ["distance_per_token"] if stats.distance_per_token is not None else []
    widths = {str(width): count for width, count in sorted(stats.by_width.items())}
    return {**{name: getattr(stats, name) for name in names}, "rounds_by_width": widths}
