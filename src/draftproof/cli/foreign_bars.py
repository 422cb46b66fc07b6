"""Shows progress bars of other libraries (tqdm) as part of ours; they write nothing themselves."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[str, float, "float | None"], None]
"""``advance(what, done, total)``."""


class _Nowhere(io.StringIO):
    """A terminal that shows nothing, for bars that are disabled without a terminal."""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        return len(text)


@contextmanager
def no_foreign_bars(advance: Advance) -> Iterator[None]:
    """Make bars of tqdm call `advance` and write nothing while the block runs."""
    import tqdm

    bar = tqdm.tqdm
    begin, display = bar.__init__, bar.display

    def begin_silently(self: tqdm.tqdm, *args: object, **options: object) -> None:
        begin(self, *args[:4], **{**options, "file": _Nowhere()})

    def show(self: tqdm.tqdm, *_: object, **__: object) -> bool:
        advance((self.desc or "").rstrip(": "), self.n, self.total)
        return True

    bar.__init__, bar.display = begin_silently, show
    try:
        yield
    finally:
        bar.__init__, bar.display = begin, display
