"""The interface of drafting methods."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from draftproof.core.former_names import FormerName, adopt_former_names
from draftproof.core.messages import Commit, Frontier
from draftproof.core.ops import TORCH, Ops
from draftproof.core.prefix import Prefix
from draftproof.core.tree import TokenTree
from draftproof.errors import DrafterMismatch
from draftproof.model.target import Target

if TYPE_CHECKING:
    from draftproof.native.declarations import Structure

PADDING = 512
"""Vocabulary sizes for one tokenizer may differ by this many, or by 1 %, since tables are
padded."""
T = TypeVar("T")


class Drafter(ABC):
    """Drafts a tree of tokens that may follow each row's committed text.

    A drafter's memory has one entry per running row, in the order of the batch. It either chooses
    its tokens deterministically (given the text and the sampler's noise) or, if
    `frontier.needs_draft_probs`, draws them and attaches the probabilities that it drew from. There
    is no third kind.
    """

    name: str = "drafter"
    description: str = ""
    """What the folder or file contained that it was read from, for messages."""
    hidden_layers: tuple[int, ...] = ()
    """Hidden layers of the target that it needs in `Commit.hidden`; empty costs nothing."""
    needs_all_hidden: bool = False
    """It needs the hidden states of all tokens of a prompt, not only of the last one."""
    top_k_needed: int = 0
    """How many of the likeliest tokens after each node it needs in `Commit.successors`. There are
    none while the budget cools down."""
    has_kv_cache: bool = False
    """It keeps keys and values of its own tree: `Commit.nodes` must number that tree's nodes."""
    max_draft_tokens: int = 5
    """The most tokens per row and round, unless a budget is given. How many of them pay is
    measured."""
    deepest: int | None = None
    """The longest path it drafts, in tokens, if that is less than `max_draft_tokens`."""
    ops: Ops = TORCH
    """The operators it computes with, set by `start`."""
    wants_top = FormerName("top_k_needed")
    reads_every_state = FormerName("needs_all_hidden")
    default_budget = FormerName("max_draft_tokens")

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        adopt_former_names(cls)

    def unread(self, pending: int = 0) -> int:
        """Committed tokens, over all rows, that it must read before it can propose. Default: none.

        Args:
            pending: Tokens of each row that `observe` has not been called with yet.

        Returns:
            How many tokens it would have to read before it can draft.
        """
        return 0

    def for_run(self, rows: int, capacity: int, ops: Ops) -> Self:
        """A started copy for one run. What `start` assigns belongs to the copy, the rest is shared.

        Args:
            rows: Rows of the batch.
            capacity: The most tokens of a row.
            ops: The operators of the device.

        Returns:
            A drafter with its own memory and the same weights.
        """
        copied = copy.copy(self)
        copied.start(rows, capacity, ops)
        return copied

    def start(self, rows: int, capacity: int, ops: Ops) -> None:
        """Assign empty memory for `rows` rows of `capacity` tokens; compute with `ops`.

        Args:
            rows: Rows of the batch.
            capacity: The most tokens of a row.
            ops: The operators of the device.
        """
        self.ops = ops

    def begin(self, rows: Sequence[int], sources: Sequence[object]) -> None:
        """Announce the sources of new rows, for encoder-decoders. Default: nothing.

        Args:
            rows: Rows that begin a text.
            sources: The encoder's input of each.
        """

    def assign_owners(self, rows: Sequence[int], owners: Sequence[int]) -> None:
        """Announce the owners of new rows: 0, or random 64-bit numbers. Default: nothing.

        A drafter that remembers texts of other rows may use them only for rows of the same owner.

        Args:
            rows: Rows that begin a text.
            owners: The owner of each text.
        """

    def observe(self, commit: Commit) -> None:
        """Learn the committed tokens: each row's prompt first, then every round. Default: nothing.

        Rows are consecutive. Several rounds without a proposal may be merged into one commit.

        Args:
            commit: The committed tokens, and the target's output for them.
        """

    @abstractmethod
    def propose(self, frontier: Frontier) -> TokenTree:
        """The root at node 0, and at most `frontier.max_draft_tokens` nodes below it per row.

        Args:
            frontier: The committed text of each row, its root, and how much to draft (at least 1).

        Returns:
            A tree of draft tokens for each row.
        """

    def native_member(self, prefix: Prefix) -> Structure | None:
        """What the C library needs to draft in this drafter's place, as a member of a portfolio.

        Args:
            prefix: The committed text of each row.

        Returns:
            A `search_member`; None if only `propose` can draft. Default: None.
        """
        return None

    def select(self, rows: Sequence[int]) -> None:
        """Keep the memory of these rows, in this order; a row may be repeated. Default: nothing.

        Args:
            rows: The rows that go on, in their new order.
        """

    def drafted_by(self, tree: TokenTree) -> list[list[str]]:
        """The drafter's name for each node of its last proposal, [B, N], for display.

        Args:
            tree: A tree that it proposed.

        Returns:
            For each row, the name of the method that drafted each node.
        """
        return [[self.name] * len(row) for row in tree.tokens]


class Plain(Drafter):
    """Plain autoregressive decoding: proposes only the root, one token per round."""

    name = "none"
    max_draft_tokens = 0

    def propose(self, frontier: Frontier) -> TokenTree:
        return TokenTree.root(frontier.prefix.root)


class SharedMemory(dict[torch.device, T]):
    """What a drafter remembers for later runs, by device; made when first needed."""

    def __init__(self, make: Callable[[torch.device], T]) -> None:
        self.make = make

    def __missing__(self, device: torch.device) -> T:
        with torch.inference_mode(False):
            return self.setdefault(device, self.make(device))


Vocabulary = Target
"""A target whose embeddings and LM head are used by draft heads."""


def must_fit(name: str, hidden_size: int, vocab_size: int, target: Vocabulary) -> None:
    """Refuse a drafter made for another target.

    Args:
        name: The drafter, for the error.
        hidden_size: The width of the hidden states that it reads.
        vocab_size: Tokens that it drafts; either side may be padded.
        target: The target at hand.

    Raises:
        DrafterMismatch: It is for hidden states of another size, or for another vocabulary.
    """
    if hidden_size != target.hidden_size:
        raise DrafterMismatch(
            f"{name} was made for hidden states of {hidden_size} numbers, {target.name} has "
            f"{target.hidden_size}; use one trained for this target"
        )
    if abs(vocab_size - target.vocab_size) > max(PADDING, target.vocab_size // 100):
        raise DrafterMismatch(
            f"{name} was trained for {vocab_size} tokens, {target.name} has {target.vocab_size}; "
            "use one trained for this target"
        )


def over_vocabulary(logits: Tensor, vocab_size: int, token_map: Tensor | None = None) -> Tensor:
    """[..., vocab_size] draft logits by the target's ids; -inf where the heads lack a token."""
    if token_map is not None:
        everything = logits.new_full((*logits.shape[:-1], vocab_size), -torch.inf)
        return everything.index_copy(-1, token_map, logits)
    lacks = vocab_size - logits.shape[-1]
    return F.pad(logits, (0, lacks), value=-torch.inf) if lacks > 0 else logits[..., :vocab_size]
