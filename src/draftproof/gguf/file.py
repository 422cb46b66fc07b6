"""GGUF files as tensors: views of the mapped file, or of all parts of a split one."""

from __future__ import annotations

import hashlib
import os
import re
from contextlib import suppress
from pathlib import Path

import torch

from draftproof.errors import ModelNotFound
from draftproof.gguf.blocks import BlockTensor, block_tensor
from draftproof.gguf.header import is_gguf, read_header
from draftproof.gguf.metadata import Metadata

_PART = re.compile(r"(.*)-(\d{5,})-of-(\d{5,})(\.gguf)", re.IGNORECASE)


class GGUFFile:
    """A GGUF file, with all its parts.

    Attributes:
        path: The file that was opened.
        parts: All files, in order; only `path` if it is not split.
        metadata: The metadata of the first part.
        tensors: Tensors by name, in the order of the table, as views of the mapped files.
    """

    def __init__(self, path: Path, parts: list[Path], metadata: Metadata,
                 tensors: dict[str, BlockTensor]) -> None:  # fmt: skip
        self.path, self.parts, self.metadata, self.tensors = path, parts, metadata, tensors

    @staticmethod
    def recognises(path: str | Path) -> bool:
        """As `is_gguf`."""
        return is_gguf(path)

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
        metadata, tensors = _read(path)
        parts = _parts(path, metadata)
        if len(parts) == 1:
            return cls(path, parts, metadata, tensors)
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


def _stat(path: Path) -> os.stat_result | None:
    with suppress(OSError):
        return path.stat()
    return None


def _read(path: Path) -> tuple[Metadata, dict[str, BlockTensor]]:
    """The metadata, and the tensors as views of the mapped file."""
    header = read_header(path)
    data, views = torch.frombuffer(header.data, dtype=torch.uint8), dict[str, BlockTensor]()
    for entry in header.entries:
        stored = data[entry.offset : entry.offset + entry.nbytes]
        views[entry.name] = block_tensor(entry.type, entry.shape, stored)
    return header.metadata, views


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
