"""EAGLE-3 (2503.01840): one layer over fused hidden states of three of the target's layers.

Published layouts: the original one (`midlayer.*`; also as SGLang's SpecForge, AngelSlim and NVIDIA
write it) and that of `speculators` (`layers.0.*`). Version 3.1 adds norms before the fusion
(`norm_before_fc`: one over all, `fc_norm`: one for each) and `norm_output`, which feeds back the
normed state. Layers are counted as inputs (2 is what the third layer reads), in `eagle_config` as
outputs, as SpecForge and NVIDIA write it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from draftproof.cache.kv_cache import KVCache
from draftproof.drafters import published
from draftproof.drafters.base import Vocabulary, over_vocabulary
from draftproof.drafters.features import DEEPEST, Network, PairDrafter
from draftproof.drafters.published import NUMBER, Published
from draftproof.forward.draft_layers import Mask

LAYERS, NESTED = "eagle_aux_hidden_state_layer_ids", "eagle_config"
KNOWN: dict[str, Any] = {
    "norm_before_residual": bool, "norm_before_fc": bool, "fc_norm": bool, "norm_output": bool,
    "logit_scale": NUMBER, "use_aux_hidden_state": bool, LAYERS: list, NESTED: dict,
    # what NVIDIA's eagle_config says of every EAGLE-3 drafter; another value is another network
    "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
    "use_mtp_layernorm": False, "next_layer_regular": True, "parallel_draft_step": 1,
    "parallel_draft_heads_num_layers": 1,
    # what the tensors say
    "draft_vocab_size": int, "target_hidden_size": int, "embed_requires_grad": bool,
}  # fmt: skip


def recognises(settings: Mapping[str, Any]) -> bool:
    """Whether a config.json is one of EAGLE-3."""
    if "speculators_model_type" in settings:
        return bool(settings["speculators_model_type"] == "eagle3")
    named = any("eagle3" in str(name).lower() for name in settings.get("architectures") or ())
    other = "dflash_config" in settings or "block_size" in settings
    return named or ("draft_vocab_size" in settings and not other)


class Eagle3(Network):
    """The weights, by their names in the `speculators` layout."""

    def __init__(self, drafter: Published, vocabulary: Vocabulary, depth: int) -> None:
        layers, settings = drafter.layers, drafter.settings
        super().__init__(layers, vocabulary)
        self.settings, size = settings, self.width
        fuses = settings["use_aux_hidden_state"] is not False
        numbers = settings[LAYERS] or (2, depth // 2, depth - 3)
        outputs = LAYERS in (settings[NESTED] or {})
        read = published.layers_read([number + outputs for number in numbers], depth, drafter.name)
        self.hidden_layers = read if fuses else (-1,)
        first: Any = self.layers[0]
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(first.self_attn, name)
            new = nn.Linear(2 * size, old.out_features, bias=old.bias is not None)
            setattr(first.self_attn, name, new)
        first.hidden_norm, self.norm = layers.norm(size), layers.norm(size)
        each, count = vocabulary.hidden_size, len(self.hidden_layers)
        self.fc = nn.Linear(count * each, size, bias=False) if fuses else None
        self.input_norm = layers.norm(count * each) if settings["norm_before_fc"] else None
        norms = (layers.norm(each) for _ in range(count))
        self.fc_norm = nn.ModuleList(norms) if settings["fc_norm"] else None
        self.lm_head = nn.Linear(size, drafter.vocab_size, bias=False)
        if "embed_tokens.weight" in drafter.tensors:
            self.embed_tokens = nn.Embedding(layers.config.vocab_size, size)
        if not fuses or not hasattr(self, "embed_tokens"):
            published.must_share(drafter, vocabulary)

    def fuse(self, hidden: Tensor) -> Tensor:
        if self.fc is None:
            return hidden[..., 0, :]
        flat = hidden.flatten(-2)
        if self.input_norm is not None:
            flat = self.input_norm(flat)
        if self.fc_norm is not None:
            parts = flat.chunk(len(self.fc_norm), -1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            flat = torch.cat(normed, -1)
        return cast(Tensor, self.fc(flat))

    def forward(
        self, features: Tensor, tokens: Tensor, positions: Tensor, mask: Mask, cache: KVCache
    ) -> tuple[Tensor, Tensor]:
        angles, first = self.parts.angles(features, positions), cast(Any, self.layers[0])
        normed = first.hidden_norm(features)
        both = torch.cat([first.input_layernorm(self.embed(tokens)), normed], -1)
        before = normed if self.settings["norm_before_residual"] else features
        hidden = before + self.parts.attend(0, both, angles, mask, cache)
        hidden = hidden + first.mlp(first.post_attention_layernorm(hidden))
        for number in range(1, len(self.layers)):
            hidden = self.parts.run(number, hidden, angles, mask, cache)
        out = self.norm(hidden)
        return out, out if self.settings["norm_output"] else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.lm_head(hidden) * float(self.settings["logit_scale"] or 1.0)
        return over_vocabulary(logits, self.vocabulary.vocab_size, self.token_map)

    def attention_width(self, number: int) -> int:
        return self.width if number else 2 * self.width


def load(folder: Path, vocabulary: Vocabulary, depth: int) -> PairDrafter:
    """The drafter in a folder, for a target of `depth` layers; raises DrafterMismatch for one that
    is not for it, or has a setting or a tensor that is not known here."""
    drafter = published.read(folder, "EAGLE-3", KNOWN, NESTED)
    mapped = published.token_map(drafter, vocabulary)
    with torch.device("meta"):
        network = Eagle3(drafter, vocabulary, depth)
    network.token_map = mapped
    published.fill(network, drafter.tensors, vocabulary, drafter.name)
    return PairDrafter(network, "eagle3", DEEPEST)
