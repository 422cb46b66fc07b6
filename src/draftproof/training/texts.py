"""Reads documents from files in common formats. Knows neither tokens nor models."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from draftproof.errors import BadInput
from draftproof.requests.openai_format import messages_of

CHATS = ("messages", "conversations", "conversation")
QUESTIONS = ("prompt", "instruction", "question", "query", "input")
ANSWERS = ("completion", "response", "output", "answer")
"""Fields of a JSON row that are understood, in addition to "text" and "turns"."""
ROLES = {
    "user": "user", "human": "user", "system": "system", "developer": "system", "tool": "tool",
    "function": "tool", "observation": "tool", "assistant": "assistant", "model": "assistant",
    "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "function_call": "assistant",
}  # fmt: skip
NOT_TEXT = (".csv", ".tsv", ".xml", ".html", ".yaml", ".parquet", ".arrow", ".gz", ".zip", ".pdf")
PIECE = 4000
"""Characters a plain text file is cut into, at paragraphs, so that a part of it can be held out."""
Note = Callable[[str], None]


class Document(NamedTuple):
    """A text for training with its prompt, if any, or instead a chat in the format of templates."""

    text: str = ""
    prompt: str | None = None
    messages: Sequence[Mapping[str, object]] = ()

    def as_chat(self) -> Document:
        """A prompt or plain text as the user's message, with text after a prompt as the answer."""
        if self.messages:
            return self
        question, answer = (self.text, "") if self.prompt is None else (self.prompt, self.text)
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return Document(messages=messages if answer else messages[:1])


@dataclass(frozen=True)
class DataConfig:
    """Files for training, a part of which is held out. chat: prompts and texts are the user's
    messages."""

    data: tuple[Path, ...]
    chat: bool = False

    def __post_init__(self) -> None:
        if not self.data:
            raise BadInput("no data was given; name .txt or .jsonl files by --data")
        for file in self.data:
            if not file.is_file():
                raise BadInput(f"there is no file {file}; --data takes .txt and .jsonl files")

    def hashes(self) -> dict[str, str]:
        """sha256 by file name, and by number if several have the same."""
        names = [file.name for file in self.data]
        return {name if names.count(name) == 1 else f"{number}: {name}":
                hashlib.sha256(file.read_bytes()).hexdigest()
                for number, (name, file) in enumerate(zip(names, self.data, strict=True))}

    def split(self, seed: int, note: Note) -> tuple[list[Document], list[Document]]:
        """Split the documents into those for training and held-out ones.

        Args:
            seed: Determines the held-out texts.
            note: Called with sentences about skipped rows.
        """
        return split(read(self.data, self.chat, note), seed)


