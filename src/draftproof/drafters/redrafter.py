"""Recurrent Drafter (ReDrafter, arXiv 2403.09919): a recurrence drafts by beam search.

The head reads the target's hidden state of the last committed token, once a round, and the tokens
drafted since (section 3.1: `ReDrafterHead.advance`, `logits`); its embeddings are the target's own.
The likeliest of all nodes that a search weighed are one tree, where section 3.2 merges the beams.

Shape letters beyond the usual: W beams.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftproof.core.messages import Features, Frontier
from draftproof.core.ops import Ops
from draftproof.core.tree import TokenTree
from draftproof.drafters import base
from draftproof.drafters.base import DraftHead, LastHidden, Vocabulary
from draftproof.drafters.beams import Read, weighed
from draftproof.errors import BadInput
from draftproof.model.fused_forward import Tables

STEPS = 5
"""Tokens a fresh head predicts, as published."""
WIDTH, LENGTH = 2, 5
"""Beams when nobody says, and drafted tokens of each; quickest on a CPU."""
NODES = 12
"""Draft tokens per row and round when nobody says."""
RIDGE = 1e-3
"""Of the least squares that training begins with, in shares of the inputs' mean square."""


@dataclass(frozen=True)
class ReDrafterConfig:
    """The form of a head.

    exit_dim: width of the residual blocks and of what the projection reads; twice `hidden_size` as
    published, anything else puts an input projection in front. num_layers: residual blocks. steps:
    tokens it is trained to predict, and the length of its beams when nobody says. rnn: a recurrence
    over the drafted tokens; otherwise their embeddings are summed. rnn_activation,
    skip_u_at_first_step: "silu" and False as published; TensorRT-LLM runs "none" and True.
    share_lm_head: the projection is the target's own and not stored; `exit_dim` is `hidden_size`.
    draft_vocab_size: how many tokens it knows, if not all; a shared projection has these rows.
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
    draft_vocab_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("hidden_size", "vocab_size", "exit_dim", "num_layers", "steps"):
            least, given = int(name != "num_layers"), getattr(self, name)
            if given < least:
                raise BadInput(f"{name} of a recurrent drafter was {given}; give at least {least}")
        if self.rnn_activation not in ("silu", "none"):
            raise BadInput(f"rnn_activation was {self.rnn_activation!r}; it is 'silu' or 'none'")
        if self.share_lm_head and self.exit_dim != self.hidden_size:
            raise BadInput(
                f"a head that shares the target's LM head has exit_dim {self.exit_dim}, that reads "
                f"{self.hidden_size}; make them equal, or give the head its own projection"
            )


class ResBlock(nn.Module):
    """x + SiLU(linear(x))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + F.silu(self.linear(inputs))


