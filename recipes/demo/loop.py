"""Knows the training loop both models share: optimizers, schedule, checkpoints, log, and export."""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from data import Stream
from tokenizer import save as save_tokenizer
from torch import nn
from tqdm import tqdm  # type: ignore[import-untyped]
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

MACHINE = "2-core CPU with AMX"


@dataclass(frozen=True)
class Plan:
    """What fixes a run besides the data; ``steps`` may change before the decay begins."""

    steps: int
    batch: int
    length: int
    seed: int
    muon: float
    adam: float
    weight_decay: float
    warmup: int = 60
    decay: float = 0.4

    def rate(self, step: int) -> float:
        """Factor on the learning rates: warm-up, constant, linear to zero over the last part."""
        left = (self.steps - step) / max(1.0, self.decay * self.steps)
        return min(1.0, (step + 1) / self.warmup, left)


def arguments_of(parser: argparse.ArgumentParser, *, steps: int, batch: int, length: int) -> None:
    """Add the options both trainers share."""
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for checkpoints and the log")
    add("--export", type=Path, required=True, help="folder for the finished model")
    add("--export-only", action="store_true", help="export the last checkpoint, train nothing")
    add("--steps", type=int, default=steps)
    add("--batch", type=int, default=batch, help="windows a step")
    add("--length", type=int, default=length, help="tokens a window")
    add("--seed", type=int, default=0)
    add("--muon", type=float, default=5e-3, help="learning rate of block matrices")
    add("--adam", type=float, default=4e-3, help="learning rate of embeddings and norms")
    add("--weight-decay", type=float, default=0.1)
    add("--threads", type=int, default=os.cpu_count() or 1)
    add("--no-compile", action="store_true", help="run eagerly")


def plan_of(arguments: argparse.Namespace) -> Plan:
    """The plan those options name; also fixes the threads and seeds."""
    torch.set_num_threads(arguments.threads)
    random.seed(arguments.seed)
    torch.manual_seed(arguments.seed)
    names = ("steps", "batch", "length", "seed", "muon", "adam", "weight_decay")
    return Plan(**{name: getattr(arguments, name) for name in names})


def llama(
    *, layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int
) -> LlamaForCausalLM:
    """A fresh Llama: vocabulary 4,096, context 1,024, tied embeddings, end of text 0."""
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=4096, hidden_size=hidden, intermediate_size=intermediate,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        head_dim=hidden // heads, max_position_embeddings=1024, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=0, eos_token_id=0, pad_token_id=0,
    ))


def model_of(folder: Path, dtype: torch.dtype) -> LlamaForCausalLM:
    """The exported model of the folder, to be run and not trained."""
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
    model.train(False)
    return model


class Trainer:
    """Runs a plan on a model, resuming from the checkpoint in ``out`` when there is one."""

    def __init__(self, model: LlamaForCausalLM, source: Stream[Any], plan: Plan, out: Path) -> None:
        self.model, self.plan, self.step, self.seconds = model, plan, 0, 0.0
        self.plans: list[list[int]] = []
        self._source, self._out = source, out
        blocks = [p for p in model.model.layers.parameters() if p.ndim == 2]
        chosen = {id(p) for p in blocks}
        rest = [p for p in model.parameters() if id(p) not in chosen]
        muon = torch.optim.Muon(blocks, lr=plan.muon, weight_decay=plan.weight_decay,
                                adjust_lr_fn="match_rms_adamw")
        adam = torch.optim.AdamW(rest, lr=plan.adam, betas=(0.9, 0.95), weight_decay=0.0)
        self._optimizers: list[tuple[torch.optim.Optimizer, float]] = [
            (muon, plan.muon), (adam, plan.adam)]
        self._stop = False
        out.mkdir(parents=True, exist_ok=True)
        self._checkpoint = out / "checkpoint.pt"
        if self._checkpoint.exists():
            self._restore()
        if not self.plans or self.plans[-1][1] != plan.steps:
            self.plans.append([self.step, plan.steps])

    @property
    def tokens(self) -> int:
        """Tokens trained on so far."""
        return self.step * self.plan.batch * self.plan.length

    def _restore(self) -> None:
        saved = torch.load(self._checkpoint, weights_only=True)
        self.model.load_state_dict(saved["model"])
        for (optimizer, _), state in zip(self._optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        torch.set_rng_state(saved["rng"])
        self._source.restore(saved["source"])
        self.step, self.seconds, self.plans = saved["step"], saved["seconds"], saved["plans"]
        print(f"resuming at step {self.step}")

    def save(self) -> None:
        """Write the checkpoint; a crash while writing leaves the previous one."""
        part = self._checkpoint.with_suffix(".part")
        torch.save({
            "model": self.model.state_dict(), "rng": torch.get_rng_state(),
            "optimizers": [optimizer.state_dict() for optimizer, _ in self._optimizers],
            "source": self._source.state(), "step": self.step, "seconds": self.seconds,
            "plans": self.plans,
        }, part)
        part.replace(self._checkpoint)

    def _interrupt(self, _signal: int, _frame: FrameType | None) -> None:
        self._stop = True

    def fit(
        self, loss: Callable[[Any], torch.Tensor], evaluate: Callable[[], dict[str, float]],
        *, every: int = 250, minutes: float = 3.0,
    ) -> bool:
        """Train to the last step (true) or to Ctrl-C (false); the checkpoint is usable."""
        signals = (signal.SIGINT, signal.SIGTERM)
        handlers = {name: signal.signal(name, self._interrupt) for name in signals}
        per_step = self.plan.batch * self.plan.length
        whole = self.plan.steps * per_step
        bar = tqdm(total=whole, initial=self.tokens, unit="tok", unit_scale=True)
        saved = last = time.monotonic()
        with (self._out / "log.jsonl").open("a", encoding="utf-8") as log:
            while self.step < self.plan.steps and not self._stop:
                rate = self.plan.rate(self.step)
                for optimizer, base in self._optimizers:
                    for group in optimizer.param_groups:
                        group["lr"] = base * rate
                value = loss(self._source.next())
                value.backward()  # type: ignore[no-untyped-call]
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                for optimizer, _ in self._optimizers:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                self.step += 1
                now = time.monotonic()
                self.seconds += now - last
                speed, last = per_step / (now - last), now
                row: dict[str, float] = {"step": self.step, "tokens": self.tokens, "rate": rate}
                row |= {"loss": value.item(), "tokens_per_second": speed, "seconds": self.seconds}
                bar.update(per_step)
                bar.set_postfix(loss=f"{row['loss']:.3f}")
                if self.step % every == 0 or self.step == self.plan.steps:
                    row |= evaluate()
                    bar.write(json.dumps(row))
                    self.seconds += time.monotonic() - last
                    last = time.monotonic()
                log.write(json.dumps(row) + "\n")
                log.flush()
                if now - saved > 60 * minutes:
                    self.save()
                    saved = now
        for name, handler in handlers.items():
            signal.signal(name, handler)
        bar.close()
        self.save()
        return not self._stop


def export(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, folder: Path,
    record: dict[str, Any],
) -> None:
    """Write the model in bfloat16 with its tokenizer, generation defaults and training record."""
    weights = LlamaForCausalLM(model.config)
    weights.to(dtype=torch.bfloat16)
    state = model.state_dict().items()
    weights.load_state_dict({name: value.to(torch.bfloat16) for name, value in state})
    weights.config.dtype = torch.bfloat16
    defaults = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    weights.generation_config = GenerationConfig.from_dict(defaults)
    weights.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    save_tokenizer(tokenizer, folder)
    (folder / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
