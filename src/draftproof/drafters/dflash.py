"""DFlash (2602.06036): a block of tokens in one pass, from hidden states of several target layers.

Keys and values of the text are made of the target's fused states and kept; the root and mask tokens
behind it attend to them and to each other, and each place says what its token may be. Places do not
know each other's tokens, so what is drawn has the distribution of its place. Version 2 adds
convolutions within the block, and a selector that weighs the likeliest tokens of a place by the one
before.

Published layouts: z-lab's, with its settings in `dflash_config` or beside it, whose layers are
counted as outputs; and that of `speculators`, counted as inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from draftproof.core.messages import Commit, Frontier
from draftproof.core.noise import Role
from draftproof.core.ops import Ops
from draftproof.core.prefix import Paths
from draftproof.core.tree import ABSENT, TokenTree, TreeShape
from draftproof.drafters import beams, weight_files
from draftproof.drafters.base import Drafter, Vocabulary
from draftproof.drafters.dflash_network import DFlashConfig, DFlashNet
from draftproof.drafters.features import WIDTH, fill, token_map
from draftproof.errors import BadInput, DrafterMismatch
from draftproof.model.draft_layers import Mask, layers_of, refuse_unknown, understood
from draftproof.model.kv_cache import KVCache

KNOWN = {
    "block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "causal", "is_causal",
    "use_swa", "swa_window_size", "input_embedding_scale", "output_multiplier", "dflash_config",
    "final_logit_softcapping", "target_hidden_size", "draft_vocab_size", "conv_kernel_size",
    "conv_group_size", "selector_rank", "selector_top_k", "logit_scale",
}  # fmt: skip
FIXED = {
    "is_neox_style": True, "attention_sink_bias": False, "add_swa_attention_sink_bias": False,
    "projector_type": "dflash", "use_aux_hidden_state": True, "shift_label": False,
}  # fmt: skip
"""Settings of which one value alone is read here."""
SPECULATORS = {
    *KNOWN, *FIXED, "aux_hidden_state_layer_ids", "sliding_window_non_causal",
    "transformers_version", "speculators_config", "speculators_model_type", "speculators_version",
    "model_type", "dtype",
    "transformer_layer_config", "architectures", "auto_map", "torch_dtype", "_name_or_path",
    "tie_word_embeddings", "pure_draft_prefix_len", "emb_dim", "gru_hidden_dim", "auf",
    "lambda_base_start", "lambda_base_decay_ratio",
}  # fmt: skip
"""The last five are of another projector, or of training."""
MASK_FILE = "mask_embedding.pt"
"""Where some keep the embedding of the mask token, if the target's has none."""


def recognises(settings: Mapping[str, Any]) -> bool:
    """Whether a config.json is one of DFlash."""
    if "speculators_model_type" in settings:
        return settings["speculators_model_type"] in ("dflash", "dflash2")
    named = any(str(one).startswith("DFlash") for one in settings.get("architectures") or ())
    return named or "dflash_config" in settings


