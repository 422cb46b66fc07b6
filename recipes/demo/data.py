"""Reads, normalises and splits TinyStories files, and packs the stories into windows."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedTokenizerBase

Tokens = npt.NDArray[np.uint16]
T = TypeVar("T")

EOS = 0
HELD_OUT = 200
SPLIT_SEED = 20231
AGAIN = "\n\nTell it again.\n\n"
TWICE = 0.1

_STRAIGHT = str.maketrans({
    "\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2026": "...", "\u2013": "-",
    "\u2014": "-", "\u00a0": " ", "\u200b": None,
})


def normalise(text: str) -> str:
    """Make quotes straight; remove spaces at line ends, blank lines and space around the story."""
    text = text.translate(_STRAIGHT)
    text = re.sub(r"[ \t]{2,}", " ", text)
    return re.sub(r"[ \t]*\n\s*", "\n", text).strip()


@dataclass(frozen=True)
class Stories:
    """The normalised stories, to train on and held out, and the SHA-256 hashes of the files."""

    train: list[str]
    held_out: list[str]
    files: dict[str, str]


def load(paths: Sequence[Path]) -> Stories:
    """Read the files; held-out stories come from the one whose name contains ``gpt4_clean``."""
    seen: set[str] = set()
    train: list[str] = []
    held_out: list[str] = []
    files: dict[str, str] = {}
    for path in sorted(paths, key=lambda path: path.name):
        raw = path.read_bytes()
        files[path.name] = hashlib.sha256(raw).hexdigest()
        stories: list[str] = []
        for line in raw.decode("utf-8").splitlines():
            story = normalise(json.loads(line)["text"]) if line.strip() else ""
            if story and story not in seen:
                seen.add(story)
                stories.append(story)
        if "gpt4_clean" in path.name:
            chosen = set(
                np.random.default_rng(SPLIT_SEED).permutation(len(stories))[:HELD_OUT].tolist()
            )
            held_out += [story for index, story in enumerate(stories) if index in chosen]
            stories = [story for index, story in enumerate(stories) if index not in chosen]
        train += stories
    if not held_out:
        raise SystemExit("no file is named *gpt4_clean*, so no stories can be held out")
    return Stories(train, held_out, files)


def encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[Tokens]:
    """Each text as token ids, without any special token."""
    return [np.array(ids, dtype=np.uint16) for ids in tokenizer(list(texts))["input_ids"]]


def join(documents: Sequence[Tokens]) -> Tokens:
    """All documents in a stream; the end-of-text token precedes each, and ends the stream."""
    mark = np.array([EOS], dtype=np.uint16)
    return np.concatenate([piece for document in documents for piece in (mark, document)] + [mark])


def windows(stream: Tokens, length: int) -> torch.Tensor:
    """The stream cut into rows of ``length`` tokens; the remainder is dropped."""
    rows = len(stream) // length
    return torch.from_numpy(stream[: rows * length].astype(np.int64).reshape(rows, length))


class Stream(Generic[T]):
    """Endless batches, shuffled again in each epoch; the state is the epoch and the batch in it."""

    def __init__(self) -> None:
        self.epoch, self.at = 0, 0
        self._batches = self.shuffled()

    def shuffled(self) -> Sequence[T]:
        """The batches of this epoch."""
        raise NotImplementedError

    @property
    def passes(self) -> float:
        """The number of passes over the data."""
        return self.epoch + self.at / len(self._batches)

    def next(self) -> T:
        """The next batch."""
        if self.at == len(self._batches):
            self.restore({"epoch": self.epoch + 1, "at": 0})
        self.at += 1
        return self._batches[self.at - 1]

    def state(self) -> dict[str, int]:
        """What ``restore`` needs to go on from here."""
        return {"epoch": self.epoch, "at": self.at}

    def restore(self, state: dict[str, int]) -> None:
        """Go on from a saved state."""
        self.epoch, self.at = state["epoch"], state["at"]
        self._batches = self.shuffled()


class StoryStream(Stream[torch.Tensor]):
    """Batches of packed stories."""

    def __init__(
        self, documents: Sequence[Tokens], again: Tokens, length: int, batch: int, seed: int
    ) -> None:
        self._documents, self._again = documents, again
        self._length, self._batch, self._seed = length, batch, seed
        super().__init__()

    def shuffled(self) -> Sequence[torch.Tensor]:
        generator = np.random.default_rng([self._seed, self.epoch])
        chosen: list[Tokens] = []
        for index in generator.permutation(len(self._documents)):
            story = self._documents[int(index)]
            twice = generator.random() < TWICE
            chosen.append(np.concatenate([story, self._again, story]) if twice else story)
        rows = windows(join(chosen), self._length)
        rows = rows[torch.from_numpy(generator.permutation(len(rows)))]
        return torch.split(rows[: len(rows) // self._batch * self._batch], self._batch)
