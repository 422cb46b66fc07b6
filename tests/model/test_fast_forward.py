"""The lean forward reads what the model's own forward reads, for every family it serves, and packing keeps the bits."""

import pytest
import torch
import transformers
from tiny import of_family
from torch import Tensor

from draftproof.core.tree import TokenTree, TreeShape
from draftproof.model.fast_forward import FastForward
from draftproof.model.loading import load_model
from draftproof.model.packed_linear import pack_linears
from draftproof.model.target import Target

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "initializer_range": 0.3,
    "max_position_embeddings": 64,
}
MULTIPLIERS = {
    "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 4.0,
}  # fmt: skip
FAMILIES = {
    "llama": ("Llama", {"num_key_value_heads": 2}),
    "llama mha bias": ("Llama", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    "llama3 rope": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "mistral sliding": ("Mistral", {"num_key_value_heads": 2, "sliding_window": 6}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 1, "head_dim": 16}),
    "seed oss": ("SeedOss", {"num_key_value_heads": 2, "head_dim": 16}),
    "granite": ("Granite", {"num_key_value_heads": 2, **MULTIPLIERS}),
    "smollm3": ("SmolLM3", {"num_key_value_heads": 2, "no_rope_layers": [1, 0, 1], "pad_token_id": None}),
    "phi3": ("Phi3", {"num_key_value_heads": 2, "pad_token_id": None}),
    "phi3 turned in part": (
        "Phi3",
        {
            "num_key_value_heads": 2, "pad_token_id": None, "sliding_window": 6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    "phi3 longrope": (
        "Phi3",
        {
            "num_key_value_heads": 2, "pad_token_id": None, "original_max_position_embeddings": 40,
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.5, 2.0, 3.0],
                "long_factor": [4.0] * 4, "original_max_position_embeddings": 40,
            },
        },
    ),
    "ministral": (
        "Ministral",
        {
            "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 6,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 24, "pad_token_id": None,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "yarn": (
        "Qwen2",
        {
            "num_key_value_heads": 2,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16,
            },
        },
    ),
}


def model(family: str, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    name, extra = FAMILIES[family]
    return of_family(name, **SIZES | extra).to(dtype)


def readings(target: Target, tokens: Tensor) -> list[Tensor]:
    """Two ragged rows: a prompt, a tree behind it, a chain behind what was kept of it."""
    shape = TreeShape.from_digits(["0", "1", "00", "01", "10"])
    cache = target.new_cache(2, 32)
    out = []
    with torch.inference_mode():
        out.append(target.read(TokenTree.chain(tokens[:, :8]), cache, hidden_layers=(0, 1, -1)))
        cache.keep(None, torch.tensor([8, 5]))
        out.append(target.read(TokenTree.shaped(tokens[:, 8:14], shape), cache, hidden_layers=(2,)))
        cache.keep(torch.tensor([[0, 2, 5], [0, 1, 4]]), torch.tensor([3, 2]))
        out.append(target.read(TokenTree.chain(tokens[:, 14:16]), cache, last_only=True, hidden_layers=(-1,)))
    return [part for reading in out for part in reading if part is not None]


@pytest.mark.parametrize("family", FAMILIES)
def test_lean_reads_what_the_model_reads(family: str) -> None:
    lean = Target(model(family))
    assert lean._lean is not None
    plain = Target(model(family))
    plain._lean = None
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))
    for ours, theirs in zip(readings(lean, tokens), readings(plain, tokens), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-4)


def test_a_lean_forward_that_differs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftproof.model.fast_forward._norm", lambda norm: lambda inputs: inputs * norm.weight)
    assert Target(model("llama"))._lean is None


def test_float64_and_hooked_models_keep_their_own_forward() -> None:
    assert not FastForward.fits(model("llama", torch.float64))
    hooked = model("llama")
    hooked.lm_head.register_forward_hook(lambda *_: None)
    assert not FastForward.fits(hooked)


def test_packing_keeps_the_bits_and_shared_weights() -> None:
    packed, plain = load_model("demo-draft"), load_model("demo-draft")
    if packed.dtype != torch.bfloat16 or not pack_linears(packed):
        pytest.skip("this machine has no packed bfloat16 linears")
    assert type(packed.lm_head) is torch.nn.Linear and packed.lm_head.weight is packed.model.embed_tokens.weight
    tokens = torch.arange(16)[None].repeat(2, 1)
    for ours, theirs in zip(readings(Target(packed), tokens), readings(Target(plain), tokens), strict=True):
        assert torch.equal(ours, theirs)
