"""The seam: what a drafting method must do. Knows the two messages, nothing of targets or decoders."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from draftproof.core.messages import Commit, Frontier
from draftproof.core.tree import TokenTree


class Drafter(ABC):
    """Turns what became true into a tree of what may come next.

    A drafter's memory has one place per running row, in the decoder's row order. It must either choose its tokens
    deterministically (given the text and the sampler's noise) or, when `frontier.drawn` asks for it, draw them and
    attach the law they were drawn from; there is no third kind.
    """

    name: str = "drafter"
    taps: tuple[int, ...] = ()
    """Hidden layers of the target it wants in `Commit.hidden`; none costs nothing."""
    default_budget: int = 5
    """Tokens per row and round when nobody says."""

    def start(self, rows: int, capacity: int) -> None:
        """Begin with empty memory for at most `rows` rows of at most `capacity` tokens. Default: nothing."""

    def observe(self, commit: Commit) -> None:
        """Learn what became true: each row's prompt first, then every round. Default: nothing."""

    @abstractmethod
    def propose(self, frontier: Frontier) -> TokenTree:
        """A tree with the root at node 0 and at most `frontier.budget` nodes below it in each row."""

    def select(self, rows: Sequence[int]) -> None:
        """Keep the memory of these rows, in this order; a row may be repeated. Default: nothing."""
