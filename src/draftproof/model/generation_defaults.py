"""Defaults from a model's generation_config. Knows transformers' names and processors.

Every field of transformers' GenerationConfig is either a field of `Sampling`, a rule on logits that
transformers' own processor applies, without effect on a single text, or refused by name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch
import transformers as hf
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from draftproof.core.params import LogitsProcessor, LogitsRule, RuleContext, Sampling
from draftproof.errors import BadInput, first_line
from draftproof.model.end_tokens import stop_tokens

FIELDS = {
    "repetition_penalty": "repetition_penalty", "no_repeat_ngram_size": "no_repeat_ngram",
    "min_new_tokens": "min_new_tokens", "max_new_tokens": "max_new_tokens",
    "max_length": "max_length", "bad_words_ids": "banned_words", "stop_strings": "stop",
}  # fmt: skip
"""Fields that are options here, and their names here."""
SAMPLED = ("temperature", "top_k", "top_p", "min_p")
"""Fields that are options of the same name here, and only matter for sampling."""
WHERE_SAMPLED = {"typical_p", "top_h", "epsilon_cutoff", "eta_cutoff"}
"""Fields that are not honoured, and that do not matter for greedy text."""
WITHOUT_EFFECT = (
    # of beams, which are refused, or of a prompt that is not there
    "early_stopping", "length_penalty", "bos_token_id", "pad_token_id", "decoder_start_token_id",
    # normalised logits have the same order and the same distribution
    "renormalize_logits",
    # of the cache, the compiler and what is returned
    "use_cache", "cache_implementation", "cache_config", "max_cache_len", "compile_config",
    "disable_compile", "continuous_batching_config", "prefill_chunk_size", "low_memory",
    "output_attentions", "output_hidden_states", "output_scores", "output_logits",
    "return_dict_in_generate", "transformers_version", "_from_model_config",
    # of transformers' own speculative decoding
    "use_mtp", "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "assistant_confidence_threshold", "prompt_lookup_num_tokens", "max_matching_ngram_size",
    "assistant_early_exit", "assistant_lookbehind", "target_lookbehind",
    "assistant_ensemble_weight", "speculation_type",
)  # fmt: skip
UNDERSTOOD = {*FIELDS, *SAMPLED, "do_sample", "eos_token_id", *WITHOUT_EFFECT}
"""Fields that are neither rules on logits nor refused."""


def default_sampling(model: PreTrainedModel, ignored: str | None = None) -> Sampling:
    """The sampling from the model's generation_config, as ``generate`` would apply it.

    ignored: names of fields to ignore, such as "num_beams,guidance_scale". Fields that cannot be
    honoured become a rule that refuses any request made with these defaults.
    """
    if getattr(model, "generation_config", None) is None:
        return Sampling()
    config = _without(model.generation_config, ignored)
    values = {ours: getattr(config, theirs, None) for theirs, ours in FIELDS.items()}
    if config.do_sample:
        usual = GenerationConfig._get_default_generation_params()
        for name in SAMPLED:
            value = getattr(config, name, None)
            values[name] = usual.get(name) if value is None else value
        values["temperature"] = values["temperature"] or 1.0
    ends = [[end] for end in stop_tokens(model)]  # transformers does not ban end tokens
    values["banned_words"] = tuple(
        word for word in values["banned_words"] or () if word not in ends
    )
    rules = [LogitsRule(option, partial(_refuse, option)) for option in unsupported_options(config)]
    rules += [
        LogitsRule(name, partial(_made, name, value), name not in IN_ANY_TEXT)
        for name in RULES if _asks(name, value := getattr(config, name, None))
    ]
    options = {name: value for name, value in values.items() if value is not None}
    return Sampling(**options, logits_rules=tuple(rules))


def unsupported_options(config: GenerationConfig) -> list[str]:
    """The settings of a configuration that are not supported here, as ``name=value``."""
    names = {*GenerationConfig().to_dict()} - {*UNDERSTOOD, *RULES}
    names -= set() if config.do_sample else WHERE_SAMPLED
    values = {name: getattr(config, name, None) for name in sorted(names)}
    return [f"{name}={value!r}" for name, value in values.items() if _asks(name, value)]


def _without(config: GenerationConfig, ignored: str | None) -> GenerationConfig:
    """A copy without the ignored fields."""
    left, known = copy.copy(config), {*GenerationConfig().to_dict()} - UNDERSTOOD
    for name in ignored.split(",") if ignored else ():
        if name not in known:
            raise BadInput(
                f"ignore_generation_config named {name!r}, which cannot be left out; name fields "
                "such as num_beams or suppress_tokens, with commas between them"
            )
        setattr(left, name, None)
    return left


def _asks(name: str, value: object) -> bool:
    """Whether a field has an effect with this value."""
    if name.endswith("token_id"):
        return value is not None
    neutral = {**GenerationConfig._get_default_generation_params(), "guidance_scale": 1}
    return value not in (None, False, 0, [], {}, neutral.get(name))


def _refuse(option: str, request: RuleContext) -> LogitsProcessor:
    raise BadInput(
        f"the model's generation_config asks for {option}, which is not honoured here; to write "
        f"without it, give --ignore-generation-config {option.partition('=')[0]} "
        "(ignore_generation_config in Python), or a sampling of your own"
    )


def _made(name: str, value: object, request: RuleContext) -> LogitsProcessor:
    """The processor of a rule for one request."""
    try:
        return RULES[name](value, request)
    except (TypeError, ValueError) as error:
        raise BadInput(
            f"the model's generation_config asks for {name}={value!r}, which cannot be used: "
            f"{first_line(error)}"
        ) from error


def _no_repeat_of_encoded(value: object, request: RuleContext) -> LogitsProcessor:
    ids = torch.tensor([request.encoded], dtype=torch.int64, device=request.device)
    return hf.EncoderNoRepeatNGramLogitsProcessor(value, ids)


def _min_length(value: object, request: RuleContext) -> LogitsProcessor:
    if not request.ends:
        return lambda text, scores: scores
    ends: Tensor = torch.tensor(request.ends, device=request.device)
    return hf.MinLengthLogitsProcessor(value, ends, device=str(request.device))


RULES: dict[str, Callable[[object, RuleContext], LogitsProcessor]] = {
    "encoder_no_repeat_ngram_size": _no_repeat_of_encoded,
    "min_length": _min_length,
    "forced_bos_token_id": lambda value, _: hf.ForcedBOSTokenLogitsProcessor(value),
    "forced_eos_token_id": lambda value, of: hf.ForcedEOSTokenLogitsProcessor(
        len(of.prompt) + of.limit, value, device=str(of.device)
    ),
    "remove_invalid_values": lambda *_: hf.InfNanRemoveLogitsProcessor(),
    "suppress_tokens": lambda value, of: hf.SuppressTokensLogitsProcessor(value, str(of.device)),
    "begin_suppress_tokens": lambda value, of: hf.SuppressTokensAtBeginLogitsProcessor(
        value, len(of.prompt), device=str(of.device)
    ),
}
"""Rules on logits that transformers' own processors apply, in its order."""
IN_ANY_TEXT = ("remove_invalid_values", "suppress_tokens")
"""Rules that read only the scores."""
