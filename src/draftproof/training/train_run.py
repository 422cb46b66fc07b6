"""A whole training run, from files to a finished folder: read, train, evaluate, describe.

The folder holds the head in its native format with its card and log; while it is made also the
checkpoint, and what the target wrote. The same run in the same folder goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr
from functools import partial
from io import StringIO
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from draftproof.drafters.base import DraftHead
from draftproof.drafters.checkpoints import write_head
from draftproof.engine.load import load
from draftproof.errors import BadInput
from draftproof.model import loading
from draftproof.model.loading import PreTrainedModel
from draftproof.model.target import Target
from draftproof.model.tokenizer import Codec
from draftproof.training import model_card
from draftproof.training.config import JointConfig, SelfGenerateConfig, TrainConfig, TrainRun
from draftproof.training.files import locked, same_settings, whole
from draftproof.training.heads import FrozenTarget
from draftproof.training.joint import HeadsAndBackbone
from draftproof.training.rows import Batches, Example, Rows, prompt_of, tokenized
from draftproof.training.self_generate import SelfGeneratedText
from draftproof.training.texts import Document
from draftproof.training.trainer import Callback, Silent, Trainable, Trainer

EVALUATED = 8000
"""Held-out tokens, about, that each evaluation reads."""
T = TypeVar("T")
MakeHead = Callable[[Target], DraftHead]
"""A fresh head for a target."""


class Prepared(NamedTuple):
    """Everything read, nothing learnt."""

    target: Target
    codec: Codec
    head: DraftHead
    config: TrainConfig
    settings: dict[str, Any]
    train: Rows
    held_out: Rows
    documents: int


def train(run: TrainRun, make_head: MakeHead, callback: Callback | None = None) -> None:
    """Do all of a run that is not done yet.

        train(TrainRun("demo", DataConfig((Path("texts.jsonl"),)), Path("heads")), MedusaHead.fresh)

    Raises KeyboardInterrupt, with everything kept, if told to stop; BadInput if the folder holds
    another run.
    """
    callback = callback or Silent()
    run.out.mkdir(parents=True, exist_ok=True)
    with locked(run.out):
        ready = _prepared(run, make_head, callback)
        if ready is None:
            callback.note(f"{run.out} is complete")
            return
        rows, tokens, others = len(ready.train), ready.train.loss_tokens, len(ready.held_out)
        callback.note(f"{rows:,} rows, {tokens:,} tokens to learn; {others:,} rows held out")
        stages = (
            _joint_stages(run, ready, run.joint, callback) if run.joint
            else [_head_stage(ready, run.out, callback)]
        )  # fmt: skip
        bigrams = ready.head.count(*ready.train.bigrams())
        write_head(ready.head, run.out / "heads" if run.joint else run.out)
        _finish(run, ready, stages, bigrams)


def _prepared(run: TrainRun, make_head: MakeHead, callback: Callback) -> Prepared | None:
    """All that training needs; None if it is done. What can be refused is refused first."""
    model = loading.load_model(run.model, run.dtype, run.device).requires_grad_(False)
    target, tokenizer = Target(model), loading.load_tokenizer(run.model)
    target.name = model_card.public_name(run.model)      # no folder of this machine in any record
    if tokenizer is None:
        raise BadInput(f"there is no tokenizer beside {run.model}; training reads texts")
    codec, head = Codec(tokenizer), make_head(target)
    config = run.config.for_target(target.hidden_size, target.context)
    length = config.length or 0
    if length > target.context:
        most = f"{target.name} reads at most {target.context} tokens"
        raise BadInput(f"length was {length} and {most}; give less")
    settings = {"method": head.kind, "weights": fingerprint(model), **run.settings(config)}
    if (run.out / "training.json").exists():
        before = json.loads((run.out / "training.json").read_text())["settings"]
        same_settings(run.out, {**before, "rows": None}, {**settings, "rows": None})
        return None
    parts = run.data.split(config.seed, callback.note)
    if run.self_generate:
        examples = _self_generated(run, run.self_generate, parts, model, codec, config, callback)
    else:
        end = next(iter(loading.stop_tokens(model)), None)
        made = partial(tokenized, codec=codec, end=end)
        found = (_each(run, part, codec, made, callback) for part in parts)
        examples = [chain.from_iterable(part) for part in found]
    rows = [Rows(part, length) for part in examples]
    for purpose, part in zip(("train on", "evaluate with"), rows, strict=True):
        if not len(part):
            hint = "" if run.self_generate else "; prompts without answers need --self-generate"
            raise BadInput(f"the data has nothing to {purpose}: no text of 3 tokens or more{hint}")
    settings["rows"], documents = rows[0].digest, sum(len(part) for part in parts)
    return Prepared(target, codec, head, config, settings, rows[0], rows[1], documents)


def _each(
    run: TrainRun, part: Sequence[Document], codec: Codec, made: Callable[[Document], T],
    callback: Callback,
) -> Iterator[T]:  # fmt: skip
    """What is made of each document; those that the chat template refuses are skipped."""
    refused: list[str] = []
    for document in part:
        try:
            yield made(document)
        except BadInput as error:
            if run.data.strict or not codec.tokenizer.chat_template:
                raise
            refused.append(str(error))
    if refused:
        reasons = "; ".join(dict.fromkeys(refused[:3]))
        callback.note(f"skipped {len(refused):,} chats that cannot be used: {reasons}")


def _self_generated(
    run: TrainRun, own: SelfGenerateConfig, parts: Sequence[list[Document]], model: PreTrainedModel,
    codec: Codec, config: TrainConfig, callback: Callback,
) -> list[Iterator[Example]]:  # fmt: skip
    """What the target makes of the documents' beginnings; on a CPU by a packed copy of it."""
    identity = {"model": fingerprint(model), "data": run.data.hashes(), "chat": run.data.chat}
    file = own.file or run.out / "own_text.jsonl"
    texts = SelfGeneratedText(file, identity, own, config.length or 0, config.seed)
    if not (texts.is_complete(True) and texts.is_complete(False)):
        engine = load(
            run.model if model.device.type == "cpu" else model, dtype=model.dtype,
            device=str(model.device), tokenizer=codec.tokenizer,
            assistant_model=own.assistant_model, drafter=None if own.assistant_model else "none",
        )  # fmt: skip
        askable = partial(_askable, codec=codec)
        for held_out in (True, False):
            part = list(_each(run, parts[held_out], codec, askable, callback))
            texts.write(engine, part, held_out, callback.wrote)
    return [texts.examples(held_out) for held_out in (False, True)]


