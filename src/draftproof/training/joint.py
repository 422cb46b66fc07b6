"""Medusa-2: trains heads and backbone together (arXiv 2401.10774, section 2.2.2). Knows peft.

The backbone is trained through low-rank adapters, distilled from itself without the adapters. It
becomes another model, for which decoding is lossless afterwards.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from draftproof.core.messages import Features
from draftproof.drafters.heads import DraftHead
from draftproof.model.target import Target
from draftproof.training.heads import Evaluation, FrozenTarget, autocast, backward, read, trained
from draftproof.training.rows import Batch

if TYPE_CHECKING:
    from peft import PeftModel

    from draftproof.model.loading import PreTrainedModel

DROPOUT = 0.05
"""The dropout of the adapters, which sit at every linear layer but the LM head."""
BACKBONE_RATE = 0.25
"""The backbone's learning rate, relative to the heads'."""
HEADS_WEIGHT = 0.2
"""The weight of the heads' loss, after a first stage that trains the heads alone."""


class HeadsAndBackbone(FrozenTarget):
    """A head and the target's own model, which is no longer frozen but has adapters."""

    def __init__(self, head: DraftHead, target: Target, objective: str) -> None:
        super().__init__(head, target, objective)
        self.adapted = _adapted(target.model)

    def param_groups(self) -> list[dict[str, Any]]:
        backbone = list(trained(self.adapted).values())
        return [*super().param_groups(), {"params": backbone, "factor": BACKBONE_RATE}]

    def backward(self, batch: Batch) -> Tensor:
        """The heads' gradient stops at the hidden states; the backbone adds its own from there."""
        teacher = self._original_logits(batch)
        _set_dropout(self.adapted, True)
        with autocast(self.target):
            features = self.features(batch)
            loss = _kl(features, teacher)
        _set_dropout(self.adapted, False)
        hidden = features.hidden.detach().requires_grad_()
        logits = _logits(features).detach() if self.objective != "ce" else None
        detached = replace(features, hidden=hidden, logits=logits)
        heads = backward(self.head, detached, self.target, self.objective, HEADS_WEIGHT)
        torch.autograd.backward([loss, features.hidden], [None, hidden.grad])
        return loss.detach() + heads

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> Evaluation:
        """Evaluate the heads, and the distance of the backbone from the original."""
        kl, size = 0.0, sum(batch.loss_tokens for batch in batches)
        for batch in batches:
            with autocast(self.target):
                apart = float(_kl(self.features(batch), self._original_logits(batch)))
            kl += apart * batch.loss_tokens / size
        return super().evaluate(batches)._replace(backbone_kl=kl)

    def state(self) -> dict[str, Tensor]:
        state = {f"backbone.{name}": p.detach() for name, p in trained(self.adapted).items()}
        return state | {f"head.{name}": p.detach() for name, p in trained(self.head).items()}

    def restore(self, state: dict[str, Tensor]) -> None:
        for prefix, module in (("backbone.", self.adapted), ("head.", self.head)):
            names = [name for name in state if name.startswith(prefix)]
            part = {name.removeprefix(prefix): state[name] for name in names}
            module.load_state_dict(part, strict=False)

    def merged(self) -> PreTrainedModel:
        """The new model, with the adapters merged into its weights."""
        merged: PreTrainedModel = self.adapted.merge_and_unload()
        return merged.eval()

    def features(self, batch: Batch) -> Features:
        """The features of a batch, with gradients if these are enabled."""
        return read(self.target, batch, self.head, logits=True)

    @torch.no_grad()
    def _original_logits(self, batch: Batch) -> Tensor:
        """[B, S, V] the logits of the target before training."""
        with self.adapted.disable_adapter(), autocast(self.target):
            return _logits(self.features(batch))


def _logits(features: Features) -> Tensor:
    assert features.logits is not None
    return features.logits


def _kl(features: Features, teacher: Tensor) -> Tensor:
    """The mean KL(teacher || now) over the tokens in the loss."""
    before, now = (x[:, :-1].float().log_softmax(-1) for x in (teacher, _logits(features)))
    losses, weights = (before.exp() * (before - now)).sum(-1), features.weights[:, 1:]
    return (losses * weights).sum() / weights.sum().clamp(min=1e-6)


def _adapted(model: PreTrainedModel) -> PeftModel:
    """Add fresh adapters to the model, always the same ones, and freeze everything else."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=32, lora_alpha=16, lora_dropout=DROPOUT, target_modules="all-linear",
                        task_type="CAUSAL_LM")  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)                   # peft uses old names
        adapted = get_peft_model(model, config)
    for parameter in trained(adapted).values():
        if parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()
    return adapted.eval()


def _set_dropout(adapted: PeftModel, on: bool) -> None:
    """Switch the adapters' dropout alone; the backbone's layers stay in evaluation mode."""
    for name, module in adapted.named_modules():
        if name.endswith("lora_dropout.default"):
            module.train(on)
