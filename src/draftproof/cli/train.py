"""``draftproof train``: options → a training run, and what is seen of it."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from draftproof.cli import options as opt
from draftproof.cli import show
from draftproof.errors import BadInput

if TYPE_CHECKING:
    from draftproof.training.self_generate import Progress as Written
    from draftproof.training.trainer import Evaluation

Method = StrEnum("Method", ["medusa", "redrafter"])
Objective = StrEnum("Objective", ["ce", "kl", "tv", "nla", "lk"])
_text, _loop = partial(opt.option, "Text"), partial(opt.option, "Training")
_medusa, _redrafter = partial(opt.option, "Medusa"), partial(opt.option, "ReDrafter")


def train(
    method: Annotated[Method, typer.Argument(help="[bold]medusa[/bold] or [bold]redrafter[/bold].", show_default=False)],
    model: opt.Model,
    data: Annotated[list[Path], _text("FILE", "Texts, .txt or .jsonl; repeatable.", "--data")],
    out: Annotated[Path, opt.option(None, "DIR", "Where the heads go; the same command goes on.", "--out")],
    held_out: Annotated[Path | None, _text("FILE", "Texts to evaluate with; a share of --data if not given.")] = None,
    chat: Annotated[bool, _text(None, "Prompts and texts are the user's messages of a chat.", "--chat")] = False,
    strict: Annotated[bool, _text(None, "Refuse rows that cannot be used, not skip them.", "--strict")] = False,
    self_generate: Annotated[bool, _text(None, "Let the target write the texts, from their beginnings.", "--self-generate")] = False,
    tokens: Annotated[int, _text("N", "How much it writes.", "--tokens")] = 1_000_000,
    temperature: Annotated[list[float] | None, _text("T", "It writes at these in turn; 0 and 0.7.")] = None,
    assistant_model: Annotated[str | None, _text("MODEL", "Drafts while it writes.", "--assistant-model")] = None,
    batch_size: Annotated[int, _text("B", "Rows it writes side by side.", "--batch-size")] = 32,
    own_text: Annotated[Path | None, _text("FILE", "Where its text is kept, to train several heads on; in --out.")] = None,
    minutes: Annotated[float | None, _loop("M", "Train about so long.", "--minutes")] = None,
    steps: Annotated[int | None, _loop("N", "Train so many steps.", "--steps")] = None,
    epochs: Annotated[float, _loop("N", "Read the texts so often.", "--epochs")] = 2.0,
    objective: Annotated[Objective, _loop("NAME", "ce; or distilled from the target: kl, tv, nla, lk.")] = Objective.ce,
    lr: Annotated[float | None, _loop("X", "Highest learning rate; by the width of the target if not given.")] = None,
    length: Annotated[int | None, _loop("N", "Tokens per row; 512 if the target reads so many.", "--length")] = None,
    batch: Annotated[int, _loop("B", "Rows per batch.", "--batch")] = 4,
    accumulate: Annotated[int, _loop("N", "Batches per step.", "--accumulate")] = 1,
    cache_gb: Annotated[float, _loop("X", "Gigabytes of disk for hidden states between epochs, at most 2.")] = 0.0,
    seed: Annotated[int, _loop("S", "Same seed, same heads.", "--seed")] = 0,
    save_minutes: Annotated[float, _loop("M", "Between checkpoints.", "--save-minutes")] = 2.0,
    heads: Annotated[int | None, _medusa("K", "Heads; 5.", "--heads")] = None,
    layers: Annotated[int | None, _medusa("N", "Blocks per head; 1. For redrafter as well.", "--layers")] = None,
    own_projection: Annotated[bool, _medusa(None, "A projection per head instead of the target's.", "--own-projection")] = False,
    joint: Annotated[bool, _medusa(None, "Then, as long again, with the backbone (Medusa-2): another model.", "--joint")] = False,
    one_stage: Annotated[bool, _medusa(None, "With --joint: heads and backbone together from the start.", "--one-stage")] = False,
    horizon: Annotated[int | None, _redrafter("K", "Tokens ahead; 5.", "--horizon")] = None,
    exit_dim: Annotated[int | None, _redrafter("N", "Width before the projection.", "--exit-dim")] = None,
    share_lm_head: Annotated[bool, _redrafter(None, "Project with the target's own LM head.", "--share-lm-head")] = False,
    dtype: opt.Dtype = None,
    device: opt.Device = None,
) -> None:  # fmt: skip
    """Train draft heads for a model: Medusa or ReDrafter, on texts or on what the model itself writes."""
    from draftproof.drafters.medusa import MedusaHead
    from draftproof.drafters.redrafter import ReDrafterHead
    from draftproof.training import train_run
    from draftproof.training.joint import JointConfig
    from draftproof.training.self_generate import SelfGenerateConfig
    from draftproof.training.texts import DataConfig
    from draftproof.training.trainer import TrainConfig

    of_medusa = {"--heads": heads, "--own-projection": own_projection, "--joint": joint, "--one-stage": one_stage}
    of_redrafter = {"--horizon": horizon, "--exit-dim": exit_dim, "--share-lm-head": share_lm_head}
    other = "redrafter" if method is Method.medusa else "medusa"
    for name, value in (of_redrafter if method is Method.medusa else of_medusa).items():
        if value:
            raise BadInput(f"{name} is an option of {other}, not of {method.value}; leave it out")
    if one_stage and not joint:
        raise BadInput("--one-stage is a way to train the backbone along; add --joint")
    form: dict[str, Any] = {"layers": layers or 1, "share_lm_head": share_lm_head}
    if method is Method.medusa:
        form = {"heads": 5 if heads is None else heads, "layers": layers or 1, "share_lm_head": not own_projection}
        make: train_run.MakeHead = lambda target: MedusaHead.fresh(target, *form.values())  # noqa: E731
    else:
        form |= {"horizon": horizon or 5, "exit_dim": exit_dim}
        make = lambda target: ReDrafterHead.fresh(  # noqa: E731
            target, steps=horizon or 5, num_layers=layers or 1, exit_dim=exit_dim, share_lm_head=share_lm_head
        )
    temperatures = tuple(temperature or (0.0, 0.7))
    run = train_run.TrainRun(
        model=model, data=DataConfig(tuple(data), held_out, chat, strict), out=out, head_config=form, dtype=dtype,
        device=device, joint=JointConfig(distil=self_generate, one_stage=one_stage) if joint else None,
        config=TrainConfig(
            steps, minutes, epochs, lr, objective.value, length, batch, accumulate, cache_gb=cache_gb, seed=seed,
            save_minutes=save_minutes,
        ),
        self_generate=SelfGenerateConfig(tokens, temperatures, assistant_model, batch_size, own_text) if self_generate else None,
    )  # fmt: skip
    with Screen() as screen:
        train_run.train(run, make, screen)
    show.note(f"draftproof run {out / 'model' if joint else model} --drafter {out / 'heads' if joint else out}", style="bold")


class Screen(Progress):
    """A bar on a terminal, and a line per evaluation anywhere. A `training.trainer.Callback`."""

    def __init__(self) -> None:
        said = TextColumn("{task.percentage:3.0f} % · {task.fields[said]} ·")
        columns = (TextColumn("{task.description}"), BarColumn(), said, TimeRemainingColumn(), TextColumn("left"))
        console = Console(stderr=True, highlight=False)
        super().__init__(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._titled, self._steps = False, 0

    def note(self, text: str) -> None:
        """A line above the bar."""
        self.console.print(text, style="dim", markup=False, soft_wrap=not self.console.is_terminal)

    def wrote(self, progress: Written) -> None:
        self.show_bar("writing", progress.tokens, progress.of, f"{progress.speed:,.0f} tokens/s")

    def planned(self, step: int, steps: int) -> None:
        self.note(f"{steps} steps" if not step else f"going on at step {step} of {steps}")
        self._steps = steps
        self.show_bar("training", step, steps)

    def stepped(self, step: int, loss: float, speed: float) -> None:
        self.show_bar("training", step, self._steps, f"loss {loss:.3f} · {speed:,.0f} tokens/s")

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """A line of the table: accuracy per step of the head on held-out rows."""
        if not self._titled:
            names = "".join(f"{f'{index + 2}. token':>13}" for index in range(len(evaluation.top1)))
            self.note(f"{'step':>7}{'held-out':>10}{'tokens/round':>14}{names}   top-1/top-5")
            self._titled = True
        pairs = zip(evaluation.top1, evaluation.top5, strict=True)
        hits = "".join(f"{f'{one:.1%}/{five:.0%}':>13}" for one, five in pairs)
        kl = f"   backbone KL {evaluation.figures['backbone_kl']:.4f}" if "backbone_kl" in evaluation.figures else ""
        self.note(f"{step:>7}{evaluation.loss:>10.3f}{evaluation.tokens_per_round:>14.2f}{hits}{kl}")

    def show_bar(self, what: str, done: int, of: int, said: str = "") -> None:
        """One bar at a time, each with its own time left."""
        if not self.tasks or self.tasks[0].description != what:
            for task in self.task_ids:
                self.remove_task(task)
            self.add_task(what, total=of, said=said)
        self.update(self.task_ids[0], completed=done, total=of, said=said)
