"""Planted bugs: the sound code is not accused, and each bug is seen by the check it names."""

from __future__ import annotations

import traceback

import pytest
from helpers import checks
from helpers.checks import DISTRIBUTION_CASES, WATCHES
from helpers.mutants import MUTANTS, Mutant, Plant, around, kernel, text
from helpers.mutants import RULES as WRONG_RULES

from draftproof.cache import kv_cache
from draftproof.core import acceptance, noise
from draftproof.core.acceptance import RULES, weighing
from draftproof.core.params import Sampling
from draftproof.forward import draft_layers, fast_forward
from draftproof.model import module_target
from draftproof.native.kernels import kernels
from draftproof.verify.cases import SETUPS, Case, CaseRequest, by_model, toy
from draftproof.verify.exact import SEEN, check_case

SOUND: list[tuple[str, ...]] = [("distribution", name) for name in DISTRIBUTION_CASES]
SOUND += [("count", rule) for rule in RULES]
SOUND += [(watch,) for watch in ("bits", "noise", "streams", "draws")]


@pytest.mark.parametrize("watch", SOUND, ids=" ".join)
def test_unmodified_code_passes(watch: tuple[str, ...]) -> None:
    name, *options = watch
    assert WATCHES[name](*options) == ""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_planted_bugs_are_detected(mutant: Mutant) -> None:
    if mutant.name.startswith("the kernel's") and kernels() is None:
        pytest.skip("no C compiler here")
    if mutant.watch == "distribution":
        checks.wanted(*mutant.options)             # of the sound code
    checks.sound_accepted()
    toy(12, 6)                                  # else the check at load sees it, not the watch
    with mutant.plant():
        try:
            seen = WATCHES[mutant.watch](*mutant.options)
        except Exception as error:                  # a bug may break the run itself: that is seen
            seen, last = str(error) or repr(error), traceback.extract_tb(error.__traceback__)[-1]
            assert not last.filename.endswith("mutants.py"), f"it was not planted: {error!r}"
    assert seen, f"{mutant.name} ({mutant.seen_in}): nobody saw it"


@pytest.mark.parametrize("plant", [
    around("core.noise:row_keys", lambda original, *args: original(*args)),
    text("core.noise:row_keys", ("seed &", "0 &")),
    text("core.prefix:Paths.lengths", ("self.first", "0")),
    kernel(noise.stream, lambda original, *args: original(*args)),
], ids=["around", "text", "property", "kernel"])
def test_a_bug_that_nothing_calls_was_not_planted(plant: Plant) -> None:
    with pytest.raises(AssertionError, match="never called"), plant():
        pass


def test_a_bug_is_planted_wherever_its_function_was_imported() -> None:
    with around("cache.kv_cache:tree_mask", lambda original, *args: "planted")():
        for module in (kv_cache, module_target, fast_forward, draft_layers):
            assert module.tree_mask(None, None, 0, None) == "planted"   # type: ignore[attr-defined]


@pytest.mark.parametrize("mistake", WRONG_RULES)
def test_a_wrong_rule_is_detected(mistake: str) -> None:
    rule, free = weighing(WRONG_RULES[mistake]()), Sampling(temperature=1.0)
    requests = {"chain": CaseRequest(free, (1,), 4), "smaller draft": CaseRequest(free),
                "tree of 3": CaseRequest(free)}
    result = (check_case(Case(mistake, rule, SETUPS[name], [request]))
             for name, request in requests.items())
    assert any(distance > SEEN for distance, _, _ in result)


def test_a_match_without_its_ancestors_is_detected() -> None:
    """Sample-and-match: a node whose parent was rejected, or the first unseen, may not count."""
    def match_ignoring_ancestors(tree, logits, frontier):                           # type: ignore[no-untyped-def]
        parents = tree.parents.clamp(max=0)                 # every node hangs from the root
        hung = type(tree)(tree.tokens, parents, tree.depth_limit)
        return acceptance.match(hung, logits, frontier)

    rule = RULES["match"]._replace(accept=match_ignoring_ancestors)
    case = Case("", rule, by_model(toy(12, 3), 2), [CaseRequest(Sampling(temperature=1.0))])
    assert check_case(case)[0] > SEEN
