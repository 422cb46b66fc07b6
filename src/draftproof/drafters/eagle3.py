"""EAGLE-3 (2503.01840): one layer over fused hidden states of three of the target's layers.

Published layouts: the original one (`midlayer.*`; also as SGLang's SpecForge, AngelSlim and NVIDIA
write it) and that of `speculators` (`layers.0.*`). Version 3.1 adds norms before the fusion
(`norm_before_fc`: one over all, `fc_norm`: one for each) and `norm_output`, which feeds back the
normed state. Layers are counted as inputs (2 is what the third layer reads), in `eagle_config` as
outputs, as SpecForge and NVIDIA write it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from draftproof.core.tree import TreeShape
from draftproof.drafters import weight_files
from draftproof.drafters.base import Vocabulary, over_vocabulary
from draftproof.drafters.features import FeatureDrafter, Network, fill, token_map
from draftproof.errors import DrafterMismatch
from draftproof.model.draft_layers import (
    DraftLayers,
    Mask,
    layers_of,
    refuse_unknown,
    switch,
    understood,
)
from draftproof.model.kv_cache import KVCache

LAYERS = "eagle_aux_hidden_state_layer_ids"
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
KNOWN = {
    *FLAGS, "draft_vocab_size", "target_hidden_size", "logit_scale", "use_aux_hidden_state",
    LAYERS, "eagle_config",
}  # fmt: skip
FIXED = {
    "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
    "use_mtp_layernorm": False, "next_layer_regular": True, "parallel_draft_step": 1,
    "parallel_draft_heads_num_layers": 1,
}  # fmt: skip
"""What NVIDIA's `eagle_config` says of every EAGLE-3 drafter; another value is another network."""
SPECULATORS = {
    *FLAGS, "draft_vocab_size", "target_hidden_size", LAYERS,
    "embed_requires_grad", "speculators_config", "speculators_model_type", "speculators_version",
    "transformer_layer_config", "tie_word_embeddings", "architectures", "auto_map", "torch_dtype",
    "dtype", "transformers_version", "model_type", "_name_or_path",
}  # fmt: skip


def recognises(settings: Mapping[str, Any]) -> bool:
    """Whether a config.json is one of EAGLE-3."""
    if "speculators_model_type" in settings:
        return bool(settings["speculators_model_type"] == "eagle3")
    named = any("eagle3" in str(one).lower() for one in settings.get("architectures") or ())
    other = "dflash_config" in settings or "block_size" in settings
    return named or ("draft_vocab_size" in settings and not other)


