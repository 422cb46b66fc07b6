"""What DFlash computes: its form, and its network. See `dflash`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftproof.drafters.base import Vocabulary, over_vocabulary
from draftproof.errors import DrafterMismatch
from draftproof.model.draft_layers import DraftLayers, Mask, switch
from draftproof.model.kv_cache import KVCache


@dataclass(frozen=True)
class DFlashConfig:
    """hidden_layers: of the target, as transformers counts them. causal, windows: of each layer.
    selector: rank and candidates, and convolutions: kernel and group, of version 2."""

    hidden_layers: tuple[int, ...]
    target_size: int
    block_size: int
    mask_token: int
    causal: tuple[bool, ...]
    windows: tuple[int | None, ...]
    vocab_size: int
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None
    selector: tuple[int, int] | None = None
    convolution: tuple[int, int] | None = None

    @classmethod
    def of(cls, settings: dict[str, Any], layers: DraftLayers, depth: int) -> DFlashConfig:
        """From all settings, merged, for a target of `depth` layers."""
        config, count = layers.config, len(layers.layers)
        numbers = settings.get("aux_hidden_state_layer_ids")
        if numbers is None:
            numbers = [int(one) + 1 for one in settings["target_layer_ids"]]
        said = settings.get("num_target_layers") or depth
        if said != depth or not all(0 <= int(one) <= depth for one in numbers):
            raise DrafterMismatch(
                f"the drafter reads layers {list(numbers)} of {said}, the target has {depth}; it "
                "is for another model"
            )
        sliding = [kind == "sliding_attention" for kind in getattr(config, "layer_types", None) or
                   ["full_attention"] * count]  # fmt: skip
        agree(settings, "causal", "is_causal")
        causal = list(sliding)
        if switch(settings, "sliding_window_non_causal"):
            causal = [False] * count
        for name in ("causal", "is_causal"):
            if (said_so := switch(settings, name, None)) is not None:
                causal = [said_so] * count
        slides = switch(settings, "use_swa", any(sliding))
        if any(sliding) and not slides:
            raise DrafterMismatch(
                "use_swa of the drafter is false, and it has sliding layers; fetch it again"
            )
        sliding = [True] * count if slides and not any(sliding) else sliding
        if any(sliding):
            agree(settings, "swa_window_size", "sliding_window")
        window = int(settings.get("swa_window_size") or settings.get("sliding_window") or 0)
        if any(sliding) and not window:
            raise DrafterMismatch(
                "the drafter has sliding layers and does not say their window; fetch it again"
            )
        second, cap = settings.get("selector_rank"), settings.get("final_logit_softcapping")
        ours = ("selector_top_k", "conv_kernel_size", "conv_group_size")
        if not second and (alone := next((name for name in ours if settings.get(name)), None)):
            raise DrafterMismatch(
                f"the drafter has {alone}, and no selector_rank, as version 2 has; fetch it again"
            )
        return cls(
            tuple(int(one) for one in numbers),
            int(settings.get("target_hidden_size") or config.hidden_size),
            int(settings["block_size"]), int(settings["mask_token_id"]), tuple(causal),
            tuple(window if one else None for one in sliding),
            int(settings.get("draft_vocab_size") or config.vocab_size),
            float(settings.get("input_embedding_scale") or 1.0),
            float(settings.get("output_multiplier") or 1.0)
            * float(settings.get("logit_scale") or 1.0),
            float(cap) if cap else None,
            (int(second), int(settings.get("selector_top_k") or 16)) if second else None,
            (int(settings.get("conv_kernel_size") or 2), int(settings.get("conv_group_size") or 16))
            if second else None,
        )  # fmt: skip


def agree(settings: Mapping[str, Any], one: str, other: str) -> None:
    """Refuse two settings that say the same thing differently."""
    values = [settings[name] for name in (one, other) if settings.get(name) is not None]
    if len(values) == 2 and values[0] != values[1]:
        raise DrafterMismatch(
            f"the drafter has {one} = {values[0]!r} and {other} = {values[1]!r}; fetch it again"
        )


class Convolution(nn.Module):
    """Two causal convolutions over the block, before and after a part of a layer, whose kernels are
    the same for all places but for what a projection of the inputs adds for each group."""

    def __init__(self, size: int, kernel: int, group: int) -> None:
        super().__init__()
        self.kernel, self.group = kernel, group
        self.base_kernel = nn.Parameter(torch.empty(2, kernel, size))
        self.kernel_projection = nn.Linear(size, 2 * kernel * (size // group), bias=False)

    def before(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The inputs [B, N, H] convolved, and what is added to the kernel after it."""
        shape = (*hidden.shape[:2], 2, self.kernel, -1)
        added = self.kernel_projection(hidden).view(shape)              # [B, N, 2, kernel, groups]
        return self.over(hidden, added[:, :, 0], 0), added[:, :, 1]

    def over(self, hidden: Tensor, added: Tensor, number: int) -> Tensor:
        """[B, N, H] the sum over the places before of what they hold times the kernel here."""
        whole = torch.zeros_like(hidden)
        for back in range(min(self.kernel, hidden.shape[1])):
            weight = self.base_kernel[number, back] + added[:, :, back].repeat_interleave(
                self.group, -1
            )
            whole = whole + F.pad(hidden, (0, 0, back, 0))[:, : hidden.shape[1]] * weight
        return whole


