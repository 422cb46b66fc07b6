"""``draftproof train``: makes a training run from options, and shows its progress."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from draftproof.cli import options as opt
from draftproof.cli import show
from draftproof.errors import BadInput
from draftproof.training.config import SelfGenerateConfig, TrainConfig, TrainRun
from draftproof.training.plot import CURVES, as_text, plot
from draftproof.training.texts import DataConfig

if TYPE_CHECKING:
    from draftproof.training.heads import Evaluation

Method = StrEnum("Method", ["medusa", "redrafter"])
_text, _medusa = partial(opt.option, "Text"), partial(opt.option, "Medusa")
_redrafter, _head = partial(opt.option, "ReDrafter"), partial(opt.option, "Head")
opt.OPTIONS |= {
    "config": opt.options_of(TrainConfig),
    "generate": opt.options_of(SelfGenerateConfig),
}

HARDLY_PAYS, PAYS = 1.5, 2.0
"""Tokens per round below which heads seldom pay on a CPU, and from which they usually do."""
LOGGED = 15.0
"""Seconds between lines of progress where there is no terminal."""
Trained = Annotated[Method, typer.Argument(
    metavar="METHOD", help="Kind of heads: medusa or redrafter.", show_default=False)]
Data = Annotated[list[Path], _text("FILE", "Training texts, .txt or .jsonl; repeatable.", "--data")]
Out = Annotated[Path, opt.option(
    None, "DIR", "Folder for the heads; the same command resumes there.", "--out")]
Chat = Annotated[bool, _text(None, "Treat each text as a user's message.", "--chat")]
SelfGenerate = Annotated[bool, _text(
    None, "Let the target continue the texts, and train on its output.", "--self-generate")]
Heads = Annotated[int | None, _medusa("K", "Number of heads. Default: 5.", "--heads")]
Layers = Annotated[int, _head("N", "Number of residual blocks in each Medusa head.", "--layers")]
ShareHead = Annotated[
    bool | None, _head(None, "Project with the target's LM head, or with weights of its own. "
                             "Default: shared unless there is an --exit-dim.",
                       "--share-lm-head/--own-projection")
]  # fmt: skip
Joint = Annotated[
    bool, _medusa(None, "Also train the backbone (Medusa-2), which changes the model.", "--joint")
]
Horizon = Annotated[int | None, _redrafter(
    "K", "Number of tokens to predict. Default: 5.", "--horizon")]
ExitDim = Annotated[int | None, _redrafter(
    "N", "Width before the projection. Default: that of the target.", "--exit-dim")]


@opt.with_options(generate=None, config=None, engine=("dtype", "device"))
def train(
    method: Trained, model: opt.Model, data: Data, out: Out, generate: dict[str, Any],
    config: dict[str, Any], engine: dict[str, Any], chat: Chat = False,
    self_generate: SelfGenerate = False, heads: Heads = None, layers: Layers = 1,
    share_lm_head: ShareHead = None, joint: Joint = False, horizon: Horizon = None,
    exit_dim: ExitDim = None,
) -> None:  # fmt: skip
    """Train Medusa or ReDrafter heads on texts, or on what the model itself writes."""
    from draftproof.drafters.medusa import MedusaHead
    from draftproof.drafters.redrafter import ReDrafterHead
    from draftproof.training import train_run

    of_medusa = {"--heads": heads, "--joint": joint}
    of_redrafter = {"--horizon": horizon, "--exit-dim": exit_dim}
    is_medusa = method is Method.medusa
    for name, value in (of_redrafter if is_medusa else of_medusa).items():
        if value:
            other = "redrafter" if is_medusa else "medusa"
            raise BadInput(f"{name} is an option of {other}, not of {method.value}; leave it out")
    make: train_run.MakeHead
    shared = exit_dim is None if share_lm_head is None else share_lm_head
    shape: dict[str, Any] = {"share_lm_head": shared}
    if is_medusa:
        form = {"heads": 5 if heads is None else heads}
        make = partial(MedusaHead.fresh, num_heads=form["heads"], num_layers=layers, **shape)
    else:
        form, shape = {"horizon": 5 if horizon is None else horizon}, shape | {"exit_dim": exit_dim}
        make = partial(ReDrafterHead.fresh, steps=form["horizon"], num_layers=layers, **shape)
    writes = SelfGenerateConfig(**generate | {"temperatures": tuple(generate["temperatures"])})
    if not self_generate and writes != SelfGenerateConfig():
        raise BadInput("--tokens, --temperature, --batch-size and --own-text say how the target "
                       "writes; add --self-generate, or leave them out")  # fmt: skip
    run = TrainRun(
        model, DataConfig(tuple(data), chat), out, TrainConfig(**config),
        {**form, "layers": layers, **shape},
        writes if self_generate else None, joint, **engine,
    )  # fmt: skip
    try:
        with _terminable(), Screen() as screen:
            train_run.train(run, make, screen)
    except KeyboardInterrupt as stop:
        text = str(stop) or "interrupted"
        again = "" if "the same command goes on" in text else (
            f"; the same command goes on from what is in {out}")
        raise KeyboardInterrupt(text + again) from None
    show.note(verdict(out, model))
    where = f"{out}/model --drafter {out}/heads" if joint else f"{model} --drafter {out}"
    show.note(f"draftproof run {where}", style="bold")


@contextmanager
def _terminable() -> Iterator[None]:
    """Make SIGTERM stop the run like Ctrl-C, with a sentence."""
    def stop(*_: object) -> None:
        raise KeyboardInterrupt("terminated")

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def verdict(out: Path, model: str) -> str:
    """Whether the heads will pay, judged by the tokens per round of held-out text."""
    record = json.loads((out / "training.json").read_text(encoding="utf-8"))
    rate = record["held_out"]["tokens_per_round"]
    so_far = f"On held-out text the heads reach {rate:.2f} tokens per round (1 is plain decoding)"
    if rate < HARDLY_PAYS:
        return (f"{so_far}: they will hardly pay. Train on more text that the model wrote itself: "
                "--self-generate with 250,000 tokens or more is usual.")
    word = "should" if rate >= PAYS else "may"
    return f"{so_far}: they {word} pay. Measure it: draftproof bench {model} --drafter {out}"


class Screen(Progress):
    """A `training.trainer.Callback`: a bar on a terminal, and a line per evaluation everywhere."""

    def __init__(self) -> None:
        details = TextColumn("{task.percentage:3.0f} %{task.fields[details]} ·")
        left = TimeRemainingColumn(), TextColumn("left")
        out = show.page(stderr=True)
        columns = TextColumn("{task.description}"), BarColumn(), details, *left
        self._curves = ""
        super().__init__(*columns, console=out, transient=True, disable=not out.is_terminal)
        self._titled, self._logged = False, time.monotonic()

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        wide = not self.console.is_terminal
        self.console.print(text, style="dim", markup=False, soft_wrap=wide)

    def progress(self, what: str, done: int, of: int, details: str = "") -> None:
        """Show one bar at a time, with its remaining time; in a log, an occasional line."""
        details = f" · {details}" if details else ""
        if not self.console.is_terminal and time.monotonic() - self._logged >= LOGGED:
            self._logged = time.monotonic()
            self.note(f"{what} {done / max(1, of):.0%}{details}")
        if not self.tasks or self.tasks[0].description != what:
            for task in self.task_ids:
                self.remove_task(task)
            self.add_task(what, total=of, details=details)
        self.update(self.task_ids[0], completed=done, total=of, details=details)

    def logged(self, log: Sequence[Mapping[str, object]], folder: Path) -> None:
        """Draw the curves so far, as a picture in the folder and above the bar on a terminal."""
        plot(log, folder / CURVES)
        if self.console.is_terminal:
            self._curves = as_text(log)
            self.refresh()

    def get_renderable(self) -> RenderableType:
        """The curves, if any, and the bar."""
        bar = super().get_renderable()
        return Group(Text(self._curves), bar) if self._curves else bar

    def stop(self) -> None:
        """Leave the curves on the terminal."""
        curves, self._curves = self._curves, ""
        super().stop()
        if curves:
            self.console.print(Text(curves))

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """Print a line of the table: accuracy per step of the head on held-out rows."""
        if not self._titled:
            names = "".join(f"{f'{i + 2}. token':>13}" for i in range(len(evaluation.top1)))
            self.note(f"{'step':>7}{'held-out loss':>15}{'tokens/round':>14}{names}   top-1/top-5")
            self._titled = True
        pairs = zip(evaluation.top1, evaluation.top5, strict=True)
        hits = "".join(f"{f'{first:.1%}/{five:.0%}':>13}" for first, five in pairs)
        kl = evaluation.backbone_kl
        hits += f"   backbone KL {kl:.4f}" if kl is not None else ""
        self.note(f"{step:>7}{evaluation.loss:>15.3f}{evaluation.tokens_per_round:>14.2f}{hits}")
