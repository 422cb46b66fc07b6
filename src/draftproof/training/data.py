"""From files to the rows a head is trained on and examined with; written by the target itself where that is wanted.

Knows where texts come from, the target and its codec; nothing of heads.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from draftproof.engine.load import load
from draftproof.errors import BadInput
from draftproof.model import loading
from draftproof.model.loading import PreTrainedModel
from draftproof.model.target import Target
from draftproof.model.tokenizer import Codec
from draftproof.training import texts
from draftproof.training.rows import Rows, marked
from draftproof.training.self_generate import SelfGeneratedText, Told, Wanted
from draftproof.training.texts import Split


@dataclass(frozen=True)
class SelfGenerateConfig:
    """Let the target write the training text: `tokens` new ones, at these temperatures in turn.

    assistant_model: drafts while it writes. rows_at_a_time: side by side; many are faster and need more memory.
    file: where the text is kept, for several heads to learn from; None is the head's own folder.
    """

    tokens: int = 1_000_000
    temperatures: tuple[float, ...] = (0.0, 0.7)
    assistant_model: str | None = None
    rows_at_a_time: int = 32
    file: Path | None = None

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.rows_at_a_time < 1:
            raise BadInput(f"{self.tokens} tokens, {self.rows_at_a_time} rows at a time: ask for at least 1")
        if not self.temperatures or min(self.temperatures) < 0:
            raise BadInput(f"the temperatures were {list(self.temperatures)}; give some that are 0 or above")


@dataclass(frozen=True)
class DataConfig:
    """Files to learn from and, or a share of them, to examine with. chat: prompts and texts are the user's messages."""

    data: tuple[Path, ...]
    held_out: Path | None = None
    chat: bool = False

    def __post_init__(self) -> None:
        if not self.data:
            raise BadInput("no data was given; name .txt or .jsonl files by --data")
        for file in (*self.data, *([self.held_out] if self.held_out else [])):
            if not file.is_file():
                raise BadInput(f"there is no file {file}; --data takes .txt and .jsonl files")

    def hashes(self) -> dict[str, str]:
        """sha256 by file name."""
        return {file.name: texts.digest(file) for file in (*self.data, *([self.held_out] if self.held_out else []))}

    def split(self, seed: int) -> Split:
        """Documents to train on, and others."""
        documents = texts.read(self.data, self.chat)
        if self.held_out is None:
            return texts.split(documents, seed)
        others = texts.read([self.held_out], self.chat)
        known = set(others)
        return Split([document for document in documents if document not in known], others)


class Material(NamedTuple):
    """Rows to train on and to examine with, and from how many documents they come."""

    train: Rows
    held_out: Rows
    documents: int


def gather(
    sources: DataConfig, model: PreTrainedModel, target: Target, codec: Codec, length: int, seed: int,
    writing: SelfGenerateConfig | None, file: Path, told: Told, name: str,
) -> Material:  # fmt: skip
    """Read all there is; `file` holds what the target writes.

    name: what the model was loaded by. On a CPU it writes by a copy, packed, that is given up when all is written.
    """
    if length > target.context:
        raise BadInput(f"length was {length} and {target.name} reads at most {target.context} tokens; make rows shorter")
    parts = sources.split(seed)
    if writing is None:
        end = next(iter(loading.stop_tokens(model)), None)
        rows = [Rows((one for document in part for one in marked(document, codec, end)), length) for part in parts]
    else:
        rows = _written(sources, parts, model, codec, length, seed, writing, file, told, name)
    for name, found in zip(("to train on", "to examine with"), rows, strict=True):
        if not len(found):
            hint = "" if writing else "; prompts without answers need --self-generate"
            raise BadInput(f"the data has nothing {name}: no text of at least 3 tokens that counts{hint}")
    train, held_out = rows
    return Material(train, held_out, len(parts.train) + len(parts.held_out))


def _written(
    sources: DataConfig, parts: Split, model: PreTrainedModel, codec: Codec, length: int, seed: int,
    writing: SelfGenerateConfig, file: Path, told: Told, name: str,
) -> list[Rows]:  # fmt: skip
    """What the target makes of the documents' beginnings."""
    identity = {"model": fingerprint(model), "data": sources.hashes(), "chat": sources.chat}
    own = SelfGeneratedText(file, identity, Wanted(writing.tokens, length, writing.temperatures, writing.rows_at_a_time, seed))
    if not (own.is_complete(True) and own.is_complete(False)):
        writer, drafter = name if model.device.type == "cpu" else model, None if writing.assistant_model else "none"
        engine = load(writer, dtype=model.dtype, device=str(model.device), assistant_model=writing.assistant_model,
                      drafter=drafter, tokenizer=codec.tokenizer)  # fmt: skip
        own.write(engine, parts.held_out, True, told)
        own.write(engine, parts.train, False, told)
    return [Rows(own.marked(held_out), length) for held_out in (False, True)]


def fingerprint(model: PreTrainedModel) -> str:
    """A name for these weights, wherever they lie: a few numbers of each."""
    found = hashlib.sha256()
    for name, parameter in model.named_parameters():
        few = parameter.detach().flatten()
        few = few[:: max(1, few.numel() // 16)][:17]
        found.update(f"{name}{tuple(parameter.shape)}{few.double().tolist()}".encode())
    return found.hexdigest()[:16]
