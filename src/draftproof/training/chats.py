"""Which tokens of a chat the assistant said. Knows chat templates through the tokenizer; keeps no text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from draftproof.errors import BadInput
from draftproof.model.tokenizer import Codec

Turns = Sequence[tuple[str, str]]
"""A chat as (role, content)."""


class Marked(NamedTuple):
    """Tokens, and whether each counts as something to foretell."""

    tokens: list[int]
    counts: list[bool]


def marked_chats(codec: Codec, turns: Turns) -> list[Marked]:
    """The chat in the model's own template, with the assistant's tokens marked.

    One text where the template writes a chat the same way while it grows; otherwise (templates that drop the thoughts
    of earlier turns) one per answer, each as the model saw it when it answered.
    """
    if not codec.tokenizer.chat_template:
        raise BadInput(f"the tokenizer of {codec.name} has no chat template; give texts, or a chat model")
    answers = [index for index, (role, _) in enumerate(turns) if role == "assistant"]
    if not answers:
        return []
    if "{% generation" in _template(codec) or "{%- generation" in _template(codec):
        return [_by_the_template(codec, turns)]
    last = turns[: answers[-1] + 1]
    whole = _rendered(codec, last)
    spans = [(_rendered(codec, last[:index], ask=True), _rendered(codec, last[: index + 1])) for index in answers]
    if all(whole.startswith(start) and whole.startswith(end) for start, end in spans):
        return [_by_characters(codec, whole, [(len(start), len(end)) for start, end in spans])]
    return [_by_characters(codec, end, [(_agreement(start, end), len(end))]) for start, end in spans]


def question(codec: Codec, turns: Turns) -> list[int]:
    """Tokens of a chat that ends with the user, ready for the answer."""
    return codec.encode_chat(_messages(turns))


def _by_the_template(codec: Codec, turns: Turns) -> Marked:
    """Templates with generation marks know best."""
    out = codec.tokenizer.apply_chat_template(
        _messages(turns), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    return Marked(list(out["input_ids"]), [bool(mark) for mark in out["assistant_masks"]])


def _by_characters(codec: Codec, text: str, spans: Sequence[tuple[int, int]]) -> Marked:
    """Tokens that begin inside a span count."""
    if not codec.tokenizer.is_fast:
        raise BadInput(f"the tokenizer of {codec.name} tells no character places; convert it to a fast one, or give texts")
    out = codec.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    begins = [begin for begin, _ in out["offset_mapping"]]
    return Marked(list(out["input_ids"]), [any(start <= begin < end for start, end in spans) for begin in begins])


def _rendered(codec: Codec, turns: Turns, ask: bool = False) -> str:
    try:
        return str(codec.tokenizer.apply_chat_template(_messages(turns), tokenize=False, add_generation_prompt=ask))
    except Exception as error:                                        # templates are programs: they raise anything
        raise BadInput(f"the chat template of {codec.name} refuses a chat: {error}") from error


def _agreement(one: str, other: str) -> int:
    """Characters that two texts begin with alike."""
    return next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _messages(turns: Turns) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


def _template(codec: Codec) -> str:
    template = codec.tokenizer.chat_template
    return template if isinstance(template, str) else str(template.get("default", ""))
