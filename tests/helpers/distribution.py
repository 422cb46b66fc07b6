"""The exact law of acceptance rules, by enumeration, with laws as tables.

Every outcome of a round (draft, coins, draws) is a row of one batch, a *world*, with its
probability. Rounds follow each other until `length` tokens are there, so the answer is the law of
the text that the loop writes.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from draftproof.core.acceptance import Chance, accept_by_matching
from draftproof.core.messages import Accepted
from draftproof.core.tree import ABSENT, TokenTree, TreeShape

Text = tuple[int, ...]
Law = Callable[[Text], Tensor]
"""Next-token probabilities [V] behind a text."""
DrawnRule = Callable[[TokenTree, Tensor, Chance], Accepted]


def random_law(vocab: int, salt: int, sharpness: float = 1.5, zeros: int = 0) -> Law:
    """A law that depends on the text; `zeros` tokens are impossible, others behind each text."""
    known: dict[Text, Tensor] = {}

    def law(text: Text) -> Tensor:
        if text not in known:
            dice = random.Random(repr((salt, text)))
            values = [dice.gauss(0, sharpness) for _ in range(vocab)]
            scores = torch.tensor(values, dtype=torch.float64)
            scores[dice.sample(range(vocab), zeros)] = -torch.inf
            known[text] = scores.softmax(-1)
        return known[text]

    return law


def constant(*law: float) -> Law:
    """The same law behind every text."""
    return lambda text: torch.tensor(law, dtype=torch.float64)


def one_hot(law: Law) -> Law:
    """The same law at temperature 0."""
    return lambda text: torch.nn.functional.one_hot(law(text).argmax(), len(law(text))).double()


def text_law(target: Law, vocab: int, length: int, root: int = 0) -> dict[Text, float]:
    """What plain sampling writes behind `root`."""
    out = {}
    for text in itertools.product(range(vocab), repeat=length):
        steps = [target((root, *text[:place]))[token] for place, token in enumerate(text)]
        out[text] = float(torch.stack(steps).prod())
    return out


def distance(one: dict[Text, float], other: dict[Text, float]) -> float:
    """Total variation."""
    texts = one.keys() | other.keys()
    return sum(abs(one.get(text, 0.0) - other.get(text, 0.0)) for text in texts) / 2


def strayed(law: dict[Text, float], target: Law, length: int, vocab: int = 3) -> float:
    """The expected sum of the distances of next-token laws, from the law of whole texts alone."""
    total = 0.0
    for size in range(length):
        for prefix in itertools.product(range(vocab), repeat=size):
            mass = torch.zeros(vocab, dtype=torch.float64)
            for text, weight in law.items():
                if len(text) > size and text[:size] == prefix:
                    mass[text[size]] += weight
            if float(mass.sum()) > 0:
                apart = (mass / mass.sum() - target(prefix)).abs().sum() / 2
                total += float(mass.sum() * apart)
    return total


class Worlds:
    """A `Chance` where each row's coins [B, N] and draw [B] are decided; `odds` [B]: their cost."""

    def __init__(self, coins: Tensor, tokens: Tensor, odds: Tensor) -> None:
        self.coins, self.tokens, self.odds, self.used = coins, tokens, odds.clone(), set[int]()

    def flip(self, probability: Tensor, node: int) -> Tensor:
        assert node not in self.used, "a coin is looked at once"
        self.used.add(node)
        coin = self.coins[:, node]
        self._pay(torch.where(coin, probability, 1 - probability))
        return coin

    def draw(self, weights: Tensor, depth: Tensor) -> Tensor:
        law = weights / weights.sum(-1, keepdim=True)
        self._pay(law.gather(1, self.tokens[:, None])[:, 0])
        return self.tokens

    def _pay(self, probability: Tensor) -> None:
        self.odds = torch.where(self.odds > 0, self.odds * probability, 0)  # the rest may be NaN


class Draft(NamedTuple):
    """A draft that may come, with its probability: tokens [N], root first, laws of nodes [N, V]."""

    tokens: list[int]
    laws: list[Tensor]
    odds: float


def drawn_drafts(
    text: Text, root: int, shape: TreeShape, draft: Law, vocab: int
) -> Iterator[Draft]:
    """Every tree of `shape` drawn from `draft`: children without replacement, absent where the law
    is used up."""
    nothing = torch.zeros(vocab, dtype=torch.float64)

    def grow(tokens: list[int], laws: list[Tensor], odds: float) -> Iterator[Draft]:
        node = len(tokens)
        if node == len(shape):
            yield Draft(tokens, laws, odds)
            return
        parent = shape.parents[node]
        there = tokens[parent] != ABSENT
        law = draft(path_of(text, tokens, shape, parent)) if there else nothing
        siblings = [tokens[other] for other in range(1, node) if shape.parents[other] == parent]
        left = law.clone()
        left[[token for token in siblings if token != ABSENT]] = 0
        if float(left.sum()) == 0:
            yield from grow([*tokens, ABSENT], [*laws, law], odds)
            return
        for token in left.nonzero()[:, 0].tolist():
            yield from grow([*tokens, token], [*laws, law], odds * float(left[token] / left.sum()))

    return grow([root], [torch.zeros(vocab, dtype=torch.float64)], 1.0)


