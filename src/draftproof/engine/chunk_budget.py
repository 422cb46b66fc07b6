"""How much of a long prompt is read between two rounds of the running texts, or with one."""

from __future__ import annotations

from collections import deque
from math import ceil
from statistics import median

LEAST = 4
"""Tokens of the shortest chunk. Reading all weights for less is not worth it."""
SHARE = 1.4
"""Seconds of a pass that reads only a chunk, as a multiple of a usual round. The next round drafts
no more tokens than the chunk has, so a stream waits for less than three usual rounds."""
TOGETHER = 1.5
"""Seconds of a round whose pass also reads a chunk, as a multiple of a usual round."""
GROWTH = 1.3
"""Chunks grow by at most this factor at a time, since the time for larger ones is not known yet."""
KNOWN = 31
"""The number of rounds whose median is the usual round."""


class ChunkBudget:
    """Adapts the size of chunks to the length of rounds, so that streams stay even."""

    def __init__(self, most: int) -> None:
        """
        Args:
            most: Tokens of the longest chunk.
        """
        self.most, self.tokens = most, min(most, LEAST)
        self.pass_tokens = 2 * LEAST                    # of a pass that reads drafts and a chunk
        self.pending = False                            # something is read next to this round
        self._rounds = deque[float](maxlen=KNOWN)       # seconds of the last usual rounds

    def most_drafts(self, rows: int) -> int:
        """The most tokens each row may draft in a round that follows or reads a chunk."""
        return max(self.tokens, self.pass_tokens // 2) // rows

    def chunk_size(self, nodes: int) -> int:
        """Tokens of a chunk that is read in one pass with so many nodes of trees."""
        return min(max(self.pass_tokens - nodes, LEAST), self.most)

    def round_took(self, seconds: float, drafted: int) -> None:
        """Learn how long a round took, and how many tokens each row drafted in it.

        A round that follows a chunk counts as a usual one only if it drafts nothing."""
        if not (self.pending and drafted and self._rounds):
            self._rounds.append(seconds)
        self.pending = False

    def chunk_took(self, tokens: int, seconds: float) -> None:
        """Learn how long a chunk of so many tokens took."""
        if not self._rounds or tokens < self.tokens:    # the last chunk of a prompt is shorter
            return
        self.tokens = _resized(self.tokens, SHARE * median(self._rounds), seconds, self.most)

    def pass_took(self, chunk: int, nodes: int, seconds: float) -> None:
        """Learn how long a round took whose pass read a chunk of so many tokens and trees of so
        many nodes."""
        self.pending = False
        if not self._rounds or chunk < self.chunk_size(nodes):
            return
        if chunk <= LEAST:          # the shortest: rounds have become slower
            self._rounds.append(seconds)
        usual = TOGETHER * median(self._rounds)
        self.pass_tokens = _resized(self.pass_tokens, usual, seconds, 2 * self.most)


def _resized(tokens: int, wanted: float, seconds: float, most: int) -> int:
    """So many tokens as take the wanted seconds, if `tokens` took `seconds`."""
    grown = tokens * min(max(wanted / max(seconds, 1e-6), 0.5), GROWTH)
    return min(max(ceil(grown) if grown > tokens else round(grown), LEAST), most)
