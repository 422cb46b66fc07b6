"""Finds arguments of `model.generate` that transformers does not pass on to a `custom_generate`
function: the streamer, the assistant and the tokenizer."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import wraps
from types import CodeType
from typing import NamedTuple

from transformers import GenerationMixin, PreTrainedModel
from transformers.generation import BaseStreamer

log = logging.getLogger("draftproof")

GENERATION = "transformers.generation.utils"
"""The module of transformers' own `generate`."""


class Call(NamedTuple):
    """The arguments of a `model.generate` call besides the text."""

    assistant_model: PreTrainedModel | None = None
    streamer: BaseStreamer | None = None


def find_call(inner: CodeType) -> Call:
    """Find the running call of `model.generate` that reached a function through `custom_generate`.

    The function may be wrapped in one of the user's, so the caller's frames are searched.

    Args:
        inner: The code of the function; a second call of it on the stack ends the search, since
            calls above it belong to that one.
    """
    frame = sys._getframe(1)
    while frame.f_code is not inner and frame.f_back is not None:   # skip helpers of the function
        frame = frame.f_back
    above, inside = frame.f_back, False
    while above is not None and above.f_code is not inner:
        if above.f_globals.get("__name__") == GENERATION:
            inside, values = True, above.f_locals
            named = {*Call._fields, "custom_generate"} <= {*values}
            if above.f_code.co_name == "generate" and named:
                custom = callable(values["custom_generate"])
                return Call(*map(values.get, Call._fields)) if custom else Call()
        above = above.f_back
    if inside:
        log.warning(
            "note: this version of transformers hides streamer and assistant_model from "
            "draftproof.generate; pass them to it, by functools.partial(draftproof.generate, ...)"
        )
    return Call()


@contextmanager
def ending(streamer: BaseStreamer | None) -> Iterator[None]:
    """End a streamer afterwards, even after an error, so that its readers do not wait forever."""
    try:
        yield
    except BaseException:
        if streamer is not None:
            with suppress(Exception):
                streamer.end()
        raise
    if streamer is not None:
        streamer.end()


class _ModeArguments(dict[str, object]):
    """The arguments that transformers passes on; lookups also find the tokenizer."""

    tokenizer: object

    def get(self, name: str, default: object = None) -> object:
        return self.tokenizer if name == "tokenizer" else super().get(name, default)


def keep_tokenizer() -> None:
    """Let `generate` find its `tokenizer` for `stop_strings` with a `custom_generate` function.

    transformers drops it there, but needs it later. Other calls are not changed.
    """
    extract = getattr(GenerationMixin, "_extract_generation_mode_kwargs", None)
    if extract is None or hasattr(extract, "__wrapped__"):
        return

    @wraps(extract)
    def extract_and_keep(
        self: GenerationMixin, custom_generate: object, kwargs: dict[str, object], *args: object,
        **more: object,
    ) -> Mapping[str, object]:
        tokenizer = kwargs.get("tokenizer")
        arguments: dict[str, object] = extract(self, custom_generate, kwargs, *args, **more)
        if tokenizer is None or not callable(custom_generate) or "tokenizer" in arguments:
            return arguments
        kept = _ModeArguments(arguments)
        kept.tokenizer = tokenizer
        return kept

    GenerationMixin._extract_generation_mode_kwargs = extract_and_keep