class DFlash(Drafter):
    """Drafts a block: the likeliest nodes of a search through its places, or a chain."""

    name = "dflash"
    reads_every_state = True

    def __init__(self, network: DFlashNet) -> None:
        self.network, self.form = network, network.form
        self.hidden_layers = self.form.hidden_layers
        self.deepest = self.form.block_size - 1
        trees = network.vocabulary.reads_trees
        self.default_budget = max(16, self.deepest) if trees else self.deepest
        self.shapes = network.parts.shapes(lambda _: int(network.parts.config.hidden_size))

    def start(self, rows: int, capacity: int, ops: Ops) -> None:
        super().start(rows, capacity, ops)
        like, places = self.network.vocabulary, capacity + self.form.block_size
        self.cache = KVCache.empty(self.shapes, rows, places, like.dtype, like.device)
        self.rows = 0

    def observe(self, commit: Commit) -> None:
        """Keys and values of the text, from what the target made of it."""
        assert commit.hidden is not None, "it reads the target's hidden states"
        stop, width = commit.rows[-1] + 1, commit.tokens.shape[1]
        self.cache.lengths[self.rows : stop] = 0
        self.rows = max(self.rows, stop)
        cache = self.cache.rows(commit.rows[0], stop)
        features = self.network.fuse(commit.hidden)
        angles = self.network.parts.angles(features, self._positions(cache.lengths, width))
        cache.write_at(0, width)
        for number, layer in enumerate(cache.layers):
            layer.update(*self.network.parts.keys_values(number, features, angles))
        cache.keep(None, commit.count)

    def propose(self, frontier: Frontier) -> TokenTree:
        steps = min(self.form.block_size - 1, frontier.budget)
        hidden = self._block(frontier)[:, 1:]
        logits = self.network.logits(hidden[:, :steps])

        def read(tree: TokenTree, first: int) -> Tensor:
            """Of the next place, given each of the last nodes."""
            place, before = tree.depth_limit, tree.tokens[:, first:].clamp(min=0)
            return self._given(logits[:, place], hidden[:, place], before)

        if frontier.trees and not frontier.drawn and frontier.budget > 1:
            width = min(WIDTH, frontier.budget, logits.shape[-1])
            return beams.likeliest(frontier, read, width, steps)
        return self._chain(frontier, read, steps)

    def select(self, rows: Sequence[int]) -> None:
        self.cache.select(rows)
        self.rows = len(rows)

    def _positions(self, lengths: Tensor, count: int) -> Tensor:
        places = torch.arange(count, device=lengths.device)
        return (lengths[:, None] + places).clamp(max=self.network.vocabulary.context - 1)

    def _block(self, frontier: Frontier) -> Tensor:
        """[B, block, H] the states of the root and the masks behind it."""
        root, size = frontier.prefix.root[:, None], self.form.block_size
        longest = frontier.prefix.longest
        cache = self.cache.rows(0, len(root))
        cache.bound(longest if longest is not None else cache.capacity - size)
        span = cache.write_at(0, size)
        tokens = F.pad(root, (0, size - 1), value=self.form.mask_token)
        dtype = self.network.vocabulary.dtype

        def mask(causal: bool, window: int | None) -> Mask:
            return lambda _: block_mask(cache.lengths, size, span, causal, window, dtype)

        return cast(Tensor, self.network(tokens, self._positions(cache.lengths, size), mask, cache))

    def _given(self, logits: Tensor, hidden: Tensor, before: Tensor) -> Tensor:
        """[B, n, V] of a place with logits [B, V] and state [B, H], behind tokens [B, n]."""
        if self.form.selector is None:
            return logits[:, None].expand(-1, before.shape[1], -1)
        best = logits.topk(min(self.form.selector[1], logits.shape[-1]), -1)
        scores = best.values[:, None] + self.network.candidate_selector(
            hidden, before, best.indices
        )
        whole = logits.new_full((*before.shape, logits.shape[-1]), -torch.inf)
        return whole.scatter(-1, best.indices[:, None].expand_as(scores), scores)

    def _chain(self, frontier: Frontier, read: Any, steps: int) -> TokenTree:
        """Tokens of all places in turn, drawn if that is asked for, with their probabilities."""
        sampler, tokens, probs = frontier.sampler, frontier.prefix.root[:, None], list[Tensor]()
        for place in range(steps):
            tree = TokenTree.chain(tokens)
            logits, paths = read(tree, place), Paths(frontier.prefix, tree, place)
            if frontier.drawn:
                scores = sampler.gumbel_logits(logits, paths, Role.DRAFT)
                best, token = scores.max(-1)
                probs.append(sampler.probs(logits, paths).nan_to_num(0))
            else:
                best, token = (part[..., 0] for part in sampler.best(logits, paths, 1))
            there = (best > -torch.inf) & (tokens[:, -1:] != ABSENT)
            tokens = torch.cat([tokens, torch.where(there, token, ABSENT)], 1)
        drawn = torch.cat([torch.zeros_like(probs[0]), *probs], 1) if probs else None
        return TokenTree.chain(tokens, drawn)


