"""Calibration: the tree that is worth drafting with these heads, for this target, these prompts and this machine.

The target's text does not depend on the drafts, so it is written once. Behind every token of it, each step of the head gave
the token that came some rank, and a static tree accepts as far as it holds these ranks as a path. So the places of the
text are joint samples of the ranks: the share of places that begin with a path is what that node of a tree is worth, with
no independence between steps assumed (Medusa's own calibration, 2401.10774 section 2.3.3, multiplies them), and how
many rounds a tree would have taken is counted, not estimated.

Knows texts, ranks, trees and costs. How heads are stored and how this is shown is the command's.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import NamedTuple

import torch
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
from draftproof.model.tokenizer import Codec
from draftproof.training.chats import question
from draftproof.training.texts import Document

RANKS = 20
"""Choices of a step that a tree may take; beyond is never."""
PRIOR = 16.0
"""Places' worth of independence: a path seen less often is valued by the ranks of its steps, one by one."""
OPENING = 64
"""Tokens of a plain text that serve as a prompt."""
HELD_OUT, MOST_HELD_OUT = 5, 12
"""Every fifth prompt is held out, and at most so many: each is completed three times over."""
MEMORY = 1 << 26
"""Numbers that the logits of a step may have at a time; a single text may have more."""
TIMED_TOKENS, TIMES = 24, 5
"""Tokens of a run that is timed for the drafter's share of a round, and how often."""

RankPath = tuple[int, ...]
Told = Callable[[str, int, int], None]
"""Hears what is being done, how much of it is done, and of how much."""


@dataclass(frozen=True)
class Wanted:
    """What is calibrated: `tokens` of text per prompt at this temperature, trees of at most `nodes` draft tokens.

    rows: texts written side by side. The costs are those of one row.
    """

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


class Lane(NamedTuple):
    """What the engine measured on held-out prompts: tokens per round, and of each prompt seconds per token behind the first."""

    name: str
    tokens_per_round: float
    seconds_per_token: tuple[float, ...]

    def speed_up(self, other: Lane) -> float:
        """How many times as fast as the other, in the median over prompts."""
        pairs = zip(other.seconds_per_token, self.seconds_per_token, strict=True)
        return median(theirs / max(mine, 1e-12) for theirs, mine in pairs)


@dataclass(frozen=True)
class Calibration:
    """What was found. Index N is of N draft tokens per round, 0 of plain decoding.

    tree: rank paths in order of addition: its first N are the best N nodes. tokens: per round, expected on texts the
    tree was not grown on. verify: seconds of the target's read of N + 1 nodes. overhead: seconds of the rest of a round.
    acceptance, tried: per depth the share of each rank, of the places where all before it stands in the largest tree; and
    of how many places. lanes: the chosen tree and its rivals, on held-out prompts. written, places: tokens, and places counted.
    """

    tree: tuple[RankPath, ...]
    tokens: tuple[float, ...]
    verify: CostCurve
    overhead: CostCurve
    acceptance: tuple[tuple[float, ...], ...]
    tried: tuple[int, ...]
    lanes: tuple[Lane, ...]
    written: int
    places: int
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


def prompt_of(document: Document, codec: Codec) -> list[int]:
    """What the target is to go on with: a chat up to its last question, a prompt, or the opening of a text."""
    if document.messages:
        asked = [index for index, (role, _) in enumerate(document.messages) if role == "user"]
        return question(codec, document.messages[: asked[-1] + 1 if asked else None])
    if document.prompt is not None:
        return codec.encode(document.prompt)
    return codec.encode(document.text[: 20 * OPENING])[:OPENING]