def split(documents: Sequence[Document], seed: int) -> tuple[list[Document], list[Document]]:
    """Hold out a fiftieth, between 8 and 256, but at most half; depends on data and seed alone."""
    if len(documents) < 2:
        raise BadInput(f"the data has {len(documents)} text; give at least two")
    size = min(max(8, round(len(documents) / 50)), 256, len(documents) // 2)
    chosen = set(shuffled(len(documents), seed)[:size])
    train = [document for index, document in enumerate(documents) if index not in chosen]
    return train, [documents[index] for index in sorted(chosen)]


@lru_cache(maxsize=4)
def shuffled(size: int, *key: int) -> tuple[int, ...]:
    """The numbers below `size` in an order that depends on the key alone."""
    import numpy as np  # the command line does not import it

    return tuple(np.random.default_rng(key).permutation(size).tolist())


def read(files: Sequence[Path], chat: bool = False, note: Note = lambda _: None) -> list[Document]:
    """All distinct documents of the files: plain text, JSON objects by line, or a JSON array.

    Unusable rows are skipped; `note` receives their number and the reasons for the first three.
    Raises BadInput for a file without a usable row.
    """
    documents: dict[str, Document] = {}
    skipped: list[str] = []
    for file in files:
        rows = list(_rows(file))
        read = [row.as_chat() if chat else row for _, row in rows if isinstance(row, Document)]
        bad = [f"{place} of {file.name}: {why}" for place, why in rows if isinstance(why, BadInput)]
        if not read:
            raise BadInput(f"{file} has no text that can be used{f' ({bad[0]})' if bad else ''}; "
                           'give plain text, or rows such as {"text": "..."}')  # fmt: skip
        documents |= {repr(document): document for document in read}
        skipped += bad
    if skipped:
        note(f"skipped {len(skipped):,} rows that cannot be used: {'; '.join(skipped[:3])}")
    return list(documents.values())


def _rows(file: Path) -> Iterator[tuple[str, Document | BadInput]]:
    """Every row of a file with its place: a document, or the reason why it is unusable."""
    kind, text = file.suffix.lower(), _decoded(file)
    if kind not in (".jsonl", ".json", ".ndjson"):
        yield from (("text", Document(piece)) for piece in _pieces(text))
        return
    rows = text.split("\n")
    try:
        array = json.loads(text)
        rows = [json.dumps(row) for row in (array if isinstance(array, list) else [array])]
    except (ValueError, RecursionError) as error:
        if text.lstrip().startswith("["):
            raise BadInput(f"{file} begins as a JSON array but is broken: {error}") from error
    for number, row in enumerate(rows, 1):
        if not row.strip():
            continue
        try:
            yield f"row {number}", parse(json.loads(row))
        except BadInput as error:
            yield f"row {number}", error
        except (ValueError, RecursionError) as error:
            yield f"row {number}", BadInput(f"it is not JSON ({error})")


def _decoded(file: Path) -> str:
    if file.suffix.lower() in NOT_TEXT:
        raise BadInput(f"{file}: {file.suffix} files are not read; convert it to .jsonl or .txt")
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        place = f"{error.reason} at byte {error.start}"
        raise BadInput(f"{file} is not UTF-8 text ({place}); save it as UTF-8") from error
    if "\0" in text:
        raise BadInput(f"{file} is not a text file; give .txt or .jsonl")
    return text


def _pieces(text: str) -> Iterator[str]:
    """Paragraphs, joined until they are long enough."""
    piece = ""
    for paragraph in text.split("\n\n"):
        piece += ("\n\n" if piece else "") + paragraph
        if len(piece) >= PIECE:
            yield piece
            piece = ""
    if piece.strip():
        yield piece


def parse(row: object) -> Document:
    """The document in a row of JSON. Raises BadInput, with the reason, if there is none."""
    if not isinstance(row, dict):
        raise BadInput("it is not an object")
    row = row["body"] if isinstance(row.get("body"), dict) else row      # OpenAI's batch files
    known = ("text", *CHATS, "turns", *QUESTIONS)
    name = next((name for name in known if row.get(name)), None)
    if name is None:
        fields = f"it has none of the fields {', '.join(known)}"
        raise BadInput("it is empty" if set(known) & set(row) else fields)
    value, answer = row[name], next((row[key] for key in ANSWERS if row.get(key)), None)
    if name in CHATS or (name == "prompt" and isinstance(value, list)):
        return Document(messages=_chat(value, answer if name == "prompt" else None))
    if name == "text":
        return Document(_text(value, name))
    if name == "turns":
        return Document(prompt=_text(value[0] if isinstance(value, list) else value, name))
    prompt = _text(value, name)
    if name == "instruction" and row.get("input"):                       # Alpaca
        prompt += "\n\n" + _text(row["input"], "input")
    return Document(_text(answer, "the answer") if answer else "", prompt)


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise BadInput(f"{name} must be text")
    if not value.strip():
        raise BadInput("it is empty")
    return _sound(value)


def _sound(text: str) -> str:
    """Replace lone surrogates (half characters), which no tokenizer accepts."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _chat(parts: Any, answer: Any) -> list[dict[str, Any]]:
    """Messages in OpenAI's format (role, content) or ShareGPT's (from, value), from the first user
    message on, since many ShareGPT chats lack their beginning."""
    parts = [*parts, *(answer or [])] if isinstance(parts, list) else parts
    if isinstance(parts, list) and all(isinstance(part, dict) for part in parts):
        parts = [{"role": part.get("from"), "content": part.get("value"), **part} for part in parts]
    messages = list[dict[str, object]]()
    for message in messages_of(parts):
        if message["role"] not in ROLES:
            raise BadInput(
                f"a message has the role {message['role']!r}, none of {', '.join(ROLES)}"
            )
        role, calls = (
            ROLES[message["role"]],
            {name: message[name] for name in message if name == "tool_calls"},
        )
        if messages or role != "assistant":
            messages.append({"role": role, "content": _sound(message["content"]), **calls})
    if not messages:
        raise BadInput("it is a chat without a user")
    return messages
