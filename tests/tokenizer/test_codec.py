"""Text from tokens one at a time: the pieces join to what the tokenizer decodes, whatever the
tokens."""

from __future__ import annotations

import random
from functools import lru_cache

import pytest
from tiny import shared
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from draftproof.errors import BadInput
from draftproof.model.loading import embedded, load_tokenizer
from draftproof.tokenizer.codec import Codec
from draftproof.tokenizer.token_bytes import TokenBytes

NAMES = [
    "embedded", "tokenizers/gpt2", "tokenizers/qwen2", "models/tinystories-bitnet-3m",
    "models/slm-4096-gpt2"
]
TEXTS = [
    "Once upon a time, there was a cat.",
    "naïve façade — “quotes” …", "日本語のテキストと中文字符，混在。",
    "👩‍👩‍👧‍👦 family 🏳️‍🌈 flag 🇩🇪🇯🇵", "  leading, and   runs of spaces  ", "line\nline\n\n\ttab\r\n",
    "مرحبا بالعالم שלום", "e\u0301 combining \u200d joiners \ufeff", "x = [1,2,3] # code()",
    "don't, won't ; it ' s . ok !"
]


@lru_cache
def codec(name: str) -> Codec:
    tokenizer = load_tokenizer(embedded("demo") if name == "embedded" else shared(*name.split("/")))
    assert tokenizer is not None
    return Codec(tokenizer)


