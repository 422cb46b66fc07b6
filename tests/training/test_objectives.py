"""Each objective is its formula, over the tokens a head can say, and lowers what it claims to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import VOCAB, target
from torch import Tensor
from training_helpers import Recorder, head_of, trainable, trainer_of, written

from draftproof.core.messages import Features
from draftproof.drafters.losses import head_loss, score
from draftproof.training.heads import read
from draftproof.training.rows import Batches

OBJECTIVES = {
    "ce": lambda p, q, label: -q.log()[label],
    "kl": lambda p, q, label: (p * (p.log() - q.log())).sum(),
}
"""What each is, of the target's distribution p and the draft's q over the tokens of the head."""


def features_of(rows: int) -> Features:
    """What the target makes of texts it wrote."""
    with torch.no_grad():
        return read(target(), Batches(written(), rows, 0)[0], head_of("medusa"), logits=True)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("few", [False, True], ids=["all tokens", "a draft vocabulary"])
def test_the_loss_is_the_decayed_sum_over_steps_of_its_formula(name: str, few: bool) -> None:
    """Of a draft vocabulary: over its tokens alone, and nothing is learnt of the others."""
    head, known, features = head_of("medusa"), torch.arange(VOCAB), features_of(4)
    if few:
        known = torch.arange(0, VOCAB, 3).flip(0)
        head.limit_vocabulary(known, target())
    assert features.logits is not None
    total, missed = torch.zeros(()), 0
    for step, logits in enumerate(head.predict(features, target())):
        losses = list[Tensor]()
        for row, place in features.weights[:, step + 2 :].nonzero().tolist():
            label = (known == features.tokens[row, place + step + 2]).nonzero().flatten()
            if len(label) == 0:
                missed += 1
                continue
            p = features.logits[row, place + step + 1, known].float().softmax(-1)
            q = logits[row, place].float().softmax(-1)
            losses.append(OBJECTIVES[name](p, q, int(label)))
        total = total + head.decay ** (step + 1) * sum(losses) / len(losses)
    assert bool(missed) == few
    loss = head_loss(head, features, target(), name)
    weights = [parameter for parameter in head.parameters() if parameter.requires_grad]
    torch.testing.assert_close(loss, total, rtol=1e-4, atol=0)
    for ours, theirs in zip(torch.autograd.grad(loss, weights),
                            torch.autograd.grad(total, weights), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    assert score(head, features, target())[0, 0] == float(features.weights[:, 2:].sum())


@pytest.mark.parametrize("name", OBJECTIVES)
def test_training_reduces_the_loss_and_raises_acceptance(tmp_path: Path, name: str) -> None:
    """On texts the target wrote: its loss falls, and drafts are accepted more often."""
    head, recorder, features = head_of("medusa"), Recorder(), features_of(24)
    assert features.logits is not None

    @torch.no_grad()
    def acceptance() -> float:
        (first, *_) = head.predict(features, target())
        counts = features.weights[:, 2:]
        overlap = torch.minimum(first.softmax(-1), features.logits[:, 1:-1].softmax(-1)).sum(-1)
        return float((overlap * counts).sum() / counts.sum())

    before = acceptance()
    trainer_of(tmp_path, trainable(head, name), recorder, steps=60, learning_rate=1e-2).fit()
    assert sum(recorder.losses[-6:]) < 0.95 * sum(recorder.losses[:6])
    assert acceptance() > before + 0.03
