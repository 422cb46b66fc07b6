"""Drafting from the target's hidden states with layers and a KV cache of one's own (EAGLE-3, MTP).

A `Network` pairs the features of token t with token t + 1 and says what token t + 2 may be; what it
makes of a pair is the feature of the next, drafted one. `FeatureDrafter` drafts with any: the
likeliest nodes of a beam search (EAGLE-2, 2406.16858) where nodes are chosen, a chain or a fixed
tree where they are drawn. Features of drafted tokens are dropped when the target's own are known.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from draftproof.core.messages import Commit, Frontier, Reading
from draftproof.core.ops import Ops
from draftproof.core.tree import TokenTree, TreeShape
from draftproof.drafters import beams
from draftproof.drafters.base import PADDING, Vocabulary, must_hold
from draftproof.drafters.draft_model import DraftModel
from draftproof.errors import DrafterMismatch
from draftproof.model.draft_layers import DraftLayers, Mask, masks
from draftproof.model.kv_cache import KVCache
from draftproof.model.kv_layer import KVLayer, LayerShape, write
from draftproof.model.packed_linear import pack_linears

WIDTH, DEEPEST, NODES = 4, 7, 16
"""Nodes that a search reads per level, levels, and draft tokens per round when nobody says."""


class Network(nn.Module):
    """What a method computes. Weights have the names of its published checkpoints.

    width: numbers of a feature. hidden_layers: of the target that features are made of.
    """

    hidden_layers: tuple[int, ...]
    width: int
    layers: nn.ModuleList

    def __init__(self, layers: DraftLayers, vocabulary: Vocabulary) -> None:
        super().__init__()
        self.parts, self.vocabulary = layers, vocabulary
        self.layers = nn.ModuleList(layers.layers)

    @abstractmethod
    def fuse(self, hidden: Tensor) -> Tensor:
        """[..., width] the feature of hidden states [..., T, H] of the target."""

    @abstractmethod
    def forward(
        self, features: Tensor, tokens: Tensor, positions: Tensor, mask: Mask, cache: KVCache
    ) -> tuple[Tensor, Tensor]:
        """[B, N, H] what `logits` reads and the features [B, N, width] after pairs of a feature
        and the token behind it, at the features' positions."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V] over the target's tokens."""

    def attention_width(self, number: int) -> int:
        """Numbers that the attention of a layer reads."""
        return int(self.parts.config.hidden_size)


def fill(module: nn.Module, tensors: Mapping[str, Tensor], like: Vocabulary, name: str) -> None:
    """Load all these tensors, and nothing else, as the target's; refuse what is over or lacking."""
    wanted = module.state_dict()
    strange = sorted(tensors.keys() - wanted.keys())
    if strange:
        raise DrafterMismatch(
            f"{name} holds {strange[0]}, which nothing here uses; it would draft worse without it, "
            "and is not loaded"
        )
    must_hold(tensors, wanted, name)
    with torch.inference_mode(False):
        state = {key: tensors[key].to(like.device, like.dtype, copy=True) for key in wanted}
        module.load_state_dict(state, assign=True)
    module.eval().requires_grad_(False)
    pack_linears(module)


class FeatureModel:
    """A network as a draft model reads: slot s of its cache is for the token at position s, paired
    with the feature of the one before. Slot 0 has none, and nobody sees it."""

    reads_trees = True

    def __init__(self, network: Network, name: str) -> None:
        self.network, self.name = network, name
        vocabulary = network.vocabulary
        self.vocab_size, self.context = vocabulary.vocab_size, vocabulary.context
        self.shapes = network.parts.shapes(network.attention_width)

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        """Behind the layers' own a store of features: keys of the text, values the network's."""
        store, like = LayerShape(1, self.network.width, self.network.width), self.network.vocabulary
        return KVCache.empty([*self.shapes, store], rows, capacity, like.dtype, like.device)

    def read(
        self, tree: TokenTree, cache: KVCache, *, first: int = 0, last_only: bool = False
    ) -> Reading:
        nodes, vocabulary = tree.tokens.shape[1], self.network.vocabulary
        span = cache.write_at(first, nodes)
        store = cast(KVLayer, cache.layers[-1])
        numbers = torch.arange(nodes, device=cache.lengths.device)
        slots = (cache.lengths[:, None] + numbers).clamp(max=cache.capacity - 1)
        if first:
            above = slots.gather(1, tree.parents[:, first:].clamp(min=0))
            features = _at(store.values, above)
        else:
            features = _at(store.keys, slots)
        positions = (tree.positions(cache.lengths, self.context) - 1).clamp(min=0)[:, first:]
        tokens = tree.tokens[:, first:].clamp(0, self.vocab_size - 1)
        mask = masks(tree, cache, span, vocabulary.dtype, first, hidden=1)
        hidden, made = self.network(features, tokens, positions, mask, cache)
        write(store.values, slots[:, first:], made[:, None])
        return Reading(self.network.logits(hidden[:, -1:] if last_only else hidden))


