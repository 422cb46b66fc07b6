"""DFlash (2602.06036): a block of tokens in one pass, from hidden states of several target layers.

Keys and values of the text are computed from the target's fused states and kept. The root and mask
tokens after it attend to them and to each other, and each position predicts its token. Positions do
not know each other's tokens, so drawn tokens have the distribution of their position. DFlash 2 adds
convolutions within the block, and a selector that ranks the likeliest tokens of a position by the
token before. DSpark (2607.05147) adds a term for the token before to the logits, and estimates
whether a token will be accepted, so that a draft can end early.

Published layouts: z-lab's and DeepSpec's, with settings in `dflash_config`, in `dspark_config` or
at the top level, and layers counted as outputs; and that of `speculators`, with layers counted as
inputs.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from draftproof.core.messages import Commit, Frontier
from draftproof.core.tree import TokenTree
from draftproof.drafters import weight_files
from draftproof.drafters.base import Vocabulary
from draftproof.drafters.checkpoint import ANY, METHOD, NUMBER, Checkpoint, Described, Format
from draftproof.drafters.dflash_heads import MARKOV_HEADS
from draftproof.drafters.dflash_net import INPUTS, OUTPUTS, DFlashNet
from draftproof.drafters.features import FeatureDrafter, Reader, fill, fuse_experts
from draftproof.errors import DrafterMismatch

NESTED = ("dflash_config", "dflash2_config", "dspark_config")
KNOWN: dict[str, object] = {
    "block_size": int, "mask_token_id": int, OUTPUTS: list, INPUTS: list,
    "num_target_layers": int, "causal": bool, "is_causal": bool, "sliding_window_non_causal": bool,
    "use_swa": bool, "swa_window_size": int, "input_embedding_scale": NUMBER,
    "output_multiplier": NUMBER, "logit_scale": NUMBER, "final_logit_softcapping": NUMBER,
    "conv_kernel_size": int, "conv_group_size": int, "selector_rank": int, "selector_top_k": int,
    "sample_from_anchor": bool, "speculative_tokens": int, "draft_ffn_type": str,
    "num_experts": int, "num_experts_per_tok": int, "moe_intermediate_size": int,
    "shared_expert_intermediate_size": int, "norm_topk_prob": bool,
    # another value is another network
    "is_neox_style": True, "attention_sink_bias": False, "add_swa_attention_sink_bias": False,
    "projector_type": "dflash", "use_aux_hidden_state": True, "shift_label": False,
    # redundant with the tensors, or about another projector, training or kernels
    "target_hidden_size": int, "draft_vocab_size": int, "moe_experts_implementation": ANY,
    **dict.fromkeys(("pure_draft_prefix_len", "emb_dim", "gru_hidden_dim", "auf",
                     "lambda_base_start", "lambda_base_decay_ratio"), ANY),
}  # fmt: skip
DSPARK: dict[str, object] = {
    **KNOWN, "projector_type": "dspark", "markov_rank": int, "markov_head_type": str,
    "enable_confidence_head": bool, "confidence_head_with_markov": bool,
}  # fmt: skip
MASK_FILE = "mask_embedding.pt"
"""Tensor with the embedding of the mask token, if the target has none."""


class DFlash(FeatureDrafter):
    """Drafts a block of tokens in one pass (arXiv 2602.06036).

    Args:
        network: The weights of a published drafter.
        name: What it is called in reports.
        tokens: The most draft tokens; None: the block that it was trained for.
    """

    network: DFlashNet

    def __init__(self, network: DFlashNet, name: str = "dflash", tokens: int | None = None) -> None:
        self.scratch = int(network.settings["block_size"])
        deepest = network.predictions if tokens is None else min(tokens, network.predictions)
        super().__init__(network, name, deepest)

    def observe(self, commit: Commit) -> None:
        """Store keys and values of the text, computed from the target's states."""
        (cache, features), width = self.fused(commit), commit.tokens.shape[1]
        angles = self.network.parts.angles(features, self._positions(cache.lengths, width))
        cache.write_at(0, width)
        for number, layer in enumerate(cache.layers):
            layer.update(*self.network.parts.keys_values(number, features, angles))
        cache.keep(None, commit.count)

    def reader(self, frontier: Frontier) -> Reader:
        network, levels = self.network, min(self.deepest or 1, frontier.max_draft_tokens)
        hidden = self._block(frontier.prefix.root[:, None])[:, network.first :]
        scores = network.scores(hidden[:, :levels])
        rank = network.markov_head.rank if network.markov_head is not None else 0
        states = [scores.new_zeros(len(scores), 1, rank)]               # before each node, in order
        last = list[tuple[int, Tensor]]()

        def read(tree: TokenTree, first: int) -> Tensor:
            """Logits of the next position after each of the last nodes."""
            place, before = tree.depth_limit, tree.tokens[:, first:].clamp(min=0)
            state = states[0]
            if first and rank:
                parents = tree.parents[:, first:, None].expand(-1, -1, rank)
                state = torch.cat(states[1:], 1).gather(1, parents)
            logits, after = network.conditioned(scores[:, place], hidden[:, place], before, state)
            states.append(after)
            last[:] = [(place, before)]
            return logits

        def sure() -> Tensor:
            place, before = last[0]
            return network.confidence(hidden[:, place], before)

        return Reader(read, levels, sure if network.confidence_head is not None else None)

    def _positions(self, lengths: Tensor, count: int) -> Tensor:
        offsets = torch.arange(count, device=lengths.device)
        return (lengths[:, None] + offsets).clamp(max=self.network.vocabulary.context - 1)

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
    """[B, 1, size, span] 0 where a position of the block sees a slot of the text or the block: up
    to itself if `causal`, and within the window."""
    slot = torch.arange(span, device=lengths.device) - lengths[:, None, None]           # [B, 1, S]
    place = torch.arange(size, device=lengths.device)[:, None]
    sees = slot <= place if causal else (slot < size).expand(-1, size, -1)
    if window is not None:
        sees = sees & ((place - slot).abs() < window)
    mask = torch.zeros(sees.shape, dtype=dtype, device=lengths.device)
    return mask.masked_fill_(~sees, torch.finfo(dtype).min)[:, None]


