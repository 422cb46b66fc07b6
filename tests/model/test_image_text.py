"""Image-text models load for text alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForImageTextToText

from draftproof.engine.load import load

TEXT: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.4,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "max_position_embeddings": 128,
}  # fmt: skip
SIGHT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "image_size": 16, "patch_size": 8,
}  # fmt: skip
QWEN = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": 8,
        "out_hidden_size": 32}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llava": ("LlavaConfig", {"model_type": "llama", **TEXT},
              {"model_type": "clip_vision_model", **SIGHT}),
    "mistral3": ("Mistral3Config", {"model_type": "mistral", **TEXT},
                 {"model_type": "pixtral", "head_dim": 8, **SIGHT}),
    "qwen2_5_vl": ("Qwen2_5_VLConfig", {**TEXT, "rope_parameters": ROPE}, QWEN),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_writes_the_text_of_its_model(kind: str, tmp_path: Path) -> None:
    name, text, sight = KINDS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, name)(text_config=text, vision_config=sight)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    model.generation_config = transformers.GenerationConfig()
    model.save_pretrained(tmp_path)
    prompt = [5, 7, 11, 13, 17, 19, 23, 29, 31, 37]
    (done,) = load(tmp_path, budget=3).generate([prompt], max_new_tokens=12)
    wanted = list(prompt)
    with torch.inference_mode():
        for _ in range(12):
            logits = model(input_ids=torch.tensor([wanted]), use_cache=False).logits
            wanted.append(int(logits[0, -1].argmax()))
    assert done.checked().tokens == wanted[len(prompt) :]
