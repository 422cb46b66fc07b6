"""Losses and scores of draft heads: how well what was foretold fits the text and the target's own law.

The same for every head: step i foretells token t + 2 + i from token t. Knows logits and labels, nothing of weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from draftproof.core.messages import Features
from draftproof.drafters.base import DraftHead, Vocabulary
from draftproof.errors import BadInput


class Teacher:
    """The target's law at places [B, s, V], worked out when it is first asked for; steps share it with the `whole`."""

    def __init__(self, logits: Tensor, whole: Teacher | None = None, start: int = 0) -> None:
        self.logits, self.whole, self.start = logits, whole, start

    def behind(self, start: int) -> Teacher:
        """From place `start` on."""
        return Teacher(self.logits[:, start:], self, start)

    @cached_property
    def log_probs(self) -> Tensor:
        return self.logits.log_softmax(-1) if self.whole is None else self.whole.log_probs[:, self.start :]

    @cached_property
    def probs(self) -> Tensor:
        return self.logits.softmax(-1) if self.whole is None else self.whole.probs[:, self.start :]


Objective = Callable[[Tensor, Tensor, Teacher | None], Tensor]
"""From draft logits [B, s, V], labels [B, s] and the target's law there to a loss of each place [B, s]."""


def cross_entropy(draft: Tensor, labels: Tensor, target: Teacher | None) -> Tensor:
    """-log q(label): Medusa (2401.10774), section 2.2."""
    return F.cross_entropy(draft.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)


def divergence(draft: Tensor, labels: Tensor, target: Teacher | None) -> Tensor:
    """KL(p || q), distillation: p the target's law, q the draft's."""
    p = _known(target).log_probs
    return (p.exp() * (p - draft.log_softmax(-1))).sum(-1)


def total_variation(draft: Tensor, labels: Tensor, target: Teacher | None) -> Tensor:
    """1 - sum min(p, q): what rejection sampling rejects (Leviathan et al. 2211.17192, corollary 3.6)."""
    return 1 - _overlap(draft, target)


def negative_log_acceptance(draft: Tensor, labels: Tensor, target: Teacher | None) -> Tensor:
    """-log sum min(p, q): the acceptance's own likelihood (LK losses, 2602.23881)."""
    return -_overlap(draft, target).clamp(min=1e-6).log()


def hybrid(draft: Tensor, labels: Tensor, target: Teacher | None) -> Tensor:
    """KL far from the target, TV near it: weight exp(-3 a) on KL at acceptance a (LK losses, 2602.23881)."""
    overlap = _overlap(draft, target)
    share = (-3 * overlap.detach()).exp()
    return share * divergence(draft, labels, target) + (1 - share) * (1 - overlap)


OBJECTIVES: dict[str, Objective] = {
    "ce": cross_entropy,
    "kl": divergence,
    "tv": total_variation,
    "nla": negative_log_acceptance,
    "lk": hybrid,
}
"""By the names training knows; all but "ce" need the target's logits."""


def head_loss(head: DraftHead, features: Features, vocabulary: Vocabulary, objective: str = "ce") -> Tensor:
    """The sum over steps of decay^(i + 1) times the mean loss over the tokens that count."""
    total = features.hidden.new_zeros((), dtype=torch.float32)
    whole = Teacher(features.logits[:, 1:-1].float()) if features.logits is not None else None
    for step, logits in enumerate(head.predict(features, vocabulary)):
        labels, weights = features.tokens[:, step + 2 :], features.weights[:, step + 2 :]
        teacher = whole.behind(step) if whole is not None else None
        places = OBJECTIVES[objective](logits.float(), labels.clamp(min=0), teacher)
        total = total + head.decay ** (step + 1) * (places * weights).sum() / weights.sum().clamp(min=1e-6)
    return total


@dataclass
class Scores:
    """How often a head is right, over the tokens that count; sums, so that batches add up.

    tried, top1, top5: per step. run: places where all steps up to this one were right, of `run_tried`.
    """

    tried: list[float] = field(default_factory=list)
    top1: list[float] = field(default_factory=list)
    top5: list[float] = field(default_factory=list)
    run: list[float] = field(default_factory=list)
    run_tried: list[float] = field(default_factory=list)

    @property
    def top1_accuracy(self) -> list[float]:
        return [hits / max(tries, 1e-9) for hits, tries in zip(self.top1, self.tried, strict=True)]

    @property
    def top5_accuracy(self) -> list[float]:
        return [hits / max(tries, 1e-9) for hits, tries in zip(self.top5, self.tried, strict=True)]

    @property
    def tokens_per_round(self) -> float:
        """Expected tokens per round of a chain of first choices, the target's own token included."""
        return 1 + sum(hits / max(tries, 1e-9) for hits, tries in zip(self.run, self.run_tried, strict=True))

    def add(self, other: Scores) -> Scores:
        """Both together."""
        names = ("tried", "top1", "top5", "run", "run_tried")
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in names}
        return Scores(**{
            name: [a + b for a, b in zip(mine, theirs, strict=True)] if mine else list(theirs)
            for name, (mine, theirs) in pairs.items()
        })


@torch.no_grad()
def score(head: DraftHead, features: Features, vocabulary: Vocabulary) -> Scores:
    """Compare what the head foretells with the tokens of the text."""
    found = Scores()
    right: Tensor | None = None
    for step, logits in enumerate(head.predict(features, vocabulary)):
        labels, weights = features.tokens[:, step + 2 :], features.weights[:, step + 2 :]
        best = logits.topk(min(5, logits.shape[-1]), -1).indices == labels[..., None]               # [B, s, 5]
        found.tried.append(float(weights.sum()))
        found.top1.append(float((best[..., 0] * weights).sum()))
        found.top5.append(float((best.any(-1) * weights).sum()))
        right = best[..., 0] if right is None else right[:, : best.shape[1]] & best[..., 0]
        found.run.append(float((right * weights).sum()))
        found.run_tried.append(float(weights.sum()))
    return found


def _known(target: Teacher | None) -> Teacher:
    if target is None:
        raise BadInput("this objective compares with the target's law; give features with logits, or use the objective ce")
    return target


def _overlap(draft: Tensor, target: Teacher | None) -> Tensor:
    return torch.minimum(draft.softmax(-1), _known(target).probs).sum(-1)
