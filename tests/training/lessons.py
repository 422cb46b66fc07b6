"""What training tests share: texts a tiny target wrote, heads to train on them, and someone who watches."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from tiny import VOCAB, fresh, prompts, target

from draftproof import embedded
from draftproof.core.params import Sampling
from draftproof.drafters.base import DraftHead
from draftproof.drafters.medusa import MedusaHead
from draftproof.drafters.redrafter import ReDrafterHead
from draftproof.engine.engine import Engine
from draftproof.model.loading import load_tokenizer
from draftproof.model.target import Target
from draftproof.training.chats import Marked
from draftproof.training.features import Streamed
from draftproof.training.heads import HeadsAlone
from draftproof.training.rows import Batches, Rows
from draftproof.training.trainer import Exam, Plan, Trainer

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
    """What the tiny target writes at temperature 0.3; only that counts."""
    asked = prompts(count, seed, longest=8)
    engine = Engine(target())
    done = engine.generate(asked, max_new_tokens=LENGTH - 8, sampling=Sampling(temperature=0.3, seed=seed), batch_size=24)
    texts = [Marked([*prompt, *one.tokens], [False] * len(prompt) + [True] * len(one.tokens))
             for prompt, one in zip(asked, done, strict=True)]  # fmt: skip
    return Rows(texts, LENGTH)


@lru_cache
def ruled(count: int = 40, seed: int = 0) -> Rows:
    """Texts in which each token follows from the one before: whoever sees one can foretell all."""
    dice = torch.Generator().manual_seed(0)
    follows = torch.randperm(VOCAB, generator=dice).tolist()
    texts = []
    for start in torch.randint(VOCAB, (count,), generator=dice.manual_seed(seed)).tolist():
        text = [start]
        while len(text) < LENGTH:
            text.append(follows[text[-1]])
        texts.append(Marked(text, [True] * LENGTH))
    return Rows(texts, LENGTH)


def head_of(kind: str, where: Target | None = None) -> DraftHead:
    """A fresh head, in float64 so that sums in another order agree."""
    where = where or target()
    head = MedusaHead.fresh(where, 3) if kind == "medusa" else ReDrafterHead.fresh(where, steps=3)
    return head.to(torch.float64)


def subject_of(head: DraftHead, objective: str = "ce", where: Target | None = None) -> HeadsAlone:
    read = Streamed(where or target(), head.hidden_layers, objective != "ce")
    return HeadsAlone(head, where or target(), read, read, objective)


class Silent:
    """Remembers what it is told."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.losses: list[float] = []
        self.exams: list[Exam] = []
        self.begun: tuple[int, int] = (0, 0)
        self.stop_at = stop_at

    def planned(self, step: int, steps: int) -> None:
        self.begun = (step, steps)

    def stepped(self, step: int, loss: float, speed: float) -> None:
        self.losses.append(loss)
        if step == self.stop_at:
            raise SystemExit                                    # as sudden as it gets in one process

    def examined(self, step: int, exam: Exam) -> None:
        self.exams.append(exam)


def trainer_of(
    folder: Path, subject: Any, watch: Silent | None = None, settings: Any = None, texts: Any = written, **plan: Any
) -> Trainer:
    """A short run on texts of a kind, examined with others of that kind."""
    folder.mkdir(exist_ok=True)
    held_out = Batches(texts(8, seed=99), 4, 0).sample(10**6)
    given = Plan(**{"steps": 20, "rate": 3e-3, **plan})
    return Trainer(subject, Batches(texts(), 4, given.seed), held_out, given, folder, settings or {}, watch or Silent())
