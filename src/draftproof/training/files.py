"""Files that are whole or absent, and places where only one process writes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from draftproof.errors import BadInput


@contextmanager
def locked(place: Path) -> Iterator[None]:
    """Nobody else writes a folder, or a file, meanwhile. Raises BadInput if another process does."""
    lock = FileLock(place / ".lock" if place.is_dir() else place.with_name(f".{place.name}.lock"), timeout=0)
    try:
        with lock:
            try:
                yield
            finally:
                Path(lock.lock_file).unlink(missing_ok=True)
    except Timeout as error:
        raise BadInput(f"another process is writing {place}; wait for it, or name another place") from error


@contextmanager
def whole(file: Path) -> Iterator[Path]:
    """Another name to write to, that takes the file's place at the end: a crash leaves the old one."""
    part = file.with_suffix(".part")
    yield part
    part.replace(file)
