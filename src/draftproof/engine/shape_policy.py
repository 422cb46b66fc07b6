"""The sizes of a running batch: as needed, or from a small closed set.

A device that compiles a graph for every shape (a Gaudi, a captured CUDA graph) must not meet a new
shape with every prompt. With closed shapes, a batch keeps its rows (padding repeats another row),
reads see the whole cache, prompts are read in chunks of a few sizes, and few draft sizes are tried.
"""

from __future__ import annotations

from dataclasses import dataclass

from draftproof.cache.kv_cache import chunk_of
from draftproof.errors import BadInput

BUCKET = 128
"""Capacities are multiples of this."""


@dataclass(frozen=True)
class ShapePolicy:
    """closed: take sizes from the closed set. bucket: closed capacities are multiples of this, a
    multiple of 128; None doubles from 128."""

    closed: bool = False
    bucket: int | None = None

    def __post_init__(self) -> None:
        if self.bucket is not None and self.bucket < 1:
            raise BadInput(f"a bucket of {self.bucket} tokens was given; it must be at least 1")

    def rows(self, wanted: int) -> int:
        """The number of rows to allocate for a batch.

        Args:
            wanted: Rows that are needed.

        Returns:
            Rows to allocate.
        """
        return 1 << (wanted - 1).bit_length() if self.closed else wanted

    def capacity(self, tokens: int) -> int:
        """Positions per row for texts of a length, scratch included.

        Args:
            tokens: Tokens that are needed.

        Returns:
            Tokens to allocate.
        """
        buckets, step = -(-tokens // BUCKET), -(-(self.bucket or 1) // BUCKET)
        if self.closed and self.bucket is None:
            return BUCKET << (buckets - 1).bit_length()
        return -(-buckets // step) * step * BUCKET

    def chunk(self, tokens: int) -> int:
        """The size of the next chunk of a prompt, padding included.

        Args:
            tokens: Tokens of a prompt that are left to read.

        Returns:
            Tokens to read now.
        """
        return chunk_of(tokens, self.closed)

    def sizes(self, most: int) -> tuple[int, ...]:
        """Draft sizes with closed shapes: reads of 1, 2, 4, 8, ... nodes.

        Args:
            most: The most nodes of a draft.

        Returns:
            The sizes of draft to choose from, ascending.
        """
        return (*(size for size in ((1 << power) - 1 for power in range(12)) if size < most), most)


OPEN = ShapePolicy()
"""Shapes as they come."""
