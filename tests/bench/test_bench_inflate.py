"""An inflated model is heavier and says the same."""

from __future__ import annotations

import pytest
import tiny
import torch

from draftproof.bench.inflate import FEWEST, LAYERS, inflate, parameters
from draftproof.core.tree import TokenTree
from draftproof.errors import BadInput, UnsupportedModel
from draftproof.target.loading import embedded, load_model
from draftproof.target.pack import PackedLinear, pack_linears
from draftproof.target.target import Target

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


@pytest.mark.parametrize("name", ["llama", "qwen2-sliding"])
def test_generate_writes_the_same_text(name: str) -> None:
    model = tiny.fresh(name).float()
    wanted = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    before = model.generate(TEXT, **wanted)
    inflate(model, 2_000_000)
    assert torch.equal(before, model.generate(TEXT, **wanted))


def test_the_blocks_would_say_something_if_they_were_not_silenced() -> None:
    """Their weights are there to be read: random, not zero, so that equality is no accident."""
    model = tiny.fresh("llama").float()
    inflate(model, 2_000_000)
    block = model.model.layers[-1]
    with torch.inference_mode():
        before = model(TEXT).logits
        block.mlp.down_proj.weight.fill_(0.1)
        assert not torch.equal(before, model(TEXT).logits)
        block.mlp.down_proj.weight.zero_()
        block.self_attn.o_proj.weight.fill_(0.1)
        assert not torch.equal(before, model(TEXT).logits)


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
        assert target._lean is not None
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
