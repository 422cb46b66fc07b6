"""The training loop: schedule, optimiser, checkpoints, log.

A run killed at any moment and resumed ends as an uninterrupted one: batches, dropout and schedule
are functions of (seed, step), and the checkpoint holds the rest.
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
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn

from draftproof.errors import BadInput
from draftproof.training.config import TrainConfig
from draftproof.training.files import same_settings, whole
from draftproof.training.heads import Evaluation, FrozenTarget
from draftproof.training.rows import Batch, Batches
from draftproof.training.self_generate import Progress

EVALUATIONS = 12
"""On held-out rows in a run, the last at its end."""
TRIAL, TRIAL_SECONDS = 24, 10.0
"""Batches, and seconds, that are tried to learn how fast this machine is."""


class Callback(Protocol):
    """Hears how a run goes."""

    def note(self, text: str) -> None: ...
    def wrote(self, progress: Progress) -> None: ...
    def read(self, tokens: int, of: int) -> None: ...
    def planned(self, step: int, steps: int) -> None: ...
    def stepped(self, step: int, loss: float, speed: float) -> None: ...
    def evaluated(self, step: int, evaluation: Evaluation) -> None: ...


class Silent:
    """A callback that does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


class Trainer:
    """Trains in a folder, and goes on where an earlier run stopped.

    held_out: to evaluate with. settings: what decides the result; a checkpoint of others is
    refused.
    """

    def __init__(
        self, trainable: FrozenTarget, batches: Batches, held_out: Sequence[Batch],
        config: TrainConfig, folder: Path, settings: Mapping[str, Any], callback: Callback,
    ) -> None:  # fmt: skip
        self.trainable, self.batches, self.held_out = trainable, batches, held_out
        self.config, self.callback = config, callback
        self.settings = json.loads(json.dumps(settings))
        folder.mkdir(exist_ok=True)
        self.folder, self.checkpoint, self.log = folder, folder / "state.pt", folder / "log.jsonl"
        self.step, self.steps, self.seconds, self.tokens = 0, 0, 0.0, 0
        self.evaluation: Evaluation | None = None
        self._stop = ""
        groups = trainable.param_groups()
        self._parameters = [parameter for group in groups for parameter in group["params"]]
        self._optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=config.weight_decay)
        if self.checkpoint.exists():
            self._restore()

    def fit(self) -> None:
        """Train to the last step. Raises KeyboardInterrupt, after saving, if told to stop."""
        if not self.steps:
            start = time.perf_counter()
            read = self.trainable.begin(self.batches, self.callback.read)
            self.seconds = time.perf_counter() - start
            self.steps = self._planned_steps(read)
            self._save()
        self.callback.planned(self.step, self.steps)
        with self._signals(), self.log.open("a") as log:
            saved = time.monotonic()
            while self.step < self.steps and not self._stop:
                row = self._one_step()
                if self.step * EVALUATIONS % self.steps < EVALUATIONS:
                    row["held_out"] = self._evaluated()._asdict()
                log.write(json.dumps(row) + "\n")
                if time.monotonic() - saved >= 60 * self.config.save_minutes:
                    log.flush()
                    self._save()
                    saved = time.monotonic()
        self._save()
        if self._stop:
            where = f"{self._stop} at step {self.step} of {self.steps}"
            raise KeyboardInterrupt(f"{where}; the same command goes on from there")

    def _one_step(self) -> dict[str, Any]:
        """One step of the optimiser, and its line of the log."""
        start, config = time.perf_counter(), self.config
        rate = (config.learning_rate or 1e-3) * config.rate_at(self.step, self.steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate * group.get("factor", 1.0)
        torch.manual_seed(config.seed * 1_000_003 + self.step)           # dropout
        loss, tokens = self._backward(self.step)
        norm = nn.utils.clip_grad_norm_(self._parameters, config.clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        seconds = time.perf_counter() - start
        self.step, self.tokens = self.step + 1, self.tokens + tokens
        self.seconds += seconds
        if not math.isfinite(loss):
            raise BadInput(f"the loss is {loss} at step {self.step}; lower --lr, or clean the data")
        self.callback.stepped(self.step, loss, tokens / seconds)
        return {"step": self.step, "loss": loss, "rate": rate, "gradient": float(norm),
                "tokens": self.tokens, "tokens_per_second": round(tokens / seconds, 1),
                "seconds": round(self.seconds, 2)}  # fmt: skip

    def _backward(self, step: int) -> tuple[float, int]:
        """Gradients of a step's batches, weighed by tokens in the loss; loss, and tokens read."""
        size = self.config.accumulate
        batches = [self.batches[step * size + part] for part in range(size)]
        all_tokens = max(1, sum(batch.loss_tokens for batch in batches))
        total = torch.zeros(())
        for batch in batches:
            share = batch.loss_tokens / all_tokens
            total += self.trainable.backward(batch, share).to(total)
        return float(total), sum(sum(batch.sizes) for batch in batches)

    def _evaluated(self) -> Evaluation:
        start = time.perf_counter()
        self.evaluation = self.trainable.evaluate(self.held_out)
        self.seconds += time.perf_counter() - start
        self.callback.evaluated(self.step, self.evaluation)
        return self.evaluation

    def _planned_steps(self, read: int) -> int:
        """How many; of minutes, by trying how many steps and evaluations this machine makes.

        read: batches that were read to begin with."""
        if self.config.steps is not None:
            return self.config.steps
        if self.config.minutes is None:
            return max(1, round(self.config.epochs * len(self.batches) / self.config.accumulate))
        seconds, part = 60 * self.config.minutes - self.seconds, self.config.accumulate
        epoch, first, again = max(1, len(self.batches) // part), list[float](), list[float]()
        most = min(TRIAL_SECONDS, seconds / 10)
        while len(first) < 3 or (len(first) < TRIAL and sum(first + again) < most):
            for spent in (first, again):                 # what was read once may be kept
                start = time.perf_counter()
                self._backward((epoch - 1 - len(first)) % epoch)
                nn.utils.clip_grad_norm_(self._parameters, self.config.clip)
                spent.append(time.perf_counter() - start)
                self._optimizer.zero_grad(set_to_none=True)              # nothing is learnt here
        begin = time.perf_counter()
        self.trainable.evaluate(self.held_out)
        start = time.perf_counter()
        self.trainable.evaluate(self.held_out)
        end = time.perf_counter()
        left = seconds - sum(first + again) - (end - begin) - EVALUATIONS * (end - start)
        fresh, known = (sum(spent[1:]) / len(spent[1:]) for spent in (first, again))
        unread = min(max(0, epoch - read // part), left / fresh)
        return max(EVALUATIONS, int(unread + (left - unread * fresh) / known))

    def _save(self) -> None:
        """Write the checkpoint; whatever happens meanwhile, there is always a whole one."""
        progress = {name: getattr(self, name) for name in ("step", "steps", "seconds", "tokens")}
        saved = {
            "settings": self.settings, "progress": progress, "weights": self.trainable.state(),
            "optimizer": self._optimizer.state_dict(),
            "evaluation": tuple(self.evaluation) if self.evaluation else None,
        }  # fmt: skip
        with whole(self.checkpoint) as part, part.open("wb") as file:
            torch.save(saved, file)
            file.flush()
            os.fsync(file.fileno())

    def _restore(self) -> None:
        try:
            saved = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
        except Exception as error:                                       # zip raises anything
            file = self.checkpoint
            raise BadInput(f"{file} cannot be read ({error}); remove it to begin anew") from error
        same_settings(self.folder, saved["settings"], self.settings)
        self.trainable.restore(saved["weights"])
        self._optimizer.load_state_dict(saved["optimizer"])
        vars(self).update(saved["progress"])
        evaluation = saved["evaluation"]
        self.evaluation = Evaluation(*evaluation) if evaluation else None
        if self.log.exists():
            lines = (line for line in self.log.read_text().splitlines(True) if line.endswith("\n"))
            kept = "".join(line for line in lines if json.loads(line)["step"] <= self.step)
            with whole(self.log) as part:                                # the rest is done again
                part.write_text(kept)

    @contextmanager
    def _signals(self) -> Iterator[None]:
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
