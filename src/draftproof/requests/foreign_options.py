"""Options of other engines: their names here, and those that are not supported.

An option that would change a text, or its report, is honoured or refused, never dropped. Options
without such an effect are accepted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from draftproof.errors import BadInput

OTHER_NAMES = {
    "max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens",
    "max_output_tokens": "max_new_tokens", "n_predict": "max_new_tokens",
    "num_predict": "max_new_tokens", "min_tokens": "min_new_tokens", "stop_strings": "stop",
    "stop_sequences": "stop", "stop_sequence": "stop", "stopping_strings": "stop",
    "bad_words": "banned_words", "bad_words_ids": "banned_words",
    "no_repeat_ngram_size": "no_repeat_ngram", "random_seed": "seed",
}  # fmt: skip
"""What OpenAI, vLLM, TGI, llama.cpp, Ollama, KoboldAI and transformers call an option of
`Sampling`."""

OFF: dict[str, tuple[int, int | None]] = {"top_k": (-1, 0), "max_new_tokens": (-1, None)}
"""Numbers by which others (vLLM, llama.cpp) turn an option off, and our number for that."""

UNSUPPORTED: dict[str, tuple[str, ...]] = {
    "OpenAI": (
        "tools", "tool_choice", "functions", "function_call", "response_format", "modalities",
        "audio", "echo", "suffix", "best_of", "reasoning_effort", "reasoning", "verbosity",
        "web_search_options",
    ),
    "Anthropic and Ollama": (
        "thinking", "think", "options", "images", "format", "num_ctx", "template", "raw",
    ),
    "vLLM": (
        "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
        "guided_json_object", "guided_whitespace_pattern", "guided_decoding", "structural_tag",
        "allowed_token_ids", "prompt_logprobs", "logits_processors", "include_stop_str_in_output",
        "truncate_prompt_tokens", "prompt_embeds", "lora_request", "use_beam_search",
        "length_penalty", "early_stopping", "skip_special_tokens", "spaces_between_special_tokens",
        "detokenize", "add_special_tokens", "add_generation_prompt", "continue_final_message",
        "chat_template", "chat_template_kwargs", "enable_thinking", "documents",
        "mm_processor_kwargs", "multi_modal_data", "extra_args", "vllm_xargs", "extra_body",
        "return_token_ids", "return_tokens_as_token_ids", "logprob_token_ids",
        "repetition_detection", "thinking_token_budget", "include_reasoning",
    ),
    "SGLang": (
        "regex", "ebnf", "json_schema", "stop_regex", "custom_logit_processor", "custom_params",
        "lora_path", "no_stop_trim", "return_logprob", "top_logprobs_num", "token_ids_logprob",
        "return_hidden_states", "separate_reasoning", "sampling_seed",
    ),
    "llama.cpp": (
        "grammar", "grammar_lazy", "dry_multiplier", "xtc_probability", "top_n_sigma",
        "dynatemp_range", "typical", "typ_p", "tfs_z", "mirostat", "repeat_penalty", "samplers",
        "sampler_seq", "n_probs", "min_keep", "t_max_predict_ms", "n_indent", "image_data",
        "return_tokens", "post_sampling_probs", "response_fields", "lora", "system_prompt",
        "input_prefix", "input_suffix", "input_extra", "reasoning_format",
    ),
    "TGI": (
        "typical_p", "watermark", "truncate", "return_full_text", "top_n_tokens",
        "decoder_input_details", "adapter_id",
    ),
    "transformers": (
        "num_beams", "num_beam_groups", "diversity_penalty", "num_return_sequences",
        "penalty_alpha", "top_h", "epsilon_cutoff", "eta_cutoff", "encoder_repetition_penalty",
        "encoder_no_repeat_ngram_size", "guidance_scale", "suppress_tokens",
        "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "eos_token_id",
        "force_words_ids", "exponential_decay_length_penalty", "sequence_bias", "min_length",
        "max_time", "watermarking_config",
    ),
    "text-generation-webui": (
        "top_a", "smoothing_factor", "temperature_last", "sampler_priority", "negative_prompt",
        "ban_eos_token", "custom_token_bans", "logit_bias_tokens", "add_bos_token", "stop_str",
        "truncation_length", "repetition_penalty_range", "frequency_penalty_range",
        "presence_penalty_range", "auto_max_new_tokens", "dynamic_temperature",
    ),
    "KoboldAI": (
        "rep_pen", "rep_pen_range", "rep_pen_slope", "sampler_order", "sampler_seed",
        "max_context_length", "nsigma", "trim_stop",
    ),
}  # fmt: skip
"""By engine, options that would change a text or what is reported of it, and that nothing here
implements."""

_NAMES = frozenset(name for names in UNSUPPORTED.values() for name in names)

HARMLESS = frozenset({
    # about the client and the account
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "prompt_cache_options", "request_id", "cid", "rid",
    # about speed and the cache, not about the text
    "prediction", "priority", "cache_salt", "cache_prompt", "id_slot", "n_keep", "keep_alive",
    "use_cache", "speculative", "output_kind", "data_parallel_rank", "guided_decoding_backend",
    "timings_per_token", "return_progress", "continuous_usage_stats",
    # of options that have no effect without another one, which is refused
    "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers",
    "xtc_threshold", "dynatemp_exponent", "mirostat_tau", "mirostat_eta", "repeat_last_n",
    "smoothing_curve", "pad_token_id", "bos_token_id", "parallel_tool_calls",
})  # fmt: skip
"""Options that change no text, whatever their value."""

_ONE, _ZERO, _TRUE = (1,), (0,), (True,)
NO_OP_VALUES: dict[str, tuple[object, ...]] = {
    **dict.fromkeys((
        "best_of", "num_beams", "num_beam_groups", "num_return_sequences", "length_penalty",
        "typical_p", "typ_p", "typical", "tfs_z", "repeat_penalty", "guidance_scale",
        "encoder_repetition_penalty"), _ONE),
    **dict.fromkeys((
        "dry_multiplier", "xtc_probability", "dynatemp_range", "mirostat", "n_probs", "min_keep",
        "t_max_predict_ms", "n_indent", "top_a", "smoothing_factor", "penalty_alpha",
        "diversity_penalty", "min_length", "epsilon_cutoff", "eta_cutoff", "top_n_tokens",
        "encoder_no_repeat_ngram_size", "top_logprobs_num"), _ZERO),
    **dict.fromkeys((
        "skip_special_tokens", "spaces_between_special_tokens", "detokenize", "add_special_tokens",
        "add_generation_prompt", "include_reasoning", "add_bos_token", "raw"), _TRUE),
    "top_n_sigma": (-1, 0), "tool_choice": ("none", "auto"), "function_call": ("none", "auto"),
    "modalities": (["text"],), "response_format": ({"type": "text"},), "eos_token_id": (),
}  # fmt: skip
"""Values that ask for nothing, in addition to null, false and empty ones."""
_FALSE_COUNTS = frozenset((
    "eos_token_id", "enable_thinking", "think", "thinking", "reasoning",
    *(name for name, values in NO_OP_VALUES.items() if values is _TRUE),
))  # fmt: skip
"""Options for which false asks for something."""


def is_neutral(name: str, value: object) -> bool:
    """Whether an option has no effect with this value; 0 is not false, nor 1 true."""
    if value is None or any(_same(value, neutral) for neutral in NO_OP_VALUES.get(name, ())):
        return True
    if value is False:
        return name not in _FALSE_COUNTS
    return isinstance(value, (list, dict, str)) and not value


def _same(value: object, neutral: object) -> bool:
    if isinstance(value, bool) or isinstance(neutral, bool):
        return value is neutral
    return bool(value == neutral)


def refuse_unsupported(options: Mapping[str, object]) -> None:
    """Raise BadInput for an option that would change the answer and is not supported."""
    for name, value in options.items():
        if name in _NAMES and not is_neutral(name, value):
            raise BadInput(f'"{name}" is not supported here; leave it out')


def refuse_unknown(options: Iterable[str], known: Collection[str]) -> None:
    """Raise BadInput for a name that is not known, not harmless, and not another engine's option
    without effect (call `refuse_unsupported` first)."""
    for name in options:
        if not (name in known or name in OTHER_NAMES or name in HARMLESS or name in _NAMES):
            raise BadInput(f"Unrecognized request argument: {name:.99}")
