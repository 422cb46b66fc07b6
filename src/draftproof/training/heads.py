"""Trains a draft head for a frozen target: Medusa-1 and ReDrafter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftproof.core.messages import Features
from draftproof.drafters.heads import DraftHead
from draftproof.drafters.losses import head_loss, score
from draftproof.model.target import Target
from draftproof.training.rows import Batch, Batches

CACHED, MEMORY = 1 << 24, 1 << 30
"""Bytes of logits made at a time: what a CPU's caches hold, and a small part of other memories."""
KEPT = 2 << 30
"""Bytes of hidden states that a CPU keeps, so that each text is read once and not in every
epoch."""
FITTED = 100_000
"""Tokens in the loss from which a head's first weights are solved."""


class Evaluation(NamedTuple):
    """The quality of a head on held-out rows, by its steps; backbone_kl: nats per token between a
    jointly trained backbone and the original."""

    loss: float
    top1: list[float]
    top5: list[float]
    tokens_per_round: float
    backbone_kl: float | None = None


class FrozenTarget:
    """Trains the head; the target only reads.

    The head computes in bfloat16 if the target does, with weights in float32. reader: the target in
    fewer bits, for reading texts; None: the target itself.
    """

    def __init__(
        self, head: DraftHead, target: Target, objective: str, reader: Target | None = None
    ) -> None:
        self.head, self.target, self.objective = head, target, objective
        self.reader = reader or target
        self._states, self._kept = dict[bytes, Tensor](), 0

    @torch.no_grad()
    def begin(self, batches: Batches, progress: Callable[[int, int], None]) -> None:
        """Let the head solve for its initial weights, if it can.

        progress: receives the number of batches read, and the total."""
        sample = batches.sample(FITTED)

        def features() -> Iterator[Features]:
            for count, batch in enumerate(sample, 1):
                yield self.features(batch)
                progress(count, len(sample))

        self.head.solve(features(), self.target)

    @torch.no_grad()
    def features(self, batch: Batch) -> Features:
        """The target's features of a batch. A CPU reads row by row and keeps the hidden states."""
        logits = self.objective != "ce"
        if logits or self.target.device.type != "cpu":
            return read(self.reader, batch, self.head, logits)
        pairs, width = zip(batch.tokens, batch.sizes, strict=True), max(batch.sizes)
        hidden = pad_sequence([self._state(row[:size]) for row, size in pairs], batch_first=True)
        return Features(batch.tokens[:, :width], hidden, batch.weights[:, :width], None)

    def _state(self, tokens: Tensor) -> Tensor:
        """[S, T, H] the hidden states after the tokens [S] of a text."""
        name = tokens.int().numpy().tobytes()
        if name in self._states:
            return self._states[name]
        weights, layers = torch.ones(1, len(tokens), dtype=torch.float32), self.head.hidden_layers
        hidden = self.reader.features(tokens[None], weights, hidden_layers=layers).hidden[0].clone()
        if self._kept + hidden.nbytes <= KEPT:
            self._states[name], self._kept = hidden, self._kept + hidden.nbytes
        return hidden

    def param_groups(self) -> list[dict[str, Any]]:
        """The parameters to optimise: "params", and optionally a "factor" of the learning rate."""
        return [{"params": list(trained(self.head).values())}]

    def backward(self, batch: Batch) -> Tensor:
        """Add the gradient of the loss, and return the loss."""
        return backward(self.head, self.features(batch), self.target, self.objective)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> Evaluation:
        """Loss and accuracy on held-out batches."""
        loss, size = 0.0, sum(batch.loss_tokens for batch in batches)
        scores = torch.zeros(4, self.head.steps, dtype=torch.float64)
        for batch in batches:
            for part, weight in slices(self.features(batch), self.head, self.target):
                with autocast(self.target):
                    mean = float(head_loss(self.head, part, self.target, self.objective))
                    scores += score(self.head, part, self.target)
                loss += mean * weight * batch.loss_tokens / size
        top1, top5, run = (scores[1:] / scores[0].clamp(min=1e-9)).tolist()
        return Evaluation(loss, top1, top5, 1 + sum(run))

    def state(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in trained(self.head).items()}

    def restore(self, state: dict[str, Tensor]) -> None:
        self.head.load_state_dict(state, strict=False)


def read(target: Target, batch: Batch, head: DraftHead, logits: bool) -> Features:
    """The target's hidden states of a batch, with logits if requested."""
    tokens, weights = batch.tokens.to(target.device), batch.weights.to(target.device)
    return target.features(tokens, weights, hidden_layers=head.hidden_layers, logits=logits)


def trained(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The trainable weights."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def backward(
    head: DraftHead, features: Features, target: Target, objective: str, share: float = 1.0
) -> Tensor:
    """Add the gradient of `share` times the loss, a few rows at a time, and return that loss."""
    total = torch.zeros((), dtype=torch.float32, device=target.device)
    for part, weight in slices(features, head, target):
        with autocast(target):
            loss = head_loss(head, part, target, objective) * (share * weight)
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    return total


def slices(
    features: Features, head: DraftHead, target: Target
) -> Iterator[tuple[Features, float]]:
    """Slices of a few rows in the head's dtype, with their share of the loss, without tokens before
    and after those in the loss that no step of the head needs."""
    dtype = features.hidden.dtype if _half(target) else next(head.parameters()).dtype
    hidden = features.hidden.to(dtype)
    memory = CACHED if target.device.type == "cpu" else MEMORY
    known = target.vocab_size if head.token_map is None else len(head.token_map)
    rows = max(1, memory // (4 * known * features.tokens.shape[1]))
    total = features.weights.sum().clamp(min=1e-6)
    for start in range(0, len(features.tokens), rows):
        lines = slice(start, start + rows)
        counted = (features.weights[lines] > 0).any(0).nonzero().flatten().tolist() or [0]
        here = lines, slice(max(0, counted[0] - head.steps - 1), counted[-1] + 1)
        weights = features.weights[here]
        logits = features.logits[here] if features.logits is not None else None
        part = Features(features.tokens[here], hidden[here], weights, logits)
        yield part, float(weights.sum() / total)


def autocast(target: Target) -> torch.autocast:
    """bfloat16 arithmetic on float32 weights if the target is in half precision."""
    half = _half(target)
    return torch.autocast(target.device.type, dtype=torch.bfloat16, enabled=half)


def _half(target: Target) -> bool:
    return target.dtype in (torch.bfloat16, torch.float16)
