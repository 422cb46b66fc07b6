"""Calibration: the draft tree that pays most with these heads, for this target, these prompts and this machine.

The target's text does not depend on the drafts, so it is written once. For every token of it, each step of the head
ranked the token that came, and a static tree accepts as far as it holds these ranks as a path. So positions of the text
are joint samples of ranks: the share of positions that begin with a path is what that node is worth, with no
independence between steps assumed (Medusa's own calibration, arXiv 2401.10774 section 2.3.3, multiplies them), and how
many rounds a tree would take is counted, not estimated.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from statistics import median
from typing import Any, NamedTuple

import torch
from scipy.optimize import isotonic_regression
from torch import Tensor

from draftproof.core import noise
from draftproof.core.noise import Role
from draftproof.core.params import Sampling
from draftproof.drafters.base import Drafter, DraftHead
from draftproof.drafters.medusa import Medusa, MedusaHead
from draftproof.drafters.plain import Plain
from draftproof.engine.cost_curve import WIDTHS, CostCurve, measure_costs
from draftproof.engine.engine import Completion, Engine
from draftproof.engine.stats import RoundStats
from draftproof.errors import BadInput
from draftproof.model.target import Target

RANKS = 20
"""Choices of a step that a tree may take."""
PRIOR = 16.0
"""Weight, in positions, of independence: a path seen less often is valued by the ranks of its steps, one by one."""
HELD_OUT, MOST_HELD_OUT = 5, 12
"""Every fifth prompt is held out, and at most so many: each is completed three times over."""
MEMORY = 1 << 26
"""Numbers that the logits of a step may have at a time; a single text may have more."""
TIMED_TOKENS, TIMES = 24, 5
"""Tokens of a run that is timed for the drafter's share of a round, and how often."""

RankPath = tuple[int, ...]
Progress = Callable[[str, int, int], None]
"""Hears what is being done, how much of it is done, and of how much."""


@dataclass(frozen=True)
class CalibrateConfig:
    """`tokens` of text per prompt at this temperature, trees of at most `nodes` draft tokens; `rows` side by side."""

    tokens: int = 128
    temperature: float = 0.0
    nodes: int = 64
    rows: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        if self.tokens < 8:
            raise BadInput(f"{self.tokens} tokens per prompt were asked for; write at least 8, or nothing can be counted")
        if not 1 <= self.nodes <= 1024:
            raise BadInput(f"trees of {self.nodes} nodes were asked for; give 1 to 1024")


class Written(NamedTuple):
    """A text of the target: its tokens, how many of them are the prompt, and the sampling it was written with."""

    tokens: list[int]
    prompt: int
    sampling: Sampling


class Comparison(NamedTuple):
    """What the engine measured on held-out prompts: tokens per round, and of each prompt seconds per new token."""

    name: str
    tokens_per_round: float
    seconds_per_token: tuple[float, ...]

    def speed_up(self, other: Comparison) -> float:
        """How many times as fast as the other, in the median over prompts."""
        pairs = zip(other.seconds_per_token, self.seconds_per_token, strict=True)
        return median(theirs / max(mine, 1e-12) for theirs, mine in pairs)


@dataclass(frozen=True)
class Calibration:
    """What was found. Index N is of N draft tokens per round, 0 of plain decoding.

    tree: rank paths in order of addition: its first N are the best N nodes. tokens: per round, expected on texts the
    tree was not grown on. verify: seconds of the target's read of N + 1 nodes. overhead: seconds of the rest of a round.
    acceptance, positions_by_depth: per depth the share of each rank, of the positions where all before it is in the
    largest tree; and of how many. compared: plain decoding, the chosen tree and the head's own, on held-out prompts.
    """

    tree: tuple[RankPath, ...]
    tokens: tuple[float, ...]
    verify: CostCurve
    overhead: CostCurve
    acceptance: tuple[tuple[float, ...], ...]
    positions_by_depth: tuple[int, ...]
    compared: tuple[Comparison, ...]
    written: int
    positions: int
    held_out: int

    def seconds(self, nodes: int) -> float:
        """Seconds of a round with so many draft tokens."""
        return self.verify.at(nodes + 1) + self.overhead.at(nodes)

    @cached_property
    def speed_up(self) -> tuple[float, ...]:
        """Expected tokens per second, plain decoding being 1."""
        plain = self.seconds(0)
        return tuple(plain * tokens / self.seconds(nodes) for nodes, tokens in enumerate(self.tokens))

    @cached_property
    def nodes(self) -> int:
        """The size that is fastest, of those that draft at all."""
        return max(range(1, len(self.speed_up)), key=lambda nodes: self.speed_up[nodes])

    @property
    def chosen(self) -> tuple[RankPath, ...]:
        """The tree of that size."""
        return self.tree[: self.nodes]

    def as_json(self, config: CalibrateConfig) -> dict[str, Any]:
        """Everything, for machines."""
        found = asdict(self)
        return {
            "nodes": self.nodes, "tree": self.chosen, "tree_in_order_of_addition": self.tree,
            "tokens_per_round": self.tokens, "expected_speed_up": self.speed_up,
            "seconds_per_round": [self.seconds(nodes) for nodes in range(len(self.tokens))],
            "verify": found["verify"], "overhead": found["overhead"],
            "acceptance_by_depth_and_rank": self.acceptance, "places_by_depth": self.positions_by_depth,
            "held_out": [one._asdict() for one in self.compared], "held_out_prompts": self.held_out,
            "tokens_written": self.written, "places": self.positions, "wanted": asdict(config),
        }  # fmt: skip


