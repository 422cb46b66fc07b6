"""Two tokenizers: which tokens of one are tokens of the other, and the same text in either.

Tokens are compared by the bytes they stand for, so the marks that tokenizers put for a space do not
matter. Special tokens are shared if both tokenizers have one of that name, and the end token is
always. Knows tokenizers; knows nothing of models.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby

import torch
from torch import Tensor

from draftproof.errors import TokenizerMismatch
from draftproof.model.tokenizer import Codec

LEAST_SHARED = 0.1
"""The part of the smaller vocabulary that must be shared."""
SPACES = "Ġ▁"
"""What byte-level tokenizers, and those of SentencePiece, have for a space."""


class Vocabulary:
    """What every token of a tokenizer stands for. bytes_of: by id, empty where there is no token.

    specials: the ids of special tokens, by their content."""

    def __init__(self, codec: Codec, size: int) -> None:
        self.codec, tokenizer = codec, codec.tokenizer
        tokens = {index: token for token, index in tokenizer.get_vocab().items() if index < size}
        special = {*codec.special_tokens, *tokenizer.all_special_ids}
        self.specials = {tokens[index]: index for index in sorted(special & tokens.keys())}
        end = tokenizer.eos_token_id
        self.end = end if isinstance(end, int) and end < size else None
        marks = [sum(token.startswith(mark) for token in tokens.values()) for mark in SPACES]
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.bytes_of = [b""] * size
        for index, token in tokens.items():
            plain = index in added or index in special
            self.bytes_of[index] = (token.encode(errors="ignore") if plain
                                    else _bytes(token, marks[0] >= marks[1]))
        self._special = special
        self._begins = codec.encode("")[:1]

    def ordinary(self) -> dict[bytes, list[int]]:
        """The ids of tokens that are not special, by what they stand for; of several the one that
        the tokenizer itself writes comes first."""
        found: dict[bytes, list[int]] = {}
        for index, text in enumerate(self.bytes_of):
            if text and index not in self._special:
                found.setdefault(text, []).append(index)
        for text, several in found.items():
            if len(several) > 1:
                own = self.encode(text)
                several.sort(key=lambda index: [index] != own)
        return found

    def is_special(self, token: int) -> bool:
        return token in self._special

    def encode(self, text: bytes, begins: bool = False) -> list[int]:
        """Ids of a text, cut characters left out; with what begins a text if it begins one."""
        tokens = self.codec.encode(text.decode(errors="ignore"), special=False) if text else []
        if tokens and self.said(tokens[:1]) == b" " and not text.startswith(b" "):
            tokens = tokens[1:]                                 # SentencePiece begins with a space
        return [*self._begins, *tokens] if begins else tokens

    def said(self, tokens: Iterable[int]) -> bytes:
        """What tokens stand for."""
        return b"".join(self.bytes_of[token] for token in tokens)


class SharedVocabulary:
    """The tokens that a target and a draft model share.

    to_draft: [V] the draft's id of each of the target's tokens, or -1.
    Raises TokenizerMismatch if they share too little.
    """

    def __init__(self, target: Codec, draft: Codec, target_size: int, draft_size: int) -> None:
        self.target = Vocabulary(target, target_size)
        self.draft = Vocabulary(draft, draft_size)
        sources = self._shared()
        smaller = min(len(target.tokenizer), len(draft.tokenizer))
        ordinary = len(sources) - sum(map(self.target.is_special, sources))
        if ordinary < max(1, LEAST_SHARED * smaller):
            raise TokenizerMismatch(
                f"the draft model {draft.name} and the target {target.name} share {ordinary} of "
                f"{smaller} tokens; choose a draft model whose tokenizer is nearer to the target's"
            )
        self.count, self.size = len(sources), target_size
        self.to_draft = torch.full((target_size,), -1, dtype=torch.int64)
        self.to_draft[list(sources)] = torch.tensor([ids[0] for ids in sources.values()])
        self.tokens = torch.tensor(list(sources))                                           # [n]
        most = max(map(len, sources.values()))
        lists = [ids + ids[:1] * (most - len(ids)) for ids in sources.values()]
        self.sources = torch.tensor(lists)                                                  # [n, m]
        self.counted = torch.tensor([[place < len(ids) for place in range(most)]
                                     for ids in sources.values()])

    def to(self, device: torch.device) -> SharedVocabulary:
        """Its tensors on this device."""
        for name in ("to_draft", "tokens", "sources", "counted"):
            setattr(self, name, getattr(self, name).to(device))
        return self

    def over_target(self, logits: Tensor) -> Tensor:
        """[..., V] what draft logits [..., draft V] say of the target's tokens: -inf of those not
        shared; tokens of the draft that are one token of the target add their probabilities."""
        each = logits[..., self.sources]                                        # [..., n, m]
        if self.sources.shape[1] > 1:
            each = each.masked_fill(~self.counted, -torch.inf)
        found = each[..., 0] if self.sources.shape[1] == 1 else each.logsumexp(-1)
        everything = logits.new_full((*logits.shape[:-1], self.size), -torch.inf)
        return everything.index_copy(-1, self.tokens, found)

    def begin(self, tokens: Sequence[int]) -> list[int]:
        """A prompt as the draft's tokenizer writes it, special tokens kept where it has them."""
        begins, ids = self.draft.encode(b"", begins=True), list[int]()
        for special, part in groupby(tokens, self.target.is_special):
            if not special:
                ids += self.draft.encode(self.target.said(part))
            else:
                known = (int(self.to_draft[token]) for token in part)
                ids += [token for token in known if token >= 0]
        return ids if ids[: len(begins)] == begins else [*begins, *ids]

    def follow(self, tokens: Sequence[int], guess: Sequence[int]) -> list[int]:
        """New `tokens` of the target in the draft's ids: those of `guess` that say the same first,
        then shared tokens one by one, and what lies between as the draft's tokenizer writes it."""
        text, ids, done = self.target.said(tokens), list[int](), 0
        for one in guess:
            piece = self.draft.bytes_of[one]
            if not piece or not text.startswith(piece, done):
                break
            ids.append(one)
            done += len(piece)
        start, between = 0, b""
        for token in tokens:
            piece = self.target.bytes_of[token]
            rest = piece[max(done - start, 0) :]
            start += len(piece)
            if not rest:
                continue
            shared = int(self.to_draft[token]) if len(rest) == len(piece) else -1
            if shared < 0:
                between += b"" if self.target.is_special(token) else rest
                continue
            ids += [*self.draft.encode(between), shared]
            between = b""
        return ids + self.draft.encode(between)

    def back(self, tokens: Sequence[int]) -> list[int]:
        """What the draft wrote, as the target's tokenizer writes it, as far as it is shared."""
        ids: list[int] = []
        names = {index: name for name, index in self.draft.specials.items()}
        for special, part in groupby(tokens, self.draft.is_special):
            if not special:
                ids += self.target.encode(self.draft.said(part))
                continue
            for token in part:
                known = self.target.specials.get(names.get(token, ""))
                known = self.target.end if token == self.draft.end else known
                if known is None:
                    return ids
                ids.append(known)
        return ids

    def _shared(self) -> dict[int, list[int]]:
        """By the target's id of each shared token, those of the draft, the usual one first."""
        target, draft = self.target.ordinary(), self.draft.ordinary()
        found = {ids[0]: draft[text] for text, ids in target.items() if text in draft}
        for name, index in self.target.specials.items():
            if name in self.draft.specials:
                found[index] = [self.draft.specials[name]]
        if self.target.end is not None and self.draft.end is not None:
            for ids in found.values():                          # one meaning, one token
                if self.draft.end in ids:
                    ids.remove(self.draft.end)
            found[self.target.end] = [self.draft.end]
        return {index: ids for index, ids in found.items() if ids}


def _bytes(token: str, byte_level: bool) -> bytes:
    """What an ordinary token stands for, as its kind of tokenizer writes it."""
    if byte_level:
        if all(letter in BYTES for letter in token):
            return bytes(BYTES[letter] for letter in token)
        return token.encode(errors="ignore")
    if match := re.fullmatch(r"<0x([0-9A-F]{2})>", token):
        return bytes([int(match[1], 16)])
    return token.replace("▁", " ").encode(errors="ignore")


def _byte_letters() -> dict[str, int]:
    """The byte that each letter of a byte-level token stands for (GPT-2's table)."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [one for one in range(256) if one not in seen]
    letters = {chr(one): one for one in seen}
    return letters | {chr(256 + place): one for place, one in enumerate(hidden)}


BYTES = _byte_letters()
