"""Tiny random models on disk, with the demo's tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from draftproof import embedded


def save_model(
    folder: Path, *, layers: int = 2, context: int = 256, seed: int = 0, broken: bool = False,
    spread: float = 0.3,
) -> Path:  # fmt: skip
    """A random Llama with the demo's tokenizer, surer with a wider spread of its weights; `broken`:
    with NaN weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=32, intermediate_size=64, num_hidden_layers=layers,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=context,
        bos_token_id=0, eos_token_id=0, initializer_range=spread,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if broken:
        model.lm_head.weight.data.fill_(float("nan"))
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded("demo") / name, folder / name)
    return folder


def save_translator(folder: Path) -> Path:
    """A random T5 with the demo's tokenizer."""
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=4096, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
        decoder_start_token_id=0, eos_token_id=0, pad_token_id=1, tie_word_embeddings=False,
    )  # fmt: skip
    T5ForConditionalGeneration(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded("demo") / name, folder / name)
    return folder
