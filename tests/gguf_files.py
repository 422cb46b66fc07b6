"""Small GGUF files: sound ones by the package `gguf`, and any others byte by byte."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np


def write(path: Path, tensors: dict[str, np.ndarray], metadata: dict[str, Any],
          architecture: str = "llama", types: dict[str, str] | None = None,
          **options: Any) -> Path:  # fmt: skip
    """A sound file.

    Args:
        path: Where to write it.
        tensors: Float32 numbers by name.
        metadata: Numbers, strings, truth values and lists; keys begin with "." to stand for the
            architecture's own.
        architecture: `general.architecture`.
        types: The types to quantise tensors to; those that are not named stay float32.
        options: Of `gguf.GGUFWriter`.
    """
    writer = gguf.GGUFWriter(path, architecture, **options)
    for key, value in metadata.items():
        key = architecture + key if key.startswith(".") else key
        add = {bool: writer.add_bool, str: writer.add_string, float: writer.add_float32,
               int: writer.add_uint32, list: writer.add_array}[type(value)]
        add(key, value)
    for name, numbers in tensors.items():
        numbers = numbers.astype(np.float32)
        kind = (types or {}).get(name)
        if kind is None:
            writer.add_tensor(name, numbers)
        else:
            stored = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, gguf.quants.quantize(numbers, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def string(text: str | bytes) -> bytes:
    """A string as it is stored."""
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def key(name: str | bytes, kind: int, value: bytes) -> bytes:
    """A metadata key with its value."""
    return string(name) + struct.pack("<I", kind) + value


def entry(name: str, sizes: tuple[int, ...] = (32,), type: int = 0, offset: int = 0) -> bytes:
    """A line of the table of tensors; sizes in the file's order."""
    numbers = struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, type, offset)
    return string(name) + numbers


def raw(keys: list[bytes], entries: list[bytes], data: bytes = b"", *, version: int = 3,
        key_count: int | None = None, tensor_count: int | None = None) -> bytes:  # fmt: skip
    """A file of any contents, whose counts may be wrong."""
    counts = (len(entries) if tensor_count is None else tensor_count,
              len(keys) if key_count is None else key_count)
    header = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join([*keys, *entries])
    return header + b"\0" * (-len(header) % 32) + data