def path_of(text: Text, tokens: Sequence[int], shape: TreeShape, node: int) -> Text:
    """The text that ends at `node`; `text` ends before the root."""
    path: list[int] = []
    while node >= 0:
        path.insert(0, tokens[node])
        node = shape.parents[node]
    return (*text, *path)


def target_laws(
    text: Text, tokens: Sequence[int], shape: TreeShape, target: Law, vocab: int
) -> Tensor:
    """[N, V] the target's law at every node; at absent nodes a wrong one, which must not matter."""
    wrong = torch.nn.functional.one_hot(torch.tensor(vocab - 1), vocab).double()
    laws = [
        wrong if token == ABSENT else target(path_of(text, tokens, shape, node))
        for node, token in enumerate(tokens)
    ]
    return torch.stack(laws)


class Round(NamedTuple):
    """The law of what a round emits, and how many draft tokens it accepts on average."""

    law: dict[Text, float]
    accepted: float


def drawn_round(
    rule: DrawnRule, text: Text, root: int, shape: TreeShape, target: Law, draft: Law, vocab: int
) -> Round:
    """Every draft times every coin times every draw, as one batch."""
    drafts = list(drawn_drafts(text, root, shape, draft, vocab))
    nodes = len(shape)
    coins = torch.tensor(list(itertools.product([False, True], repeat=nodes - 1)))
    coins = torch.cat([torch.zeros(len(coins), 1, dtype=torch.bool), coins], 1)
    sizes = (len(drafts), len(coins), vocab)
    which = torch.cartesian_prod(*map(torch.arange, sizes))                     # [W, 3]
    tokens = torch.tensor([one.tokens for one in drafts])[which[:, 0]]
    laws = torch.stack([torch.stack(one.laws) for one in drafts])[which[:, 0]]
    targets = [target_laws(text, one.tokens, shape, target, vocab) for one in drafts]
    probs = torch.stack(targets)[which[:, 0]]
    odds = torch.tensor([one.odds for one in drafts], dtype=torch.float64)[which[:, 0]]
    chance = Worlds(coins[which[:, 1]], which[:, 2], odds)
    accepted = rule(TokenTree.shaped(tokens, shape, laws), probs, chance)
    idle = [node for node in range(1, nodes) if node not in chance.used]        # counted once
    once = ~chance.coins[:, idle].any(-1)
    return _collect(tokens, accepted, torch.where(once, chance.odds, 0))


def matched_round(
    tokens: Sequence[int], text: Text, shape: TreeShape, target: Law, vocab: int
) -> Round:
    """A chosen draft, with every combination of the target's picks."""
    laws = target_laws(text, tokens, shape, target, vocab)
    target_tokens = torch.cartesian_prod(*[torch.arange(vocab)] * len(shape)).view(-1, len(shape))
    odds = laws[torch.arange(len(shape)), target_tokens].prod(-1)
    rows = torch.tensor(tokens).expand(len(target_tokens), -1)
    return _collect(rows, accept_by_matching(TokenTree.shaped(rows, shape), target_tokens), odds)


def _collect(tokens: Tensor, accepted: Accepted, odds: Tensor) -> Round:
    """Sum the worlds that emit the same."""
    real = odds != 0                                                            # NaN is not 0
    tokens, odds, count, root = tokens[real], odds[real], accepted.count[real], accepted.root[real]
    nodes = accepted.nodes[real]
    path = tokens.gather(1, nodes)
    place = torch.arange(path.shape[1])
    assert not ((path == ABSENT) & (place < count[:, None])).any(), "an absent node was accepted"
    ended = torch.cat([path[:, 1:], path[:, :1]], 1).scatter(1, count[:, None] - 1, root[:, None])
    ended = torch.where(place < count[:, None], ended, -1)
    texts, which = torch.unique(ended, dim=0, return_inverse=True)
    sums = torch.zeros(len(texts), dtype=torch.float64).index_add_(0, which, odds)
    weights = zip(texts.tolist(), sums.tolist(), strict=True)
    law = {tuple(token for token in text if token >= 0): weight for text, weight in weights}
    return Round(law, float((odds * (count - 1)).sum()))


def loop_law(
    one_round: Callable[[Text, int], Round], length: int, root: int = 0
) -> dict[Text, float]:
    """The law of the `length` tokens that the loop writes behind `root`, in as many rounds."""
    open_: list[defaultdict[Text, float]] = [defaultdict(float) for _ in range(length + 1)]
    open_[0][()] = 1.0
    for texts in open_[:length]:
        for text, weight in texts.items():
            before = (root, *text)
            for emitted, odds in one_round(before[:-1], before[-1]).law.items():
                written = (*text, *emitted)[:length]
                open_[len(written)][written] += weight * odds
    return dict(open_[length])


def drawn_law(
    rule: DrawnRule, shape: TreeShape, target: Law, draft: Law, vocab: int, length: int
) -> dict[Text, float]:
    """What the loop writes with drawn drafts."""
    def one_round(text: Text, root: int) -> Round:
        return drawn_round(rule, text, root, shape, target, draft, vocab)

    return loop_law(one_round, length)


def likeliest(text: Text, root: int, shape: TreeShape, draft: Law) -> list[int]:
    """A chosen draft: at every node the draft law's best children."""
    tokens = [root]
    for node in range(1, len(shape)):
        law = draft(path_of(text, tokens, shape, shape.parents[node]))
        tokens.append(int(law.argsort(descending=True)[shape.ranks[node]]))
    return tokens
