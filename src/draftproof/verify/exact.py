"""Section "law": every random outcome enumerated, for rules as tables and for the whole decoder, against plain Python."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftproof.core import acceptance
from draftproof.core.acceptance import RULES, Chance, Rule
from draftproof.core.messages import Accepted, Frontier
from draftproof.core.prefix import Paths
from draftproof.core.tree import TokenTree, TreeShape
from draftproof.drafters.base import Drafter
from draftproof.drafters.draft_model import DraftModel
from draftproof.drafters.plain import Plain
from draftproof.drafters.prompt_lookup import PromptLookup
from draftproof.engine.budget import Fixed
from draftproof.verify.distribution import DrawnRule, Law, distance, drawn_law, matched_law, one_hot, random_law, text_law
from draftproof.verify.exact_decoder import Alternating, Case, Found, Request, Table, examine
from draftproof.verify.reference import Wanted
from draftproof.verify.report import Section, Tick, silent

EXACT = 1e-12
"""Total variation that fp64 rounding may leave."""
SEEN = 1e-3
"""What a negative control must show at least."""


class Weigher(NamedTuple):
    """A rule that weighs drawn drafts, and whether it takes trees."""

    rule: DrawnRule
    trees: bool = True


WEIGHERS = {
    "rejection": Weigher(acceptance.accept_by_rejection),
    "block": Weigher(acceptance.accept_by_block, trees=False),
}


def weighing(rule: DrawnRule) -> Rule:
    """A weighing rule as the decoder uses it; chosen tokens are matched."""
    def accept(tree: TokenTree, logits: Tensor, frontier: Frontier) -> Accepted:
        if tree.draft_probs is None:
            return acceptance.match(tree, logits, frontier)
        return rule(tree, frontier.sampler.probs(logits, Paths(frontier.prefix, tree)), acceptance.KeyedChance(frontier))

    return Rule(accept, drawn=True)


def prove_law(
    quick: bool = False,
    tick: Tick = silent,
    *,
    rules: Mapping[str, Rule] = RULES,
    weighers: Mapping[str, Weigher] = WEIGHERS,
    glance: bool = False,
) -> Section:
    """Examine `rules` in the whole decoder and `weighers` as tables; another rule can be passed to be proved.

    Passes if no case is further than `EXACT` from plain decoding, and every negative control is seen. glance: a few
    cases, up to the first failure, without controls: enough to see a planted mistake.
    """
    start = time.perf_counter()
    tables = [] if glance else list(_tables(weighers, quick))
    cases = list(whole_cases(rules, every=173 if glance else 67 if quick else 1))
    worst, outcomes, failures = 0.0, 0, []
    for done, (name, found) in enumerate(_all(tables, cases)):
        tick(done / (len(tables) + len(cases)), name)
        worst, outcomes = max(worst, found.distance), outcomes + found.worlds
        if not found.distance < EXACT:                                      # NaN too
            failures.append(f"{name}: {found.wrong or f'total variation {found.distance:.2g} to plain decoding'}")
            if glance:
                break
    controls = {} if glance else {name: run() for name, run in CONTROLS.items()}
    blind = [name for name, seen in controls.items() if not seen > SEEN]
    failures += [f"the planted mistake {name!r} was not seen: the examination is blind" for name in blind]
    seconds = time.perf_counter() - start
    verdict = (
        f"{len(tables) + len(cases)} cases, {outcomes:,} outcomes enumerated, total variation to plain decoding at most "
        f"{worst:.1g} (allowed: {EXACT:g}); {len(controls) - len(blind)} of {len(controls)} planted mistakes seen"
    )
    figures = {
        "cases": len(tables) + len(cases), "outcomes": outcomes, "max_total_variation": worst, "tolerance": EXACT,
        "controls": controls, "rules": sorted({*rules, *weighers}),
    }
    return Section("law", not failures, verdict, figures, failures[:20], seconds)


def _all(tables: Sequence[tuple[str, Callable[[], float]]], cases: Sequence[Case]) -> Iterator[tuple[str, Found]]:
    """Every case with what was found; what fails to run is as far from the law as can be."""
    runs: list[tuple[str, Callable[[], Found]]] = [(case.name, partial(examine, case)) for case in cases]
    runs += [(name, partial(_found, run)) for name, run in tables]
    for name, run in runs:
        try:
            yield name, run()
        except Exception as error:                     # a broken algorithm may break anywhere
            yield name, Found(1.0, 0, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")


def _found(run: Callable[[], float]) -> Found:
    return Found(run(), 0)


# Rules as tables ------------------------------------------------------------------------------------------------------

PAIRS: dict[str, tuple[Law, Law]] = {
    "unrelated": (random_law(3, 1), random_law(3, 2)),
    "impossible in the target": (random_law(3, 3, zeros=1), random_law(3, 4)),
    "disjoint at times": (random_law(3, 5, zeros=2), random_law(3, 6, zeros=2)),
    "alike": (random_law(3, 12, 0.5), random_law(3, 13, 0.5)),
    "equal": (random_law(3, 1), random_law(3, 1)),
    "impossible in the draft": (random_law(3, 3), random_law(3, 4, zeros=1)),
    "greedy target": (one_hot(random_law(3, 7)), random_law(3, 8)),
    "greedy both": (one_hot(random_law(3, 7)), one_hot(random_law(3, 9))),
}
CHAINS = [TreeShape.chain(length) for length in (1, 2, 3)]
TREES = [TreeShape.branching(children) for children in ((2,), (3,), (3, 1), (2, 2))]
TWO = TreeShape.branching((2, 2, 1))            # with two tokens: eleven nodes are too many, so it is cut to eight


def _tables(weighers: Mapping[str, Weigher], quick: bool) -> Iterator[tuple[str, Callable[[], float]]]:
    """Each rule on pairs of laws, chains and trees."""
    pairs = dict(itertools.islice(PAIRS.items(), 3 if quick else None))
    for (pair, (target, draft)), shape in itertools.product(pairs.items(), [*CHAINS, *TREES]):
        large, length = len(shape) > 5, len(shape.levels)
        if large and pair not in ("unrelated", "disjoint at times"):
            continue
        name = f"on a {'chain' if shape.is_chain else 'tree'} of {len(shape)} nodes, {pair}"
        if not large or not quick:
            yield f"match {name}", partial(_matched, shape, target, draft, 3, length)
        for rule, weigher in weighers.items():
            if (weigher.trees or shape.is_chain) and not (quick and large):
                yield f"{rule} {name}", partial(_drawn, weigher.rule, shape, target, draft, 3, length)
    for rule, weigher in weighers.items():
        if weigher in WEIGHERS.values():
            yield f"{rule} when rounding rejects what cannot be rejected", partial(_rounding, weigher.rule)
        for vocab, length, salt in () if quick else ((4, 4, 21), (5, 3, 31)):
            laws = random_law(vocab, salt), random_law(vocab, salt + 1, zeros=1)
            yield f"{rule} on {vocab} tokens, {length} long", partial(_drawn, weigher.rule, CHAINS[1], *laws, vocab, length)
        if weigher.trees and not quick:
            laws = random_law(2, 41), random_law(2, 42)
            yield f"{rule} on a tree of 8 nodes", partial(_drawn, weigher.rule, TWO.within(7), *laws, 2, 4)


def _drawn(rule: DrawnRule, shape: TreeShape, target: Law, draft: Law, vocab: int, length: int) -> float:
    return distance(drawn_law(rule, shape, target, draft, vocab, length), text_law(target, vocab, length))


def _rounding(rule: DrawnRule) -> float:
    """Distance to the target's law where draft and target agree and a coin falls that has no chance: rounding does that."""
    law = PAIRS["equal"][0](())
    laws = torch.stack([torch.zeros_like(law), law])[None]
    chance = _Never()
    rule(TokenTree.chain(torch.tensor([[0, 1]]), laws), law.expand(1, 2, -1), chance)
    return float((chance.weights / chance.weights.sum() - law).abs().nan_to_num(1.0).sum() / 2)


