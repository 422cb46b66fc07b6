"""Section "law": drafts change no distribution, by enumeration on small vocabularies.

Every case is enumerated with drafts and without; the two distributions must be the same. Without
drafts it must be the product of the table's own softmaxes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftproof.core import acceptance
from draftproof.core.acceptance import RULES, Chance, Rule
from draftproof.core.messages import Accepted, Frontier
from draftproof.core.params import LogitsProcessor, Sampling
from draftproof.core.prefix import Paths
from draftproof.core.tree import TokenTree, TreeShape
from draftproof.drafters.base import Drafter
from draftproof.drafters.draft_model import DraftModel
from draftproof.drafters.prompt_lookup import PromptLookup
from draftproof.engine.budget import Budget, Fixed
from draftproof.engine.shape_policy import ShapePolicy
from draftproof.engine.stats import State
from draftproof.model.target import Target
from draftproof.verify.enumeration import (
    Ask,
    Case,
    Distribution,
    End,
    Letters,
    distance,
    enumerate_texts,
    one_thread,
    table,
)
from draftproof.verify.report import Section, Tick, failed, silent

EXACT = 1e-12
"""Total variation that float64 rounding may leave."""
SEEN = 1e-3
"""What a negative control must show at least."""


def examine(case: Case, wanted: Sequence[Distribution] | None = None) -> tuple[float, int, str]:
    """The largest distance of a case's texts from those `wanted` (None: those of plain decoding),
    outcomes enumerated, and what is wrong in words."""
    try:
        with one_thread():
            wanted = enumerate_texts(case.plain()).laws if wanted is None else wanted
            found = enumerate_texts(case)
    except Exception as error:                          # a broken algorithm may break anywhere
        return 1.0, 0, failed(error)
    if found.wrong:
        return 1.0, found.worlds, found.wrong
    apart = max(distance(law, own) for law, own in zip(found.laws, wanted, strict=True))
    wrong = "" if apart < EXACT else f"total variation {apart:.2g} to plain decoding"     # NaN too
    return apart, found.worlds, wrong


# Cases

OPTIONS = {
    "T 1": Sampling(temperature=1.0),
    "top-k": Sampling(temperature=1.2, top_k=2),
    "repetition": Sampling(temperature=0.9, repetition_penalty=1.8),
    "top-p": Sampling(temperature=1.1, top_p=0.75),
    "presence": Sampling(temperature=1.0, presence_penalty=0.8),
    "no-repeat": Sampling(temperature=1.0, no_repeat_ngram=2),
    "greedy": Sampling(),
    "bias": Sampling(temperature=1.0, logit_bias={0: 1.5, 1: -0.7}),
    "min-p": Sampling(temperature=1.3, min_p=0.25),
    "frequency": Sampling(temperature=1.0, frequency_penalty=0.9),
    "banned": Sampling(temperature=1.0, banned_words=((0, 1), (1, 1, 2))),
    "T 0.5": Sampling(temperature=0.5),
    "repetition reward": Sampling(temperature=1.0, repetition_penalty=0.6),
    "greedy, penalised": Sampling(repetition_penalty=2.5, frequency_penalty=0.6, no_repeat_ngram=2),
    "all at once": Sampling(
        temperature=0.9, top_k=2, top_p=0.9, min_p=0.02, repetition_penalty=1.3,
        presence_penalty=0.3,
        frequency_penalty=-0.4, no_repeat_ngram=3, logit_bias={2: 0.6}, banned_words=((1, 0, 2),),
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
TARGET, DRAFT = table(3, 1), table(3, 2)


class Setup(NamedTuple):
    """How to draft: the drafter, how many tokens, and its fan (see `Case`)."""

    draft: Callable[[], Drafter]
    most: int
    fan: Sequence[int] = (1,) * 8


def by_model(model: Target, most: int, *children: int, vocab: int = 3) -> Setup:
    """Drafting with a table, a chain or a tree with so many children by depth."""
    shape = TreeShape.branching(children) if children else None
    return Setup(lambda: DraftModel(model, vocab, shape), most, (*children, *(1,) * 8))


SETUPS = {
    "chain": by_model(DRAFT, 2),
    "lookup": Setup(partial(PromptLookup, 2, 1), 2),
    "tree of 3": by_model(DRAFT, 2, 2),
    "single": by_model(DRAFT, 1),
    "tree of 4": by_model(DRAFT, 3, 2, 1),
    "smaller draft": by_model(table(2, 5), 3, 3),
    "larger draft": by_model(table(4, 6), 2),
}


class Alternating(Budget):
    """A budget that comes and goes: K, 0, 1, K, ..."""

    def __init__(self, most: int) -> None:
        self.most, self.rounds = most, 0

    def choose(self, state: State) -> int:
        self.rounds += 1
        return (self.most, 0, min(1, self.most))[self.rounds % 3]


def case(
    name: str, rule: Rule, how: Setup, *asks: Ask, target: Target = TARGET, **more: Any
) -> Case:
    """A case that drafts so."""
    given = {"draft": how.draft, "budget": partial(Fixed, how.most), "fan": how.fan, **more}
    return Case(name, asks, target, rule=rule, **given)


def cases(rules: Mapping[str, Rule] = RULES, every: int = 1) -> Iterator[Case]:
    """Special cases; then rule x set-up x option x end, with limits and prompts in turn."""
    for name, rule in rules.items():
        yield from _special(name, rule)
    numbers = itertools.count()
    for (setup, how), (option, asked), (end, stops) in itertools.product(
        SETUPS.items(), OPTIONS.items(), ENDS.items()
    ):
        want = replace(asked, **stops)
        if setup == "tree of 4" and want.temperature:
            want = replace(want, top_k=2)                       # or a round has 3 ** 5 ends
        for name, rule in rules.items():
            number = next(numbers)
            if number % every == 0:
                ask = Ask(want, PROMPTS[number % len(PROMPTS)], LIMITS[number % len(LIMITS)])
                words = [f"{name}: {setup}", option, end, f"{ask.limit} tokens"]
                yield case(", ".join(filter(None, words)), rule, how, ask)


def _special(name: str, rule: Rule) -> Iterator[Case]:
    """Different requests in one batch, a draft that is the target, a budget that comes and goes."""
    free = Sampling(temperature=1.0)
    mixed = (
        Ask(Sampling(temperature=1.3, stop_tokens=(0,)), (2, 0, 1)),
        Ask(Sampling(repetition_penalty=1.4), (1,), 4),
        Ask(Sampling(temperature=0.8, top_k=2, stop=("ab",)), (0, 2), 2),
        Ask(replace(free, no_repeat_ngram=2, min_new_tokens=2, stop_tokens=(1,)), (1, 2), 2),
    )
    for setup in ("chain", "tree of 3", "lookup"):
        one = case(f"{name}: {setup}, mixed batch", rule, SETUPS[setup], *mixed)
        yield one
        yield replace(one, name=f"{one.name} as on a device", shapes=ShapePolicy(closed=True))
    chain, drawn = SETUPS["chain"], rule.drawn
    own = Sampling(temperature=1.0 if drawn else 0.0, stop_tokens=(2,), repetition_penalty=1.3)
    for when, budget in (("", partial(Fixed, 2)), (" at times", partial(Alternating, 2))):
        ask = Ask(own, (1, 0), 4)
        one = case(f"{name}: drafts for itself{when}", rule, by_model(TARGET, 2), ask)
        yield replace(one, budget=budget, drafts_itself=True)
    fading = Ask(Sampling(temperature=2.2, top_p=0.6), (1, 0), 4 if drawn else 3)
    at_times = partial(Alternating, 2)
    yield case(f"{name}: budget comes and goes", rule, chain, fading, budget=at_times)
    penalised = Sampling(temperature=1.0, top_k=2, repetition_penalty=2.0, frequency_penalty=0.7)
    asks = [Ask(penalised, (1, 0), 4)]
    if not drawn:                               # every choice counts there: greedy, but many
        greedy = replace(penalised, temperature=0.0)
        asks = [Ask(greedy, prompt, 9) for prompt in ((1, 0), (0,), (2, 2), (1,), (0, 2))]
    yield case(f"{name}: penalties in a tree", rule, SETUPS["tree of 4"], *asks)
    for setup, grammar in itertools.product(("chain", "tree of 3"), GRAMMARS):
        bound = Sampling(temperature=1.0, stop_tokens=(2,), processors=(GRAMMARS[grammar],))
        yield case(f"{name}: {setup}, {grammar}", rule, SETUPS[setup], Ask(bound, (1, 0)))
    how = by_model(table(5, 8), 1, vocab=5)
    five = Ask(Sampling(temperature=1.1))
    yield case(f"{name}: 5 tokens, 3 long", rule, how, five, target=table(5, 7))


def grammar(allowed: Callable[[Sequence[int]], set[int]]) -> LogitsProcessor:
    """A user's logits processor that allows only some tokens behind a text."""
    def processor(text: Tensor, scores: Tensor) -> Tensor:
        kept = allowed(text[0].tolist())
        scores[:, [token for token in range(scores.shape[1]) if token not in kept]] = -torch.inf
        return scores

    return processor