class FeatureDrafter(DraftModel):
    """Drafts with a network. shape: a fixed tree; None searches for the likeliest nodes."""

    has_kv_cache = False
    default_budget = NODES
    reads_every_state = True

    def __init__(self, network: Network, name: str, shape: TreeShape | None = None) -> None:
        model = FeatureModel(network, name)
        super().__init__(model, model.vocab_size, shape)
        self.network, self.name = network, name
        self.hidden_layers = network.hidden_layers
        if shape is None and not network.vocabulary.reads_trees:
            self.default_budget = DEEPEST

    def start(self, rows: int, capacity: int, ops: Ops) -> None:
        super().start(rows, capacity, ops)
        device = self.network.vocabulary.device
        self.known = torch.zeros(rows, dtype=torch.int64, device=device)    # committed tokens

    def observe(self, commit: Commit) -> None:
        assert commit.hidden is not None, "it reads the target's hidden states"
        rows = slice(commit.rows[0], commit.rows[-1] + 1)
        self.known[len(self.lag) : rows.stop] = 0
        cache: Any = self._cache(rows.stop, rows.start)
        places = torch.arange(commit.tokens.shape[1], device=self.known.device)
        slots = (self.known[rows, None] + 1 + places).clamp(max=cache.capacity - 1)
        features = self.network.fuse(commit.hidden)
        write(cache.layers[-1].keys, slots, features[:, None])
        self.known[rows] += commit.count
        super().observe(commit)

    def propose(self, frontier: Frontier) -> TokenTree:
        searches = self.shape is None and frontier.trees and not frontier.drawn
        if searches and frontier.budget > 1:
            return self._search(frontier)
        return super().propose(frontier)

    def select(self, rows: Sequence[int]) -> None:
        store = cast(KVLayer, self._cache(len(self.known)).layers[-1]).keys
        features = store[list(rows)]            # of a cache no more is moved than it has read
        super().select(rows)
        store[: len(rows)] = features
        self.known[: len(rows)] = self.known[list(rows)]

    def _keep(self, cache: Any, commit: Commit) -> int:
        """Of what was read for the last proposal, the root is what the target made of it."""
        cache.keep(None, torch.ones_like(commit.count))
        return commit.tokens.shape[1] - 1

    def _search(self, frontier: Frontier) -> TokenTree:
        """The likeliest nodes of all that a beam search weighs."""
        budget = frontier.budget
        width = min(WIDTH, budget, self.vocab_size)
        deepest = min(DEEPEST, budget, 1 + budget // width)     # what is read fits into the scratch

        def read(tree: TokenTree, first: int) -> Tensor:
            if not first:
                return self._read_root(frontier.prefix, budget)
            self.scratch = tree.tokens.shape[1]
            return self.model.read(tree, self._cache(len(tree.tokens)), first=first).logits

        return beams.likeliest(frontier, read, width, deepest)


def token_map(
    tensors: dict[str, Tensor], size: int, vocabulary: Vocabulary, name: str
) -> Tensor | None:
    """The target's token of each of the draft's `size`, by what a file says of it (`d2t`, how far
    on it is; `t2d`, which there are); both are taken out of `tensors`. None: they are the same."""
    offsets, mask = tensors.pop("d2t", None), tensors.pop("t2d", None)
    vocab_size, most = vocabulary.vocab_size, max(PADDING, vocabulary.vocab_size // 100)
    if offsets is None:
        if abs(size - vocab_size) > most or mask is not None:
            raise DrafterMismatch(
                f"{name} has {size} tokens, {vocabulary.name} {vocab_size}, and no map (d2t) "
                "between them; fetch it again"
            )
        return None
    ids = torch.arange(len(offsets)) + offsets.long().cpu()
    several = len(torch.unique(ids))
    if not len(ids) == several == size or int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise DrafterMismatch(
            f"{name} maps its {size} tokens to {several} tokens up to {int(ids.max())}, "
            f"{vocabulary.name} has {vocab_size}; use one trained for this target"
        )
    if mask is not None and not torch.equal(mask.bool().nonzero().flatten(), ids.sort().values):
        raise DrafterMismatch(f"{name} names other tokens in t2d than in d2t; fetch it again")
    return ids.to(vocabulary.device)


def _at(store: Tensor, slots: Tensor) -> Tensor:
    """[B, N, width] what a store [B, 1, capacity, width] holds at slots [B, N]."""
    return store[:, 0].gather(1, slots[..., None].expand(-1, -1, store.shape[-1]))
