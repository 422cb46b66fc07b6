"""Section "law": drafts change no distribution, by enumeration on small vocabularies.

Every case is enumerated with drafts and without; the two distributions must be the same. Without
drafts it must be the product of the model's own softmaxes.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from draftproof.core.acceptance import RULES, Rule, accept_by_rejection, weighing
from draftproof.core.messages import Accepted
from draftproof.core.params import Sampling
from draftproof.core.sampling import Chance
from draftproof.core.tree import TokenTree
from draftproof.verify.cases import (
    PLAIN,
    SETUPS,
    TARGET,
    Ask,
    Case,
    Letters,
    cases,
    logits_behind,
    one_thread,
)
from draftproof.verify.enumeration import Distribution, distance, enumerate_texts
from draftproof.verify.report import Section, Tick, silent

EXACT, SEEN = 1e-12, 1e-3
"""Total variation that float64 rounding may leave; what a negative control must show at least."""
FREE = Ask(Sampling(temperature=1.0), (2, 1))


def examine(case: Case, wanted: Sequence[Distribution] | None = None) -> tuple[float, int, str]:
    """The largest distance of a case's texts from those `wanted` (None: those of plain decoding),
    outcomes enumerated, and what is wrong in words."""
    with one_thread():
        wanted = enumerate_texts(case.plain()).laws if wanted is None else wanted
        found = enumerate_texts(case)
    if found.wrong:
        return 1.0, found.worlds, found.wrong
    apart = max(distance(law, own) for law, own in zip(found.laws, wanted, strict=True))
    wrong = "" if apart < EXACT else f"total variation {apart:.2g} to plain decoding"     # NaN too
    return apart, found.worlds, wrong


def wrong_draft_law(tree: TokenTree, probs: Tensor, chance: Chance) -> Accepted:
    """Rejection told another law than the one the draft was drawn from (known bug 1)."""
    assert tree.draft_probs is not None
    law = tree.draft_probs.sqrt()
    law = law / law.sum(-1, keepdim=True).clamp(min=1e-30)
    return accept_by_rejection(replace(tree, draft_probs=law), probs, chance)


def target_for_residual(tree: TokenTree, probs: Tensor, chance: Chance) -> Accepted:
    """Rejection that draws from the target where it should draw from the residual (known bug 5)."""
    accepted = accept_by_rejection(tree, probs, chance)
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
) -> Section:  # fmt: skip
    """Examine every rule in the whole engine; another rule can be passed to be proved.

    Passes if no case is further than `EXACT` from plain decoding, plain decoding has the model's
    own distribution, and every planted mistake is seen.
    """
    chosen = list(cases(rules, every=67 if quick else 1))
    plain = Case("plain decoding", RULES["match"], PLAIN, [FREE])
    worst, outcomes, wrong = examine(plain, [product_of_softmaxes(FREE)])
    failures = [f"plain decoding is not the model's own: {wrong}"] if wrong else []
    for done, one in enumerate(chosen):
        tick(done / len(chosen), one.name)
        apart, worlds, wrong = examine(one)
        worst, outcomes = max(worst, apart), outcomes + worlds
        failures += [f"{one.name}: {wrong}"] if wrong else []
    planted = {
        name: examine(Case(name, weighing(rule), SETUPS["chain"], [FREE]))[0]
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


def product_of_softmaxes(ask: Ask) -> Distribution:
    """What the target's own forward gives at temperature 1, for each text of so many tokens."""
    law: Distribution = {}
    for text in itertools.product(range(3), repeat=ask.limit):
        places = range(ask.limit)
        logits = [logits_behind(TARGET, (*ask.prompt, *text[:place])) for place in places]
        laws, letters = torch.tensor(logits, dtype=torch.float64).softmax(-1), Letters()
        shown = "".join(letters.push(token) for token in text) + letters.finish()
        law[text, shown, "length"] = float(laws[places, text].prod())
    return law
