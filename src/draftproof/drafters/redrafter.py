"""Recurrent Drafter (ReDrafter, arXiv 2403.09919): a recurrence drafts by beam search.

The head reads the target's hidden state of the last committed token, once per round, and the tokens
drafted since (section 3.1: `ReDrafterHead.advance`, `logits`); its embeddings are the target's own.
The likeliest of all nodes of the search become one tree; section 3.2 merges the beams instead.

Further shape letter: W beams.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftproof.core.messages import Features, Frontier
from draftproof.core.ops import Ops
from draftproof.core.tree import ABSENT, TokenTree
from draftproof.drafters import base, heads
from draftproof.drafters.base import Vocabulary
from draftproof.drafters.beams import Read, weighed
from draftproof.drafters.heads import DraftHead, HeadConfig, HeadDrafter, packed
from draftproof.errors import BadInput
from draftproof.native.cpu_ops import UNSUPPORTED, Unsupported, cpu_kernel
from draftproof.native.declarations import Structure, array_of, structure
from draftproof.native.kernels import Kernels
from draftproof.native.structures import LANES
from draftproof.native.trees import TreeBuffer

Recurrence = structure("Recurrence")

STEPS = 5
"""Tokens a fresh head predicts, as published."""
WIDTH, LENGTH, NODES = 2, 5, 12
"""Defaults: beams, tokens per beam (the fastest on a CPU), draft tokens per round."""
RIDGE = 1e-3
"""Ridge of the initial least squares, as a share of the inputs' mean square."""


