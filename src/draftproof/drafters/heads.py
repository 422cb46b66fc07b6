"""What draft heads share: their sizes, their weights, and a drafter that reads them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from draftproof.core.messages import Commit, Features
from draftproof.core.ops import Ops
from draftproof.drafters.base import Drafter, Vocabulary, must_fit
from draftproof.errors import BadInput, DrafterMismatch
from draftproof.native.structures import Native
from draftproof.weights.packed_linear import JointLinear, pack_linears, packable, replace_modules
from draftproof.weights.quantized_linear import Int8Linear, slow_because


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """The sizes of any draft head.

    num_layers: residual blocks. vocab_size: the target's tokens. share_lm_head: project with the
    target's LM head, which is not stored. draft_vocab_size: the size of its draft vocabulary; None:
    all tokens. base_model: the target it was trained for.
    """

    hidden_size: int
    vocab_size: int
    num_layers: int = 1
    share_lm_head: bool = True
    base_model: str = ""
    draft_vocab_size: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 0 if name == "num_layers" else 1
            if type(value) is int and value < least:
                raise BadInput(f"{name} of a draft head was {value}; give at least {least}")


class DraftHead(nn.Module, ABC):
    """Trainable weights that predict tokens from the target's hidden states.

    Step i = 0, 1, ... predicts, from the hidden state of token t, token t + 2 + i; token t + 1 is
    the target's own.

    Args:
        config: Its sizes, a dataclass with at least `hidden_size`, `vocab_size`, `share_lm_head`
            and `draft_vocab_size`.
    """

    kind: ClassVar[str]
    """Its name in checkpoints and on the command line."""
    hidden_layers: tuple[int, ...] = (-1,)
    """Hidden layers it reads, counted as transformers does; -1 is the state after the last norm."""
    decay: float = 1.0
    """Step i counts decay^(i + 1) in the loss."""
    token_map: Tensor | None
    """[D] int64 the tokens of its draft vocabulary; None: all tokens."""
    projection: nn.Linear | None
    """The rows of the target's LM head for `token_map`, if it shares that; frozen, not stored."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, known = config, config.draft_vocab_size
        # on the meta device, arange would import much of torch
        tokens = torch.arange(known, device="cpu") if known is not None else None
        self.register_buffer("token_map", tokens)
        self.projection = None

    @property
    @abstractmethod
    def steps(self) -> int:
        """How many tokens it predicts."""

    @property
    @abstractmethod
    def own_projections(self) -> list[nn.Linear]:
        """Its own projections, if it does not use the target's LM head."""

    @abstractmethod
    def predict(self, features: Features, vocabulary: Vocabulary) -> Iterator[Tensor]:
        """Logits [B, S - 2 - i, V or D] of step i, teacher-forced: row t is for token t + 2 + i."""

    def unembed(self, states: Tensor, vocabulary: Vocabulary) -> Tensor:
        """[..., V or D] logits by the target's LM head, or by its rows of the draft vocabulary."""
        if self.projection is None:
            return vocabulary.unembed(states.to(vocabulary.dtype))
        logits: Tensor = self.projection(states)
        return logits

    def limit_vocabulary(self, tokens: Tensor, vocabulary: Vocabulary) -> None:
        """Draft only `tokens` [D]: it projects with these rows of the LM head from now on.

        FR-Spec (arXiv 2502.14856): rare tokens cost more than they gain.
        """
        self.token_map = tokens.to(vocabulary.device)
        self.config = replace(self.config, draft_vocab_size=len(tokens))
        if self.config.share_lm_head:
            like = next(self.parameters())
            self.projection = lm_head_rows(vocabulary, self.token_map, like)
        for linear in self.own_projections:
            linear.weight, linear.out_features = (
                nn.Parameter(linear.weight[self.token_map]),
                len(tokens),
            )

    def solve(self, texts: Iterable[Features], vocabulary: Vocabulary) -> None:
        """Initialise weights in closed form from the target's output for these texts. Default:
        nothing is done or read."""

    def count(self, first: Tensor, second: Tensor) -> int:
        """Count bigrams of the training text: tokens `second` [N] followed `first` [N].

        Returns the number of bigrams that are kept. Default: none."""
        return 0

    @abstractmethod
    def drafter(self, vocabulary: Vocabulary) -> Drafter:
        """The drafter with these weights, in the dtype and on the device of the target."""


H = TypeVar("H", bound=DraftHead)