GRAMMARS = {
    "never twice": grammar(lambda text: {0, 1, 2} - {text[-1]} if len(text) % 3 else {0, 1}),
    "nothing behind the end": grammar(lambda text: set() if text[-1] == 2 else {0, 1, 2}),
}


# Planted mistakes that must be seen, and the section


def weighing(rule: Callable[[TokenTree, Tensor, Chance], Accepted]) -> Rule:
    """A rule that weighs drawn drafts, as the engine uses it; chosen tokens are matched."""
    def accept(tree: TokenTree, logits: Tensor, frontier: Frontier) -> Accepted:
        if tree.draft_probs is None:
            return acceptance.match(tree, logits, frontier)
        probs = frontier.sampler.probs(logits, Paths(frontier.prefix, tree))
        return rule(tree, probs, acceptance.KeyedChance(frontier))

    return Rule(accept, drawn=True)


def wrong_draft_law(tree: TokenTree, probs: Tensor, chance: Chance) -> Accepted:
    """Rejection told another law than the one the draft was drawn from (known bug 1)."""
    assert tree.draft_probs is not None
    law = tree.draft_probs.sqrt()
    law = law / law.sum(-1, keepdim=True).clamp(min=1e-30)
    return acceptance.accept_by_rejection(replace(tree, draft_probs=law), probs, chance)


