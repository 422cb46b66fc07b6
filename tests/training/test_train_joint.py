"""Medusa-2: the backbone learns along, stays what it was where it is told to, and can be merged and gone on with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lessons import Silent, head_of, ruled, trainer_of, written
from tiny import fresh
from torch import Tensor

from draftproof.drafters.losses import head_loss
from draftproof.model.target import Target
from draftproof.training import joint
from draftproof.training.joint import Joint, Together
from draftproof.training.rows import Batches

pytest.importorskip("peft")


def joint_of(together: Together | None = None, objective: str = "ce") -> Joint:
    where = Target(fresh("llama").requires_grad_(False))
    return Joint(head_of("medusa", where), where, together or Together(), objective)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(Batches(written(), 4, 0)[0].tokens).logits
    return out


def test_with_adapters_off_it_is_the_original_to_the_bit(tmp_path: Path) -> None:
    both = joint_of()
    trainer_of(tmp_path, both, texts=ruled, steps=8, rate=1e-2).fit()
    assert not torch.equal(logits(both.adapted), logits(fresh("llama")))
    with both.adapted.disable_adapter():
        assert torch.equal(logits(both.adapted), logits(fresh("llama")))


def test_adapters_sit_at_every_linear_layer_but_the_head() -> None:
    both = joint_of()
    adapted = {name.split(".lora_A")[0].split(".", 2)[-1] for name, _ in both.adapted.named_parameters() if "lora_A" in name}
    linear = {name for name, module in fresh("llama").named_modules() if isinstance(module, torch.nn.Linear)}
    plain = linear - {"lm_head"}
    assert adapted == plain and len(plain) == 14
    heads, backbone = both.groups()
    assert heads.factor == 4 * backbone.factor and len(backbone.parameters) == 28


def test_the_gradient_is_that_of_the_whole_loss_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices, and the halt at the hidden states, change nothing: L_backbone + lambda * sum of 0.8^k L_k."""
    monkeypatch.setattr(joint, "DROPOUT", 0.0)
    both, plain = joint_of(Together(distil=False)), joint_of(Together(distil=False))
    batch = written().batch(range(6), 32)
    loss = both.backward(batch, 0.5, 0.3)
    features = plain._features(batch)
    labels = features.tokens[:, 1:]
    assert features.logits is not None
    text = -features.logits[:, :-1].log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    whole = (text * features.weights[:, 1:]).sum() / features.weights[:, 1:].sum()
    whole = 0.5 * (whole + 0.2 * head_loss(plain.head, features, plain.target))
    whole.backward()  # type: ignore[no-untyped-call]
    assert torch.allclose(loss.double(), whole, rtol=1e-5)
    for mine, theirs in zip(both.groups(), plain.groups(), strict=True):
        for one, other in zip(mine.parameters, theirs.parameters, strict=True):
            assert one.grad is not None and other.grad is not None
            assert torch.allclose(one.grad, other.grad, rtol=1e-3, atol=1e-6)


def test_distilled_the_backbone_stays_and_the_heads_improve(tmp_path: Path) -> None:
    watch = Silent()
    trainer_of(tmp_path, joint_of(Together(distil=True)), watch, texts=ruled, steps=60, rate=1e-2).fit()
    first, last = watch.exams[0], watch.exams[-1]
    assert last.loss < 0.7 * first.loss and sum(last.top1) > sum(first.top1) + 0.3
    original = last.figures["original_loss"]
    assert original > 3 and abs(last.figures["backbone_loss"] - original) < 0.15 * original
    assert 0 < last.figures["backbone_kl"] < 0.3


def test_taught_the_texts_the_backbone_learns_them(tmp_path: Path) -> None:
    """The test before this one would otherwise pass for a backbone that cannot move."""
    watch = Silent()
    trainer_of(tmp_path, joint_of(Together(distil=False)), watch, texts=ruled, steps=60, rate=1e-2).fit()
    last = watch.exams[-1]
    assert last.figures["backbone_loss"] < 0.5 * last.figures["original_loss"] and last.figures["backbone_kl"] > 0.5


def test_merged_it_says_what_the_adapted_model_said(tmp_path: Path) -> None:
    both = joint_of(Together(distil=False))
    trainer_of(tmp_path, both, texts=ruled, steps=6, rate=1e-2).fit()
    before = logits(both.adapted)
    merged = both.merged()
    assert torch.allclose(logits(merged), before, atol=1e-9) and type(merged) is type(fresh("llama"))
    assert not any("lora" in name for name in merged.state_dict())


def test_a_joint_run_that_dies_and_goes_on_ends_at_the_same_bits(tmp_path: Path) -> None:
    """Dropout of the adapters included."""
    whole, resumed = joint_of(), joint_of()
    trainer_of(tmp_path / "whole", whole, steps=10).fit()
    with pytest.raises(SystemExit):
        trainer_of(tmp_path / "broken", joint_of(), Silent(stop_at=6), steps=10, save_minutes=0).fit()
    watch = Silent()
    trainer_of(tmp_path / "broken", resumed, watch, steps=10).fit()
    assert watch.begun[0] == 5
    mine, theirs = whole.state(), resumed.state()
    assert mine.keys() == theirs.keys() and any("lora_B" in name for name in mine)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_in_one_stage_the_heads_count_more_and_more() -> None:
    once, twice = Together(one_stage=True), Together()
    assert [once.heads(progress) for progress in (0.0, 0.5, 1.0)] == pytest.approx([0, 0.01 * 0.5**0.5, 0.01])
    assert twice.heads(0.0) == twice.heads(1.0) == 0.2
