"""What training tests share: texts a tiny target wrote, heads to train, a callback."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from tiny import VOCAB, fresh, prompts, target

from draftproof import embedded
from draftproof.core.params import Sampling
from draftproof.drafters.heads import DraftHead
from draftproof.drafters.medusa import MedusaHead
from draftproof.drafters.redrafter import ReDrafterHead
from draftproof.engine.engine import Engine
from draftproof.model.loading import load_tokenizer
from draftproof.training.config import TrainConfig
from draftproof.training.heads import Evaluation, FrozenTarget
from draftproof.training.rows import Batches, Example, Rows
from draftproof.training.trainer import Trainer

LENGTH = 32


def saved_model(folder: Path, **form: Any) -> Path:
    """A tiny float32 model on disk, with the demo's tokenizer."""
    fresh("llama", vocab_size=4096, **form).float().save_pretrained(folder)
    tokenizer = load_tokenizer(embedded("demo"))
    assert tokenizer is not None
    tokenizer.save_pretrained(folder)
    return folder


@lru_cache
def written(count: int = 24, seed: int = 0) -> Rows:
    """What the tiny target writes at temperature 0.3; only that is in the loss."""
    asked, sampling = prompts(count, seed, longest=8), Sampling(temperature=0.3, seed=seed)
    done = Engine(target()).generate(asked, max_new_tokens=LENGTH - 8, sampling=sampling,
                                     batch_size=24)
    pairs = zip(asked, (completion.tokens for completion in done), strict=True)
    return Rows([Example([*p, *new], [False] * len(p) + [True] * len(new)) for p, new in pairs],
                LENGTH)


@lru_cache
def deterministic_rows(count: int = 40, seed: int = 0) -> Rows:
    """Texts in which each token follows from the one before: whoever sees one can predict all."""
    rng = torch.Generator().manual_seed(0)
    follows = torch.randperm(VOCAB, generator=rng).tolist()
    texts = []
    for start in torch.randint(VOCAB, (count,), generator=rng.manual_seed(seed)).tolist():
        texts.append([start])
        while len(texts[-1]) < LENGTH:
            texts[-1].append(follows[texts[-1][-1]])
    return Rows([Example(text, [True] * LENGTH) for text in texts], LENGTH)


def head_of(kind: str) -> DraftHead:
    """A fresh head, in float64 so that sums in another order agree."""
    if kind == "medusa":
        return MedusaHead.fresh(target(), 3).to(torch.float64)
    shared = kind == "shared redrafter"
    return ReDrafterHead.fresh(target(), steps=3, share_lm_head=shared).to(torch.float64)


def trainable(head: DraftHead, objective: str = "ce") -> FrozenTarget:
    return FrozenTarget(head, target(), objective)


class Recorder:
    """A callback that remembers what it receives. stop_at: die at this step."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.losses: list[float] = []
        self.evaluations: list[Evaluation] = []
        self.notes: list[str] = []
        self.bars: dict[str, list[tuple[int, int]]] = {"reading": [], "writing": [], "training": []}
        self.stop_at = stop_at

    @property
    def begun(self) -> tuple[int, int]:
        """At which step it begins, and how many there are."""
        return self.bars["training"][0]

    def note(self, text: str) -> None:
        self.notes.append(text)

    def progress(self, what: str, done: int, of: int, details: str = "") -> None:
        self.bars[what].append((done, of))
        if details:
            self.losses.append(float(details.split()[1]))
            self.stepped(done)

    def logged(self, log: Sequence[Mapping[str, Any]], folder: Path) -> None:
        """The log is on disk after each evaluation, not only with the next checkpoint."""
        lines = (folder / "log.jsonl").read_text("utf-8").splitlines()
        assert json.loads(lines[-1]) == log[-1] and len(lines) == len(log)

    def stepped(self, step: int) -> None:
        if step == self.stop_at:
            raise SystemExit

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        self.evaluations.append(evaluation)


def trainer_of(
    folder: Path, subject: Any, recorder: Recorder | None = None, settings: Any = None,
    texts: Any = written, **config: Any
) -> Trainer:
    """A short run on texts of a kind, evaluated with others of that kind."""
    held_out = Batches(texts(8, seed=99), 4, 0).sample(10**6)
    inputs = TrainConfig(**{"steps": 20, "learning_rate": 3e-3, **config})
    recorder = recorder or Recorder()
    return Trainer(subject, Batches(texts(), 4, inputs.seed), held_out, inputs, folder,
                   settings or {}, recorder)
