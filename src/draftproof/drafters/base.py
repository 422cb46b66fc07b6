"""The seam: what a drafting method must do. Knows the two messages, nothing of targets or decoders."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftproof.core.messages import Commit, Features, Frontier
from draftproof.core.ops import TORCH, Ops
from draftproof.core.tree import TokenTree
from draftproof.errors import DrafterMismatch
from draftproof.model.fused_forward import Tables


class Drafter(ABC):
    """Turns what became true into a tree of what may come next.

    A drafter's memory has one place per running row, in the decoder's row order. It must either choose its tokens
    deterministically (given the text and the sampler's noise) or, when `frontier.drawn` asks for it, draw them and
    attach the law they were drawn from; there is no third kind.
    """

    name: str = "drafter"
    hidden_layers: tuple[int, ...] = ()
    """Hidden layers of the target it wants in `Commit.hidden`; none costs nothing."""
    wants_top: int = 0
    """How many of the likeliest tokens behind each node it wants in `Commit.successors`; none costs nothing."""
    has_kv_cache: bool = False
    """It keeps what it read of its own tree, so `Commit.nodes` must number the nodes of that tree and of no other."""
    default_budget: int = 5
    """The most tokens per row and round when nobody says; how many of them pay is measured."""
    deepest: int | None = None
    """The longest path it drafts, in tokens, if that is less than the budget; noise is made for so many positions."""
    free: bool = False
    """Proposing costs next to nothing and leaves no trace: it may be asked while nothing it proposes is read."""
    ops: Ops = TORCH
    """What it computes with, since `start`."""

    def unread(self, pending: int = 0) -> int:
        """Committed tokens, over all rows, that it must read before it can propose; of each row it has yet to be told of
        `pending`. Default: none."""
        return 0

    def start(self, rows: int, capacity: int, ops: Ops) -> None:
        """Begin with empty memory for at most `rows` rows of at most `capacity` tokens, and compute with `ops`."""
        self.ops = ops

    def observe(self, commit: Commit) -> None:
        """Learn what became true: each row's prompt first, then every round. Default: nothing.

        Before the next `propose`, that is: of plain rounds between, several may come as one commit."""

    @abstractmethod
    def propose(self, frontier: Frontier) -> TokenTree:
        """A tree with the root at node 0 and at most `frontier.budget` nodes below it in each row."""

    def select(self, rows: Sequence[int]) -> None:
        """Keep the memory of these rows, in this order; a row may be repeated. Default: nothing."""


class Vocabulary(Protocol):
    """What a draft head shares with its target: the tables between tokens and hidden states. A `Target` is one."""

    name: str
    vocab_size: int
    hidden_size: int
    context: int
    reads_trees: bool

    @property
    def native(self) -> Tables | None:
        """The same tables as our kernels read them, if they do."""
        ...

    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def embed(self, tokens: Tensor) -> Tensor: ...
    def unembed(self, hidden: Tensor) -> Tensor: ...


class DraftHead(nn.Module, ABC):
    """Weights that read the target's hidden states and foretell several tokens: what training trains, no decoding state.

    Step i = 0, 1, ... of a head foretells, from the hidden state of token t, token t + 2 + i; the token t + 1 is the
    target's own.
    """

    kind: ClassVar[str]
    """Its name in checkpoints and on the command line."""
    hidden_layers: tuple[int, ...] = (-1,)
    """Hidden layers it reads, counted as transformers does; -1 is the state behind the final norm."""
    decay: float = 1.0
    """Step i counts decay^(i + 1) in the loss."""

    @property
    @abstractmethod
    def steps(self) -> int:
        """How many tokens it foretells."""

    @abstractmethod
    def predict(self, features: Features, vocabulary: Vocabulary) -> Iterator[Tensor]:
        """Logits [B, S - 2 - i, V] of step i = 0, 1, ..., teacher-forced: row t is for token t + 2 + i."""

    def count(self, first: Tensor, second: Tensor) -> int:
        """Learn what is counted, not trained: in the training text tokens `second` [N] came behind `first` [N].

        Returns how many pairs it keeps. Default: none."""
        return 0

    def behind(self, parents: Tensor, logits: Tensor) -> Tensor:
        """A step's logits [P, V] where the tokens before are `parents` [P], as it drafts with them. Default: as they are."""
        return logits

    @abstractmethod
    def drafter(self, vocabulary: Vocabulary) -> Drafter:
        """The drafter that decodes with these weights, in the dtype and on the device of the target."""


class Form(Protocol):
    """What is said of any head's form."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...


def must_fit(name: str, form: Form, vocabulary: Vocabulary, *, padded: bool = True) -> None:
    """Refuse heads made for another target.

    padded: tables are padded here and there, so a few rows more or less are the same tokenizer.
    """
    if form.hidden_size != vocabulary.hidden_size:
        raise DrafterMismatch(
            f"{name} was made for hidden states of {form.hidden_size} numbers, {vocabulary.name} has "
            f"{vocabulary.hidden_size}; use one trained for this target"
        )
    if abs(form.vocab_size - vocabulary.vocab_size) > (max(PADDING, vocabulary.vocab_size // 100) if padded else 0):
        raise DrafterMismatch(
            f"{name} was trained for {form.vocab_size} tokens, {vocabulary.name} has {vocabulary.vocab_size}; "
            "use one trained for this target"
        )


PADDING = 512
"""Rows, or one in a hundred, by which vocabularies of one tokenizer differ: tables are padded to round numbers."""


def over_vocabulary(logits: Tensor, vocab_size: int, token_map: Tensor | None = None) -> Tensor:
    """[..., vocab_size] draft logits by the target's ids: what the target lacks is cut, what the heads lack is -inf."""
    if token_map is not None:
        everything = logits.new_full((*logits.shape[:-1], vocab_size), -torch.inf)
        return everything.index_copy(-1, token_map, logits)
    missing = vocab_size - logits.shape[-1]
    return F.pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits[..., :vocab_size]


@torch.no_grad()
def lm_head_of(vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    """The target's LM head as weight [V, H] and bias [V], whatever module it is made of; in at least float32."""
    zeros = torch.zeros(1, vocabulary.hidden_size, dtype=vocabulary.dtype, device=vocabulary.device)
    eye = torch.eye(vocabulary.hidden_size, dtype=vocabulary.dtype, device=vocabulary.device)
    dtype = torch.promote_types(vocabulary.dtype, torch.float32)
    bias = vocabulary.unembed(zeros).to(dtype)
    return (vocabulary.unembed(eye).to(dtype) - bias).T, bias[0]
