"""What a call of `model.generate` asked for beside the text: refused by name, or computed."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from draftproof.errors import BadInput
from draftproof.model.generation_defaults import asked_and_unknown

READ_HERE = ("attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep",
             "cache_position", "token_type_ids", "encoder_outputs", "decoder_attention_mask",
             "decoder_position_ids")  # fmt: skip
"""Model arguments that transformers makes for every model."""
HONOURED = (
    "max_time", "num_return_sequences", "watermarking_config", "sequence_bias", "top_h",
    "typical_p", "epsilon_cutoff", "eta_cutoff", "encoder_repetition_penalty",
    "exponential_decay_length_penalty",
)  # fmt: skip
"""Of the configuration, what transformers or its processors and criteria do before we are asked."""
ANOTHER_TEXT = ("assistant_ensemble_weight", "speculation_type", "use_mtp", "is_assistant")
"""Ways to draft that are lossy, or need what is not handed on."""
OUTPUTS = ("output_attentions", "output_hidden_states")
SAME_TEXT = 0.05
"""Relative difference up to which keys are those of the same text."""


def refuse(
    model: Any, ids: Tensor, config: Any, model_kwargs: Mapping[str, Any], synced: bool
) -> None:
    """Raise BadInput, by name, for what would change the text, or is asked for and not made."""
    asked = [name for name in OUTPUTS + ANOTHER_TEXT if getattr(config, name, None)]
    asked += [one for one in asked_and_unknown(config) if one.partition("=")[0] not in HONOURED]
    if config.cache_implementation == "quantized":
        asked.append("cache_implementation='quantized'")
    if synced:
        asked.append("synced_gpus")
    asked += [
        name for name in model_kwargs if name not in READ_HERE and model_kwargs[name] is not None
    ]
    types = model_kwargs.get("token_type_ids")
    if types is not None and bool((types != 0).any()):
        asked.append("token_type_ids")
    if "prepare_inputs_for_generation" in vars(model):
        asked.append("a prompt-learning adapter, or another prepare_inputs_for_generation,")
    if any("adapter_names" in str(one) for module in model.modules()
           for one in module._forward_pre_hooks.values()):  # fmt: skip
        asked.append("adapter_names, an adapter for each row,")
    if asked:
        raise BadInput(
            f"{asked[0]} was asked for, which draftproof.generate does not honour; leave it out"
        )
    _check_past(model, ids, config, model_kwargs)
    positions = model_kwargs.get("position_ids")
    if positions is not None:
        there = _mask(ids, model_kwargs)
        if not torch.equal(positions.to(ids.device) * there, _counted(there) * there):
            raise BadInput(
                "position_ids other than those of the attention mask were given; leave them out"
            )


def _mask(ids: Tensor, model_kwargs: Mapping[str, Any]) -> Tensor:
    mask = model_kwargs.get("attention_mask")
    return torch.ones_like(ids) if mask is None else mask.to(ids)


def _counted(mask: Tensor) -> Tensor:
    """[B, S] positions of tokens behind left padding."""
    return (mask.cumsum(1) - 1).clamp(min=0)


def _places(model: Any, mask: Tensor) -> dict[str, Tensor]:
    """What a forward over left-padded rows needs to know."""
    takes = inspect.signature(model.forward).parameters
    positions = {"position_ids": _counted(mask)} if "position_ids" in takes else {}
    return {"attention_mask": mask, **positions}


@torch.no_grad()
def _check_past(model: Any, ids: Tensor, config: Any, model_kwargs: Mapping[str, Any]) -> None:
    """The prompt is read anew, so keys and values handed in must be those of its beginning."""
    past = model_kwargs.get("past_key_values")
    if past is None or not (size := past.get_seq_length()):
        return
    if model.config.is_encoder_decoder:
        raise BadInput("past_key_values of an encoder-decoder were given; leave them out")
    mask = model_kwargs.get("attention_mask")
    whole = mask.shape[1] if mask is not None else getattr(config, "_mask_length", ids.shape[1])
    if whole != ids.shape[1] or size >= ids.shape[1]:
        raise BadInput(
            f"past_key_values of {size} tokens were given with input_ids of {ids.shape[1]}; give "
            "the ids of the whole text, with at least one token that was not read"
        )
    there = _mask(ids, model_kwargs)[:, :size]
    extra = _places(model, there)
    again = model(ids[:, :size], use_cache=True, **extra).past_key_values
    theirs, ours = (one.layers[-1].keys for one in (past, again))
    kept = min(size, ours.shape[2])                             # a window, or a preallocated cache
    theirs, ours = theirs[:, :, :size][:, :, -kept:].float(), ours[:, :, -kept:].float()
    seen = there[:, None, -kept:, None].to(ours.device)
    if theirs.shape != ours.shape or float(((theirs.to(ours.device) - ours) * seen).norm()) > (
        SAME_TEXT * float((ours * seen).norm())
    ):
        raise BadInput(
            "past_key_values of another text, or of other weights, than input_ids begin with were "
            "given; leave them out"
        )


@torch.no_grad()
def logits_of(
    model: Any, sequences: Tensor, mask: Tensor | None, new: int, encoded: Mapping[str, Any]
) -> tuple[Tensor, ...]:
    """Of each new token, the model's logits [B, V], by one forward over the whole text; encoded:
    what else the forward of an encoder-decoder is given."""
    ids, extra = sequences[:, :-1], dict[str, Any]()
    if mask is not None and not encoded:
        behind = torch.ones(len(ids), ids.shape[1] - mask.shape[1]).to(mask)
        extra = _places(model, torch.cat([mask, behind], 1))
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        extra["logits_to_keep"] = new
    extra |= {**encoded, "decoder_input_ids": ids} if encoded else {"input_ids": ids}
    logits = model(**extra).logits[:, -new:].float()
    return tuple(logits.unbind(1))


def encoded_rows(
    model: Any, prompts: list[list[int]], inputs: Tensor | None, model_kwargs: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """What the encoder of an encoder-decoder read, row by row, and what each text begins with."""
    output, mask = model_kwargs["encoder_outputs"][0], model_kwargs.get("attention_mask")
    whole = {"encoder_outputs": output, "attention_mask": mask}
    if inputs is not None:                      # a draft model has an encoder of its own
        copies = len(output) // len(inputs)
        whole[model.main_input_name] = inputs.repeat_interleave(copies, 0)
    rows = range(len(prompts))
    parts = ({name: one[row : row + 1] for name, one in whole.items() if one is not None}
             for row in rows)
    return [{**part, "decoder_input_ids": torch.tensor([prompt])}
            for part, prompt in zip(parts, prompts, strict=True)]
