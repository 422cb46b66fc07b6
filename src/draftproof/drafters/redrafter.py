"""Recurrent Drafter (ReDrafter, arXiv 2403.09919): a small recurrence drafts by beam search from one hidden state.

The head reads the target's hidden state behind the last committed token, once a round, and feeds on the tokens drafted
after it; its embeddings are the target's own. Knows the head, its training form and its beams; checkpoints are elsewhere.

Shape letters beyond the usual: W beams, R children of a beam, E the width of what is projected.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import log
from typing import ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftproof.core.messages import Commit, Features, Frontier
from draftproof.core.noise import Role
from draftproof.core.ops import Ops
from draftproof.core.prefix import Paths
from draftproof.core.tree import ABSENT, TokenTree, TreeShape
from draftproof.drafters.base import Drafter, DraftHead, Vocabulary, lm_head_of, must_fit, over_vocabulary
from draftproof.errors import BadInput
from draftproof.model.packed_linear import PackedLinear, pack_linears
from draftproof.native.structures import LANES, Linear, Recurrence

STEPS = 5
"""Tokens a fresh head foretells, as published."""
WIDTH, LENGTH = 2, 5
"""Beams when nobody says, and drafted tokens of each, if the head foretells so many: quickest where drafting costs as much
as on a CPU (`python -m draftproof.bench.sweep`)."""
NODES = 12
"""Draft tokens per row and round when nobody says."""
TREES = ("nodes", "beams")
"""What becomes of a beam search: its most likely nodes, or its surviving beams as published."""


@dataclass(frozen=True)
class ReDrafterConfig:
    """The form of a head.

    exit_dim: width of the residual blocks and of what the projection reads; twice `hidden_size` as published. Anything
    else puts an input projection in front. num_layers: residual blocks. steps: tokens it is trained to foretell, and
    the length of its beams when nobody says.
    rnn: a recurrence over the drafted tokens; otherwise their embeddings are summed.
    rnn_activation, skip_u_at_first_step: "silu" and False as published; TensorRT-LLM runs "none" and True.
    share_lm_head: the projection is the target's own LM head and not stored; `exit_dim` is then `hidden_size`.
    """

    hidden_size: int
    vocab_size: int
    exit_dim: int
    num_layers: int = 1
    steps: int = STEPS
    rnn: bool = True
    rnn_activation: str = "silu"
    skip_u_at_first_step: bool = False
    share_lm_head: bool = False
    base_model: str = ""

    def __post_init__(self) -> None:
        for name, least in (("hidden_size", 1), ("vocab_size", 1), ("exit_dim", 1), ("num_layers", 0), ("steps", 1)):
            if getattr(self, name) < least:
                raise BadInput(f"{name} of a recurrent drafter was {getattr(self, name)}; it must be at least {least}")
        if self.rnn_activation not in ("silu", "none"):
            raise BadInput(f"rnn_activation was {self.rnn_activation!r}; it is 'silu' or 'none'")
        if self.share_lm_head and self.exit_dim != self.hidden_size:
            raise BadInput(
                f"a head that shares the target's LM head has exit_dim {self.exit_dim}, the LM head reads {self.hidden_size}; "
                "make them equal, or let the head have a projection of its own"
            )


class ResBlock(nn.Module):
    """x + SiLU(linear(x))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        mixed: Tensor = F.silu(self.linear(inputs))
        return inputs + mixed


