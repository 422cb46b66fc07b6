"""``draftproof calibrate``: the draft tree that is worth it here, found on the user's prompts and kept with the heads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from draftproof.cli import calibration_picture, show
from draftproof.cli import options as opt
from draftproof.errors import BadInput

if TYPE_CHECKING:
    from draftproof.drafters.base import DraftHead
    from draftproof.engine.engine import Engine
    from draftproof.training.calibrate import Calibration

PICTURE, FIGURES = "calibration.png", "calibration.json"
"""What is left beside the heads."""
SIZES, RANKS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128), 10
"""Rows and columns of the tables."""

_option = partial(opt.option, None)
Heads = Annotated[str, _option("DIR", "The draft heads.", "--drafter")]
Files = Annotated[list[Path], _option("FILE", ".jsonl as for run, or .txt; repeatable.", "--prompts")]
Tokens = Annotated[int, _option("N", "New tokens per prompt.", "--tokens")]
Temperature = Annotated[float, _option("T", "What the target writes with; 0 is greedy.", "--temperature")]
MaxNodes = Annotated[int, _option("N", "The largest tree that is looked at.", "--max-nodes")]
Most = Annotated[int, _option("N", "Of the files, at most so many prompts.", "--max-prompts")]
Out = Annotated[Path | None, _option("DIR", "Where the heads go with their tree; in place if not given.", "--out")]


def calibrate(
    model: opt.Model,
    drafter: Heads,
    prompts: Files,
    tokens: Tokens = 128,
    temperature: Temperature = 0.0,
    max_nodes: MaxNodes = 64,
    max_prompts: Most = 64,
    out: Out = None,
    chat: opt.Chat = False,
    dtype: opt.Dtype = None,
    device: opt.Device = None,
) -> None:
    """Find the draft tree that is fastest for these heads, on your prompts, on this machine."""
    calibration_picture.check()
    from draftproof.training.calibrate import Wanted
    from draftproof.training.calibrate import calibrate as find

    wanted = Wanted(tokens, temperature, max_nodes)
    folder = _folder(drafter)
    where = out if out is not None else folder
    _must_be_ours(where, named=out is None and not Path(drafter).is_dir())
    engine, head = _loaded(model, folder, dtype, device)
    asked = _prompts(engine, prompts, chat, max_prompts, tokens)
    with _Bars() as bars:
        found = find(engine, head, asked, wanted, bars.told)
    _show(Console(highlight=False, soft_wrap=True), found)
    _keep(head, found, where, f"{Path(model).name} with {Path(drafter).name}, temperature {temperature:g}", wanted)


def _folder(drafter: str) -> Path:
    """Where the heads are."""
    from draftproof.drafters.checkpoints import is_head
    from draftproof.engine.load import HEADS
    from draftproof.model import loading

    folder = Path(loading.resolve(HEADS.get(drafter, drafter)))
    if not is_head(folder):
        raise BadInput(f"{drafter} holds no draft heads; give the folder of trained heads (draftproof train makes them)")
    return folder


def _must_be_ours(where: Path, named: bool) -> None:
    """Refuse before the work what would be refused after it: to write over heads of another layout, or anything else."""
    from draftproof.drafters.checkpoints import is_head

    if named:
        raise BadInput("heads that come with the package are left as they are; give --out DIR")
    if where.exists() and not where.is_dir():
        raise BadInput(f"{where} is a file; give --out a folder")
    if where.is_dir() and any(where.iterdir()):
        config = where / "config.json"
        ours = is_head(where) and "speculator_type" in config.read_text(encoding="utf-8") if config.is_file() else False
        if not ours:
            raise BadInput(f"{where} holds something else than heads in draftproof's own layout; give --out DIR, a new folder")


def _loaded(model: str, folder: Path, dtype: str | None, device: str | None) -> tuple[Engine, DraftHead]:
    """The engine that drafts with the heads, and the heads themselves."""
    from draftproof.drafters.checkpoints import read_head
    from draftproof.engine.engine import Engine
    from draftproof.engine.load import load

    with show.status("loading ..."):
        plain = load(model, drafter="none", dtype=dtype, device=device)
        head = read_head(folder, plain.target).to(plain.target.device)
        engine = Engine(
            plain.target, head.drafter(plain.target), codec=plain.codec, sampling=plain.sampling, stop_tokens=plain.stop_tokens
        )
    return engine, head


def _prompts(engine: Engine, files: Sequence[Path], chat: bool, most: int, tokens: int) -> list[list[int]]:
    """The prompts of the files as tokens; those that leave no room to answer are left out."""
    from draftproof.training.calibrate import prompt_of
    from draftproof.training.texts import read

    if engine.codec is None:
        raise BadInput(f"{engine.target.name} has no tokenizer; it is needed to read the prompts")
    documents = read(files, chat)
    found = [prompt_of(document, engine.codec) for document in documents[: 4 * most]]
    fitting = [prompt for prompt in found if 0 < len(prompt) <= engine.target.context - tokens][:most]
    if not fitting:
        raise BadInput(f"no prompt leaves room for {tokens} new tokens in {engine.target.context}; give shorter ones")
    return fitting


def _keep(head: DraftHead, found: Calibration, where: Path, title: str, wanted: Any) -> None:
    """The tree into the heads' folder, where heads take one; picture and figures beside it."""
    from draftproof.drafters.checkpoints import write_head
    from draftproof.drafters.medusa import MedusaHead

    if isinstance(head, MedusaHead):
        head.config = replace(head.config, tree=found.chosen)
        write_head(head, where)
        show.note(f"the tree ({_tokens(found)}) is in {where}: draftproof run MODEL --drafter {where}", style="bold")
    else:
        where.mkdir(parents=True, exist_ok=True)
        show.note(f"{head.kind} heads shape a tree of their own in every round: no tree was stored with them")
    calibration_picture.draw(found, title, where / PICTURE)
    (where / FIGURES).write_text(json.dumps(figures(found, wanted), indent=1) + "\n", encoding="utf-8")
    show.note(f"picture: {where / PICTURE} · figures: {where / FIGURES}")


