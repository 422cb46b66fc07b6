"""The former import path of `draftproof.requests.openai_format`."""

from draftproof.requests.openai_format import parse_row as understood

__all__ = ["understood"]
