"""Training data: from files to documents. Knows the formats people keep texts in; nothing of tokens or models."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from draftproof.errors import BadInput

FIELDS = ("text", "messages", "conversations", "prompt", "turns")
"""Fields a row of jsonl is understood by."""
ANSWERS = ("completion", "response")
"""Fields that hold the answer to "prompt"."""
PIECE = 4000
"""Characters a plain text file is cut into, at paragraphs: pieces can be held out, a book cannot."""
HELD_OUT, FEWEST, MOST = 0.02, 8, 256
"""Share of the documents that is held out, and its bounds."""
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
          "bing": "assistant", "bard": "assistant", "system": "system", "tool": "tool"}  # fmt: skip


@dataclass(frozen=True)
class Document:
    """One text of the data.

    text: what counts. prompt: text before it that does not, or None. messages: a chat instead, as (role, content).
    Of a prompt or a chat without an answer only the target can make a training text.
    """

    text: str = ""
    prompt: str | None = None
    messages: tuple[tuple[str, str], ...] = ()

    @property
    def is_question(self) -> bool:
        """Whether the answer is missing."""
        if self.messages:
            return not any(role == "assistant" for role, _ in self.messages)
        return self.prompt is not None and not self.text

    def as_chat(self) -> Document:
        """A prompt, or a plain text, as the user's message and the answer to it."""
        if self.messages:
            return self
        question, answer = (self.text, "") if self.prompt is None else (self.prompt, self.text)
        return Document(messages=(("user", question), *((("assistant", answer),) if answer else ())))


class Split(NamedTuple):
    """Documents to train on, and documents to examine with, never trained on."""

    train: list[Document]
    held_out: list[Document]


def read(files: Sequence[Path], chat: bool = False) -> list[Document]:
    """All documents of .txt and .jsonl files, each once. Raises BadInput, in one sentence, for what it cannot read."""
    found: dict[Document, None] = {}
    for file in files:
        before = len(found)
        rows = _jsonl(file) if file.suffix in (".jsonl", ".json") else _pieces(_text(file))
        found.update(dict.fromkeys(document.as_chat() if chat else document for document in rows))
        if len(found) == before and before == 0:
            raise BadInput(f"{file} has no text; give a .txt file, or a .jsonl file with rows such as {{\"text\": \"...\"}}")
    return list(found)


def split(documents: Sequence[Document], seed: int) -> Split:
    """Hold some out: the share, at least a few, at most half; the same ones for the same data and seed."""
    if len(documents) < 2:
        raise BadInput(f"the data has {len(documents)} text; give at least two, one is held out, or name others by --held-out")
    size = min(max(FEWEST, round(HELD_OUT * len(documents))), MOST, len(documents) // 2)
    order = shuffled(len(documents), seed)
    chosen = set(order[:size])
    train = [document for index, document in enumerate(documents) if index not in chosen]
    return Split(train, [documents[index] for index in sorted(chosen)])


def shuffled(size: int, *key: int) -> list[int]:
    """The numbers below `size` in an order that depends on the key alone."""
    return [int(index) for index in np.random.default_rng(key).permutation(size)]


def digest(file: Path) -> str:
    """sha256 of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(f"{file} is not UTF-8 text ({error.reason} at byte {error.start})") from error


def _pieces(text: str) -> Iterator[Document]:
    """Paragraphs, gathered until they are long enough."""
    piece = ""
    for paragraph in text.split("\n\n"):
        piece += ("\n\n" if piece else "") + paragraph
        if len(piece) >= PIECE:
            yield Document(piece)
            piece = ""
    if piece.strip():
        yield Document(piece)


def _jsonl(file: Path) -> Iterator[Document]:
    for number, line in enumerate(_text(file).split("\n"), 1):
        if line.strip():
            try:
                document = _document(json.loads(line))
            except ValueError as error:                               # BadInput is one
                reason = str(error) if isinstance(error, BadInput) else f"it is not JSON ({error})"
                raise BadInput(f"line {number} of {file} cannot be used: {reason}") from error
            if document is not None:
                yield document


def _document(row: Any) -> Document | None:
    """What a row holds; None if it is empty."""
    name = next((name for name in FIELDS if isinstance(row, dict) and name in row), None)
    if name is None:
        raise BadInput(f"it must be an object with one of {', '.join(FIELDS)}")
    given = row[name]
    if name == "turns" and isinstance(given, list) and all(isinstance(turn, str) for turn in given) and given:
        return Document(prompt=given[0])
    if name in ("messages", "conversations"):
        return _chat(name, given)
    if not isinstance(given, str):
        raise BadInput(f'"{name}" must be text')
    if name == "text":
        return Document(given) if given.strip() else None
    answer = next((row[key] for key in ANSWERS if key in row), "")
    if not isinstance(answer, str):
        raise BadInput("the answer must be text")
    return Document(answer, given) if given else None


def _chat(name: str, given: Any) -> Document | None:
    """A chat of the OpenAI kind (role, content) or of the ShareGPT kind (from, value)."""
    if not isinstance(given, list) or not all(isinstance(part, Mapping) for part in given):
        raise BadInput(f'"{name}" must be a list of objects')
    messages = []
    for part in given:
        role, content = part.get("role", part.get("from")), part.get("content", part.get("value"))
        if role not in _ROLES or not isinstance(content, str):
            raise BadInput(f'a message needs a "role" of {", ".join(sorted(set(_ROLES.values())))} and text as "content"')
        messages.append((_ROLES[role], content))
    while messages and messages[0][0] == "assistant":                 # ShareGPT is full of chats cut at the front
        messages.pop(0)
    return Document(messages=tuple(messages)) if messages else None
