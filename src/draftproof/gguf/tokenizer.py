"""The tokenizer of a GGUF file, without transformers.

`tokenizer.ggml.model` names the encoding: "gpt2" is byte-level BPE, "llama" is SentencePiece's BPE
with a score per token, and "gemma4" is the same with explicit merges. The ids equal those of the
tokenizer.json that the file was made from.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from draftproof.errors import UnsupportedModel
from draftproof.gguf.file import GGUFFile
from draftproof.gguf.pre_tokenizers import OLDER, splitting

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of tokens (`llama_token_type`)."""
SPACE = "▁"
ENDS = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "<|end_of_text|>", "<end_of_utterance>",
    "<eos>", "<turn|>", "<｜end▁of▁sentence｜>", "[e~[", "<|endofprompt|>", "<|eot|>", "<|eom|>",
})  # fmt: skip
"""Control tokens that end an answer in whichever vocabulary has them. Files name only one or two
of a model's end tokens."""
TOOL_RESPONSE = "<|tool_response>"
"""Gemma 4 stops before what a tool returns; files have it as a token of text."""
INNER = (({"<|return|>", "<|call|>"}, "<|end|>"), ({TOOL_RESPONSE}, "</s>"))
"""Vocabularies, by tokens that they have, in which an end token of others ends no answer: gpt-oss
ends each of an answer's messages with it, and in Gemma 4 it is text."""
_ROLES = {"bos": "bos", "eos": "eos", "eot": "eot", "eom": "eom", "unk": "unknown",
          "pad": "padding"}  # fmt: skip


class GGUFTokenizer(NamedTuple):
    """A tokenizer with its special tokens and templates.

    Attributes:
        tokenizer: The tokenizer that encodes and decodes.
        roles: Token ids by role: "bos", "eos", "eot", "eom", "unk" and "pad", as far as the file
            names them.
        end_tokens: Every token that ends an answer.
        chat_templates: Jinja templates by name; the usual one is "default".
    """

    tokenizer: Tokenizer
    roles: dict[str, int]
    end_tokens: tuple[int, ...]
    chat_templates: dict[str, str]


class _Vocabulary(NamedTuple):
    """A file's description of its tokens."""

    file: GGUFFile
    tokens: list[str]
    types: list[int]
    roles: dict[str, int]


def tokenizer_of(file: GGUFFile, cache: Path | None = None) -> GGUFTokenizer:
    """Build the tokenizer.

    Args:
        file: The file.
        cache: A folder for merges, which take long to derive from scores.

    Raises:
        UnsupportedModel: The kind of tokenizer, or its way of splitting text, is unknown.
        ModelNotFound: The metadata is damaged.
    """
    metadata = file.metadata
    kind = metadata.text("tokenizer.ggml.model", "")
    builder = {"gpt2": _byte_level, "llama": _sentencepiece, "gemma4": _sentencepiece}.get(kind)
    if builder is None:
        raise _unknown(file, f"of the kind {kind!r}" if kind else "missing")
    vocabulary = _vocabulary(file)
    tokenizer, adds_bos = builder(vocabulary, cache)
    _add_special(tokenizer, vocabulary)
    _add_ends(tokenizer, vocabulary, adds_bos)
    return GGUFTokenizer(
        tokenizer, vocabulary.roles, _end_tokens(vocabulary), _templates(file)
    )


def end_tokens(file: GGUFFile) -> tuple[int, ...]:
    """Every token that ends an answer; none for a file without a vocabulary."""
    if "tokenizer.ggml.tokens" not in file.metadata:
        token = file.metadata.integer("tokenizer.ggml.eos_token_id", -1)
        return (token,) if token >= 0 else ()
    return _end_tokens(_vocabulary(file))


