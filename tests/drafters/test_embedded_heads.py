"""The heads that come with the package for SmolLM2-135M: they load, and leave the text as it is."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from draftproof.core.params import Sampling
from draftproof.engine.load import load


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """As wide as SmolLM2-135M, and one layer deep."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).bfloat16().eval()


@pytest.mark.parametrize("drafter", ["smollm2-135m-medusa", "smollm2-135m-redrafter"])
def test_heads_draft_for_a_target_of_that_form(model: LlamaForCausalLM, drafter: str) -> None:
    prompt = [[5, 80, 7], [900, 2]]
    for temperature in (0.0, 0.8):
        wanted = Sampling(temperature=temperature, seed=3, max_new_tokens=12)
        plain, drafted = (load(model, drafter=name, budget=budget).generate(prompt, sampling=wanted)
                          for name, budget in (("none", None), (drafter, 7)))
        assert [one.tokens for one in drafted] == [one.tokens for one in plain]
        assert all(one.stats.drafted > 0 for one in drafted)
