"""The network of DFlash (both versions) and DSpark, with the published names of its weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftproof.cache.kv_cache import KVCache
from draftproof.drafters import checkpoint
from draftproof.drafters.base import Vocabulary, over_vocabulary
from draftproof.drafters.checkpoint import Described
from draftproof.drafters.dflash_heads import ConfidenceHead, Convolution, MarkovHead, Selector
from draftproof.drafters.features import Network
from draftproof.forward.draft_layers import Mask, sparse_mlp

INPUTS, OUTPUTS = "aux_hidden_state_layer_ids", "target_layer_ids"
"""Layers of the target, counted by `speculators` as inputs, by others as outputs."""


class DFlashNet(Network):
    """The weights, by their published names.

    Attributes:
        first: The position of the block that predicts the first draft token: 0 if the root predicts
            too (`sample_from_anchor`), else 1.
        predictions: How many positions predict a token.
    """

    mask_embedding: Tensor | None = None

    def __init__(self, described: Described, vocabulary: Vocabulary, from_anchor: bool) -> None:
        layers, settings = described.layers, described.settings
        super().__init__(layers, vocabulary)
        self.settings, size = settings, self.width
        self.first = 0 if from_anchor else 1
        self.predictions = int(settings["block_size"]) - self.first
        self.mask_token = int(settings["mask_token_id"])
        numbers = settings[INPUTS] or [layer + 1 for layer in settings[OUTPUTS]]
        self.hidden_layers = checkpoint.layers_read(numbers, vocabulary, described.name)
        self.causal = _causal(described)
        self.fc = nn.Linear(len(numbers) * vocabulary.hidden_size, size, bias=False)
        self.hidden_norm, self.norm = layers.norm(size), layers.norm(size)
        if "embed_tokens.weight" in described.tensors:
            self.embed_tokens = nn.Embedding(layers.config.vocab_size, size)
        if "lm_head.weight" in described.tensors:
            self.lm_head = nn.Linear(size, described.vocab_size, bias=False)
        if not (hasattr(self, "embed_tokens") and hasattr(self, "lm_head")):
            described.must_read(vocabulary)
        if settings["draft_ffn_type"] == "moe":
            described.require("num_experts", "num_experts_per_tok", "moe_intermediate_size",
                          "shared_expert_intermediate_size")
            for layer in self.layers:
                layer.mlp = sparse_mlp(layers.config, settings)
        self.candidate_selector, self.candidates = None, int(settings["selector_top_k"] or 16)
        if rank := settings["selector_rank"]:
            kernel, group = settings["conv_kernel_size"] or 2, settings["conv_group_size"] or 16
            for layer in self.layers:
                for name in ("attention_conv", "mlp_conv"):
                    setattr(layer, name, Convolution(size, kernel, group))
            self.candidate_selector = Selector(described.vocab_size, size, rank)
        self._add_heads(described)

    def _add_heads(self, described: Described) -> None:
        """The Markov head and the confidence head of DSpark."""
        settings, tensors, size = described.settings, described.tensors, self.width
        rank, kind = settings.get("markov_rank") or 0, settings.get("markov_head_type")
        self.markov_head = self.confidence_head = None
        if rank:
            tables = [tensors.get(f"markov_head.markov_{name}.weight") for name in ("w1", "w2")]
            sizes = [described.vocab_size if table is None else len(table) for table in tables]
            self.markov_head = MarkovHead(
                kind or "vanilla", sizes[0], sizes[1], rank, size,
                {key.removeprefix("markov_head."): True for key in tensors},
            )  # fmt: skip
        self.with_markov = bool(rank) and settings.get("confidence_head_with_markov") is not False
        if settings.get("enable_confidence_head"):
            inputs = size + rank * self.with_markov
            bias = "confidence_head.proj.bias" in tensors
            self.confidence_head = ConfidenceHead(inputs, bias)

    def fuse(self, hidden: Tensor) -> Tensor:
        """[..., H] the inputs of keys and values of the text, from states [..., T, H]."""
        return cast(Tensor, self.hidden_norm(self.fc(hidden.flatten(-2))))

    def embed(self, tokens: Tensor) -> Tensor:
        embedded = super().embed(tokens)
        if self.mask_embedding is not None:
            masked = (tokens == self.mask_token)[..., None]
            embedded = torch.where(masked, self.mask_embedding, embedded)
        return embedded * float(self.settings["input_embedding_scale"] or 1.0)

    def forward(
        self, tokens: Tensor, positions: Tensor, mask: Callable[[bool], Mask], cache: KVCache
    ) -> Tensor:
        """[B, N, H] the normed states of a block of tokens after the cached text.

        mask: by causality, a function of the window."""
        hidden = self.embed(tokens)
        angles = self.parts.angles(hidden, positions)
        for number, module in enumerate(self.layers):
            layer, sees = cast(Any, module), mask(self.causal[number])
            attend = partial(self.parts.attend, number, angles=angles, mask=sees, cache=cache)
            for norm, part, convolution in (
                (layer.input_layernorm, attend, getattr(layer, "attention_conv", None)),
                (layer.post_attention_layernorm, layer.mlp, getattr(layer, "mlp_conv", None)),
            ):
                inputs = norm(hidden)
                made = convolution(inputs, part) if convolution is not None else part(inputs)
                hidden = hidden + made
        return cast(Tensor, self.norm(hidden))

    def scores(self, hidden: Tensor) -> Tensor:
        """[..., D] logits of the draft vocabulary, without the term of the token before."""
        has_head, settings = hasattr(self, "lm_head"), self.settings
        logits = self.lm_head(hidden) if has_head else self.vocabulary.unembed(hidden, raw=True)
        for scale in ("output_multiplier", "logit_scale"):
            logits = logits * float(settings[scale] or 1.0)
        if cap := settings["final_logit_softcapping"]:
            logits = (logits / cap).tanh() * cap
        return cast(Tensor, logits)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._mapped(self.scores(hidden))

    def conditioned(
        self, scores: Tensor, hidden: Tensor, before: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Logits [B, n, V] of a place after tokens `before` [B, n], and the Markov state there.

        Args:
            scores: [B, D] of the place.
            hidden: [B, H] its state.
            before: The tokens of the place before.
            state: [B, n, r] the Markov state before these tokens.
        """
        whole = scores[:, None].expand(-1, before.shape[1], -1)
        if self.markov_head is not None:
            known = before.clamp(max=self.markov_head.markov_w1.num_embeddings - 1)
            added, state = self.markov_head(hidden, known, state)
            lacks = whole.shape[-1] - added.shape[-1]
            added = F.pad(added, (0, lacks)) if lacks > 0 else added[..., : whole.shape[-1]]
            whole = whole + added
        if self.candidate_selector is not None:
            best = scores.topk(min(self.candidates, scores.shape[-1]), -1)
            chosen = best.values[:, None] + self.candidate_selector(hidden, before, best.indices)
            index = best.indices[:, None].expand_as(chosen)
            whole = torch.full_like(whole, -torch.inf).scatter(-1, index, chosen)
        return self._mapped(whole), state

    def confidence(self, hidden: Tensor, before: Tensor) -> Tensor:
        """[B, n] log-probability that the token of a place is accepted, after tokens [B, n]."""
        assert self.confidence_head is not None
        embedded = None
        if self.with_markov and self.markov_head is not None:
            table = self.markov_head.markov_w1
            embedded = table(before.clamp(max=table.num_embeddings - 1))
        return cast(Tensor, self.confidence_head(hidden, embedded, before.shape[1]))

    def _mapped(self, scores: Tensor) -> Tensor:
        return over_vocabulary(scores, self.vocabulary.vocab_size, self.token_map)


def _causal(described: Described) -> list[bool]:
    """Whether each layer is causal within the block; also sets the windows."""
    settings, windows = described.settings, described.layers.windows
    apart = settings["sliding_window_non_causal"]
    if apart is None and settings.get(checkpoint.METHOD) == "dflash2":
        apart = True                                            # that version's default
    causal = [window is not None and not apart for window in windows]
    if settings["use_swa"] and not any(windows):
        window = settings["swa_window_size"] or settings.get("sliding_window")
        described.layers.windows = [window] * len(windows)
    for name in ("causal", "is_causal"):
        if settings[name] is not None:
            return [settings[name]] * len(windows)
    return causal
