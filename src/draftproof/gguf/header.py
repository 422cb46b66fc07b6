"""The header of a GGUF file: metadata and the table of tensors. Does not import torch.

A file is memory-mapped, and its whole header is checked against the file's length, so no tensor
reaches outside the mapping.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from draftproof.errors import ModelNotFound, UnsupportedModel, first_line
from draftproof.gguf.metadata import Cursor, Metadata, read_metadata
from draftproof.gguf.types import BLOCK_SIZES, TYPE_NAMES, row_bytes

MAX_DIMENSIONS = 4
MAX_TENSORS = 1 << 20


class Entry(NamedTuple):
    """A line of the table of tensors.

    Attributes:
        name: Its name, unique in all parts.
        type: A key of `BLOCK_SIZES`.
        shape: Its shape in torch's order.
        offset: Its offset in bytes from the beginning of the file.
        nbytes: Its length in bytes.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Header(NamedTuple):
    """The header of one file.

    Attributes:
        data: The mapped file. What is written to it stays in memory.
        metadata: The metadata.
        entries: The table of tensors.
    """

    data: mmap.mmap
    metadata: Metadata
    entries: list[Entry]


def is_gguf(path: str | Path) -> bool:
    """Whether a path is an existing file with the extension of GGUF files, in any case."""
    return str(path).lower().endswith(".gguf") and Path(path).is_file()


def read_header(path: Path) -> Header:
    """Map a file, and read and check its header.

    The header that was read last is returned again while the file is unchanged.

    Args:
        path: A GGUF file, or one part of a split one.

    Raises:
        ModelNotFound: It is not a GGUF file, is damaged or truncated.
        UnsupportedModel: Its version or a type of tensor is unknown.
    """
    identity = _identity(path)
    header = _LAST.get(identity)
    if header is None:
        header = _read(path)
        _LAST.clear()
        _LAST[identity] = header
    return header


_LAST = dict[tuple[object, ...], Header]()
"""The header that was read last. The commands read it first, then the model and the tokenizer."""


def _identity(path: Path) -> tuple[object, ...]:
    """What changes when a file is replaced or written to."""
    if not path.is_file():
        raise ModelNotFound(f"{path} is not a file")
    status = path.stat()
    return path.absolute(), status.st_ino, status.st_size, status.st_mtime_ns


def _read(path: Path) -> Header:
    data = _mapped(path)
    cursor = Cursor(memoryview(data), path)
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
    return Header(
        data, metadata, [entry._replace(offset=start + entry.offset) for entry in entries]
    )


def _mapped(path: Path) -> mmap.mmap:
    """The mapped file; what is written to it stays in memory."""
    if not path.stat().st_size:
        raise ModelNotFound(f"{path} is empty")
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
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
