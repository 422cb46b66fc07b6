"""Each objective: its gradient is that of its formula, and it lowers what it claims to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import VOCAB, target
from torch import Tensor
from training_helpers import Recorder, head_of, trainable, trainer_of, written

from draftproof.drafters.losses import OBJECTIVES, head_loss, score
from draftproof.training.heads import read
from draftproof.training.rows import Batches

CLAIMS = {
    "ce": lambda p, q, label: -q.log().gather(-1, label[..., None])[..., 0],
    "kl": lambda p, q, label: (p * (p.log() - q.log())).sum(-1),
    "tv": lambda p, q, label: 0.5 * (p - q).abs().sum(-1),
    "nla": lambda p, q, label: -(1 - 0.5 * (p - q).abs().sum(-1)).log(),
}
"""What each says it is, of the target's distribution p and the draft's q."""


def problem(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    dice = torch.Generator().manual_seed(seed)
    draft, teacher = (torch.randn(2, 3, 7, generator=dice, dtype=torch.float64) * 2
                      for _ in range(2))
    return draft.requires_grad_(), torch.randint(7, (2, 3), generator=dice), teacher


@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradients_are_those_of_the_formula(name: str) -> None:
    draft, labels, teacher = problem()
    log_p = teacher.log_softmax(-1)
    if name != "lk":                                     # its weight is held fixed on purpose
        loss = lambda logits: OBJECTIVES[name](logits, labels, log_p)  # noqa: E731
        assert torch.autograd.gradcheck(loss, (draft,))
        p, q = teacher.softmax(-1), draft.softmax(-1)
        assert torch.allclose(OBJECTIVES[name](draft, labels, log_p), CLAIMS[name](p, q, labels))
        return
    overlap = torch.minimum(draft.softmax(-1), teacher.softmax(-1)).sum(-1).detach()
    weight = (-3 * overlap).exp()
    (mine,) = torch.autograd.grad(OBJECTIVES["lk"](draft, labels, log_p).sum(), draft)
    kl, tv = (OBJECTIVES[part](draft, labels, log_p) for part in ("kl", "tv"))
    parts = weight * kl + (1 - weight) * tv
    (theirs,) = torch.autograd.grad(parts.sum(), draft)
    assert torch.allclose(mine, theirs)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_loss_is_the_decayed_sum_over_steps_to_the_bit(name: str) -> None:
    """Steps share what they make of the target's logits; here each works it out."""
    head = head_of("medusa")
    with torch.no_grad():
        features = read(target(), Batches(written(), 4, 0)[0], head, logits=True)
    assert features.logits is not None
    alone = torch.zeros((), dtype=torch.float32)
    for step, logits in enumerate(head.predict(features, target())):
        labels, weights = features.tokens[:, step + 2 :], features.weights[:, step + 2 :]
        teacher = features.logits[:, step + 1 : -1].float().log_softmax(-1)
        places = OBJECTIVES[name](logits.float(), labels.clamp(min=0), teacher)
        mean = (places * weights).sum() / weights.sum().clamp(min=1e-6)
        alone = alone + head.decay ** (step + 1) * mean
    assert step >= 1 and torch.equal(head_loss(head, features, target(), name), alone)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_draft_vocabulary_learns_nothing_of_other_tokens(name: str) -> None:
    """The loss over its tokens alone, of the target's law given that one of them comes."""
    head, known = head_of("medusa"), torch.arange(0, VOCAB, 3).flip(0)
    head.limit_vocabulary(known, target())
    with torch.no_grad():
        features = read(target(), Batches(written(), 4, 0)[0], head, logits=True)
    assert features.logits is not None
    total, missed = 0.0, 0
    for step, logits in enumerate(head.predict(features, target())):
        given = 0.0, 0.0
        for row, place in features.weights[:, step + 2 :].nonzero().tolist():
            token = int(features.tokens[row, place + step + 2])
            if token % 3:
                missed += 1
                continue
            label = (known == token).nonzero()[0]
            law = features.logits[row, place + step + 1, known].float()[None]
            draft = logits[row, place][None, None].float()
            loss = OBJECTIVES[name](draft, label[None], law.log_softmax(-1)[None])
            given = given[0] + loss.item(), given[1] + 1
        total += head.decay ** (step + 1) * given[0] / max(given[1], 1e-6)
    assert missed and head_loss(head, features, target(), name).item() == pytest.approx(total, 1e-4)
    scores = score(head, features, target())
    assert scores.labels[0] == float(features.weights[:, 2:].sum())      # what is missed counts


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_head_trained_by_it_comes_nearer(tmp_path: Path, name: str) -> None:
    """On texts the target wrote: its loss falls, and drafts are accepted more often."""
    head, recorder = head_of("medusa"), Recorder()
    batch = Batches(written(), 24, 0)[0]
    with torch.no_grad():
        features = read(target(), batch, head, logits=True)
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
