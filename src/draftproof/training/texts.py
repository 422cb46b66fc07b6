"""Training texts: from files as people have them to documents. Knows nothing of tokens or models."""

from __future__ import annotations

import codecs
import gzip
import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from draftproof.errors import BadInput

CHATS = ("messages", "conversations", "conversation")
QUESTIONS = ("prompt", "instruction", "question", "query", "input")
ANSWERS = ("completion", "response", "output", "answer")
"""Fields of a JSON row that are understood, besides "text" and "turns"."""
NOT_TEXT = (".csv", ".tsv", ".xlsx", ".xls", ".parquet", ".arrow", ".xml", ".html", ".yaml", ".zip", ".pdf", ".docx")
PIECE = 4000
"""Characters a plain text file is cut into, at paragraphs, so that a part of it can be held out."""
HELD_OUT, FEWEST, MOST = 0.02, 8, 256
"""Share of the documents that is held out, and its bounds."""
ROLES = {"user": "user", "human": "user", "system": "system", "developer": "system", "assistant": "assistant",
         "model": "assistant", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
         "function_call": "assistant", "tool": "tool", "function": "tool", "observation": "tool"}  # fmt: skip
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
    """A text to train on, the prompt before it (not trained on) if there is one, or a chat instead of both."""

    text: str = ""
    prompt: str | None = None
    messages: tuple[Message, ...] = ()

    def as_chat(self) -> Document:
        """A prompt, or a plain text, as the user's message, and the text behind a prompt as the answer."""
        if self.messages:
            return self
        question, answer = (self.text, "") if self.prompt is None else (self.prompt, self.text)
        return Document(messages=(Message("user", question), *([Message("assistant", answer)] if answer else [])))


class Split(NamedTuple):
    train: list[Document]
    held_out: list[Document]


@dataclass(frozen=True)
class DataConfig:
    """Files to train on, and to evaluate with (a share of the first if not given).

    chat: prompts and texts are the user's messages. strict: refuse rows that cannot be used instead of skipping them.
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

    def split(self, seed: int, note: Note = lambda text: None) -> Split:
        """Documents to train on, and others, never trained on."""
        documents = read(self.data, self.chat, strict=self.strict, note=note)
        if self.held_out is None:
            return split(documents, seed)
        others = dict.fromkeys(read([self.held_out], self.chat, strict=self.strict, note=note))
        return Split([document for document in documents if document not in others], list(others))


def read(
    files: Sequence[Path], chat: bool = False, *, strict: bool = False, note: Note = lambda text: None
) -> list[Document]:
    """All documents of the files, each once.

    Plain text, or JSON: an object per line, or an array; .gz of either. Rows that cannot be used are skipped; `note`
    hears how many, and why the first three. Raises BadInput for a file without a usable row, or strictly, for any such row.
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
                raise BadInput(f"{place} of {file} cannot be used: {row}; mend it, or leave out --strict to skip it")
            else:
                skipped.append(f"{place} of {file.name}: {row}")
        if not usable:
            why = f" ({skipped[before]})" if len(skipped) > before else ""
            raise BadInput(f'{file} has no text that can be used{why}; give plain text, or rows such as {{"text": "..."}}')
    if skipped:
        note(f"skipped {len(skipped):,} rows that cannot be used: {'; '.join(skipped[:3])}{'; ...' * (len(skipped) > 3)}")
    return list(documents)


