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
from draftproof.errors import BadInput
from draftproof.model.tokenizer import Codec

FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as Python and most chat templates write it: no model can write blanks for ever."""


class Grammars:
    """Compiles grammars for a tokenizer and a model of `vocab` tokens. ends: its end tokens."""

    def __init__(self, codec: Codec | None, vocab: int, ends: tuple[int, ...]) -> None:
        self.codec, self.vocab, self.ends = codec, vocab, ends
        self._known: dict[tuple[int, ...], Any] = {}
        self._lock = Lock()

    def json(self, schema: Any) -> LogitsRule:
        """The text is JSON of this schema."""
        return self.lark(f"start: {json_rule(schema)}")

    def lark(self, grammar: str) -> LogitsRule:
        """The text keeps to a grammar in llguidance's Lark. Raises BadInput if there is none."""
        self._matcher(grammar, self.ends)        # seconds, the first time: not while all wait
        return LogitsRule("grammar", "usual", lambda request: self._processor(grammar, request))

    def _processor(self, grammar: str, request: RuleRequest) -> LogitsProcessor:
        if not request.ends:
            raise BadInput("a text with a grammar ends by an end token; leave ignore_eos out")
        matcher = self._matcher(grammar, request.ends)
        return GrammarProcessor(matcher, len(request.prompt), self.vocab)

    def _matcher(self, grammar: str, ends: tuple[int, ...]) -> Any:
        try:
            from llguidance import LLMatcher
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise BadInput(
                f"a JSON schema or a forced tool call needs {error.name}; pip install "
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
        if not self._follow(input_ids[0, self.start :].tolist()):
            return scores
        bits = np.frombuffer(self.matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, count=self.vocab, bitorder="little")
        if self.matcher.is_error():                             # too complex: this row alone fails
            allowed[:] = 0
        mask = torch.from_numpy(allowed == 0).to(scores.device)
        return scores.masked_fill(mask, -torch.inf)

    def _follow(self, text: list[int]) -> bool:
        """Bring the matcher behind `text`; whether it keeps to the grammar."""
        pairs = zip(text, self._text, strict=False)
        same = next((place for place, (new, old) in enumerate(pairs) if new != old),
                    min(len(text), len(self._text)))
        if same < len(self._text):
            self.matcher.rollback(len(self._text) - same)
        taken = self.matcher.try_consume_tokens(text[same:])
        self._text = text[: same + taken]
        return len(self._text) == len(text)


def json_rule(schema: Any) -> str:
    """A JSON schema, or True for any object, as the right side of a rule in Lark."""
    if schema is True:
        schema = {"type": "object"}
    if not isinstance(schema, dict):
        raise BadInput(f"a JSON schema must be an object; {str(schema)[:99]!r} was given")
    try:
        return "%json " + json.dumps({**schema, "x-guidance": FORM})
    except (TypeError, ValueError, RecursionError) as error:
        raise BadInput(f"the JSON schema cannot be read: {error}") from None


def response_rule(asked: Any, grammars: Grammars) -> LogitsRule | None:
    """The rule of a request's `response_format`; None where any text will do."""
    if asked is None:
        return None
    kind = asked.get("type") if isinstance(asked, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return grammars.json(True)
    if kind == "json_schema":
        inner = asked.get("json_schema")
        if not isinstance(inner, dict) or not isinstance(inner.get("schema"), dict):
            raise BadInput('response_format json_schema needs {"json_schema": {"schema": {...}}}')
        return grammars.json(inner["schema"])
    raise BadInput(
        f"response_format was {str(asked)[:99]!r}; its type must be text, json_object or "
        "json_schema"
    )
