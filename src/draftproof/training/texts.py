"""Training texts: from files as people have them to documents. Knows no tokens and no models."""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from draftproof.engine.rows import text_part, tool_calls_of
from draftproof.errors import BadInput

CHATS = ("messages", "conversations", "conversation")
QUESTIONS = ("prompt", "instruction", "question", "query", "input")
ANSWERS = ("completion", "response", "output", "answer")
"""Fields of a JSON row that are understood, besides "text" and "turns"."""
NOT_TEXT = {".csv", ".tsv", ".xlsx", ".parquet", ".arrow", ".xml", ".html", ".yaml", ".gz", ".zip",
            ".pdf", ".docx"}  # fmt: skip
PIECE = 4000
"""Characters a plain text file is cut into, at paragraphs, so that a part of it can be held out."""
HELD_OUT, FEWEST, MOST = 0.02, 8, 256
"""Share of the documents that is held out, and its bounds."""
ROLES = {
    "user": "user", "human": "user", "system": "system", "developer": "system", "tool": "tool",
    "function": "tool", "observation": "tool", "assistant": "assistant", "model": "assistant",
    "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "function_call": "assistant",
}  # fmt: skip
Note = Callable[[str], None]


class Message(NamedTuple):
    """One message of a chat. tool_calls: JSON of the calls it makes, or empty."""

    role: str
    content: str
    tool_calls: str = ""

    def as_dict(self) -> dict[str, Any]:
        """As chat templates take it."""
        calls = {"tool_calls": json.loads(self.tool_calls)} if self.tool_calls else {}
        return {"role": self.role, "content": self.content, **calls}


@dataclass(frozen=True)
class Document:
    """A text to train on, the prompt before it if there is one, or a chat instead of both."""

    text: str = ""
    prompt: str | None = None
    messages: tuple[Message, ...] = ()

    def as_chat(self) -> Document:
        """A prompt, or a plain text, as the user's message; what is behind a prompt, the answer."""
        if self.messages:
            return self
        question, answer = (self.text, "") if self.prompt is None else (self.prompt, self.text)
        answers = (Message("assistant", answer),) if answer else ()
        return Document(messages=(Message("user", question), *answers))


@dataclass(frozen=True)
class DataConfig:
    """Files to train on, and to evaluate with (a share of the first if not given).

    chat: prompts and texts are the user's messages. strict: refuse rows that cannot be used.
    """

    data: tuple[Path, ...]
    held_out: Path | None = None
    chat: bool = False
    strict: bool = False

    def __post_init__(self) -> None:
        if not self.data:
            raise BadInput("no data was given; name .txt or .jsonl files by --data")
        for file in self.files:
            if not file.is_file():
                raise BadInput(f"there is no file {file}; --data takes .txt and .jsonl files")

    @property
    def files(self) -> list[Path]:
        return [*self.data, *([self.held_out] if self.held_out else [])]

    def hashes(self) -> dict[str, str]:
        """sha256 by file name."""
        return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in self.files}

    def split(self, seed: int, note: Note) -> tuple[list[Document], list[Document]]:
        """Documents to train on, and others that are held out."""
        documents = read(self.data, self.chat, strict=self.strict, note=note)
        if self.held_out is None:
            return split(documents, seed)
        held_out = read([self.held_out], self.chat, strict=self.strict, note=note)
        known = set(held_out)
        return [document for document in documents if document not in known], held_out


