"""A row of a file of prompts: what it asks for, as draftproof, OpenAI, vLLM and others write it.

A row asks for its prompt and its sampling at the top level, or under "sampling", "sampling_params"
or "body". Whatever changes the text and is not honoured is refused; a user's own fields (a
reference answer, a category) are left alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from draftproof.errors import BadInput

if TYPE_CHECKING:
    from draftproof.core.params import Sampling
    from draftproof.engine.engine import Prompt

NOT_DATA = ("processors", "stop_when", "logits_rules")
"""Fields of a sampling that no file or request can hold."""
PROMPTS = ("prompt", "messages", "turns", "text", "prompt_token_ids", "inputs")
"""Fields a prompt is looked for in; of turns, the first is taken."""
OTHER_NAMES = {
    "max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens",
    "max_output_tokens": "max_new_tokens", "n_predict": "max_new_tokens",
    "min_tokens": "min_new_tokens", "stop_token_ids": "stop_tokens", "stop_strings": "stop",
    "stop_sequences": "stop", "bad_words": "banned_words", "bad_words_ids": "banned_words",
    "no_repeat_ngram_size": "no_repeat_ngram", "random_seed": "seed",
}  # fmt: skip
"""What OpenAI, vLLM, TGI, llama.cpp and transformers call an option."""
NOT_HONOURED = (
    "tools", "tool_choice", "functions", "function_call", "response_format", "structured_outputs",
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding", "grammar",
    "json_schema", "prompt_embeds", "modalities", "audio", "echo", "suffix", "best_of", "num_beams",
    "use_beam_search", "length_penalty", "num_return_sequences", "typical_p", "top_h", "top_a",
    "epsilon_cutoff", "eta_cutoff", "mirostat", "repeat_penalty", "encoder_repetition_penalty",
    "guidance_scale", "penalty_alpha", "watermark", "logits_processors", "allowed_token_ids",
    "eos_token_id", "lora_request", "prompt_logprobs", "truncate", "chat_template",
    "truncate_prompt_tokens", "include_stop_str_in_output", "extra_body", "reasoning_effort",
    "top_n_tokens", "decoder_input_details", "return_full_text", "chat_template_kwargs",
    "continue_final_message", "suppress_tokens", "forced_eos_token_id",
)  # fmt: skip
"""Fields that would change the text or what is reported of it, and that nothing here does."""
NEUTRAL: tuple[Any, ...] = (None, False, [], {}, "", "none", "auto", ["text"], {"type": "text"})
ONE_IS_NEUTRAL = (
    "best_of", "num_beams", "num_return_sequences", "length_penalty", "typical_p", "repeat_penalty",
    "guidance_scale", "encoder_repetition_penalty",
)  # fmt: skip


class Request(NamedTuple):
    """One row, understood."""

    prompt: Prompt
    sampling: Sampling


def parsed(text: bytes) -> dict[str, Any]:
    """The object on a line, its "body" unfolded. Raises BadInput, in one sentence."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise BadInput(f"the row is not JSON: {reason}") from error
    if not isinstance(row, dict):
        wanted = f"an object with one of {', '.join(PROMPTS)}"
        raise BadInput(f"the row is a JSON {type(row).__name__}; it must be {wanted}")
    body = row.get("body")
    return {**row, **body} if isinstance(body, dict) else row


def identity(text: bytes) -> dict[str, Any]:
    """The row's own ids, if it has any."""
    try:
        row = parsed(text)
    except BadInput:
        return {}
    return {name: row[name] for name in ("id", "custom_id") if name in row}


def understood(text: bytes, base: Sampling, chat: bool) -> Request:
    """What a row asks for, beside what `base` says. Raises BadInput, in one sentence."""
    row = parsed(text)
    refuse_unhonoured(row)
    if (n := row.get("n")) not in (None, 1):
        raise BadInput(f'"n" was {n!r}; each row is completed once, repeat it with another seed')
    return Request(prompt_of(row, chat), sampling_of(base, row))


def refuse_unhonoured(row: Mapping[str, Any]) -> None:
    """Raise BadInput for a field that would change the text and is not honoured."""
    if (n := _nested(row).get("n")) not in (None, 1):
        raise BadInput(f'"n" was {n!r} among the sampling options; give it beside the prompt')
    for options in (row, _nested(row)):
        for name in NOT_HONOURED:
            value = options.get(name)
            one = name in ONE_IS_NEUTRAL and value == 1 and value is not True
            if value not in NEUTRAL and not one:
                raise BadInput(f'"{name}" was asked for and is not honoured here; leave it out')