def _must_agree(head: Described) -> None:
    """Refuse settings that contradict each other."""
    stated, slides = head.settings, any(head.layers.windows)
    pairs = [("causal", stated["causal"], "is_causal", stated["is_causal"]),
             ("use_swa", stated["use_swa"], "sliding layers", slides or None)]  # fmt: skip
    if slides or stated["use_swa"]:
        pairs += [("swa_window_size", stated["swa_window_size"],
                   "sliding_window", stated.get("sliding_window"))]  # fmt: skip
    if not stated["selector_rank"]:
        second = ("selector_top_k", "conv_kernel_size", "conv_group_size")
        pairs += [(key, stated[key], "selector_rank", 0) for key in second]
    for key, value, other, against in pairs:
        if value is not None and against is not None and value != against:
            raise DrafterMismatch(
                f"{head.name} has {key} = {value!r:.60} and {other} = {against!r:.60}, which do "
                "not go together; fetch its config.json again"
            )
    choices = {"draft_ffn_type": ("dense", "moe"), "markov_head_type": MARKOV_HEADS}
    for key, known in choices.items():
        if (value := stated.get(key)) is not None and value not in known:
            raise DrafterMismatch(
                f"{head.name} has {key} = {value!r:.60}; only {', '.join(known)} are known here"
            )
    markov, confident = stated.get("markov_rank"), stated.get("enable_confidence_head")
    if confident and not markov and stated.get("confidence_head_with_markov"):
        raise DrafterMismatch(
            f"{head.name} estimates confidence from a Markov head and has none (markov_rank = "
            f"{markov!r}); fetch its config.json again"
        )


