"""Grammars: which tokens may follow a text, so that it follows a JSON schema or is a tool call.

A grammar is a rule on logits that depends only on the text, so every node of a draft tree has the
mask of its own path. The matcher is rolled back to where two paths part.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from draftproof.core.params import LogitsProcessor, LogitsRule, RuleContext
from draftproof.errors import BadInput
from draftproof.requests.completion import first_difference
from draftproof.server.constraints import grammar_of
from draftproof.tokenizer.codec import Codec

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from draftproof.server.schema import ResponseFormat

KEPT, LONGEST = 16, 1 << 18
"""The most compiled grammars that are kept, and the most characters of a grammar. Long ones take
much memory."""


class Grammars:
    """Compiles grammars for one tokenizer.

    The tokenizer's tables take about 80 MiB, so they exist once, with the model's own end tokens.
    `GrammarProcessor` handles the end tokens of a request. A grammar is compiled again for each
    owner, so that nobody can tell whether another one has used it.
    """

    def __init__(self, codec: Codec | None, vocab: int, ends: tuple[int, ...]) -> None:
        """
        Args:
            codec: The model's tokenizer, or None if it has none.
            vocab: Tokens that the model knows.
            ends: The model's own end tokens.
        """
        self.codec, self.vocab, self.ends = codec, vocab, ends
        self._tokenizers: list[LLTokenizer] = []                   # made when it is first needed
        self._compiled: OrderedDict[tuple[int, str], LLMatcher] = OrderedDict()
        self._lock = Lock()

    def lark(self, grammar: str, owner: int = 0) -> LogitsRule:
        """The rule that makes a text follow a grammar.

        Args:
            grammar: In the Lark dialect of llguidance.
            owner: Whose request it is.

        Raises:
            BadInput: It is not a grammar, is too long, or this model can follow none.
        """
        self._matcher(grammar, owner)       # it may take seconds; here no round waits for it
        make = partial(self._processor, grammar, owner)
        return LogitsRule("grammar", make, forces=True)

    def response(self, asked: ResponseFormat | None, owner: int = 0) -> LogitsRule | None:
        """The rule of OpenAI's `response_format`; None if any text is allowed.

        Raises:
            BadInput: As `lark`.
        """
        grammar = grammar_of(asked, {})
        return None if grammar is None else self.lark(grammar, owner)

    def _processor(self, grammar: str, owner: int, request: RuleContext) -> LogitsProcessor:
        if not request.ends:
            raise BadInput("a text with a grammar ends by an end token; leave ignore_eos out")
        matcher = self._matcher(grammar, owner)
        return GrammarProcessor(matcher, len(request.prompt), self.vocab, request.ends, self._ends)

    @property
    def _ends(self) -> list[int]:
        return list(self._tokenizers[0].eos_tokens)

    def _matcher(self, grammar: str, owner: int) -> LLMatcher:
        """A new matcher, at the beginning of a text."""
        try:
            from llguidance import LLMatcher
            from llguidance.hf import from_tokenizer
        except ImportError:
            raise BadInput(
                "a JSON schema or a forced tool call needs another package: pip install "
                "llguidance"
            ) from None
        tokenizer = self.codec.tokenizer if self.codec else None
        if tokenizer is None or not tokenizer.is_fast:
            raise BadInput("a grammar needs a fast tokenizer, and this model has none")
        if len(grammar) > LONGEST:
            raise BadInput(
                f"the schema, or the tools, have {len(grammar):,} characters; this server reads at "
                f"most {LONGEST:,}"
            )
        with self._lock:
            if not self._tokenizers:
                size = max(self.vocab, len(tokenizer))
                full = getattr(tokenizer, "transformers", tokenizer)
                self._tokenizers.append(from_tokenizer(full, size, list(self.ends) or None))
            matcher = self._compiled.pop((owner, grammar), None)
        if matcher is None:
            matcher = LLMatcher(self._tokenizers[0], grammar, log_level=0)
            if matcher.is_error():
                reason = " ".join(matcher.get_error().split())
                raise BadInput(f"the schema cannot be followed: {reason[:300]}")
        with self._lock:
            self._compiled[owner, grammar] = matcher
            while len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
            return matcher.deep_copy()


class GrammarProcessor:
    """Masks the tokens that may not follow a text, and remembers the matcher's state after it.

    After a text that breaks the grammar, as a draft may, nothing is masked: no such text is chosen.
    """

    def __init__(
        self, matcher: LLMatcher, start: int, vocab: int, ends: Sequence[int],
        known_ends: Sequence[int],
    ) -> None:
        """
        Args:
            matcher: At the beginning of a text.
            start: Tokens of the prompt.
            vocab: Tokens that the model knows.
            ends: The request's end tokens, allowed exactly where the text may end.
            known_ends: The end tokens that the matcher knows.
        """
        self.matcher, self.start, self.vocab = matcher, start, vocab
        self._ends = [end for end in ends if end < vocab]
        self._other_ends = [end for end in known_ends if end < vocab and end not in self._ends]
        self._text: list[int] = []              # the tokens that the matcher has taken

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if not self._move(input_ids[0, self.start :].tolist()):
            return scores
        bits = np.frombuffer(self.matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, count=self.vocab, bitorder="little")
        allowed[self._other_ends] = 0
        allowed[self._ends] = self.matcher.is_accepting()
        if self.matcher.is_error():                             # too complex: only this row fails
            allowed[:] = 0
        mask = torch.from_numpy(allowed == 0).to(scores.device)
        return scores.masked_fill(mask, -torch.inf)

    def forced(self, text: Sequence[int]) -> list[int]:
        """The tokens that must follow a text, prompt included, as the tokenizer would write them.

        The last token is left out if it might merge with what follows."""
        if not self._move(list(text[self.start :])):
            return []
        tokens = [int(token) for token in self.matcher.compute_ff_tokens()]
        ends = next((place for place, token in enumerate(tokens) if token >= self.vocab), None)
        return tokens[:ends]

    def _move(self, text: list[int]) -> bool:
        """Advance the matcher to this text, from where it differs from the last one. Return whether
        it accepted all of it."""
        same = (first_difference(text, self._text) or len(text) + 1) - 1
        if same < len(self._text):
            self.matcher.rollback(len(self._text) - same)
        self._text = text[: same + self.matcher.try_consume_tokens(text[same:])]
        return len(self._text) == len(text)