class Selector(nn.Module):
    """What a token adds to the logit of one behind it, at a place: <A(a) * W h, B(b)>."""

    def __init__(self, vocab_size: int, size: int, rank: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.hidden_projection = nn.Linear(size, rank, bias=False)

    def forward(self, hidden: Tensor, before: Tensor, tokens: Tensor) -> Tensor:
        """[B, n, K] for `tokens` [B, K] of a place with state [B, H] behind `before` [B, n]."""
        context = self.predecessor_codebook[before] * self.hidden_projection(hidden)[:, None]
        return cast(Tensor, context @ self.successor_codebook[tokens].transpose(1, 2))


class DFlashNet(nn.Module):
    """The weights, by their published names."""

    token_map: Tensor | None = None
    mask_embedding: Tensor | None = None

    def __init__(
        self, form: DFlashConfig, layers: DraftLayers, vocabulary: Vocabulary,
        own: Sequence[str] = (),
    ) -> None:  # fmt: skip
        super().__init__()
        self.form, self.parts, self.vocabulary = form, layers, vocabulary
        size = int(layers.config.hidden_size)
        self.layers = nn.ModuleList(layers.layers)
        self.fc = nn.Linear(len(form.hidden_layers) * form.target_size, size, bias=False)
        self.hidden_norm, self.norm = layers.norm(size), layers.norm(size)
        if "embed_tokens.weight" in own:
            self.embed_tokens = nn.Embedding(layers.config.vocab_size, size)
        if "lm_head.weight" in own:
            self.lm_head = nn.Linear(size, form.vocab_size, bias=False)
        if form.convolution is not None:
            for layer in self.layers:
                for name in ("attention_conv", "mlp_conv"):
                    setattr(layer, name, Convolution(size, *form.convolution))
        if form.selector is not None:
            self.candidate_selector = Selector(form.vocab_size, size, form.selector[0])

    def fuse(self, hidden: Tensor) -> Tensor:
        """[..., H] what keys and values of the text are made of, from states [..., T, H]."""
        return cast(Tensor, self.hidden_norm(self.fc(hidden.flatten(-2))))

    def embed(self, tokens: Tensor) -> Tensor:
        own = hasattr(self, "embed_tokens")
        embedded = self.embed_tokens(tokens) if own else self.vocabulary.embed(tokens, raw=True)
        if self.mask_embedding is not None:
            masked = (tokens == self.form.mask_token)[..., None]
            embedded = torch.where(masked, self.mask_embedding, embedded)
        return cast(Tensor, embedded * self.form.embed_scale)

    def forward(self, tokens: Tensor, positions: Tensor, mask: Any, cache: KVCache) -> Tensor:
        """[B, N, H] the normed states of a block of tokens behind what the cache holds.

        mask: by causality, a function of the window."""
        hidden = self.embed(tokens)
        angles = self.parts.angles(hidden, positions)
        for number, one in enumerate(self.layers):
            layer, form = cast(Any, one), self.form
            seen: Mask = mask(form.causal[number], form.windows[number])
            for part, normed in (("attention", layer.input_layernorm),
                                 ("mlp", layer.post_attention_layernorm)):  # fmt: skip
                inputs, added = normed(hidden), None
                if form.convolution is not None:
                    inputs, added = getattr(layer, f"{part}_conv").before(inputs)
                attends = part == "attention"
                out = self.parts.attend(number, inputs, angles, seen, cache) if attends else (
                    layer.mlp(inputs)
                )
                if added is not None:
                    out = getattr(layer, f"{part}_conv").over(out, added, 1)
                hidden = hidden + out
        return cast(Tensor, self.norm(hidden))

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V] over the target's tokens."""
        own = hasattr(self, "lm_head")
        logits = self.lm_head(hidden) if own else self.vocabulary.unembed(hidden, raw=True)
        logits = logits * self.form.logit_scale
        if cap := self.form.logit_cap:
            logits = (logits / cap).tanh() * cap
        return over_vocabulary(logits, self.vocabulary.vocab_size, self.token_map)
