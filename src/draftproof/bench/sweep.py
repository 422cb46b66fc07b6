"""Beams of a recurrent drafter: width x length x nodes, each against plain decoding, as a table and a picture.

    python -m draftproof.bench.sweep [--model demo] [--head redrafter] [--prompts FILE] [--temperature T] [--plot FILE.png]

Every prompt is written plainly and with each preset in turn in one process, the order rotating, and texts are compared; a
speed-up is the median over prompts and rounds of the ratio to plain, tokens per round count the target's own token.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import draftproof as dp
from draftproof.bench import plots
from draftproof.bench.workloads import GENERAL, STORIES, read
from draftproof.core.params import Sampling
from draftproof.drafters.checkpoints import read_head
from draftproof.drafters.redrafter import ReDrafter, ReDrafterHead
from draftproof.engine.engine import Engine, Prompt
from draftproof.engine.load import HEADS
from draftproof.engine.stats import RoundStats
from draftproof.errors import BadInput, DraftproofError
from draftproof.model.loading import resolve

WARM_UP = 8


class Preset(NamedTuple):
    """A beam search: beams, drafted tokens of each, and how many of the tokens weighed are verified."""

    width: int
    length: int
    nodes: int


@dataclass
class Lane:
    """What came of one preset, run by run."""

    engine: Engine
    seconds: list[float] = field(default_factory=list)         # per token
    texts: list[list[int]] = field(default_factory=list)
    stats: RoundStats = field(default_factory=RoundStats)

    def speed_up(self, plain: Lane) -> float:
        """Median of the ratios to plain decoding."""
        return statistics.median(theirs / ours for ours, theirs in zip(self.seconds, plain.seconds, strict=True))


def presets(widths: Sequence[int], lengths: Sequence[int], nodes: Sequence[int]) -> list[Preset]:
    """All that make sense: no more nodes than a search weighs, no fewer than a beam is long."""
    return [
        Preset(width, length, size)
        for width in widths
        for length in lengths
        for size in sorted({min(size, width + width * width * (length - 1)) for size in nodes})
        if size >= length
    ]


def sweep(
    plain: Engine, head: ReDrafterHead, grid: Sequence[Preset], prompts: Sequence[Prompt], *,
    new_tokens: int, sampling: Sampling, rounds: int = 1, told: Callable[[], None] = lambda: None,
) -> tuple[Lane, dict[Preset, Lane]]:  # fmt: skip
    """Write every prompt in every way, `rounds` times; `told` hears of every text."""
    lanes = {preset: Lane(_engine(plain, head, preset)) for preset in grid}
    base = Lane(plain)
    ways = [base, *lanes.values()]
    for way in ways:
        way.engine.generate([prompts[0]], max_new_tokens=WARM_UP, sampling=sampling)
    for turn in range(rounds * len(prompts)):
        shift = turn % len(ways)
        for way in ways[shift:] + ways[:shift]:
            start = time.perf_counter()
            done = way.engine.generate([prompts[turn % len(prompts)]], max_new_tokens=new_tokens, sampling=sampling)[0]
            way.seconds.append((time.perf_counter() - start) / len(done.tokens))
            way.texts.append(done.tokens)
            way.stats.add(done.stats)
            told()
    return base, lanes


def _engine(plain: Engine, head: ReDrafterHead, preset: Preset) -> Engine:
    drafter = ReDrafter(head, plain.target, width=preset.width, length=preset.length)
    return Engine(plain.target, drafter, codec=plain.codec, budget=preset.nodes, stop_tokens=plain.stop_tokens)


def picture(base: Lane, lanes: dict[Preset, Lane], title: str) -> bytes:
    """Tokens per round and speed-up by nodes, a line for every width and length: PNG."""
    plots.must_be_there()
    import io

    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(plots.STYLE):
        figure = Figure(figsize=plots.WIDE, layout="constrained")
        rounds, speeds = figure.subplots(1, 2)
        forms = sorted({(preset.width, preset.length) for preset in lanes})
        lengths = sorted({length for _, length in forms})
        for width, length in forms:
            there = sorted(preset for preset in lanes if (preset.width, preset.length) == (width, length))
            look = plots.CURVE | {
                "color": plots.COLOURS[sorted({w for w, _ in forms}).index(width) % len(plots.COLOURS)],
                "linestyle": ("-", "--", ":", "-.")[lengths.index(length) % 4],
                "label": f"width {width}, length {length}",
            }
            sizes = [preset.nodes for preset in there]
            rounds.plot(sizes, [lanes[preset].stats.tokens_per_round for preset in there], **look)
            speeds.plot(sizes, [lanes[preset].speed_up(base) for preset in there], **look)
        speeds.axhline(1.0, color=plots.PLAIN_COLOUR, linewidth=1)
        for axes, name in ((rounds, "tokens per round"), (speeds, "speed-up over plain decoding")):
            axes.set_title(name)
            axes.set_xlabel("draft tokens verified per round")
            axes.set_ylim(bottom=0.0 if axes is speeds else 1.0)
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
        figure.legend(*rounds.get_legend_handles_labels(), loc="outside right upper")
        page = io.BytesIO()
        figure.savefig(page, format="png")
    return page.getvalue()


def table(base: Lane, lanes: dict[Preset, Lane], title: str) -> Table:
    """One line per preset."""
    found = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for name in ("width", "length", "nodes", "tokens/round", "speed-up", "same text"):
        found.add_column(name, justify="right")
    best = max(lanes.values(), key=lambda lane: lane.speed_up(base))
    for preset, lane in lanes.items():
        same = f"{sum(a == b for a, b in zip(lane.texts, base.texts, strict=True))} of {len(base.texts)}"
        numbers = [str(number) for number in preset]
        speed = f"{lane.speed_up(base):.2f}×"
        style = "bold green" if lane is best else ""
        found.add_row(*numbers, f"{lane.stats.tokens_per_round:.2f}", speed, same, style=style)
    return found


def main() -> None:
    """Run the sweep; print the table, write picture and JSON if asked."""
    options = _options()
    try:
        plain = dp.load(options.model, drafter="none")
        head = read_head(resolve(HEADS.get(options.head, options.head)), plain.target)
        if not isinstance(head, ReDrafterHead):
            raise BadInput(f"{options.head} holds {head.kind} heads; a sweep over beams needs a recurrent drafter")
        grid = presets(options.widths, options.lengths, options.nodes)
        if not grid:
            raise BadInput("no preset has at least as many nodes as its beams are long; give more --nodes")
        workload = read(options.prompts, prompt_of) if options.prompts else STORIES if options.model == "demo" else GENERAL
        prompts = [question.prompt for question in workload.questions][: options.limit]
        sampling = Sampling(temperature=options.temperature, seed=1)
        with Progress(transient=True) as bar:
            task = bar.add_task("sweep", total=options.rounds * len(prompts) * (len(grid) + 1))
            base, lanes = sweep(
                plain, head, grid, prompts, new_tokens=options.new_tokens, sampling=sampling, rounds=options.rounds,
                told=lambda: bar.advance(task),
            )  # fmt: skip
    except DraftproofError as error:
        raise SystemExit(f"sweep: {error}") from None
    law = f"temperature {options.temperature:g}" if options.temperature else "greedy"
    title = f"{options.model}, {law}, {len(prompts)} prompts of {options.new_tokens} tokens"
    Console(highlight=False).print(table(base, lanes, title))
    if options.plot:
        options.plot.write_bytes(picture(base, lanes, title))
    if options.json:
        rows = [
            {**preset._asdict(), "tokens_per_round": lane.stats.tokens_per_round, "speed_up": lane.speed_up(base)}
            for preset, lane in lanes.items()
        ]
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


def prompt_of(row: Mapping[str, Any]) -> str:
    """The prompt of a row of JSONL."""
    if not isinstance(row.get("prompt"), str):
        raise BadInput('the row has no "prompt" that is a text')
    return str(row["prompt"])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m draftproof.bench.sweep", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--head", default="redrafter", help="redrafter, or a folder")
    parser.add_argument("--prompts", type=Path, help='JSONL rows with a "prompt"')
    parser.add_argument("--limit", type=int, default=6, help="prompts")
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--lengths", type=int, nargs="+", default=[3, 5])
    parser.add_argument("--nodes", type=int, nargs="+", default=[3, 5, 8, 12, 16, 24])
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--plot", type=Path, help="PNG")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
