"""Losses and scores of draft heads: how well they predict the text and the target.

They are the same for every head: step i predicts token t + 2 + i from token t.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from draftproof.core.messages import Features
from draftproof.drafters.base import Vocabulary
from draftproof.drafters.heads import DraftHead


def head_loss(
    head: DraftHead, features: Features, vocabulary: Vocabulary, objective: str = "ce"
) -> Tensor:
    """The sum over steps of decay^(i + 1) times the mean loss over the tokens that count.

    objective: "ce", -log q(token) of the head's distribution q (Medusa, section 2.2), or "kl",
    KL(p || q) from the target's p, for which the features need logits.
    """
    total = features.hidden.new_zeros((), dtype=torch.float32)
    logits, tokens, counted = features.logits, _known(head, features, vocabulary), features.weights
    if head.token_map is not None:          # of what it cannot say it learns nothing
        counted = torch.where(tokens >= 0, counted, 0)
        logits = logits[..., head.token_map] if logits is not None else None
    if objective == "kl":
        assert logits is not None, "it compares with the target's distribution"
        log_p = logits[:, 1:-1].float().log_softmax(-1)                 # steps share it
    for step, draft in enumerate(head.predict(features, vocabulary)):
        labels, weights = tokens[:, step + 2 :].clamp(min=0), counted[:, step + 2 :]
        if objective == "kl":
            p = log_p[:, step:]
            losses = (p.exp() * (p - draft.float().log_softmax(-1))).sum(-1)
        else:
            flat = draft.float().flatten(0, 1)
            losses = F.cross_entropy(flat, labels.flatten(), reduction="none").view_as(labels)
        mean = (losses * weights).sum() / weights.sum().clamp(min=1e-6)
        total = total + head.decay ** (step + 1) * mean
    return total


@torch.no_grad()
def score(head: DraftHead, features: Features, vocabulary: Vocabulary) -> Tensor:
    """[4, steps] sums over the tokens that count: their number, and how often the token was the
    head's
    first choice, among its first five choices, and the first choice of this and all earlier steps.
    Sums of batches can be added."""
    sums, run, tokens = list[Tensor](), None, _known(head, features, vocabulary)
    for step, logits in enumerate(head.predict(features, vocabulary)):
        labels, weights = tokens[:, step + 2 :], features.weights[:, step + 2 :]
        top = logits.topk(min(5, logits.shape[-1]), -1).indices == labels[..., None]    # [B, s, 5]
        first = top[..., 0]
        run = first if run is None else run[:, : first.shape[1]] & first
        hits = torch.stack([torch.ones_like(first), first, top.any(-1), run])
        sums.append((hits * weights).double().sum((1, 2)).cpu())
    return torch.stack(sums, 1)


def _known(head: DraftHead, features: Features, vocabulary: Vocabulary) -> Tensor:
    """[B, S] indices of the tokens in a draft vocabulary; -1 if it lacks them."""
    known = head.token_map
    if known is None:
        return features.tokens
    draft_ids = torch.full((vocabulary.vocab_size,), -1, dtype=torch.int64, device=known.device)
    draft_ids[known] = torch.arange(len(known), device=known.device)
    return draft_ids[features.tokens.clamp(0, vocabulary.vocab_size - 1)]