def _askable(document: Document, codec: Codec) -> Document:
    """The same one. Raises BadInput if no prompt can be made of it."""
    prompt_of(document, codec)
    return document


def _head_stage(ready: Prepared, folder: Path, callback: Callback) -> Trainer:
    """The head learns, the target is frozen."""
    frozen = FrozenTarget(ready.head, ready.target, ready.config.objective)
    return _fitted(ready, frozen, folder, callback)


def _joint_stages(
    run: TrainRun, ready: Prepared, joint: JointConfig, callback: Callback
) -> list[Trainer]:
    """Heads alone first, unless in one stage; then the backbone too; it is merged and written."""
    stages = list[Trainer]()
    if not joint.one_stage:
        callback.note("first stage: heads alone")
        stages.append(_head_stage(ready, run.out / "first", callback))
        callback.note("second stage: heads and backbone")
    both = HeadsAndBackbone(ready.head, ready.target, joint, ready.config.objective)
    stages.append(_fitted(ready, both, run.out / "second", callback))
    shutil.rmtree(run.out / "model", ignore_errors=True)
    with whole(run.out / "model") as part, redirect_stderr(StringIO()):  # a bar for a moment
        shutil.rmtree(part, ignore_errors=True)
        both.merged().save_pretrained(part)
        ready.codec.tokenizer.save_pretrained(part)
    return stages


def _fitted(ready: Prepared, trainable: Trainable, folder: Path, callback: Callback) -> Trainer:
    config = ready.config
    batches = Batches(ready.train, config.batch, config.seed)
    held_out = Batches(ready.held_out, config.batch, 0).sample(EVALUATED)
    trainer = Trainer(trainable, batches, held_out, config, folder, ready.settings, callback)
    trainer.fit()
    return trainer


def _finish(run: TrainRun, ready: Prepared, stages: list[Trainer], bigrams: int) -> None:
    """Card and record; what only served to go on is then removed."""
    last, name = stages[-1], model_card.public_name(run.model)
    record = {
        "settings": last.settings, "base_model": name, "documents": ready.documents,
        "steps": sum(stage.steps for stage in stages), "rows": len(ready.train),
        "tokens": sum(stage.tokens for stage in stages), "counted": ready.train.loss_tokens,
        "training_seconds": round(sum(stage.seconds for stage in stages), 1), "pairs": bigrams,
        "held_out": last.evaluation._asdict() if last.evaluation else {},
        "held_out_rows": len(ready.held_out), "machine": model_card.machine(),
        "versions": model_card.versions(),
    }  # fmt: skip
    with whole(run.out / "README.md") as part:
        model_card.write_card(part, record)
    with whole(run.out / "training.json") as part:
        part.write_text(json.dumps(record, indent=2) + "\n")
    for stage in stages:
        stage.checkpoint.unlink(missing_ok=True)


def fingerprint(model: PreTrainedModel) -> str:
    """A name for these weights, wherever they lie: a few numbers of each."""
    found = hashlib.sha256()
    for name, parameter in model.named_parameters():
        few = parameter.detach().flatten()
        few = few[:: max(1, few.numel() // 16)][:17]
        found.update(f"{name}{tuple(parameter.shape)}{few.double().tolist()}".encode())
    return found.hexdigest()[:16]
