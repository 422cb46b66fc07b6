"""Every architecture of the transformers at hand: run exactly, or refused in a sentence."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch

from draftproof.core.messages import Reading
from draftproof.errors import BrokenModel
from draftproof.model.module_target import ModuleTarget
from draftproof.model.target import Target
from draftproof.verify import architectures as proving
from draftproof.verify.architectures import QUICK, Kind, check_architecture, prove_architectures
from draftproof.verify.small_models import architectures, tiny

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


@pytest.mark.parametrize("name", list(architectures()))
def test_an_architecture_is_run_exactly_or_refused(name: str) -> None:
    kind, why = check_architecture(name)
    assert kind is not Kind.broken, why
    assert (kind in (Kind.exact, Kind.chains)) == (not why)
    lines = [line for line in PAGE.read_text().splitlines() if re.search(rf"[ ,]{name}[,:.]", line)]
    listed = {Kind.exact: "**Trees", Kind.chains: "**Chains"}.get(kind, "- ")
    assert any(line.startswith(listed) for line in lines), "docs/models.md says otherwise"


def test_nearly_all_can_be_made_small() -> None:
    """Else the check would say little. Those of a quick one can all be made."""
    unmade = set()
    for name in architectures():
        try:
            with torch.device("meta"):
                tiny(name)
        except Exception:
            unmade.add(name)
    assert len(unmade) <= 8 and not unmade & set(QUICK)


class Mistaken(ModuleTarget):
    """Sees a tree as if its nodes stood in a row one after the other."""

    def _masks(self, tree, lengths, span, first):  # type: ignore[no-untyped-def]
        return super()._masks(type(tree).chain(tree.tokens), lengths, span, first)


class Shortsighted(ModuleTarget):
    """Forgets what a branch was read for."""

    def read(self, tree, cache, **how):  # type: ignore[no-untyped-def]
        logits, hidden = super().read(tree, cache, **how)
        return Reading(logits.roll(1, -1) if not tree.is_chain else logits, hidden)


@pytest.mark.parametrize("mistake", [Mistaken, Shortsighted])
def test_a_mistake_in_reading_trees_is_found(mistake: type[ModuleTarget]) -> None:
    def around(target: Target) -> Target:
        other = copy.copy(target)
        other.__class__, other.fast = mistake, None
        return other

    kind, why = check_architecture("llama", around)
    assert kind is Kind.broken and "drafted text" in why


def test_different_weights_are_detected() -> None:
    def around(target: Target) -> Target:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            return Target(type(target.model)(target.model.config).eval())

    assert "the model's own" in check_architecture("gpt2", around)[1]


def test_accepted_architectures_must_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(model: object, target: Target) -> str:
        raise BrokenModel("it gave NaN")

    monkeypatch.setattr(proving, "_wrong", broken)
    assert check_architecture("llama")[0] is Kind.broken
    assert check_architecture("rwkv")[0] is Kind.refused
    section = prove_architectures(names=["llama"])
    assert section.failures == ["llama: BrokenModel: it gave NaN"]


def test_section_lists_architectures_by_result() -> None:
    section = prove_architectures(names=["bart", "llama", "mamba", "rwkv"])
    assert not section.failures
    assert "2 are run exactly, 1 more by chains alone, 1 are refused" in section.verdict
    assert section.figures[Kind.exact] == {"bart": "", "llama": ""}
    assert "does not keep" in section.figures[Kind.refused]["rwkv"]
