"""``draftproof demo``: the embedded model tells a story, then races itself with every drafter."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from draftproof.cli import show
from draftproof.cli.setup import engine_of
from draftproof.engine.config import EngineConfig

if TYPE_CHECKING:
    from draftproof.engine.engine import Completion, Engine
    from draftproof.engine.stats import RoundStats

DRAFTERS: dict[str, dict[str, Any]] = {
    "plain": {"drafter": "none"},
    "portfolio": {"drafter": "portfolio"},
    "draft model": {"assistant_model": "demo-draft"},
    "Medusa": {"drafter": "medusa"},
    "ReDrafter": {"drafter": "redrafter"},
}
"""Who races, and what `load` is given for it. The others are measured against the first."""

TOLD_BY = "draft model"
"""Whose drafts are coloured in the story."""

OPENINGS = (
    "Once upon a time, there was a little girl named Lily. She",
    "Tom and his dog were playing in the park when",
    "One day, a small bird fell from its nest.",
    "Ben had a big red ball. He loved",
    "The sun was hot, and Mia wanted to",
    "There was an old man who lived near the sea. Every morning",
)
SAMPLINGS = {"greedy": {"temperature": 0.0}, "temperature 0.7": {"temperature": 0.7, "seed": 7}}
ROUNDING = (
    "* In half precision a tree is read up to rounding: where two tokens are nearly tied for\n"
    "  the model itself, the last bit may decide. In float32 the texts are the same; draftproof\n"
    "  doctor says what this machine promises."
)
"""Said where a text differs."""
STORY, RACE, WARM_UP = 120, 128, 8
"""New tokens of the story, of each race, and of the runs before them that nobody times."""
ENOUGH, PATIENCE = 3, 15.0
"""On a slow machine: after so many stories, no new one when so many seconds have passed."""


@dataclass
class Runner:
    """One drafter's race: its completions, prompt by prompt."""

    name: str
    engine: Engine
    done: list[Completion] = field(default_factory=list)

    @property
    def stats(self) -> RoundStats:
        return show.added(self.done)

    @property
    def speeds(self) -> list[float]:
        """Tokens per second of each prompt."""
        return [1 / show.per_token([completion]) for completion in self.done]


def demo() -> None:
    """Watch it at work on the embedded model, and measure it."""
    console = show.page()
    with show.status("loading ..."):
        runners = _runners(engine_of(EngineConfig("demo")))
        _choose_threads(runners[0].engine)
    _stream(console, next(runner.engine for runner in runners if runner.name == TOLD_BY))
    for title, params in SAMPLINGS.items():
        for runner in runners:
            runner.done.clear()
        _race(console, runners, title, params)
        console.print()
        console.print(_table(title, runners))
        if any(_same(runner, runners[0]) < len(runner.done) for runner in runners):
            console.print(ROUNDING, style="dim")
    console.print()
    command = "draftproof run MODEL -p 'Your prompt' --compare"
    console.print(Text.assemble("Now your own model: ", (command, "bold")))


def _runners(engine: Engine) -> list[Runner]:
    """An engine per drafter around one target."""
    from draftproof.engine.load import load

    model, codec = engine.target.model, engine.codec
    tokenizer = codec.tokenizer if codec else None
    return [Runner(name, load(model, tokenizer=tokenizer, **how)) for name, how in DRAFTERS.items()]


def _choose_threads(engine: Engine) -> None:
    """One thread if that is faster: on busy cores, threads of a small model mostly wait."""
    import torch

    seconds = {}
    for threads in dict.fromkeys((1, torch.get_num_threads())):
        torch.set_num_threads(threads)
        for _ in range(2):                              # the first run pays for the first calls
            seconds[threads] = show.per_token(engine.generate(OPENINGS[0], max_new_tokens=WARM_UP))
    torch.set_num_threads(min(seconds, key=lambda threads: seconds[threads]))


def _stream(console: Console, engine: Engine) -> None:
    """Stream one story, with a legend."""
    prompt = OPENINGS[0]
    drafted = "drafted by the small model", show.ACCEPTED
    console.print(Text.assemble(("the opening", "bold"), " · ", drafted, " · the rest"))
    console.print()
    console.print(prompt, style="bold", end="")
    writer = show.StreamWriter(console.file, started=True)
    done: list[Completion] = []
    for chunk in engine.stream(prompt, max_new_tokens=STORY):
        writer.write(chunk)
        done += [chunk.completion] if chunk.completion else []
    writer.end()
    console.print()
    console.print(show.summary(done), style="dim")


def _race(console: Console, runners: list[Runner], title: str, params: dict[str, Any]) -> None:
    """Every opening with every drafter in turn: a change of the machine's speed hits all alike."""
    from draftproof.core.params import Sampling

    wanted = Sampling(**params)
    for runner in runners:
        runner.engine.generate(OPENINGS[0], max_new_tokens=WARM_UP, sampling=wanted)
    what = TextColumn(f"{title}: {{task.description}}")
    columns = what, BarColumn(), TextColumn("{task.completed}/{task.total}")
    start = time.perf_counter()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(OPENINGS) * len(runners))
        for opening in OPENINGS:
            if len(runners[0].done) >= ENOUGH and time.perf_counter() - start > PATIENCE:
                break
            for runner in runners:
                progress.update(task, description=runner.name)
                runner.done += runner.engine.generate(opening, max_new_tokens=RACE, sampling=wanted)
                progress.advance(task)


def _same(runner: Runner, plain: Runner) -> int:
    """How many texts are the plain ones."""
    pairs = zip(runner.done, plain.done, strict=True)
    return sum(mine.tokens == theirs.tokens for mine, theirs in pairs)


def _table(title: str, runners: list[Runner]) -> Table:
    """One row per drafter; the speed-up is the median over prompts of the ratio to plain."""
    count = len(runners[0].done)
    columns = "tokens/s", "speed-up", "tokens/round", "accepted", "same text"
    table = show.table(f"{title}, {count} stories of {RACE} tokens", "drafter", *columns)
    plain = runners[0]
    for runner in runners:
        pairs = zip(runner.speeds, plain.speeds, strict=True)
        ratio = statistics.median(ours / theirs for ours, theirs in pairs)
        same, stats = _same(runner, plain), runner.stats
        table.add_row(
            runner.name,
            f"{statistics.median(runner.speeds):.0f}",
            f"{ratio:.2f}×",
            f"{stats.tokens_per_round:.2f}",
            f"{stats.acceptance:.0%}" if stats.drafted else "",
            "" if runner is plain else "yes" if same == count else f"{same} of {count} *",
            style="bold green" if ratio > 1.05 else "",
        )
    return table
