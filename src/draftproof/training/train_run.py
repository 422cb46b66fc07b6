"""A whole training run, from files to a finished folder: read, train, evaluate, describe.

The folder holds the head in its native format with its card and log, and during training also the
checkpoint and the target's texts. The same run in the same folder continues where it stopped.
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
from typing import TYPE_CHECKING, TypeVar

import torch
from huggingface_hub import ModelCard, ModelCardData

from draftproof.drafters.checkpoints import write_head
from draftproof.drafters.heads import DraftHead
from draftproof.engine.load import load
from draftproof.errors import BadInput
from draftproof.model import loading, variants
from draftproof.model.device import Device, versions
from draftproof.model.target import Target
from draftproof.tokenizer.codec import Codec
from draftproof.training.config import SelfGenerateConfig, TrainRun
from draftproof.training.files import atomic_write, file_lock, same_settings
from draftproof.training.heads import FrozenTarget
from draftproof.training.joint import HeadsAndBackbone
from draftproof.training.rows import Batches, Example, Rows, prompt_of, tokenized
from draftproof.training.self_generate import (
    SelfGeneratedText,
    Writer,
    by_engine,
    by_transformers,
)  # fmt: skip
from draftproof.training.texts import Document
from draftproof.training.trainer import Callback, Silent, Trainer
from draftproof.weights.quantize import is_quantized
from draftproof.weights.quantized_linear import slow_because

if TYPE_CHECKING:
    from draftproof.engine.config import LoadOptions
    from draftproof.model.loading import PreTrainedModel

CARD = Path(__file__).with_name("model_card.md")
T = TypeVar("T")
MakeHead = Callable[[Target], DraftHead]
"""Makes a fresh head for a target."""


def train(run: TrainRun, make_head: MakeHead, callback: Callback | None = None) -> None:
    """Start a run, or continue it.

        train(TrainRun("demo", DataConfig((Path("texts.jsonl"),)), Path("heads")), MedusaHead.fresh)

    Raises KeyboardInterrupt, after saving everything, if it is stopped; BadInput if the folder
    holds another run.

    Args:
        run: The model, the data, and the head's folder.
        make_head: Makes a head for the target's vocabulary.
        callback: Receives the progress.
    """
    callback = callback or Silent()
    run.out.mkdir(parents=True, exist_ok=True)
    with file_lock(run.out):
        started = _Run(run, make_head, callback)
        if started.is_complete():
            callback.note(f"{run.out} is complete")
        else:
            started.read()
            started.finish(started.fit())


class _Run:
    """A run in progress: its target and head, then its rows.

    packed: the target's format for writing and reading texts on a CPU, if it has fewer bits.
    """

    def __init__(self, run: TrainRun, make_head: MakeHead, callback: Callback) -> None:
        self.run, self.callback = run, callback
        self.model = loading.load_model(run.model, run.dtype, run.device).requires_grad_(False)
        self.target, tokenizer = Target(self.model), loading.load_tokenizer(run.model)
        folder = Path(run.model)                                # no path of this machine is named
        self.target.name = folder.resolve().name if folder.is_dir() else run.model
        if tokenizer is None:
            raise BadInput(f"there is no tokenizer in {run.model}; training reads texts")
        self.codec, self.head = Codec(tokenizer), make_head(self.target)
        target = self.target
        self.config = run.config.for_target(target.hidden_size, target.context, target.vocab_size)
        self.length = self.config.length or 0
        if self.length > target.context:
            most = f"{target.name} reads at most {target.context} tokens"
            raise BadInput(f"length was {self.length} and {most}; give less")
        quick = slow_because("int8", self.model.dtype) is None and not is_quantized(self.model)
        self.packed = "int8" if quick and self.model.device.type == "cpu" else None
        made = {"method": self.head.kind, "weights": fingerprint(self.model)}
        self.settings = {**made, **run.settings(self.config)}

    def is_complete(self) -> bool:
        """Whether this run is complete; raises BadInput if the folder has another complete run."""
        record = self.run.out / "training.json"
        if record.exists():
            settings = json.loads(record.read_text(encoding="utf-8"))["settings"]
            same_settings(self.run.out, settings, self.settings)
        return record.exists()

    def read(self) -> None:
        """Read the rows for training and evaluation."""
        parts, own_texts = self.run.data.split(self.config.seed, self.callback.note), None
        if self.run.self_generate:
            own_texts = self._self_generated(self.run.self_generate, parts)
        end = next(iter(loading.stop_tokens(self.model)), None)
        made = partial(tokenized, codec=self.codec, end=end)
        examples = own_texts or [chain.from_iterable(rows for _, rows in self._each(part, made))
                           for part in parts]  # fmt: skip
        self.train, self.held_out = (Rows(part, self.length) for part in examples)
        hint = "" if own_texts else "; prompts without answers need --self-generate"
        for purpose, rows in (("train on", self.train), ("evaluate with", self.held_out)):
            if not len(rows):
                why = f"the data has nothing to {purpose}: no text of 3 tokens or more"
                raise BadInput(why + hint)
        few = self.config.draft_vocab
        if few is not None and few < self.target.vocab_size:
            common = self.train.most_common(few)
            self.head.limit_vocabulary(common, self.target)
            share = float(torch.isin(self.held_out.loss_token_ids, common).float().mean())
            known = f"{len(common):,} tokens are drafted"
            self.callback.note(f"{known}: {share:.1%} of the held-out text")
        self.documents = sum(map(len, parts))
        self.callback.note(
            f"{len(self.train):,} rows, {len(self.train.loss_token_ids):,} tokens to learn; "
            f"{len(self.held_out):,} rows held out"
        )

    def _each(
        self, part: Sequence[Document], make: Callable[[Document], T]
    ) -> Iterator[tuple[Document, T]]:
        """Documents with their results; those that the chat template refuses, or without a result,
        are skipped."""
        refused: list[str] = []
        for document in part:
            try:
                if made := make(document):
                    yield document, made
                else:
                    refused.append("there is no answer in it")
            except BadInput as error:
                if not self.codec.tokenizer.chat_template:
                    raise
                refused.append(str(error))
        if refused:
            note = f"skipped {len(refused):,} texts that cannot be used: {refused[0]}"
            self.callback.note(note)

    def _self_generated(
        self, config: SelfGenerateConfig, parts: Sequence[list[Document]]
    ) -> list[Iterator[Example]]:
        """The target's continuations of documents' beginnings; on a CPU from a packed copy."""
        data, model = self.run.data, self.model
        identity = {"model": fingerprint(model), "data": data.hashes(), "chat": data.chat}
        file, seed = config.file or self.run.out / "own_text.jsonl", self.config.seed
        texts = SelfGeneratedText(file, identity, config, self.length, seed)
        if not (texts.is_complete(True) and texts.is_complete(False)):
            writer: Writer
            if model.device.type == "cpu":
                how: LoadOptions = {
                    "drafter": "none", "quantize": self.packed, "dtype": model.dtype,
                    "tokenizer": self.codec.tokenizer,
                }  # fmt: skip
                engine = load(self.run.model, **how)
                writer = partial(by_engine, engine)
            else:
                writer = partial(by_transformers, model, loading.stop_tokens(model))
            for held_out in (True, False):
                prompts = self._each(parts[held_out], partial(prompt_of, codec=self.codec))
                askable = [document for document, _ in prompts]
                texts.write(writer, self.codec, self.target.context, askable, held_out,
                            partial(self.callback.progress, "writing"))  # fmt: skip
        return [texts.examples(held_out) for held_out in (False, True)]

    def fit(self) -> list[Trainer]:
        """Train the head for the frozen target; then for Medusa-2 the backbone, too."""
        out, objective = self.run.out, self.config.objective
        if not self.run.joint:
            reader = variants.quantized(self.target, self.packed) if self.packed else None
            frozen = FrozenTarget(self.head, self.target, objective, reader)
            return [self._stage(frozen, out)]
        self.packed = None
        self.callback.note("first stage: heads alone")
        first = self._stage(FrozenTarget(self.head, self.target, objective), out / "first")
        self.callback.note("second stage: heads and backbone")
        both = HeadsAndBackbone(self.head, self.target, objective)
        second = self._stage(both, out / "second")
        shutil.rmtree(out / "model", ignore_errors=True)
        with atomic_write(out / "model") as part, redirect_stderr(StringIO()):  # hides a short bar
            shutil.rmtree(part, ignore_errors=True)
            both.merged().save_pretrained(part)
            self.codec.tokenizer.save_pretrained(part)
        return [first, second]

    def _stage(self, trainable: FrozenTarget, folder: Path) -> Trainer:
        batches = Batches(self.train, self.config.batch, self.config.seed)
        held_out = Batches(self.held_out, self.config.batch, 0).sample(8000)    # tokens, roughly
        trainer = Trainer(trainable, batches, held_out, self.config, folder, self.settings,
                          self.callback)  # fmt: skip
        trainer.fit()
        return trainer

    def finish(self, stages: Sequence[Trainer]) -> None:
        """Write head, card and record; then remove the files that served only to continue."""
        last, out = stages[-1], self.run.out
        bigrams = self.head.count(*self.train.bigrams())
        if self.target.dtype == torch.bfloat16:                 # as in decoding, and half the size
            self.head.to(torch.bfloat16)
        write_head(self.head, out / "heads" if self.run.joint else out)
        record = {
            "settings": last.settings, "base_model": self.target.name, "documents": self.documents,
            "steps": sum(stage.steps for stage in stages), "rows": len(self.train),
            "tokens": sum(stage.tokens for stage in stages),
            "counted": len(self.train.loss_token_ids),
            "pairs": bigrams, "training_seconds": round(sum(stage.seconds for stage in stages), 1),
            "held_out": last.evaluation, "held_out_rows": len(self.held_out),
            "machine": Device(self.target.device).name,
            "read_in": self.packed or str(self.target.dtype).removeprefix("torch."),
            "versions": versions(),
        }
        tags = ["speculative-decoding", self.head.kind]
        data = ModelCardData(license="other", base_model=self.target.name, tags=tags,
                             library_name="draftproof")  # fmt: skip
        card = ModelCard.from_template(data, template_path=str(CARD), **record)
        with atomic_write(out / "README.md") as part:
            part.write_text(str(card), encoding="utf-8")
        with atomic_write(out / "training.json") as part:
            part.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        for stage in stages:
            stage.checkpoint.unlink(missing_ok=True)


def fingerprint(model: PreTrainedModel) -> str:
    """A fingerprint of weights, independent of their location: a few numbers of each."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        few = parameter.detach().flatten()
        few = few[:: max(1, few.numel() // 16)][:17]
        digest.update(f"{name}{tuple(parameter.shape)}{few.double().tolist()}".encode())
    return digest.hexdigest()[:16]
