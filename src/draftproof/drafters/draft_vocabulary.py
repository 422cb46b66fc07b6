"""Two tokenizers: the tokens that they share, and conversion of texts between them.

Tokens are compared by their bytes, so the tokenizers' marks for spaces do not matter. Special
tokens
are shared if both tokenizers have one of this name; the end token always is. This knows tokenizers,
no models.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

import torch
from torch import Tensor

from draftproof.errors import DrafterMismatch
from draftproof.tokenizer.codec import Codec
from draftproof.tokenizer.token_bytes import bytes_of, is_byte_level

LEAST_SHARED = 0.1
"""The share of the smaller vocabulary that must be common to both."""


class TokenTable:
    """What every token of a tokenizer stands for. bytes_of: by id, empty where there is no token.

    ids: of ordinary tokens, by what they stand for. specials: of the others, by their name."""

    def __init__(self, codec: Codec, size: int) -> None:
        self.codec, tokenizer = codec, codec.tokenizer
        tokens = {index: token for token, index in tokenizer.get_vocab().items() if index < size}
        self._special = {*codec.special_tokens, *tokenizer.all_special_ids}
        self.specials = {tokens[index]: index for index in sorted(self._special & tokens.keys())}
        end = tokenizer.eos_token_id
        self.end = end if isinstance(end, int) and end < size else None
        byte_level = is_byte_level(list(tokens.values()))
        plain = self._special | getattr(tokenizer, "added_tokens_decoder", {}).keys()
        self.bytes_of, self.ids = [b""] * size, dict[bytes, int]()
        for index in sorted(tokens, key=lambda index: not tokens[index].startswith("<0x")):
            token = tokens[index]
            text = (token.encode(errors="ignore") if index in plain
                    else bytes_of(token, byte_level))
            self.bytes_of[index] = text
            if text and index not in self._special:
                self.ids[text] = index                  # a letter comes after its byte
        self._begins = codec.encode("")[:1]

    def is_special(self, token: int) -> bool:
        return token in self._special

    def encode(self, text: bytes, begins: bool = False) -> list[int]:
        """Ids of a text without incomplete characters; at the beginning of a text, with its first
        special tokens."""
        tokens = self.codec.encode(text.decode(errors="ignore"), special=False) if text else []
        if tokens and self.bytes_for(tokens[:1]) == b" " and not text.startswith(b" "):
            tokens = tokens[1:]                                 # SentencePiece begins with a space
        return [*self._begins, *tokens] if begins else tokens

    def bytes_for(self, tokens: Iterable[int]) -> bytes:
        """What tokens stand for."""
        return b"".join(self.bytes_of[token] for token in tokens)


class SharedVocabulary:
    """The tokens that a target and a draft model share.

    to_draft: [V] the draft's id of each of the target's tokens, or -1.
    Raises DrafterMismatch if they share too little.
    """

    def __init__(self, target: Codec, draft: Codec, target_size: int, draft_size: int) -> None:
        self.target, self.size = TokenTable(target, target_size), target_size
        self.draft = TokenTable(draft, draft_size)
        ours, theirs = self.target, self.draft
        shared = {index: theirs.ids[text] for text, index in ours.ids.items() if text in theirs.ids}
        smaller = min(len(target.tokenizer), len(draft.tokenizer))
        if len(shared) < max(1, LEAST_SHARED * smaller):
            raise DrafterMismatch(
                f"the draft model {draft.name} and the target {target.name} share {len(shared)} of "
                f"{smaller} tokens; choose a draft model whose tokenizer is nearer to the target's"
            )
        shared |= {index: theirs.specials[name] for name, index in ours.specials.items()
                  if name in theirs.specials}  # fmt: skip
        if ours.end is not None and theirs.end is not None:     # one meaning, one token
            shared = {index: token for index, token in shared.items() if token != theirs.end}
            shared[ours.end] = theirs.end
        self.specials = {
            token: index for index, token in shared.items() if theirs.is_special(token)
        }
        self.count, self.to_draft = len(shared), torch.full((target_size,), -1, dtype=torch.int64)
        self.to_draft[list(shared)] = torch.tensor([*shared.values()])

    def to(self, device: torch.device) -> SharedVocabulary:
        """Its tensors on this device."""
        self.to_draft = self.to_draft.to(device)
        return self

    def over_target(self, logits: Tensor) -> Tensor:
        """[..., V] draft logits [..., draft V] by the target's ids; -inf for tokens not shared."""
        return logits[..., self.to_draft.clamp(min=0)].masked_fill(self.to_draft < 0, -torch.inf)

    def begin(self, tokens: Sequence[int]) -> list[int]:
        """A prompt in the draft's tokens; special tokens are kept if the draft has them."""
        begins, ids = self.draft.encode(b"", begins=True), list[int]()
        for special, part in groupby(tokens, self.target.is_special):
            if not special:
                ids += self.draft.encode(self.target.bytes_for(part))
            else:
                known = (int(self.to_draft[token]) for token in part)
                ids += [token for token in known if token >= 0]
        return ids if ids[: len(begins)] == begins else [*begins, *ids]

    def follow(self, tokens: Sequence[int]) -> list[int]:
        """New `tokens` of the target in the draft's ids: shared ones one by one, the text in
        between by the draft's tokenizer."""
        ids, between = list[int](), b""
        for token in tokens:
            shared = int(self.to_draft[token])
            if shared >= 0:
                ids += [*self.draft.encode(between), shared]
                between = b""
            elif not self.target.is_special(token):
                between += self.target.bytes_of[token]
        return ids + self.draft.encode(between)

    def back(self, tokens: Sequence[int]) -> list[int]:
        """The draft's tokens, tokenised again for the target, up to the first token not shared."""
        ids = list[int]()
        for special, part in groupby(tokens, self.draft.is_special):
            if not special:
                ids += self.target.encode(self.draft.bytes_for(part))
                continue
            for token in part:
                if token not in self.specials:
                    return ids
                ids.append(self.specials[token])
        return ids
