"""An inflated model is heavier and computes the same function."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM

from draftproof.bench.inflate import LAYERS, MIN_ADDED, inflate, parse_size
from draftproof.errors import BadInput, UnsupportedModel

FAMILIES = ("llama", "mistral", "qwen2", "qwen2-sliding", "qwen3")
TEXT = torch.arange(12)[None] % tiny.VOCAB


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_stay_and_the_size_is_what_was_asked(name: str, tmp_path: Path) -> None:
    """Behind every layer, too, where draft heads read; and transformers reads the saved model."""
    model, size = tiny.fresh(name).double(), 1_000_000
    with torch.inference_mode():
        before = model(TEXT, output_hidden_states=True)
        inflate(model, size)
        after = model(TEXT, output_hidden_states=True)
    assert abs(sum(one.numel() for one in model.parameters()) - size) < 0.1 * size
    torch.testing.assert_close(after.logits, before.logits, rtol=0, atol=1e-12)
    for early, late in zip(before.hidden_states[:-1], after.hidden_states, strict=False):
        torch.testing.assert_close(late, early, rtol=0, atol=1e-12)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    with torch.inference_mode():
        assert torch.equal(again(TEXT).logits, after.logits)


def test_added_weights_are_read_and_no_two_projections_are_alike() -> None:
    """Equality is no accident: with other norms, or output columns, the added weights count. Who
    finds two matrices equal may cache one for both; the model would be half as heavy."""
    model, rows = tiny.fresh("llama").float(), []
    inflate(model, 2_000_000)
    for layer in model.model.layers:
        mlp = layer.mlp
        some = (mlp.gate_proj.weight[-1], mlp.up_proj.weight[-1], mlp.down_proj.weight[:, 0])
        rows += [tuple(weight[:16].tolist()) for weight in some]
    assert len(set(rows)) == len(rows) and all(any(row) for row in rows)
    first, last = model.model.layers[0], model.model.layers[-1]
    with torch.inference_mode():
        logits = [model(TEXT).logits]
        for weight in (first.mlp.down_proj.weight[:, -1], last.input_layernorm.weight,
                       last.post_attention_layernorm.weight):
            weight.fill_(0.5)
            logits.append(model(TEXT).logits)
            assert not torch.equal(*logits[-2:])


def test_a_heavy_model_has_the_depth_of_a_real_one() -> None:
    for layers, wanted in ((2, LAYERS), (LAYERS, LAYERS + MIN_ADDED)):
        model = tiny.fresh("llama", num_hidden_layers=layers).float()
        inflate(model, 8_000_000)
        assert len(model.model.layers) == model.config.num_hidden_layers == wanted


def test_sizes_are_read_as_people_write_them() -> None:
    sizes = {"0.5B": 5 * 10**8, "350m": 35 * 10**7, "1_000_000": 10**6, "7 b": 7 * 10**9}
    assert {text: parse_size(text) for text in sizes} == sizes
    for text in ("", "big", "-1B", "0.5G"):
        with pytest.raises(BadInput, match="number of parameters"):
            parse_size(text)


def test_what_cannot_be_inflated_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="only LlamaForCausalLM"):
        inflate(tiny.fresh("gpt2"), 10**9)
    model = tiny.fresh("llama")
    with pytest.raises(BadInput, match="ask for more"):
        inflate(model, sum(one.numel() for one in model.parameters()) + 10)