def _samples_from_anchor(head: Described, default: bool) -> bool:
    """Whether the root's position predicts the first token. Then a block drafts as many tokens as
    it has positions, otherwise one fewer. The name of the architecture does not show it."""
    stated, size = head.settings["sample_from_anchor"], int(head.settings["block_size"])
    count = head.settings["speculative_tokens"] or head.tokens
    if stated is None:
        return {size: True, size - 1: False}.get(count, default) if count else default
    if count is not None and count > size - (not stated):
        raise DrafterMismatch(
            f"{head.name} drafts {count} tokens with blocks of {size} and sample_from_anchor = "
            f"{stated}; fetch its config.json again"
        )
    return bool(stated)


def _load(form: Format, checkpoint: Checkpoint, target: Vocabulary, name: str) -> DFlash:
    head = form.read(checkpoint, target)
    settings, tensors = head.settings, head.tensors
    head.require("block_size", "mask_token_id", OUTPUTS if settings[INPUTS] is None else INPUTS)
    depth = int(target.model.config.get_text_config().num_hidden_layers)
    if settings["num_target_layers"] not in (None, depth):
        raise DrafterMismatch(
            f"{head.name} is for a model of {settings['num_target_layers']} layers, {target.name} "
            f"has {depth}; use one trained for this target"
        )
    _must_agree(head)
    if not hasattr(cast(Any, head.layers.layers[0]).self_attn, "k_norm"):
        raise DrafterMismatch(f"{head.name} has no query and key norms; it is not supported")
    head.must_fuse(target, len(settings[INPUTS] or settings[OUTPUTS]))
    embedding, mapped = tensors.pop("embedding", None), head.token_map(target)
    if mapped is not None and ("lm_head.weight" not in tensors or settings["selector_rank"]):
        raise DrafterMismatch(f"{head.name} maps tokens and has no head for them; fetch it again")
    if (checkpoint.folder / MASK_FILE).is_file():
        embedding = weight_files.read_file(checkpoint.folder / MASK_FILE)["embedding"]
    if embedding is None and settings["mask_token_id"] >= target.vocab_size:
        raise DrafterMismatch(
            f"{head.name} masks with token {settings['mask_token_id']}, {target.name} has "
            f"{target.vocab_size}; use one trained for this target"
        )
    from_anchor = _samples_from_anchor(head, default=name == "dspark")
    with torch.device("meta"):
        network = DFlashNet(head, target, from_anchor)
    network.token_map = mapped
    tensors = fuse_experts(tensors, network)
    fill(network, tensors, target, head.name)
    if embedding is not None:
        network.mask_embedding = embedding.flatten().to(target.device, target.dtype)
    return DFlash(network, name, settings["speculative_tokens"] or head.tokens)


def load(source: Checkpoint, target: Vocabulary) -> DFlash:
    """The DFlash drafter in a checkpoint."""
    return _load(DFLASH, source, target, "dflash")


def load_dspark(source: Checkpoint, target: Vocabulary) -> DFlash:
    """The DSpark head in a checkpoint."""
    return _load(SPARK, source, target, "dspark")


def is_dspark(source: Checkpoint) -> bool:
    """Whether a config.json is one of DSpark."""
    settings = source.settings
    if METHOD in settings:
        return bool(settings[METHOD] == "dspark")
    inner = [settings.get(key) or {} for key in NESTED]
    kinds = [part.get("projector_type") for part in (settings, *inner) if isinstance(part, dict)]
    named = any("DSpark" in name for name in source.architectures)
    return named or "dspark_config" in settings or "dspark" in kinds


def is_dflash(source: Checkpoint) -> bool:
    """Whether a config.json is one of DFlash, of either version."""
    settings = source.settings
    if METHOD in settings:
        return settings[METHOD] in ("dflash", "dflash2")
    if is_dspark(source):
        return False
    named = any(name.startswith("DFlash") for name in source.architectures)
    return named or any(key in settings for key in NESTED)


DFLASH = Format("DFlash drafter", is_dflash, load, KNOWN, nested=NESTED)
SPARK = Format("DSpark head", is_dspark, load_dspark, DSPARK, nested=NESTED)
FORMATS = (DFLASH, SPARK)
