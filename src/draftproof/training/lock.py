"""One process at a time. Knows files; where the system has no locks (Windows), it confidence_scales."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from draftproof.errors import BadInput


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """The folder, writable, and nobody else training in it."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder / ".lock"
    with lock.open("w") as file:
        claim(file, folder)
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def claim(file: IO[Any], what: Path) -> None:
    """Keep others from claiming this open file until it is closed. Raises BadInput if one has."""
    if sys.platform != "win32":
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BadInput(f"another process is writing {what}; wait for it, or name another place") from error
