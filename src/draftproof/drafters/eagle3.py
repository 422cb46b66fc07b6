"""EAGLE-3 (2503.01840): one layer over fused hidden states of three of the target's layers; and
P-EAGLE (2602.01469), which drafts all tokens in one pass.

Published layouts: the original one (`midlayer.*`; also as SGLang's SpecForge, AngelSlim and NVIDIA
write it) and that of `speculators` (`layers.0.*`). Version 3.1 adds norms before the fusion
(`norm_before_fc`: one over all, `fc_norm`: one for each) and `norm_output`, which feeds back the
normed state. Layers are counted as inputs (2 is what the third layer reads), in `eagle_config` as
outputs, as SpecForge and NVIDIA write it.

P-EAGLE reads mask tokens after the root, all with one learned feature (`mask_hidden`). Each sees
the text and the masks before it.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from draftproof.cache.kv_cache import KVCache
from draftproof.core.messages import Frontier
from draftproof.core.tree import TokenTree
from draftproof.drafters import checkpoint
from draftproof.drafters.base import Vocabulary, over_vocabulary
from draftproof.drafters.checkpoint import ANY, METHOD, NUMBER, Checkpoint, Described, Format
from draftproof.drafters.features import DEEPEST, Network, PairDrafter, Reader, fill
from draftproof.errors import DrafterMismatch
from draftproof.forward.draft_layers import Mask

LAYERS, NESTED = "eagle_aux_hidden_state_layer_ids", "eagle_config"
KNOWN: dict[str, object] = {
    "norm_before_residual": bool, "norm_before_fc": bool, "fc_norm": bool, "norm_output": bool,
    "logit_scale": NUMBER, "use_aux_hidden_state": bool, LAYERS: list,
    # constants of NVIDIA's eagle_config; other values mean another network
    "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
    "use_mtp_layernorm": False, "next_layer_regular": True, "parallel_draft_step": 1,
    "parallel_draft_heads_num_layers": 1, "is_causal": True,
    # redundant with the tensors, or about training
    "draft_vocab_size": int, "target_hidden_size": int, "embed_requires_grad": ANY,
}  # fmt: skip
PARALLEL: dict[str, object] = {
    **KNOWN, "mask_token_id": int, "pard_token": int, "norm_output": False,
}  # fmt: skip
MASKS = 8
"""Tokens that P-EAGLE drafts by default."""


class Eagle3(Network):
    """The weights of EAGLE-3 (arXiv 2503.01840), by their names in the `speculators` layout.

    Args:
        described: Layers and settings of a checkpoint.
        vocabulary: The target.
    """

    def __init__(self, described: Described, vocabulary: Vocabulary) -> None:
        layers, settings = described.layers, described.settings
        super().__init__(layers, vocabulary)
        self.settings, size = settings, self.width
        fuses = settings["use_aux_hidden_state"] is not False
        depth = int(vocabulary.model.config.get_text_config().num_hidden_layers)
        numbers = settings[LAYERS] or (2, depth // 2, depth - 3)
        outputs = LAYERS in (settings.get(NESTED) or {})
        read = [number + outputs for number in numbers]
        known = checkpoint.layers_read(read, vocabulary, described.name)
        self.hidden_layers = known if fuses else (-1,)
        first: Any = self.layers[0]
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(first.self_attn, name)
            new = nn.Linear(2 * size, old.out_features, bias=old.bias is not None)
            setattr(first.self_attn, name, new)
        first.hidden_norm, self.norm = layers.norm(size), layers.norm(size)
        each, count = vocabulary.hidden_size, len(self.hidden_layers)
        if fuses:
            described.must_fuse(vocabulary, count)
        self.fc = nn.Linear(count * each, size, bias=False) if fuses else None
        self.input_norm = layers.norm(count * each) if settings["norm_before_fc"] else None
        norms = (layers.norm(each) for _ in range(count))
        self.fc_norm = nn.ModuleList(norms) if settings["fc_norm"] else None
        self.lm_head = nn.Linear(size, described.vocab_size, bias=False)
        if "embed_tokens.weight" in described.tensors:
            self.embed_tokens = nn.Embedding(layers.config.vocab_size, size)
        if not fuses or not hasattr(self, "embed_tokens"):
            described.must_read(vocabulary)
        if "mask_hidden" in described.tensors:
            shape = described.tensors["mask_hidden"].shape
            self.mask_hidden = nn.Parameter(torch.empty(shape, dtype=torch.float32))

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


class ParallelEagle(PairDrafter):
    """P-EAGLE (arXiv 2602.01469): reads the root and mask tokens in one pass; each predicts a
    token.

    Args:
        network: The weights.
        mask_token: The id of the mask token.
        tokens: Tokens of a draft.
    """

    network: Eagle3

    def __init__(self, network: Eagle3, mask_token: int, tokens: int) -> None:
        super().__init__(network, "p-eagle", tokens)
        self.scratch, self.mask_token = tokens, mask_token

    def reader(self, frontier: Frontier) -> Reader:
        root = frontier.prefix.root[:, None]
        levels = min(self.deepest or 1, frontier.max_draft_tokens)
        masks = torch.full_like(root, self.mask_token).expand(-1, levels - 1)
        count = len(self.network.hidden_layers)
        feature = self.network.fuse(self.network.mask_hidden.view(1, 1, count, -1))
        features = [self.last[: len(root), None], feature.expand(len(root), levels - 1, -1)]
        tree = TokenTree.chain(torch.cat([root, masks], 1))
        cache = self.cache.rows(0, len(root))
        hidden, _ = self._read(cache, torch.cat(features, 1), tree)
        logits = self.network.logits(hidden)

        def read(tree: TokenTree, first: int) -> Tensor:
            nodes = tree.tokens.shape[1] - first
            return logits[:, tree.depth_limit, None].expand(-1, nodes, -1)

        return Reader(read, levels)


def _network(form: Format, source: Checkpoint, target: Vocabulary) -> tuple[Eagle3, Described]:
    described = form.read(source, target)
    mapped = described.token_map(target)
    with torch.device("meta"):
        network = Eagle3(described, target)
    network.token_map = mapped
    fill(network, described.tensors, target, described.name)
    return network, described


def load(source: Checkpoint, target: Vocabulary) -> PairDrafter:
    """The EAGLE-3 drafter in a checkpoint."""
    network, described = _network(EAGLE3, source, target)
    return PairDrafter(network, "eagle3", described.tokens or DEEPEST)


def load_parallel(source: Checkpoint, target: Vocabulary) -> ParallelEagle:
    """The P-EAGLE drafter in a checkpoint."""
    network, described = _network(P_EAGLE, source, target)
    settings, name = described.settings, described.name
    masks = [settings[key] for key in ("mask_token_id", "pard_token") if settings[key] is not None]
    if not masks or not hasattr(network, "mask_hidden"):
        raise DrafterMismatch(
            f"{name} lacks mask_token_id or mask_hidden, which it drafts several tokens at once "
            "with; fetch it again"
        )
    wanted = len(network.hidden_layers) * target.hidden_size
    if network.mask_hidden.numel() != wanted or network.fc is None:
        raise DrafterMismatch(
            f"mask_hidden of {name} has {network.mask_hidden.numel()} numbers, {wanted} were "
            "expected; use one trained for this target"
        )
    table = len(network.embed_tokens.weight) if hasattr(network, "embed_tokens") else 0
    if not 0 <= masks[0] < (table or target.vocab_size):
        raise DrafterMismatch(
            f"{name} masks with token {masks[0]}, and there are {table or target.vocab_size}; use "
            "one trained for this target"
        )
    return ParallelEagle(network, masks[0], described.tokens or MASKS)


def is_parallel(source: Checkpoint) -> bool:
    """Whether a config.json is one of P-EAGLE."""
    if METHOD in source.settings:
        return bool(source.settings[METHOD] == "peagle")
    return any(name.lower().startswith("peagle") for name in source.architectures)


def is_eagle3(source: Checkpoint) -> bool:
    """Whether a config.json is one of EAGLE-3."""
    settings = source.settings
    if METHOD in settings:
        return bool(settings[METHOD] == "eagle3")
    named = any("eagle3" in name.lower() for name in source.architectures)
    other = {"dflash_config", "block_size", "speculator_type"} & settings.keys()
    bare = "draft_vocab_size" in settings and not other and not is_parallel(source)
    return named or bare


EAGLE3 = Format("EAGLE-3 drafter", is_eagle3, load, KNOWN, nested=(NESTED,))
P_EAGLE = Format("P-EAGLE drafter", is_parallel, load_parallel, PARALLEL, nested=(NESTED,))
FORMATS = (EAGLE3, P_EAGLE)
