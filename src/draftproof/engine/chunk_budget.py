"""How much of a long prompt is read between two rounds of the running texts."""

from __future__ import annotations

LEAST = 2
"""Tokens of the shortest chunk. Reading all weights for less is not worth it."""
SHARE = 1.4
"""Seconds of a chunk, as a multiple of a usual round. The round after a chunk drafts no more tokens
than the chunk has, so a stream waits for less than three usual rounds."""
FADE = 0.8
"""Weight of the old average after a round."""


class ChunkBudget:
    """Adapts the size of chunks to the length of rounds, so that streams stay even."""

    def __init__(self, most: int) -> None:
        """
        Args:
            most: Tokens of the longest chunk.
        """
        self.most, self.tokens = most, min(most, 2 * LEAST)
        self.pending = False                            # a chunk was read since the last round
        self._round = 0.0                               # seconds of a usual round, on average

    def most_drafts(self, rows: int) -> int:
        """The most tokens each row may draft in a round that follows a chunk."""
        return self.tokens // rows

    def round_took(self, seconds: float, drafted: int) -> None:
        """Learn how long a round took, and how many tokens each row drafted in it.

        A round that follows a chunk counts as a usual one only if it drafts nothing."""
        usual = not (self.pending and drafted and self._round)
        self.pending = False
        if usual:
            known = self._round or seconds
            self._round += (1 - FADE) * (min(seconds, 2 * known) - known) if self._round else known

    def chunk_took(self, tokens: int, seconds: float) -> None:
        """Learn how long a chunk of so many tokens took."""
        if not self._round or tokens < self.tokens:     # the last chunk of a prompt is shorter
            return
        ratio = SHARE * self._round / max(seconds, 1e-6)
        grown = self.tokens * min(max(ratio, 0.5), 1.5)
        self.tokens = min(max(round(grown), LEAST), self.most)