def split(documents: Sequence[Document], seed: int) -> Split:
    """Hold some out: the share, at least a few, at most half; the same ones for the same data and seed."""
    if len(documents) < 2:
        raise BadInput(f"the data has {len(documents)} text; give at least two, one is held out, or name others by --held-out")
    size = min(max(FEWEST, round(HELD_OUT * len(documents))), MOST, len(documents) // 2)
    chosen = sorted(shuffled(len(documents), seed)[:size])
    return Split([documents[i] for i in range(len(documents)) if i not in set(chosen)], [documents[i] for i in chosen])


def shuffled(size: int, *key: int) -> list[int]:
    """The numbers below `size` in an order that depends on the key alone."""
    return [int(index) for index in np.random.default_rng(key).permutation(size)]


def _rows(file: Path) -> Iterator[tuple[str, Document | BadInput]]:
    """Every row of a file with its place: a document, or why it is none."""
    kind, text = _contents(file)
    if kind not in (".jsonl", ".json", ".ndjson"):
        yield from (("text", Document(piece)) for piece in _pieces(text))
        return
    rows: Iterable[Any]
    try:
        whole = json.loads(text)
        rows, name = whole if isinstance(whole, list) else [whole], "row"
    except (ValueError, RecursionError) as error:
        if text.lstrip().startswith("["):
            raise BadInput(f"{file} begins as a JSON array and is broken: {error}; mend it") from error
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


def _contents(file: Path) -> tuple[str, str]:
    """The kind of a file, by its name in lower case, and its text."""
    data, name = file.read_bytes(), Path(file.name.lower())
    try:
        if name.suffix == ".gz":
            data, name = gzip.decompress(data), Path(name.stem)
        if name.suffix in NOT_TEXT:
            raise BadInput(f"{file}: {name.suffix} files are not read; convert it to .jsonl with rows such as {{\"text\": \"...\"}}")
        utf16 = data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        text = data.decode("utf-16" if utf16 else "utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise BadInput(f"{file} is not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8") from error
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput(f"{file} cannot be unpacked ({error}); pack it again") from error
    if "\0" in text:
        raise BadInput(f"{file} is not a text file; give .txt or .jsonl")
    return name.suffix, text


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
    row = row["body"] if isinstance(row.get("body"), dict) else row             # a request of OpenAI's batch files
    known = ("text", *CHATS, "turns", *QUESTIONS)
    name = next((name for name in known if row.get(name)), None)
    if name is None:
        raise BadInput("it is empty" if set(known) & set(row) else f"it has none of the fields {', '.join(known)}")
    value = row[name]
    if name in CHATS or (name == "prompt" and isinstance(value, list)):
        answer = row.get("completion") if name == "prompt" else None
        return Document(messages=_chat(value, answer if isinstance(answer, list) else []))
    if name == "turns":
        return Document(prompt=_text(value[0] if isinstance(value, list) else value, name))
    if name == "text":
        return Document(_text(value, name))
    parts = (name, "input") if name == "instruction" else (name,)               # Alpaca's rows have both
    answer = next((key for key in ANSWERS if row.get(key)), None)
    prompt = "\n\n".join(_text(row[key], key) for key in parts if row.get(key))
    return Document(_text(row[answer], answer) if answer else "", prompt)


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise BadInput(f'"{name}" must be text')
    if not value.strip():
        raise BadInput("it is empty")
    return _whole(value)


def _whole(text: str) -> str:
    """With half characters (lone surrogates) replaced: no tokenizer takes them."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _chat(*lists: Any) -> tuple[Message, ...]:
    """From the user on: ShareGPT is full of chats that are cut at the front."""
    if not all(isinstance(part, list) for part in lists):
        raise BadInput("a chat must be a list of messages")
    messages = [_message(part) for parts in lists for part in parts]
    start = next((i for i, message in enumerate(messages) if message.role != "assistant"), None)
    if start is None:
        raise BadInput("it is a chat without a user")
    return tuple(messages[start:])


def _message(part: Any) -> Message:
    """A message of the OpenAI kind (role, content) or of the ShareGPT kind (from, value)."""
    if not isinstance(part, dict):
        raise BadInput('a message must be an object with "role" and "content"')
    role, content = str(part.get("role", part.get("from"))), part.get("content", part.get("value"))
    calls = part.get("tool_calls") or []
    if role not in ROLES:
        raise BadInput(f'a message has the role {role!r}, none of {", ".join(ROLES)}')
    if isinstance(content, list):
        texts = [piece.get("text") if isinstance(piece, dict) else piece for piece in content]
        content = "".join(text for text in texts if isinstance(text, str))
        if len(texts) != sum(isinstance(text, str) for text in texts):
            raise BadInput("a message has parts that are not text")
    if not isinstance(content, str) and not (content is None and calls):
        raise BadInput('a message has no text as "content"')
    return Message(ROLES[role], _whole(content or ""), json.dumps([_call(call) for call in calls]) if calls else "")


def _call(call: Any) -> dict[str, Any]:
    """A tool call as chat templates take it: the arguments as an object, not as its text."""
    try:
        function = dict(call["function"])
        if isinstance(function.get("arguments"), str):
            function["arguments"] = json.loads(function["arguments"] or "{}")
    except (TypeError, KeyError, ValueError) as error:
        raise BadInput("a tool call is none: it needs a function with a name and JSON arguments") from error
    return {"type": "function", "function": function}
