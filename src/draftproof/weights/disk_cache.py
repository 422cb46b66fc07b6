"""Slow results for models on disk, kept in the user's cache folder: verdicts of the check at load,
and quantised weights.

The key covers everything that a result depends on; results that are damaged, of another user or of
other files are made again. Checksums are verified at a file's first read and after every write.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from draftproof.native.build import cache_folder, is_ours, name_of, put_in_place
from draftproof.native.kernels import library
from draftproof.weights.snapshot import Snapshot

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger("draftproof")
SWITCH = "DRAFTPROOF_CACHE"
"""Environment variable; 0 disables the cache."""
SLOW = 1.0
"""Results that took more seconds are worth keeping."""
_SOURCE = "_draftproof_source"
_WRITERS = dict[Path, threading.Thread]()
"""Threads that write files. What is being written is not made again."""


class Kept:
    """The file for one result, if any. model, files: identify the model and its files."""

    def __init__(self, model: str = "", files: str = "", key: str = "") -> None:
        self.file: Path | None = None
        if model:
            with suppress(OSError):                     # without a home folder nothing is kept
                self.file = cache_folder() / f"{model}-{files}-{key}.pt"
        self.model, self.current = model, f"{model}-{files}-"

    def read(self) -> dict[str, Any] | None:
        """Return what was written, with mapped tensors; None if it is missing or damaged."""
        if self.file is None:
            return None
        if (writer := _WRITERS.pop(self.file, None)) is not None:
            writer.join()
        if not self.file.exists():
            return None
        if not is_ours(self.file):
            log.warning("%s is of another user, or others may write to it; it is made again",
                        self.file)
            return None
        try:
            if not self._is_verified():
                self._verify()
            facts: dict[str, Any] = torch.load(self.file, mmap=True, weights_only=True)
        except Exception:                               # damaged files raise errors of any class
            log.warning("%s is damaged; it is made again", self.file)
            self._mark.unlink(missing_ok=True)
            return None
        return facts

    @property
    def _mark(self) -> Path:
        """The file that notes which file passed the verification."""
        assert self.file is not None
        return self.file.with_suffix(".verified")

    def _identity(self) -> str:
        """A text that changes whenever the file is written to."""
        assert self.file is not None
        status = self.file.stat()
        return f"{status.st_size} {status.st_mtime_ns} {status.st_ino} {status.st_dev}"

    def _is_verified(self) -> bool:
        """Whether this very file was verified, and not written to since."""
        try:
            marked = is_ours(self._mark) and self._mark.read_text(encoding="ascii")
            return marked == self._identity()
        except (OSError, ValueError):
            return False

    def _verify(self) -> None:
        """Compare every record with its checksum (torch writes one for each tensor).

        Raises:
            ValueError, OSError, zipfile.BadZipFile: The file is damaged.
        """
        assert self.file is not None
        identity = self._identity()
        with zipfile.ZipFile(self.file) as records:
            damaged = records.testzip()
        if damaged is not None:
            raise ValueError(f"{damaged} has another checksum")
        with suppress(OSError):                         # in a read-only folder, verify every time
            part = self._mark.with_suffix(f".{os.getpid()}.part")
            part.write_text(identity, encoding="ascii")
            put_in_place(part, self._mark)

    def write(self, facts: dict[str, object]) -> None:
        """Write all or nothing, and remove results for the model's earlier files; a full or
        read-only disk keeps nothing."""
        if self.file is None:
            return
        part = self.file.with_suffix(f".{os.getpid()}.part")
        with suppress(OSError, RuntimeError):
            try:
                torch.save(facts, part)
                for old in part.parent.glob(f"{self.model}-*"):
                    if old.suffix in (".pt", ".verified") and (
                        not old.name.startswith(self.current)
                    ):
                        old.unlink(missing_ok=True)
                put_in_place(part, self.file)
                self._mark.unlink(missing_ok=True)
            finally:
                part.unlink(missing_ok=True)

    @contextmanager
    def save_if_slow(self, *, wait: bool = True) -> Iterator[dict[str, object]]:
        """A context with a dict to fill, which is written if that took long.

        Args:
            wait: Write before the context ends; otherwise a thread writes, for which the program
                waits at exit. The contents of the dict must not change any more.
        """
        start, made = time.perf_counter(), dict[str, object]()
        yield made
        if time.perf_counter() - start <= SLOW:
            return
        if wait:
            self.write(made)
        elif self.file is not None:
            writer = threading.Thread(target=self.write, args=(made,), name="weights to disk")
            _WRITERS[self.file] = writer
            writer.start()


def record_source(model: nn.Module, name: str) -> None:
    """Record the files that a model was just loaded from."""
    setattr(model, _SOURCE, (*_files(name), Snapshot.of(model)))


def was_loaded_by_name(model: nn.Module) -> bool:
    """Whether we loaded a model from files ourselves."""
    return hasattr(model, _SOURCE)


def _files(name: str) -> tuple[str, list[tuple[str, int, int]]]:
    """The folder or file of this name, and the identity of its files."""
    place = Path(name)
    if not place.exists():
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(name, "config.json")
        place = Path(cached).parent if isinstance(cached, str) else place
    files = sorted(place.iterdir()) if place.is_dir() else [place]
    kinds = (".json", ".safetensors", ".bin", ".gguf", ".py", ".jinja", ".model", ".txt")
    sizes = [(file.name, file.stat().st_size, file.stat().st_mtime_ns)
             for file in files if file.suffix in kinds]
    return str(place.resolve()), sizes


def kept_of_files(name: str, what: str, *more: object) -> Kept:
    """The place of the result `what` for the files of this name, independent of a model."""
    if os.environ.get(SWITCH) == "0" or not Path(name).exists():
        return Kept()
    place, files = _files(name)
    kernel = library().build and name_of(library().build)
    here = (files, _code(), torch.__version__, version("transformers"))
    return Kept(*map(_digest, (place, here, (what, kernel, *more))))


def kept(model: PreTrainedModel, what: str, *more: object, changed: bool = False) -> Kept:
    """The place of the result `what` for a model that was loaded from files. Nothing is kept for
    other models, nor, without `changed`, for models whose weights or modules have changed since."""
    source: tuple[str, object, Snapshot] | None = getattr(model, _SOURCE, None)
    if source is None or os.environ.get(SWITCH) == "0":
        return Kept()
    place, files, loaded = source
    if not changed and not Snapshot.of(model).same(loaded):
        return Kept()
    kinds = sorted(Counter(type(module).__name__ for module in model.modules()).items())
    kernel = library().build and name_of(library().build)
    here = (files, _code(), torch.__version__, version("transformers"))
    what_of = (str(model.config), kinds, str(model.dtype), str(model.device), kernel, what, *more)
    return Kept(*map(_digest, (place, here, what_of)))


def _digest(what: object) -> str:
    return hashlib.sha256(repr(what).encode()).hexdigest()[:16]


def _code() -> str:
    """A digest of the code that checks and packs, which is more precise than a version."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in _sources())).hexdigest()


def _sources() -> list[Path]:
    """The source files of the packages that check and pack."""
    rooms = ("native", "gguf", "weights", "cache", "forward", "model")
    package = Path(__file__).parents[1]
    return sorted(file for room in rooms for file in (package / room).glob("*.py"))
