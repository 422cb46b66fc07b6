"""From options to an engine and a sampling. Knows the library's entry points; checks what only the command line can ask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from draftproof.errors import BadInput

if TYPE_CHECKING:
    from draftproof.core.sampling import Sampling
    from draftproof.core.tree import TreeShape
    from draftproof.decoding.engine import Engine

MOST_NODES = 1024
"""Draft tokens per round beyond which a tree is a typing error."""


@dataclass(frozen=True)
class Setup:
    """What the options say about the engine. None leaves it to the library."""

    model: str
    assistant_model: str | None = None
    drafter: str | None = None
    num_assistant_tokens: int | None = None
    draft_tree: str | None = None
    acceptance: str = "match"
    dtype: str | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        """Refuse before a model is loaded what can be refused before."""
        if self.assistant_model is not None and self.drafter is not None:
            raise BadInput("both --assistant-model and --drafter were given; give one of them")
        if self.num_assistant_tokens is not None and self.num_assistant_tokens < 1:
            raise BadInput(
                f"num_assistant_tokens was {self.num_assistant_tokens}; draft at least 1 token, "
                "or use --drafter none for plain decoding"
            )
        if self.draft_tree is not None and self.assistant_model is None and self.drafter in (None, "none", "prompt-lookup"):
            raise BadInput("--draft-tree is drawn by a draft model; name one with --assistant-model")
        branching(self.draft_tree or "1")

    def engine(self) -> Engine:
        """Load everything and check it against each other."""
        from draftproof.decoding.load import load

        return load(
            self.model,
            assistant_model=self.assistant_model,
            drafter=self.drafter,
            dtype=self.dtype,
            device=self.device,
            acceptance=self.acceptance,
            budget=self.num_assistant_tokens,
            draft_tree=self._shape(),
        )

    def _shape(self) -> TreeShape | None:
        from draftproof.core.tree import TreeShape

        return TreeShape.branching(branching(self.draft_tree)) if self.draft_tree is not None else None


def branching(text: str) -> tuple[int, ...]:
    """Children per node, level by level, from "3,2,1"."""
    try:
        widths = tuple(int(part) for part in text.split(","))
    except ValueError:
        widths = ()
    if not widths or min(widths) < 1:
        raise BadInput(f"draft_tree was {text!r}; give children per node, level by level, such as 3,2,1")
    nodes = sum(prod(widths[:depth]) for depth in range(1, len(widths) + 1)) if len(widths) < MOST_NODES else MOST_NODES
    if nodes >= MOST_NODES:
        raise BadInput(f"draft_tree {text!r} drafts {nodes} tokens or more per round; stay below {MOST_NODES}")
    return widths


def plain_beside(engine: Engine) -> Engine:
    """Plain decoding with the same target and defaults; nothing is loaded twice."""
    from draftproof.decoding.engine import Engine
    from draftproof.drafters.plain import Plain

    return Engine(engine.target, Plain(), codec=engine.codec, sampling=engine.sampling, stop_tokens=engine.stop_tokens)


def sampling(base: Sampling, given: Mapping[str, Any]) -> Sampling:
    """`base` with what was asked for; None and empty lists ask for nothing."""
    from dataclasses import replace

    return replace(base, **{name: value for name, value in given.items() if value is not None and value != []})


def described(setup: Setup, engine: Engine, wanted: Sampling) -> dict[str, Any]:
    """The settings a text came from, for JSON: what was asked, what was chosen, and the sampling in full."""
    from dataclasses import asdict

    return {
        "model": engine.target.name if setup.model == engine.target.name else setup.model,
        "drafter": engine.drafter.name,
        "assistant_model": setup.assistant_model,
        "draft_tokens": engine.budget.most,
        "draft_tree": setup.draft_tree,
        "acceptance": engine.acceptance,
        "dtype": str(engine.target.dtype).removeprefix("torch."),
        "device": str(engine.target.device),
        "sampling": {name: value for name, value in asdict(wanted).items() if name != "processors"},
    }


def as_chat(text: str) -> list[dict[str, str]]:
    """A prompt as the user's message."""
    if not text:
        raise BadInput("the prompt is empty; give at least one word")
    return [{"role": "user", "content": text}]