def _vocabulary(file: GGUFFile) -> _Vocabulary:
    metadata = file.metadata
    tokens = list(metadata.strings("tokenizer.ggml.tokens"))
    types = metadata.numbers("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    if len(types) < len(tokens):
        raise _unknown(file, f"damaged: {len(tokens)} tokens have {len(types)} types")
    roles = {}
    for role, name in _ROLES.items():
        token = metadata.integer(f"tokenizer.ggml.{name}_token_id", -1)
        if 0 <= token < len(tokens):
            roles[role] = token
    return _Vocabulary(file, tokens, [int(kind) for kind in types[: len(tokens)]], roles)


def _byte_level(vocabulary: _Vocabulary, cache: Path | None) -> tuple[Tokenizer, bool]:
    """Byte-level BPE, and whether it adds a beginning token if the file does not say."""
    file, tokens = vocabulary.file, vocabulary.tokens
    pre = file.metadata.text("tokenizer.ggml.pre", "default")
    if pre == "default":
        pre = OLDER.get(file.architecture, pre)
    split = splitting(pre)
    if split is None:
        raise _unknown(file, f"split by {pre!r} ('tokenizer.ggml.pre')")
    model = _bpe(vocabulary, _stored_merges(file), ignore_merges=split.ignore_merges)
    tokenizer = Tokenizer(model)
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = split.pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    assert len(tokens) >= tokenizer.get_vocab_size()
    return tokenizer, split.adds_bos


def _sentencepiece(vocabulary: _Vocabulary, cache: Path | None) -> tuple[Tokenizer, bool]:
    """SentencePiece's BPE: spaces are letters, and unknown letters become bytes."""
    metadata = vocabulary.file.metadata
    gemma = vocabulary.file.architecture.startswith("gemma")
    tokens = [
        SPACE * len(token) if kind == USER_DEFINED and token and not token.strip(" ") else token
        for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
    ]
    vocabulary = vocabulary._replace(tokens=tokens)
    if "tokenizer.ggml.merges" in metadata:
        merges = _stored_merges(vocabulary.file)
    else:
        merges = _kept_merges(vocabulary, by_position=gemma, cache=cache)
    unknown = vocabulary.roles.get("unk")
    model = _bpe(
        vocabulary, merges, fuse_unk=True, byte_fallback=vocabulary.types.count(BYTE) == 256,
        unk_token=None if unknown is None else tokens[unknown],
    )  # fmt: skip
    tokenizer = Tokenizer(model)
    prefix = metadata.flag("tokenizer.ggml.add_space_prefix", not gemma)
    spaces = normalizers.Replace(" ", SPACE)
    back = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
        tokenizer.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)])
    else:
        tokenizer.normalizer = spaces
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        tokenizer.decoder = decoders.Sequence(back)
    return tokenizer, vocabulary.file.metadata.text("tokenizer.ggml.model") == "llama"


def _bpe(vocabulary: _Vocabulary, merges: Sequence[tuple[str, str]], **options: object) -> BPE:
    """The BPE model; raises one sentence if the merges do not belong to the vocabulary."""
    ids = {token: number for number, token in enumerate(vocabulary.tokens)}
    try:
        return BPE(ids, merges, **options)
    # tokenizers raises no more specific class
    except Exception as error:
        raise _unknown(vocabulary.file, f"damaged ({error})") from error


def _stored_merges(file: GGUFFile) -> list[tuple[str, str]]:
    stored = (merge.partition(" ") for merge in file.metadata.strings("tokenizer.ggml.merges"))
    return [(left, right) for left, _, right in stored]


def _kept_merges(
    vocabulary: _Vocabulary, *, by_position: bool, cache: Path | None
) -> list[tuple[str, str]]:
    """The merges implied by scores, cached in a file since deriving them takes a second."""
    tokens, name = vocabulary.tokens, f"{vocabulary.file.identity()}-merges.npy"
    kept = None if cache is None else cache / name
    if kept is not None:
        with suppress(OSError, ValueError):
            pairs = np.load(kept)
            sound = pairs.dtype == np.int32 and pairs.shape[1:] == (2,)
            if sound and pairs.min() >= 0 and pairs.max() < len(tokens):
                return [(tokens[left], tokens[right]) for left, right in pairs.tolist()]
    merges = list(_implied_merges(vocabulary, by_position))
    if kept is not None and merges:
        with suppress(OSError):
            kept.parent.mkdir(parents=True, exist_ok=True)
            part = kept.with_suffix(f".{os.getpid()}.part.npy")
            np.save(part, np.array(merges, np.int32))
            part.replace(kept)
    return [(tokens[left], tokens[right]) for left, right in merges]


