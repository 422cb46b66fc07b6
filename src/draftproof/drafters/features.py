"""Drafting from hidden states of the target with layers that have a KV cache: the common part of
EAGLE-3, MTP and DFlash.

Keys and values of the text are computed from the target's states; those of drafted tokens are never
kept. A beam search scores nodes with the network, and the most likely of all are the draft
(EAGLE-2, 2406.16858). If tokens are drawn, the draft is a chain.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from math import log
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from draftproof.cache.kv_cache import KVCache
from draftproof.cache.kv_layer import LayerShape
from draftproof.core.messages import Commit, Frontier
from draftproof.core.noise import Role
from draftproof.core.ops import Ops
from draftproof.core.prefix import Paths
from draftproof.core.tree import ABSENT, TokenTree
from draftproof.drafters import beams
from draftproof.drafters.base import Drafter, Vocabulary
from draftproof.drafters.heads import must_hold
from draftproof.errors import DrafterMismatch
from draftproof.forward.draft_layers import DraftLayers, masks
from draftproof.weights.packed_linear import pack_linears

WIDTH, DEEPEST, NODES = 4, 7, 16
"""Defaults: nodes that a search reads per level, levels, and draft tokens per round."""


class Network(nn.Module):
    """Layers that draft for a target; weights have their published names.

    Args:
        layers: Its decoder layers.
        vocabulary: The target, which embeds and unembeds.

    Attributes:
        width: The width of a feature.
        hidden_layers: Layers of the target that features are computed from.
    """

    hidden_layers: tuple[int, ...]
    token_map: Tensor | None = None
    """The target's id of each row of the head, if it has a draft vocabulary."""

    def __init__(self, layers: DraftLayers, vocabulary: Vocabulary) -> None:
        super().__init__()
        self.parts, self.vocabulary = layers, vocabulary
        self.layers, self.width = nn.ModuleList(layers.layers), int(layers.config.hidden_size)

    @abstractmethod
    def fuse(self, hidden: Tensor) -> Tensor:
        """[..., width] the feature of hidden states [..., T, H] of the target."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V] over the target's tokens."""

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens by its own table, or by the target's."""
        if hasattr(self, "embed_tokens"):
            return cast(Tensor, cast(nn.Embedding, self.embed_tokens)(tokens))
        return self.vocabulary.embed(tokens, raw=True)

    @property
    def table_size(self) -> int:
        """Tokens that have an embedding."""
        table = getattr(self, "embed_tokens", None)
        return self.vocabulary.vocab_size if table is None else int(table.num_embeddings)

    def attention_width(self, number: int) -> int:
        """The width of a layer's attention input."""
        return self.width

    @cached_property
    def shapes(self) -> list[LayerShape]:
        """The shape of each layer's cache."""
        return self.parts.shapes(self.attention_width)


class Reader(NamedTuple):
    """Computes logits after nodes of a draft, level by level, for `levels` levels.

    sure: estimates acceptance, if the drafter can; see `beams.Sure`.
    """

    read: beams.Read
    levels: int
    sure: beams.Sure | None = None


class FeatureDrafter(Drafter):
    """Drafts with a network: the most likely nodes of a search, or a chain.

    Args:
        network: Its weights.
        name: What it is called in reports.
        deepest: Tokens of the longest draft.
    """

    needs_all_hidden = True
    scratch = 1
    """Tokens that it reads after a text in addition to the draft."""

    def __init__(self, network: Network, name: str, deepest: int) -> None:
        self.network, self.name, self.deepest = network, name, deepest
        self.hidden_layers = network.hidden_layers
        self.max_draft_tokens = max(NODES, deepest) if network.vocabulary.reads_trees else deepest

    def start(self, rows: int, capacity: int, ops: Ops) -> None:
        super().start(rows, capacity, ops)
        like, slots = self.network.vocabulary, capacity + self.scratch
        self.cache = KVCache.empty(self.network.shapes, rows, slots, like.dtype, like.device)
        self.rows = 0

    def fused(self, commit: Commit) -> tuple[KVCache, Tensor]:
        """The cache of a commit's rows, empty if they are new, and the features of its tokens."""
        assert commit.hidden is not None, "it reads the target's hidden states"
        stop = commit.rows[-1] + 1
        self.cache.lengths[self.rows : stop] = 0
        self.rows = max(self.rows, stop)
        return self.cache.rows(commit.rows[0], stop), self.network.fuse(commit.hidden)

    @abstractmethod
    def reader(self, frontier: Frontier) -> Reader:
        """The reader of a round's drafts."""

    def propose(self, frontier: Frontier) -> TokenTree:
        longest = frontier.prefix.longest
        known = longest if longest is not None else self.cache.capacity - self.scratch
        self.cache.set_max_length(known)
        reader = self.reader(frontier)
        if frontier.needs_draft_probs:
            return drawn_chain(frontier, reader)
        width = min(WIDTH, frontier.max_draft_tokens, self.network.vocabulary.vocab_size)
        read, levels, sure = reader
        tree = beams.likeliest(frontier, read, width if frontier.trees else 1, levels, sure)
        return tree if frontier.trees else tree.best_chain()

    def select(self, rows: Sequence[int]) -> None:
        self.cache.select(rows)
        self.rows = len(rows)