class _Never:
    """Every coin fails; remembers what it was to draw from."""

    def __init__(self) -> None:
        self.weights = torch.zeros(1, 1, dtype=torch.float64)

    def flip(self, probability: Tensor, node: int) -> Tensor:
        return torch.zeros_like(probability, dtype=torch.bool)

    def draw(self, weights: Tensor, depth: Tensor) -> Tensor:
        self.weights = weights.double()
        return torch.zeros_like(depth)


def _matched(shape: TreeShape, target: Law, draft: Law, vocab: int, length: int) -> float:
    return distance(matched_law(shape, target, draft, vocab, length), text_law(target, vocab, length))


# The whole decoder ----------------------------------------------------------------------------------------------------

OPTIONS = {
    "T 1": Wanted(temperature=1.0),
    "top-k": Wanted(temperature=1.2, top_k=2),
    "repetition": Wanted(temperature=0.9, repetition_penalty=1.8),
    "top-p": Wanted(temperature=1.1, top_p=0.75),
    "presence": Wanted(temperature=1.0, presence_penalty=0.8),
    "no-repeat": Wanted(temperature=1.0, no_repeat_ngram=2),
    "greedy": Wanted(),
    "bias": Wanted(temperature=1.0, logit_bias={0: 1.5, 1: -0.7}),
    "min-p": Wanted(temperature=1.3, min_p=0.25),
    "frequency": Wanted(temperature=1.0, frequency_penalty=0.9),
    "banned": Wanted(temperature=1.0, banned_words=((0, 1), (1, 1, 2))),
    "T 0.5": Wanted(temperature=0.5),
    "repetition reward": Wanted(temperature=1.0, repetition_penalty=0.6),
    "greedy, penalised": Wanted(repetition_penalty=2.5, frequency_penalty=0.6, no_repeat_ngram=2),
    "all at once": Wanted(
        temperature=0.9, top_k=2, top_p=0.9, min_p=0.02, repetition_penalty=1.3, presence_penalty=0.3, frequency_penalty=-0.4,
        no_repeat_ngram=3, logit_bias={2: 0.6}, banned_words=((1, 0, 2),),
    ),
}
ENDS: dict[str, dict[str, Any]] = {
    "": {},
    "end token": {"stop_tokens": (2,)},
    "stop string": {"stop": ("ab",)},
    "end token held back": {"stop_tokens": (0,), "min_new_tokens": 2},
    "two stop strings": {"stop": ("ba", "bé")},
    "both": {"stop_tokens": (1,), "stop": ("éa", "aa"), "min_new_tokens": 1},
}
LIMITS = (3, 2, 3, 1, 3)
PROMPTS = ((1,), (2, 0, 1, 2, 0), (1, 1), (0, 2, 0, 2))
TARGET, DRAFT = Table(3, 1), Table(3, 2)


