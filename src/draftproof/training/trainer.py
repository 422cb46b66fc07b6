"""The training loop: schedule, optimiser, checkpoints, log. Knows that something has weights and a loss, not what it is.

A run killed at any moment and resumed ends as an uninterrupted one: batches, dropout and schedule are functions of
(seed, step), and the checkpoint holds the rest.
"""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from draftproof.errors import BadInput
from draftproof.training.rows import Batch, Batches

EXAMS = 12
"""Examinations on held-out rows in a run, the last at its end."""
TRIAL, TRIAL_SECONDS = 24, 10.0
"""Batches, and seconds, that are tried to learn how fast this machine is."""


class ProcessGroup(NamedTuple):
    """Parameters with a learning rate of their own: `factor` times the plan's."""

    parameters: list[nn.Parameter]
    factor: float = 1.0


class Exam(NamedTuple):
    """How good it is on held-out rows. figures: what else was measured, by name."""

    loss: float
    top1: list[float]
    top5: list[float]
    tokens_per_round: float
    figures: dict[str, float]


class Subject(Protocol):
    """What is trained."""

    def groups(self) -> list[ProcessGroup]:
        """The parameters to optimise."""

    def backward(self, batch: Batch, share: float, progress: float) -> Tensor:
        """Add the gradient of `share` times its loss on a batch; returns the latter. `progress` goes from 0 to 1."""

    def examine(self, batches: Sequence[Batch]) -> Exam:
        """How good it is."""

    def state(self) -> dict[str, Tensor]:
        """What training changed."""

    def restore(self, state: dict[str, Tensor]) -> None:
        """Go on from a state."""


class Watch(Protocol):
    """Whoever wants to know how it goes."""

    def planned(self, step: int, steps: int) -> None:
        """Training begins at `step` of `steps`."""

    def stepped(self, step: int, loss: float, speed: float) -> None:
        """A step was made; tokens per second."""

    def examined(self, step: int, exam: Exam) -> None:
        """It was examined."""


