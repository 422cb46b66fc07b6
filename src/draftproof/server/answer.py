"""Answers in the format of OpenAI's completions and chat completions."""

from __future__ import annotations

import codecs
import uuid
from collections.abc import AsyncIterator, Sequence

import fastapi

from draftproof.errors import DraftproofError
from draftproof.requests.request import DraftTree, Request, Update
from draftproof.server.base_answer import BaseAnswer, Piece, event
from draftproof.server.hosted_model import HostedModel
from draftproof.server.output_reader import OutputReader
from draftproof.server.problems import error_body, status_of
from draftproof.server.schema import Chat, GenerationBody
from draftproof.tokenizer.codec import Codec


class Answer(BaseAnswer):
    """Choices, whole or as chunks."""

    def __init__(
        self, hosted: HostedModel, body: GenerationBody, requests: list[Request],
        readers: Sequence[OutputReader] = (),
    ) -> None:  # fmt: skip
        super().__init__(hosted, requests, readers, body.stream, body.draftproof.drafter)
        self.body, self.chat = body, isinstance(body, Chat)
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.kind = "chat.completion" if self.chat else "text_completion"
        if self.chat and self.stream:
            self.kind += ".chunk"
        self.logprobs = self.requests[0].sampling.logprobs
        each = [request.prompt for request in self.requests for _ in request.sequences]
        self.offsets = [Offsets(self.codec, prompt) for prompt in each] if self.logprobs else []
        self._begun = set[int]()                        # samples with a chunk already

    async def complete(self, request: fastapi.Request) -> dict[str, object]:
        pieces = {piece.number: piece async for piece in self.pieces(request)}
        for piece in pieces.values():
            self.count_reasoning(piece.reasoning)
        choices = [self._choice(piece) for _, piece in sorted(pieces.items())]
        return self._body(choices, usage=self._usage())

    async def events(self, request: fastapi.Request) -> AsyncIterator[str]:
        """A chunk for each round with new text."""
        options, prompt, new = self.body.stream_options, self.prompt_tokens, 0
        each = options is not None and options.include_usage and options.continuous_usage_stats
        drawn = "draftproof" in self.body.model_fields_set
        try:
            async for piece in self.pieces(request):
                more = {"draftproof": self._drafts(piece.update)} if drawn else {}
                new += len(piece.update.tokens)
                if each:
                    more["usage"] = {"prompt_tokens": prompt, "completion_tokens": new,
                                     "total_tokens": prompt + new}
                yield event(self._body([self._choice(piece)], **more))
            if options and options.include_usage:
                yield event(self._body([], usage=self._usage()))
        except DraftproofError as error:
            yield event(error_body(str(error), status_of(error), getattr(error, "code", None)))
        yield "data: [DONE]\n\n"

    def _choice(self, piece: Piece) -> dict[str, object]:
        """The new part of a sample: all of it, or a chunk."""
        content: dict[str, object] = {"text": piece.text}
        if self.chat:
            role = {} if piece.number in self._begun else {"role": "assistant"}
            self._begun.add(piece.number)
            message: dict[str, object] = {**role, "content": piece.text or (
                None if piece.calls or piece.reasoning else "")}
            if piece.reasoning:
                message["reasoning_content"] = piece.reasoning
            if piece.calls:
                message["tool_calls"] = piece.calls
            content = {"delta" if self.stream else "message": message}
        scores = None
        if self.logprobs and piece.update.tokens:
            scores = self._scores(piece.update, piece.number)
        return {"index": piece.number, **content, "logprobs": scores,
                "finish_reason": piece.finish_reason}

    def _drafts(self, update: Update) -> dict[str, object]:
        """Draft trees and statistics of new text, for the web page."""
        tree = {"tree": self._drawn(update.tree)} if update.tree else {}
        return {"pieces": update.pieces, "tokens": len(update.tokens), **tree}

    def _drawn(self, tree: DraftTree) -> list[tuple[str, int, bool, str]]:
        """The nodes of a draft with their text, without absent ones."""
        present = [place for place, (token, *_) in enumerate(tree) if token >= 0]
        number = {place: count for count, place in enumerate(present)}
        return [(self._text(tree[place][0]), number.get(tree[place][1], -1), *tree[place][2:])
                for place in present]

    def _body(self, choices: list[dict[str, object]], **more: object) -> dict[str, object]:
        return {"id": self.id, "object": self.kind, "created": self.created,
                "model": self.hosted.name, "choices": choices, **more}

    def _scores(self, update: Update, index: int | None = None) -> dict[str, object]:
        """Log-probabilities of new tokens, and of the likeliest tokens at their positions.

        Args:
            update: The new tokens.
            index: The sample among those of all prompts; by default the one of the first prompt.
        """
        tokens, scores = update.tokens, update.logprobs
        top = update.top_logprobs or [[]] * len(tokens)
        if self.chat:
            return {"content": logprobs_of(self.codec, update)}
        offsets = self.offsets[update.sample if index is None else index]
        named = [self._named([(token, score), *likely])
                 for token, score, likely in zip(tokens, scores, top, strict=True)]
        return {"tokens": [self._text(token) for token in tokens], "token_logprobs": scores,
                "text_offset": [offsets.add(token) for token in tokens],
                "top_logprobs": named if update.top_logprobs else None}

    def _named(self, scored: Sequence[tuple[int, float]]) -> dict[str, float]:
        """Log-probabilities by text; a second token of the same text is named by its id."""
        named = dict[str, float]()
        for token, score in dict(scored).items():
            text = self._text(token)
            named[f"token_id:{token}" if text in named else text] = score
        return named

    def _text(self, token: int) -> str:
        return token_text(self.codec, token)

    def _usage(self) -> dict[str, object]:
        """Tokens that were read, written and drafted, under OpenAI's names."""
        prompt, new, reasoning, accepted, rejected = self.usage()
        details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected,
                   **({"reasoning_tokens": reasoning} if reasoning else {})}
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new,
                "completion_tokens_details": details}


def token_text(codec: Codec | None, token: int) -> str:
    """The text of one token; for a part of a character its bytes, as in OpenAI's API."""
    return codec.token_bytes.text(token) if codec else str(token)


def logprobs_of(codec: Codec | None, update: Update) -> list[dict[str, object]]:
    """Log-probabilities of new tokens, and of the likeliest tokens at their positions, in the
    format of a chat."""
    def described(token: int, score: float) -> dict[str, object]:
        data = codec.token_bytes[token] if codec else str(token).encode()
        return {"token": token_text(codec, token), "logprob": score, "bytes": list(data)}

    tokens, top = update.tokens, update.top_logprobs or [[]] * len(update.tokens)
    return [{**described(token, score), "top_logprobs": [described(*pair) for pair in likely]}
            for token, score, likely in zip(tokens, update.logprobs, top, strict=True)]


class Offsets:
    """The offset of each token of an answer in its text. A part of a character has the offset of
    this character.

    Args:
        codec: The model's tokenizer; None: tokens are shown as numbers.
        prompt: May end inside a character, which the answer completes.
    """

    def __init__(self, codec: Codec | None, prompt: Sequence[int]) -> None:
        self._codec, self._length = codec, 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token in prompt[-4:] if codec else ():
            self._decoder.decode(codec.token_bytes[token] if codec else b"")

    def add(self, token: int) -> int:
        """The offset of the next token, in characters."""
        start = self._length
        if self._codec is None:
            self._length += len(str(token))
        elif token not in self._codec.special_tokens:
            self._length += len(self._decoder.decode(self._codec.token_bytes[token]))
        return start
