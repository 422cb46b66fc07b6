"""What is known about a target before it reads anything, from `inspection.inspect` or, for native
models, by construction."""

from __future__ import annotations

from dataclasses import dataclass

from draftproof.cache.layout import Layout


@dataclass(frozen=True)
class Facts:
    """The description of a model that a target is built from.

    Attributes:
        layout: What each layer stores per token, and how far attention sees.
        reads_trees: Whether trees are read exactly; otherwise drafts are chains.
        single_steps: Whether recurrent states may be advanced by one token at a time.
        fast: Whether the short forward (`fast_forward`) agrees with the model's own.
        fused: Whether our kernels (`fused_forward`) agree with it as well.
        checked: How this was established, for `draftproof doctor`.
    """

    layout: Layout
    reads_trees: bool
    single_steps: bool = True
    fast: bool = False
    fused: bool = False
    checked: str = "compared at load with the model's own forward in transformers"

    @property
    def vocab_size(self) -> int:
        """The number of logits per token."""
        return self.layout.vocab

    @property
    def has_states(self) -> bool:
        """Whether layers keep recurrent or convolutional states."""
        return any(self.layout.states)