class Way(NamedTuple):
    """A way to draft: the drafter, how much, and its fan."""

    draft: Callable[[], Drafter]
    budget: int
    fan: Sequence[int] = (1,) * 8


def _by_model(model: Table, budget: int, *children: int, vocab: int = 3) -> Way:
    shape = TreeShape.branching(children) if children else None
    return Way(lambda: DraftModel(model, vocab, shape), budget, (*children, *(1,) * 8))


WAYS = {
    "chain": _by_model(DRAFT, 2),
    "lookup": Way(partial(PromptLookup, 2, 1), 2),
    "tree of 3": _by_model(DRAFT, 2, 2),
    "single": _by_model(DRAFT, 1),
    "tree of 4": _by_model(DRAFT, 3, 2, 1),
    "plain": Way(Plain, 0),
    "smaller draft": _by_model(Table(2, 5), 3, 3),
    "larger draft": _by_model(Table(4, 6), 2),
}


def whole_cases(rules: Mapping[str, Rule], every: int = 1) -> Iterator[Case]:
    """What needs a case of its own; then rule × way to draft × option × end, limits and prompts taking turns."""
    yield from _special(rules, few=every > 1)
    numbers = itertools.count()
    for (way, how), (option, asked), (end, stops) in itertools.product(WAYS.items(), OPTIONS.items(), ENDS.items()):
        want = replace(asked, **stops)
        if way == "tree of 4" and want.temperature:
            want = replace(want, top_k=2)                                # or a round has 3 ** 5 ends
        for rule, accept in rules.items():
            number = next(numbers)
            if number % every:
                continue
            request = Request(want, PROMPTS[number % len(PROMPTS)], LIMITS[number % len(LIMITS)])
            name = ", ".join(filter(None, [f"{rule}: {way}", option, end, f"{request.limit} tokens"]))
            yield Case(name, accept, TARGET, how.draft, partial(Fixed, how.budget), [request], how.fan)


