"""The requests of a `model.generate` call besides the text: computed, or refused by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, GenerationConfig, PreTrainedModel

from draftproof.errors import BadInput
from draftproof.model.generation_defaults import unsupported_options

READ_HERE = ("attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep",
             "cache_position", "token_type_ids", "encoder_outputs", "decoder_attention_mask",
             "decoder_position_ids", "cache_params", "cache", "mm_encoder_outputs",
             "mm_token_type_ids")  # fmt: skip
"""Model arguments that transformers passes for every model."""
HONOURED = (
    "max_time", "num_return_sequences", "watermarking_config", "sequence_bias", "top_h",
    "typical_p", "epsilon_cutoff", "eta_cutoff", "encoder_repetition_penalty",
    "exponential_decay_length_penalty",
)  # fmt: skip
"""Settings that transformers, its processors or its criteria apply before we are called."""
NOT_MADE = ("output_attentions", "output_hidden_states", "assistant_ensemble_weight",
            "speculation_type", "use_mtp", "is_assistant")  # fmt: skip
"""Outputs that are not made, and ways to draft that are lossy or need what we are not given."""


def _holds_text(cache: Cache | None) -> bool:
    """Whether a transformers cache has read a text. Its argument is named `cache` since 5.24."""
    if cache is None:
        return False
    try:
        return bool(cache.get_seq_length() > 0)
    except ValueError:                                  # it holds only states
        return bool(cache.has_previous_state())


def reject_unsupported(
    model: PreTrainedModel, ids: Tensor, config: GenerationConfig,
    model_kwargs: Mapping[str, Any], synced: bool,
) -> None:
    """Raise BadInput for unsupported arguments that change the text or ask for outputs."""
    arguments = {name: value for name, value in model_kwargs.items() if value is not None}
    refused = [name for name in NOT_MADE if getattr(config, name, None)]
    refused += [option for option in unsupported_options(config)
                if option.partition("=")[0] not in HONOURED]
    refused += [name for name in arguments if name not in READ_HERE]
    past, states, cache, positions = (
        arguments.get(name) for name in ("past_key_values", "cache_params", "cache", "position_ids")
    )
    types = [value for name, value in arguments.items() if name.endswith("token_type_ids")]
    hooks = [str(hook) for part in model.modules() for hook in part._forward_pre_hooks.values()]
    for what, is_asked in {
        "cache_implementation='quantized'": config.cache_implementation == "quantized",
        "synced_gpus": synced,
        "past_key_values of a text (the whole of input_ids is read again)":
            past is not None and past.get_seq_length() > 0,
        "cache_params of a text": states is not None and states.has_previous_state(),
        "a cache of a text (the whole of input_ids is read again)": _holds_text(cache),
        "an image or a video": bool(arguments.get("mm_encoder_outputs")),
        "token_type_ids": any(bool(value.any()) for value in types),
        "position_ids other than those of the attention mask":
            positions is not None and _differ(positions, ids, arguments.get("attention_mask")),
        "a prompt-learning adapter, or another prepare_inputs_for_generation,":
            "prepare_inputs_for_generation" in vars(model),
        "adapter_names, an adapter for each row,": any("adapter_names" in hook for hook in hooks),
    }.items():  # fmt: skip
        refused += [what] if is_asked else []
    if refused:
        raise BadInput(
            f"{refused[0]} was asked for, which draftproof.generate does not honour; leave it out"
        )


def _counted(mask: Tensor) -> Tensor:
    """The positions [B, S] of tokens after left padding."""
    return (mask.cumsum(1) - 1).clamp(min=0)


def _differ(positions: Tensor, ids: Tensor, mask: Tensor | None) -> bool:
    there = torch.ones_like(ids) if mask is None else mask.to(ids)
    placed = positions.to(ids.device) * there       # [..., B, S]: Qwen-VL's have several planes
    return not torch.equal(placed, (_counted(there) * there).expand_as(placed))


@torch.no_grad()
def logits_of(
    model: PreTrainedModel, sequences: Tensor, mask: Tensor | None, new: int,
    encoded: Mapping[str, object],
) -> tuple[Tensor, ...]:
    """Compute the model's logits [B, V] for each new token by one forward over the whole text;
    encoded: further arguments of an encoder-decoder's forward."""
    ids, takes = sequences[:, :-1], inspect.signature(model.forward).parameters
    extra: dict[str, object] = {"logits_to_keep": new} if "logits_to_keep" in takes else {}
    if encoded:
        extra |= {**encoded, "decoder_input_ids": ids}
    else:
        extra["input_ids"] = ids
        if mask is not None:
            after = mask.new_ones(len(ids), ids.shape[1] - mask.shape[1])
            full = torch.cat([mask, after], 1)
            extra |= {"attention_mask": full, "position_ids": _counted(full)}
        extra = {name: value for name, value in extra.items() if name in takes}
    return tuple(model(**extra).logits[:, -new:].float().unbind(1))


def encoded_rows(
    model: PreTrainedModel, prompts: list[list[int]], inputs: Tensor | None,
    model_kwargs: Mapping[str, Any],
) -> list[dict[str, Tensor]]:
    """The encoder's input row by row, and the beginning of each text."""
    output = model_kwargs["encoder_outputs"][0]
    parts = {"encoder_outputs": output, "attention_mask": model_kwargs.get("attention_mask")}
    if inputs is not None:                      # a draft model has its own encoder
        parts[model.main_input_name] = inputs.repeat_interleave(len(output) // len(inputs), 0)
    present = {name: value for name, value in parts.items() if value is not None}
    return [{name: value[row : row + 1] for name, value in present.items()}
            | {"decoder_input_ids": torch.tensor([prompt])}
            for row, prompt in enumerate(prompts)]  # fmt: skip