def decoded(item: Codec, prompt: list[int], tokens: list[int]) -> str:
    """What `tokens` add to the text of `prompt`."""

    def decode(ids: list[int]) -> str:
        return str(
            item.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

    return decode([*prompt, *tokens])[len(decode(prompt)) :]


def streamed(item: Codec, prompt: list[int], tokens: list[int]) -> str:
    stream = item.stream(prompt)
    return "".join([stream.push(token) for token in tokens]) + stream.finish()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_decoded_text(name: str, text: str) -> None:
    """Split anywhere between prompt and answer where a character ends."""
    tokenizer = codec(name)
    ids = tokenizer.encode(text)
    for cut in range(1, len(ids)):
        if "\ufffd" in tokenizer.tokenizer.decode(ids[:cut]):
            continue  # a prompt that ends inside a character has a test of its own, below
        assert streamed(tokenizer, ids[:cut], ids[cut:]) == decoded(tokenizer, ids[:cut], ids[cut:])


@pytest.mark.parametrize("name", NAMES)
def test_random_tokens_join_to_the_decoded_text(name: str) -> None:
    """Models say anything: special tokens, broken bytes, halves of characters. What was said is
    never taken back.

    With byte fallback a stray byte turns the finished characters before it into replacement
    characters; a stream has said them by then, and they stand.
    """
    tokenizer, dice, unmade = codec(name), random.Random(0), 0
    prompt = tokenizer.encode("Once upon a time")
    for _ in range(150):
        tokens = [dice.randrange(len(tokenizer.tokenizer)) for _ in range(dice.randrange(1, 14))]
        whole, result = decoded(tokenizer, prompt, tokens), streamed(tokenizer, prompt, tokens)
        parts = [decoded(tokenizer, prompt, tokens[:size]) for size in range(len(tokens))]
        if all(whole.startswith(part) for part in parts if not part.endswith("\ufffd")):
            assert result == whole, tokens
        else:
            unmade += 1
            assert result.replace("\ufffd", "").endswith(whole.rpartition("\ufffd")[2])
    assert unmade < 60


@pytest.mark.parametrize("name", NAMES)
def test_pieces_contain_whole_characters_only(name: str) -> None:
    """While a character is incomplete nothing is said; if it stays so, it ends as the replacement
    character."""
    tokenizer = codec(name)
    prompt, ids = tokenizer.encode("Hi"), tokenizer.encode("Hi 👩‍👩‍👧‍👦 日本")
    stream, text = tokenizer.stream(prompt), ""
    for token in ids[len(prompt) :]:
        piece = stream.push(token)
        assert "\ufffd" not in piece
        text += piece
    assert decoded(tokenizer, prompt, ids[len(prompt) :]).startswith(text)


@pytest.mark.parametrize("name", ["embedded", "tokenizers/gpt2", "models/tinystories-bitnet-3m"])
def test_a_text_or_a_prompt_that_ends_inside_a_character(name: str) -> None:
    """Given as tokens, a prompt may stop in the middle of an emoji; what follows is not cut short.
    """
    tokenizer = codec(name)
    prompt, emoji, fox = (tokenizer.encode(text) for text in ("Hi", "Hi 🦊", "Hi 🦊 fox"))
    for cut in range(len(prompt) + 1, len(emoji)):
        tokens = emoji[len(prompt) : cut]
        assert streamed(tokenizer, prompt, tokens) == decoded(tokenizer, prompt, tokens)
    for cut in range(1, len(fox) - 3):
        assert streamed(tokenizer, fox[:cut], fox[cut:]).endswith(" fox")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", ["I love 🦜 too", "said: ありがとう。", "sat — “so”", "🏳️‍🌈"])
def test_the_words_of_a_prompt_that_ends_inside_a_character_are_not_said_again(
    name: str, text: str
) -> None:
    """The answer begins with the character that was cut; where that stays broken, after it."""
    codec_, cuts = codec(name), 0
    ids, table = codec_.encode(text, special=False), TokenBytes(codec_.tokenizer)
    data = [table[token] for token in ids]
    (stray,) = codec_.encode("a", special=False)[-1:]
    for cut in range(1, len(ids)):
        head = str(codec_.tokenizer.decode(ids[:cut], skip_special_tokens=True))
        if head.endswith("\ufffd"):
            cuts += 1
            complete = b"".join(data[:cut]).decode(errors="ignore").encode()
            wanted = b"".join(data)[len(complete) :].decode()
            assert streamed(codec_, ids[:cut], ids[cut:]) == wanted
            assert streamed(codec_, ids[:cut], [stray]).strip("\ufffd ") == "a"
            assert streamed(codec_, ids[:cut], []) == ""
    assert cuts or name != "embedded"


def test_a_prompt_that_ends_inside_a_character_takes_no_later_space() -> None:
    """Tokens such as "Ġð" are a space and the beginning of an emoji: only that space was there."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġð"]
    ids = {token: number for number, token in enumerate(tokens)}
    made = Tokenizer(models.BPE(ids, [("Ġ", "ð")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    spaced = Codec(PreTrainedTokenizerFast(tokenizer_object=made))
    text = spaced.encode("a 🦜 b 🦜 c")
    assert text[1] == ids["Ġð"]
    assert streamed(spaced, text[:2], text[2:]) == "🦜 b 🦜 c"


def test_the_first_word_keeps_its_space_and_a_long_prompt_says_the_same() -> None:
    """SentencePiece decodes a lone word without its leading space; after a prompt the space is
    there."""
    tokenizer = codec("models/tinystories-bitnet-3m")
    prompt, ids = tokenizer.encode("Once upon"), tokenizer.encode("Once upon a time")
    assert streamed(tokenizer, prompt, ids[len(prompt) :]) == " a time"
    assert streamed(tokenizer, prompt * 200, ids[len(prompt) :]) == " a time"


def test_codecs_know_their_own_ids() -> None:
    assert codec("embedded").same_ids(codec("embedded"))
    if shared("tokenizers", "gpt2"):
        assert not codec("embedded").same_ids(codec("tokenizers/gpt2"))
        assert not codec("tokenizers/gpt2").same_ids(codec("tokenizers/qwen2"))


def test_chats_need_a_template() -> None:
    with pytest.raises(BadInput, match="chat template"):
        codec("tokenizers/gpt2").encode_chat([{"role": "user", "content": "Hi"}])
    qwen = codec("tokenizers/qwen2")
    text = qwen.tokenizer.decode(qwen.encode_chat([{"role": "user", "content": "Hi"}]))
    assert text.endswith("<|im_start|>assistant\n") and "Hi" in text
