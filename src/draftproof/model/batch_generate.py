"""Continues many prompts at once with transformers, for text that need not be reproducible."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch
from transformers import GenerationConfig

if TYPE_CHECKING:
    from draftproof.model.loading import PreTrainedModel



def batch_generate(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], limits: Sequence[int],
    temperature: float, stops: Collection[int], seed: int,
) -> list[list[int]]:  # fmt: skip
    """Return the new tokens of each prompt, at most `limits[i]`, with the end token of `stops`.

    They are sampled with torch's own generator from `seed`, or greedily at temperature 0.
    """
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    sampled = {"temperature": temperature, "top_k": 0} if temperature else {}
    form = GenerationConfig(
        do_sample=bool(sampled), max_new_tokens=max(limits), eos_token_id=list(stops) or None,
        pad_token_id=0, **sampled,
    )  # fmt: skip
    torch.manual_seed(seed)
    out = model.generate(ids.to(model.device), attention_mask=mask.to(model.device),
                         generation_config=form)  # fmt: skip
    texts = []
    for limit, new in zip(limits, out[:, width:].tolist(), strict=True):
        ends = [at for at, token in enumerate(new[:limit]) if token in stops]
        texts.append(new[: ends[0] + 1 if ends else limit])
    return texts
