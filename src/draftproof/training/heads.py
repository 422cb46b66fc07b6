"""Training a draft head beside a frozen target: Medusa-1 and ReDrafter. Knows heads and features, not how they come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from draftproof.core.messages import Features
from draftproof.drafters.base import DraftHead, Vocabulary
from draftproof.drafters.losses import Scores, head_loss, score
from draftproof.training.features import Reader
from draftproof.training.rows import Batch
from draftproof.training.trainer import Exam, ProcessGroup

CACHED, MEMORY = 1 << 24, 1 << 29
"""Bytes of logits made at a time: on a CPU what its caches hold, elsewhere what its memory will not notice."""


class HeadsAlone:
    """The head learns, the target only reads.

    train, held_out: how features come; those of held-out rows need no cache. The head computes in bfloat16 where the
    target does, on weights kept in float32.
    """

    def __init__(self, head: DraftHead, vocabulary: Vocabulary, train: Reader, held_out: Reader, objective: str) -> None:
        self.head, self.vocabulary, self.objective = head, vocabulary, objective
        self.read_train, self.read_held_out = train, held_out

    def groups(self) -> list[ProcessGroup]:
        return [ProcessGroup([parameter for parameter in self.head.parameters() if parameter.requires_grad])]

    def backward(self, batch: Batch, share: float, progress: float) -> Tensor:
        return backward(self.head, self.read_train(batch), self.vocabulary, self.objective, share)

    @torch.no_grad()
    def examine(self, batches: Sequence[Batch]) -> Exam:
        return examined(self.head, self.vocabulary, self.objective, self.read_held_out, batches)

    def state(self) -> dict[str, Tensor]:
        return learnt(self.head)

    def restore(self, state: dict[str, Tensor]) -> None:
        self.head.load_state_dict(state, strict=False)


def learnt(module: torch.nn.Module) -> dict[str, Tensor]:
    """The weights that training changes."""
    return {name: parameter.detach() for name, parameter in module.named_parameters() if parameter.requires_grad}


def backward(head: DraftHead, features: Features, vocabulary: Vocabulary, objective: str, share: float) -> Tensor:
    """Add the gradient of `share` times the loss, a few rows at a time: logits of all would not stay in any cache."""
    total = torch.zeros((), device=vocabulary.device)
    for part, weight in slices(features, head, vocabulary):
        with precision(vocabulary):
            loss = head_loss(head, part, vocabulary, objective) * (share * weight)
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    return total


def examined(
    head: DraftHead, vocabulary: Vocabulary, objective: str, read: Reader, batches: Sequence[Batch]
) -> Exam:
    """Loss and hits of a head on batches it was not trained on."""
    found, total, size = Scores(), torch.zeros((), device=vocabulary.device), sum(batch.size for batch in batches)
    for batch in batches:
        for part, weight in slices(read(batch), head, vocabulary):
            with precision(vocabulary):
                total += head_loss(head, part, vocabulary, objective).detach() * (weight * batch.size / size)
                found = found.add(score(head, part, vocabulary))
    return Exam(float(total), found.top1_accuracy, found.top5_accuracy, found.tokens_per_round, {})


def slices(features: Features, head: DraftHead, vocabulary: Vocabulary) -> Iterator[tuple[Features, float]]:
    """A few rows at a time, in the dtype the head can compute with, and which share of what counts they hold."""
    half = vocabulary.dtype in (torch.bfloat16, torch.float16)
    hidden = features.hidden if half else features.hidden.to(next(head.parameters()).dtype)
    room = CACHED if vocabulary.device.type == "cpu" else MEMORY
    rows = max(1, room // (4 * vocabulary.vocab_size * features.tokens.shape[1]))
    whole = features.weights.sum().clamp(min=1e-6)
    for start in range(0, len(features.tokens), rows):
        here = slice(start, start + rows)
        weights = features.weights[here]
        logits = features.logits[here] if features.logits is not None else None
        yield Features(features.tokens[here], hidden[here], weights, logits), float(weights.sum() / whole)


def precision(vocabulary: Vocabulary) -> torch.autocast:
    """bfloat16 arithmetic on float32 weights where the target is in half precision; nothing elsewhere."""
    half = vocabulary.dtype in (torch.bfloat16, torch.float16)
    return torch.autocast(vocabulary.device.type, dtype=torch.bfloat16, enabled=half)
