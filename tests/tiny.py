"""Tiny random models whose logits depend on the text, and helpers of all tests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from devices import DEVICE
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from draftproof.core.ops import Ops
from draftproof.core.params import Sampling, SamplingParams
from draftproof.core.prefix import Paths, Prefix
from draftproof.core.sampling import Sampler
from draftproof.core.tree import TokenTree
from draftproof.native.cpu_ops import CpuOps

SHARED = Path(__file__).resolve().parents[1].parent / "shared"
VOCAB = 40
CPU = CpuOps()
"""What decoding computes with on this machine."""

_COMMON: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": None,
                           "pad_token_id": None, "initializer_range": 0.4}
_LLAMA = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
          "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _LLAMA), "qwen2": ("Qwen2Config", _LLAMA),
    "qwen2-sliding": ("Qwen2Config",
                      {**_LLAMA, "num_hidden_layers": 3, "use_sliding_window": True,
                       "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {**_LLAMA, "head_dim": 8}),
    "mistral": ("MistralConfig", {**_LLAMA, "sliding_window": None}),
    "mistral-sliding": ("MistralConfig", {**_LLAMA, "sliding_window": 5}),
    "gemma2": ("Gemma2Config", {**_LLAMA, "head_dim": 8, "sliding_window": 5}),
    "gemma3": ("Gemma3TextConfig",
               {**_LLAMA, "head_dim": 8, "sliding_window": 5, "num_hidden_layers": 3,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "gpt2": ("GPT2Config", _GPT), "gpt-neox": ("GPTNeoXConfig", {**_LLAMA, "rotary_pct": 0.25}),
    "phi": ("PhiConfig", _LLAMA), "phi3": ("Phi3Config", {**_LLAMA, "sliding_window": 5}),
    "opt": ("OPTConfig",
            {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
             "max_position_embeddings": 256, "word_embed_proj_dim": 32, "init_std": 0.4}),
    "gptj": ("GPTJConfig", {**_GPT, "rotary_dim": 4}),
    "falcon": ("FalconConfig",
               {**_LLAMA, "alibi": False, "new_decoder_architecture": False, "multi_query": True}),
    "stablelm": ("StableLmConfig", _LLAMA), "olmo2": ("Olmo2Config", _LLAMA),
    "granite": ("GraniteConfig",
                {**_LLAMA, "logits_scaling": 3.0, "residual_multiplier": 0.7,
                 "embedding_multiplier": 2.0}),
    "cohere": ("CohereConfig", {**_LLAMA, "logit_scale": 0.3}),
    "starcoder2": ("Starcoder2Config", {**_LLAMA, "sliding_window": 5})
}
FAMILIES = sorted(CONFIGS)


def fresh(name: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A model of this family in float64, of its own."""
    kind, values = CONFIGS[name]
    return build(kind, seed, **{**_COMMON, **values, **overrides})


def build(kind: str, seed: int = 0, **values: Any) -> PreTrainedModel:
    """A random model of a transformers configuration class, float64."""
    torch.manual_seed(seed)
    config = getattr(transformers, kind)(**values)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    model.generation_config = transformers.GenerationConfig()
    return model.to(DEVICE)


def of_family(name: str, **values: Any) -> PreTrainedModel:
    """A random text model that transformers calls so, with norms that do not weigh all alike."""
    torch.manual_seed(0)
    kinds = [getattr(transformers, f"{name}{kind}", None) for kind in ("TextConfig", "Config")]
    config = next(kind for kind in kinds if kind is not None)(**values)
    made: PreTrainedModel = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for part, weight in made.named_parameters():
            if "norm" in part:
                weight += 0.3 * torch.randn_like(weight)
    return made.eval().to(DEVICE)


_SHARED: list[tuple[PreTrainedModel, list[tuple[str, torch.dtype, int]]]] = []


def _state(model: PreTrainedModel) -> list[tuple[str, torch.dtype, int]]:
    return [(name, tensor.dtype, tensor._version) for name, tensor in model.named_parameters()]


def changed_models() -> list[str]:
    """The classes of shared models that a test converted, packed or wrote to."""
    changed = [model for model, before in _SHARED if _state(model) != before]
    if changed:
        model_cached.cache_clear(), target.cache_clear(), _SHARED.clear()
    return [type(model).__name__ for model in changed]


@lru_cache(maxsize=64)
def model_cached(name: str, seed: int, **overrides: Any) -> PreTrainedModel:
    with torch.inference_mode(False):   # a model made in inference mode cannot be trained
        made = fresh(name, seed, **overrides)
    _SHARED.append((made, _state(made)))
    return made


def model(name: str = "llama", seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A model that all tests share. A test that changes it takes `fresh` instead."""
    return model_cached(name, seed, **overrides)


@lru_cache(maxsize=64)
def target(name: str = "llama", seed: int = 0, **overrides: Any) -> Any:
    """The model as the decoder sees it."""
    from draftproof.model.target import Target

    return Target(model(name, seed, **overrides))


def prompts(count: int, seed: int = 0, vocab: int = VOCAB, longest: int = 17) -> list[list[int]]:
    """Ragged random prompts; every third repeats itself, so that lookup has something to find."""
    dice = torch.Generator().manual_seed(seed)
    sizes = [int(torch.randint(1, longest + 1, (), generator=dice)) for _ in range(count)]
    texts = [torch.randint(vocab, (size,), generator=dice).tolist() for size in sizes]
    return [(text[:4] * 4)[:longest] if index % 3 == 1 else text
            for index, text in enumerate(texts)]


def shared(*parts: str) -> Path:
    """A file or folder of the shared data, or the test is skipped."""
    path = SHARED.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"no shared data at {'/'.join(parts)}")
    return path


def paths_of(
    texts: Sequence[Sequence[int]], tree: TokenTree | None = None, capacity: int = 24
) -> Paths:
    """Where a sampler stands: each text is committed but for its last token, the root."""
    tokens = torch.zeros(len(texts), capacity, dtype=torch.int64)
    tokens[:] = torch.arange(capacity) % 5  # scratch is not zero
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = torch.tensor(text)
    prefix = Prefix(tokens, torch.tensor([len(text) - 1 for text in texts]))
    return Paths(prefix, tree if tree is not None else TokenTree.root(prefix.root))


def sampler_of(
    *samplings: Sampling, prompt_length: int = 0, stop_tokens: Sequence[int] = (), ops: Ops = CPU
) -> Sampler:
    """The sampler of rows with these wishes."""
    params = [SamplingParams(want, prompt_length, tuple(stop_tokens),
                             tuple(tuple(word) for word in want.banned_words
                                   if not isinstance(word, str)))
              for want in samplings]
    return Sampler(params, ops=ops)


def random_logits(*shape: int, seed: int = 0) -> Tensor:
    """Float64, sharp enough that filters cut something."""
    dice = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=dice, dtype=torch.float64) * 3