class HeadDrafter(Drafter, Generic[H]):
    """Drafts with a head from the target's hidden state of each row's last committed token.

    Args:
        head: The weights, which are copied in the target's dtype.
        vocabulary: The target, which embeds and unembeds.

    Attributes:
        hidden: [B, H] the last hidden state of each row.

    Raises:
        DrafterMismatch: The head is for another target.
    """

    hidden_layers = (-1,)

    def __init__(self, head: H, vocabulary: Vocabulary) -> None:
        form = head.config
        must_fit(f"the {head.kind} head", form.hidden_size, form.vocab_size, vocabulary)
        self.vocabulary, self.head = vocabulary, decoding_copy(head, vocabulary)
        self.hidden = torch.zeros(0, vocabulary.hidden_size, dtype=vocabulary.dtype)

    def start(self, rows: int, capacity: int, ops: Ops) -> None:
        super().start(rows, capacity, ops)
        dtype, device = self.vocabulary.dtype, self.vocabulary.device
        self.hidden = torch.zeros(rows, self.vocabulary.hidden_size, dtype=dtype, device=device)

    def observe(self, commit: Commit) -> None:
        assert commit.hidden is not None, "it reads the target's last hidden states"
        rows, width = commit.hidden.shape[:2]
        starts = torch.arange(0, rows * width, width, device=commit.count.device)
        last = commit.hidden[:, :, 0].flatten(0, 1).index_select(0, starts + commit.count - 1)
        self.hidden[commit.rows[0] : commit.rows[-1] + 1] = last

    def select(self, rows: Sequence[int]) -> None:
        self.hidden[: len(rows)] = self.hidden[list(rows)]

    def packed_projection(self, own_projection: nn.Module | None) -> Native | None:
        """The head's projection for our kernels: its `own` one, its rows of the target's LM head,
        or the whole LM head; None if it is not packed."""
        tables = self.vocabulary.native
        projection = own_projection if own_projection is not None else self.head.projection
        if tables is None or projection is None:
            return None if tables is None else tables.head
        natives = packed([projection])
        return None if natives is None else natives[0]


def packed(layers: Iterable[nn.Module]) -> list[Native] | None:
    """Layers for our kernels; None if one of them is not packed."""
    natives = [layer.native if isinstance(layer, JointLinear) else None for layer in layers]
    known = [native for native in natives if native is not None]
    return known if len(known) == len(natives) else None


def must_hold(tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor], name: str) -> None:
    """Raise if weights are missing or have the wrong shape."""
    for key, empty in wanted.items():
        if key not in tensors:
            raise DrafterMismatch(f"{name} lacks {key}; its file is incomplete, fetch it again")
        if tensors[key].shape != empty.shape:
            shape, expected = tuple(tensors[key].shape), tuple(empty.shape)
            raise DrafterMismatch(
                f"{key} of {name} has shape {shape}, {expected} was expected; fetch it again, or "
                "one for this model"
            )


def decoding_copy(head: H, vocabulary: Vocabulary) -> H:
    """A copy of the head in the target's dtype and on its device.

    On a CPU with our kernels it is packed in 8 bits, which halves the time of drafting and does not
    change the text."""
    state, device, dtype = head.state_dict(), vocabulary.device, vocabulary.dtype
    with torch.device("meta"):
        copied = type(head)(head.config)
        if head.projection is not None:
            copied.projection = nn.Linear(*head.projection.weight.T.shape)
    with torch.inference_mode(False):
        weights = {name: tensor.to(device, dtype if tensor.is_floating_point() else None, copy=True)
                   for name, tensor in state.items()}  # fmt: skip
        copied.load_state_dict(weights, assign=True)
    small = slow_because("int8", dtype) is None
    for parent in copied.requires_grad_(False).modules() if small else ():
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and packable(child):
                whole = Int8Linear(child.weight, child.bias)
                replace_modules(parent, {name: child.out_features}, whole)
    pack_linears(copied)
    return copied


@torch.no_grad()
def lm_head_rows(vocabulary: Vocabulary, tokens: Tensor, like: Tensor) -> nn.Linear:
    """The rows of the target's LM head for `tokens`, frozen, of the dtype and device of `like`."""
    known = vocabulary.head_rows(tokens)
    if known is None:
        weight, bias = lm_head_of(vocabulary)
        known = weight[tokens], bias[tokens]
    rows = nn.Linear(known[0].shape[1], len(tokens), device="meta").requires_grad_(False)
    state = {"weight": known[0].to(like), "bias": known[1].to(like)}
    rows.load_state_dict(state, assign=True)
    return rows


@torch.no_grad()
def lm_head_of(vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    """The target's LM head as weight [V, H] and bias [V], in at least float32."""
    eye = torch.eye(vocabulary.hidden_size, dtype=vocabulary.dtype, device=vocabulary.device)
    dtype = torch.promote_types(vocabulary.dtype, torch.float32)
    bias = vocabulary.unembed(torch.zeros_like(eye[:1])).to(dtype)
    table = vocabulary.unembed(eye).to(dtype) - bias
    return table.T, bias[0]