def block_mask(
    lengths: Tensor, size: int, span: int, causal: bool, window: int | None, dtype: torch.dtype
) -> Tensor:
    """[B, 1, size, span] 0 where a place of the block sees a slot: of the text and of the block, up
    to itself if `causal`, no further off than the window."""
    slot = torch.arange(span, device=lengths.device) - lengths[:, None, None]           # [B, 1, S]
    place = torch.arange(size, device=lengths.device)[:, None]
    sees = slot <= place if causal else (slot < size).expand(-1, size, -1)
    if window is not None:
        sees = sees & ((place - slot).abs() < window)
    mask = torch.zeros(sees.shape, dtype=dtype, device=lengths.device)
    return mask.masked_fill_(~sees, torch.finfo(dtype).min)[:, None]


def load(
    folder: Path, vocabulary: Vocabulary, depth: int, shape: TreeShape | None = None
) -> DFlash:
    """The drafter in a folder, for a target of `depth` layers; raises DrafterMismatch for one that
    is not for it, or has a setting or a tensor that is not known here."""
    if shape is not None:
        raise BadInput("a draft tree was given, and DFlash shapes its own; leave it out")
    settings, name = weight_files.read_settings(folder), f"the DFlash drafter {folder.name}"
    inner, own = settings.get("transformer_layer_config"), settings.get("dflash_config") or {}
    refuse_unknown(own, {*KNOWN, *FIXED}, f"the dflash_config of {name}")
    if inner is not None:
        refuse_unknown(settings, SPECULATORS, name)
    merged = {**(inner or {}), **settings, **own}
    for key, value in own.items():
        if value is not None and settings.get(key, value) not in (value, None):
            raise DrafterMismatch(
                f"{name} has {key} = {settings[key]!r:.60}, and {value!r:.60} in its "
                "dflash_config; fetch its config.json again"
            )
    fixed = {key: merged[key] for key, value in FIXED.items() if merged.get(key, value) != value}
    refuse_unknown(fixed, (), name)
    lacking = {"block_size", "mask_token_id"} - {key for key in merged if merged[key] is not None}
    if lacking or not (merged.get("target_layer_ids") or merged.get("aux_hidden_state_layer_ids")):
        what = min(lacking, default="target_layer_ids")
        raise DrafterMismatch(f"{name} does not say its {what}; fetch its config.json again")
    layers = layers_of(inner or settings, () if inner else {*KNOWN, *FIXED}, name)
    with understood(name):
        form = DFlashConfig.of(merged, layers, depth)
    if not hasattr(cast(Any, layers.layers[0]).self_attn, "k_norm"):
        raise DrafterMismatch(f"{name} has layers without norms of heads; it is not loaded")
    whole = weight_files.read_all(folder)
    tensors = {key.removeprefix("model."): one for key, one in whole.items()}
    embedding = tensors.pop("embedding", None)
    if (folder / MASK_FILE).is_file():
        embedding = weight_files.read_file(folder / MASK_FILE)["embedding"]
    if embedding is None and form.mask_token >= vocabulary.vocab_size:
        raise DrafterMismatch(
            f"{name} masks with token {form.mask_token}, {vocabulary.name} has "
            f"{vocabulary.vocab_size}; use one trained for this target"
        )
    tables = {"embed_tokens.weight", "lm_head.weight"} & tensors.keys()
    sizes = {form.target_size} | ({int(layers.config.hidden_size)} if len(tables) < 2 else set())
    if sizes != {vocabulary.hidden_size}:
        raise DrafterMismatch(
            f"{name} reads states of {max(sizes - {vocabulary.hidden_size})} numbers, "
            f"{vocabulary.name} has {vocabulary.hidden_size}; use one trained for this target"
        )
    mapped = token_map(tensors, form.vocab_size, vocabulary, name)
    if mapped is not None and (form.selector is not None or "lm_head.weight" not in tables):
        raise DrafterMismatch(f"{name} maps tokens and has no head for them; fetch it again")
    with torch.device("meta"):
        network = DFlashNet(form, layers, vocabulary, sorted(tables))
    network.token_map = mapped
    fill(network, tensors, vocabulary, name)
    if embedding is not None:
        network.mask_embedding = embedding.flatten().to(vocabulary.device, vocabulary.dtype)
    return DFlash(network)
