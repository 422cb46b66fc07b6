"""The assistant models of Gemma 4 (google/gemma-4-*-assistant): a few layers of queries over the
target's own keys and values.

It has no cache of its own. At the root's position, the embedding of the last token and a hidden
state give the next token's logits and the next hidden state. Within a draft the position stays the
same, and so do the visible keys, those of the committed text.
Sampling is exact: tokens are chosen as any draft's, or drawn from what their logits say.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from draftproof.cache.kv_cache import KVCache
from draftproof.core.messages import Commit, Frontier
from draftproof.core.ops import Ops
from draftproof.core.tree import TokenTree
from draftproof.drafters import beams, weight_files
from draftproof.drafters.base import Drafter, Vocabulary, must_fit, over_vocabulary
from draftproof.drafters.checkpoint import TARGETS, Checkpoint, Format, must_be_for
from draftproof.drafters.features import (
    DEEPEST,
    NODES,
    WIDTH,
    Reader,
    drawn_chain,
    fill,
    gather_states,
)
from draftproof.errors import DrafterMismatch
from draftproof.forward.assistant_layers import MODEL_TYPES, AssistantLayers
from draftproof.forward.draft_layers import BENIGN, base_settings, refuse_unknown

KEYS = {r"lm_head\.weight": "lm_head.weight", r".*rotary_emb\..*": ""}


class GemmaAssistant(Drafter):
    """Drafts with an assistant's layers over the target's cache.

    Args:
        layers: The assistant's layers, with weights.
        target: The target whose keys and values are read.
    """

    name = "gemma-assistant"
    hidden_layers = (-1,)
    reads_target_cache = True
    deepest = DEEPEST

    def __init__(self, layers: AssistantLayers, target: Vocabulary) -> None:
        self.layers, self.target = layers, target
        self.max_draft_tokens = max(NODES, DEEPEST) if target.reads_trees else DEEPEST
        self.sources = stored_layers(target)
        self.hidden = torch.zeros(0, target.hidden_size, dtype=target.dtype)

    def start(self, rows: int, capacity: int, ops: Ops) -> None:
        super().start(rows, capacity, ops)
        size = (rows, self.target.hidden_size)
        self.hidden = torch.zeros(size, dtype=self.target.dtype, device=self.target.device)

    def observe(self, commit: Commit) -> None:
        assert commit.hidden is not None, "it reads the target's last hidden states"
        last = gather_states(commit.hidden[:, :, 0], commit.count[:, None] - 1)
        self.hidden[commit.rows[0] : commit.rows[-1] + 1] = last[:, 0]

    def select(self, rows: Sequence[int]) -> None:
        self.hidden[: len(rows)] = self.hidden[list(rows)]

    def propose(self, frontier: Frontier) -> TokenTree:
        reader = self.reader(frontier)
        if frontier.needs_draft_probs:
            return drawn_chain(frontier, reader)
        most = min(WIDTH, frontier.max_draft_tokens, self.target.vocab_size)
        width = most if frontier.trees else 1
        tree = beams.likeliest(frontier, reader.read, width, reader.levels)
        return tree if frontier.trees else tree.best_chain()

    def reader(self, frontier: Frontier) -> Reader:
        """The reader of a round's drafts."""
        rows, budget = len(frontier.prefix.root), frontier.max_draft_tokens
        assert frontier.cache is not None, "it reads the target's keys and values"
        shared, masks = self._shared(frontier.cache)
        position = frontier.prefix.position[:, None].clamp(max=self.target.context - 1)
        made = list[Tensor]()

        def read(tree: TokenTree, first: int) -> Tensor:
            hidden, tokens = self.hidden[:rows, None], tree.tokens[:, first:].clamp(min=0)
            if first:
                hidden = gather_states(torch.cat(made, 1), tree.parents[:, first:])
            nodes = tokens.shape[1]
            seen = {kind: mask.expand(-1, -1, nodes, -1) for kind, mask in masks.items()}
            states, after = self.layers(
                self.target.embed(tokens), hidden, position.expand(-1, nodes), shared, seen
            )
            made.append(after)
            return over_vocabulary(self.layers.logits(states), self.target.vocab_size)

        wide = frontier.trees and not frontier.needs_draft_probs
        fits = 1 + budget // min(WIDTH, budget) if wide else budget
        return Reader(read, min(DEEPEST, budget, fits))

    def _shared(
        self, cache: KVCache
    ) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, Tensor]]:
        """Keys and values of the committed text and their mask, by kind of attention."""
        span, dtype = cache.filled_span(), self.target.dtype
        back = cache.lengths[:, None] - torch.arange(span, device=cache.lengths.device)    # [B, S]
        shared, masks = dict[str, tuple[Tensor, Tensor]](), dict[str, Tensor]()
        for kind in {*self.layers.kinds}:
            shared[kind] = cache.layers[self.sources[kind]].visible(span)
            sees = back > 0
            if kind == "sliding_attention":                 # as transformers counts its window
                sees = sees & (back <= self.layers.window + 1)
            mask = torch.zeros(sees.shape, dtype=dtype, device=sees.device)
            masks[kind] = mask.masked_fill_(~sees, torch.finfo(dtype).min)[:, None, None]
        return shared, masks


