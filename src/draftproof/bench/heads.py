"""Tokens per round of draft heads: by the exact rule and by typical acceptance, and of Medusa with and without its pairs.

    python -m draftproof.bench.heads [--model demo] [--heads medusa redrafter] [--nodes 8 12 16 32] [--temperatures 0 0.7]
                                     [--prompts FILE] [--new-tokens N] [--samples S]

No clock is read: with a fixed number of draft tokens these are the same numbers on any machine that computes the same logits.
Typical acceptance writes another law; how far it is off, as total variation per token, is told beside it. Greedily both
rules are the same.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import draftproof as dp
from draftproof.bench.sweep import prompt_of
from draftproof.bench.workloads import GENERAL, STORIES, read
from draftproof.core.params import Sampling
from draftproof.drafters.base import Drafter, DraftHead
from draftproof.drafters.checkpoints import read_head
from draftproof.drafters.medusa import MedusaHead
from draftproof.drafters.plain import Plain
from draftproof.engine.engine import Engine, Prompt
from draftproof.engine.load import HEADS
from draftproof.engine.stats import RoundStats
from draftproof.errors import DraftproofError
from draftproof.model.loading import resolve


class Line(NamedTuple):
    """What came of some heads with so many draft tokens in every round.

    distance: per token, of typical acceptance. same, texts: how many of the exact texts are those of plain decoding.
    """

    heads: str
    nodes: int
    temperature: float
    exact: float
    typical: float | None
    distance: float | None
    same: int
    texts: int


def lines(
    plain: Engine, heads: dict[str, DraftHead], prompts: Sequence[Prompt], *, nodes: Sequence[int],
    temperatures: Sequence[float], new_tokens: int, samples: int,
) -> Iterator[Line]:  # fmt: skip
    """Every temperature, heads and size in turn; each prompt is completed `samples` times."""

    def written(drafter: Drafter, size: int, heat: float, lossy: bool = False) -> tuple[RoundStats, list[list[int]]]:
        engine = Engine(plain.target, drafter, codec=plain.codec, budget=size, stop_tokens=plain.stop_tokens, lossy=lossy)
        asked = list(prompts) * (samples if heat else 1)
        params = [Sampling(temperature=heat, seed=number) for number in range(len(asked))]
        done, total = engine.generate(asked, max_new_tokens=new_tokens, sampling=params, batch_size=1), RoundStats()
        for one in done:
            total.add(one.stats)
        return total, [one.tokens for one in done]

    for heat in temperatures:
        wanted = written(Plain(), 0, heat)[1]
        for name, head in heads.items():
            drafter = head.drafter(plain.target)
            for size in nodes:
                exact, texts = written(drafter, size, heat)
                loose = written(drafter, size, heat, lossy=True)[0] if heat else None
                typical, distance = (loose.tokens_per_round, loose.distance_per_token) if loose else (None, None)
                same = sum(one == other for one, other in zip(texts, wanted, strict=True))
                yield Line(name, size, heat, exact.tokens_per_round, typical, distance, same, len(texts))


def with_and_without(name: str, head: DraftHead) -> dict[str, DraftHead]:
    """The heads and, if they have pairs, the same heads without."""
    if not isinstance(head, MedusaHead) or head.pairs is None:
        return {name: head}
    return {name: head, f"{name}, without pairs": head.unpaired()}


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--heads", nargs="+", default=["medusa", "redrafter"], help="medusa, redrafter, or folders")
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 12, 16, 32])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--prompts", type=Path, help='JSONL rows with a "prompt"')
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--samples", type=int, default=4, help="texts of each prompt, where they are sampled")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    try:
        plain = dp.load(options.model, drafter="none")
        heads: dict[str, DraftHead] = {}
        for name in options.heads:
            heads |= with_and_without(name, read_head(resolve(HEADS.get(name, name)), plain.target))
        workload = read(options.prompts, prompt_of) if options.prompts else STORIES if options.model == "demo" else GENERAL
        found = list(
            lines(
                plain, heads, [question.prompt for question in workload.questions], nodes=options.nodes,
                temperatures=options.temperatures, new_tokens=options.new_tokens, samples=options.samples,
            )
        )  # fmt: skip
    except DraftproofError as error:
        raise SystemExit(f"heads: {error}") from None
    print(json.dumps([line._asdict() for line in found], indent=1)) if options.json else _print(options.model, found)


def _print(model: str, found: Sequence[Line]) -> None:
    title = f"{model}: tokens per round"
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("heads", no_wrap=True)
    loose = ("typical", "exact /\ntypical", "off, per\ntoken")
    for name in ("T", "draft\ntokens", "exact", *loose, "exact is\nplain's"):
        table.add_column(name, justify="right", no_wrap=True)
    for line in found:
        told = ("", "", "")
        if line.typical is not None and line.distance is not None:
            told = (f"{line.typical:.2f}", f"{line.exact / line.typical:.2f}", f"{line.distance:.2f}")
        heat = f"{line.temperature:g}" if line.temperature else "greedy"
        table.add_row(line.heads, heat, str(line.nodes), f"{line.exact:.2f}", *told, f"{line.same} of {line.texts}")
    Console(highlight=False).print(table)


if __name__ == "__main__":
    main()
