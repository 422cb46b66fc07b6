"""Two tiny tokenizers of different kinds, and models of their vocabularies."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from tiny import target
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from draftproof.drafters.draft_vocabulary import SharedVocabulary
from draftproof.tokenizer.codec import Codec

LETTERS = "abcdefghijklmnopqrstuvwxyz"
PAIRS = ["th", "he", "in", "er", "an", "re", "on", "at"]
OURS = ["<end>", "<user>", "é", *LETTERS, *PAIRS, "Ġ", "<s>"]
THEIRS = ["<s>", "▁", *reversed(LETTERS), "<eos>", "<user>"]
THEIRS += ["th", "he", "▁t", "▁a", "ing", "<0x61>"]


def codec(tokens: list[str], end: str, *specials: str, first: str | None = None) -> Codec:
    """Byte-level tokens if "Ġ" is one of them, else SentencePiece's."""
    level = "Ġ" in tokens
    plain = [token for token in tokens if token not in (end, *specials)]
    ids = {token: place for place, token in enumerate(tokens)}
    merges = [(each[:-1], each[-1]) for each in plain if len(each) > 1 and each[:-1] in ids]
    item = Tokenizer(models.BPE(ids, [pair for pair in merges if pair[1] in ids], unk_token=None))
    item.pre_tokenizer = (pre_tokenizers.ByteLevel(add_prefix_space=False) if level
                         else pre_tokenizers.Metaspace())
    item.decoder = decoders.ByteLevel() if level else decoders.Metaspace()
    extra = {"bos_token": first} if first else {}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=item, eos_token=end,
                                      additional_special_tokens=list(specials), **extra)
    return Codec(wrapped, "ours" if level else "theirs")


@lru_cache(maxsize=1)
def shared() -> SharedVocabulary:
    ours, theirs = codec(OURS, "<end>", "<user>", "<s>"), codec(THEIRS, "<eos>", "<user>", "<s>")
    return SharedVocabulary(ours, theirs, len(OURS) + 2, len(THEIRS))


def pair(**options: Any) -> tuple[Any, Any]:
    return target(vocab_size=len(OURS) + 2), target(seed=1, vocab_size=len(THEIRS),
                                                    num_hidden_layers=1, **options)


def five() -> tuple[SharedVocabulary, int]:
    """Five tokens of a target, of which a draft of seven has four, one of them twice."""
    theirs = ["▁", "a", "b", "<0x61>", "<eos>", "z", "y"]
    ours = codec(["Ġ", "a", "b", "c", "<end>"], "<end>")
    return SharedVocabulary(ours, codec(theirs, "<eos>"), 5, 7), 7