def _special(rules: Mapping[str, Rule], few: bool) -> Iterator[Case]:
    """Rows of different wishes in one batch, a draft that is the target, a budget that comes and goes, other sizes."""
    mixed = [
        Request(Wanted(temperature=1.3, stop_tokens=(0,)), (2, 0, 1)),
        Request(Wanted(repetition_penalty=1.4), (1,), 4),
        Request(Wanted(temperature=0.8, top_k=2, stop=("ab",)), (0, 2), 2),
        Request(Wanted(temperature=1.0, no_repeat_ngram=2, min_new_tokens=2, stop_tokens=(1,)), (1, 2), 2),
    ]
    for rule, accept in rules.items():
        for way in ("chain", "tree of 3", "lookup"):
            how = WAYS[way]
            case = Case(f"{rule}: {way}, mixed batch", accept, TARGET, how.draft, partial(Fixed, how.budget), mixed, how.fan)
            yield case
            yield replace(case, name=f"{case.name} as on a device", on_host=False)
        how = _by_model(TARGET, 2)
        own = Request(Wanted(temperature=1.0 if accept.drawn else 0.0, stop_tokens=(2,), repetition_penalty=1.3), (1, 0), 4)
        for when, amount in (("", partial(Fixed, 2)), (" at times", partial(Alternating, 2))):
            yield Case(f"{rule}: drafts for itself{when}", accept, TARGET, how.draft, amount, [own], how.fan, True)
        fading = Request(Wanted(temperature=2.2, top_p=0.6), (1, 0), 4 if accept.drawn else 3)
        yield Case(f"{rule}: budget comes and goes", accept, TARGET, WAYS["chain"].draft, partial(Alternating, 2), [fading])
        how = WAYS["larger draft"]
        warm = [Request(Wanted(temperature=1.2), (1,), 3)]
        yield Case(f"{rule}: a draft that knows more", accept, TARGET, how.draft, partial(Fixed, how.budget), warm, how.fan)
        how = WAYS["tree of 4"]
        penalised = Wanted(temperature=1.0, top_k=2, repetition_penalty=2.0, frequency_penalty=0.7)
        careful = [Request(penalised, (1, 0), 4)]
        if not accept.drawn:                                             # every pick counts there: greedy, but long and many
            greedy = replace(penalised, temperature=0.0)
            careful = [Request(greedy, prompt, 9) for prompt in ((1, 0), (0,), (2, 2), (1,), (0, 2))]
        yield Case(f"{rule}: penalties in a tree", accept, TARGET, how.draft, partial(Fixed, how.budget), careful, how.fan)
        for way in ("chain", "tree of 3"):
            how = WAYS[way]
            for name, grammar in (("a grammar", _grammar), ("a grammar that ends with the text", _nothing_behind)):
                bound = [Request(Wanted(temperature=1.0, stop_tokens=(2,)), (1, 0), 3, grammar)]
                yield Case(f"{rule}: {way}, {name}", accept, TARGET, how.draft, partial(Fixed, how.budget), bound, how.fan)
        if few:
            continue
        for vocab, budget, limit in ((2, 3, 4), (4, 1, 3), (5, 1, 3), (5, 2, 2)):
            how = _by_model(Table(vocab, 8), budget, vocab=vocab)
            requests = [Request(Wanted(temperature=1.1), (1,), limit)]
            name = f"{rule}: {vocab} tokens, {limit} long"
            yield Case(name, accept, Table(vocab, 7), how.draft, partial(Fixed, budget), requests, how.fan)


def _grammar(text: Sequence[int]) -> set[int]:
    """The same token never twice, and what may come depends on the length too."""
    return {0, 1, 2} - {text[-1]} if len(text) % 3 else {0, 1}


def _nothing_behind(text: Sequence[int]) -> set[int]:
    """Anything, and nothing behind an end token."""
    return set() if text[-1] == 2 else {0, 1, 2}


# Mistakes that must be seen ------------------------------------------------------------------------------------------


def boastful(tree: TokenTree, probs: Tensor, chance: Chance) -> Accepted:
    """The token rule, told another law than the one the draft was drawn from (known bug 1)."""
    assert tree.draft_probs is not None
    law = tree.draft_probs.sqrt()
    law = law / law.sum(-1, keepdim=True).clamp(min=1e-30)
    return acceptance.accept_by_rejection(replace(tree, draft_probs=law), probs, chance)


def forgetful(tree: TokenTree, probs: Tensor, chance: Chance) -> Accepted:
    """The token rule, which draws from the target itself where it should draw from the residual (known bug 5)."""
    accepted = acceptance.accept_by_rejection(tree, probs, _Coins(chance))
    last = accepted.nodes.gather(1, accepted.count[:, None] - 1)
    law = probs.gather(1, last[..., None].expand(-1, 1, probs.shape[-1]))[:, 0]
    return replace(accepted, root=chance.draw(law, accepted.count - 1))


class _Coins(NamedTuple):
    """A chance that flips, and leaves the drawing to others."""

    chance: Chance

    def flip(self, probability: Tensor, node: int) -> Tensor:
        return self.chance.flip(probability, node)

    def draw(self, weights: Tensor, depth: Tensor) -> Tensor:
        return torch.zeros_like(depth)


def _control(rule: DrawnRule) -> float:
    target, draft = PAIRS["unrelated"]
    return _drawn(rule, CHAINS[1], target, draft, 3, 3)


def _whole_control(rule: DrawnRule) -> float:
    how = WAYS["chain"]
    request = Request(Wanted(temperature=1.0))
    return examine(Case("control", weighing(rule), TARGET, how.draft, partial(Fixed, how.budget), [request], how.fan)).distance


CONTROLS: dict[str, Callable[[], float]] = {
    "a draft law that is not the one drawn from (table)": partial(_control, boastful),
    "a draft law that is not the one drawn from (decoder)": partial(_whole_control, boastful),
    "the target in place of the residual (table)": partial(_control, forgetful),
    "the target in place of the residual (decoder)": partial(_whole_control, forgetful),
}
