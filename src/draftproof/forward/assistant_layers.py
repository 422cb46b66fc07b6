"""The assistant models of Gemma 4, whose layers attend to the target's keys and values.

Runs transformers' modules one by one; knows nothing of how tokens are drafted.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from draftproof.errors import DrafterMismatch, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
"""The `model_type` of assistants in their config.json."""


class AssistantLayers(nn.Module):
    """An assistant's modules under their published names, before weights are loaded.

    Attributes:
        kinds: The kind of attention of each layer.
        window: The window of the sliding layers.
        backbone: The size of the target's hidden states.
        vocab_size: The number of tokens.
    """

    def __init__(self, settings: Mapping[str, object], name: str) -> None:
        super().__init__()
        kind = str(settings["model_type"])
        try:
            config, self.model = _body(settings)
        except Exception as error:                      # families raise errors of any class
            raise DrafterMismatch(
                f"the layers of {name} ({kind}) cannot be made: {first_line(error)}; fetch its "
                "config.json again"
            ) from error
        text, wide = config.get_text_config(), int(config.backbone_hidden_size)
        size, self.vocab_size = int(text.hidden_size), int(text.vocab_size)
        self.text, self.kinds = text, list(text.layer_types)
        self.window, self.backbone = int(text.sliding_window), wide
        self.pre_projection = nn.Linear(2 * wide, size, bias=False)
        self.post_projection = nn.Linear(size, wide, bias=False)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else nn.Linear(size, self.vocab_size, bias=False)
        self.masked_embedding = None
        if config.use_ordered_embeddings:
            count, best = int(config.num_centroids), int(config.centroid_intermediate_top_k)
            self.masked_embedding = MaskedEmbedding(size, self.vocab_size, count, best)

    def shape(self, number: int) -> tuple[int, int]:
        """The number and size of the key heads that a layer attends to."""
        layer = self.text.per_layer_config[number]
        return int(layer.num_key_value_heads), int(layer.head_dim)

    def forward(
        self, embedded: Tensor, hidden: Tensor, positions: Tensor,
        shared: Mapping[str, tuple[Tensor, Tensor]], masks: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return states [B, N, h] for `logits`, and hidden states [B, N, H] for the next step.

        Args:
            embedded: [B, N, H] the target's embedding of each token.
            hidden: [B, N, H] the state before each token: the target's, or an earlier result.
            positions: [B, N].
            shared: The target's keys and values by kind of attention.
            masks: The masks [B, 1, N, S] by kind of attention.
        """
        states = self.pre_projection(torch.cat([embedded, hidden], -1))
        body: Any = self.model
        angles = {kind: body.rotary_emb(states, positions, kind) for kind in {*self.kinds}}
        for kind, layer in zip(self.kinds, body.layers, strict=True):
            states = layer(
                states, None, shared_kv_states=shared, position_embeddings=angles[kind],
                attention_mask=masks[kind], position_ids=positions, past_key_values=None,
            )  # fmt: skip
        states = body.norm(states)
        return states, cast(Tensor, self.post_projection(states))

    def logits(self, states: Tensor) -> Tensor:
        """[..., V] logits; with an ordered embedding, -inf but for the best centroids' tokens."""
        body: Any = self.model
        table = body.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        if self.masked_embedding is None:
            return states @ table.T
        tokens = self.masked_embedding(states)
        scores = (table[tokens] @ states[..., None])[..., 0]
        whole = states.new_full((*states.shape[:-1], self.vocab_size), -torch.inf)
        return whole.scatter(-1, tokens, scores)


class MaskedEmbedding(nn.Module):
    """Selects the tokens near a state: those of its best centroids, each of which stands for an
    equally large group of consecutive tokens in `token_ordering`."""

    token_ordering: Tensor

    def __init__(self, size: int, vocab_size: int, count: int, best: int) -> None:
        super().__init__()
        self.centroids, self.best = nn.Linear(size, count, bias=False), best
        self.register_buffer("token_ordering", torch.empty(vocab_size, dtype=torch.int64))

    def forward(self, states: Tensor) -> Tensor:
        """Return the tokens [..., K] near states [..., h]."""
        scores = self.centroids(states)
        order = self.token_ordering.view(scores.shape[-1], -1)
        return order[scores.topk(min(self.best, scores.shape[-1]), -1).indices].flatten(-2)


def _body(settings: Mapping[str, object]) -> tuple[PreTrainedConfig, nn.Module]:
    """The configuration and its text model, all of whose layers use shared keys.

    transformers 5.23 cannot build a model with such layers alone, so as many of the other kind are
    built in front of them and then removed."""
    from transformers import AutoConfig, AutoModel

    rest = {key: value for key, value in settings.items() if key != "model_type"}
    config = AutoConfig.for_model(str(settings["model_type"]), **rest)
    text = copy.deepcopy(config.get_text_config())
    count, kinds = int(text.num_hidden_layers), list(text.layer_types)
    if len(kinds) != count:
        raise ValueError(f"{count} layers, and {len(kinds)} kinds of layers")
    values = text.to_dict()
    values |= {"num_hidden_layers": 2 * count, "num_kv_shared_layers": count,
               "layer_types": kinds * 2}  # fmt: skip
    double = type(text)(**values)
    double._attn_implementation = "sdpa"
    with torch.device("meta"):
        model = AutoModel.from_config(double)
    model.layers = model.layers[count:]
    with torch.device("cpu"):                           # its buffers need values at once
        model.rotary_emb = type(model.rotary_emb)(double)
    return config, cast(nn.Module, model)
