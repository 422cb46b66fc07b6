"""Section "configurations": runs small models in every way that real ones are run.

This extends section "bits" beyond small vocabularies and short texts: texts past 64 and 128 tokens
in float32 and bfloat16, drafts and trees of more than 6 tokens, a vocabulary of the usual size,
8-bit weights, and prompts with cached beginnings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from draftproof.core.tree import TreeShape
from draftproof.drafters.draft_model import DraftModel
from draftproof.engine.engine import Engine
from draftproof.engine.prefix_cache import PrefixCache
from draftproof.model.target import Target
from draftproof.verify.bits import prove_bits
from draftproof.verify.cases import one_thread
from draftproof.verify.report import Section, Tick, silent
from draftproof.weights.packed_linear import pack_linears
from draftproof.weights.quantize import quantized

SMALL, USUAL = 512, 49_152
"""Vocabularies; the second is that of SmolLM2."""
LENGTHS = (59, 3, 122, 61, 30)
"""Tokens of prompts: with what is written they end before, at and after multiples of 64."""
NEW_TOKENS, QUICK_NEW_TOKENS = 40, 12
TREE = TreeShape.branching((3, 2, 1))


def small_llama(
    vocab: int, dtype: torch.dtype, noise: float = 0.0, quantize: str | None = None
) -> Target:
    """A random Llama of two layers. noise: the size of the noise on its weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        initializer_range=0.2, bos_token_id=None, eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = LlamaForCausalLM(config)
        with torch.no_grad():
            for weight in model.parameters() if noise else ():
                weight.add_(noise * torch.randn_like(weight))
    model = model.to(dtype).eval()
    if quantize:
        model = quantized(model, quantize)
    elif dtype == torch.bfloat16:
        pack_linears(model)                     # as loading does
    return Target(model)


def _engine(
    vocab: int, dtype: torch.dtype, shape: TreeShape | None, *, quantize: str | None = None,
    remembers: bool = False,
) -> Engine:
    """A model with a draft model that nearly agrees with it, for chains of 8 or trees of 15."""
    draft = DraftModel(small_llama(vocab, dtype, 0.01), vocab, shape)
    target = small_llama(vocab, dtype, quantize=quantize)
    engine = Engine(target, draft, budget=8 if shape is None else len(shape) - 1)
    engine.prefixes = PrefixCache(1 << 26) if remembers else None
    return engine


CONFIGURATIONS: dict[str, Callable[[], Engine]] = {
    "float32, trees": lambda: _engine(SMALL, torch.float32, TREE),
    "bfloat16, usual vocabulary": lambda: _engine(USUAL, torch.bfloat16, None),
    "8 bits, remembered prompts": lambda: _engine(
        SMALL, torch.bfloat16, TREE, quantize="int8", remembers=True
    ),
}


def prompts(vocab: int) -> list[list[int]]:
    """Prompts of `LENGTHS` tokens that repeat parts of themselves and each other."""
    numbers = torch.Generator().manual_seed(1)
    text = torch.randint(vocab, (40,), generator=numbers).tolist() * 4
    return [text[:length] for length in LENGTHS]


def prove_configurations(
    quick: bool = False, tick: Tick = silent, *, seed: int = 0, names: list[str] | None = None
) -> Section:
    """Compare drafted with plain text in all or these configurations; see `prove_bits`."""
    chosen = names or list(CONFIGURATIONS)
    figures, failures = dict[str, Any](), list[str]()
    new_tokens = QUICK_NEW_TOKENS if quick else NEW_TOKENS
    with one_thread():
        for place, name in enumerate(chosen):
            tick(place / len(chosen), name)
            engine = CONFIGURATIONS[name]()
            chosen_prompts = prompts(engine.target.vocab_size)
            section = prove_bits(
                engine, True, seed=seed, new_tokens=new_tokens, prompts=chosen_prompts, rows=(1, 3)
            )
            figures[name] = section.figures
            failures += [f"{name}: {failure}" for failure in section.failures]
            if engine.prefixes is not None and not engine.prefixes.hits:
                failures.append(f"{name}: no remembered prompt was used: this is blind")
    texts = sum(figure["texts"] for figure in figures.values())
    same = sum(figure["identical"] for figure in figures.values())
    verdict = (
        f"{texts} texts of small models in {len(chosen)} configurations compared with plain "
        f"decoding, {same} to the last bit"
    )
    return Section("configurations", verdict, figures, failures)
