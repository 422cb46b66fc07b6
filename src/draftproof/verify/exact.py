"""Section "distribution": proves by enumeration on small vocabularies that drafts change nothing.

Every case is enumerated with and without drafts; the two distributions must be the same. Without
drafts it must be the product of the model's own softmaxes, and with every option the result of
plain Python that shares no code with the engine (`reference`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from draftproof.core.acceptance import RULES, Rule, accept_by_rejection, weighing
from draftproof.core.messages import Accepted
from draftproof.core.params import Sampling
from draftproof.core.sampling import Chance
from draftproof.core.tree import TokenTree
from draftproof.verify.cases import (
    ENDS,
    OPTIONS,
    PLAIN,
    PROMPTS,
    SETUPS,
    TAGGED,
    TARGET,
    Case,
    CaseRequest,
    CharTokenizer,
    cases,
    logits_after,
    one_thread,
)
from draftproof.verify.enumeration import Distribution, distance, enumerate_texts
from draftproof.verify.reference import TAGS, distribution_of_run
from draftproof.verify.report import Section, Tick, silent

EXACT, SEEN = 1e-12, 1e-3
"""Total variation that float64 rounding may leave; what a negative control must show at least."""
FREE = CaseRequest(Sampling(temperature=1.0), (2, 1))


def check_case(case: Case, wanted: Sequence[Distribution] | None = None) -> tuple[float, int, str]:
    """The largest distance of a case's distributions from those `wanted` (None: plain decoding's),
    the number of outcomes, and any error in words."""
    with one_thread():
        wanted = enumerate_texts(case.plain()).distributions if wanted is None else wanted
        result = enumerate_texts(case)
    if result.wrong:
        return 1.0, result.branches, result.wrong
    pairs = zip(result.distributions, wanted, strict=True)
    apart = max(distance(ours, theirs) for ours, theirs in pairs)
    wrong = "" if apart < EXACT else f"total variation {apart:.2g} to what is right"     # NaN too
    return apart, result.branches, wrong


def wrong_draft_probs(tree: TokenTree, probs: Tensor, chance: Chance) -> Accepted:
    """Rejection with other probabilities than the draft was drawn from (known bug 1)."""
    assert tree.draft_probs is not None
    wrong = tree.draft_probs.sqrt()
    wrong = wrong / wrong.sum(-1, keepdim=True).clamp(min=1e-30)
    return accept_by_rejection(replace(tree, draft_probs=wrong), probs, chance)


def target_for_residual(tree: TokenTree, probs: Tensor, chance: Chance) -> Accepted:
    """Rejection that draws from the target instead of the residual (known bug 5)."""
    accepted = accept_by_rejection(tree, probs, chance)
    last = accepted.nodes.gather(1, accepted.count[:, None] - 1)
    target_probs = probs.gather(1, last[..., None].expand(-1, 1, probs.shape[-1]))[:, 0]
    return replace(accepted, root=chance.draw(target_probs, accepted.count - 1))


CONTROLS = {
    "draft probabilities that are not those drawn from": wrong_draft_probs,
    "the target in place of the residual": target_for_residual,
}
"""Planted mistakes that must be seen."""


def prove_distribution(
    quick: bool = False, tick: Tick = silent, *, rules: Mapping[str, Rule] = RULES,
) -> Section:  # fmt: skip
    """Check every rule in the whole engine; further rules can be passed.

    Passes if no case is further than `EXACT` from plain decoding, plain decoding has the model's
    own distribution, and every planted mistake is found.
    """
    chosen = list(cases(rules, every=97 if quick else 1))
    plain = Case("plain decoding", RULES["match"], PLAIN, [FREE])
    worst, outcomes, wrong = check_case(plain, [product_of_softmaxes(FREE)])
    failures = [f"plain decoding is not the model's own: {wrong}"] if wrong else []
    checked = list(plain_cases(quick))
    for case in checked:
        apart, branches, wrong = check_case(case, by_reference(case))
        worst, outcomes = max(worst, apart), outcomes + branches
        failures += [f"{case.name}: {wrong}"] if wrong else []
    for done, case in enumerate(chosen):
        tick(done / len(chosen), case.name)
        apart, branches, wrong = check_case(case)
        worst, outcomes = max(worst, apart), outcomes + branches
        failures += [f"{case.name}: {wrong}"] if wrong else []
    planted = {
        name: check_case(Case(name, weighing(rule), SETUPS["chain"], [FREE]))[0]
        for name, rule in CONTROLS.items()
    }
    blind = [name for name, seen in planted.items() if not seen > SEEN]
    failures += [f"the planted mistake {name!r} was not seen: this is blind" for name in blind]
    verdict = (
        f"{len(chosen)} cases, {outcomes:,} outcomes enumerated, total variation to plain decoding "
        f"at most {worst:.1g} (allowed: {EXACT:g}); {len(planted) - len(blind)} of {len(planted)} "
        f"planted mistakes seen; plain decoding is as defined in {len(checked)} cases"
    )
    figures = {
        "cases": len(chosen), "plain_cases": len(checked),
        "outcomes": outcomes, "max_total_variation": worst,
        "tolerance": EXACT, "controls": planted, "rules": sorted(rules),
    }
    return Section("distribution", verdict, figures, failures)


def plain_cases(quick: bool) -> Iterator[Case]:
    """Plain decoding with every option and way to end (if quick, a few of each), and with stop
    strings that begin inside a special token."""
    match = RULES["match"]
    yield Case("special token", match, PLAIN, TAGGED, alphabet=TAGS)
    numbers = itertools.count()
    for (option, sampling), (end, stops) in itertools.product(OPTIONS.items(), ENDS.items()):
        number = next(numbers)
        if not quick or number % 5 == 0:
            request = CaseRequest(replace(sampling, **stops), PROMPTS[number % len(PROMPTS)])
            yield Case(", ".join(filter(None, ("plain", option, end))), match, PLAIN, [request])
    yield Case("plain, words", match, PLAIN, [CaseRequest(OPTIONS["all at once"], (1,))])


def by_reference(case: Case) -> list[Distribution]:
    """The distributions from plain Python for a case without the user's processors."""
    logits = partial(logits_after, case.target)
    return [
        distribution_of_run(logits, request.prompt, request.sampling, request.limit, case.alphabet)
        for request in case.requests
    ]


def product_of_softmaxes(request: CaseRequest) -> Distribution:
    """The distribution of a request's texts from the target's own forward at temperature 1."""
    distribution: Distribution = {}
    for text in itertools.product(range(3), repeat=request.limit):
        positions = range(request.limit)
        prefixes = [(*request.prompt, *text[:position]) for position in positions]
        logits = [logits_after(TARGET, prefix) for prefix in prefixes]
        probs, letters = torch.tensor(logits, dtype=torch.float64).softmax(-1), CharTokenizer()
        shown = "".join(letters.push(token) for token in text) + letters.finish()
        distribution[text, shown, "length"] = float(probs[positions, text].prod())
    return distribution
