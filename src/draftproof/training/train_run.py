"""A course of training, from files to a finished folder: gather, train, examine, describe.

The folder holds the head in its native format with its card, plots and log; while it is made also the checkpoint, and
what the target wrote. The same course in the same folder goes on where it stopped.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from draftproof.drafters.base import DraftHead
from draftproof.drafters.checkpoints import write_head
from draftproof.drafters.losses import OBJECTIVES
from draftproof.errors import BadInput
from draftproof.model import loading
from draftproof.model.loading import PreTrainedModel
from draftproof.model.target import Target
from draftproof.model.tokenizer import Codec
from draftproof.training.data import DataConfig, Material, SelfGenerateConfig, fingerprint, gather
from draftproof.training.features import Cached, Reader, Streamed
from draftproof.training.heads import HeadsAlone
from draftproof.training.joint import Joint, Together, need_peft
from draftproof.training.lock import alone_in
from draftproof.training.model_card import machine, public_name, versions, write_card
from draftproof.training.plot import write_plots
from draftproof.training.rows import Batches
from draftproof.training.self_generate import Progress
from draftproof.training.trainer import Exam, Plan, Subject, Trainer, Watch, same_settings

LENGTH = 512
"""Tokens per row when nobody says."""
EXAMINED = 8000
"""Held-out tokens, about, that each examination reads."""
MakeHead = Callable[[Target], DraftHead]
"""A fresh head for a target."""


@dataclass(frozen=True)
class TrainRun:
    """What to train on, and how.

    form: numbers that describe the head, for its card. length: tokens per row; None takes 512, or what the
    target reads at most. batch: rows of full length per batch. cache_gb: disk for hidden states between epochs.
    joint: the backbone learns, too (Medusa-2).
    """

    model: str
    sources: DataConfig
    out: Path
    form: Mapping[str, Any] = field(default_factory=dict)
    plan: Plan = field(default_factory=Plan)
    objective: str = "ce"
    length: int | None = None
    batch: int = 4
    writing: SelfGenerateConfig | None = None
    cache_gb: float = 0.0
    joint: Together | None = None
    dtype: str | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        """Refuse before anything is loaded what can be refused before."""
        if self.objective not in OBJECTIVES:
            raise BadInput(f"objective was {self.objective!r}; choose one of {', '.join(OBJECTIVES)}")
        if not 0 <= self.cache_gb <= 2:
            raise BadInput(f"cache_gb was {self.cache_gb}; choose 0, no cache, to 2")
        for name, least in (("length", 16), ("batch", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise BadInput(f"{name} was {value}; it must be at least {least}")
        if self.joint is not None:
            need_peft()


class Guide(Watch, Protocol):
    """Whoever follows a course."""

    def note(self, text: str) -> None:
        """Something worth a line."""

    def wrote(self, progress: Progress) -> None:
        """The target completed a text."""


class Ground(NamedTuple):
    """What a course stands on once everything is read."""

    model: PreTrainedModel
    target: Target
    codec: Codec
    material: Material
    head: DraftHead
    plan: Plan
    settings: dict[str, Any]


class Nobody:
    """Follows a course without a word. Implements `Guide`."""

    def note(self, text: str) -> None: ...
    def wrote(self, progress: Progress) -> None: ...
    def planned(self, step: int, steps: int) -> None: ...
    def stepped(self, step: int, loss: float, speed: float) -> None: ...
    def examined(self, step: int, exam: Exam) -> None: ...


def train(course: TrainRun, make_head: MakeHead, guide: Guide | None = None) -> None:
    """Follow a course: do all of it that is not done yet.

        train(TrainRun("demo", DataConfig((Path("texts.jsonl"),)), Path("heads")), MedusaHead.fresh)

    Raises KeyboardInterrupt, with everything kept, if told to stop; BadInput if the folder holds something else.
    """
    guide = guide or Nobody()
    with alone_in(course.out):
        ground = _ground(course, make_head, guide)
        if ground is None:
            guide.note(f"{course.out} is complete")
            return
        material = ground.material
        rows, counted, others = len(material.train), material.train.counted, len(material.held_out)
        guide.note(f"{rows:,} rows, {counted:,} tokens that count; {others:,} rows held out")
        (_jointly if course.joint else _heads_only)(course, ground, guide)


def _ground(course: TrainRun, make_head: MakeHead, guide: Guide) -> Ground | None:
    """All that training needs; None if it is done. What may be refused is refused before texts are written."""
    model = loading.load_model(course.model, course.dtype, course.device).requires_grad_(False)
    target, codec = Target(model), _codec(course.model)
    target.name = public_name(course.model)                          # folders of this machine are nobody's business
    head, plan = make_head(target), course.plan.for_width(target.hidden_size)
    length = course.length or min(LENGTH, target.context)
    settings = {"method": head.kind, **course.form, **_settings(course, plan, length, fingerprint(model))}
    if _is_done(course.out, settings):
        return None
    file = (course.writing.file if course.writing else None) or course.out / "own_text.jsonl"
    material = gather(course.sources, model, target, codec, length, plan.seed, course.writing, file, guide.wrote, course.model)
    return Ground(model, target, codec, material, head, plan, {**settings, "rows": material.train.digest})


def _heads_only(course: TrainRun, ground: Ground, guide: Guide) -> None:
    subject = HeadsAlone(ground.head, ground.target, *_readers(course, ground), course.objective)
    trainer = _trainer(course, ground, subject, course.out, guide)
    trainer.fit()
    pairs = ground.head.count(*ground.material.train.pairs())
    write_head(ground.head, course.out)
    _finish(course, ground, [trainer], pairs, guide)


def _jointly(course: TrainRun, ground: Ground, guide: Guide) -> None:
    """Heads alone first, unless in one stage; then the backbone as well; then both, merged, into folders of their own."""
    assert course.joint is not None
    head, stages = ground.head, list[Trainer]()
    if not course.joint.one_stage:
        guide.note("first stage: heads alone")
        subject = HeadsAlone(head, ground.target, *_readers(course, ground), course.objective)
        stages.append(_trainer(course, ground, subject, course.out / "first", guide))
        stages[0].fit()
        guide.note("second stage: heads and backbone")
    both = Joint(head, ground.target, course.joint, course.objective)
    stages.append(_trainer(course, ground, both, course.out / "second", guide))
    stages[-1].fit()
    merged = both.merged()
    new = Target(merged)
    new.name = "model"
    streamed = Streamed(new, head.hidden_layers, logits=course.objective != "ce")
    exam = HeadsAlone(head, new, streamed, streamed, course.objective).examine(stages[-1].held_out)
    stages[-1].exam = exam._replace(figures=stages[-1].exam.figures if stages[-1].exam else {})
    _write_model(merged, ground.codec, course.out / "model")
    pairs = head.count(*ground.material.train.pairs())
    write_head(head, course.out / "heads")
    _finish(course, ground, stages, pairs, guide)


def _trainer(course: TrainRun, ground: Ground, subject: Subject, folder: Path, guide: Guide) -> Trainer:
    folder.mkdir(exist_ok=True)
    material = ground.material
    batches = Batches(material.train, course.batch, ground.plan.seed)
    held_out = Batches(material.held_out, course.batch, 0).sample(EXAMINED)
    return Trainer(subject, batches, held_out, ground.plan, folder, ground.settings, guide)


def _readers(course: TrainRun, ground: Ground) -> tuple[Reader, Reader]:
    """How features come, for training and for examining."""
    hidden_layers = ground.head.hidden_layers
    streamed = Streamed(ground.target, hidden_layers, logits=course.objective != "ce")
    if not course.cache_gb:
        return streamed, streamed
    identity = f"{ground.settings['weights']} {ground.settings['rows']} {hidden_layers}"
    return Cached(streamed, ground.material.train, course.out / "cache", course.cache_gb, identity), streamed


def _finish(course: TrainRun, ground: Ground, stages: list[Trainer], pairs: int, guide: Guide) -> None:
    """Plots, card and record; what only served to go on is then of no more use."""
    last, name = stages[-1], public_name(course.model)
    record = {
        "settings": last.settings,
        "base_model": name,
        "steps": sum(stage.steps for stage in stages),
        "tokens": sum(stage.tokens for stage in stages),
        "training_seconds": round(sum(stage.seconds for stage in stages), 1),
        "documents": ground.material.documents,
        "rows": len(ground.material.train),
        "counted": ground.material.train.counted,
        "pairs": pairs,
        "held_out_rows": len(ground.material.held_out),
        "held_out": last.exam._asdict() if last.exam else {},
        "machine": machine(),
        "versions": versions(),
    }
    plots = write_plots(last.log, course.out, f"{ground.head.kind} for {name}")
    if not plots:
        guide.note("no plots: install draftproof[train] for matplotlib")
    write_card(course.out / "README.md", record, plots)
    part = course.out / "training.part"
    part.write_text(json.dumps(record, indent=2) + "\n")
    part.replace(course.out / "training.json")
    for stage in stages:
        stage.checkpoint.unlink(missing_ok=True)
    shutil.rmtree(course.out / "cache", ignore_errors=True)


def _is_done(folder: Path, settings: Mapping[str, Any]) -> bool:
    """Whether this very course was finished here. Raises BadInput if another one was."""
    record = folder / "training.json"
    if not record.exists():
        return False
    before = json.loads(record.read_text())["settings"]
    same_settings(folder, {name: value for name, value in before.items() if name != "rows"}, settings)
    return True


def _settings(course: TrainRun, plan: Plan, length: int, weights: str) -> dict[str, Any]:
    """All that decides the result but the rows, by the names of the options."""
    writing = course.writing
    return {
        **{name: value for name, value in asdict(plan).items() if name != "save_minutes"},
        "data": course.sources.hashes(),
        "weights": weights,
        "objective": course.objective,
        "length": length,
        "batch": course.batch,
        "cache": course.cache_gb > 0,
        "self_generate": {"tokens": writing.tokens, "temperatures": writing.temperatures} if writing else None,
        "joint": asdict(course.joint) if course.joint else None,
    }


def _write_model(model: PreTrainedModel, codec: Codec, folder: Path) -> None:
    """The whole model or none."""
    part = folder.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    with redirect_stderr(StringIO()):                                 # a bar for what takes a moment
        model.save_pretrained(part)
    codec.tokenizer.save_pretrained(part)
    part.rename(folder)


def _codec(model: str) -> Codec:
    tokenizer = loading.load_tokenizer(model)
    if tokenizer is None:
        raise BadInput(f"there is no tokenizer beside {model}; training reads texts, give a model with one")
    return Codec(tokenizer)
