"""An inflated model is heavier and says the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM

from draftproof.bench.inflate import FEWEST, LAYERS, inflate, parameters
from draftproof.core.tree import TokenTree
from draftproof.errors import BadInput, UnsupportedModel
from draftproof.model.loading import embedded, load_model
from draftproof.model.packed_linear import PackedLinear, pack_linears
from draftproof.model.target import Target

LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen2-sliding", "qwen3")
TEXT = torch.arange(12)[None] % tiny.VOCAB


@pytest.mark.parametrize("name", LLAMA_LIKE)
@pytest.mark.parametrize("size", [60_000, 2_000_000])
def test_the_logits_are_the_same_and_the_size_is_what_was_asked(name: str, size: int) -> None:
    model = tiny.fresh(name).float()
    with torch.inference_mode():
        before = model(TEXT, output_hidden_states=True)
        inflate(model, size)
        after = model(TEXT, output_hidden_states=True)
    assert torch.equal(before.logits, after.logits)
    assert abs(sum(parameter.numel() for parameter in model.parameters()) - size) < 0.05 * size
    kept = len(before.hidden_states) - 1                             # the last one is behind the final norm
    for early, late in zip(before.hidden_states[:kept], after.hidden_states[:kept], strict=True):
        assert torch.equal(early, late)
    assert torch.equal(before.hidden_states[-1], after.hidden_states[-1])


@pytest.mark.parametrize("name", LLAMA_LIKE)
def test_an_even_model_is_described_by_its_config(name: str, tmp_path: Path) -> None:
    """Every MLP as wide as every other, the function the same, and what was saved is read by stock transformers."""
    model = tiny.fresh(name).double()
    with torch.inference_mode():
        before = model(TEXT).logits
        inflate(model, 2_000_000, even=True)
        assert {layer.mlp.down_proj.in_features for layer in model.model.layers} == {model.config.intermediate_size}
        assert abs(sum(parameter.numel() for parameter in model.parameters()) - 2_000_000) < 0.1 * 2_000_000
        torch.testing.assert_close(model(TEXT).logits, before, rtol=0, atol=1e-12)
        model.save_pretrained(tmp_path)
        again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
        assert torch.equal(again(TEXT).logits, model(TEXT).logits)
        again.model.layers[0].mlp.down_proj.weight[:, -1] = 0.1
        assert not torch.equal(again(TEXT).logits, model(TEXT).logits)        # the new columns are computed


def test_too_few_parameters_for_even_blocks_are_one_sentence() -> None:
    model = tiny.fresh("llama")
    with pytest.raises(BadInput, match="too few"):
        inflate(model, sum(parameter.numel() for parameter in model.parameters()) + 10, even=True)


@pytest.mark.parametrize("name", ["llama", "qwen2-sliding"])
def test_generate_writes_the_same_text(name: str) -> None:
    model = tiny.fresh(name).float()
    wanted = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    before = model.generate(TEXT, **wanted)
    inflate(model, 2_000_000)
    assert torch.equal(before, model.generate(TEXT, **wanted))


@pytest.mark.parametrize("norm", ["input_layernorm", "post_attention_layernorm"])
def test_the_blocks_would_say_something_if_they_were_not_silenced(norm: str) -> None:
    """Their weights are there to be read: random, not zero, so that equality is no accident."""
    model = tiny.fresh("qwen2").float()
    inflate(model, 2_000_000)
    block = model.model.layers[-1]
    with torch.inference_mode():
        before = model(TEXT).logits
        getattr(block, norm).weight.fill_(1.0)
        assert not torch.equal(before, model(TEXT).logits)


@pytest.mark.parametrize("even", [False, True])
def test_no_two_projections_are_the_same(even: bool) -> None:
    """Who finds two matrices equal may keep one of them in the cache, and the model is only half as heavy."""
    model = tiny.fresh("llama").float()
    inflate(model, 2_000_000, even=even)
    linears = [linear for layer in model.model.layers for linear in layer.mlp.children() if isinstance(linear, torch.nn.Linear)]
    rows = [tuple(linear.weight.flatten()[:64].tolist()) for linear in linears]
    assert len(set(rows)) == len(rows) and all(any(row) for row in rows)


def test_a_heavy_model_has_the_depth_of_a_real_one() -> None:
    model = tiny.fresh("llama").float()
    inflate(model, 50_000_000)
    assert len(model.model.layers) == model.config.num_hidden_layers == LAYERS
    deep = tiny.fresh("llama", num_hidden_layers=LAYERS).float()
    inflate(deep, 50_000_000)
    assert len(deep.model.layers) == LAYERS + FEWEST


def test_the_lean_forward_reads_it_packed_and_says_the_same() -> None:
    light, heavy = (load_model(embedded("demo"), "bfloat16") for _ in range(2))
    inflate(heavy, 16_000_000)
    packed = pack_linears(light), pack_linears(heavy)
    assert (packed[0] > 0) == (packed[1] > 0) == isinstance(heavy.model.layers[-1].mlp.down_proj, PackedLinear)
    said = []
    for model in (light, heavy):
        target = Target(model)
        assert target._fast is not None
        target._fast.fused = None                                     # its kernels serve MLPs of one width
        with torch.inference_mode():
            said.append(target.read(TokenTree.chain(torch.arange(1, 20)[None]), target.new_cache(1, 128)).logits)
    assert torch.equal(*said)


def test_sizes_are_read_as_people_write_them() -> None:
    assert [parameters(text) for text in ("0.5B", "350m", "1_000_000", "7 b")] == [500_000_000, 350_000_000, 10**6, 7 * 10**9]
    for text in ("", "big", "-1B", "0.5G"):
        with pytest.raises(BadInput, match="number of parameters"):
            parameters(text)


def test_what_cannot_be_inflated_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="only LlamaForCausalLM"):
        inflate(tiny.fresh("gpt2"), 10**9)
    with pytest.raises(BadInput, match="ask for more"):
        inflate(tiny.fresh("llama"), 100)
