"""One running row on the host: its tokens, text and end. Knows nothing of trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from draftproof.core.params import Likely, SamplingParams
from draftproof.errors import DraftproofError
from draftproof.requests.stats import RoundStats
from draftproof.requests.stop_strings import stop_strings
from draftproof.tokenizer.codec import TextStream


@dataclass
class SequenceState:
    """A row: `prompt` tokens, sampling parameters, and at most `limit` new tokens.

    source: the encoder's input in an encoder-decoder. owner: the owner of the text, from which
    only rows of the same owner may profit (drafts, known beginnings); 0 is everybody. began: the
    time when it began.
    reported: the number of tokens in updates; reported_at: the time of the last one, 0 before any.
    stop_string: the one that ended the text, if any.
    Tokens are taken one at a time: the end of the text does not depend on the tokens of a round.
    """

    prompt: Sequence[int]
    params: SamplingParams
    limit: int
    detokenizer: TextStream | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[Likely] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    error: DraftproofError | None = None
    source: object = None
    owner: int = 0
    stats: RoundStats = field(default_factory=RoundStats)
    began: dict[str, float] = field(default_factory=dict)
    reported: int = 0
    reported_at: float = 0.0
    is_reported: bool = False
    stop_string: str | None = None
    _pieces: list[tuple[str, str]] = field(default_factory=list)
    # text that may begin a stop string; the last field marks special tokens, which are not shown
    _held: list[tuple[str, str, bool]] = field(default_factory=list)

    def extend(
        self, tokens: Sequence[int], logprobs: Sequence[float] | None, by: Sequence[str],
        top: Sequence[Likely] | None = None,
    ) -> int:  # fmt: skip
        """Take new tokens, the first drafted `by` these, until the text ends; return how many."""
        sampling, stops = self.params.sampling, self.params.stop_tokens
        push = self.detokenizer.push if self.detokenizer is not None else None
        for index, token in enumerate(tokens):
            who = by[index] if index < len(by) else ""
            self.tokens.append(token)
            if logprobs is not None:
                self.logprobs.append(logprobs[index])
            if top is not None and sampling.top_logprobs:
                self.top_logprobs.append(top[index][: sampling.top_logprobs])
            if push is not None and (piece := push(token)):
                if sampling.stop:
                    self._hold(piece, who)
                else:
                    self.text += piece
                    self._pieces.append((piece, who))
            elif sampling.stop and self.detokenizer and (piece := self.detokenizer.special(token)):
                self._hold(piece, who, special=True)
            if self.finish_reason is None and (
                token in stops or (sampling.stop_when and self._is_enough())
            ):
                self._end("stop")
            if self.finish_reason is None and len(self.tokens) >= self.limit:
                self._end("length")
            if self.finish_reason is not None:
                return index + 1
        return len(tokens)

    def fail(self, error: DraftproofError) -> None:
        """End the text here with an error, since there is no next token."""
        self._end("error")
        self.error = error

    def abort(self) -> None:
        """End the text here at the caller's request."""
        if self.finish_reason is None:
            self._end("abort")

    def checked(self) -> None:
        """Raise the error that ended it, if any."""
        if self.error is not None:
            raise self.error

    def pieces(self) -> list[tuple[str, str]]:
        """Return new final text in pieces, each with its drafter or ""."""
        out, self._pieces = self._pieces, []
        return out

    def _is_enough(self) -> bool:
        """Whether one of the user's functions ends the text here."""
        text = torch.tensor([[*self.prompt, *self.tokens]])
        return any(stops(text) for stops in self.params.sampling.stop_when)

    def _hold(self, piece: str, who: str, special: bool = False) -> None:
        """End the text at the earliest stop string; release text that cannot begin one."""
        stops = stop_strings(tuple(self.params.sampling.stop))
        self._held.append((piece, who, special))
        held = "".join(text for text, _, _ in self._held)
        place = stops.find(held)
        if place is not None:
            self.stop_string = next(stop for stop in self.params.sampling.stop
                                    if held.startswith(stop, place))
            self._release(place)
            self._held.clear()
            self.finish_reason = "stop"
        else:
            self._release(len(held) - stops.overlap(held))

    def _release(self, count: int) -> None:
        """Move the first `count` held characters to the text, except those of special tokens."""
        while count > 0:
            piece, who, special = self._held.pop(0)
            if len(piece) > count:
                self._held.insert(0, (piece[count:], who, special))
                piece = piece[:count]
            if not special:
                self.text += piece
                self._pieces.append((piece, who))
            count -= len(piece)

    def _end(self, reason: str) -> None:
        if self.detokenizer is not None and (piece := self.detokenizer.finish()):
            self._hold(piece, "")
        self._release(sum(len(piece) for piece, _, _ in self._held))
        self.finish_reason = self.finish_reason or reason
