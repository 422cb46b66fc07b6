"""Learning while it serves: a head goes on being taught by what its target accepted. It changes speed, never text.

The target's own words come by anyway, each with the hidden state behind it: a short window of them per running row is
a text to learn from, and a few windows of earlier ones keep the head from forgetting. Bounded and without chance: the
same requests in the same order teach the same. Knows commits and losses; nothing of how the head drafts.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from draftproof.core.messages import Commit, Features
from draftproof.drafters.base import DraftHead, Vocabulary
from draftproof.drafters.losses import head_loss
from draftproof.errors import BadInput


@dataclass(frozen=True)
class LearnConfig:
    """How a head learns while it serves.

    every: rounds between steps of gradient descent. window: tokens of each row that are remembered.
    memory: windows of earlier text that are kept. batch: windows per step, half of them the latest. lr: of AdamW.
    A step costs about as much as a few rounds of a small model: it pays where requests differ from what the head was
    trained on, and come for a while.
    """

    every: int = 64
    window: int = 64
    memory: int = 16
    batch: int = 2
    lr: float = 1e-3

    def __post_init__(self) -> None:
        for name, least in (("every", 1), ("window", 8), ("memory", 1), ("batch", 1)):
            if getattr(self, name) < least:
                raise BadInput(f"{name} of learning while serving was {getattr(self, name)}; it must be at least {least}")
        if not 0 < self.lr < 1:
            raise BadInput(f"lr of learning while serving was {self.lr}; it must be between 0 and 1")


class Learner:
    """Owns a copy of the head in at least float32, what it learns from, and the optimiser.

    head: the copy that learns; write it to keep what was learnt. The head that was given stays as it is.
    """

    def __init__(self, head: DraftHead, vocabulary: Vocabulary, config: LearnConfig) -> None:
        self.config, self.vocabulary = config, vocabulary
        with torch.inference_mode(False):
            dtype = torch.promote_types(next(head.parameters()).dtype, torch.float32)
            self.head = copy.deepcopy(head).to(vocabulary.device, dtype)
            self._weights = [weight for weight in self.head.parameters() if weight.requires_grad]
            self._optimiser = torch.optim.AdamW(self._weights, config.lr, betas=(0.9, 0.95), weight_decay=0)
            self._bank = _Windows.empty(config.memory, config.window, vocabulary)
        self._banked = self._rounds = self._running = 0
        self.start(0)

    def start(self, rows: int) -> None:
        """A new batch begins; what was banked of earlier ones stays."""
        with torch.inference_mode(False):
            self._rows = _Windows.empty(rows, self.config.window, self.vocabulary)
        self._running = 0

    def observe(self, commit: Commit, states: Tensor, written: bool) -> bool:
        """Remember what became true, states [b, D, H] behind it; learn if it is time. Whether the head has changed.

        written: the tokens are the target's own, not a prompt's, which is read but not foretold.
        """
        first, stop = commit.rows[0], commit.rows[-1] + 1
        if first >= self._running:                              # a new row begins with an empty window
            self._rows.part(first, stop).weights.zero_()
        self._running = max(self._running, stop)
        self._rows.part(first, stop).append(commit.tokens, states, commit.count, written)
        self._rounds += written
        if not written or self._rounds % self.config.every:
            return False
        for row in range(self._running):
            self._keep(row)
        self._step()
        return True

    def select(self, rows: Sequence[int]) -> None:
        """Rows left or moved; what those that left have written is banked."""
        for row in sorted(set(range(self._running)) - set(rows)):
            self._keep(row)
        for mine in self._rows:
            mine[: len(rows)] = mine[list(rows)]
        self._running = len(rows)

    def _keep(self, row: int) -> None:
        """Bank the window of a row, in the place of the oldest."""
        for banked, mine in zip(self._bank, self._rows, strict=True):
            banked[self._banked % self.config.memory] = mine[row]
        self._banked += 1

    def _step(self) -> None:
        """One step on the latest windows and, in turn, on the earlier ones."""
        filled = min(self._banked, self.config.memory)
        latest = [(self._banked - 1 - age) % self.config.memory for age in range(filled)]
        half = min(filled, -(-self.config.batch // 2))
        others, turn = latest[half:], self._rounds // self.config.every
        taken = [others[(turn + place) % len(others)] for place in range(min(len(others), self.config.batch - half))]
        with torch.inference_mode(False), torch.enable_grad():
            tokens, hidden, weights = (banked[latest[:half] + taken] for banked in self._bank)
            with self._precision():
                loss = head_loss(self.head, Features(tokens, hidden[:, :, None], weights), self.vocabulary)
            self._optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self._weights, 1.0)
            self._optimiser.step()

    def _precision(self) -> AbstractContextManager[object]:
        """bfloat16 arithmetic where the target is in half precision; the weights keep theirs."""
        if self.vocabulary.dtype not in (torch.bfloat16, torch.float16):
            return nullcontext()
        return torch.autocast(self.vocabulary.device.type, torch.bfloat16)


class _Windows(NamedTuple):
    """The last S tokens of texts: tokens [b, S], the hidden states behind them [b, S, H], weights [b, S] as in `Features`."""

    tokens: Tensor
    hidden: Tensor
    weights: Tensor

    @classmethod
    def empty(cls, rows: int, size: int, vocabulary: Vocabulary) -> _Windows:
        tokens = torch.zeros(rows, size, dtype=torch.int64, device=vocabulary.device)
        hidden = torch.zeros(rows, size, vocabulary.hidden_size, dtype=vocabulary.dtype, device=vocabulary.device)
        return cls(tokens, hidden, torch.zeros(rows, size, device=vocabulary.device))

    def part(self, first: int, stop: int) -> _Windows:
        """The same memory, of these rows alone."""
        return _Windows(*(mine[first:stop] for mine in self))

    def append(self, tokens: Tensor, hidden: Tensor, count: Tensor, written: bool) -> None:
        """Move on by `count` [b] tokens, of tokens [b, D] with hidden states [b, D, H]."""
        news = (tokens, hidden.to(self.hidden.dtype), torch.full_like(tokens, written, dtype=self.weights.dtype))
        place = count[:, None] + torch.arange(self.tokens.shape[1], device=count.device)           # in [old | new]
        for mine, new in zip(self, news, strict=True):
            index = place if mine.dim() == 2 else place[..., None].expand_as(mine)
            mine.copy_(torch.cat([mine, new], 1).gather(1, index))
