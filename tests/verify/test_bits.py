"""Bits: a sound engine agrees, divergences are attributed to noise or are failures, and the examination is not blind."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftproof.core.params import Sampling
from draftproof.core.tree import TreeShape
from draftproof.drafters.draft_model import DraftModel
from draftproof.engine.engine import Engine
from draftproof.model.target import Target
from draftproof.verify import bits
from draftproof.verify.bits import prove_bits
from draftproof.verify.sampling import toy


def engine(shape: TreeShape | None = None) -> Engine:
    return Engine(toy(11, 6, 2), DraftModel(toy(12, 6), 6, shape))


@pytest.mark.parametrize("shape", [None, TreeShape.branching((2, 2))], ids=["chain", "tree"])
def test_a_sound_engine_agrees_up_to_its_noise(shape: TreeShape | None) -> None:
    section = prove_bits(engine(shape), new_tokens=9, exact_nodes=0)
    assert section.passed, section.failures
    figures = section.figures
    assert figures["positions"] > 200 and figures["noise"] < 1e-12 and figures["control_over_bound"] > 100
    assert figures["set_ups_exact"] == 0 and "no exactness class" in section.verdict
    assert max(figures["accepted_share"].values()) > 0.1


def test_where_bits_are_promised_a_difference_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """One unit in the last place, in chains only, is nothing outside the class and a broken promise inside it."""
    own = Target.read

    def blurred(self: Target, tree, cache, **rest):                                                      # type: ignore[no-untyped-def]
        reading = own(self, tree, cache, **rest)
        wide = tree.tokens.shape[1] > 1 and not rest.get("last_only")
        return reading._replace(logits=reading.logits * (1 + 2**-50)) if wide else reading

    monkeypatch.setattr(Target, "read", blurred)
    assert not prove_bits(engine(), new_tokens=6, exact_nodes=64).passed
    assert prove_bits(engine(), new_tokens=6, exact_nodes=0).passed


def test_a_difference_that_noise_cannot_explain_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that sees other logits than were read."""
    from draftproof.core import acceptance

    def shaken(tree, logits: Tensor, frontier):                                                          # type: ignore[no-untyped-def]
        return acceptance.match(tree, logits if tree.tokens.shape[1] == 1 else logits.flip(-1), frontier)

    rules = dict(acceptance.RULES)
    monkeypatch.setitem(acceptance.RULES, "match", rules["match"]._replace(accept=shaken))
    section = prove_bits(engine(), new_tokens=8, exact_nodes=0)
    assert not section.passed and "cannot turn that" in " ".join(section.failures)
    worst = section.figures["divergences"][0]
    assert worst["plain"] != worst["speculative"] and not worst["explained"] and abs(worst["gap_plain_shape"]) > 1e-6


def test_near_ties_are_explained_by_measured_noise() -> None:
    """In bfloat16 shapes round differently; every divergence must carry its noise and its gap."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=256, initializer_range=0.1, bos_token_id=None, eos_token_id=None,
    )
    torch.manual_seed(0)
    target = Target(LlamaForCausalLM(config).bfloat16())
    section = prove_bits(Engine(target), new_tokens=24, exact_nodes=0, wants={"greedy": Sampling()})
    assert section.passed, section.failures
    for divergence in section.figures["divergences"]:
        assert divergence["explained"] and abs(divergence["gap_plain_shape"]) <= 2 * bits.SLACK * divergence["noise"]


def test_a_broken_target_is_found_against_the_models_own_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes that all read the same wrong thing agree with each other, but not with the model."""
    sound, own = engine(), Target.read

    def stale(self: Target, tree, cache, **rest):                                                        # type: ignore[no-untyped-def]
        reading = own(self, tree, cache, **rest)
        return reading._replace(logits=reading.logits + 0.01 * torch.arange(reading.logits.shape[-1]))

    monkeypatch.setattr(Target, "read", stale)
    section = prove_bits(sound, new_tokens=6, exact_nodes=0)
    assert not section.passed and "the model's own forward" in " ".join(section.failures)
