"""DFlash (2602.06036): a block of tokens in one pass, from hidden states of several target layers.

Keys and values of the text are made of the target's fused states and kept; the root and mask tokens
after it attend to them and to each other, and each place says what its token may be. Places do not
know each other's tokens, so what is drawn has the distribution of its place. Version 2 adds
convolutions within the block, and a selector that weighs the likeliest tokens of a place by the one
before.

Published layouts: z-lab's, with its settings in `dflash_config` or next to it, whose layers are
counted as outputs; and that of `speculators`, counted as inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftproof.cache.kv_cache import KVCache
from draftproof.core.messages import Commit, Frontier
from draftproof.core.tree import TokenTree
from draftproof.drafters import beams, published, weight_files
from draftproof.drafters.base import Vocabulary, over_vocabulary
from draftproof.drafters.features import FeatureDrafter, Network
from draftproof.drafters.published import NUMBER, Published
from draftproof.errors import DrafterMismatch
from draftproof.forward.draft_layers import Mask

NESTED, INPUTS, OUTPUTS = "dflash_config", "aux_hidden_state_layer_ids", "target_layer_ids"
KNOWN: dict[str, Any] = {
    "block_size": int, "mask_token_id": int, OUTPUTS: list, INPUTS: list, NESTED: dict,
    "num_target_layers": int, "causal": bool, "is_causal": bool, "sliding_window_non_causal": bool,
    "use_swa": bool, "swa_window_size": int, "input_embedding_scale": NUMBER,
    "output_multiplier": NUMBER, "logit_scale": NUMBER, "final_logit_softcapping": NUMBER,
    "conv_kernel_size": int, "conv_group_size": int, "selector_rank": int, "selector_top_k": int,
    # another value is another network
    "is_neox_style": True, "attention_sink_bias": False, "add_swa_attention_sink_bias": False,
    "projector_type": "dflash", "use_aux_hidden_state": True, "shift_label": False,
    # what the tensors say, and settings of another projector or of training
    "target_hidden_size": int, "draft_vocab_size": int, **dict.fromkeys((
        "pure_draft_prefix_len", "emb_dim", "gru_hidden_dim", "auf", "lambda_base_start",
        "lambda_base_decay_ratio"), object),
}  # fmt: skip
MASK_FILE = "mask_embedding.pt"
"""Where some keep the embedding of the mask token, if the target's has none."""


def recognises(settings: Mapping[str, Any]) -> bool:
    """Whether a config.json is one of DFlash."""
    if "speculators_model_type" in settings:
        return settings["speculators_model_type"] in ("dflash", "dflash2")
    named = any(str(name).startswith("DFlash") for name in settings.get("architectures") or ())
    return named or NESTED in settings


class DFlash(FeatureDrafter):
    """Drafts a block: each place says at once what its token may be."""

    network: DFlashNet

    def __init__(self, network: DFlashNet) -> None:
        self.scratch = int(network.settings["block_size"])
        super().__init__(network, "dflash", self.scratch - 1)

    def observe(self, commit: Commit) -> None:
        """Keys and values of the text, from what the target made of it."""
        (cache, features), width = self.fused(commit), commit.tokens.shape[1]
        angles = self.network.parts.angles(features, self._positions(cache.lengths, width))
        cache.write_at(0, width)
        for number, layer in enumerate(cache.layers):
            layer.update(*self.network.parts.keys_values(number, features, angles))
        cache.keep(None, commit.count)

    def reader(self, frontier: Frontier) -> tuple[beams.Read, int]:
        levels = min(self.scratch - 1, frontier.budget)
        hidden = self._block(frontier.prefix.root[:, None])[:, 1:]
        logits = self.network.logits(hidden[:, :levels])

        def read(tree: TokenTree, first: int) -> Tensor:
            """Of the next place, given each of the last nodes."""
            place, before = tree.depth_limit, tree.tokens[:, first:].clamp(min=0)
            return self.network.rescored(logits[:, place], hidden[:, place], before)

        return read, levels

    def _positions(self, lengths: Tensor, count: int) -> Tensor:
        places = torch.arange(count, device=lengths.device)
        return (lengths[:, None] + places).clamp(max=self.network.vocabulary.context - 1)

    def _block(self, root: Tensor) -> Tensor:
        """[B, block, H] the states of the roots [B, 1] and the masks after them."""
        cache, size = self.cache.rows(0, len(root)), self.scratch
        dtype = self.network.vocabulary.dtype
        span = cache.write_at(0, size)
        tokens = F.pad(root, (0, size - 1), value=self.network.mask_token)
        mask = partial(partial, block_mask, cache.lengths, size, span, dtype)
        return cast(Tensor, self.network(tokens, self._positions(cache.lengths, size), mask, cache))


