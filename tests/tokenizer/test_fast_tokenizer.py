"""The tokenizer that starts without transformers agrees with the one made from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf_tokenizers import TEXTS, as_file, published

from draftproof.gguf.file import GGUFFile
from draftproof.gguf.tokenizer import tokenizer_of
from draftproof.tokenizer.codec import Codec
from draftproof.tokenizer.fast_tokenizer import FastTokenizer

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> FastTokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "model.gguf"
    metadata: dict[str, Any] = {"ggml.add_bos_token": True, "chat_template": TEMPLATE}
    file = as_file(published("qwen2"), path, "qwen2", **metadata)
    return FastTokenizer(tokenizer_of(GGUFFile.open(file.path)), str(path))


def test_it_agrees_with_transformers(tokenizer: FastTokenizer) -> None:
    full = tokenizer.transformers
    for text in TEXTS:
        for special in (True, False):
            ids = tokenizer(text, add_special_tokens=special).input_ids
            assert ids == list(full(text, add_special_tokens=special).input_ids)
            assert ids == tokenizer(text, add_special_tokens=special)["input_ids"]
            for skip in (True, False):
                assert tokenizer.decode(ids, skip_special_tokens=skip) == full.decode(
                    ids, skip_special_tokens=skip
                )
    assert tokenizer.get_vocab() == full.get_vocab() and len(tokenizer) == len(full)
    assert tokenizer.get_added_vocab() == full.get_added_vocab()
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (full.bos_token_id,
                                                                full.eos_token_id)  # fmt: skip
    assert set(full.all_special_ids) <= set(tokenizer.all_special_ids)


def test_it_serves_as_a_codec(tokenizer: FastTokenizer) -> None:
    codec = Codec(tokenizer)  # type: ignore[arg-type]
    ids = codec.encode("the cat sat on the mat")
    assert ids[0] == tokenizer.bos_token_id
    stream = codec.stream(ids[:3])
    text = "".join([*map(stream.push, ids[3:]), stream.finish()])
    assert text and "the cat sat on the mat".endswith(text)
    assert set(codec.special_tokens.values()) == {"<|endoftext|>", "<|end|>"}
    chat = codec.encode_chat([{"role": "user", "content": "the cat"}])
    assert tokenizer.decode(chat) == "<|user|>the cat<|end|><|assistant|>"


@pytest.mark.parametrize("options", [{}, {"documents": [{"title": "mats", "text": "cats sit"}]}])
def test_documents_reach_the_template_as_through_transformers(
    options: dict[str, Any], tmp_path: Path
) -> None:
    template = ("{% for d in documents or [] %}{{ d.title }}: {{ d.text }}\n{% endfor %}"
                "{{ messages[-1].content }}")
    path = tmp_path / "model.gguf"
    file = as_file(published("qwen2"), path, "qwen2", chat_template=template)
    tokenizer = FastTokenizer(tokenizer_of(file), str(path))
    messages = [{"role": "user", "content": "the cat"}]
    codec, full = Codec(tokenizer), Codec(tokenizer.transformers)  # type: ignore[arg-type]
    text = codec.chat_text(messages, options=options)
    assert text == ("mats: cats sit\nthe cat" if options else "the cat")
    assert text == full.chat_text(messages, options=options)


def test_a_template_for_tools_is_used_where_tools_are_offered(tmp_path: Path) -> None:
    templates = {"chat_template": "plain", "chat_template.tool_use": "{{ tools[0].function.name }}"}
    path = tmp_path / "model.gguf"
    file = as_file(published("qwen2"), path, "qwen2", **templates)
    tokenizer = FastTokenizer(tokenizer_of(file), str(path))
    messages = [{"role": "user", "content": "the cat"}]
    tool = {"type": "function", "function": {"name": "stroke", "parameters": {}}}
    for each in (tokenizer, tokenizer.transformers):
        codec = Codec(each)  # type: ignore[arg-type]
        assert codec.chat_text(messages) == "plain"
        assert codec.chat_text(messages, [tool]) == "stroke"


def test_offsets_and_other_outputs_match_transformers(tokenizer: FastTokenizer) -> None:
    out = tokenizer("the cat", add_special_tokens=False, return_offsets_mapping=True)
    assert out["offset_mapping"][-1][1] == len("the cat")
    assert tokenizer.convert_ids_to_tokens([0]) == ["<|endoftext|>"]
    with pytest.raises(AttributeError):
        _ = tokenizer.no_such_thing
