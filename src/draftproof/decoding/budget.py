"""How much to draft this round, zero included."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from draftproof.decoding.stats import RoundStats
from draftproof.errors import BadInput


class Budget(Protocol):
    """Decides before each round; `most` bounds it, so that memory can be set aside once."""

    @property
    def most(self) -> int: ...
    def nodes(self, stats: RoundStats, rows: int) -> int: ...


@dataclass(frozen=True)
class Fixed:
    """The same number of draft tokens per row in every round."""

    count: int

    def __post_init__(self) -> None:
        if self.count < 0:
            raise BadInput(f"a budget of {self.count} draft tokens was given; it must be 0 or more")

    @property
    def most(self) -> int:
        return self.count

    def nodes(self, stats: RoundStats, rows: int) -> int:
        return self.count