@dataclass(frozen=True)
class Eagle3Config:
    """hidden_layers: of the target, fused; the last state alone, unfused, if `fused` is False."""

    hidden_layers: tuple[int, ...]
    target_size: int
    draft_vocab_size: int
    fused: bool = True
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    logit_scale: float = 1.0

    @classmethod
    def of(cls, settings: dict[str, Any], layers: DraftLayers, depth: int) -> Eagle3Config:
        """From a config.json, for a target of `depth` layers."""
        inner = dict(settings.get("eagle_config") or {})
        strange = {key: value for key, value in inner.items() if FIXED.get(key, value) != value}
        refuse_unknown(strange, (), "the eagle_config of the drafter")
        refuse_unknown(inner, {*KNOWN, *FIXED}, "the eagle_config of the drafter")
        if outputs := inner.get(LAYERS):
            inner[LAYERS] = [int(one) + 1 for one in outputs]
        values = {**settings, **inner}
        flags = {name: bool(switch(values, name)) for name in FLAGS}
        fused = bool(switch(values, "use_aux_hidden_state", True))
        numbers = values.get(LAYERS) or (2, depth // 2, depth - 3)
        numbers = tuple(int(one) for one in numbers) if fused else (-1,)
        if fused and not all(0 <= one <= depth for one in numbers):
            raise DrafterMismatch(
                f"the drafter reads layers {numbers}, the target has {depth}; it is for another "
                "model"
            )
        config = layers.config
        return cls(
            numbers, int(values.get("target_hidden_size") or config.hidden_size),
            int(values.get("draft_vocab_size") or config.vocab_size), fused, **flags,
            logit_scale=float(values.get("logit_scale") or 1.0),
        )  # fmt: skip


class Eagle3(Network):
    """The weights, by their names in the `speculators` layout."""

    token_map: Tensor | None = None
    """The target's id of each row of the head, if it does not know all tokens."""

    def __init__(
        self, form: Eagle3Config, layers: DraftLayers, vocabulary: Vocabulary, embeds: bool
    ) -> None:
        super().__init__(layers, vocabulary)
        config, self.form = layers.config, form
        size, fused = int(config.hidden_size), len(form.hidden_layers) * form.target_size
        self.hidden_layers, self.width = form.hidden_layers, size
        first: Any = self.layers[0]
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(first.self_attn, name)
            new = nn.Linear(2 * size, old.out_features, bias=old.bias is not None)
            setattr(first.self_attn, name, new)
        first.hidden_norm = layers.norm(size)
        if form.fused:
            self.fc = nn.Linear(fused, size, bias=False)
        if form.norm_before_fc:
            self.input_norm = layers.norm(fused)
        if form.fc_norm:
            each = form.hidden_layers
            self.fc_norm = nn.ModuleList(layers.norm(form.target_size) for _ in each)
        self.norm = layers.norm(size)
        self.lm_head = nn.Linear(size, form.draft_vocab_size, bias=False)
        if embeds:
            self.embed_tokens = nn.Embedding(config.vocab_size, size)

    def fuse(self, hidden: Tensor) -> Tensor:
        if not self.form.fused:
            return hidden[..., 0, :]
        flat = hidden.flatten(-2)
        if self.form.norm_before_fc:
            flat = self.input_norm(flat)
        if self.form.fc_norm:
            parts = torch.split(flat, self.form.target_size, -1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            flat = torch.cat(normed, -1)
        return cast(Tensor, self.fc(flat))

    def forward(
        self, features: Tensor, tokens: Tensor, positions: Tensor, mask: Mask, cache: KVCache
    ) -> tuple[Tensor, Tensor]:
        own = hasattr(self, "embed_tokens")
        embedded = self.embed_tokens(tokens) if own else self.vocabulary.embed(tokens, raw=True)
        angles, first = self.parts.angles(features, positions), cast(Any, self.layers[0])
        normed = first.hidden_norm(features)
        both = torch.cat([first.input_layernorm(embedded), normed], -1)
        before = normed if self.form.norm_before_residual else features
        hidden = before + self.parts.attend(0, both, angles, mask, cache)
        hidden = hidden + first.mlp(first.post_attention_layernorm(hidden))
        for number in range(1, len(self.layers)):
            hidden = self.parts.run(number, hidden, angles, mask, cache)
        out = self.norm(hidden)
        return out, out if self.form.norm_output else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.lm_head(hidden) * self.form.logit_scale
        return over_vocabulary(logits, self.vocabulary.vocab_size, self.token_map)

    def attention_width(self, number: int) -> int:
        return self.width if number else 2 * self.width


def load(
    folder: Path, vocabulary: Vocabulary, depth: int, shape: TreeShape | None = None
) -> FeatureDrafter:
    """The drafter in a folder, for a target of `depth` layers; raises DrafterMismatch for one that
    is not for it, or has a setting or a tensor that is not known here."""
    settings, name = weight_files.read_settings(folder), f"the EAGLE-3 drafter {folder.name}"
    inner = settings.get("transformer_layer_config")
    if inner is not None:
        refuse_unknown(settings, SPECULATORS, name)
    layers = layers_of(inner or settings, () if inner else KNOWN, name)
    kinds = getattr(layers.config, "layer_types", None) or ()
    sliding = kinds.count("sliding_attention")
    if sliding and not any(layers.windows):
        raise DrafterMismatch(
            f"{name} has sliding layers and does not say their window; fetch its config.json again"
        )
    with understood(name):
        form = Eagle3Config.of(settings, layers, depth)
    tensors = _renamed(weight_files.read_all(folder))
    embeds = "embed_tokens.weight" in tensors
    size, wants = vocabulary.hidden_size, {form.target_size}
    if not (embeds and form.fused):
        wants.add(int(layers.config.hidden_size))
    if wants != {size}:
        raise DrafterMismatch(
            f"{name} reads states of {max(wants - {size})} numbers, {vocabulary.name} has {size}; "
            "use one trained for this target"
        )
    if not embeds and settings.get("embed_requires_grad"):
        raise DrafterMismatch(f"{name} lacks the embeddings it was trained with; fetch it again")
    with torch.device("meta"):
        network = Eagle3(form, layers, vocabulary, embeds)
    network.token_map = token_map(tensors, form.draft_vocab_size, vocabulary, name)
    fill(network, tensors, vocabulary, name)
    return FeatureDrafter(network, "eagle3", shape)


def _renamed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    names = {key: key.removeprefix("model.").replace("midlayer.", "layers.0.") for key in tensors}
    return {new: tensors[old] for old, new in names.items() if "rotary_emb." not in new}
