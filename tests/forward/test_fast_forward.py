"""The fast forward reads what the model's own forward reads, for every family it serves, and
packing keeps weights."""

import copy
from typing import Any

import pytest
import torch
import transformers
from tiny import of_family
from torch import Tensor

from draftproof.core.tree import TokenTree, TreeShape
from draftproof.forward.module_decoder import fits
from draftproof.model.target import Target
from draftproof.weights.packed_linear import PackedLinear, pack_linears

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "initializer_range": 0.3, "pad_token_id": None,
    "max_position_embeddings": 64,
}  # fmt: skip
SLIDING, FULL = "sliding_attention", "full_attention"


def rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **values}}


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama mha bias": (
        "Llama", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    "llama3 rope": ("Llama", rope(
        "llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=16)),
    "mistral sliding": ("Mistral", {"sliding_window": 6}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 1, "head_dim": 16}),
    "seed oss": ("SeedOss", {"head_dim": 16}),
    "granite": ("Granite", {"embedding_multiplier": 3.0, "residual_multiplier": 0.4,
                            "attention_multiplier": 0.2, "logits_scaling": 4.0}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1]}),
    "phi3": ("Phi3", {}),
    "phi3 turned in part": (
        "Phi3", {"sliding_window": 6, **rope("default", partial_rotary_factor=0.5)}),
    "phi3 longrope": ("Phi3", {"original_max_position_embeddings": 40, **rope(
        "longrope", short_factor=[1.0, 1.5, 2.0, 3.0], long_factor=[4.0] * 4,
        original_max_position_embeddings=40)}),
    "ministral": ("Ministral", {
        "head_dim": 8, "sliding_window": 6, "layer_types": [FULL, SLIDING, SLIDING]}),
    "gemma3": ("Gemma3", {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 24,
                          "layer_types": [SLIDING, FULL, SLIDING]}),
    "yarn": ("Qwen2", rope("yarn", factor=4.0, original_max_position_embeddings=16)),
}  # fmt: skip


def model(family: str, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    name, extra = FAMILIES[family]
    return of_family(name, **SIZES | extra).to(dtype)


def readings(target: Target, tokens: Tensor) -> list[Tensor]:
    """Two ragged rows: a prompt, a tree after it, a chain after what was kept of it."""
    shape = TreeShape.from_digits(["0", "1", "00", "01", "10"])
    cache = target.new_cache(2, 32)
    out = []
    with torch.inference_mode():
        out.append(target.read(TokenTree.chain(tokens[:, :8]), cache, hidden_layers=(0, 1, -1)))
        cache.keep(None, torch.tensor([8, 5]))
        out.append(target.read(TokenTree.shaped(tokens[:, 8:14], shape), cache, hidden_layers=(2,)))
        cache.keep(torch.tensor([[0, 2, 5], [0, 1, 4]]), torch.tensor([3, 2]))
        chain = TokenTree.chain(tokens[:, 14:16])
        out.append(target.read(chain, cache, last_only=True, hidden_layers=(-1,)))
    return [part for reading in out for part in reading if part is not None]


@pytest.mark.parametrize("family", FAMILIES)
def test_fast_forward_reads_what_the_model_reads(family: str) -> None:
    fast = Target(model(family))
    assert fast.fast is not None
    plain = Target(model(family))
    plain.fast = None
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))
    for ours, theirs in zip(readings(fast, tokens), readings(plain, tokens), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-4)


def test_a_fast_forward_that_differs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "draftproof.forward.module_decoder.norm_of",
        lambda norm: lambda inputs: inputs * norm.weight,
    )
    assert Target(model("llama")).fast is None


def test_float64_and_hooked_models_keep_their_own_forward() -> None:
    assert not fits(model("llama", torch.float64))
    hooked = model("llama")
    hooked.lm_head.register_forward_hook(lambda *_: None)
    assert not fits(hooked)


@pytest.mark.parametrize("tied", [True, False])
def test_packing_keeps_weights_and_what_shares_them(tied: bool) -> None:
    """A head that is tied to the embeddings is packed as well, and the embeddings stay."""
    plain = of_family("Llama", **SIZES, tie_word_embeddings=tied).bfloat16()
    packed = copy.deepcopy(plain)
    if not pack_linears(packed):
        pytest.skip("no kernels for bfloat16 here")
    assert torch.equal(packed.model.embed_tokens.weight, plain.model.embed_tokens.weight)
    ones = [(item.lm_head, item.model.layers[1].mlp.down_proj) for item in (packed, plain)]
    for ours, theirs in zip(*ones, strict=True):
        assert isinstance(ours, PackedLinear) and torch.equal(ours.dense(), theirs.weight)
    assert not any(type(module) is torch.nn.Linear for module in packed.modules())


def test_without_kernels_a_bfloat16_model_keeps_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftproof.weights.packed_linear.kernels", lambda: None)
    monkeypatch.setattr("draftproof.forward.fused_forward.kernels", lambda: None)
    ours = model("llama").bfloat16()
    assert pack_linears(ours) == 0 and type(ours.lm_head) is torch.nn.Linear
    tokens = torch.arange(16)[None].repeat(2, 1)
    assert all(part.isfinite().all() for part in readings(Target(ours), tokens))