class ReDrafterHead(DraftHead):
    """The weights, by the names of Apple's checkpoints. `fresh` makes one that is ready to be trained.

    A projection shared with the target is part of the module, in its precision, but frozen and never written.
    """

    kind: ClassVar[str] = "redrafter"
    decay = 1.0

    def __init__(self, config: ReDrafterConfig) -> None:
        super().__init__()
        self.config = config
        hidden, width = config.hidden_size, config.exit_dim
        if width != 2 * hidden:
            self.input_proj = nn.Linear(2 * hidden, width)
        blocks = [ResBlock(width) for _ in range(config.num_layers)]
        self.lm_head = nn.Sequential(*blocks, nn.Linear(width, config.vocab_size, bias=config.share_lm_head))
        self.projection.requires_grad_(not config.share_lm_head)
        if config.rnn:
            self.rnn_u = nn.Linear(hidden, hidden)
            self.rnn_w = nn.Linear(hidden, hidden, bias=False)

    @classmethod
    def fresh(
        cls,
        vocabulary: Vocabulary,
        *,
        steps: int = STEPS,
        num_layers: int = 1,
        exit_dim: int | None = None,
        rnn: bool = True,
        share_lm_head: bool = False,
        rnn_activation: str = "silu",
        skip_u_at_first_step: bool = False,
        seed: int = 0,
    ) -> ReDrafterHead:
        """A head for this target, in at least float32 and on its device, that begins as the target's own LM head.

        exit_dim: from once to twice the hidden size; None is twice, or once with `share_lm_head`.
        """
        hidden = vocabulary.hidden_size
        width = exit_dim if exit_dim is not None else hidden if share_lm_head else 2 * hidden
        if not hidden <= width <= 2 * hidden:
            raise BadInput(f"exit_dim was {width}; a fresh recurrent drafter has from {hidden} to {2 * hidden} for this target")
        form = (hidden, vocabulary.vocab_size, width, num_layers, steps, rnn, rnn_activation, skip_u_at_first_step)
        config = ReDrafterConfig(*form, share_lm_head, vocabulary.name)
        head = cls(config).to(vocabulary.device, torch.promote_types(vocabulary.dtype, torch.float32))
        head._begin(vocabulary, seed)
        return head

    @property
    def steps(self) -> int:
        return self.config.steps

    @property
    def projection(self) -> nn.Linear:
        """The last layer, from `exit_dim` to the vocabulary."""
        return cast(nn.Linear, self.lm_head[-1])

    def advance(self, embedded: Tensor, state: Tensor | None) -> Tensor:
        """[..., H] the state after one more token: `embedded` is the token's, `state` that before it, None at the first."""
        if not self.config.rnn:
            return embedded if state is None else embedded + state
        mixed: Tensor = self.rnn_w(embedded)
        if state is not None:
            mixed = mixed + self.rnn_u(state)
        elif not self.config.skip_u_at_first_step:
            mixed = mixed + self.rnn_u.bias                     # what comes before the first token is zero
        return F.silu(mixed) if self.config.rnn_activation == "silu" else mixed

    def logits(self, context: Tensor, state: Tensor) -> Tensor:
        """[..., V] of the token after those in `state`; context [..., H] is the hidden state they all come after."""
        inputs = torch.cat([context, state], -1)
        if self.config.exit_dim != 2 * self.config.hidden_size:
            inputs = self.input_proj(inputs)
        logits: Tensor = self.lm_head(inputs)
        return logits

    def predict(self, features: Features, vocabulary: Vocabulary) -> Iterator[Tensor]:
        context = features.hidden[:, :, 0].to(self.projection.weight.dtype)             # [B, S, H] the same at every step
        with torch.no_grad():
            embedded = vocabulary.embed(features.tokens).to(context.dtype)
        state = None
        for step in range(self.steps):
            rows = max(context.shape[1] - 2 - step, 0)
            consumed = embedded[:, step + 1 : step + 1 + rows]                          # token t + 1 + step
            state = self.advance(consumed, None if state is None else state[:, :rows])
            yield over_vocabulary(self.logits(context[:, :rows], state), vocabulary.vocab_size)

    def drafter(self, vocabulary: Vocabulary) -> ReDrafter:
        return ReDrafter(self, vocabulary)

    def unshared(self) -> ReDrafterHead:
        """The same head with a projection of its own, a copy of the target's: for layouts that must hold one."""
        if not self.config.share_lm_head:
            return self
        if bool(self.projection.bias.any()):
            raise BadInput("the target's LM head adds a bias, which a recurrent drafter's own cannot; keep it shared")
        own = ReDrafterHead(replace(self.config, share_lm_head=False)).to(self.projection.weight)
        state = self.state_dict()
        own.load_state_dict({name: state[name] for name in own.state_dict()})
        return own

    @torch.no_grad()
    def _begin(self, vocabulary: Vocabulary, seed: int) -> None:
        """Blocks that add nothing, a projection that reads hidden state and recurrence as the target reads the first.

        The recurrence makes states as loud as hidden states from embeddings that are often tiny. On the demo model the
        usual random start is a nat behind this one after 70 steps.
        """
        hidden = self.config.hidden_size
        table, bias = lm_head_of(vocabulary)
        for parameter in self.lm_head[:-1].parameters():
            parameter.zero_()
        self.projection.weight.zero_()[:, :hidden] = table
        if self.config.share_lm_head:
            self.projection.bias.copy_(bias)
        if self.config.exit_dim == 2 * hidden:
            self.projection.weight[:, hidden:] = table / 2
        else:
            nn.init.eye_(self.input_proj.weight)[:hidden, hidden:] += torch.eye(hidden, device=table.device) / 2
            self.input_proj.bias.zero_()
        if self.config.rnn:
            some = vocabulary.embed(torch.arange(min(4096, vocabulary.vocab_size), device=vocabulary.device))
            loudness = float(some.double().square().mean().sqrt())
            generator = torch.Generator(vocabulary.device).manual_seed(seed)
            nn.init.orthogonal_(self.rnn_w.weight, 1 / max(loudness, 1e-6), generator)
            nn.init.orthogonal_(self.rnn_u.weight, 1.0, generator)
            self.rnn_u.bias.zero_()