@dataclass(frozen=True)
class Plan:
    """How to train. How long is said by one of steps, minutes and epochs; of several, the first in this order.

    rate: the highest learning rate, reached after the share `warmup` of the steps; from there a cosine to zero. None
    leaves it to the width of the target. accumulate: batches per step. save_minutes: between checkpoints.
    """

    steps: int | None = None
    minutes: float | None = None
    epochs: float = 2.0
    rate: float | None = None
    warmup: float = 0.1
    weight_decay: float = 0.0
    clip: float = 1.0
    accumulate: int = 1
    seed: int = 0
    save_minutes: float = 2.0

    def __post_init__(self) -> None:
        for name in ("steps", "minutes", "epochs", "rate", "accumulate"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise BadInput(f"{name} was {value}; it must be above 0")

    def for_width(self, hidden_size: int) -> Plan:
        """With a rate: the published 0.001 for a width of 4096, more for narrower models, which bear it."""
        return self if self.rate is not None else replace(self, rate=min(8e-3, 1e-3 * (4096 / hidden_size) ** 0.75))

    def factor(self, step: int, steps: int) -> float:
        """What the learning rate is multiplied with at a step."""
        begin = max(1.0, self.warmup * steps)
        if step < begin:
            return (step + 1) / (begin + 1)
        return 0.5 * (1 + math.cos(math.pi * (step - begin) / max(1.0, steps - begin)))


class Trainer:
    """Runs a plan on a subject, in a folder; goes on where an earlier run stopped.

    settings: what else decides the result; a checkpoint of other settings is refused. held_out: rows to examine with.
    """

    def __init__(
        self,
        subject: Subject,
        batches: Batches,
        held_out: Sequence[Batch],
        plan: Plan,
        folder: Path,
        settings: Mapping[str, Any],
        watch: Watch,
    ) -> None:
        self.subject, self.batches, self.held_out, self.plan = subject, batches, held_out, plan
        self.folder, self.watch = folder, watch
        self.settings = json.loads(json.dumps(settings))
        self.step, self.steps, self.seconds, self.tokens = 0, 0, 0.0, 0
        self.exam: Exam | None = None
        self._stop = ""
        self._rate = plan.rate or 1e-3
        groups = [{"params": group.parameters, "factor": group.factor} for group in subject.groups()]
        self._parameters = [parameter for group in subject.groups() for parameter in group.parameters]
        self._optimizer = torch.optim.AdamW(groups, lr=self._rate, weight_decay=plan.weight_decay)
        if self.checkpoint.exists():
            self._restore()

    @property
    def checkpoint(self) -> Path:
        return self.folder / "state.pt"

    @property
    def log(self) -> Path:
        return self.folder / "log.jsonl"

    def fit(self) -> None:
        """Train to the last step. Raises KeyboardInterrupt, with the checkpoint written, if told to stop."""
        if not self.steps:
            self.steps = self._planned_steps()
            self._save()
        self.watch.planned(self.step, self.steps)
        with self._listening(), self.log.open("a") as log:
            saved = time.monotonic()
            while self.step < self.steps and not self._stop:
                row = self._one_step()
                if self.step * EXAMS // self.steps > (self.step - 1) * EXAMS // self.steps:
                    row |= self._examined()
                log.write(json.dumps(row) + "\n")
                if time.monotonic() - saved >= 60 * self.plan.save_minutes:
                    log.flush()
                    self._save()
                    saved = time.monotonic()
        self._save()
        if self.exam is None and not self._stop:
            self._examined()
        if self._stop:
            raise KeyboardInterrupt(
                f"{self._stop} at step {self.step} of {self.steps}; the same command goes on from there"
            )

    def _one_step(self) -> dict[str, Any]:
        """One step of the optimiser, and its line of the log."""
        begun = time.perf_counter()
        rate = self._rate * self.plan.factor(self.step, self.steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate * group["factor"]
        torch.manual_seed(self.plan.seed * 1_000_003 + self.step)               # dropout, where there is any
        loss, tokens = self._backward(self.step, self.step / self.steps)
        norm = nn.utils.clip_grad_norm_(self._parameters, self.plan.clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.step, self.tokens = self.step + 1, self.tokens + tokens
        seconds = time.perf_counter() - begun
        self.seconds += seconds
        if not math.isfinite(loss):
            raise BadInput(f"the loss is {loss} at step {self.step}; lower --lr, or look for broken texts in the data")
        self.watch.stepped(self.step, loss, tokens / seconds)
        figures = {"loss": loss, "rate": rate, "gradient": float(norm), "tokens": self.tokens}
        times = {"tokens_per_second": round(tokens / seconds, 1), "seconds": round(self.seconds, 2)}
        return {"step": self.step, **figures, **times}

    def _backward(self, step: int, progress: float) -> tuple[float, int]:
        """Gradients of all batches of a step, each weighed by the tokens that count in it; loss and tokens read."""
        batches = [self.batches[step * self.plan.accumulate + part] for part in range(self.plan.accumulate)]
        whole = sum(batch.size for batch in batches)
        total = torch.zeros(())
        for batch in batches:
            total += self.subject.backward(batch, batch.size / max(1, whole), progress).to(total)
        return float(total), sum(batch.read for batch in batches)

    def _examined(self) -> dict[str, Any]:
        begun = time.perf_counter()
        self.exam = self.subject.examine(self.held_out)
        self.seconds += time.perf_counter() - begun
        self.watch.examined(self.step, self.exam)
        return {"held_out": self.exam._asdict()}

    def _planned_steps(self) -> int:
        if self.plan.steps is not None:
            return self.plan.steps
        if self.plan.minutes is None:
            return max(1, round(self.plan.epochs * len(self.batches) / self.plan.accumulate))
        return self._steps_in(60 * self.plan.minutes)

    def _steps_in(self, seconds: float) -> int:
        """How many steps this machine makes in that time, examinations included. Nothing is learnt meanwhile."""
        spent: list[float] = []
        while len(spent) < 3 or (len(spent) < TRIAL and sum(spent) < min(TRIAL_SECONDS, seconds / 10)):
            begun = time.perf_counter()
            self._backward(len(spent), 0.0)
            nn.utils.clip_grad_norm_(self._parameters, self.plan.clip)
            spent.append(time.perf_counter() - begun)
            self._optimizer.zero_grad(set_to_none=True)
        begun = time.perf_counter()
        self.subject.examine(self.held_out)
        left = seconds - sum(spent) - (EXAMS + 1) * (time.perf_counter() - begun)
        return max(EXAMS, int(left / (sum(spent[1:]) / len(spent[1:]))))

    def _save(self) -> None:
        """Write the checkpoint; whatever happens meanwhile, there is always a whole one."""
        part = self.checkpoint.with_suffix(".part")
        saved = {
            "settings": self.settings,
            "subject": self.subject.state(),
            "optimizer": self._optimizer.state_dict(),
            "progress": {"step": self.step, "steps": self.steps, "seconds": self.seconds, "tokens": self.tokens},
            "exam": tuple(self.exam) if self.exam else None,
        }
        with part.open("wb") as file:
            torch.save(saved, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(self.checkpoint)

    def _restore(self) -> None:
        try:
            saved = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
        except Exception as error:                                    # pickle and zip raise anything
            raise BadInput(f"{self.checkpoint} cannot be read ({error}); remove it to begin anew") from error
        same_settings(self.folder, saved["settings"], self.settings)
        self.subject.restore(saved["subject"])
        self._optimizer.load_state_dict(saved["optimizer"])
        for name, value in saved["progress"].items():
            setattr(self, name, value)
        self.exam = Exam(*saved["exam"]) if saved.get("exam") else None
        self._trim_log()

    def _trim_log(self) -> None:
        """Forget what was logged behind the checkpoint: it will be done again."""
        if self.log.exists():
            lines = self.log.read_text().splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= self.step]
            part = self.log.with_suffix(".part")
            part.write_text("".join(kept))
            part.replace(self.log)

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM end the run behind the current step."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(number: int, frame: FrameType | None) -> None:
            self._stop = "interrupted" if number == signal.SIGINT else "asked to end"

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def same_settings(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise BadInput, naming the first difference, if a folder was begun with other settings."""
    now = json.loads(json.dumps(now))
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            raise BadInput(
                f"{folder} was begun with {name} {_said(before.get(name))}, now it is {_said(now.get(name))}; "
                "give the same, or another --out"
            )


def _said(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
