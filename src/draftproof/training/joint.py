"""Medusa-2: heads and backbone learn together (arXiv 2401.10774, section 2.2.2). Knows peft.

The backbone learns through low-rank adapters, held to what it was by the loss of a language model or, better, by its own
law with the adapters off. It becomes another model, with respect to which decoding is lossless afterwards.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftproof.core.messages import Features
from draftproof.drafters.base import DraftHead
from draftproof.errors import BadInput
from draftproof.model.loading import PreTrainedModel
from draftproof.model.target import Target
from draftproof.training.heads import backward, examined, learnt, precision
from draftproof.training.rows import Batch
from draftproof.training.trainer import Exam, ProcessGroup

RANK, ALPHA, DROPOUT = 32, 16, 0.05
"""Of the adapters, which sit at every linear layer but the LM head."""
SLOWER = 0.25
"""The backbone's learning rate, relative to the heads'."""
TWO_STAGES, ONE_STAGE = 0.2, 0.01
"""What the heads' loss counts: all the time behind a first stage of heads alone; or at the end of a sine from nothing."""


@dataclass(frozen=True)
class Together:
    """How backbone and heads share a loss. distil: keep the backbone's own law; otherwise learn the texts."""

    distil: bool = True
    one_stage: bool = False

    def heads(self, progress: float) -> float:
        """What the heads' loss counts at this point of the run."""
        return ONE_STAGE * math.sin(progress * math.pi / 2) if self.one_stage else TWO_STAGES


class Joint:
    """A head and, by adapters in its place, the target's own model. Implements `training.trainer.Subject`."""

    def __init__(self, head: DraftHead, target: Target, together: Together, objective: str) -> None:
        self.head, self.target, self.together, self.objective = head, target, together, objective
        self.adapted = _adapted(target.model)

    def groups(self) -> list[ProcessGroup]:
        heads = [parameter for parameter in self.head.parameters() if parameter.requires_grad]
        backbone = [parameter for parameter in self.adapted.parameters() if parameter.requires_grad]
        return [ProcessGroup(heads), ProcessGroup(backbone, SLOWER)]

    def backward(self, batch: Batch, share: float, progress: float) -> Tensor:
        """The heads' gradient stops at the hidden states, and goes on from there with the backbone's own."""
        own = self._teacher(batch) if self.together.distil else None
        _dropout(self.adapted, True)
        with precision(self.target):
            features = self._features(batch)
            loss = self._backbone_loss(features, own) * share
        _dropout(self.adapted, False)
        hidden = features.hidden.detach().requires_grad_()
        assert features.logits is not None
        seen = replace(features, hidden=hidden, logits=features.logits.detach() if self.objective != "ce" else None)
        heads = backward(self.head, seen, self.target, self.objective, share * self.together.heads(progress))
        torch.autograd.backward([loss, features.hidden], [None, hidden.grad])
        return loss.detach() + heads

    @torch.no_grad()
    def examine(self, batches: Sequence[Batch]) -> Exam:
        """The heads, and how far the backbone is from what it was: figures in nats per token."""
        exam = examined(self.head, self.target, self.objective, self._read, batches)
        sums = {"backbone_loss": 0.0, "original_loss": 0.0, "backbone_kl": 0.0}
        size = sum(batch.size for batch in batches)
        for batch in batches:
            with precision(self.target):
                features, own = self._features(batch), self._teacher(batch)
                before = replace(features, logits=own)
                losses = (_text_loss(features), _text_loss(before), _law_loss(features, own))
            for name, loss in zip(sums, losses, strict=True):
                sums[name] += float(loss) * batch.size / size
        return exam._replace(figures=sums)

    def state(self) -> dict[str, Tensor]:
        backbone = {f"backbone.{name}": value for name, value in learnt(self.adapted).items()}
        return backbone | {f"head.{name}": value for name, value in learnt(self.head).items()}

    def restore(self, state: dict[str, Tensor]) -> None:
        for prefix, module in (("backbone.", self.adapted), ("head.", self.head)):
            part = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
            module.load_state_dict(part, strict=False)

    def merged(self) -> PreTrainedModel:
        """The new model, adapters folded into its weights."""
        merged: PreTrainedModel = self.adapted.merge_and_unload()
        return merged.eval()

    def _features(self, batch: Batch) -> Features:
        device = self.target.device
        return self.target.features(batch.tokens.to(device), batch.weights.to(device), hidden_layers=self.head.hidden_layers, logits=True)

    def _read(self, batch: Batch) -> Features:
        found = self._features(batch)
        return found if self.objective != "ce" else replace(found, logits=None)

    @torch.no_grad()
    def _teacher(self, batch: Batch) -> Tensor:
        """[B, S, V] what the target said before it learnt anything."""
        with self.adapted.disable_adapter(), precision(self.target):
            logits = self._features(batch).logits
        assert logits is not None
        return logits

    def _backbone_loss(self, features: Features, own: Tensor | None) -> Tensor:
        return _text_loss(features) if own is None else _law_loss(features, own)


def _text_loss(features: Features) -> Tensor:
    """-log p of the tokens that count, each foretold from the one before."""
    assert features.logits is not None
    logits, labels = features.logits[:, :-1].float(), features.tokens[:, 1:]
    places = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    return _mean(places, features.weights)


def _law_loss(features: Features, own: Tensor) -> Tensor:
    """KL(before || now) of the token behind each place whose next one counts."""
    assert features.logits is not None
    before, now = own[:, :-1].float().log_softmax(-1), features.logits[:, :-1].float().log_softmax(-1)
    return _mean((before.exp() * (before - now)).sum(-1), features.weights)


def _mean(places: Tensor, weights: Tensor) -> Tensor:
    return (places * weights[:, 1:]).sum() / weights[:, 1:].sum().clamp(min=1e-6)


def need_peft() -> None:
    """Say so at once if it is missing."""
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise BadInput("training the backbone needs peft; install draftproof[train]") from error


def _adapted(model: PreTrainedModel) -> Any:
    """The model with fresh adapters in it, all else frozen; the draw of their weights is always the same."""
    need_peft()
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=DROPOUT, target_modules="all-linear", task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)               # peft asks transformers by names that grow old
        adapted = get_peft_model(model, config)
    for parameter in adapted.parameters():
        if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()
    return adapted.eval()


def _dropout(adapted: Any, on: bool) -> None:
    """The adapters' dropout alone; the backbone's own layers stay as they decode."""
    for name, module in adapted.named_modules():
        if name.endswith("lora_dropout.default"):
            module.train(on)
