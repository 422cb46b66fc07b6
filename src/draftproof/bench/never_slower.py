"""Time per token against plain decoding, with good drafts and with hopeless ones: the budget's promise, measured.

    python -m draftproof.bench.never_slower [--model demo] [--assistant-model demo-draft] [--new-tokens N] [--rounds R]

Each case writes every group of prompts plainly, with a fixed number of draft tokens and with the adaptive budget, side by side
in one process and in lockstep: the ways take turns, each behind each of the others equally often, and write on until they have
`SLICE` more tokens per row, so that a machine whose speed wanders more slowly than a slice slows all of them alike. A way's
seconds are those of its slices, reading the prompts being the first; its engine is called as for anyone who reads round by
round. Texts are compared. Warm-up runs pay for the first calls of the process, but the adaptive budget begins each case knowing
nothing, so what it spends on learning is in its figures. Ratios are sums of seconds per token over all groups, wall time and
CPU time of the process; the intervals are bootstrapped over groups, all ways of a group together.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import NamedTuple, cast

import numpy as np
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor

import draftproof as dp
from draftproof.bench.figures import Ratio
from draftproof.bench.measure import Clock
from draftproof.engine.engine import usual_budget
from draftproof.engine.load import training_free
from draftproof.engine.sequence import SequenceState
from draftproof.engine.stats import RoundStats

PROMPTS = (
    "Once upon a time, there was a little girl named Lily. She",
    "Tom and his dog were playing in the park when",
    "One day, a small bird fell from its nest.",
    "The sun was hot, and Mia wanted to",
    "There was an old man who lived near the sea. Every morning",
    "Ben had a big red ball. He loved",
    "In the forest a fox met a rabbit who",
    "Mom said that it was time to",
)
WARM_UP, SHORT, LONG, FIXED = 12, 8, 640, 5
"""Tokens: to warm up with, of a short text, of a long prompt, drafted in each round by the way that does not adapt."""
HOT = 1.5
SLICE = 2
"""Tokens per row that a way writes before the next has its turn. At demo size a few milliseconds: the less the speed of a
machine changes within them, the less ratios scatter, and what a way must fetch again into the processor's caches is still
little."""
CLOCKS: tuple[Clock, Clock] = (time.perf_counter, time.process_time)
"""Wall time, and CPU time of the process."""


class Wrong(dp.Drafter):
    """Costs nothing and is never right, or hardly: what an assistant for another language would draft."""

    name = "wrong"
    default_budget = 7

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def propose(self, frontier: dp.Frontier) -> dp.TokenTree:
        root = frontier.prefix.root[:, None]
        ahead = torch.arange(1, 1 + frontier.budget, device=root.device)
        drafted = self.drafted(root, frontier.prefix.position[:, None], ahead)
        return dp.TokenTree.chain(torch.cat([root, drafted % self.vocab_size], 1))

    def drafted(self, root: Tensor, position: Tensor, ahead: Tensor) -> Tensor:
        """[B, K] numbers for the tokens `ahead` [K] of roots [B, 1] at these positions."""
        return root + 7 * ahead + 1


class Dice(Wrong):
    """Costs nothing and draws tokens from everywhere, other ones at every place."""

    name = "random"

    def drafted(self, root: Tensor, position: Tensor, ahead: Tensor) -> Tensor:
        return (root * 48271 + (position + ahead) * 69621) % 2147483647


class Case(NamedTuple):
    """What is written, by which drafter: new tokens per text, rows side by side, tokens of the prompts (0: as they are)."""

    drafter: str
    new_tokens: int
    rows: int = 1
    temperature: float = 0.0
    context: int = 0

    @property
    def title(self) -> str:
        told = [self.drafter]
        told += [f"{self.new_tokens} tokens"] if self.new_tokens == SHORT else []
        told += [f"batch {self.rows}"] if self.rows > 1 else []
        told += [f"T = {self.temperature}"] if self.temperature else []
        told += [f"prompt of {self.context}"] if self.context else []
        return ", ".join(told)


def _cases(drafters: Iterable[str], new_tokens: int) -> list[Case]:
    hard = ("always wrong", "draft model")
    return [
        *(Case(name, new_tokens) for name in drafters),
        *(Case(name, SHORT) for name in hard),
        *(Case(name, new_tokens, rows) for rows in (4, 16) for name in hard),
        *(Case(name, new_tokens, temperature=HOT) for name in hard),
        *(Case(name, new_tokens, context=LONG) for name in hard),
    ]


@dataclass
class Way:
    """One way to decode: an engine, and what its texts took, group by group, in seconds per token."""

    engine: dp.Engine
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    texts: list[list[list[int]]] = field(default_factory=list)
    stats: RoundStats = field(default_factory=RoundStats)

    def take(self, writing: SelfGenerateConfig) -> None:
        """Note a group that is written."""
        tokens = writing.tokens
        self.wall.append(writing.seconds[0] / tokens)
        self.cpu.append(writing.seconds[1] / tokens)
        self.texts.append([row.tokens for row in writing.rows])
        for row in writing.rows:
            self.stats.add(row.stats)


class SelfGenerateConfig:
    """A group of prompts being completed side by side, slice by slice.

    seconds: by each of the clocks, of the slices alone.
    """

    def __init__(self, engine: dp.Engine, prompts: list[list[int]], case: Case, clocks: Sequence[Clock]) -> None:
        self.clocks, self.seconds = clocks, [0.0] * len(clocks)
        self.rows: list[SequenceState] = []
        self.ended = False
        wanted = dp.Sampling(temperature=case.temperature, seed=1)
        self._rounds = engine.rounds(prompts, max_new_tokens=case.new_tokens, sampling=wanted, batch_size=len(prompts))

    @property
    def tokens(self) -> int:
        """Written so far, of all rows."""
        return sum(len(row.tokens) for row in self.rows)

    def until(self, tokens: int) -> None:
        """Write on until so many are there, or all texts ended."""
        before = [clock() for clock in self.clocks]
        while not self.ended and self.tokens < tokens:
            going = next(self._rounds, None)
            self.rows, self.ended = self.rows or going or [], going is None
        self.seconds = [
            seconds + clock() - start for seconds, clock, start in zip(self.seconds, self.clocks, before, strict=True)
        ]


def main() -> None:
    """Measure and print a table."""
    options = _options()
    if options.threads:
        torch.set_num_threads(options.threads)
    assisted = dp.load(options.model, assistant_model=options.assistant_model)
    gc.freeze()                                                         # as the command does
    target, codec = assisted.target, assisted.codec
    assert codec is not None, "the model needs a tokenizer for the prompts"
    drafters: dict[str, Callable[[], dp.Drafter]] = {
        "draft model": lambda: dp.DraftModel(cast(dp.DraftModel, assisted.drafter).model, target.vocab_size),
        "none named": training_free,
        "prompt lookup": dp.PromptLookup,
        "random": lambda: Dice(target.vocab_size),
        "always wrong": lambda: Wrong(target.vocab_size),
        "as slow as the target": lambda: dp.DraftModel(target, target.vocab_size),
    }
    texts = [codec.encode(text) for text in PROMPTS]
    found = []
    for case in _cases(drafters, options.new_tokens):
        if options.cases and not any(wanted in case.title for wanted in options.cases):
            continue
        ways = _ways(assisted, drafters[case.drafter])
        prompts = [_long(text, texts, case.context) for text in texts]
        batches = [(prompts * case.rows)[: case.rows]] if case.rows > 1 else [[prompt] for prompt in prompts]
        _measure(ways, batches, case, options.rounds * max(1, options.new_tokens // case.new_tokens))    # as many tokens
        found += [_line(case.title, way, ways) for way in ways if way != "plain"]
    print(json.dumps([one._asdict() for one in found], indent=1)) if options.json else _print(found)


def _long(text: list[int], texts: Sequence[list[int]], tokens: int) -> list[int]:
    """A prompt of so many tokens that ends with `text`: the other beginnings before it, again and again."""
    before = [token for other in texts for token in other] * (tokens // 8)
    return [*before, *text][-tokens:] if tokens else text


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--assistant-model", default="demo-draft")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, help="of torch; the machine's default without it")
    parser.add_argument("--cases", nargs="+", help="only those whose name has one of these words")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _ways(engine: dp.Engine, drafter: Callable[[], dp.Drafter]) -> dict[str, Way]:
    """Plain, fixed and adaptive around one target; neither of them remembers what the other wrote."""
    def around(own: dp.Drafter, budget: dp.Budget) -> Way:
        return Way(dp.Engine(engine.target, own, budget=budget, stop_tokens=engine.stop_tokens))

    adaptive = drafter()
    return {
        "plain": around(dp.Plain(), dp.Fixed(0)),
        f"fixed {FIXED}": around(drafter(), dp.Fixed(FIXED)),
        "adaptive": around(adaptive, usual_budget(adaptive)),
    }


def _measure(
    ways: dict[str, Way], batches: list[list[list[int]]], case: Case, rounds: int, clocks: Sequence[Clock] = CLOCKS
) -> None:
    for way in ways.values():
        way.engine.generate(batches[0], max_new_tokens=WARM_UP, sampling=dp.Sampling())
    ways["adaptive"].engine.budget = usual_budget(ways["adaptive"].engine.drafter)
    names = deque(ways)
    for batch in batches * (rounds * (len(PROMPTS) // len(batches))):
        writings = {name: SelfGenerateConfig(way.engine, batch, case, clocks) for name, way in ways.items()}
        names.rotate()
        first, *others = names
        orders = cycle([(first, *others), (first, *reversed(others))])
        level = len(batch)                                              # the prompts are read: one token each
        while not all(writing.ended for writing in writings.values()):
            for name in next(orders):
                writings[name].until(level)
            level += SLICE * len(batch)
        for name, way in ways.items():
            way.take(writings[name])


class Line(NamedTuple):
    """What one way did in one case."""

    case: str
    budget: str
    wall: Ratio
    cpu: Ratio
    plain_ms_per_token: float
    tokens_per_round: float
    plain_share: float
    rounds_by_width: dict[int, int]
    same_text: int
    runs: int
    threads: int


def _line(case: str, name: str, ways: dict[str, Way]) -> Line:
    way, plain = ways[name], ways["plain"]
    return Line(
        case, name, Ratio.of(way.wall, plain.wall), Ratio.of(way.cpu, plain.cpu), 1000 * float(np.median(plain.wall)),
        way.stats.tokens_per_round, way.stats.plain_share, dict(sorted(way.stats.by_width.items())),
        sum(ours == theirs for ours, theirs in zip(way.texts, plain.texts, strict=True)), len(way.wall),
        torch.get_num_threads(),
    )  # fmt: skip


def _print(found: list[Line]) -> None:
    title = f"time per token over plain decoding, {torch.get_num_threads()} threads"
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=0, pad_edge=False)
    for column in ("case", "budget", "wall", "95 %", "CPU", "tok./\nround", "plain\nrounds", "same\ntext"):
        table.add_column(column, justify="left" if column in ("case", "budget") else "right", no_wrap=True)
    for one in found:
        ratios = (f"{one.wall.value:.3f}", f"{one.wall.low:.3f}–{one.wall.high:.3f}", f"{one.cpu.value:.3f}")
        same = "all" if one.same_text == one.runs else f"{one.same_text}/{one.runs}"
        table.add_row(one.case, one.budget, *ratios, f"{one.tokens_per_round:.2f}", f"{one.plain_share:.0%}", same)
    Console(highlight=False).print(table)


if __name__ == "__main__":
    main()
