"""Self-speculation: the target drafts for itself, with cheaper weights or fewer layers (Draft & Verify 2309.08168;
LayerSkip 2404.16710), so that no second model is needed.

A quantised copy of the target agrees with it nearly always and costs a fraction; it shares what is not quantised. The
first layers alone cost their share of the depth and hold no weights of their own, but agree well only with models that
were trained to be left early.
"""

from __future__ import annotations

from draftproof.core.tree import TreeShape
from draftproof.drafters.draft_model import DraftModel
from draftproof.errors import BadInput
from draftproof.model.quantize import KINDS
from draftproof.model.target import Target

PREFIX = "self-"
"""Names of self-drafts begin with this."""


class SelfDraft(DraftModel):
    """Drafts with the target's own weights; its cache is its own.

    target: an unquantised target, packed or not, if `quantize` is given. layers: draft with so many of the first layers;
    None, with all. quantize: "int8" or "int4"; with neither, the target itself drafts. shape: as for `DraftModel`.
    """

    name = "self-draft"

    def __init__(
        self, target: Target, *, layers: int | None = None, quantize: str | None = None, shape: TreeShape | None = None
    ) -> None:
        draft = target if layers is None else target.first_layers(layers)
        super().__init__(draft if quantize is None else draft.quantized(quantize), target.vocab_size, shape)


def self_named(name: str) -> tuple[int | None, str | None]:
    """Layers and quantisation of "self-layers:4", "self-int8" or "self-int4"; raises BadInput for another name."""
    kind, _, count = name.removeprefix(PREFIX).partition(":")
    if kind == "layers" and count.isdecimal():
        return int(count), None
    if kind in KINDS and not count:
        return None, kind
    raise BadInput(f"the drafter was {name!r}; a target drafts for itself as self-int8, self-int4, or self-layers:N")