def calibrate(
    engine: Engine, head: DraftHead, prompts: Sequence[Sequence[int]], config: CalibrateConfig,
    progress: Progress = lambda *_: None,
) -> Calibration:  # fmt: skip
    """Let the target write, count ranks, grow trees, measure costs, and compare on held-out prompts.

    engine: drafts with these heads and is exact; its target, sampling and end tokens are used.
    """
    if len(prompts) < 2:
        raise BadInput(f"{len(prompts)} prompt was given; give at least two, one is held out")
    target, held_out = engine.target, prompts[::HELD_OUT][:MOST_HELD_OUT]
    others = [prompt for i, prompt in enumerate(prompts) if i % HELD_OUT or i // HELD_OUT >= MOST_HELD_OUT]
    texts = write(engine, others, config, progress)
    ranks = ranks_of(head, target, texts, progress)
    widest = min(RANKS, target.vocab_size) if target.reads_trees else 1
    positions = complete(ranks)
    tree = grow(positions, config.nodes, widest)
    acceptance, by_depth = by_rank(positions, tree)
    sizes = sorted({width for width in (0, *WIDTHS) if width < len(tree)} | {len(tree)})
    context = max(1, min(int(median(len(text.tokens) for text in texts)), target.context - len(tree) - 1))
    verify = measure_costs(target, [size + 1 for size in sizes], context=context,
                           progress=lambda done, of: progress("timing reads", done, of))  # fmt: skip
    timed = [size for size in sizes if size in (0, 1, 4, 16, 64, len(tree))]
    found = Calibration(
        tree=tree, tokens=expected(ranks, len(tree), widest), verify=rising(verify),
        overhead=rising(_overheads(head, target, tree, timed, held_out[0], _sampling(engine, config, 0), progress)),
        acceptance=acceptance, positions_by_depth=by_depth, compared=(), positions=len(positions),
        written=sum(len(text.tokens) - text.prompt for text in texts), held_out=len(held_out),
    )  # fmt: skip
    return replace(found, compared=_compared(engine, head, found.chosen, held_out, config, progress))


# What the target writes, and the ranks the head gives it --------------------------------------------------------------


def write(
    engine: Engine, prompts: Sequence[Sequence[int]], config: CalibrateConfig, progress: Progress = lambda *_: None
) -> list[Written]:
    """The target's own continuation of every prompt."""
    samplings = [_sampling(engine, config, index) for index in range(len(prompts))]
    found: dict[int, Completion] = {}
    asked = [list(prompt) for prompt in prompts]
    progress("writing", 0, len(prompts))
    for done in engine.as_completed(asked, max_new_tokens=config.tokens, sampling=samplings, batch_size=config.rows):
        found[done.prompt] = done
        progress("writing", len(found), len(prompts))
    return [Written(asked[i] + found[i].tokens, len(asked[i]), samplings[i]) for i in range(len(prompts))]


@torch.inference_mode()
def ranks_of(
    head: DraftHead, target: Target, texts: Sequence[Written], progress: Progress = lambda *_: None
) -> list[Tensor]:
    """Per text [P, K]: which choice of each step the token was that came; RANKS for none of the first, or no token.

    Position j is a round whose root is new token j. Where the text was sampled, steps choose as drafters do: by logits
    plus the noise of the target's own choice.
    """
    found: list[Tensor] = []
    order = sorted(range(len(texts)), key=lambda index: -len(texts[index].tokens))
    progress("reading", 0, len(texts))
    while len(found) < len(texts):
        size = max(1, MEMORY // (len(texts[order[len(found)]].tokens) * target.vocab_size))
        found += _ranks(head, target, [texts[index] for index in order[len(found) : len(found) + size]])
        progress("reading", len(found), len(texts))
    return [ranks for _, ranks in sorted(zip(order, found, strict=True), key=lambda pair: pair[0])]


def _ranks(head: DraftHead, target: Target, texts: Sequence[Written]) -> list[Tensor]:
    tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(text.tokens) for text in texts], batch_first=True)
    tokens = tokens.to(target.device)
    features = target.features(tokens, torch.ones_like(tokens, dtype=torch.float32), hidden_layers=head.hidden_layers)
    found = [torch.full((len(text.tokens) - text.prompt, head.steps), RANKS) for text in texts]
    for step, logits in enumerate(head.predict(features, target)):
        for row, text in enumerate(texts):
            first, last = text.prompt + 1 + step, len(text.tokens)              # the tokens this step predicts
            if first < last:
                here = head.behind(tokens[row, first - 1 : last - 1], logits[row, first - step - 2 : last - step - 2])
                scores = _gumbel_logits(here, text.sampling, first)
                own = scores.gather(-1, tokens[row, first:last, None])
                found[row][: last - first, step] = (scores > own).sum(-1).clamp(max=RANKS).cpu()
    return found


