"""Losses and scores of draft heads: how well their predictions fit the text and the target.

The same for every head: step i predicts token t + 2 + i from token t. p is the target's, q the
draft's. Medusa (2401.10774) trains with cross-entropy; what rejection sampling rejects is the total
variation (Leviathan et al. 2211.17192, corollary 3.6); LK losses are those of 2602.23881.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from draftproof.core.messages import Features
from draftproof.drafters.base import DraftHead, Vocabulary
from draftproof.errors import BadInput

Objective = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Of draft logits [B, s, V], labels [B, s] and the target's log-probabilities, the loss [B, s]."""


def cross_entropy(draft: Tensor, labels: Tensor, target: Tensor | None) -> Tensor:
    """-log q(label): Medusa, section 2.2."""
    loss = F.cross_entropy(draft.flatten(0, 1), labels.flatten(), reduction="none")
    return loss.view_as(labels)


def divergence(draft: Tensor, labels: Tensor, target: Tensor | None) -> Tensor:
    """KL(p || q): distillation."""
    p = _required(target)
    return (p.exp() * (p - draft.log_softmax(-1))).sum(-1)


def total_variation(draft: Tensor, labels: Tensor, target: Tensor | None) -> Tensor:
    """1 - sum min(p, q): the share that rejection sampling rejects."""
    return 1 - _overlap(draft, target)


def negative_log_acceptance(draft: Tensor, labels: Tensor, target: Tensor | None) -> Tensor:
    """-log sum min(p, q): the acceptance's own likelihood (LK losses)."""
    return -_overlap(draft, target).clamp(min=1e-6).log()


def hybrid(draft: Tensor, labels: Tensor, target: Tensor | None) -> Tensor:
    """KL far from the target, TV near it: weight exp(-3 a) on KL at acceptance a (LK losses)."""
    overlap = _overlap(draft, target)
    share = (-3 * overlap.detach()).exp()
    return share * divergence(draft, labels, target) + (1 - share) * (1 - overlap)


OBJECTIVES: dict[str, Objective] = {
    "ce": cross_entropy, "kl": divergence, "tv": total_variation,
    "nla": negative_log_acceptance, "lk": hybrid,
}  # fmt: skip
"""By the names of `--objective`; all but "ce" need the target's logits."""


def head_loss(
    head: DraftHead, features: Features, vocabulary: Vocabulary, objective: str = "ce"
) -> Tensor:
    """The sum over steps of decay^(i + 1) times the mean loss over the tokens that count."""
    total = features.hidden.new_zeros((), dtype=torch.float32)
    logits, tokens, counted = features.logits, _known(head, features, vocabulary), features.weights
    if head.token_map is not None:          # of what it cannot say it learns nothing
        counted = torch.where(tokens >= 0, counted, 0)
        logits = logits[..., head.token_map] if logits is not None else None
    law: Tensor | None = None
    if logits is not None and objective != "ce":            # steps share it
        law = logits[:, 1:-1].float().log_softmax(-1)
    for step, draft in enumerate(head.predict(features, vocabulary)):
        labels, weights = tokens[:, step + 2 :], counted[:, step + 2 :]
        target = law[:, step:] if law is not None else None
        places = OBJECTIVES[objective](draft.float(), labels.clamp(min=0), target)
        mean = (places * weights).sum() / weights.sum().clamp(min=1e-6)
        total = total + head.decay ** (step + 1) * mean
    return total


@dataclass
class Scores:
    """How often a head is right, by step, over the tokens that count; sums, so that batches add up.

    labels: tokens compared. run: those where all steps up to this one were right.
    """

    labels: list[float] = field(default_factory=list)
    top1: list[float] = field(default_factory=list)
    top5: list[float] = field(default_factory=list)
    run: list[float] = field(default_factory=list)

    def _shares(self, hits: list[float]) -> list[float]:
        return [hit / max(count, 1e-9) for hit, count in zip(hits, self.labels, strict=True)]

    @property
    def top1_accuracy(self) -> list[float]:
        return self._shares(self.top1)

    @property
    def top5_accuracy(self) -> list[float]:
        return self._shares(self.top5)

    @property
    def tokens_per_round(self) -> float:
        """Expected tokens per round of a chain of first choices, the target's own included."""
        return 1 + sum(self._shares(self.run))

    def add(self, other: Scores) -> Scores:
        """Both together."""
        pairs = [(getattr(self, one.name), getattr(other, one.name)) for one in fields(self)]
        add = ([a + b for a, b in zip(one, two, strict=True)] if one else two for one, two in pairs)
        return Scores(*add)


@torch.no_grad()
def score(head: DraftHead, features: Features, vocabulary: Vocabulary) -> Scores:
    """Compare what the head predicts with the tokens of the text."""
    scores, run, tokens = Scores(), None, _known(head, features, vocabulary)
    for step, logits in enumerate(head.predict(features, vocabulary)):
        labels, weights = tokens[:, step + 2 :], features.weights[:, step + 2 :]
        top = logits.topk(min(5, logits.shape[-1]), -1).indices == labels[..., None]    # [B, s, 5]
        first = top[..., 0]
        run = first if run is None else run[:, : first.shape[1]] & first
        scores.labels.append(float(weights.sum()))
        for name, hits in (("top1", first), ("top5", top.any(-1)), ("run", run)):
            getattr(scores, name).append(float((hits * weights).sum()))
    return scores


def _known(head: DraftHead, features: Features, vocabulary: Vocabulary) -> Tensor:
    """[B, S] the tokens, by their places in a draft vocabulary; -1 where it lacks them."""
    known = head.token_map
    if known is None:
        return features.tokens
    places = torch.full((vocabulary.vocab_size,), -1, device=known.device)
    return places.index_copy(0, known, torch.arange(len(known), device=known.device))[
        features.tokens.clamp(0, vocabulary.vocab_size - 1)
    ]


def _required(target: Tensor | None) -> Tensor:
    if target is None:
        raise BadInput(
            "this objective compares with the target's distribution; give features with logits, or "
            "use ce"
        )
    return target


def _overlap(draft: Tensor, target: Tensor | None) -> Tensor:
    return torch.minimum(draft.softmax(-1), _required(target).exp()).sum(-1)
