"""A scheduler's request: a prompt, the sequences that complete it, its status, and its updates.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from draftproof.core.params import Likely, Sampling
from draftproof.requests.completion import Completion
from draftproof.requests.sequence import SequenceState

DraftTree = list[tuple[int, int, bool, str]]
"""The nodes of a sequence's draft: token, parent, whether it was accepted, and who drafted it; node
0 is the root."""


class Status(Enum):
    """The status of a request."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    FINISHED = "finished"
    ABORTED = "aborted"


class Update(NamedTuple):
    """The progress of one sequence of a request in a step.

    Attributes:
        request: The request.
        sample: The index of the sample, from 0.
        pieces: New text, each piece with the drafter of its token, or "" if it was not drafted.
            Stop strings never retract any of it.
        tokens: New token ids.
        logprobs: Their log-probabilities, if the request asks for them.
        top_logprobs: The most likely tokens at their positions, if the request asks for them.
        completion: The whole result, in the last update of a sequence; None before.
        tree: The tree that the round verified, if the request asks for draft trees.
        seconds: The time since the previous update, or since the request arrived.
        latency: The time since the request arrived.
    """

    request: Request
    sample: int
    pieces: list[tuple[str, str]]
    tokens: list[int]
    logprobs: list[float]
    top_logprobs: list[Likely]
    completion: Completion | None = None
    tree: DraftTree | None = None
    seconds: float = 0.0
    latency: float = 0.0

    @property
    def text(self) -> str:
        """The new text."""
        return "".join(piece for piece, _ in self.pieces)

    @property
    def finished(self) -> bool:
        """Whether this is the last update of the sequence."""
        return self.completion is not None

    def complete(self) -> Update:
        """The last update of a sequence with the contents of all earlier ones."""
        done = self.completion
        assert done is not None
        return self._replace(pieces=[(done.text, "")], tokens=done.tokens,
                             logprobs=done.logprobs or [], top_logprobs=done.top_logprobs or [])


@dataclass(eq=False)
class Request:
    """A prompt to complete, and the samples that complete it.

    Attributes:
        sequences: One per sample.
        id: Its name for `abort`.
        index: The index of the prompt in its call.
        on_update: Called with every update, in the thread that runs `step`.
        draft_trees: Whether updates contain draft trees.
        priority: Waiting requests join in ascending order, and equal ones in order of arrival.
        status: Its status.
        arrival: The time when it was made, by `time.perf_counter`.
    """

    sequences: list[SequenceState]
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    index: int = 0
    on_update: Callable[[Update], None] | None = None
    draft_trees: bool = False
    priority: int = 0
    status: Status = Status.WAITING
    arrival: float = field(default_factory=time.perf_counter)

    @property
    def rows(self) -> list[SequenceState]:
        """The sequences, under the attribute's former name."""
        return self.sequences

    @property
    def prompt(self) -> Sequence[int]:
        """Token ids of the prompt."""
        return self.sequences[0].prompt

    @property
    def owner(self) -> int:
        """The owner, whose texts drafts may use and to whom this text is added."""
        return self.sequences[0].owner

    @owner.setter
    def owner(self, owner: int) -> None:
        for sequence in self.sequences:
            sequence.owner = owner

    @property
    def sampling(self) -> Sampling:
        """Its sampling parameters."""
        return self.sequences[0].params.sampling

    @property
    def max_length(self) -> int:
        """The largest total length of its prompt and one of its texts."""
        return len(self.prompt) + self.sequences[0].limit

    @property
    def finished(self) -> bool:
        """Whether the request is over."""
        return self.status in (Status.FINISHED, Status.ABORTED)

    def completion(self, sequence: SequenceState) -> Completion:
        """The result of a sequence that has ended.

        Args:
            sequence: One of its sequences.

        Returns:
            Its result.
        """
        sampling = sequence.params.sampling
        return Completion(
            sequence.text, sequence.tokens, sequence.finish_reason or "length",
            sequence.logprobs if sampling.logprobs else None, sequence.stats, self.index,
            sequence.params.sample, sequence.error,
            sequence.top_logprobs if sampling.top_logprobs else None,
        )  # fmt: skip
