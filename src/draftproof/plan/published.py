"""What a drafter that is not trained yet may give, by published figures, and what it would cost.

Figures are of Vicuna 7B to 33B on chats; another model and other texts give others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from draftproof.training.config import SelfGenerateConfig, TrainConfig

if TYPE_CHECKING:
    from draftproof.plan.planner import Planner


class Figure(NamedTuple):
    """Tokens per round with trees of so many nodes, greedy."""

    nodes: int
    tokens: float


PUBLISHED = {
    "medusa": (Figure(63, 2.31), Figure(63, 2.66)),
    "redrafter": (Figure(4, 2.35), Figure(8, 2.53), Figure(63, 4.21)),
}
"""Medusa: Spec-Bench, and the authors' MT-bench logs. ReDrafter: Apple's logs, and 2403.09919."""


class Bracket(NamedTuple):
    """Speed-ups that published figures would give here; seconds, and money, of training."""

    drafter: str
    batch: int
    low: float
    high: float
    train_seconds: float
    train_cost: float | None


def brackets(planner: Planner, fastest: float) -> list[Bracket]:
    """Of every kind of heads that was not given, at every batch; fastest: tokens per second at
    which the target can write what they learn from."""
    machine, context, price = planner.machine, planner.context, planner.config.price
    width, vocab = planner.plain.target.hidden_size, planner.plain.target.vocab_size
    heads = {"medusa": 5.0 * width * width, "redrafter": 7.0 * width * width + width * vocab}
    tokens, epochs, found = SelfGenerateConfig().tokens, TrainConfig().epochs, list[Bracket]()
    for kind, figures in PUBLISHED.items():
        if kind in {getattr(one, "name", "") for one in planner.drafters.values()}:
            continue
        share = heads[kind] / max(1.0, planner.size.parameters)
        read = machine.prompt(256) / 256                # a token of a text: forward, no head
        train = tokens / fastest + epochs * tokens * read * (1 + 3 * share)
        for batch in planner.config.batches:
            plain = machine.round(False, batch, 0, context)
            ups = [one.tokens * plain / (machine.round(False, batch, one.nodes, context)
                                         + 5 * share * plain) for one in figures]
            cost = price * train / 3600 if price is not None else None
            found.append(Bracket(kind, batch, min(ups), max(ups), train, cost))
    return found


def told(one: Bracket) -> str:
    """One line."""
    hours, money = one.train_seconds / 3600, one.train_cost
    cost = f" ({money:.2f})" if money is not None else ""
    return (f"{one.drafter}, not trained yet, batch {one.batch}: {one.low:.2f}–{one.high:.2f}× by "
            f"published figures, not measured; training here {hours:.1f} h{cost}")  # fmt: skip