def split(documents: Sequence[Document], seed: int) -> tuple[list[Document], list[Document]]:
    """Hold some out: at least a few, at most half; the same ones for the same data and seed."""
    if len(documents) < 2:
        raise BadInput(
            f"the data has {len(documents)} text; give at least two, or name others by --held-out"
        )
    size = min(max(FEWEST, round(HELD_OUT * len(documents))), MOST, len(documents) // 2)
    chosen = set(shuffled(len(documents), seed)[:size])
    train = [document for index, document in enumerate(documents) if index not in chosen]
    return train, [documents[index] for index in sorted(chosen)]


@lru_cache(maxsize=4)
def shuffled(size: int, *key: int) -> tuple[int, ...]:
    """The numbers below `size` in an order that depends on the key alone."""
    import numpy as np  # the command line starts without it

    return tuple(np.random.default_rng(key).permutation(size).tolist())


def read(
    files: Sequence[Path], chat: bool = False, *, strict: bool = False, note: Note = lambda _: None
) -> list[Document]:
    """All documents of the files, each once: plain text, JSON objects by line, or a JSON array.

    Rows that cannot be used are skipped; `note` hears how many, and why the first three. Raises
    BadInput for a file without a usable row or, strictly, for any row that cannot be used.
    """
    documents: dict[Document, None] = {}
    skipped: list[str] = []
    for file in files:
        usable, before = 0, len(skipped)
        for place, row in _rows(file):
            if isinstance(row, Document):
                usable += 1
                documents[row.as_chat() if chat else row] = None
            elif strict:
                raise BadInput(f"{place} of {file} cannot be used: {row} (not --strict: skipped)")
            else:
                skipped.append(f"{place} of {file.name}: {row}")
        if not usable:
            why = f" ({skipped[before]})" if len(skipped) > before else ""
            raise BadInput(
                f"{file} has no text that can be used{why}; give plain text, or rows such as "
                '{"text": "..."}'
            )
    if skipped:
        note(f"skipped {len(skipped):,} rows that cannot be used: {'; '.join(skipped[:3])}")
    return list(documents)


def _rows(file: Path) -> Iterator[tuple[str, Document | BadInput]]:
    """Every row of a file with its place: a document, or why it is none."""
    kind, text = file.suffix.lower(), _decoded(file)
    if kind not in (".jsonl", ".json", ".ndjson"):
        yield from (("text", Document(piece)) for piece in _pieces(text))
        return
    try:
        array = json.loads(text)
        rows, name = array if isinstance(array, list) else [array], "row"
    except (ValueError, RecursionError) as error:
        if text.lstrip().startswith("["):
            raise BadInput(f"{file} begins as a JSON array but is broken: {error}") from error
        rows, name = text.split("\n"), "line"
    for number, row in enumerate(rows, 1):
        if name == "line" and not row.strip():
            continue
        try:
            yield f"{name} {number}", parse(json.loads(row) if name == "line" else row)
        except BadInput as error:
            yield f"{name} {number}", error
        except (ValueError, RecursionError) as error:
            yield f"{name} {number}", BadInput(f"it is not JSON ({error})")


def _decoded(file: Path) -> str:
    if file.suffix.lower() in NOT_TEXT:
        raise BadInput(f"{file}: {file.suffix} files are not read; convert it to .jsonl or .txt")
    data = file.read_bytes()
    utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        text = data.decode("utf-16" if utf16 else "utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        place = f"{error.reason} at byte {error.start}"
        raise BadInput(f"{file} is not UTF-8 text ({place}); save it as UTF-8") from error
    if "\0" in text:
        raise BadInput(f"{file} is not a text file; give .txt or .jsonl")
    return text


def _pieces(text: str) -> Iterator[str]:
    """Paragraphs, gathered until they are long enough."""
    piece = ""
    for paragraph in text.split("\n\n"):
        piece += ("\n\n" if piece else "") + paragraph
        if len(piece) >= PIECE:
            yield piece
            piece = ""
    if piece.strip():
        yield piece


def parse(row: Any) -> Document:
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
        return Document(messages=_chat(value, answer if name == "prompt" else []))
    if name == "text":
        return Document(_text(value, name))
    if name == "turns":
        return Document(prompt=_text(value[0] if isinstance(value, list) else value, name))
    prompt = _text(value, name)
    if name == "instruction" and row.get("input"):                       # Alpaca
        prompt += "\n\n" + _text(row["input"], "input")
    return Document(_text(answer, "the answer") if answer else "", prompt)


def _text(value: Any, name: str) -> str:
    """With lone surrogates (half characters) replaced: no tokenizer takes them."""
    if not isinstance(value, str):
        raise BadInput(f"{name} must be text")
    if not value.strip():
        raise BadInput("it is empty")
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _chat(parts: Any, answer: Any) -> tuple[Message, ...]:
    """Messages from the user on: ShareGPT is full of chats that are cut at the front."""
    parts = [*parts, *(answer or [])] if isinstance(parts, list) else None
    if not parts or not all(isinstance(part, dict) for part in parts):
        raise BadInput('a chat must be a list of messages, objects with "role" and "content"')
    messages = [_message(part) for part in parts]
    start = next((i for i, message in enumerate(messages) if message.role != "assistant"), None)
    if start is None:
        raise BadInput("it is a chat without a user")
    return tuple(messages[start:])


def _message(part: dict[str, Any]) -> Message:
    """A message of the OpenAI kind (role, content) or of the ShareGPT kind (from, value)."""
    role, content = str(part.get("role", part.get("from"))), part.get("content", part.get("value"))
    calls = part.get("tool_calls")
    if role not in ROLES:
        raise BadInput(f"a message has the role {role!r}, none of {', '.join(ROLES)}")
    if isinstance(content, list):
        content = "".join(map(text_part, content))
    silent = content == "" or (content is None and calls)
    text = "" if silent else _text(content, "the content of a message")
    return Message(ROLES[role], text, json.dumps(tool_calls_of(calls)) if calls else "")
