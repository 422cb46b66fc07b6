"""Grammars: which tokens may follow a text, so that it keeps to a JSON schema or a tool's call.

A grammar is a rule on logits that reads the text alone, so every node of a draft tree has the mask
of its own path: the matcher goes back to where two paths part, and on from there.
"""

from __future__ import annotations

import json
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftproof.core.params import LogitsProcessor, LogitsRule, RuleRequest
from draftproof.engine.completion import first_difference
from draftproof.errors import BadInput
from draftproof.model.tokenizer import Codec
from draftproof.server.schema import ResponseFormat

FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as Python and most chat templates write it: no model can write blanks for ever."""


class Grammars:
    """Compiles grammars for a tokenizer and a model of `vocab` tokens. ends: its end tokens."""

    def __init__(self, codec: Codec | None, vocab: int, ends: tuple[int, ...]) -> None:
        self.codec, self.vocab, self.ends = codec, vocab, ends
        self._known: dict[tuple[int, ...], Any] = {}
        self._lock = Lock()

    def response(self, asked: ResponseFormat | None) -> LogitsRule | None:
        """The rule of a request's `response_format`; None where any text will do."""
        if asked is None or asked.type == "text":
            return None
        if asked.type == "json_object":
            return self.lark(f"start: {json_rule({'type': 'object'})}")
        schema = asked.json_schema.get("schema")
        if not isinstance(schema, dict):
            raise BadInput('response_format json_schema needs {"json_schema": {"schema": {...}}}')
        return self.lark(f"start: {json_rule(schema)}")

    def lark(self, grammar: str) -> LogitsRule:
        """The text keeps to a grammar in llguidance's Lark. Raises BadInput if there is none."""
        self._matcher(grammar, self.ends)        # seconds, the first time: not while all wait
        return LogitsRule("grammar", lambda request: self._processor(grammar, request))

    def _processor(self, grammar: str, request: RuleRequest) -> LogitsProcessor:
        if not request.ends:
            raise BadInput("a text with a grammar ends by an end token; leave ignore_eos out")
        matcher = self._matcher(grammar, request.ends)
        return GrammarProcessor(matcher, len(request.prompt), self.vocab)

    def _matcher(self, grammar: str, ends: tuple[int, ...]) -> Any:
        try:
            from llguidance import LLMatcher
            from llguidance.hf import from_tokenizer
        except ImportError:
            raise BadInput(
                "a JSON schema or a forced tool call needs llguidance; pip install "
                "'draftproof[server]'"
            ) from None
        tokenizer = self.codec.tokenizer if self.codec else None
        if tokenizer is None or not tokenizer.is_fast:
            raise BadInput("a grammar needs a fast tokenizer, and this model has none")
        with self._lock:
            if ends not in self._known:
                size = max(self.vocab, len(tokenizer))
                self._known[ends] = from_tokenizer(tokenizer, size, list(ends) or None)
        matcher = LLMatcher(self._known[ends], grammar, log_level=0)
        if matcher.is_error():
            said = " ".join(matcher.get_error().split())
            raise BadInput(f"the schema cannot be followed: {said[:300]}")
        return matcher


class GrammarProcessor:
    """Masks what may not follow; a function of the text, whose matcher remembers the last one.

    Behind a text that breaks the grammar, as a draft may, nothing is masked: it is not chosen.
    """

    def __init__(self, matcher: Any, start: int, vocab: int) -> None:
        self.matcher, self.start, self.vocab = matcher, start, vocab
        self._text: list[int] = []              # what the matcher has taken

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        text = input_ids[0, self.start :].tolist()
        same = (first_difference(text, self._text) or len(text) + 1) - 1
        if same < len(self._text):
            self.matcher.rollback(len(self._text) - same)
        self._text = text[: same + self.matcher.try_consume_tokens(text[same:])]
        if len(self._text) < len(text):
            return scores
        bits = np.frombuffer(self.matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, count=self.vocab, bitorder="little")
        if self.matcher.is_error():                             # too complex: this row alone fails
            allowed[:] = 0
        mask = torch.from_numpy(allowed == 0).to(scores.device)
        return scores.masked_fill(mask, -torch.inf)


def json_rule(schema: dict[str, Any]) -> str:
    """A JSON schema as the right side of a rule in Lark."""
    try:
        return "%json " + json.dumps({**schema, "x-guidance": FORM})
    except (ValueError, RecursionError) as error:
        raise BadInput(f"the JSON schema cannot be read: {error}") from None