def drawn_chain(frontier: Frontier, reader: Reader) -> TokenTree:
    """A chain of tokens that are drawn in turn, with their probabilities.

    Whether the chain goes on is decided before a token is drawn, so no drawn token is discarded."""
    sampler, tokens, probs = frontier.sampler, frontier.prefix.root[:, None], list[Tensor]()
    path = torch.zeros(tokens.shape, dtype=torch.float32, device=tokens.device)
    for place in range(reader.levels):
        tree = TokenTree.chain(tokens)
        logits, paths = reader.read(tree, place), Paths(frontier.prefix, tree, place)
        best, token = sampler.gumbel_logits(logits, paths, Role.DRAFT).max(-1)
        probs.append(sampler.probs(logits, paths).nan_to_num(0))
        there = (best > -torch.inf) & (tokens[:, -1:] != ABSENT)
        if reader.sure is not None:
            path = path + reader.sure()
            there = there & (path >= log(beams.LEAST))
        tokens = torch.cat([tokens, torch.where(there, token, ABSENT)], 1)
    return TokenTree.chain(tokens, torch.cat([torch.zeros_like(probs[0]), *probs], 1))


class PairDrafter(FeatureDrafter):
    """Drafts with a network that pairs the feature of token t with token t + 1 and predicts token
    t + 2. Its output for a pair is the feature of the next, drafted pair.

    network: maps features [B, N, width], tokens [B, N], positions of the features, a `Mask` and a
    cache to [B, N, H], which `logits` reads, and to features. Slot s of the cache belongs to the
    token at position s, paired with the feature before; slot 0 has none and is masked.
    """

    def start(self, rows: int, capacity: int, ops: Ops) -> None:
        super().start(rows, capacity, ops)
        like = self.network.vocabulary
        self.last = torch.zeros(rows, self.network.width, dtype=like.dtype, device=like.device)

    def observe(self, commit: Commit) -> None:
        cache, features = self.fused(commit)
        last = self.last[commit.rows[0] : commit.rows[-1] + 1]              # before these tokens
        features = torch.cat([last[:, None], features], 1)
        self._read(cache, features[:, :-1], TokenTree.chain(commit.tokens))
        cache.keep(None, commit.count)
        last.copy_(gather_states(features, commit.count[:, None])[:, 0])

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        self.last[: len(rows)] = self.last[list(rows)]

    def reader(self, frontier: Frontier) -> Reader:
        rows, budget = len(frontier.prefix.root), frontier.max_draft_tokens
        made = list[Tensor]()                                   # features after nodes, by level

        def read(tree: TokenTree, first: int) -> Tensor:
            before = self.last[:rows, None]
            if first:
                before = gather_states(torch.cat(made, 1), tree.parents[:, first:])
            hidden, features = self._read(self.cache.rows(0, rows), before, tree, first)
            made.append(features)
            return self.network.logits(hidden)

        wide = frontier.trees and not frontier.needs_draft_probs
        fits = 1 + budget // min(WIDTH, budget) if wide else budget
        return Reader(read, min(self.deepest or DEEPEST, budget, fits))

    def _read(
        self, cache: KVCache, features: Tensor, tree: TokenTree, first: int = 0
    ) -> tuple[Tensor, Tensor]:
        """The network's output for the nodes `first:` of a tree after these features."""
        like, nodes = self.network.vocabulary, tree.tokens.shape[1]
        span = cache.write_at(first, nodes)
        positions = (tree.positions(cache.lengths, like.context) - 1).clamp(min=0)[:, first:]
        tokens = tree.tokens[:, first:].clamp(0, self.network.table_size - 1)
        mask = masks(tree, cache, span, like.dtype, first, hidden=1)
        made: tuple[Tensor, Tensor] = self.network(features, tokens, positions, mask, cache)
        return made


def gather_states(states: Tensor, index: Tensor) -> Tensor:
    """[B, n, H] the states [B, N, H] at `index` [B, n]."""
    return states.gather(1, index[..., None].expand(-1, -1, states.shape[-1]))


def fill(module: nn.Module, tensors: Mapping[str, Tensor], like: Vocabulary, name: str) -> None:
    """Load exactly these tensors, in the target's dtype; refuse unused or missing ones."""
    wanted = module.state_dict()
    strange = sorted(tensors.keys() - wanted.keys())
    if strange:
        raise DrafterMismatch(
            f"{name} holds {strange[0]}, which is not supported; the head would draft worse "
            "without it, so it is not loaded"
        )
    must_hold(tensors, wanted, name)
    with torch.inference_mode(False):
        state = dict[str, Tensor]()
        for key, tensor in tensors.items():
            dtype = like.dtype if tensor.is_floating_point() else tensor.dtype
            state[key] = tensor.to(like.device, dtype, copy=True)
        module.load_state_dict(state, assign=True)
    module.eval().requires_grad_(False)
    pack_linears(module)


def fuse_experts(tensors: dict[str, Tensor], network: nn.Module) -> dict[str, Tensor]:
    """Stack a checkpoint's separate experts into the layer's single tensor."""
    for key in network.state_dict():
        at = key.removesuffix("gate_up_proj")
        if at != key and f"{at}0.gate_proj.weight" in tensors:
            count = sum(name.startswith(at) and name.endswith("up_proj.weight") for name in tensors)
            names = [f"{at}{number}.{kind}_proj.weight" for number in range(count)
                     for kind in ("gate", "up", "down")]
            missing = [name for name in names if name not in tensors]
            if missing:
                raise DrafterMismatch(f"the experts lack {missing[0]}; fetch the model again")
            gate, up, down = (
                torch.stack([tensors.pop(f"{at}{n}.{kind}_proj.weight") for n in range(count)])
                for kind in ("gate", "up", "down")
            )
            tensors |= {key: torch.cat([gate, up], 1), f"{at}down_proj": down}
    return tensors
