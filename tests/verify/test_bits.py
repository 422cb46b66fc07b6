"""Bits: a sound engine agrees, near-ties are told from failures, and nothing is overlooked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from draftproof.core import acceptance
from draftproof.core.params import Sampling
from draftproof.core.tree import TreeShape
from draftproof.drafters.draft_model import DraftModel
from draftproof.engine.engine import Engine
from draftproof.model.exactness import Exactness
from draftproof.model.module_target import ModuleTarget
from draftproof.verify import bits
from draftproof.verify.bits import prove_bits
from draftproof.verify.cases import toy

Patch = pytest.MonkeyPatch


def engine(shape: TreeShape | None = None) -> Engine:
    return Engine(toy(11, 6, 2), DraftModel(toy(12, 6), 6, shape))


@pytest.mark.parametrize("shape", [None, TreeShape.branching((2, 2))], ids=["chain", "tree"])
def test_a_sound_engine_agrees_up_to_its_rounding(shape: TreeShape | None) -> None:
    section = prove_bits(engine(shape), new_tokens=9, exact_nodes=0)
    assert not section.failures
    figures = section.figures
    assert figures["texts"] == 64 and figures["noise"] < 1e-12
    assert figures["control_over_bound"] > 100
    assert figures["set_ups_exact"] == 0 and "0 of 8 set-ups" in section.verdict


def reading(patch: Patch, change: Any) -> None:
    ours = ModuleTarget.read

    def read(self: ModuleTarget, tree: Any, cache: Any, **rest: Any) -> Any:
        result = ours(self, tree, cache, **rest)
        wide = tree.tokens.shape[1] > 1 and not rest.get("last_only")
        return result._replace(logits=change(result.logits, wide))

    patch.setattr(ModuleTarget, "read", read)


def test_where_bits_are_promised_a_difference_is_a_failure(monkeypatch: Patch) -> None:
    """A little, in chains only, is nothing outside the class and a broken promise inside it."""
    reading(monkeypatch, lambda logits, wide: logits * (1 + 2**-50) if wide else logits)
    assert prove_bits(engine(), new_tokens=6, exact_nodes=64).failures
    assert not prove_bits(engine(), new_tokens=6, exact_nodes=0).failures


def test_a_class_of_chains_promises_no_bits_of_trees(monkeypatch: Patch) -> None:
    """What drafts may draft trees; plain batches are of the class of chains."""
    probed = Exactness("cpu", "float64", [], {}, exact_nodes=64, exact_tree_nodes=0)
    monkeypatch.setattr(bits, "probe", lambda *_: probed)
    reading(monkeypatch, lambda logits, wide: logits * (1 + 2**-50) if wide else logits)
    section = prove_bits(engine(TreeShape.branching((2, 2))), new_tokens=6)
    assert not section.failures and section.figures["set_ups_exact"] == 2
    monkeypatch.setattr(bits, "probe", lambda *_: probed._replace(exact_tree_nodes=64))
    assert prove_bits(engine(TreeShape.branching((2, 2))), new_tokens=6).failures


def test_a_difference_that_rounding_cannot_explain_is_a_failure(monkeypatch: Patch) -> None:
    """A rule that sees other logits than were read."""
    def flipped_logits_in_trees(tree: Any, logits: Tensor, frontier: Any) -> Any:
        wrong = logits if tree.tokens.shape[1] == 1 else logits.flip(-1)
        return acceptance.match(tree, wrong, frontier)

    rule = acceptance.RULES["match"]._replace(accept=flipped_logits_in_trees)
    monkeypatch.setitem(acceptance.RULES, "match", rule)
    section = prove_bits(engine(), new_tokens=8, exact_nodes=0)
    assert "cannot turn that" in " ".join(section.failures)
    worst = section.figures["divergences"][0]
    assert worst["plain"] != worst["speculative"] and not worst["explained"]
    assert abs(worst["apart"]) > 1e-6


def test_near_ties_are_explained_by_measured_rounding() -> None:
    """In bfloat16 shapes round differently."""
    target = toy(3, 64, 3, 64, torch.bfloat16)
    section = prove_bits(Engine(target), new_tokens=24, exact_nodes=0, wants=[Sampling()])
    assert not section.failures
    for divergence in section.figures["divergences"]:
        assert divergence["explained"]
        assert abs(divergence["apart"]) <= 2 * bits.SLACK * section.figures["noise"]


def test_a_broken_target_is_found_against_the_models_own_forward(monkeypatch: Patch) -> None:
    """Shapes that all read the same wrong thing agree with each other, but not with the model."""
    sound = engine()
    reading(monkeypatch, lambda logits, wide: logits + 0.01 * torch.arange(logits.shape[-1]))
    section = prove_bits(sound, new_tokens=6, exact_nodes=0)
    assert "the model's own forward" in " ".join(section.failures)
