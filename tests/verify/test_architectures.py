"""Every architecture of the transformers at hand: run exactly, or refused in a sentence."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch

from draftproof.core.messages import Reading
from draftproof.errors import BrokenModel
from draftproof.model.target import Target
from draftproof.verify import architectures as proving
from draftproof.verify.architectures import (
    LISTS,
    QUICK,
    Kind,
    examine,
    prove_architectures,
    write_lists,
)
from draftproof.verify.small_models import architectures, tiny

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


@pytest.mark.parametrize("name", list(architectures()))
def test_an_architecture_is_run_exactly_or_refused(name: str) -> None:
    found = examine(name)
    assert found.kind is not Kind.broken, found.why
    assert (found.kind in (Kind.exact, Kind.chains)) == (not found.why)
    lines = [line for line in PAGE.read_text().splitlines() if re.search(rf"[ ,]{name}[,:.]", line)]
    listed = {Kind.exact: "**Trees", Kind.chains: "**Chains"}.get(found.kind, "- ")
    assert any(line.startswith(listed) for line in lines), "docs/models.md says otherwise"


@pytest.mark.parametrize(
    ("name", "kind"),
    [("llama", Kind.exact), ("gemma3_text", Kind.exact), ("mpt", Kind.chains),
     ("bloom", Kind.exact), ("mamba", Kind.chains), ("rwkv", Kind.refused)],
)
def test_what_is_known_of_some(name: str, kind: Kind) -> None:
    assert examine(name).kind is kind


def test_nearly_all_can_be_made_small() -> None:
    """Else the examination would say little. Those of a quick one can all be made."""
    unmade = set()
    for name in architectures():
        try:
            with torch.device("meta"):
                tiny(name)
        except Exception:
            unmade.add(name)
    assert len(unmade) <= 8 and not unmade & set(QUICK)


class Mistaken(Target):
    """Sees a tree as if its nodes stood in a row behind each other."""

    def _masks(self, tree, lengths, span, first):  # type: ignore[no-untyped-def]
        return super()._masks(type(tree).chain(tree.tokens), lengths, span, first)


class Shortsighted(Target):
    """Forgets what a branch was read for."""

    def read(self, tree, cache, **how):  # type: ignore[no-untyped-def]
        logits, hidden = super().read(tree, cache, **how)
        return Reading(logits.roll(1, -1) if not tree.is_chain else logits, hidden)


@pytest.mark.parametrize("mistake", [Mistaken, Shortsighted])
def test_a_mistake_in_reading_trees_is_found(mistake: type[Target]) -> None:
    def around(target: Target) -> Target:
        other = copy.copy(target)
        other.__class__, other.fast = mistake, None
        return other

    found = examine("llama", around)
    assert found.kind is Kind.broken and "drafted text" in found.why


def test_a_model_that_is_not_its_own_is_found() -> None:
    def around(target: Target) -> Target:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            return Target(type(target.model)(target.model.config).eval())

    assert "the model's own" in examine("gpt2", around).why


def test_what_was_not_refused_has_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(model: object, target: Target) -> str:
        raise BrokenModel("it gave NaN")

    monkeypatch.setattr(proving, "_wrong", broken)
    assert examine("llama").kind is Kind.broken and examine("rwkv").kind is Kind.refused


def test_the_section_tells_who_is_what(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    section = prove_architectures(names=["bart", "llama", "mamba", "rwkv"])
    assert section.passed, section.failures
    assert "2 are run exactly, 1 more by chains alone, 1 are refused" in section.verdict
    assert section.figures[Kind.exact] == "bart, llama" and "rwkv" in section.figures[Kind.refused]
    (page := tmp_path / "models.md").write_text(f"Before.\n\n{LISTS}\n\nOld.\n")
    write_lists(section, page)
    text = page.read_text()
    assert text.startswith(
        f"Before.\n\n{LISTS}\n\n**Trees**: llama.\n\n**Trees, encoder–decoders**: bart.\n\n"
        "**Chains**: mamba.\n\n"
    )
    assert "- rwkv: does not keep" in text and "Old." not in text
    monkeypatch.setattr(proving, "_wrong", lambda model, target: "it is wrong")
    section = prove_architectures(names=["llama"])
    assert not section.passed and section.failures == ["llama: it is wrong"]
