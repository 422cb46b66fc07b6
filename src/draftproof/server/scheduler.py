"""The former path of `draftproof.requests.request.Update`."""

from __future__ import annotations

from draftproof.core.params import Likely
from draftproof.requests.completion import Completion
from draftproof.requests.request import DraftTree, Request, Update


def Progress(
    sample: int, pieces: list[tuple[str, str]], tokens: list[int], logprobs: list[float],
    top: list[Likely], completion: Completion | None, tree: DraftTree | None,
) -> Update:  # fmt: skip
    """An `Update` without a request, from the former order of its fields."""
    return Update(Request([]), sample, pieces, tokens, logprobs, top, completion, tree)
