"""Calibration: the draft tree that pays most with these heads, prompts, target and machine.

The target's text does not depend on the drafts, so it is written once. Each step of the head ranked
the token that came, and a static tree accepts as far as it holds these ranks as a path. So
positions of the text are joint samples of ranks: a node is worth the share of positions that begin
with its path (Medusa's own calibration, arXiv 2401.10774 section 2.3.3, multiplies the steps'
shares), and how many rounds a tree would take is counted, not estimated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.optimize import isotonic_regression
from torch import Tensor

from draftproof.core import noise
from draftproof.core.noise import Role
from draftproof.core.params import Sampling
from draftproof.drafters.base import DraftHead, over_vocabulary
from draftproof.drafters.medusa import Medusa, MedusaHead
from draftproof.drafters.plain import Plain
from draftproof.engine.engine import Engine
from draftproof.errors import BadInput
from draftproof.model.target import Target
from draftproof.training.draft_trees import RANKS, RankPath, complete, expected, grow

SIZES, TIMED_TOKENS, TIMES = (0, 1, 2, 4, 8, 16, 32, 64), 24, 5
"""Trees whose rounds are timed, tokens of a timed run, and how often."""

Progress = Callable[[str, int, int], None]
"""Hears what is being done, how much of it is done, and of how much."""


@dataclass(frozen=True)
class CalibrateConfig:
    """`tokens` of text per prompt, `rows` side by side; trees of at most `nodes` draft tokens."""

    tokens: int = 128
    temperature: float = 0.0
    nodes: int = 64
    rows: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        if self.tokens < 8:
            raise BadInput(f"{self.tokens} tokens per prompt were asked for; write at least 8")
        if not 1 <= self.nodes <= 1024:
            raise BadInput(f"trees of {self.nodes} nodes were asked for; give 1 to 1024")


class Written(NamedTuple):
    """A text of the target: its tokens, how many are the prompt, and how it was sampled."""

    tokens: list[int]
    prompt: int
    sampling: Sampling


@dataclass(frozen=True)
class Calibration:
    """What was measured. Index N is of N draft tokens per round, 0 of plain decoding.

    tree: rank paths in order of addition: its first N are the best N nodes. tokens: per round,
    expected on texts the tree was not grown on. seconds: of a round. written: tokens the target
    wrote.
    """

    tree: tuple[RankPath, ...]
    tokens: tuple[float, ...]
    seconds: tuple[float, ...]
    written: int

    @cached_property
    def speed_up(self) -> tuple[float, ...]:
        """Expected tokens per second, plain decoding being 1."""
        rounds = zip(self.tokens, self.seconds, strict=True)
        return tuple(self.seconds[0] * tokens / seconds for tokens, seconds in rounds)

    @cached_property
    def nodes(self) -> int:
        """The size that is fastest, of those that draft at all."""
        return max(range(1, len(self.speed_up)), key=lambda nodes: self.speed_up[nodes])

    @property
    def chosen(self) -> tuple[RankPath, ...]:
        """The tree of that size."""
        return self.tree[: self.nodes]

    def as_json(self) -> dict[str, Any]:
        """Everything, for machines."""
        return asdict(self) | {"nodes": self.nodes, "chosen": self.chosen,
                               "speed_up": self.speed_up}  # fmt: skip


def calibrate(
    engine: Engine, head: DraftHead, prompts: Sequence[Sequence[int]], config: CalibrateConfig,
    progress: Progress = lambda *_: None,
) -> Calibration:  # fmt: skip
    """Let the target write, count ranks, grow trees, time rounds.

    engine: drafts with these heads and is exact; its target, sampling and end tokens are used.
    """
    if len(prompts) < 2:
        why = "a tree is judged on other texts than it was grown on"
        raise BadInput(f"{len(prompts)} prompt was given; give at least two: {why}")
    target = engine.target
    texts, ranks = write(engine, prompts, config, progress), list[Tensor]()
    for text in texts:
        ranks.append(ranks_of(head, target, text))
        progress("reading", len(ranks), len(texts))
    widest = min(RANKS, target.vocab_size) if target.reads_trees else 1
    tree = grow(complete(ranks), config.nodes, widest)
    seconds = _round_seconds(engine, head, tree, prompts[0], config, progress)
    written = sum(len(text.tokens) - text.prompt for text in texts)
    return Calibration(tree, expected(ranks, len(tree), widest), seconds, written)


def write(
    engine: Engine, prompts: Sequence[Sequence[int]], config: CalibrateConfig,
    progress: Progress = lambda *_: None,
) -> list[Written]:  # fmt: skip
    """The target's own continuation of every prompt."""
    samplings = [_seeded(engine.sampling, config, index) for index in range(len(prompts))]
    asked, new = [list(prompt) for prompt in prompts], dict[int, list[int]]()
    for done in engine.as_completed(
        asked, max_new_tokens=config.tokens, sampling=samplings, batch_size=config.rows
    ):
        new[done.prompt] = done.tokens
        progress("writing", len(new), len(prompts))
    rows = enumerate(zip(asked, samplings, strict=True))
    return [Written(prompt + new[i], len(prompt), sampling) for i, (prompt, sampling) in rows]


