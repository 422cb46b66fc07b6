"""The tokens that end a text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def stop_tokens(model: PreTrainedModel) -> tuple[int, ...]:
    """The end tokens from the model's generation_config, or else from its configuration."""
    generation = getattr(model, "generation_config", None)
    source = generation if generation is not None else model.config
    ends = getattr(source, "eos_token_id", None)
    return () if ends is None else tuple(ends) if isinstance(ends, (list, tuple)) else (int(ends),)
