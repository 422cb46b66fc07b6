"""Medusa-2: the backbone learns along, or stays what it was, and is merged and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import fresh
from torch import Tensor
from training_helpers import Recorder, deterministic_rows, head_of, trainer_of, written

from draftproof.drafters.losses import head_loss
from draftproof.model.target import Target
from draftproof.training import joint
from draftproof.training.joint import HeadsAndBackbone
from draftproof.training.rows import Batches

pytest.importorskip("peft")


def both_of() -> HeadsAndBackbone:
    where = Target(fresh("llama").requires_grad_(False))
    return HeadsAndBackbone(head_of("medusa"), where, "ce")


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(Batches(written(), 4, 0)[0].tokens).logits
    return out


def test_adapters_sit_at_every_linear_layer_but_the_head() -> None:
    both = both_of()
    adapted = {name.split(".lora_A")[0].split(".", 2)[-1] for name,
               _ in both.adapted.named_parameters() if "lora_A" in name}
    linear = {name for name,
              module in fresh("llama").named_modules() if isinstance(module, torch.nn.Linear)}
    assert adapted == linear - {"lm_head"} and len(adapted) == 14
    heads, backbone = both.param_groups()
    assert backbone["factor"] == 0.25 and "factor" not in heads and len(backbone["params"]) == 28


def test_the_gradient_is_that_of_the_whole_loss_in_one_piece(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """L_backbone + lambda * sum of 0.8^k L_k, in slices, halted at the hidden states."""
    monkeypatch.setattr(joint, "DROPOUT", 0.0)
    both, plain = both_of(), both_of()
    for item in (both, plain):                           # where the backbone has learnt already
        torch.manual_seed(7)
        for name, parameter in item.adapted.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.02)
    batch = written().batch(range(6), 32)
    loss = both.backward(batch)
    features = plain.features(batch)
    with torch.no_grad(), plain.adapted.disable_adapter():
        teacher = plain.features(batch).logits
    assert features.logits is not None and teacher is not None
    before, now = (x[:, :-1].log_softmax(-1) for x in (teacher, features.logits))
    apart = (before.exp() * (before - now)).sum(-1)
    whole = (apart * features.weights[:, 1:]).sum() / features.weights[:, 1:].sum()
    assert whole > 1e-4
    whole = whole + 0.2 * head_loss(plain.head, features, plain.target)
    whole.backward()  # type: ignore[no-untyped-call]
    assert torch.allclose(loss.double(), whole.double(), rtol=1e-4)
    for mine, theirs in zip(both.param_groups(), plain.param_groups(), strict=True):
        for item, other in zip(mine["params"], theirs["params"], strict=True):
            assert torch.allclose(item.grad, other.grad, rtol=1e-3, atol=1e-6)


def test_the_backbone_stays_near_what_it_was_and_is_merged(tmp_path: Path) -> None:
    """Merged it says what it said adapted; with the adapters off it is the original to the bit."""
    recorder, both = Recorder(), both_of()
    config = {"texts": deterministic_rows, "steps": 60, "learning_rate": 1e-2}
    trainer_of(tmp_path, both, recorder, **config).fit()
    first, last = recorder.evaluations[0], recorder.evaluations[-1]
    assert last.loss < 0.7 * first.loss and sum(last.top1) > sum(first.top1) + 0.3
    assert last.backbone_kl is not None and 0 < last.backbone_kl < 0.3
    adapted = logits(both.adapted)
    with both.adapted.disable_adapter():
        assert torch.equal(logits(both.adapted), logits(fresh("llama")))
    assert not torch.equal(adapted, logits(fresh("llama")))
    merged = both.merged()
    assert torch.allclose(logits(merged), adapted, atol=1e-9)
    assert type(merged) is type(fresh("llama"))
    assert not any("lora" in name for name in merged.state_dict())


def test_the_backbone_learns_at_its_own_rate(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, both_of(), steps=2)
    trainer.fit()
    heads, backbone = torch.load(trainer.checkpoint)["optimizer"]["param_groups"]
    assert heads["lr"] == trainer.log[-1]["rate"] > 0
    assert backbone["lr"] == pytest.approx(heads["lr"] / 4)
