"""How much of a long prompt is read between two rounds of the texts that run."""

from __future__ import annotations

LEAST = 4
"""Tokens of the shortest chunk: reading the weights once for fewer is not worth it."""
SHARE = 1.4
"""Seconds of a chunk, in rounds: a stream then waits for less than three of its usual gaps."""
FADE = 0.8
"""Weight of what was known before the last round."""


class ChunkBudget:
    """Adapts the size of chunks to the seconds of rounds, so that streams go on evenly."""

    def __init__(self, most: int) -> None:
        """
        Args:
            most: Tokens of the longest chunk.
        """
        self.most, self.tokens = most, min(most, 4 * LEAST)
        self._round = 0.0                               # seconds of a round, on average

    def round_took(self, seconds: float) -> None:
        """Learn how long a round takes that follows or precedes a chunk."""
        self._round = FADE * self._round + (1 - FADE) * seconds if self._round else seconds

    def chunk_took(self, tokens: int, seconds: float) -> None:
        """Learn how long a chunk of so many tokens took."""
        if not self._round or tokens < self.tokens:     # the last chunk of a prompt is a short one
            return
        ratio = SHARE * self._round / max(seconds, 1e-6)
        grown = self.tokens * min(max(ratio, 0.5), 1.5)
        self.tokens = min(max(round(grown), LEAST), self.most)
