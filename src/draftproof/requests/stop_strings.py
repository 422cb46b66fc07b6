"""Finds the first stop string in a text, and how much of the text's end may begin one."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from functools import lru_cache


class StopStrings:
    """Sorted stop strings; each lookup takes a binary search per character of the text.

    A string that begins with another one is left out, since the shorter one ends the text first, at
    the same place. Then no string is a prefix of another, so at most one matches at each place: the
    last one that does not sort after the rest of the text.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        self._strings = list[str]()
        for string in sorted(strings):
            if not (self._strings and string.startswith(self._strings[-1])):
                self._strings.append(string)
        self._longest = max(map(len, self._strings), default=0)

    def find(self, text: str) -> int | None:
        """Find the earliest stop string in a text.

        Args:
            text: The text to search.

        Returns:
            The index of its first character, or None if there is none.
        """
        for start in range(len(text)):
            tail = text[start : start + self._longest]
            place = bisect_right(self._strings, tail) - 1
            if place >= 0 and tail.startswith(self._strings[place]):
                return start
        return None

    def overlap(self, text: str) -> int:
        """How many characters at the end of a text without stop strings could begin one."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-size:]
            place = bisect_left(self._strings, tail)
            if place < len(self._strings) and self._strings[place].startswith(tail):
                return size
        return 0


@lru_cache(maxsize=64)
def stop_strings(strings: tuple[str, ...]) -> StopStrings:
    """The stop strings of a request, which its samples share."""
    return StopStrings(strings)
