"""GGUF files: the header, the table of tensors, and files split into several parts.

A file is memory-mapped. Its whole header is checked against the file's length before use, so no
tensor reaches outside the mapping.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from draftproof.errors import DraftproofError, ModelNotFound, UnsupportedModel, first_line
from draftproof.gguf.blocks import BLOCK_SIZES, TYPE_NAMES, BlockTensor, block_tensor, row_bytes
from draftproof.gguf.metadata import Cursor, Metadata, read_metadata

MAX_DIMENSIONS = 4
MAX_TENSORS = 1 << 20
_PART = re.compile(r"(.*)-(\d{5,})-of-(\d{5,})(\.gguf)", re.IGNORECASE)


class Entry(NamedTuple):
    """A line of the table of tensors.

    Attributes:
        name: Its name, unique in all parts.
        type: A key of `BLOCK_SIZES`.
        shape: Its shape in torch's order.
        offset: Its offset in bytes from the beginning of the tensors' data.
        nbytes: Its length in bytes.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class GGUFFile:
    """A GGUF file, with all its parts.

    Attributes:
        path: The file that was opened.
        parts: All files, in order; only `path` if it is not split.
        metadata: The metadata of the first part.
        tensors: Tensors by name, in the order of the table, as views of the mapped files.
        opened_as: Its `identity` when it was opened.
    """

    def __init__(self, path: Path, parts: list[Path], metadata: Metadata,
                 tensors: dict[str, BlockTensor]) -> None:  # fmt: skip
        self.path, self.parts, self.metadata, self.tensors = path, parts, metadata, tensors
        self.opened_as = self.identity()

    @staticmethod
    def recognises(path: str | Path) -> bool:
        """Whether a path is an existing file with the extension of GGUF files, in any case."""
        return str(path).lower().endswith(".gguf") and Path(path).is_file()

    @classmethod
    def open(cls, path: str | Path) -> GGUFFile:
        """Map a file and check everything in its header.

        Args:
            path: A GGUF file, or any part of a split one.

        Raises:
            ModelNotFound: It is not a GGUF file, is damaged or truncated, or a part is missing.
            UnsupportedModel: Its version or a type of tensor is unknown.
        """
        path = Path(path)
        if path in _LAST and _LAST[path].identity() == _LAST[path].opened_as:
            return _LAST[path]
        metadata, tensors = _read(path)
        parts = _parts(path, metadata)
        if len(parts) == 1:
            file = cls(path, parts, metadata, tensors)
            _LAST.clear()
            _LAST[path] = file
            return file
        tensors, first = {}, metadata
        for number, part in enumerate(parts):
            metadata, more = _read(part)
            if number == 0:
                first = metadata
            place = (metadata.integer("split.no", -1), metadata.integer("split.count", 0))
            if place != (number, len(parts)):
                raise ModelNotFound(
                    f"{part} says that it is part {place[0] + 1} of {place[1]}; part {number + 1} "
                    f"of {len(parts)} was expected; fetch it again"
                )
            if twice := next(iter(tensors.keys() & more.keys()), None):
                raise ModelNotFound(f"{part} repeats {twice} of an earlier part; fetch it again")
            tensors |= more
        wanted = first.integer("split.tensors.count", len(tensors))
        if wanted != len(tensors):
            raise ModelNotFound(
                f"the {len(parts)} parts of {path} have {len(tensors)} tensors of {wanted}; fetch "
                "them again"
            )
        return cls(path, parts, first, tensors)

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the model family."""
        return self.metadata.text("general.architecture")

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def identity(self) -> str:
        """A digest that changes whenever a part is replaced, moved or written to."""
        stats = [
            (str(part.resolve()), stat.st_ino, stat.st_size, stat.st_mtime_ns)
            for part in self.parts if (stat := _stat(part))
        ]
        return hashlib.sha256(repr(stats).encode()).hexdigest()[:24]


_LAST = dict[Path, GGUFFile]()
"""The file that was opened last: its model and its tokenizer are asked for one after the other."""


def _stat(path: Path) -> os.stat_result | None:
    with suppress(OSError):
        return path.stat()
    return None


def _read(path: Path) -> tuple[Metadata, dict[str, BlockTensor]]:
    data = _mapped(path)
    cursor = Cursor(data.numpy().data, path)
    if len(data) < 8 or bytes(cursor.take(4, "its first bytes")) != b"GGUF":
        raise ModelNotFound(f"{path} is not a GGUF file, whose first bytes are 'GGUF'")
    version = cursor.integer(4, "its header")
    if version not in (2, 3):
        order = "of big-endian byte order" if not version & 0xFFFF else f"of version {version}"
        raise UnsupportedModel(f"{path} is a GGUF file {order}; versions 2 and 3 are read here")
    tensors, keys = (cursor.integer(8, "its header") for _ in range(2))
    metadata = read_metadata(cursor, keys)
    entries = list(_entries(cursor, tensors))
    alignment = metadata.integer("general.alignment", 32)
    if not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
        raise cursor.damaged(f"its alignment is {alignment}")
    start = -(-cursor.offset // alignment) * alignment
    _check(cursor, entries, start, alignment)
    views = {}
    for entry in entries:
        place = start + entry.offset
        stored = data[place : place + entry.nbytes]
        views[entry.name] = block_tensor(entry.type, entry.shape, stored)
    return metadata, views


def _mapped(path: Path) -> Tensor:
    """uint8 [bytes], the mapped file; writes stay in memory."""
    try:
        size = path.stat().st_size if path.is_file() else 0
        if not path.is_file() or not size:
            raise ModelNotFound(f"{path} is {'empty' if path.is_file() else 'not a file'}")
        return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    except DraftproofError:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        raise ModelNotFound(f"{path} cannot be read: {first_line(error)}") from error


def _entries(cursor: Cursor, count: int) -> Iterator[Entry]:
    """Read the table of tensors."""
    if count > MAX_TENSORS:
        raise cursor.damaged(f"its header promises {count} tensors")
    names = set[str]()
    for number in range(count):
        name = cursor.string(f"the name of tensor {number}", 256)
        if name in names:
            raise cursor.damaged(f"the tensor {name!r} occurs twice")
        names.add(name)
        what = f"the description of tensor {name!r}"
        dimensions = cursor.integer(4, what)
        if dimensions > MAX_DIMENSIONS:
            raise cursor.damaged(f"the tensor {name!r} has {dimensions} dimensions")
        sizes = [cursor.integer(8, what) for _ in range(dimensions)]
        kind, offset = cursor.integer(4, what), cursor.integer(8, what)
        yield _entry(cursor, name, sizes, kind, offset)


def _entry(cursor: Cursor, name: str, sizes: list[int], kind: int, offset: int) -> Entry:
    if kind not in TYPE_NAMES:
        raise UnsupportedModel(
            f"{cursor.path}: the tensor {name!r} has the block type {kind}, which is not known here"
        )
    type, width = TYPE_NAMES[kind], sizes[0] if sizes else 1
    block = BLOCK_SIZES[type].weights
    if math.prod(sizes) < 1 or width % block:
        raise cursor.damaged(f"the tensor {name!r} of type {type} has the sizes {sizes}")
    nbytes = row_bytes(type, width) * math.prod(sizes[1:])
    return Entry(name, type, tuple(reversed(sizes)), offset, nbytes)


def _check(cursor: Cursor, entries: list[Entry], start: int, alignment: int) -> None:
    """Refuse tensors that lie outside the file, are unaligned, or overlap."""
    length, end = len(cursor.data), 0
    for entry in sorted(entries, key=lambda entry: entry.offset):
        if entry.offset % alignment:
            raise cursor.damaged(f"the tensor {entry.name!r} does not begin at {alignment} bytes")
        if entry.offset < end:
            raise cursor.damaged(f"the tensor {entry.name!r} overlaps another")
        end = entry.offset + entry.nbytes
    if entries and start + end > length:
        raise ModelNotFound(
            f"{cursor.path} is cut off: it has {length} bytes of the {start + end} that its table "
            "of tensors needs; fetch it again"
        )


def _parts(path: Path, metadata: Metadata) -> list[Path]:
    """All parts of a split file, or the file itself."""
    count = metadata.integer("split.count", 1)
    if count <= 1:
        return [path]
    number = metadata.integer("split.no", 0)
    match = _PART.fullmatch(path.name)
    if match is None or int(match[3]) != count:
        raise ModelNotFound(
            f"{path} is part {number + 1} of {count}; the parts must be called "
            f"NAME-00001-of-{count:05}.gguf and so on, to be read together"
        )
    name, digits, of, suffix = match.groups()
    names = (f"{name}-{part + 1:0{len(digits)}}-of-{of}{suffix}" for part in range(count))
    parts, missing = list[Path](), list[Path]()
    for part in names:
        place = path.with_name(part)
        (parts if place.is_file() else missing).append(place)
        if len(missing) > 3:
            break
    if missing:
        listed = ", ".join(place.name for place in missing[:3]) + (" ..." if missing[3:] else "")
        raise ModelNotFound(
            f"{path} is part {number + 1} of {count}, and {listed} is missing; put all parts into "
            "one folder"
        )
    return parts