def prompt_of(row: Mapping[str, Any], chat: bool) -> Prompt:
    """The prompt of a row, as text, as token ids or as a chat. Raises BadInput, in one sentence."""
    name = next((name for name in PROMPTS if name in row), None)
    if name is None:
        raise BadInput(f"the row has no prompt; it must have one of {', '.join(PROMPTS)}")
    given = row[name]
    if name == "messages":
        return messages_of(given)
    if name == "turns" and isinstance(given, list) and given:
        given = given[0]
    if isinstance(given, list) and given and all(type(token) is int for token in given):
        return [int(token) for token in given]
    if not isinstance(given, str) or (chat and not given):
        raise BadInput(f'"{name}" must be text, and of a chat at least one word')
    return [{"role": "user", "content": given}] if chat else given


def messages_of(given: object) -> list[dict[str, Any]]:
    """Messages as templates read them: text joined, arguments of calls as objects."""
    messages: list[Any] = given if isinstance(given, list) else []
    roles = [isinstance(one, dict) and isinstance(one.get("role"), str) for one in messages]
    if not roles or not all(roles):
        raise BadInput('"messages" must be a list of objects with "role" and "content"')
    read = list[dict[str, Any]]()
    for message in messages:
        calls, content = message.get("tool_calls"), message.get("content")
        if content is None and calls:
            content = ""
        if isinstance(content, list):
            content = "".join(map(text_part, content))
        if not isinstance(content, str):
            raise BadInput("the content of a message must be text, or a list of parts that are")
        own: dict[str, Any] = {"tool_calls": tool_calls_of(calls)} if calls else {}
        read.append({**message, "content": content, **own})
    return read


def text_part(part: Any) -> str:
    """The text of a part of a message; raises BadInput for an image, or what else it is."""
    words = part.get("text") if isinstance(part, dict) else None
    if not isinstance(words, str) or part.get("type", "text") != "text":
        raise BadInput("a message has a part that is not text; only text is read here")
    return words


def tool_calls_of(calls: Any) -> list[dict[str, Any]]:
    """Tool calls as chat templates take them: the arguments as an object, not as its text."""
    try:
        read = []
        for call in calls:
            function = dict(call["function"])
            if isinstance(function.get("arguments"), str):
                function["arguments"] = json.loads(function["arguments"] or "{}")
            read.append({"type": "function", **call, "function": function})
        return read
    except (TypeError, KeyError, ValueError, RecursionError) as error:
        raise BadInput(f"a message's tool_calls cannot be read: {error!r:.120}") from None


def sampling_of(base: Sampling, row: Mapping[str, Any]) -> Sampling:
    """`base` with what the row asks for."""
    kinds = {field.name: str(field.type) for field in fields(base) if field.name not in NOT_DATA}
    nested, params = _nested(row), dict[str, Any]()
    for name in nested:
        if OTHER_NAMES.get(name, name) not in (*kinds, "n", "do_sample", "ignore_eos",
                                               *NOT_HONOURED):
            raise BadInput(f"there is no sampling option {name!r}; there are {', '.join(kinds)}")
    asked = {**row, **nested}
    for name, value in asked.items():
        ours = OTHER_NAMES.get(name, name)
        if ours in kinds and value is not None:
            params[ours] = _typed(ours, kinds[ours], value)
            if ours == "logprobs" and type(value) is int:       # so many of the likeliest
                params["top_logprobs"] = value
    if asked.get("ignore_eos"):
        params["stop_tokens"] = ()
    wanted, drawn = replace(base, **params), asked.get("do_sample")
    if drawn is not None and bool(drawn) != (wanted.temperature > 0):
        raise BadInput(f"do_sample was {drawn!r}; say it by temperature, where 0 is greedy")
    return wanted


def _nested(row: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling options that a row asks for beside its top level."""
    found = dict[str, Any]()
    for name in ("sampling", "sampling_params", *(["parameters"] if "inputs" in row else [])):
        inner = row.get(name) or {}
        if not isinstance(inner, dict):
            raise BadInput(f'"{name}" must be an object of sampling options')
        found |= inner
    return found


def _typed(name: str, kind: str, value: Any) -> Any:
    """A value as its option wants it: JSON has no token ids as keys, others write 8.0 or 1."""
    if kind.startswith("int") and isinstance(value, float) and value.is_integer():
        return int(value)
    if name == "logprobs" and type(value) is int:
        return True
    if name == "logit_bias":
        try:
            return {int(token): float(bias) for token, bias in dict(value).items()}
        except (TypeError, ValueError) as error:
            wanted = "an object of token ids and numbers"
            raise BadInput(f"logit_bias was {value!r}; it must be {wanted}") from error
    return value
