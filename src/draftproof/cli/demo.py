"""``draftproof demo``: the embedded model tells a story; then all drafters are measured on it."""

from __future__ import annotations

from dataclasses import replace

from rich.text import Text

from draftproof.cli import show

OPENINGS = (
    "Once upon a time, there was a little girl named Lily. She",
    "Tom and his dog were playing in the park when",
    "One day, a small bird fell from its nest.",
    "Ben had a big red ball. He loved",
)
TOKENS = 128
"""New tokens of each text."""


def demo() -> None:
    """Watch drafts being accepted on the embedded model, and measure the speed-up."""
    from draftproof.bench import report
    from draftproof.bench.measure import Bench, Setting
    from draftproof.bench.methods import load_methods
    from draftproof.bench.workloads import built_in

    console = show.page()
    with show.status("loading ..."):
        plain, methods = load_methods("demo", built_in("demo")[0], [])
    console.print("[bold]the opening[/] · [green]drafted by the small model[/] · the rest\n")
    console.print(OPENINGS[0], style="bold", end="")
    writer = show.StreamWriter(console.file)
    for chunk in methods[-1].engine.stream(OPENINGS[0], max_new_tokens=TOKENS):
        writer.write(chunk.pieces)
        if chunk.completion is not None:
            writer.end()
            console.print("\n" + show.summary([chunk.completion]), style="dim")
    prompts = [plain.requests.tokens(opening) for opening in OPENINGS]
    settings = [Setting(1, temperature) for temperature in (0.0, 0.7)]
    run = Bench(methods, prompts, settings, replace(plain.sampling, seed=7), TOKENS, 1)
    with show.status("measuring ...") as status:
        run.run(lambda name: status.update(f"measuring: {name}, {len(run.trials)} of {run.total}"))
    figures = report.compute(run)
    console.print()
    console.print(report.table(figures, f"{figures[0].texts} stories of {TOKENS} tokens"))
    command = "draftproof run MODEL -p 'Your prompt' --compare"
    console.print(Text.assemble("Now your own model: ", (command, "bold")))
