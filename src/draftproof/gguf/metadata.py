"""Reads the metadata of a GGUF file, and looks up values by type.

The layout is that of docs/gguf.md in ggml. Every length and count is checked against the remaining
bytes before use, so a damaged or hostile file causes a one-sentence error.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Lock
from typing import TypeVar, overload

import numpy as np

from draftproof.errors import ModelNotFound

MAX_KEYS = 1 << 16
MAX_STRINGS = 1 << 22
"""Strings of one array. The largest vocabularies have 262,144 tokens and about twice as many
merges."""
MAX_STRING = 1 << 26
"""Bytes of one string. Some files hold a whole tokenizer.json of tens of megabytes."""
MAX_NAME = 1 << 16
STRING, ARRAY = 8, 9
NUMBERS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8",
    11: "<i8", 12: "<f8",
}  # fmt: skip
"""The numbers that a GGUF file uses for types of values, as NumPy names them."""
_LENGTH = struct.Struct("<Q")

T = TypeVar("T")


class Cursor:
    """A position in the bytes of a file, from which values are read in order.

    Args:
        data: All bytes of the file.
        path: The file, for errors.
    """

    def __init__(self, data: memoryview, path: Path) -> None:
        self.data, self.path, self.offset = data, path, 0

    def take(self, nbytes: int, what: str) -> memoryview:
        """Read the next `nbytes` bytes, or raise an error about `what` if there are fewer."""
        end = self.offset + nbytes
        if end > len(self.data):
            raise ModelNotFound(
                f"{self.path} is cut off: its {len(self.data)} bytes end within {what}; fetch it "
                "again"
            )
        part, self.offset = self.data[self.offset : end], end
        return part

    def integer(self, nbytes: int, what: str) -> int:
        """Read an unsigned integer of 4 or 8 bytes."""
        return int.from_bytes(self.take(nbytes, what), "little")

    def string(self, what: str, limit: int = MAX_STRING) -> str:
        """Read a string of at most `limit` bytes."""
        length = self.integer(8, what)
        if length > limit:
            raise self.damaged(f"{what} has {length} bytes; at most {limit} are possible")
        try:
            return str(self.take(length, what), "utf-8")
        except UnicodeDecodeError as error:
            raise self.damaged(f"{what} is not UTF-8 text") from error

    def skip_strings(self, count: int, what: str) -> None:
        """Skip an array of strings."""
        data, end, offset, unpack = self.data, len(self.data), self.offset, _LENGTH.unpack_from
        try:
            for _ in range(count):
                offset += 8 + unpack(data, offset)[0]
                if offset > end:
                    break
        except struct.error:
            offset = end + 1
        self.take(min(offset, end + 1) - self.offset, what)

    def damaged(self, reason: str) -> ModelNotFound:
        """The error for a damaged file."""
        return ModelNotFound(f"{self.path} is damaged: {reason}; fetch it again")


class Strings(Sequence[str]):
    """An array of strings, decoded on first use, once for all threads."""

    def __init__(self, cursor: Cursor, start: int, end: int, count: int, what: str) -> None:
        self._cursor, self._start, self._end = cursor, start, end
        self._count, self._what = count, what
        self._items: list[str] | None = None
        self._lock = Lock()

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        return self._decoded()[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self._decoded())

    def _decoded(self) -> list[str]:
        if self._items is None:
            with self._lock:
                if self._items is None:
                    self._items = self._read()
        return self._items

    def _read(self) -> list[str]:
        # slices of bytes are decoded twice as fast as slices of a memoryview
        data = bytes(self._cursor.data[self._start : self._end])
        offset, unpack, items = 0, _LENGTH.unpack_from, []
        try:
            for _ in range(self._count):
                start = offset + 8
                offset = start + unpack(data, offset)[0]
                items.append(data[start:offset].decode())
        except UnicodeDecodeError as error:
            what = f"string {len(items)} of {self._what} is not UTF-8 text"
            raise self._cursor.damaged(what) from error
        return items


Value = bool | int | float | str | np.ndarray | Strings
"""A value in a file; an array holds numbers or strings."""


class Metadata(dict[str, Value]):
    """Keys and values.

    Args:
        path: The file, for errors.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number; if the file has none, `default`, or an error if that is None."""
        return self._typed(key, int, "a whole number", default)

    def number(self, key: str, default: float | None = None) -> float:
        """A number."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._wrong(key, "a number")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        return self._typed(key, str, "a string", default)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """A truth value."""
        return self._typed(key, bool, "true or false", default)

    def strings(self, key: str) -> Strings:
        """An array of strings."""
        return self._typed(key, Strings, "an array of strings", None)

    def numbers(self, key: str, default: Sequence[float] | None = None) -> list[float]:
        """An array of numbers, or a single number as an array of length one."""
        value = self.get(key, default)
        if isinstance(value, (int, float)):
            return [value]
        if isinstance(value, np.ndarray):
            return list(value.tolist())
        if value is None or isinstance(value, (str, Strings)):
            raise self._wrong(key, "an array of numbers")
        return list(value)

    def _typed(self, key: str, kind: type[T], what: str, default: T | None) -> T:
        value = self.get(key, default)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self._wrong(key, what)
        return value

    def _wrong(self, key: str, what: str) -> ModelNotFound:
        if key not in self:
            return ModelNotFound(f"{self.path} has no {key!r} in its metadata; fetch it again")
        return ModelNotFound(f"{self.path}: {key!r} must be {what}; fetch the file again")


def read_metadata(cursor: Cursor, count: int) -> Metadata:
    """Read `count` keys with their values.

    Args:
        cursor: Positioned at the first key, and afterwards after the last value.
        count: The count from the header.

    Raises:
        ModelNotFound: The bytes are not metadata, or end too early.
    """
    if count > MAX_KEYS:
        raise cursor.damaged(f"its header promises {count} metadata keys")
    metadata = Metadata(cursor.path)
    for number in range(count):
        key = cursor.string(f"metadata key {number}", MAX_NAME)
        if key in metadata:
            raise cursor.damaged(f"the metadata key {key!r} occurs twice")
        metadata[key] = _value(cursor, key, cursor.integer(4, repr(key)))
    return metadata


def _value(cursor: Cursor, key: str, kind: int) -> Value:
    what = f"the metadata value {key!r}"
    if kind == STRING:
        return cursor.string(what)
    if kind == ARRAY:
        return _array(cursor, what, cursor.integer(4, what), cursor.integer(8, what))
    number: Value = _numbers(cursor, what, kind, 1).item()
    return number


def _array(cursor: Cursor, what: str, kind: int, count: int) -> np.ndarray | Strings:
    if kind == ARRAY:
        raise cursor.damaged(f"{what} is an array of arrays")
    if kind != STRING:
        return _numbers(cursor, what, kind, count)
    if count > MAX_STRINGS:
        raise cursor.damaged(f"{what} is an array of {count} strings")
    start = cursor.offset
    cursor.skip_strings(count, what)
    return Strings(cursor, start, cursor.offset, count, what)


def _numbers(cursor: Cursor, what: str, kind: int, count: int) -> np.ndarray:
    if kind not in NUMBERS:
        raise cursor.damaged(f"{what} has the unknown type {kind}")
    dtype = np.dtype(NUMBERS[kind])
    return np.frombuffer(cursor.take(count * dtype.itemsize, what), dtype)
