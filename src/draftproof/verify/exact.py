"""Section "law": drafts change no distribution, by enumeration on small vocabularies.

Every case is enumerated with drafts and without; the two distributions must be the same. Without
drafts it must be the product of the model's own softmaxes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from draftproof.core import acceptance
from draftproof.core.acceptance import RULES, Chance, Rule
from draftproof.core.messages import Accepted, Frontier
from draftproof.core.params import Sampling
from draftproof.core.prefix import Paths
from draftproof.core.tree import TokenTree
from draftproof.verify.cases import (
    SETUPS,
    TARGET,
    Ask,
    Case,
    Letters,
    case,
    cases,
    logits_behind,
    one_thread,
)
from draftproof.verify.enumeration import Distribution, End, distance, enumerate_texts
from draftproof.verify.report import Section, Tick, failed, silent

EXACT, SEEN = 1e-12, 1e-3
"""Total variation that float64 rounding may leave; what a negative control must show at least."""


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
"""Planted mistakes that must be seen."""


def prove_law(
    quick: bool = False, tick: Tick = silent, *, rules: Mapping[str, Rule] = RULES,
) -> Section:
    """Examine every rule in the whole engine; another rule can be passed to be proved.

    Passes if no case is further than `EXACT` from plain decoding, plain decoding has the model's
    own distribution, and every planted mistake is seen.
    """
    chosen = list(cases(rules, every=67 if quick else 1))
    worst, outcomes, failures = plain_error(), 0, []
    if not worst < EXACT:
        failures.append(f"plain decoding is {worst:.2g} from the model's own distribution")
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
        "tolerance": EXACT, "controls": planted, "rules": sorted(rules),
    }
    return Section("law", verdict, figures, failures)


def plain_error() -> float:
    """How far plain decoding at temperature 1 is from the product of the model's own softmaxes."""
    prompt, wanted = (2, 1), dict[End, float]()
    for text in itertools.product(range(3), repeat=3):
        logits = [logits_behind(TARGET, (*prompt, *text[:place])) for place in range(3)]
        laws, letters = torch.tensor(logits, dtype=torch.float64).softmax(-1), Letters()
        shown = "".join(letters.push(token) for token in text) + letters.finish()
        wanted[text, shown, "length"] = float(laws[range(3), text].prod())
    plain = enumerate_texts(Case("plain", [Ask(Sampling(temperature=1.0), prompt)], TARGET))
    return distance(plain.laws[0], wanted)