def calibrate(
    engine: Engine, head: DraftHead, prompts: Sequence[Sequence[int]], wanted: Wanted, told: Told = lambda *_: None
) -> Calibration:
    """Let the target write, count ranks, grow trees, measure costs, and compare on held-out prompts.

    engine: drafts with these heads and is exact; its target, sampling and end tokens are used.
    """
    if len(prompts) < 2:
        raise BadInput(f"{len(prompts)} prompt was given; give at least two, one is held out")
    target = engine.target
    held_out = prompts[::HELD_OUT][:MOST_HELD_OUT]
    rest = [prompt for index, prompt in enumerate(prompts) if index % HELD_OUT or index // HELD_OUT >= MOST_HELD_OUT]
    texts = write(engine, rest, wanted, told)
    ranks = ranks_of(head, target, texts, told)
    widest = min(RANKS, target.vocab_size) if target.reads_trees else 1
    places = complete(ranks)
    tree = grow(places, wanted.nodes, widest)
    acceptance, tried = by_rank(places, tree)
    found = Calibration(
        tree=tree,
        tokens=expected(ranks, len(tree), widest),
        verify=rising(_verify_costs(target, texts, len(tree), told)),
        overhead=rising(_overheads(head, target, tree, held_out[0], _sampling(engine, wanted, 0), told)),
        acceptance=acceptance,
        tried=tried,
        lanes=(),
        written=sum(len(text.tokens) - text.prompt for text in texts),
        places=len(places),
        held_out=len(held_out),
    )
    return replace(found, lanes=_lanes(engine, head, found.chosen, held_out, wanted, told))


# What the target writes, and the ranks it gives ---------------------------------------------------------------------------


def write(engine: Engine, prompts: Sequence[Sequence[int]], wanted: Wanted, told: Told) -> list[Written]:
    """The target's own continuation of every prompt."""
    samplings = [_sampling(engine, wanted, index) for index in range(len(prompts))]
    found: dict[int, Completion] = {}
    asked = [list(prompt) for prompt in prompts]
    told("writing", 0, len(prompts))
    for done in engine.as_completed(asked, max_new_tokens=wanted.tokens, sampling=samplings, batch_size=wanted.rows):
        found[done.prompt] = done
        told("writing", len(found), len(prompts))
    return [Written(asked[i] + found[i].tokens, len(asked[i]), samplings[i]) for i in range(len(prompts))]


@torch.inference_mode()
def ranks_of(head: DraftHead, target: Target, texts: Sequence[Written], told: Told = lambda *_: None) -> list[Tensor]:
    """Per text [P, K]: which choice of each step the token was that came; RANKS for none of the first, or no token.

    Place j is a round whose root is new token j. Where the text was sampled, steps choose as drafters do, by a race with
    the noise of the target's own choice.
    """
    found: list[Tensor] = []
    order = sorted(range(len(texts)), key=lambda index: -len(texts[index].tokens))
    told("reading", 0, len(texts))
    while len(found) < len(texts):
        longest = len(texts[order[len(found)]].tokens)
        size = max(1, MEMORY // (longest * target.vocab_size))
        batch = [texts[index] for index in order[len(found) : len(found) + size]]
        found += _ranks(head, target, batch)
        told("reading", len(found), len(texts))
    return [ranks for _, ranks in sorted(zip(order, found, strict=True), key=lambda pair: pair[0])]


def _ranks(head: DraftHead, target: Target, texts: Sequence[Written]) -> list[Tensor]:
    length = max(len(text.tokens) for text in texts)
    tokens = torch.zeros(len(texts), length, dtype=torch.int64)
    for row, text in enumerate(texts):
        tokens[row, : len(text.tokens)] = torch.tensor(text.tokens)
    tokens = tokens.to(target.device)
    features = target.features(tokens, torch.ones_like(tokens, dtype=torch.float32), hidden_layers=head.hidden_layers)
    found = [torch.full((len(text.tokens) - text.prompt, head.steps), RANKS) for text in texts]
    for step, logits in enumerate(head.predict(features, target)):
        for row, text in enumerate(texts):
            first, last = text.prompt + 1 + step, len(text.tokens)              # the tokens this step foretells
            if first < last:
                foretold = head.behind(tokens[row, first - 1 : last - 1], logits[row, first - step - 2 : last - step - 2])
                gumbel_logits = _race(foretold, text.sampling, first)
                own = gumbel_logits.gather(-1, tokens[row, first:last, None])
                ranks = (gumbel_logits > own).sum(-1).clamp(max=RANKS)
                found[row][: last - first, step] = ranks.cpu()
    return found


def _race(logits: Tensor, sampling: Sampling, first: int) -> Tensor:
    """[P, V] the scores by which a drafter chooses the tokens from position `first` on."""
    scores = logits if logits.dtype == torch.float64 else logits.float()
    if sampling.temperature == 0:
        return scores
    places = torch.arange(first, first + len(logits), device=logits.device)[None]
    keys = noise.row_keys([sampling.seed], [0], logits.device)
    return scores / sampling.temperature + noise.gumbel(noise.stream(keys, Role.TARGET, places), logits.shape[-1])[0]


def complete(ranks: Sequence[Tensor]) -> Tensor:
    """[n, K] the ranks of all places behind which every step had a token to foretell."""
    steps = ranks[0].shape[1]
    places = torch.cat([one[: max(0, len(one) - steps)] for one in ranks])
    if len(places) == 0:
        raise BadInput(f"the texts are too short to foretell {steps} tokens; give prompts that have longer answers")
    return places


# Trees ----------------------------------------------------------------------------------------------------------------------


def grow(places: Tensor, nodes: int, widest: int = RANKS) -> tuple[RankPath, ...]:
    """The best tree of `nodes` nodes, as rank paths in order of addition; its beginnings are the best of their size.

    places: [n, K] ranks. A node is worth the probability of its path, so a child is never worth more than its parent
    and adding the best neighbour is optimal. It is the share of places that begin with the path, each conditional share
    drawn towards that of its rank alone: (count + PRIOR * share) / (count of the parent + PRIOR).
    """
    alone = [torch.bincount(column, minlength=RANKS + 1).div(len(places)).tolist() for column in places.T]
    counts = Counter(tuple(row[:depth]) for row in places.tolist() for depth in range(places.shape[1] + 1))
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
    rounds, emitted = [0] * (most + 1), 0
    for grown_on, counted_on in (halves, halves[::-1]):
        tree = grow(complete(grown_on), most, widest)
        rounds = [all_ + some for all_, some in zip(rounds, rounds_of(counted_on, tree, most), strict=True)]
        emitted += sum(len(one) - 1 for one in counted_on)
    return tuple(emitted / max(1, count) for count in rounds)


def rounds_of(ranks: Sequence[Tensor], tree: Sequence[RankPath], most: int | None = None) -> list[int]:
    """Rounds it takes to write the texts with the first 0, 1, ..., `most` nodes of a tree.

    What an engine that matches would count, exactly: a round goes as far as the tree holds the ranks of its place.
    """
    order = {path: number for number, path in enumerate(tree, 1)}
    total = [0] * ((len(tree) if most is None else most) + 1)
    for one in ranks:
        needed = [[order.get(tuple(row[: depth + 1]), math.inf) for depth in range(len(row))] for row in one.tolist()]
        for nodes in range(len(total)):
            place = 0
            while place < len(needed) - 1:
                place += 1 + sum(number <= nodes for number in needed[place])
                total[nodes] += 1
    return total


def by_rank(places: Tensor, tree: Sequence[RankPath]) -> tuple[tuple[tuple[float, ...], ...], tuple[int, ...]]:
    """Per depth the share of each rank, where all before it stands in the tree; and of how many places."""
    known, shares, tried = {(), *tree}, [], []
    for depth in range(places.shape[1]):
        reached = places[[tuple(row[:depth]) in known for row in places.tolist()], depth]
        hits = torch.bincount(reached, minlength=RANKS + 1)[:RANKS]
        shares.append(tuple((hits / max(1, len(reached))).tolist()))
        tried.append(len(reached))
    return tuple(shares), tuple(tried)


# Costs ----------------------------------------------------------------------------------------------------------------------


def _sizes(most: int) -> list[int]:
    """Numbers of draft tokens at which costs are measured."""
    return sorted({width for width in (0, *WIDTHS) if width < most} | {most})


def _verify_costs(target: Target, texts: Sequence[Written], most: int, told: Told) -> CostCurve:
    """Seconds of a read behind texts as long as these are on average."""
    context = int(median(len(text.tokens) for text in texts))
    context = max(1, min(context, target.context - most - 1))
    widths = [nodes + 1 for nodes in _sizes(most)]
    return measure_costs(target, widths, context=context, progress=lambda done, of: told("timing reads", done, of))


def _overheads(
    head: DraftHead, target: Target, tree: Sequence[RankPath], prompt: Sequence[int], sampling: Sampling, told: Told
) -> CostCurve:
    """Seconds of a round that are not the target's, at a few sizes, taken in turn."""
    sizes = [nodes for nodes in _sizes(len(tree)) if nodes in (0, 1, 4, 16, 64, len(tree))]
    engines = [Engine(target, drafter_of(head, target, tree) if nodes else Plain(), budget=nodes) for nodes in sizes]
    taken: list[list[float]] = [[] for _ in sizes]
    for turn in range(TIMES + 1):                                               # the first turn warms up
        for seconds, engine in zip(taken, engines, strict=True):
            (done,) = engine.generate([list(prompt)], max_new_tokens=TIMED_TOKENS, sampling=sampling)
            if turn and done.stats.rounds:
                seconds.append((done.stats.seconds["draft"] + done.stats.seconds["decide"]) / done.stats.rounds)
        told("timing drafts", turn + 1, TIMES + 1)
    return CostCurve(tuple(sizes), tuple(median(seconds) if seconds else 0.0 for seconds in taken))


def rising(curve: CostCurve) -> CostCurve:
    """The nearest curve that never falls: more nodes cost no less, and where they seem to, both were measured badly.

    Isotonic regression by pooling adjacent violators: of least squares.
    """
    blocks: list[tuple[float, int]] = []                                        # mean, how many
    for seconds in curve.seconds:
        blocks.append((seconds, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (mean, size), (other, more) = blocks[-2:]
            blocks[-2:] = [((mean * size + other * more) / (size + more), size + more)]
    return CostCurve(curve.widths, tuple(mean for mean, size in blocks for _ in range(size)))


def _lanes(
    engine: Engine, head: DraftHead, tree: Sequence[RankPath], prompts: Sequence[Sequence[int]], wanted: Wanted, told: Told
) -> tuple[Lane, ...]:
    """Plain decoding, the calibrated tree and what the head drafts by itself at that size, prompt by prompt in turn."""
    target, ends = engine.target, engine.stop_tokens
    drafters: dict[str, Drafter] = {"plain": Plain()}
    if isinstance(head, MedusaHead):
        drafters |= {"calibrated tree": drafter_of(head, target, tree), "dynamic tree": Medusa(head, target, "dynamic")}
    else:
        drafters |= {head.kind: head.drafter(target)}
    engines = {name: Engine(target, drafter, budget=len(tree), stop_tokens=ends) for name, drafter in drafters.items()}
    stats: dict[str, list[RoundStats]] = {name: [] for name in engines}
    for turn, prompt in enumerate([prompts[0], *prompts]):                      # the first turn warms up
        for name, one in engines.items():
            sampling = _sampling(engine, wanted, turn)
            (done,) = one.generate([list(prompt)], max_new_tokens=wanted.tokens if turn else 8, sampling=sampling)
            stats[name] += [done.stats] if turn else []
        told("comparing", turn, len(prompts))
    return tuple(_lane(name, runs) for name, runs in stats.items())


def _lane(name: str, runs: Sequence[RoundStats]) -> Lane:
    total = RoundStats()
    for stats in runs:
        total.add(stats)
    seconds = [sum(stats.seconds.values()) - stats.seconds["prefill"] for stats in runs]
    each = tuple(spent / max(1, stats.emitted) for spent, stats in zip(seconds, runs, strict=True))
    return Lane(name, total.tokens_per_round, each)


def drafter_of(head: DraftHead, target: Target, tree: Sequence[RankPath]) -> Drafter:
    """The drafter that takes this tree, where there is one."""
    return Medusa(head, target, tree) if isinstance(head, MedusaHead) else head.drafter(target)


def _sampling(engine: Engine, wanted: Wanted, index: int) -> Sampling:
    """The engine's own, at this temperature, with a seed for each prompt."""
    return replace(engine.sampling, temperature=wanted.temperature, seed=wanted.seed + index)