def _gumbel_logits(logits: Tensor, sampling: Sampling, first: int) -> Tensor:
    """[P, V] the scores by which a drafter chooses the tokens from position `first` on."""
    scores = logits if logits.dtype == torch.float64 else logits.float()
    if sampling.temperature == 0:
        return scores
    places = torch.arange(first, first + len(logits), device=logits.device)[None]
    keys = noise.row_keys([sampling.seed], [0], logits.device)
    return scores / sampling.temperature + noise.gumbel(noise.stream(keys, Role.TARGET, places), logits.shape[-1])[0]


def complete(ranks: Sequence[Tensor]) -> Tensor:
    """[n, K] the ranks of all positions behind which every step had a token to predict."""
    steps = ranks[0].shape[1]
    positions = torch.cat([one[: max(0, len(one) - steps)] for one in ranks])
    if len(positions) == 0:
        raise BadInput(f"the texts are too short to predict {steps} tokens; give prompts that have longer answers")
    return positions


# Trees ----------------------------------------------------------------------------------------------------------------


def grow(positions: Tensor, nodes: int, widest: int = RANKS) -> tuple[RankPath, ...]:
    """The best tree of `nodes` nodes, as rank paths in order of addition; its beginnings are the best of their size.

    positions: [n, K] ranks. A node is worth the probability of its path, so a child is never worth more than its parent
    and adding the best neighbour is optimal. It is the share of positions that begin with the path, each conditional
    share drawn towards that of its rank alone: (count + PRIOR * share) / (count of the parent + PRIOR).
    """
    alone = [torch.bincount(column, minlength=RANKS + 1).div(len(positions)).tolist() for column in positions.T]
    counts = Counter(tuple(row[:depth]) for row in positions.tolist() for depth in range(positions.shape[1] + 1))
    tree: list[RankPath] = []
    neighbours: list[tuple[float, int, RankPath]] = [(-1.0, 0, ())]
    while neighbours and len(tree) <= nodes:
        worth, depth, path = heapq.heappop(neighbours)
        tree.append(path)
        for rank in range(widest if depth < len(alone) else 0):
            share = (counts[*path, rank] + PRIOR * alone[depth][rank]) / (counts[path] + PRIOR)
            heapq.heappush(neighbours, (worth * share, depth + 1, (*path, rank)))
    return tuple(tree[1:])


def expected(ranks: Sequence[Tensor], most: int, widest: int = RANKS) -> tuple[float, ...]:
    """Tokens per round with trees of 0, 1, ..., `most` nodes, each counted on the texts that it was not grown on."""
    halves = [ranks[0::2], ranks[1::2]] if len(ranks) > 1 else [ranks, ranks]
    rounds, emitted = torch.zeros(most + 1), sum(len(one) - 1 for half in halves for one in half)
    for grown_on, counted_on in (halves, halves[::-1]):
        rounds += torch.tensor(rounds_of(counted_on, grow(complete(grown_on), most, widest), most))
    return tuple(emitted / max(1, count) for count in rounds.tolist())


def rounds_of(ranks: Sequence[Tensor], tree: Sequence[RankPath], most: int | None = None) -> list[int]:
    """Rounds it takes to write the texts with the first 0, 1, ..., `most` nodes of a tree.

    Exactly what an engine with the rule "match" would count: a round goes as far as the tree holds its position's ranks.
    """
    order = {path: number for number, path in enumerate(tree, 1)}
    total = [0] * ((len(tree) if most is None else most) + 1)
    for one in ranks:
        needed = [[order.get(tuple(row[: depth + 1]), math.inf) for depth in range(len(row))] for row in one.tolist()]
        for nodes in range(len(total)):
            position = 0
            while position < len(needed) - 1:
                position += 1 + sum(number <= nodes for number in needed[position])
                total[nodes] += 1
    return total