def _implied_merges(vocabulary: _Vocabulary, by_position: bool) -> Iterator[tuple[int, int]]:
    """Pairs of tokens that form another token, best first.

    SentencePiece merges the pair whose result has the highest score. Gemma's files have no scores
    for user-defined tokens, so the order there is that of the vocabulary.
    """
    metadata, tokens = vocabulary.file.metadata, vocabulary.tokens
    scores = metadata.numbers("tokenizer.ggml.scores", [0.0] * len(tokens))
    ids = {token: number for number, token in enumerate(tokens)
           if vocabulary.types[number] in (NORMAL, USER_DEFINED)}
    order = list(ids.values())
    if not by_position:
        order.sort(key=lambda number: -scores[number])
    for number in order:
        token, pairs = tokens[number], []
        for cut in range(1, len(token)):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
            if left is not None and right is not None:
                pairs.append((left, right))
        yield from sorted(pairs)


def _add_special(tokenizer: Tokenizer, vocabulary: _Vocabulary) -> None:
    """Add the tokens that are found in text before it is split."""
    # Phi-3's special tokens include the spaces after them, which files cannot express
    strips = vocabulary.file.architecture == "phi3" and tokenizer.token_to_id("<|end|>") == 32007
    added = []
    for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
        if kind not in (CONTROL, UNKNOWN, USER_DEFINED) or tokenizer.token_to_id(token) is None:
            continue
        special, right = kind != USER_DEFINED, strips and kind == CONTROL and token != "<s>"
        added.append(AddedToken(token, special=special, normalized=False, rstrip=right))
    tokenizer.add_tokens(added)


def _add_ends(tokenizer: Tokenizer, vocabulary: _Vocabulary, adds_bos: bool) -> None:
    """Add beginning and end tokens around a text, where the file asks for them."""
    metadata, roles, tokens = vocabulary.file.metadata, vocabulary.roles, vocabulary.tokens
    # early files of Gemma 4 say no
    always = metadata.text("tokenizer.ggml.model") == "gemma4"
    bos = (always or metadata.flag("tokenizer.ggml.add_bos_token", adds_bos)) and "bos" in roles
    eos = metadata.flag("tokenizer.ggml.add_eos_token", False) and "eos" in roles
    used = [tokens[roles[role]] for role, wanted in (("bos", bos), ("eos", eos)) if wanted]
    first, last = (used[:1] if bos else []), (used[-1:] if eos else [])
    tokenizer.post_processor = TemplateProcessing(
        single=[*first, "$A", *last], pair=[*first, "$A", *last, *first, "$B:1", *last],
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in used],
    )  # fmt: skip


def _end_tokens(vocabulary: _Vocabulary) -> tuple[int, ...]:
    tokens = vocabulary.tokens
    ends = [vocabulary.roles[role] for role in ("eos", "eot", "eom") if role in vocabulary.roles]
    ends += [number for number, (token, kind)
             in enumerate(zip(tokens, vocabulary.types, strict=True))
             if (token in ENDS and kind == CONTROL) or token == TOOL_RESPONSE]  # fmt: skip
    names = {tokens[number] for number in ends}
    inner = [name for sign, name in INNER if sign <= names]
    return tuple(dict.fromkeys(number for number in ends if tokens[number] not in inner))


def _templates(file: GGUFFile) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    templates = {"default": file.metadata.text(prefix, "")}
    for key in file.metadata:
        if key.startswith(f"{prefix}."):
            templates[key.removeprefix(f"{prefix}.")] = file.metadata.text(key)
    return {name: template for name, template in templates.items() if template}


def _unknown(file: GGUFFile, what: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"the tokenizer in {file.path} is {what}, which cannot be read here; give the folder or "
        "hub id of the same model's tokenizer: --tokenizer FOLDER"
    )
