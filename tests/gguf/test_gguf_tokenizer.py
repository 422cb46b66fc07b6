"""Tokenizers read from GGUF files: the ids of the tokenizer that the file was made of."""

from __future__ import annotations

import json
import os
import unicodedata
from pathlib import Path

import gguf_files
import numpy as np
import pytest
import transformers
from gguf_tokenizers import PUBLISHED, TEXTS, as_file, published
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from draftproof.errors import UnsupportedModel
from draftproof.gguf.file import GGUFFile
from draftproof.gguf.tokenizer import end_tokens, tokenizer_of


@pytest.mark.parametrize("pre", PUBLISHED)
def test_byte_level_vocabularies_have_the_ids_of_their_tokenizer_json(
    pre: str, tmp_path: Path
) -> None:
    wanted = published(pre)
    read = tokenizer_of(as_file(wanted, tmp_path / "model.gguf", pre)).tokenizer
    assert read.get_vocab() == wanted.get_vocab()
    for text in TEXTS:
        ids = wanted.encode(text).ids
        assert read.encode(text).ids == ids, text
        back = read.decode(ids, skip_special_tokens=False)
        assert back == (unicodedata.normalize("NFC", text) if pre == "qwen2" else text)


def test_special_tokens_templates_and_ends(tmp_path: Path) -> None:
    chat = {"chat_template": "{{ messages }}", "chat_template.tool_use": "{{ tools }}"}
    file = as_file(
        published("gpt-2"), tmp_path / "model.gguf", "gpt-2", **chat,
        **{"ggml.add_bos_token": True, "ggml.add_eos_token": True}
    )  # fmt: skip
    read = tokenizer_of(file)
    assert read.roles == {"bos": 0, "eos": 1} and read.end_tokens == (1, 0)
    assert read.chat_templates == {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    ids = read.tokenizer.encode("the cat").ids
    assert ids[0] == 0 and ids[-1] == 1
    plain = read.tokenizer.encode("the cat", add_special_tokens=False).ids
    assert ids[1:-1] == plain
    text = "a <|end|> b <think> c"
    ids = read.tokenizer.encode(text, add_special_tokens=False).ids
    assert read.tokenizer.decode(ids) == "a  b <think> c"


def test_unknown_pre_tokenizers_are_refused_with_a_remedy(tmp_path: Path) -> None:
    tokenizer = published("gpt-2")
    for pre in ("brand-new", ""):
        file = as_file(tokenizer, tmp_path / f"{pre}model.gguf", pre)
        with pytest.raises(UnsupportedModel, match=r"split by .* --tokenizer FOLDER"):
            tokenizer_of(file)
    file = as_file(tokenizer, tmp_path / "bert.gguf", "x", **{"ggml.model": "bert"})
    with pytest.raises(UnsupportedModel, match=r"of the kind 'bert', .* --tokenizer FOLDER"):
        tokenizer_of(file)


@pytest.mark.parametrize(("special", "ends"), [
    ({"<|return|>": 3, "<|end|>": 3, "<|call|>": 3}, ["<|return|>", "<|call|>"]),
    ({"<|end|>": 3, "<|endoftext|>": 3}, ["<|end|>", "<|endoftext|>"]),
    ({"<eos>": 3, "<turn|>": 3, "<|tool_response>": 4, "</s>": 3},
     ["<eos>", "<turn|>", "<|tool_response>"]),
    ({"<eos>": 3, "</s>": 1, "<|end|>": 4}, ["<eos>"]),         # text that looks like an end
    ({"<|end_of_text|>": 3, "<|eom|>": 3, "<|eot|>": 3}, ["<|end_of_text|>", "<|eom|>", "<|eot|>"]),
])  # fmt: skip
def test_answers_end_where_the_publishers_say(
    special: dict[str, int], ends: list[str], tmp_path: Path
) -> None:
    """gpt-oss ends its messages, of which an answer has several; Gemma 4 waits for tools."""
    tokens = [*special, "a", "b"]
    values = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eos_token_id": 0,
              "tokenizer.ggml.token_type": [*special.values(), 1, 1]}  # fmt: skip
    gguf_files.write(tmp_path / "model.gguf", {"x": np.ones(32)}, values)
    read = end_tokens(GGUFFile.open(tmp_path / "model.gguf"))
    assert sorted(tokens[token] for token in read) == sorted(ends)