def by_rank(positions: Tensor, tree: Sequence[RankPath]) -> tuple[tuple[tuple[float, ...], ...], tuple[int, ...]]:
    """Per depth the share of each rank, where all before it is in the tree; and of how many positions."""
    known, rows, shares, totals = {(), *tree}, positions.tolist(), [], []
    for depth in range(positions.shape[1]):
        reached = positions[[tuple(row[:depth]) in known for row in rows], depth]
        hits = torch.bincount(reached, minlength=RANKS + 1)[:RANKS]
        shares.append(tuple((hits / max(1, len(reached))).tolist()))
        totals.append(len(reached))
    return tuple(shares), tuple(totals)


# Costs ----------------------------------------------------------------------------------------------------------------


def _overheads(
    head: DraftHead, target: Target, tree: Sequence[RankPath], sizes: Sequence[int], prompt: Sequence[int],
    sampling: Sampling, progress: Progress,
) -> CostCurve:  # fmt: skip
    """Seconds of a round that are not the target's, at these sizes, interleaved."""
    engines = [Engine(target, _drafter(head, target, tree) if nodes else Plain(), budget=nodes) for nodes in sizes]
    taken: list[list[float]] = [[] for _ in sizes]
    for turn in range(TIMES + 1):                                               # the first warms up
        for seconds, engine in zip(taken, engines, strict=True):
            (done,) = engine.generate([list(prompt)], max_new_tokens=TIMED_TOKENS, sampling=sampling)
            if turn and done.stats.rounds:
                seconds.append((done.stats.seconds["draft"] + done.stats.seconds["decide"]) / done.stats.rounds)
        progress("timing drafts", turn + 1, TIMES + 1)
    return CostCurve(tuple(sizes), tuple(median(seconds) if seconds else 0.0 for seconds in taken))


def rising(curve: CostCurve) -> CostCurve:
    """The nearest curve that never falls: more nodes cost no less, and where they seem to, it was measured badly."""
    return CostCurve(curve.widths, tuple(isotonic_regression(curve.seconds).x.tolist()))


def _compared(
    engine: Engine, head: DraftHead, tree: Sequence[RankPath], prompts: Sequence[Sequence[int]], config: CalibrateConfig,
    progress: Progress,
) -> tuple[Comparison, ...]:  # fmt: skip
    """Plain decoding, the calibrated tree and what the head drafts by itself at that size, interleaved by prompt."""
    target, ends = engine.target, engine.stop_tokens
    drafters: dict[str, Drafter] = {"plain": Plain()}
    if isinstance(head, MedusaHead):
        drafters |= {"calibrated tree": _drafter(head, target, tree), "dynamic tree": Medusa(head, target, "dynamic")}
    else:
        drafters |= {head.kind: head.drafter(target)}
    engines = {name: Engine(target, drafter, budget=len(tree), stop_tokens=ends) for name, drafter in drafters.items()}
    stats: dict[str, list[RoundStats]] = {name: [] for name in engines}
    for turn, prompt in enumerate([prompts[0], *prompts]):                      # the first warms up
        for name, one in engines.items():
            sampling = _sampling(engine, config, turn)
            (done,) = one.generate([list(prompt)], max_new_tokens=config.tokens if turn else 8, sampling=sampling)
            stats[name] += [done.stats] if turn else []
        progress("comparing", turn, len(prompts))
    return tuple(_comparison(name, runs) for name, runs in stats.items())


def _comparison(name: str, runs: Sequence[RoundStats]) -> Comparison:
    total = RoundStats()
    for stats in runs:
        total.add(stats)
    seconds = [sum(stats.seconds.values()) - stats.seconds["prefill"] for stats in runs]
    each = tuple(spent / max(1, stats.emitted) for spent, stats in zip(seconds, runs, strict=True))
    return Comparison(name, total.tokens_per_round, each)


def _drafter(head: DraftHead, target: Target, tree: Sequence[RankPath]) -> Drafter:
    """The drafter that takes this tree, where there is one."""
    return Medusa(head, target, tree) if isinstance(head, MedusaHead) else head.drafter(target)


def _sampling(engine: Engine, config: CalibrateConfig, index: int) -> Sampling:
    """The engine's own, at this temperature, with a seed for each prompt."""
    return replace(engine.sampling, temperature=config.temperature, seed=config.seed + index)