def stored_layers(target: Vocabulary) -> dict[str, int]:
    """The target's last layer with keys and values, by kind of attention."""
    config = target.model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ()
    shapes = target.layout.shapes
    return {kind: number for number, kind in enumerate(kinds)
            if number < len(shapes) and shapes[number].heads}  # fmt: skip


def load(source: Checkpoint, target: Vocabulary) -> GemmaAssistant:
    """The assistant in a checkpoint.

    Raises:
        DrafterMismatch: It is for another target, or part of it is unknown.
    """
    name, settings = f"the {FORMAT.title} {source.path.name}", source.settings
    weight_files.must_be_possible(settings, name)
    must_be_for(settings, target, name)
    known = {"text_config", "backbone_hidden_size", "use_ordered_embeddings", "num_centroids",
             "centroid_intermediate_top_k", "tie_word_embeddings", "boi_token_id", "eoi_token_id",
             "eos_token_id", "bos_token_id", "pad_token_id", *TARGETS, *BENIGN, *base_settings()}
    refuse_unknown(settings, known, name)
    with torch.device("meta"):
        layers = AssistantLayers(settings, name)
    text = settings.get("text_config") or {}
    fields = {field.name for field in dataclasses.fields(type(layers.text))}
    refuse_unknown(text, {*fields, *BENIGN, *base_settings()}, name)
    must_fit(name, layers.backbone, layers.vocab_size, target)
    _must_attend(layers, target, name)
    tensors = source.tensors(KEYS)
    if layers.lm_head is None and "lm_head.weight" in tensors:
        tied, table = tensors.pop("lm_head.weight"), tensors.get("model.embed_tokens.weight")
        if table is None or not torch.equal(tied, table):
            raise DrafterMismatch(
                f"{name} has an lm_head of its own and states that it is tied to the embeddings; "
                "fetch it again"
            )
    order = tensors.get("masked_embedding.token_ordering")
    size = layers.vocab_size
    if order is not None and not torch.equal(order.long().sort().values, torch.arange(size)):
        raise DrafterMismatch(
            f"the token_ordering of {name} does not list each of its {size} tokens once; fetch it "
            "again"
        )
    fill(layers, tensors, target, name)
    layers.model.rotary_emb.to(target.device)
    return GemmaAssistant(layers, target)


def _must_attend(layers: AssistantLayers, target: Vocabulary, name: str) -> None:
    """Refuse an assistant whose layers do not read the target's keys and values."""
    sources = stored_layers(target)
    for number, kind in enumerate(layers.kinds):
        shape = target.layout.shapes[sources[kind]] if kind in sources else None
        heads = (shape.heads, shape.key_dim) if shape is not None else (0, 0)
        if heads != layers.shape(number):
            raise DrafterMismatch(
                f"{name} attends to {layers.shape(number)[0]} key heads of "
                f"{layers.shape(number)[1]} numbers in its layer {number} ({kind}), {target.name} "
                f"stores {heads[0]} of {heads[1]}; use the one for this target"
            )


def _recognises(source: Checkpoint) -> bool:
    return source.settings.get("model_type") in MODEL_TYPES


FORMAT = Format("Gemma 4 assistant", _recognises, load)
FORMATS = (FORMAT,)
