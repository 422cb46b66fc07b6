"""Writes files atomically, and locks places so that only one process writes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from draftproof.errors import BadInput, first_line


@contextmanager
def file_lock(place: Path) -> Iterator[None]:
    """Lock a folder or file for writing. Raises BadInput if another process has locked it."""
    name = place / ".lock" if place.is_dir() else place.with_name(f".{place.name}.lock")
    try:
        with FileLock(name, timeout=0):
            try:
                yield
            finally:
                name.unlink(missing_ok=True)
    except Timeout as error:
        why = f"another process is writing {place}"
        raise BadInput(f"{why}; wait for it, or name another place") from error


@contextmanager
def atomic_write(file: Path) -> Iterator[Path]:
    """Yield a name to write to, which replaces the file at the end: a crash leaves the old one.

    Raises BadInput if it cannot be written."""
    from draftproof.drafters.weight_files import BROKEN  # imports torch; `file_lock` needs none

    part = file.with_suffix(".part")
    try:
        yield part
        part.replace(file)
    except BROKEN as error:
        part.unlink(missing_ok=True)            # it takes space that the next start needs
        reason = error.strerror if isinstance(error, OSError) else first_line(error)
        if "enforce fail" in str(error):        # PyTorch's message for a truncated file
            reason = "a part of it was not written"
        why = f"{file} cannot be written ({reason})"
        raise BadInput(f"{why}; is the disk full? The same command goes on from what is") from error


def same_settings(place: Path, before: Mapping[str, object], now: Mapping[str, object]) -> None:
    """Raise BadInput, with the first difference, if a place was started with other settings."""
    now = json.loads(json.dumps(now))
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            old, new = (json.dumps(settings.get(name))[:60] for settings in (before, now))
            change = f"{name} {old}, now it is {new}"
            raise BadInput(f"{place} was begun with {change}; give the same, or another --out")