@torch.inference_mode()
def ranks_of(head: DraftHead, target: Target, text: Written) -> Tensor:
    """[P, K]: which choice of each step the token was that came; RANKS for none of the first, or no
    token.

    Position j is a round whose root is new token j. Where the text was sampled, steps choose as
    drafters do: by logits plus the noise of the target's own choice.
    """
    tokens = torch.tensor([text.tokens], device=target.device)
    weights = torch.ones_like(tokens, dtype=torch.float32)
    features = target.features(tokens, weights, hidden_layers=head.hidden_layers)
    found = torch.full((len(text.tokens) - text.prompt, head.steps), RANKS)
    for step, logits in enumerate(head.predict(features, target)):
        first, last = text.prompt + 1 + step, len(text.tokens)           # what this step predicts
        if first < last:
            here = logits[0, first - step - 2 : last - step - 2]
            here = over_vocabulary(here, target.vocab_size, head.token_map)
            here = head.given_previous(tokens[0, first - 1 : last - 1], here)
            scores = _gumbel_logits(here, text.sampling, first)
            own = scores.gather(-1, tokens[0, first:last, None])
            found[: last - first, step] = (scores > own).sum(-1).clamp(max=RANKS).cpu()
    return found


def _gumbel_logits(logits: Tensor, sampling: Sampling, first: int) -> Tensor:
    """[P, V] the scores by which a drafter chooses the tokens from position `first` on."""
    scores = logits if logits.dtype == torch.float64 else logits.float()
    if sampling.temperature == 0:
        return scores
    places = torch.arange(first, first + len(logits), device=logits.device)[None]
    keys = noise.row_keys([sampling.seed], [0], logits.device)
    gumbel = noise.gumbel(noise.stream(keys, Role.TARGET, places), logits.shape[-1])[0]
    return scores / sampling.temperature + gumbel


def _round_seconds(
    engine: Engine, head: DraftHead, tree: Sequence[RankPath], prompt: Sequence[int],
    config: CalibrateConfig, progress: Progress,
) -> tuple[float, ...]:  # fmt: skip
    """Median seconds of whole rounds with trees of 0 to all nodes: timed at some sizes, in turn,
    the rest on straight lines between."""
    sizes = sorted({size for size in SIZES if size < len(tree)} | {len(tree)})
    own = Medusa(head, engine.target, tree) if isinstance(head, MedusaHead) else None
    sampling, taken = _seeded(engine.sampling, config, 0), {size: list[float]() for size in sizes}
    for time in range(TIMES + 1):
        for size in sizes:
            drafter = (own or head.drafter(engine.target)) if size else Plain()
            timed = Engine(engine.target, drafter, budget=size)
            most = TIMED_TOKENS if time else 8                          # the first run warms up
            (done,) = timed.generate([list(prompt)], max_new_tokens=most, sampling=sampling)
            seconds = sum(done.stats.seconds.values()) - done.stats.seconds["prefill"]
            taken[size] += [seconds / max(1, done.stats.rounds)] if time else []
        progress("timing rounds", time, TIMES)
    # where more nodes seem to cost less, it is noise
    rising = isotonic_regression([median(some) for some in taken.values()]).x
    return tuple(np.interp(range(len(tree) + 1), sizes, rising).tolist())


def _seeded(sampling: Sampling, config: CalibrateConfig, index: int) -> Sampling:
    """At this temperature, with a seed for each prompt."""
    return replace(sampling, temperature=config.temperature, seed=config.seed + index)
