"""``draftproof demo``: the embedded model tells a story, then every drafter is measured on it."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from draftproof.cli import show

if TYPE_CHECKING:
    from draftproof.engine.engine import Completion, Engine

OPENINGS = (
    "Once upon a time, there was a little girl named Lily. She",
    "Tom and his dog were playing in the park when",
    "One day, a small bird fell from its nest.",
    "Ben had a big red ball. He loved",
    "The sun was hot, and Mia wanted to",
    "There was an old man who lived near the sea. Every morning",
)
HEATS = (0.0, 0.7)
ROUNDING = (
    "In half precision a tree is read up to rounding: where two tokens are nearly tied for\n"
    "the model itself, the last bit may decide. In float32 the texts are the same; draftproof\n"
    "doctor says what this machine promises."
)
"""Said where a text differs."""
STORY, MEASURED, WARM_UP = 120, 128, 8
"""New tokens of the story, of each measured text, and of the runs before them that nobody times."""
PATIENCE = 30.0
"""Seconds after which a slow machine begins no other opening."""


def demo() -> None:
    """Watch it at work on the embedded model, and measure it."""
    from draftproof.bench import report
    from draftproof.bench.measure import Bench, Setting
    from draftproof.bench.methods import load_methods
    from draftproof.bench.workloads import built_in

    console = show.page()
    with show.status("loading ..."):
        plain, methods = load_methods("demo", built_in("demo")[0], [])
        _choose_threads(plain)
    _stream(console, methods[-1].engine)                # with the draft model
    prompts = [plain.requests.tokens(opening) for opening in OPENINGS]
    settings = [Setting(1, heat) for heat in HEATS]
    run = Bench(methods, prompts, settings, replace(plain.sampling, seed=7), MEASURED, 1)
    end = time.perf_counter() + PATIENCE
    with show.status("measuring ...") as status, suppress(TimeoutError):

        def tick(name: str) -> None:
            whole = run.trials and len(run.trials) % (len(methods) * len(settings)) == 0
            if whole and time.perf_counter() > end:
                raise TimeoutError
            status.update(f"measuring: {name}, {len(run.trials)} of {run.total}")

        run.run(tick)
    figures = report.compute(run)
    console.print()
    console.print(report.table(figures, f"{figures[0].texts} stories of {MEASURED} tokens"))
    if any(one.first_difference for one in figures):
        console.print(ROUNDING, style="dim")
    command = "draftproof run MODEL -p 'Your prompt' --compare"
    console.print(Text.assemble("Now your own model: ", (command, "bold")))


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
