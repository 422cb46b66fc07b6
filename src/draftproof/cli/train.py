"""``draftproof train``: options → a course, and what is seen while it is followed."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from draftproof.cli import options as opt
from draftproof.cli import show
from draftproof.errors import BadInput

if TYPE_CHECKING:
    from draftproof.training.self_generate import Progress as Written
    from draftproof.training.train_run import MakeHead
    from draftproof.training.trainer import Exam


class Method(StrEnum):
    """What is trained."""

    medusa = "medusa"
    redrafter = "redrafter"


class Objective(StrEnum):
    """What the heads are to minimise."""

    ce = "ce"
    kl = "kl"
    tv = "tv"
    nla = "nla"
    lk = "lk"


_text, _loop = partial(opt.option, "Text"), partial(opt.option, "Training")
_medusa, _redrafter = partial(opt.option, "Medusa"), partial(opt.option, "ReDrafter")

Trained = Annotated[Method, typer.Argument(help="[bold]medusa[/bold] or [bold]redrafter[/bold].", show_default=False)]
Data = Annotated[list[Path], _text("FILE", "Texts, .txt or .jsonl; repeatable.", "--data")]
HeldOut = Annotated[Path | None, _text("FILE", "Texts to examine with; a share of --data if not given.")]
Chat = Annotated[bool, _text(None, "Prompts and texts are the user's messages of a chat.", "--chat")]
SelfGenerate = Annotated[bool, _text(None, "Let the target write the texts, from their beginnings.", "--self-generate")]
Tokens = Annotated[int, _text("N", "How much it writes.", "--tokens")]
Temperatures = Annotated[list[float] | None, _text("T", "It writes at these in turn; 0 and 0.7.", "--temperature")]
Drafts = Annotated[str | None, _text("MODEL", "Drafts while it writes.", "--assistant-model")]
Rows = Annotated[int, _text("B", "Rows it writes side by side.", "--batch-size")]
SelfGeneratedText = Annotated[Path | None, _text("FILE", "Where its text is kept, to train several heads on; in --out.", "--own-text")]
Out = Annotated[Path, opt.option(None, "DIR", "Where the heads go; the same command goes on.", "--out")]

Minutes = Annotated[float | None, _loop("M", "Train about so long.", "--minutes")]
Steps = Annotated[int | None, _loop("N", "Train so many steps.", "--steps")]
Epochs = Annotated[float, _loop("N", "Read the texts so often.", "--epochs")]
Loss = Annotated[Objective, _loop("NAME", "ce; or against the target's law: kl, tv, nla, lk.", "--objective")]
Rate = Annotated[float | None, _loop("X", "Highest learning rate; by the width of the target if not given.", "--lr")]
Length = Annotated[int | None, _loop("N", "Tokens per row; 512 if the target reads so many.", "--length")]
Size = Annotated[int, _loop("B", "Rows per batch.", "--batch")]
Accumulate = Annotated[int, _loop("N", "Batches per step.", "--accumulate")]
CacheGb = Annotated[float, _loop("X", "Gigabytes of disk for hidden states between epochs, at most 2.", "--cache-gb")]
Seed = Annotated[int, _loop("S", "Same seed, same heads.", "--seed")]
SaveMinutes = Annotated[float, _loop("M", "Between checkpoints.", "--save-minutes")]

Heads = Annotated[int | None, _medusa("K", "Heads; 5.", "--heads")]
Layers = Annotated[int | None, opt.option("Medusa", "N", "Blocks per head; 1. For redrafter as well.", "--layers")]
OwnProjection = Annotated[bool, _medusa(None, "A projection per head instead of the target's.", "--own-projection")]
JointToo = Annotated[bool, _medusa(None, "Then, as long again, with the backbone (Medusa-2): another model.", "--joint")]
OneStage = Annotated[bool, _medusa(None, "With --joint: heads and backbone together from the start.", "--one-stage")]
Horizon = Annotated[int | None, _redrafter("K", "Tokens ahead; 5.", "--horizon")]
ExitDim = Annotated[int | None, _redrafter("N", "Width before the projection.", "--exit-dim")]
ShareHead = Annotated[bool, _redrafter(None, "Project with the target's own LM head.", "--share-lm-head")]


def train(
    method: Trained,
    model: opt.Model,
    data: Data,
    out: Out,
    held_out: HeldOut = None,
    chat: Chat = False,
    self_generate: SelfGenerate = False,
    tokens: Tokens = 1_000_000,
    temperature: Temperatures = None,
    assistant_model: Drafts = None,
    batch_size: Rows = 32,
    own_text: SelfGeneratedText = None,
    minutes: Minutes = None,
    steps: Steps = None,
    epochs: Epochs = 2.0,
    objective: Loss = Objective.ce,
    lr: Rate = None,
    length: Length = None,
    batch: Size = 4,
    accumulate: Accumulate = 1,
    cache_gb: CacheGb = 0.0,
    seed: Seed = 0,
    save_minutes: SaveMinutes = 2.0,
    heads: Heads = None,
    layers: Layers = None,
    own_projection: OwnProjection = False,
    joint: JointToo = False,
    one_stage: OneStage = False,
    horizon: Horizon = None,
    exit_dim: ExitDim = None,
    share_lm_head: ShareHead = False,
    dtype: opt.Dtype = None,
    device: opt.Device = None,
) -> None:
    """Train draft heads for a model: Medusa or ReDrafter, on texts or on what the model itself writes."""
    from draftproof.training import train_run as courses
    from draftproof.training.data import DataConfig, SelfGenerateConfig
    from draftproof.training.joint import Together
    from draftproof.training.trainer import Plan

    theirs = {
        Method.medusa: {"--heads": heads, "--own-projection": own_projection, "--joint": joint, "--one-stage": one_stage},
        Method.redrafter: {"--horizon": horizon, "--exit-dim": exit_dim, "--share-lm-head": share_lm_head},
    }
    _only_own_options(method, theirs)
    if one_stage and not joint:
        raise BadInput("--one-stage is a way to train the backbone along; add --joint")
    if method is Method.medusa:
        form, make_head = _medusa_heads(5 if heads is None else heads, layers or 1, not own_projection)
    else:
        form, make_head = _recurrent(horizon or 5, layers or 1, exit_dim, share_lm_head)
    heat = tuple(temperature or (0.0, 0.7))
    writing = SelfGenerateConfig(tokens, heat, assistant_model, batch_size, own_text) if self_generate else None
    course = courses.TrainRun(
        model=model,
        sources=DataConfig(tuple(data), held_out, chat),
        out=out,
        form=form,
        plan=Plan(steps, minutes, epochs, lr, accumulate=accumulate, seed=seed, save_minutes=save_minutes),
        objective=objective.value,
        length=length,
        batch=batch,
        writing=writing,
        cache_gb=cache_gb,
        joint=Together(distil=self_generate, one_stage=one_stage) if joint else None,
        dtype=dtype,
        device=device,
    )
    with Screen() as screen:
        courses.train(course, make_head, screen)
    show.note(f"draftproof run {out / 'model' if joint else model} --drafter {out / 'heads' if joint else out}", style="bold")


def _only_own_options(method: Method, options: dict[Method, dict[str, Any]]) -> None:
    for other, given in options.items():
        for name, value in given.items():
            if value and other is not method:
                raise BadInput(f"{name} is an option of {other.value}, not of {method.value}; leave it out")


def _medusa_heads(heads: int, layers: int, share_lm_head: bool) -> tuple[dict[str, Any], MakeHead]:
    """What the heads are, for the record, and how they are made."""
    from draftproof.drafters.medusa import MedusaHead

    form = {"heads": heads, "layers": layers, "share_lm_head": share_lm_head}
    return form, lambda target: MedusaHead.fresh(target, heads, layers, share_lm_head)


def _recurrent(horizon: int, layers: int, exit_dim: int | None, share_lm_head: bool) -> tuple[dict[str, Any], MakeHead]:
    """What the recurrent drafter is, for the record, and how it is made."""
    from draftproof.drafters.redrafter import ReDrafterHead

    form = {"horizon": horizon, "layers": layers, "exit_dim": exit_dim, "share_lm_head": share_lm_head}
    return form, lambda target: ReDrafterHead.fresh(
        target, steps=horizon, num_layers=layers, exit_dim=exit_dim, share_lm_head=share_lm_head
    )


class Screen:
    """A bar on a terminal, and a line per examination anywhere. Implements `training.train_run.Guide`."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False)
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:3.0f} % · {task.fields[said]} ·"),
            TimeRemainingColumn(), TextColumn("left"),
            console=self.console, transient=True, disable=not self.console.is_terminal,
        )  # fmt: skip
        self._task: TaskID | None = None
        self._titled, self._steps = False, 0

    def __enter__(self) -> Screen:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def note(self, text: str) -> None:
        """A line above the bar."""
        self.console.print(text, style="dim", markup=False, soft_wrap=not self.console.is_terminal)

    def wrote(self, progress: Written) -> None:
        self._show("writing", progress.tokens, progress.of, f"{progress.speed:,.0f} tokens/s")

    def planned(self, step: int, steps: int) -> None:
        self.note(f"{steps} steps" if not step else f"going on at step {step} of {steps}")
        self._steps = steps
        self._show("training", step, steps, "")

    def stepped(self, step: int, loss: float, speed: float) -> None:
        self._show("training", step, self._steps, f"loss {loss:.3f} · {speed:,.0f} tokens/s")

    def examined(self, step: int, exam: Exam) -> None:
        """A line of the table: accuracy per step on held-out rows."""
        if not self._titled:
            names = "".join(f"{f'{index + 2}. token':>13}" for index in range(len(exam.top1)))
            self.note(f"{'step':>7}{'held-out':>10}{'tokens/round':>14}{names}   top-1/top-5")
            self._titled = True
        hits = "".join(f"{f'{one:.1%}/{five:.0%}':>13}" for one, five in zip(exam.top1, exam.top5, strict=True))
        backbone = f"   backbone KL {exam.figures['backbone_kl']:.4f}" if "backbone_kl" in exam.figures else ""
        self.note(f"{step:>7}{exam.loss:>10.3f}{exam.tokens_per_round:>14.2f}{hits}{backbone}")

    def _show(self, what: str, done: int, of: int, said: str) -> None:
        if self._task is None or self._bar.tasks[0].description != what:        # a bar of its own, for its own time left
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task = self._bar.add_task(what, total=of, said=said)
        self._bar.update(self._task, completed=done, total=of, said=said)
