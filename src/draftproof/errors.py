"""Every error a user can meet. Messages name what was given, what was wanted and what to do."""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterable


class DraftproofError(Exception):
    """Base of all errors raised on purpose; the command line prints it as one sentence.

    Attributes:
        code: What a client of the server recognises the error by, in OpenAI's words, or None.
    """

    code: str | None = None


class BadInput(DraftproofError, ValueError):
    """A request that cannot be honoured as given."""


class ContextTooLong(BadInput):
    """A prompt that leaves no room for a new token in the model's context.

    Attributes:
        tokens: Tokens of the prompt.
    """

    code = "context_length_exceeded"

    def __init__(self, message: str, tokens: int) -> None:
        super().__init__(message)
        self.tokens = tokens


class ModelNotFound(DraftproofError):
    """No such folder, hub id or checkpoint file, or it cannot be read."""


class NoSuchModel(ModelNotFound, BadInput):
    """The name of a file or folder that does not exist."""


class UnsupportedModel(DraftproofError):
    """An architecture that cannot be run exactly here."""


class BrokenModel(DraftproofError):
    """The model produced logits from which nothing can be chosen."""


class DrafterMismatch(DraftproofError):
    """The drafter does not fit the target."""


class RankLost(DraftproofError):
    """Another process of a parallel run is gone."""


class Unavailable(DraftproofError):
    """A server cannot take or finish a request.

    Attributes:
        status: The HTTP status.
    """

    def __init__(self, message: str, status: int = 503, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``; did you mean X?`` with the nearest of the known names; empty if none is near."""
    from difflib import get_close_matches

    near = get_close_matches(name, list(known), 1, 0.6)
    return f"; did you mean {near[0]}?" if near else ""


def reject_unknown_options(function: str, options: Iterable[str], known: Collection[str]) -> None:
    """Raise TypeError, as Python does, for an option that a function does not have."""
    for name in options:
        if name not in known:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}"
                            f"{did_you_mean(name, known)}")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one that it was raised from, says that memory was lacking."""
    while error is not None:
        text = str(error).lower()
        known = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
        known = known or "cannot allocate memory" in text or "out of memory" in text
        if known or (isinstance(error, RuntimeError) and "can't allocate" in text):
            return True
        error = error.__cause__
    return False


def first_line(error: BaseException) -> str:
    """The first line of what another library raised, to be quoted in a sentence."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