class ReDrafter(Drafter):
    """Drafts by beam search with a recurrent head.

    Scores race with the target's own noise, filters and penalties, each beam by its own path: beams are what the target
    is likely to pick, not merely what is likely.

    width, length: beams, and tokens drafted in each (None: five, or as many as the head was trained for). Apple's "beam length"
    counts the root as well.
    tree: "nodes" drafts, of all tokens the search weighed, those on the most likely paths; "beams" what survives of the
    search, shared prefixes merged, as published.
    cut: weigh tokens among this many best of each beam; Apple's search has 50. None: among all.
    For a target that cannot read trees it drafts a chain.
    """

    name = "redrafter"
    hidden_layers = (-1,)

    def __init__(
        self,
        head: ReDrafterHead,
        vocabulary: Vocabulary,
        *,
        width: int = WIDTH,
        length: int | None = None,
        tree: str = "nodes",
        cut: int | None = None,
    ) -> None:
        must_fit("the recurrent drafter", head.config, vocabulary, padded=not head.config.share_lm_head)
        length = length if length is not None else min(head.steps, LENGTH)
        if not 1 <= width <= min(cut or vocabulary.vocab_size, vocabulary.vocab_size) or length < 1:
            raise BadInput(f"a beam search of width {width} and length {length} was asked of {vocabulary.vocab_size} tokens; "
                           "both are at least 1, and no more beams than tokens to choose from")  # fmt: skip
        if tree not in TREES:
            raise BadInput(f"the tree was {tree!r}; choose one of {', '.join(TREES)}")
        self.vocabulary, self.tree, self.cut = vocabulary, tree, cut
        self.width, self.length = width if vocabulary.reads_trees else 1, length
        self.deepest = length
        self.default_budget = max(NODES, length) if self.width > 1 else length
        self._head = _decoding(head, vocabulary)
        self._native = _Native.of(self._head, vocabulary)
        self.context = torch.zeros(0, vocabulary.hidden_size)      # [rows, H] behind each row's last committed token

    def start(self, rows: int, capacity: int, ops: Ops) -> None:
        super().start(rows, capacity, ops)
        where = self.vocabulary
        self.context = torch.zeros(rows, where.hidden_size, dtype=where.dtype, device=where.device)

    def observe(self, commit: Commit) -> None:
        assert commit.hidden is not None, "the head reads the target's last hidden states"
        states = commit.hidden[:, :, 0]                                                     # [b, D, H]
        last = (commit.count - 1)[:, None, None].expand(-1, 1, states.shape[-1])
        self.context[commit.rows[0] : commit.rows[-1] + 1] = states.gather(1, last)[:, 0]  # rows lie side by side

    def select(self, rows: Sequence[int]) -> None:
        self.context[: len(rows)] = self.context[list(rows)]

    def propose(self, frontier: Frontier) -> TokenTree:
        root = frontier.prefix.root[:, None]
        length, width = min(self.length, frontier.budget), min(self.width if frontier.trees else 1, frontier.budget)
        if length == 0:
            return TokenTree.chain(root)
        if self.tree == "beams" and width > 1:
            beams = self.search(frontier, root, length, width)[-1].best(width)
            return TokenTree.from_paths(beams.paths, min(frontier.budget, width * length) + 1)
        tokens, parents, confidence = self.ops.run(beam_search, self, frontier, root, length, width)
        if width == 1:
            return replace(TokenTree.chain(tokens), confidence=confidence)
        return self.ops.run(TokenTree.likeliest, tokens, parents, confidence, frontier.budget + 1, length)

    def search(self, frontier: Frontier, root: Tensor, length: int, width: int) -> list[_Level]:
        """What a beam search behind roots [B, 1] weighs, step by step."""
        levels: list[_Level] = []
        for _ in range(length):
            beams = levels[-1].best(width) if levels else _Beams.begin(root)
            levels.append(self._grow(beams, root, frontier, width))
            if frontier.floor and float(levels[-1].scores.amax()) < log(frontier.floor):
                break
        return levels

    @property
    def recurrence(self) -> Recurrence | None:
        """The head as our kernels search with it, if they can."""
        return self._native.recurrence if self._native is not None and self.tree == "nodes" and self.cut is None else None

    def _logits(self, state: Tensor) -> Tensor:
        """[B, W, V] what the head says behind these states, over the target's vocabulary."""
        logits = self._head.logits(self.context[: len(state), None].expand_as(state), state)
        if self._head.config.share_lm_head:
            logits = self.vocabulary.unembed(logits)
        return over_vocabulary(logits, self.vocabulary.vocab_size)

    def _grow(self, beams: _Beams, root: Tensor, frontier: Frontier, children: int) -> _Level:
        """The most likely children of every beam, by the target's wishes and noise."""
        embedded = self.vocabulary.embed(beams.paths[..., -1])
        state = self._head.advance(embedded.to(self.context.dtype), beams.state)           # [B, W, H]
        logits, paths = self._logits(state), Paths(frontier.prefix, *beams.tree(root, frontier.sampler.reads_text))
        if self.cut is not None:
            among = frontier.sampler.gumbel_logits(logits, paths, Role.TARGET).topk(min(self.cut, logits.shape[-1]), -1)
            steps, tokens = frontier.sampler.confidence(among.values)[..., :children], among.indices[..., :children]
            steps = torch.where(steps > -torch.inf, steps, -torch.inf)                      # NaN where nothing may be chosen
        else:
            steps, tokens = frontier.sampler.best(logits, paths, children)                  # [B, W, R]
        scores = beams.scores[..., None] + steps
        return _Level(beams, torch.where(scores > -torch.inf, tokens, ABSENT), scores, state)


