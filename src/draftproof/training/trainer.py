"""The training loop: schedule, optimiser, checkpoints, log.

A run that is killed at any moment and resumed has the result of an uninterrupted one: batches,
dropout and schedule are functions of (seed, step), and the checkpoint holds the rest.
"""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn

from draftproof.errors import BadInput
from draftproof.training.config import TrainConfig
from draftproof.training.files import atomic_write, same_settings
from draftproof.training.heads import Evaluation, FrozenTarget
from draftproof.training.rows import Batch, Batches

EVALUATIONS = 12
"""The number of evaluations on held-out rows in a run, the last at its end."""
SAVED = 120.0
"""Seconds between checkpoints."""
PROGRESS = ("step", "seconds", "tokens", "log")
"""What a checkpoint holds besides weights and the optimiser."""


class Callback(Protocol):
    """Receives the progress of a run: sentences, bars, and measurements."""

    def note(self, text: str) -> None: ...
    def progress(self, what: str, done: int, of: int, details: str = "") -> None: ...
    def evaluated(self, step: int, evaluation: Evaluation) -> None: ...
    def logged(self, log: Sequence[Mapping[str, object]], folder: Path) -> None: ...


class Silent:
    """A callback that does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


class Trainer:
    """Trains in a folder, and continues where an earlier run stopped.

    held_out: rows for evaluation. settings: determine the result; a checkpoint with others is
    refused.
    """

    def __init__(
        self, trainable: FrozenTarget, batches: Batches, held_out: Sequence[Batch],
        config: TrainConfig, folder: Path, settings: Mapping[str, object], callback: Callback,
    ) -> None:  # fmt: skip
        self.trainable, self.batches, self.held_out = trainable, batches, held_out
        self.config, self.callback = config, callback
        self.settings = json.loads(json.dumps(settings))
        folder.mkdir(exist_ok=True)
        self.folder, self.checkpoint = folder, folder / "state.pt"
        steps = max(1, round(config.epochs * len(batches)))
        self.steps, self.step, self.seconds, self.tokens = config.steps or steps, 0, 0.0, 0
        self.log, self._stop = list[dict[str, Any]](), ""
        groups = trainable.param_groups()
        self._parameters = [parameter for group in groups for parameter in group["params"]]
        self._optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.0)
        if self.checkpoint.exists():
            self._restore()

    @property
    def evaluation(self) -> dict[str, object]:
        """The last `Evaluation`."""
        evaluation: dict[str, object] = next(
            row["held_out"] for row in self.log[::-1] if "held_out" in row
        )
        return evaluation

    def fit(self) -> None:
        """Train to the last step. Raises KeyboardInterrupt, after saving, if it is stopped."""
        if not self.checkpoint.exists():
            start = time.perf_counter()
            self.trainable.begin(self.batches, partial(self.callback.progress, "reading"))
            self.seconds = time.perf_counter() - start
            self._save()
        going = f"going on at step {self.step} of " if self.step else ""
        self.callback.note(f"{going}{self.steps} steps")
        self.callback.progress("training", self.step, self.steps)
        saved = time.monotonic()
        with self._signals():
            while self.step < self.steps and not self._stop:
                self.log.append(self._one_step())
                if "held_out" in self.log[-1]:
                    self._write_log()
                    self.callback.logged(self.log, self.folder)
                if time.monotonic() - saved >= SAVED:
                    self._save()
                    saved = time.monotonic()
        self._save()
        if self._stop:
            where = f"{self._stop} at step {self.step} of {self.steps}"
            raise KeyboardInterrupt(f"{where}; the same command goes on from there")

    def _one_step(self) -> dict[str, object]:
        """Take one step of the optimiser, perhaps with an evaluation, and return its log line."""
        start, batch = time.perf_counter(), self.batches[self.step]
        rate = self.config.rate_at(self.step, self.steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate * group.get("factor", 1.0)
        torch.manual_seed(self.config.seed * 1_000_003 + self.step)      # dropout
        loss = float(self.trainable.backward(batch))
        norm = nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.step, self.tokens = self.step + 1, self.tokens + sum(batch.sizes)
        if not math.isfinite(loss):
            raise BadInput(f"the loss is {loss} at step {self.step}; lower --lr, or clean the data")
        speed = sum(batch.sizes) / (time.perf_counter() - start)
        details = f"loss {loss:.3f} · {speed:,.0f} tokens/s"
        self.callback.progress("training", self.step, self.steps, details)
        row: dict[str, object] = {
            "step": self.step, "loss": loss, "rate": rate, "gradient": float(norm),
            "tokens": self.tokens, "tokens_per_second": round(speed, 1),
        }  # fmt: skip
        if self.step * EVALUATIONS % self.steps < EVALUATIONS:
            evaluation = self.trainable.evaluate(self.held_out)
            self.callback.evaluated(self.step, evaluation)
            row["held_out"] = evaluation._asdict()
        self.seconds += time.perf_counter() - start
        return row | {"seconds": round(self.seconds, 2)}

    def _save(self) -> None:
        """Write checkpoint and log; there is a complete one at every moment."""
        saved = {
            "settings": self.settings, "progress": {name: getattr(self, name) for name in PROGRESS},
            "weights": self.trainable.state(), "optimizer": self._optimizer.state_dict(),
        }  # fmt: skip
        with atomic_write(self.checkpoint) as part, part.open("wb") as file:
            torch.save(saved, file)
            file.flush()
            os.fsync(file.fileno())
        self._write_log()

    def _write_log(self) -> None:
        """Write every line of the log."""
        with atomic_write(self.folder / "log.jsonl") as part:
            lines = "".join(json.dumps(row) + "\n" for row in self.log)
            part.write_text(lines, encoding="utf-8")

    def _restore(self) -> None:
        try:
            saved = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
        except Exception as error:                                       # zip raises any error
            file = self.checkpoint
            raise BadInput(f"{file} cannot be read ({error}); remove it to begin again") from error
        same_settings(self.folder, saved["settings"], self.settings)
        self.trainable.restore(saved["weights"])
        self._optimizer.load_state_dict(saved["optimizer"])
        vars(self).update(saved["progress"])

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Let Ctrl-C and SIGTERM end the run after the current step."""
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