def target_for_residual(tree: TokenTree, probs: Tensor, chance: Chance) -> Accepted:
    """Rejection that draws from the target where it should draw from the residual (known bug 5)."""
    accepted = acceptance.accept_by_rejection(tree, probs, chance)
    last = accepted.nodes.gather(1, accepted.count[:, None] - 1)
    law = probs.gather(1, last[..., None].expand(-1, 1, probs.shape[-1]))[:, 0]
    return replace(accepted, root=chance.draw(law, accepted.count - 1))


CONTROLS = {
    "a draft law that is not the one drawn from": wrong_draft_law,
    "the target in place of the residual": target_for_residual,
}


def prove_law(
    quick: bool = False, tick: Tick = silent, *, rules: Mapping[str, Rule] = RULES,
) -> Section:
    """Examine every rule in the whole engine; another rule can be passed to be proved.

    Passes if no case is further than `EXACT` from plain decoding, plain decoding has the table's
    own distribution, and every planted mistake is seen.
    """
    chosen = list(cases(rules, every=67 if quick else 1))
    worst, outcomes, failures = plain_error(), 0, []
    if not worst < EXACT:
        failures.append(f"plain decoding is {worst:.2g} from the table's own distribution")
    for done, one in enumerate(chosen):
        tick(done / len(chosen), one.name)
        apart, worlds, wrong = examine(one)
        worst, outcomes = max(worst, apart), outcomes + worlds
        failures += [f"{one.name}: {wrong}"] if wrong else []
    ask = Ask(Sampling(temperature=1.0))
    planted = {
        name: examine(case(name, weighing(rule), SETUPS["chain"], ask))[0]
        for name, rule in CONTROLS.items()
    }
    blind = [name for name, seen in planted.items() if not seen > SEEN]
    failures += [f"the planted mistake {name!r} was not seen: this is blind" for name in blind]
    verdict = (
        f"{len(chosen)} cases, {outcomes:,} outcomes enumerated, total variation to plain decoding "
        f"at most {worst:.1g} (allowed: {EXACT:g}); {len(planted) - len(blind)} of {len(planted)} "
        "planted mistakes seen"
    )
    figures = {
        "cases": len(chosen), "outcomes": outcomes, "max_total_variation": worst,
        "tolerance": EXACT,
        "controls": planted, "rules": sorted(rules),
    }
    return Section("law", verdict, figures, failures)


def plain_error() -> float:
    """How far plain decoding at temperature 1 is from the product of the table's own softmaxes."""
    model, prompt, wanted = TARGET.model, (2, 1), dict[End, float]()
    for text in itertools.product(range(3), repeat=3):
        logits = [model.scores((*prompt, *text[:place])) for place in range(3)]
        laws = torch.tensor(logits, dtype=torch.float64).softmax(-1)
        letters = Letters()
        shown = "".join(letters.push(token) for token in text) + letters.finish()
        wanted[text, shown, "length"] = float(laws[range(3), text].prod())
    plain = enumerate_texts(Case("plain", [Ask(Sampling(temperature=1.0), prompt)], TARGET))
    return distance(plain.laws[0], wanted)