def test_an_answer_ends_at_every_token_that_the_file_names_as_an_end(tmp_path: Path) -> None:
    roles = {f"tokenizer.ggml.{role}_token_id": number
             for number, role in enumerate(("eos", "eot", "eom"))}
    values = {"tokenizer.ggml.tokens": ["x", "y", "z", "a"], **roles,
              "tokenizer.ggml.token_type": [1, 1, 1, 1]}  # fmt: skip
    gguf_files.write(tmp_path / "model.gguf", {"x": np.ones(32)}, values)
    assert sorted(end_tokens(GGUFFile.open(tmp_path / "model.gguf"))) == [0, 1, 2]


@pytest.mark.parametrize("says", [True, False])
def test_gemma4_vocabularies_have_the_ids_of_their_tokenizer(says: bool, tmp_path: Path) -> None:
    """Early files deny the beginning token that Gemma 4 always has."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<turn|>"]
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    trained.train_from_iterator(TEXTS[:4] * 3, trainers.BpeTrainer(
        vocab_size=140, show_progress=False, special_tokens=special))  # fmt: skip
    vocab = sorted(trained.get_vocab(), key=trained.get_vocab().__getitem__)
    tokens = [*vocab, *(f"<0x{byte:02X}>" for byte in range(256))]
    pairs = [tuple(pair) for pair in json.loads(trained.to_str())["model"]["merges"]]
    ids = {token: number for number, token in enumerate(tokens)}
    wanted = transformers.GemmaTokenizer(ids, pairs, extra_special_tokens={"end": "<turn|>"})
    values = {
        "tokenizer.ggml.model": "gemma4", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in pairs],
        "tokenizer.ggml.token_type": [3] * 6 + [1] * (len(vocab) - 6) + [6] * 256,
        "tokenizer.ggml.bos_token_id": 2, "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3, "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": says,
    }  # fmt: skip
    gguf_files.write(tmp_path / "model.gguf", {"x": np.ones(32)}, values, "gemma4")
    read = tokenizer_of(GGUFFile.open(tmp_path / "model.gguf")).tokenizer
    for text in [*TEXTS, "one\n\n\n two<turn|>\n  three"]:
        plain = list(wanted(text, add_special_tokens=False).input_ids)
        assert read.encode(text).ids == [2, *plain], text
        assert read.decode(plain, skip_special_tokens=False) == text


def sentencepiece(text: str, scores: dict[str, float], prefix: bool) -> list[str]:
    """The rule of SentencePiece, one merge after another: the best score first, then the left."""
    text = ("▁" if prefix and text else "") + text.replace(" ", "▁")
    pieces = list(text)
    while True:
        pairs = [(-scores[pieces[at] + pieces[at + 1]], at) for at in range(len(pieces) - 1)
                 if pieces[at] + pieces[at + 1] in scores]
        if not pairs:
            break
        at = min(pairs)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    return [part for piece in pieces for part in (
        [piece] if piece in scores else [f"<0x{byte:02X}>" for byte in piece.encode()]
    )]  # fmt: skip


@pytest.mark.parametrize("prefix", [True, False])
def test_vocabularies_with_scores_merge_as_sentencepiece_does(
    prefix: bool, tmp_path: Path
) -> None:
    words = ["the", "▁the", "▁cat", "at", "▁c", "he", "th", "▁t", "ca", "▁s", "sat", "▁sat", "▁▁"]
    letters = sorted(set("".join(text for text in TEXTS[:3])) - {" "} | {"▁"})
    pieces = words + letters
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    chance = np.random.default_rng(2)
    scores = [0.0] * 259 + list(chance.permutation(len(pieces)) * -1.0)
    types = [2, 3, 3] + [6] * 256 + [1] * len(pieces)
    values = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [float(score) for score in scores],
        "tokenizer.ggml.token_type": types, "tokenizer.ggml.add_space_prefix": prefix,
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }  # fmt: skip
    gguf_files.write(tmp_path / "model.gguf", {"x": np.ones(32)}, values)
    file = GGUFFile.open(tmp_path / "model.gguf")
    by_piece = dict(zip(pieces, scores[259:], strict=True))
    for _ in range(2):                              # derived, and then read from the cache
        read = tokenizer_of(file, tmp_path / "cache").tokenizer
        for text in TEXTS[:12]:
            assert read.encode(text).tokens == ["<s>", *sentencepiece(text, by_piece, prefix)]
            assert read.decode([0, *read.encode(text).ids]) == text     # <unk> is not shown
    assert len(list((tmp_path / "cache").iterdir())) == 1
    for kept in (tmp_path / "cache").iterdir():     # damaged: derived again
        kept.write_bytes(b"damaged")
    again = tokenizer_of(file, tmp_path / "cache").tokenizer
    assert again.encode("the cat").ids == read.encode("the cat").ids
    for pairs in (np.zeros((3, 2)), np.zeros((3, 3), np.int32), np.full((3, 2), -1, np.int32),
                  np.full((3, 2), len(tokens), np.int32)):
        np.save(kept, pairs)                        # of another kind: derived again
        again = tokenizer_of(file, tmp_path / "cache").tokenizer
        assert again.encode("the cat").ids == read.encode("the cat").ids


@pytest.mark.parametrize(("architecture", "space"), [
    ("llama", [3]), ("gemma", []), ("gemma2", []), ("gemma3", []),
])  # fmt: skip
def test_texts_of_gemma_do_not_begin_with_a_space(
    architecture: str, space: list[int], tmp_path: Path
) -> None:
    """Nor do their files always say so; those of Llama begin with one unless they deny it."""
    tokens = ["<unk>", "<s>", "</s>", "▁", "a", "b"]
    values = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * len(tokens),
        "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1],
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.unknown_token_id": 0,
    }  # fmt: skip
    path = gguf_files.write(tmp_path / "model.gguf", {"x": np.ones(32)}, values, architecture)
    read = tokenizer_of(GGUFFile.open(path)).tokenizer
    assert read.encode("a b").ids == [1, *space, 4, 3, 5]
    assert read.decode([*space, 4, 3, 5]) == "a b"


def test_special_tokens_of_phi3_include_the_spaces_after_them(tmp_path: Path) -> None:
    """All but that of the beginning. Files cannot say so; the id of `<|end|>` identifies them."""
    letters = ["▁", "a", "b"]
    tokens = ["<unk>", "<s>", "</s>", *letters, *(f"<unused{i}>" for i in range(6, 32007)),
              "<|end|>"]
    values = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * len(tokens),
        "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1] + [5] * 32001 + [3],
        "tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 0,
    }  # fmt: skip
    space, a, b = 3, 4, 5
    for architecture, spaces in (("phi3", []), ("llama", [space])):
        path = gguf_files.write(tmp_path / "model.gguf", {"x": np.ones(32)}, values, architecture)
        read = tokenizer_of(GGUFFile.open(path)).tokenizer
        ids = read.encode("<s> a<|end|> b", add_special_tokens=False).ids
        assert ids == [1, space, a, 32007, *spaces, b]


@pytest.mark.parametrize("name", ["qwen-coder-0.5b", "gemma-3-270m"])
def test_real_files_have_the_ids_of_their_folders(name: str) -> None:
    root = Path(os.environ.get("REAL_MODELS", "no such folder"))
    if not (root / name).is_dir():
        pytest.skip("needs REAL_MODELS, a folder of models and GGUF files")
    from transformers import AutoTokenizer

    read = tokenizer_of(GGUFFile.open(root / f"{name}.gguf")).tokenizer
    folder = AutoTokenizer.from_pretrained(root / name)
    for text in TEXTS:
        assert read.encode(text).ids == list(folder(text).input_ids), text
