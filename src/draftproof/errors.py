"""Every error a user can meet. Each message names what was given, what was wanted and what to do.

    DraftproofError
    ├── BadInput                a request that cannot be honoured (also a ValueError)
    │   └── ContextOverflow     prompt and new tokens do not fit the model's context
    ├── ModelError              the target or draft model cannot be used
    │   ├── ModelNotFound       no such folder, hub id, or checkpoint file; or it is corrupt
    │   ├── UnsupportedModel    an architecture that cannot be run exactly
    │   └── BrokenModel         the model produced NaN, or nothing that may be chosen
    ├── DrafterMismatch         the drafter does not fit the target
    │   └── TokenizerMismatch   draft and target do not share a tokenizer
    ├── RankLost                another process of a parallel run is gone
    └── Unavailable             a server cannot take or finish a request now
"""

import threading

LAST_WORD = threading.Lock()
"""Taken by the thread that says why the process ends, so that it is said once."""


class DraftproofError(Exception):
    """Base of all errors raised on purpose; the command line prints it as one sentence."""


class BadInput(DraftproofError, ValueError):
    """A request that cannot be honoured as given."""


class ContextOverflow(BadInput):
    """Prompt and new tokens together do not fit the model's context."""


class ModelError(DraftproofError):
    """The target or draft model cannot be used."""


class ModelNotFound(ModelError):
    """No such folder, hub id or checkpoint file, or it cannot be read."""


class UnsupportedModel(ModelError):
    """An architecture that cannot be run exactly here."""


class BrokenModel(ModelError):
    """The model produced logits from which nothing can be chosen."""


class DrafterMismatch(DraftproofError):
    """The drafter does not fit the target."""


class TokenizerMismatch(DrafterMismatch):
    """Draft and target do not share a tokenizer."""


class RankLost(DraftproofError):
    """Another process of a parallel run is gone."""


class Unavailable(DraftproofError):
    """A server cannot take or finish a request now. status: of HTTP."""

    def __init__(self, message: str, status: int = 503) -> None:
        super().__init__(message)
        self.status = status


def first_line(error: BaseException) -> str:
    """The first line of what another library raised, to be quoted in a sentence."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
