"""The former path of `draftproof.requests.sequence`, for programs that import it from here."""

from draftproof.requests.sequence import SequenceState

__all__ = ["SequenceState"]
