"""What a model's own generation_config asks for. Knows transformers' names and processors.

Every field of transformers' GenerationConfig is one of four things: a field of `Sampling`, a rule
on logits that transformers' own processor applies, without effect on one text, or refused by name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers as hf
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from draftproof.core.params import LogitsProcessor, LogitsRule, RuleRequest, Sampling
from draftproof.errors import BadInput, first_line
from draftproof.model.loading import stop_tokens

FIELDS = {
    "do_sample": "temperature", "temperature": "temperature", "top_k": "top_k", "top_p": "top_p",
    "min_p": "min_p", "repetition_penalty": "repetition_penalty",
    "no_repeat_ngram_size": "no_repeat_ngram", "min_new_tokens": "min_new_tokens",
    "max_new_tokens": "max_new_tokens", "max_length": "max_length",
    "bad_words_ids": "banned_words", "stop_strings": "stop", "eos_token_id": "stop_tokens",
}  # fmt: skip
"""What is an option here as well, and its name."""
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
NEUTRAL = {
    "num_beams": 1, "num_beam_groups": 1, "num_return_sequences": 1, "guidance_scale": 1,
    "encoder_repetition_penalty": 1.0, "typical_p": 1.0, "forced_bos_token_id": None,
    "forced_eos_token_id": None,
}  # fmt: skip
"""Values that ask for nothing, beside None, False, 0 and an empty list."""


def default_sampling(model: PreTrainedModel, ignored: str | None = None) -> Sampling:
    """The sampling that the model's own generation_config asks for, as ``generate`` would apply it.

    ignored: names of what it does not ask for then, "num_beams,guidance_scale". What cannot be
    honoured is a rule that refuses any request made with these defaults.
    """
    if model.generation_config is None:
        return Sampling()
    config = _without(model.generation_config, ignored)
    late: dict[str, Any] = getattr(GenerationConfig, "_get_default_generation_params", dict)()
    sampled = bool(config.do_sample)
    fields: dict[str, Any] = {}
    for theirs, ours in FIELDS.items():
        value = getattr(config, theirs, None)
        if ours in ("top_k", "top_p", "min_p", "temperature"):
            value = (late.get(theirs) if value is None else value) if sampled else None
        if value is not None and theirs not in ("do_sample", "eos_token_id"):
            fields[ours] = value
    if sampled:
        fields["temperature"] = fields.get("temperature") or 1.0
    ends = [[end] for end in stop_tokens(model)]        # transformers bans no end token
    banned = fields.get("banned_words", ())
    fields["banned_words"] = tuple(word for word in banned if word not in ends)
    return Sampling(**fields, logits_rules=tuple(_rules(config, sampled)))


def _without(config: GenerationConfig, ignored: str | None) -> GenerationConfig:
    """A copy that does not ask for what is ignored."""
    left, known = copy.copy(config), {*GenerationConfig().to_dict()} - {*FIELDS, *WITHOUT_EFFECT}
    for name in ignored.split(",") if ignored else ():
        if name not in known:
            own = "; it has an option of its own" if name in FIELDS else ""
            raise BadInput(
                f"ignore_generation_config named {name!r}, which cannot be left out{own}; name "
                f"fields such as num_beams or suppress_tokens, with commas between them"
            )
        setattr(left, name, None)
    return left


def _rules(config: GenerationConfig, sampled: bool) -> list[LogitsRule]:
    """The rules on logits that are neither fields of `Sampling` nor without effect, in order."""
    asked = [name for name in RULES if _asks(name, getattr(config, name, None))]
    rules = [
        RULES[name](name, getattr(config, name))
        for name in asked
        if sampled or name not in WARPERS
    ]
    refused = [
        LogitsRule(one, "usual", partial(_refuse, one)) for one in asked_and_unknown(config)
    ]
    return refused + rules


def asked_and_unknown(config: GenerationConfig) -> list[str]:
    """What a configuration asks for that is not honoured here, as ``name=value``."""
    known = {*FIELDS, *WITHOUT_EFFECT, *RULES}
    names = [name for name in GenerationConfig().to_dict() if name not in known]
    values = {name: getattr(config, name, None) for name in names}
    return [f"{name}={value!r}" for name, value in values.items() if _asks(name, value)]


def _asks(name: str, value: Any) -> bool:
    """Whether a field with this value changes anything."""
    if isinstance(value, int) and not isinstance(value, bool) and name.endswith("token_id"):
        return True
    empty = value is None or value is False or value in (0, [], {})
    return not empty and value != NEUTRAL.get(name)


def _refuse(asked: str, request: RuleRequest) -> LogitsProcessor:
    raise BadInput(
        f"the model's generation_config asks for {asked}, which is not honoured here; to write "
        f"without it, give --ignore-generation-config {asked.partition('=')[0]} "
        "(ignore_generation_config in Python), or a sampling of your own"
    )


def _rule(
    stage: str, make: Callable[[Any, RuleRequest], LogitsProcessor], reads_text: bool = True
) -> Callable[[str, Any], LogitsRule]:
    """A rule from its name and value."""

    def rule(name: str, value: Any) -> LogitsRule:
        def checked(request: RuleRequest) -> LogitsProcessor:
            try:
                return make(value, request)
            except (TypeError, ValueError) as error:
                raise BadInput(
                    f"the model's generation_config asks for {name}={value!r}, which cannot be "
                    f"used: {first_line(error)}"
                ) from error

        return LogitsRule(name, stage, checked, reads_text)

    return rule


def _ids(request: RuleRequest) -> Tensor:
    if not request.encoded:
        raise ValueError("the prompt is no text")
    return torch.tensor([request.encoded], device=request.device)


def _ends(request: RuleRequest) -> Tensor:
    if not request.ends:
        raise ValueError("the model has no end token")
    return torch.tensor(request.ends, device=request.device)


def _min_length(value: Any, request: RuleRequest) -> LogitsProcessor:
    if not request.ends:
        return lambda text, scores: scores
    return hf.MinLengthLogitsProcessor(value, _ends(request), device=str(request.device))


RULES: dict[str, Callable[[str, Any], LogitsRule]] = {
    "sequence_bias": _rule("early", lambda value, _: hf.SequenceBiasLogitsProcessor(value)),
    "encoder_repetition_penalty": _rule(
        "early", lambda value, of: hf.EncoderRepetitionPenaltyLogitsProcessor(value, _ids(of))
    ),
    "encoder_no_repeat_ngram_size": _rule(
        "usual", lambda value, of: hf.EncoderNoRepeatNGramLogitsProcessor(value, _ids(of))
    ),
    "min_length": _rule("usual", _min_length),
    "forced_bos_token_id": _rule("usual", lambda value, _: hf.ForcedBOSTokenLogitsProcessor(value)),
    "forced_eos_token_id": _rule("usual", lambda value, of: hf.ForcedEOSTokenLogitsProcessor(
        len(of.prompt) + of.limit, value, device=str(of.device)
    )),
    "remove_invalid_values": _rule("usual", lambda *_: hf.InfNanRemoveLogitsProcessor(), False),
    "exponential_decay_length_penalty": _rule(
        "usual", lambda value, of: hf.ExponentialDecayLengthPenalty(
            tuple(value), _ends(of), len(of.prompt)
        )
    ),
    "suppress_tokens": _rule(
        "usual", lambda value, of: hf.SuppressTokensLogitsProcessor(value, str(of.device)), False
    ),
    "begin_suppress_tokens": _rule("usual", lambda value, of: (
        hf.SuppressTokensAtBeginLogitsProcessor(value, len(of.prompt), device=str(of.device))
    )),
    "top_h": _rule("warm", lambda value, _: hf.TopHLogitsWarper(value), False),
    "typical_p": _rule("late", lambda value, _: hf.TypicalLogitsWarper(value), False),
    "epsilon_cutoff": _rule("late", lambda value, _: hf.EpsilonLogitsWarper(value), False),
    "eta_cutoff": _rule(
        "late", lambda value, of: hf.EtaLogitsWarper(value, device=str(of.device)), False
    ),
}  # fmt: skip
"""Rules on logits that transformers' own processors apply, in its order."""
WARPERS = ("top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
"""Those that only sampling has."""