class ReDrafterHead(DraftHead):
    """The weights, by the names of Apple's checkpoints. `fresh` makes one ready to be trained.

    A projection shared with the target is part of the module, but frozen and never written.
    """

    kind: ClassVar[str] = "redrafter"

    def __init__(self, config: ReDrafterConfig) -> None:
        super().__init__()
        self.config = config
        hidden, width = config.hidden_size, config.exit_dim
        if width != 2 * hidden:
            self.input_proj = nn.Linear(2 * hidden, width)
        blocks = [ResBlock(width) for _ in range(config.num_layers)]
        known = config.draft_vocab_size
        projection = nn.Linear(width, known or config.vocab_size, bias=config.share_lm_head)
        self.lm_head = nn.Sequential(*blocks, projection.requires_grad_(not config.share_lm_head))
        if config.rnn:
            self.rnn_u = nn.Linear(hidden, hidden)
            self.rnn_w = nn.Linear(hidden, hidden, bias=False)
        self.token_map = torch.arange(known) if known is not None else None

    @classmethod
    def fresh(
        cls, vocabulary: Vocabulary, *, steps: int = STEPS, num_layers: int = 1,
        exit_dim: int | None = None, rnn: bool = True, share_lm_head: bool = False,
        rnn_activation: str = "silu", skip_u_at_first_step: bool = False, seed: int = 0,
    ) -> ReDrafterHead:  # fmt: skip
        """A head in at least float32 on the target's device that begins as the target's LM head.

        exit_dim: from once to twice the hidden size; None: twice, or once with `share_lm_head`.
        """
        hidden = vocabulary.hidden_size
        width = exit_dim if exit_dim is not None else (1 if share_lm_head else 2) * hidden
        if not hidden <= width <= 2 * hidden:
            most = 2 * hidden
            raise BadInput(f"exit_dim was {width}; a fresh one has from {hidden} to {most} here")
        size, form = vocabulary.vocab_size, (rnn_activation, skip_u_at_first_step, share_lm_head)
        config = (hidden, size, width, num_layers, steps, rnn, *form, vocabulary.name)
        dtype = torch.promote_types(vocabulary.dtype, torch.float32)
        head = cls(ReDrafterConfig(*config)).to(vocabulary.device, dtype)
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
        """[..., H] the state s after one more token e: f(W e + U s + b); s is None at first."""
        if not self.config.rnn:
            return embedded if state is None else embedded + state
        mixed: Tensor = self.rnn_w(embedded)
        if state is not None:
            mixed = mixed + self.rnn_u(state)
        elif not self.config.skip_u_at_first_step:
            mixed = mixed + self.rnn_u.bias                     # before the first token s is zero
        return F.silu(mixed) if self.config.rnn_activation == "silu" else mixed

    def logits(self, context: Tensor, state: Tensor) -> Tensor:
        """[..., V] after the tokens in `state`; context [..., H]: the hidden state before them."""
        inputs = torch.cat([context, state], -1)
        if self.config.exit_dim != 2 * self.config.hidden_size:
            inputs = self.input_proj(inputs)
        logits: Tensor = self.lm_head(inputs)
        return logits

    def predict(self, features: Features, vocabulary: Vocabulary) -> Iterator[Tensor]:
        for context, state in self._steps(features, vocabulary):
            logits, known = self.logits(context, state), self.token_map is not None
            yield logits if known else base.over_vocabulary(logits, vocabulary.vocab_size)

    @torch.no_grad()
    def solve(self, texts: Iterable[Features], vocabulary: Vocabulary) -> None:
        """The input projection that predicts the target's next hidden states, by least squares.

        Of the hidden state h of token t and the recurrence's state s behind token t + 1 + step,
        P [h; s; 1] is to be the hidden state of that token: ridge regression over all steps."""
        if self.config.exit_dim == 2 * self.config.hidden_size:
            return                                                      # it has no such projection
        covariance, moments = torch.zeros(()), torch.zeros(())
        for features in texts:
            hidden = features.hidden[:, :, 0].to(self.input_proj.weight.dtype)
            for step, (context, state) in enumerate(self._steps(features, vocabulary)):
                counted = features.weights[:, step + 2 :] > 0
                inputs = torch.cat([context, state, torch.ones_like(state[..., :1])], -1)[counted]
                outputs = hidden[:, step + 1 : -1][counted]
                covariance = covariance + inputs.T @ inputs
                moments = moments + inputs.T @ outputs
        if covariance.dim():
            ridge = RIDGE * covariance.diagonal().mean() * torch.eye(len(covariance)).to(covariance)
            found = torch.linalg.solve((covariance + ridge).double(), moments.double()).T
            self.input_proj.weight[: len(found)] = found[:, :-1].to(self.input_proj.weight)
            self.input_proj.bias[: len(found)] = found[:, -1].to(self.input_proj.bias)

    def _steps(
        self, features: Features, vocabulary: Vocabulary
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Of each step the hidden states [B, S - 2 - i, H] and the recurrence's, teacher-forced."""
        context = features.hidden[:, :, 0].to(self.projection.weight.dtype)     # same at every step
        with torch.no_grad():
            embedded = vocabulary.embed(features.tokens).to(context.dtype)
        state = None
        for step in range(self.steps):
            rows = max(context.shape[1] - 2 - step, 0)
            consumed = embedded[:, step + 1 : step + 1 + rows]                  # token t + 1 + step
            state = self.advance(consumed, None if state is None else state[:, :rows])
            yield context[:, :rows], state

    def limit_vocabulary(self, tokens: Tensor, vocabulary: Vocabulary) -> None:
        self.token_map, own = tokens.to(vocabulary.device), self.projection
        self.config = replace(self.config, draft_vocab_size=len(tokens))
        if self.config.share_lm_head:
            self.lm_head[-1] = base.lm_head_rows(vocabulary, self.token_map, own.weight)
        else:
            own.weight, own.out_features = nn.Parameter(own.weight[self.token_map]), len(tokens)

    def drafter(self, vocabulary: Vocabulary) -> ReDrafter:
        return ReDrafter(self, vocabulary)

    def unshared(self) -> ReDrafterHead:
        """The same head with its own copy of the target's projection."""
        if not self.config.share_lm_head:
            return self
        if bool(self.projection.bias.any()):
            raise BadInput("the target's LM head adds a bias, which a head's own cannot; share it")
        own = ReDrafterHead(replace(self.config, share_lm_head=False)).to(self.projection.weight)
        own.load_state_dict(self.state_dict(), strict=False)
        return own

    @torch.no_grad()
    def _begin(self, vocabulary: Vocabulary, seed: int) -> None:
        """Blocks that add nothing, and a projection that reads both inputs as the target does.

        Embeddings are often tiny: the recurrence begins by making them as large as hidden states.
        """
        hidden, (table, bias) = self.config.hidden_size, base.lm_head_of(vocabulary)
        for parameter in self.lm_head[:-1].parameters():
            parameter.zero_()
        self.projection.weight.zero_()[:, :hidden] = table
        if self.config.share_lm_head:
            self.projection.bias.copy_(bias)
        if self.config.exit_dim == 2 * hidden:
            self.projection.weight[:, hidden:] = table / 2
        else:
            eye = torch.eye(hidden, device=table.device)
            nn.init.eye_(self.input_proj.weight)[:hidden, hidden:] += eye / 2
            self.input_proj.bias.zero_()
        if self.config.rnn:
            some = torch.arange(min(4096, vocabulary.vocab_size), device=vocabulary.device)
            scale = float(vocabulary.embed(some).double().square().mean().sqrt())
            generator = torch.Generator(vocabulary.device).manual_seed(seed)
            nn.init.orthogonal_(self.rnn_w.weight, 1 / max(scale, 1e-6), generator)
            nn.init.orthogonal_(self.rnn_u.weight, 1.0, generator)
            self.rnn_u.bias.zero_()


class ReDrafter(LastHidden):
    """Drafts by beam search with a recurrent head.

    Beams are ranked with the target's own noise, filters and penalties, each by its own path: they
    are what the target is likely to choose, not merely what is likely.

    width, length: beams, and tokens of each (None: five, or as many as the head was trained for);
    Apple's "beam length" counts the root as well. A chain for targets that read no trees.
    """

    name = "redrafter"

    def __init__(
        self, head: ReDrafterHead, vocabulary: Vocabulary, *, width: int = WIDTH,
        length: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(vocabulary)
        self.token_map, tokens = head.token_map, vocabulary.vocab_size
        shared = head.config.share_lm_head and head.token_map is None
        base.must_fit("the recurrent drafter", head.config, vocabulary, padded=not shared)
        length = length if length is not None else min(head.steps, LENGTH)
        if not 1 <= width <= tokens or length < 1:
            raise BadInput(
                f"a beam search of width {width} and length {length} was asked of {tokens} tokens; "
                "both are at least 1, and there are no more beams than tokens"
            )
        self.width = width if vocabulary.reads_trees else 1
        self.length = self.deepest = length
        self.default_budget = max(NODES, length) if self.width > 1 else length
        with torch.device("meta"):
            empty = ReDrafterHead(head.config)
        if shared:
            empty.lm_head[-1] = nn.Identity()                   # the target's own is not copied
        self.shared = shared
        self.head = base.decoding_copy(head, empty, vocabulary)

    def start(self, rows: int, capacity: int, ops: Ops) -> None:
        super().start(rows, capacity, ops)
        asked = (self.head, self.token_map, self.vocabulary.native)
        self.prepared = ops.run(prepare_recurrence, *asked)

    def propose(self, frontier: Frontier) -> TokenTree:
        budget, root = frontier.budget, frontier.prefix.root[:, None]
        length, width = min(self.length, budget), min(self.width if frontier.trees else 1, budget)
        pool = self.ops.run(beam_search, self, frontier, root, length, width)
        if width == 1:
            return replace(TokenTree.chain(pool[0]), confidence=pool[2])
        return self.ops.run(TokenTree.likeliest, *pool, budget + 1, length)

    def reader(self) -> Read:
        """What reads beams, whose states are kept from level to level."""
        states = list[Tensor]()

        def read(tree: TokenTree, first: int) -> Tensor:
            embedded, before = self.vocabulary.embed(tree.tokens[:, first:]), None
            if states:                                                      # of the beams' parents
                place = tree.parents[:, first:] - (first - states[-1].shape[1])
                before = states[-1].gather(1, place[..., None].expand(-1, -1, embedded.shape[2]))
            state = self.head.advance(embedded.to(self.hidden.dtype), before)           # [B, W, H]
            states.append(state)
            logits = self.head.logits(self.hidden[: len(state), None].expand_as(state), state)
            logits = self.vocabulary.unembed(logits) if self.shared else logits
            return base.over_vocabulary(logits, self.vocabulary.vocab_size, self.token_map)

        return read


def prepare_recurrence(
    head: ReDrafterHead, token_map: Tensor | None, tables: Tables | None
) -> object | None:
    """What ops need to search in one call with a head for decoding, if they can."""
    return None


def beam_search(
    drafter: ReDrafter, frontier: Frontier, root: Tensor, length: int, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """All nodes that a search after roots [B, 1] weighs, as `beams.weighed` gives them."""
    return weighed(frontier, drafter.reader(), width, length)