def figures(found: Calibration, wanted: Any) -> dict[str, Any]:
    """Everything that was found, for machines."""
    from dataclasses import asdict

    return {
        "nodes": found.nodes,
        "tree": found.chosen,
        "tree_in_order_of_addition": found.tree,
        "tokens_per_round": found.tokens,
        "seconds_per_round": [found.seconds(nodes) for nodes in range(len(found.tokens))],
        "expected_speed_up": found.speed_up,
        "verify": asdict(found.verify),
        "overhead": asdict(found.overhead),
        "acceptance_by_depth_and_rank": found.acceptance,
        "places_by_depth": found.tried,
        "held_out": [lane._asdict() for lane in found.lanes],
        "held_out_prompts": found.held_out,
        "tokens_written": found.written,
        "places": found.places,
        "wanted": asdict(wanted),
    }


# What is shown --------------------------------------------------------------------------------------------------------------


def _show(out: Console, found: Calibration) -> None:
    out.print(f"{found.written:,} tokens written by the target, {found.places:,} places; {found.held_out} prompts held out")
    out.print(_by_rank(found))
    out.print(_by_size(found))
    best, tokens = found.speed_up[found.nodes], found.tokens[found.nodes]
    if best < 1:
        verdict = f"drafting does not pay here: {best:.2f}× at best, with {_tokens(found)}; use --drafter none"
    else:
        verdict = f"{_tokens(found)} per round: {tokens:.2f} tokens per round, {best:.2f}× expected"
    out.print(verdict, style="bold green" if best > 1 else "bold yellow", markup=False)
    out.print(compared(found), markup=False)


def _by_rank(found: Calibration) -> Table:
    """Acceptance by depth and rank."""
    title = f"acceptance in % by depth and rank, where all before it stands in the tree of {len(found.tree)}"
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    columns = min(RANKS, len(found.acceptance[0]))
    for name in ("depth", *(str(rank + 1) for rank in range(columns)), "places"):
        table.add_column(name, justify="right")
    for depth, (row, tried) in enumerate(zip(found.acceptance, found.tried, strict=True), 1):
        table.add_row(str(depth), *(f"{100 * share:.1f}" for share in row[:columns]), f"{tried:,}")
    return table


def _by_size(found: Calibration) -> Table:
    """What a round of each size gives and costs."""
    table = Table(title="by size of the tree", title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for name in ("draft tokens", "tokens/round", "ms/round", "expected speed-up"):
        table.add_column(name, justify="right")
    for nodes in sorted({0, found.nodes, len(found.tree), *(size for size in SIZES if size < len(found.tree))}):
        chosen = nodes == found.nodes
        speed_up = f"{found.speed_up[nodes]:.2f}×"
        row = (f"{nodes}", f"{found.tokens[nodes]:.2f}", f"{1000 * found.seconds(nodes):.2f}", speed_up)
        table.add_row(*row, style="bold green" if chosen else "")
    return table


def compared(found: Calibration) -> str:
    """The chosen tree and what the heads draft by themselves, as measured on held-out prompts."""
    plain, *rivals = found.lanes
    told = [f"{lane.name} {lane.tokens_per_round:.2f} tokens/round, {lane.speed_up(plain):.2f}×" for lane in rivals]
    return f"measured on held-out prompts ({found.held_out}), {_tokens(found)}: {' · '.join(told)}"


def _tokens(found: Calibration) -> str:
    return f"{found.nodes} draft token{'s' * (found.nodes != 1)}"


class _Bars:
    """A progress bar on stderr, one thing at a time."""

    def __init__(self) -> None:
        console = Console(stderr=True, highlight=False)
        self._bars = Progress(
            TextColumn("{task.description:14}"), BarColumn(30), MofNCompleteColumn(), TimeRemainingColumn(),
            console=console, transient=True, disable=not console.is_terminal,
        )  # fmt: skip
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> _Bars:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def told(self, doing: str, done: int, of: int) -> None:
        if doing not in self._tasks:
            for task in self._tasks.values():
                self._bars.update(task, visible=False)
            self._tasks[doing] = self._bars.add_task(doing, total=of)
        self._bars.update(self._tasks[doing], completed=done, total=of)