def block_mask(
    lengths: Tensor, size: int, span: int, dtype: torch.dtype, causal: bool, window: int | None
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


class DFlashNet(Network):
    """The weights, by their published names."""

    mask_embedding: Tensor | None = None

    def __init__(self, drafter: Published, vocabulary: Vocabulary, depth: int) -> None:
        layers, settings = drafter.layers, drafter.settings
        super().__init__(layers, vocabulary)
        self.settings, size = settings, self.width
        self.mask_token = int(settings["mask_token_id"])
        numbers = settings[INPUTS] or [index + 1 for index in settings[OUTPUTS]]
        self.hidden_layers = published.layers_read(numbers, depth, drafter.name)
        self.causal = _causal(drafter)
        self.fc = nn.Linear(len(numbers) * vocabulary.hidden_size, size, bias=False)
        self.hidden_norm, self.norm = layers.norm(size), layers.norm(size)
        if "embed_tokens.weight" in drafter.tensors:
            self.embed_tokens = nn.Embedding(layers.config.vocab_size, size)
        if "lm_head.weight" in drafter.tensors:
            self.lm_head = nn.Linear(size, drafter.vocab_size, bias=False)
        if not (hasattr(self, "embed_tokens") and hasattr(self, "lm_head")):
            published.must_share(drafter, vocabulary)
        self.candidate_selector, self.candidates = None, int(settings["selector_top_k"] or 16)
        if rank := settings["selector_rank"]:
            kernel, group = settings["conv_kernel_size"] or 2, settings["conv_group_size"] or 16
            for layer in self.layers:
                for name in ("attention_conv", "mlp_conv"):
                    setattr(layer, name, Convolution(size, kernel, group))
            self.candidate_selector = Selector(drafter.vocab_size, size, rank)

    def fuse(self, hidden: Tensor) -> Tensor:
        """[..., H] what keys and values of the text are made of, from states [..., T, H]."""
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
        """[B, N, H] the normed states of a block of tokens after what the cache holds.

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

    def logits(self, hidden: Tensor) -> Tensor:
        has_head, settings = hasattr(self, "lm_head"), self.settings
        logits = self.lm_head(hidden) if has_head else self.vocabulary.unembed(hidden, raw=True)
        for scale in ("output_multiplier", "logit_scale"):
            logits = logits * float(settings[scale] or 1.0)
        if cap := settings["final_logit_softcapping"]:
            logits = (logits / cap).tanh() * cap
        return over_vocabulary(logits, self.vocabulary.vocab_size, self.token_map)

    def rescored(self, logits: Tensor, hidden: Tensor, before: Tensor) -> Tensor:
        """[B, n, V] of a place with logits [B, V] and state [B, H], after tokens [B, n]."""
        spread = logits[:, None].expand(-1, before.shape[1], -1)
        if self.candidate_selector is None:
            return spread
        best = logits.topk(min(self.candidates, logits.shape[-1]), -1)
        scores = best.values[:, None] + self.candidate_selector(hidden, before, best.indices)
        index = best.indices[:, None].expand_as(scores)
        return torch.full_like(spread, -torch.inf).scatter(-1, index, scores)


def _causal(drafter: Published) -> list[bool]:
    """Of each layer, whether a place of the block sees none after it; the windows are set."""
    settings, windows = drafter.settings, drafter.layers.windows
    apart = settings["sliding_window_non_causal"]
    causal = [window is not None and not apart for window in windows]
    if settings["use_swa"] and not any(windows):
        window = settings["swa_window_size"] or settings.get("sliding_window")
        drafter.layers.windows = [window] * len(windows)
    for name in ("causal", "is_causal"):
        if settings[name] is not None:
            return [settings[name]] * len(windows)
    return causal


class Convolution(nn.Module):
    """Two causal convolutions over the block, before and after a part of a layer, whose kernels are
    the same for all places but for what a projection of the inputs adds for each group."""

    def __init__(self, size: int, kernel: int, group: int) -> None:
        super().__init__()
        self.kernel, self.group = kernel, group
        self.base_kernel = nn.Parameter(torch.empty(2, kernel, size, dtype=torch.float32))
        self.kernel_projection = nn.Linear(size, 2 * kernel * (size // group), bias=False)

    def forward(self, hidden: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
        """[B, N, H] what a part makes of convolved inputs [B, N, H], convolved."""
        shape = (*hidden.shape[:2], 2, self.kernel, -1)
        added = self.kernel_projection(hidden).view(shape)              # [B, N, 2, kernel, groups]
        kernels = self.base_kernel + added.repeat_interleave(self.group, -1)
        return _convolved(part(_convolved(hidden, kernels[:, :, 0])), kernels[:, :, 1])


def _convolved(hidden: Tensor, kernels: Tensor) -> Tensor:
    """[B, N, H] the sum over the places before of what they hold times the kernel here."""
    size = hidden.shape[1]
    back = range(min(kernels.shape[2], size))
    moved = [F.pad(hidden, (0, 0, shift, 0))[:, :size] * kernels[:, :, shift] for shift in back]
    return torch.stack(moved).sum(0)


class Selector(nn.Module):
    """What a token adds to the logit of one after it, at a place: <A(a) * W h, B(b)>."""

    def __init__(self, vocab_size: int, size: int, rank: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, rank, dtype=torch.float32))
        self.successor_codebook = nn.Parameter(torch.empty(vocab_size, rank, dtype=torch.float32))
        self.hidden_projection = nn.Linear(size, rank, bias=False)

    def forward(self, hidden: Tensor, before: Tensor, tokens: Tensor) -> Tensor:
        """[B, n, K] for `tokens` [B, K] of a place with state [B, H] after `before` [B, n]."""
        context = self.predecessor_codebook[before] * self.hidden_projection(hidden)[:, None]
        return cast(Tensor, context @ self.successor_codebook[tokens].transpose(1, 2))


def _must_agree(drafter: Published, outer: Mapping[str, Any]) -> None:
    """Refuse settings that contradict each other. outer: those outside of `dflash_config`."""
    settings, slides = drafter.settings, any(drafter.layers.windows)
    pairs = [(key, value, f"{key} outside of {NESTED}", outer.get(key))
             for key, value in (settings[NESTED] or {}).items()]  # fmt: skip
    pairs += [("causal", settings["causal"], "is_causal", settings["is_causal"]),
              ("use_swa", settings["use_swa"], "sliding layers", slides or None)]  # fmt: skip
    if slides or settings["use_swa"]:
        pairs += [("swa_window_size", settings["swa_window_size"],
                   "sliding_window", settings.get("sliding_window"))]  # fmt: skip
    if not settings["selector_rank"]:
        second = ("selector_top_k", "conv_kernel_size", "conv_group_size")
        pairs += [(key, settings[key], "selector_rank", 0) for key in second]
    for name, value, other, against in pairs:
        if value is not None and against is not None and value != against:
            raise DrafterMismatch(
                f"{drafter.name} has {name} = {value!r:.60} and {other} = {against!r:.60}, which "
                "do not go together; fetch its config.json again"
            )


def load(folder: Path, vocabulary: Vocabulary, depth: int) -> DFlash:
    """The drafter in a folder, for a target of `depth` layers; raises DrafterMismatch for one that
    is not for it, or has a setting or a tensor that is not known here."""
    drafter = published.read(folder, "DFlash", KNOWN, NESTED)
    name, settings, tensors = drafter.name, drafter.settings, drafter.tensors
    numbers = OUTPUTS if settings[INPUTS] is None else INPUTS
    for key in ("block_size", "mask_token_id", numbers):
        if not settings[key] and settings[key] != 0:
            raise DrafterMismatch(f"{name} does not say its {key}; fetch its config.json again")
    if settings["num_target_layers"] not in (None, depth):
        raise DrafterMismatch(
            f"{name} is for a model of {settings['num_target_layers']} layers, the target has "
            f"{depth}; use one trained for this target"
        )
    _must_agree(drafter, weight_files.read_settings(folder))
    if not hasattr(cast(Any, drafter.layers.layers[0]).self_attn, "k_norm"):
        raise DrafterMismatch(f"{name} has layers without norms of heads; it is not loaded")
    embedding, mapped = tensors.pop("embedding", None), published.token_map(drafter, vocabulary)
    if mapped is not None and ("lm_head.weight" not in tensors or settings["selector_rank"]):
        raise DrafterMismatch(f"{name} maps tokens and has no head for them; fetch it again")
    if (folder / MASK_FILE).is_file():
        embedding = weight_files.read_file(folder / MASK_FILE)["embedding"]
    if embedding is None and settings["mask_token_id"] >= vocabulary.vocab_size:
        raise DrafterMismatch(
            f"{name} masks with token {settings['mask_token_id']}, {vocabulary.name} has "
            f"{vocabulary.vocab_size}; use one trained for this target"
        )
    with torch.device("meta"):
        network = DFlashNet(drafter, vocabulary, depth)
    network.token_map = mapped
    published.fill(network, tensors, vocabulary, name)
    if embedding is not None:
        network.mask_embedding = embedding.flatten().to(vocabulary.device, vocabulary.dtype)
    return DFlash(network)