class _Beams(NamedTuple):
    """Where a search stands: paths [B, W, d + 1] from the root on, the log-probability of each, and the state before its end.

    place: [B, W] which of the nodes weighed last each beam ends in.
    """

    paths: Tensor
    scores: Tensor
    state: Tensor | None
    place: Tensor

    @classmethod
    def begin(cls, root: Tensor) -> _Beams:
        """One beam, the root [B, 1]: it is certain."""
        return cls(root[..., None], torch.zeros_like(root, dtype=torch.float32), None, torch.zeros_like(root))

    def tree(self, root: Tensor, told: bool) -> tuple[TokenTree, int]:
        """The paths as a tree of which each is a branch, and the first of its nodes at their ends.

        told: what its tokens are; otherwise nobody asks, and only its form is true.
        """
        width, depth = self.paths.shape[1], self.paths.shape[2] - 1
        shape = _brush(width, depth)
        tokens = torch.cat([root, self.paths[..., 1:].transpose(1, 2).flatten(1)], 1) if told else root.expand(-1, len(shape))
        return TokenTree.shaped(tokens, shape), len(shape) - width


class _Level(NamedTuple):
    """What came of one step: `tokens` [B, W, R] behind `beams`, the log-probability of the path to each, the new state."""

    beams: _Beams
    tokens: Tensor
    scores: Tensor
    state: Tensor

    def best(self, width: int) -> _Beams:
        """The `width` most likely paths."""
        scores, place = self.scores.flatten(1).topk(width)                                  # [B, W']
        beam = (place // self.tokens.shape[2])[..., None]
        tokens = self.tokens.flatten(1).gather(1, place)[..., None]
        paths = self.beams.paths.gather(1, beam.expand(-1, -1, self.beams.paths.shape[2]))
        state = self.state.gather(1, beam.expand(-1, -1, self.state.shape[2]))
        return _Beams(torch.cat([paths, tokens], -1), scores, state, place)


def beam_search(
    drafter: ReDrafter, frontier: Frontier, root: Tensor, length: int, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """All nodes that a search behind roots [B, 1] weighs: their tokens, parents (the root its own), and the odds of the path to
    each, [B, N]."""
    levels = drafter.search(frontier, root, length, width)
    parents, start = [torch.zeros_like(root)], 0
    for level in levels:
        above = start + level.beams.place                                                   # [B, W] where each beam ends
        start += parents[-1].shape[1]
        parents.append(above[..., None].expand_as(level.tokens).flatten(1))
    tokens = [root, *(level.tokens.flatten(1) for level in levels)]
    values = [torch.zeros_like(root), *(level.scores.flatten(1) for level in levels)]
    return torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(values, 1).exp()


@lru_cache(maxsize=256)
def _brush(width: int, depth: int) -> TreeShape:
    """As many chains as beams, side by side."""
    return TreeShape.branching((width, *[1] * (depth - 1)) if depth else ())


def _decoding(head: ReDrafterHead, vocabulary: Vocabulary) -> ReDrafterHead:
    """A copy to decode with, in the target's dtype and on its device; a projection that is the target's is not copied."""
    config = head.config
    given = head.state_dict()
    if config.share_lm_head:
        given = {name: given[name] for name in given if not name.startswith(f"lm_head.{config.num_layers}.")}
    with torch.inference_mode(False), torch.device("meta"):
        copied = ReDrafterHead(config)
    copied.load_state_dict({name: weight.to(vocabulary.device, vocabulary.dtype, copy=True) for name, weight in given.items()},
                           strict=not config.share_lm_head, assign=True)  # fmt: skip
    if config.share_lm_head:
        copied.lm_head[-1] = nn.Identity()
    pack_linears(copied.requires_grad_(False))
    return copied


class _Native(NamedTuple):
    """A head as our kernels search with it, and what must live as long."""

    recurrence: Recurrence
    owners: tuple[object, ...]

    @classmethod
    def of(cls, head: ReDrafterHead, vocabulary: Vocabulary) -> _Native | None:
        """Of a head in bfloat16 on a CPU that has kernels, over exactly the target's vocabulary."""
        config, tables = head.config, vocabulary.native
        if tables is None or config.hidden_size % LANES or config.exit_dim % LANES:
            return None
        blocks = [_linear(block.linear) for block in cast(Sequence[ResBlock], head.lm_head[:-1])]
        recurs = [_linear(one) for one in (head.rnn_w, head.rnn_u)] if config.rnn else [Linear(), Linear()]
        narrow = _linear(head.input_proj) if config.exit_dim != 2 * config.hidden_size else Linear()
        projection = tables.head if config.share_lm_head else _linear(head.lm_head[-1])
        parts = [part for part in (*recurs, narrow, projection, *blocks) if part is not None]
        if len(parts) < 4 + len(blocks) or parts[3].outputs != vocabulary.vocab_size:
            return None
        listed = (Linear * len(blocks))(*parts[4:])
        forms = (config.rnn, config.rnn_activation == "silu", not config.skip_u_at_first_step)
        recurrence = Recurrence(
            *parts[:4], ctypes.addressof(listed), tables.embeddings.data_ptr(), config.hidden_size, len(blocks), *forms
        )
        return cls(recurrence, (head, tables, listed))


def _linear(module: nn.Module) -> Linear | None:
    """A layer as our kernels read it."""
    return module.native if isinstance(module, PackedLinear) else None
