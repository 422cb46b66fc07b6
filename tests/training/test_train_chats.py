"""Which tokens of a chat the assistant said, to the token, whatever the template does."""

from __future__ import annotations

import copy

import pytest

from draftproof import embedded
from draftproof.errors import BadInput
from draftproof.model.loading import load_tokenizer
from draftproof.model.tokenizer import Codec
from draftproof.training.chats import marked_chats, question

PLAIN = """{% for m in messages %}<{{ m.role }}>
{{ m.content }}<end>
{% endfor %}{% if add_generation_prompt %}<assistant>
{% endif %}"""
MARKED = """{% for m in messages %}<{{ m.role }}>
{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<end>
{% endgeneration %}{% else %}{{ m.content }}<end>
{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>
{% endif %}"""
FORGETFUL = """{% for m in messages %}<{{ m.role }}>
{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('|')[-1] }}{% else %}{{ m.content }}{% endif %}<end>
{% endfor %}{% if add_generation_prompt %}<assistant>
{% endif %}"""

CHAT = (
    ("system", "Be kind."), ("user", "Who are you?"), ("assistant", "hm|A dog."), ("user", "Really?"), ("assistant", "so|Yes!"),
)  # fmt: skip


def codec(template: str | None) -> Codec:
    tokenizer = copy.deepcopy(load_tokenizer(embedded("demo")))
    assert tokenizer is not None
    tokenizer.chat_template = template
    return Codec(tokenizer)


def said(template: str) -> list[str]:
    """The text of the tokens that count, per training text."""
    speaker = codec(template)
    texts = []
    for tokens, counts in marked_chats(speaker, CHAT):
        texts.append(str(speaker.tokenizer.decode([token for token, count in zip(tokens, counts, strict=True) if count])))
    return texts


def test_the_assistants_words_count_and_no_others() -> None:
    assert said(PLAIN) == ["hm|A dog.<end>\nso|Yes!<end>\n"]


def test_generation_marks_and_prefixes_agree() -> None:
    assert marked_chats(codec(PLAIN), CHAT) == marked_chats(codec(MARKED), CHAT)


def test_a_template_that_forgets_gives_one_text_per_answer() -> None:
    assert said(FORGETFUL) == ["hm|A dog.<end>\n", "so|Yes!<end>\n"]
    first, second = marked_chats(codec(FORGETFUL), CHAT)
    decode = codec(FORGETFUL).tokenizer.decode
    assert "hm" not in decode(second.tokens) and "hm" in decode(first.tokens)


@pytest.mark.parametrize("template", [PLAIN, MARKED, FORGETFUL])
def test_an_answer_follows_on_what_the_model_is_asked_with(template: str) -> None:
    """Training sees the very tokens decoding sees."""
    speaker = codec(template)
    asked = question(speaker, CHAT[:2])
    tokens, counts = marked_chats(speaker, CHAT[:3])[0]
    assert tokens[: len(asked)] == asked and not any(counts[: len(asked)]) and all(counts[len(asked) :])


def test_a_chat_without_a_template_is_one_sentence() -> None:
    with pytest.raises(BadInput, match="chat template"):
        marked_chats(codec(None), CHAT)
