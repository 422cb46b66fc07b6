"""Log-probabilities of tokens that are parts of a character: their bytes, names and places."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

import draftproof as dp
from draftproof.requests.request import Request, Update
from draftproof.server import schema
from draftproof.server.answer import Answer

TEXT = "A 🦜 and 東京."


def answer(server: Any, prompt: Any, chat: bool = False) -> Answer:
    body: Any = schema.Chat(messages=[]) if chat else schema.Completion(prompt="x")
    sampling = dp.Sampling(logprobs=True, top_logprobs=2)
    requests = server.engine.requests.read(prompt, 8, sampling, 1)
    return Answer(server.first, body, requests, [])


def progress(tokens: list[int], others: list[int]) -> Update:
    likely = [[(token, -0.1), (other, -2.0)] for token, other in zip(tokens, others, strict=True)]
    return Update(Request([]), 0, [], tokens, [-0.1] * len(tokens), likely, None, None)


def test_token_bytes_join_to_the_text(server: Any) -> None:
    tokens = server.engine.codec.encode(TEXT, special=False)
    told = answer(server, "Once", chat=True)._scores(progress(tokens, tokens))["content"]
    assert b"".join(bytes(place["bytes"]) for place in told) == TEXT.encode()
    for place in told:
        data = bytes(place["bytes"])
        whole = data.decode(errors="ignore").encode() == data
        assert place["token"] == data.decode() if whole else place["token"].startswith("bytes:")
    assert any(place["token"] == "bytes:\\xf0" for place in told)


@pytest.mark.parametrize("size", [1, 2, 5, 99])
def test_offsets_are_places_in_the_text_however_it_is_cut(server: Any, size: int) -> None:
    codec = server.engine.codec
    tokens, shown, streamed = codec.encode(TEXT, special=False), list[int](), answer(server, "Once")
    for start in range(0, len(tokens), size):
        part = tokens[start : start + size]
        shown += streamed._scores(progress(part, part))["text_offset"]
    data = [codec.token_bytes[token] for token in tokens]
    assert shown == [len(b"".join(data[:place]).decode(errors="ignore"))
                     for place in range(len(data))]
    assert all(offset <= other for offset, other in pairwise(shown)) and shown[-1] == len(TEXT) - 1


def test_top_logprobs_have_distinct_token_names(server: Any) -> None:
    """Each place names as many tokens as were asked for, parts of characters too."""
    tokens = server.engine.codec.encode("🦜🦊東", special=False)
    told = answer(server, "Once")._scores(progress(tokens[:-1], tokens[1:]))["top_logprobs"]
    for place, token, other in zip(told, tokens[:-1], tokens[1:], strict=True):
        assert len(place) == len({token, other})


def test_a_prompt_that_ends_inside_a_character(server: Any) -> None:
    """The first token completes it: the answer begins with that character."""
    tokens = server.engine.codec.encode("Hi 🦜 a", special=False)
    cut = next(place for place in range(len(tokens), 0, -1)
               if server.engine.codec.token_bytes[tokens[place - 1]] == b"\x9f")
    rest = tokens[cut:]
    offsets = answer(server, [tokens[:cut]])._scores(progress(rest, rest))["text_offset"]
    assert offsets[0] == 0 and offsets[-1] >= 1 and len(set(offsets)) <= len(" a") + 1


def test_special_tokens_have_no_room_in_offsets(server: Any) -> None:
    """They are not in the text, so what follows them begins where they do."""
    codec = server.engine.codec
    before, after = (codec.encode(text, special=False) for text in ("A cat", " sat"))
    tokens = [*before, next(iter(codec.special_tokens)), *after]
    offsets = answer(server, "Once")._scores(progress(tokens, tokens))["text_offset"]
    assert offsets[len(before)] == offsets[len(before) + 1] == len("A cat")
