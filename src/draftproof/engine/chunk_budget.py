"""How much of a long prompt is read between two rounds of the texts that run."""

from __future__ import annotations

LEAST = 2
"""Tokens of the shortest chunk: reading the weights once for a single one is not worth it."""
SHARE = 1.4
"""Seconds of a chunk, in usual rounds. The round next to it drafts no more tokens than the chunk
has, so a stream waits for less than three of its usual gaps."""
FADE = 0.8
"""Weight of what was known before the last round."""


class ChunkBudget:
    """Adapts the size of chunks to the seconds of rounds, so that streams go on evenly."""

    def __init__(self, most: int) -> None:
        """
        Args:
            most: Tokens of the longest chunk.
        """
        self.most, self.tokens = most, min(most, 2 * LEAST)
        self.pending = False                            # something was read since the last round
        self._round = 0.0                               # seconds of a usual round, on average

    def most_drafts(self, rows: int) -> int:
        """How many tokens each row may draft in a round that comes with a chunk."""
        return self.tokens // rows

    def round_took(self, seconds: float, drafted: int) -> None:
        """Learn how long a round took, and how many tokens each row drafted in it.

        One that comes with a chunk is a usual round if it drafts nothing."""
        usual = not (self.pending and drafted and self._round)
        self.pending = False
        if usual:
            known = self._round or seconds
            self._round += (1 - FADE) * (min(seconds, 2 * known) - known) if self._round else known

    def chunk_took(self, tokens: int, seconds: float) -> None:
        """Learn how long a chunk of so many tokens took."""
        if not self._round or tokens < self.tokens:     # the last chunk of a prompt is a short one
            return
        ratio = SHARE * self._round / max(seconds, 1e-6)
        grown = self.tokens * min(max(ratio, 0.5), 1.5)
        self.tokens = min(max(round(grown), LEAST), self.most)