@dataclass(frozen=True, kw_only=True)
class ReDrafterConfig(HeadConfig):
    """The sizes of a head.

    exit_dim: width of the residual blocks and of the projection's input; twice `hidden_size` as
    published, any other value adds an input projection. steps: tokens it is trained to predict, and
    the default length of its beams. rnn_activation, skip_u_at_first_step:
    "silu" and False as published; TensorRT-LLM runs "none" and True. With `share_lm_head` the
    `exit_dim` is `hidden_size`.
    """

    exit_dim: int
    steps: int = STEPS
    rnn_activation: str = "silu"
    skip_u_at_first_step: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
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
    """The weights, with the names of Apple's checkpoints. `fresh` makes one to train.

    Args:
        config: Sizes: hidden size and vocabulary of the target, layers, width before the
            projection, and the tokens that the head was trained to draft.
    """

    kind = "redrafter"

    def __init__(self, config: ReDrafterConfig) -> None:
        super().__init__(config)
        hidden, width = config.hidden_size, config.exit_dim
        if width != 2 * hidden:
            self.input_proj = nn.Linear(2 * hidden, width)
        self.lm_head = nn.Sequential(*(ResBlock(width) for _ in range(config.num_layers)))
        if not config.share_lm_head:
            rows = config.draft_vocab_size or config.vocab_size
            self.lm_head.append(nn.Linear(width, rows, bias=False))
        self.rnn_u = nn.Linear(hidden, hidden)
        self.rnn_w = nn.Linear(hidden, hidden, bias=False)

    @classmethod
    def fresh(
        cls, vocabulary: Vocabulary, *, steps: int = STEPS, num_layers: int = 1,
        exit_dim: int | None = None, share_lm_head: bool = False,
    ) -> ReDrafterHead:  # fmt: skip
        """A head that predicts the same as the target's LM head, in at least float32, on its
        device.

        exit_dim: from once to twice the hidden size; None: twice, or once with `share_lm_head`.

        Args:
            vocabulary: The target's embeddings and head.
            steps: How many tokens ahead it is trained to predict.
            num_layers: Residual blocks of the head.
            exit_dim: The width of its own projection's input; None for the target's.
            share_lm_head: Whether the target's own head is used.

        Returns:
            A head to train.
        """
        hidden = vocabulary.hidden_size
        width = exit_dim if exit_dim is not None else (1 if share_lm_head else 2) * hidden
        if not hidden <= width <= 2 * hidden:
            most = 2 * hidden
            raise BadInput(f"exit_dim was {width}; a fresh one has from {hidden} to {most} here")
        head = cls(ReDrafterConfig(
            hidden_size=hidden, vocab_size=vocabulary.vocab_size, num_layers=num_layers,
            share_lm_head=share_lm_head, base_model=vocabulary.name, exit_dim=width, steps=steps,
        ))  # fmt: skip
        head.to(vocabulary.device, torch.promote_types(vocabulary.dtype, torch.float32))
        head._begin(vocabulary)
        return head

    @property
    def steps(self) -> int:
        return cast(int, self.config.steps)

    @property
    def own_projections(self) -> list[nn.Linear]:
        return [] if self.config.share_lm_head else [cast(nn.Linear, self.lm_head[-1])]

    def advance(self, embedded: Tensor, state: Tensor | None) -> Tensor:
        """[..., H] the state s after one more token e: f(W e + U s + b); s is None at first.

        Args:
            embedded: The embedding of the token read, [..., H].
            state: The recurrent state, [..., H].

        Returns:
            The next state.
        """
        mixed: Tensor = self.rnn_w(embedded)
        if state is not None:
            mixed = mixed + self.rnn_u(state)
        elif not self.config.skip_u_at_first_step:
            mixed = mixed + self.rnn_u.bias                     # before the first token s is zero
        return F.silu(mixed) if self.config.rnn_activation == "silu" else mixed

    def logits(self, context: Tensor, state: Tensor, vocabulary: Vocabulary) -> Tensor:
        """[..., V or D] after the tokens in `state`; context [..., H]: the hidden state before.

        Args:
            context: The target's hidden state, [..., H].
            state: The recurrent state, [..., H].
            vocabulary: The target's embeddings and head.

        Returns:
            Logits [..., V].
        """
        inputs = torch.cat([context, state], -1)
        if self.config.exit_dim != 2 * self.config.hidden_size:
            inputs = self.input_proj(inputs)
        logits: Tensor = self.lm_head(inputs)
        return self.unembed(logits, vocabulary) if self.config.share_lm_head else logits

    def predict(self, features: Features, vocabulary: Vocabulary) -> Iterator[Tensor]:
        for context, state in self._steps(features, vocabulary):
            logits, known = self.logits(context, state, vocabulary), self.token_map is not None
            yield logits if known else base.over_vocabulary(logits, vocabulary.vocab_size)

    @torch.no_grad()
    def solve(self, texts: Iterable[Features], vocabulary: Vocabulary) -> None:
        """Fit the input projection to the target's next hidden states, by least squares.

        Given the hidden state h of token t and the recurrent state s after token t + 1 + step,
        P [h; s; 1] approximates the hidden state of that token: ridge regression over all steps.

        Args:
            texts: Hidden states and tokens to fit.
            vocabulary: The target's embeddings and head.
        """
        if self.config.exit_dim == 2 * self.config.hidden_size:
            return                                                      # it has no such projection
        covariance, moments = (torch.zeros((), dtype=torch.float32) for _ in range(2))
        for features in texts:
            hidden = features.hidden[:, :, 0].to(self.input_proj.weight.dtype)
            for step, (context, state) in enumerate(self._steps(features, vocabulary)):
                counted = features.weights[:, step + 2 :] > 0
                inputs = torch.cat([context, state, torch.ones_like(state[..., :1])], -1)[counted]
                outputs = hidden[:, step + 1 : -1][counted]
                covariance = covariance + inputs.T @ inputs
                moments = moments + inputs.T @ outputs
        if covariance.dim():
            ridge = torch.zeros_like(covariance)
            ridge.fill_diagonal_(RIDGE * float(covariance.diagonal().mean()))
            solution = torch.linalg.solve((covariance + ridge).double(), moments.double()).T
            self.input_proj.weight[: len(solution)] = solution[:, :-1].to(self.input_proj.weight)
            self.input_proj.bias[: len(solution)] = solution[:, -1].to(self.input_proj.bias)

    def _steps(
        self, features: Features, vocabulary: Vocabulary
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """For each step, the hidden states [B, S - 2 - i, H] and the recurrent states,
        teacher-forced."""
        context = features.hidden[:, :, 0].to(self.rnn_w.weight.dtype)          # same at every step
        with torch.no_grad():
            embedded = vocabulary.embed(features.tokens).to(context.dtype)
        state = None
        for step in range(self.steps):
            rows = max(context.shape[1] - 2 - step, 0)
            consumed = embedded[:, step + 1 : step + 1 + rows]                  # token t + 1 + step
            state = self.advance(consumed, None if state is None else state[:, :rows])
            yield context[:, :rows], state

    def drafter(self, vocabulary: Vocabulary) -> ReDrafter:
        return ReDrafter(self, vocabulary)

    @torch.no_grad()
    def _begin(self, vocabulary: Vocabulary) -> None:
        """Initialise blocks that add nothing, and a projection that reads both inputs as the target
        does. Embeddings are often tiny, so the recurrence scales them to the size of hidden states.
        """
        hidden, width = self.config.hidden_size, self.config.exit_dim
        for parameter in self.lm_head.parameters():
            parameter.zero_()
        for linear in self.own_projections:
            table = heads.lm_head_of(vocabulary)[0]
            linear.weight[:, :hidden] = table
            linear.weight[:, hidden:] = table / 2 if width == 2 * hidden else 0
        if width != 2 * hidden:
            nn.init.eye_(self.input_proj.weight)
            self.input_proj.weight[:hidden, hidden:].diagonal().add_(0.5)
            self.input_proj.bias.zero_()
        first = torch.arange(min(4096, vocabulary.vocab_size), device=vocabulary.device)
        scale = float(vocabulary.embed(first).double().square().mean().sqrt())
        generator = torch.Generator(vocabulary.device).manual_seed(0)
        nn.init.orthogonal_(self.rnn_w.weight, 1 / max(scale, 1e-6), generator)
        nn.init.orthogonal_(self.rnn_u.weight, 1.0, generator)
        self.rnn_u.bias.zero_()


class ReDrafter(HeadDrafter[ReDrafterHead]):
    """Drafts by beam search with a recurrent head.

    Beams are ranked with the target's noise, filters and penalties, each for its own path: they are
    what the target is likely to choose.

    Recurrent Drafter (arXiv 2403.09919, sections 3.1 and 3.2). A chain for targets that read no
    trees.

    Args:
        head: The weights; they are copied in the target's dtype.
        vocabulary: The target, which embeds and unembeds.
        width: Beams.
        length: Tokens of each beam without the root (Apple's "beam length" includes it); None:
            five, or as many as the head was trained for.

    Raises:
        BadInput: A width or length below 1, or more beams than tokens.
        DrafterMismatch: The head is for another target.

    Example:
        >>> engine = dp.load("demo", drafter="redrafter")
    """

    name = "redrafter"
    packed: Structure | None = None

    def __init__(
        self, head: ReDrafterHead, vocabulary: Vocabulary, *, width: int = WIDTH,
        length: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(head, vocabulary)
        length = length if length is not None else min(head.steps, LENGTH)
        if not 1 <= width <= vocabulary.vocab_size or length < 1:
            raise BadInput(
                f"a beam search of width {width} and length {length} was asked of "
                f"{vocabulary.vocab_size} tokens; both are at least 1, and there are no more beams "
                "than tokens"
            )
        self.width = width if vocabulary.reads_trees else 1
        self.length = self.deepest = length
        self.max_draft_tokens = max(NODES, length) if self.width > 1 else length

    def start(self, rows: int, capacity: int, ops: Ops) -> None:
        super().start(rows, capacity, ops)
        self.packed = self._packed()

    def propose(self, frontier: Frontier) -> TokenTree:
        budget = frontier.max_draft_tokens
        length, width = min(self.length, budget), min(self.width if frontier.trees else 1, budget)
        pool = self.ops.run(beam_search, self, frontier, length, width)
        if width == 1:
            return replace(TokenTree.chain(pool[0]), confidence=pool[2])
        return self.ops.run(TokenTree.likeliest, *pool, budget + 1, length)

    def reader(self) -> Read:
        """A reader of beams that keeps their states from level to level."""
        states, vocabulary = list[Tensor](), self.vocabulary

        def read(tree: TokenTree, first: int) -> Tensor:
            embedded, before = vocabulary.embed(tree.tokens[:, first:]), None
            if states:                                                      # of the beams' parents
                place = tree.parents[:, first:] - (first - states[-1].shape[1])
                before = states[-1].gather(1, place[..., None].expand(-1, -1, embedded.shape[2]))
            state = self.head.advance(embedded.to(self.hidden.dtype), before)           # [B, W, H]
            states.append(state)
            context = self.hidden[: len(state), None].expand_as(state)
            logits = self.head.logits(context, state, vocabulary)
            return base.over_vocabulary(logits, vocabulary.vocab_size, self.head.token_map)

        return read

    def _packed(self) -> Structure | None:
        """The head for our kernels; None if the target's tables or some layers are not packed."""
        head, form, tables = self.head, self.head.config, self.vocabulary.native
        own_projection = None if form.share_lm_head else head.own_projections[-1]
        projection = self.packed_projection(own_projection)
        if projection is None or tables is None:
            return None
        narrow = [head.input_proj] if form.exit_dim != 2 * form.hidden_size else []
        blocks = [block.linear for block in head.lm_head if isinstance(block, ResBlock)]
        layers = packed([head.rnn_w, head.rnn_u, *narrow, *blocks])
        vocab, odd = self.vocabulary.vocab_size, form.hidden_size % LANES or form.exit_dim % LANES
        known = vocab if head.token_map is None else len(head.token_map)
        if layers is None or odd or projection.outputs != known:
            return None
        array = array_of("Linear", layers[2 + len(narrow) :])
        return Recurrence(
            *layers[:2], layers[2] if narrow else structure("Linear")(), projection, array,
            tables.embeddings, head.token_map, form.hidden_size, len(blocks),
            form.rnn_activation == "silu", not form.skip_u_at_first_step
        )


def beam_search(
    drafter: ReDrafter, frontier: Frontier, length: int, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """All nodes of a search, as `beams.weighed` returns them."""
    return weighed(frontier, drafter.reader(), width, length)


@cpu_kernel(beam_search)
def _beam_search(
    library: Kernels, drafter: ReDrafter, frontier: Frontier, length: int, width: int
) -> tuple[Tensor, Tensor, Tensor] | Unsupported:
    head, vocab, root = drafter.packed, drafter.vocabulary.vocab_size, frontier.prefix.root
    sampling = frontier.sampler.draft_sampling(
        frontier.prefix, length, vocab, frontier.min_confidence)
    if head is None or sampling is None or width > head.projection.outputs:
        return UNSUPPORTED
    rows, context = len(root), drafter.hidden[: len(root)]
    out = TreeBuffer(rows, 1 + width + max(length - 1, 0) * width * width)
    numbers = 8 * head.hidden + 2 * head.projection.size + 3 * head.projection.outputs
    size = library(
        "beam_search", head, context, root, rows, width, length, *sampling[:4], sampling.floor,
        out.output, context.new_empty(rows * width * numbers)
    )
    tokens, parents, chances = (part[:, :size] for part in out.parts)
    return torch.where(chances > -torch.inf, tokens, ABSENT), parents, chances.exp()
