"""Starting without transformers: tokenizers, chat templates and defaults are what it gives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny import fresh, shared
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from draftproof.core.params import Sampling
from draftproof.model.generation_defaults import default_sampling
from draftproof.model.generation_file import native_defaults
from draftproof.model.loading import load_tokenizer
from draftproof.native.kernels import kernels
from draftproof.tokenizer.chat_template import render
from draftproof.tokenizer.folder_tokenizer import FolderTokenizer, folder_tokenizer, state_of

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße <b>\n 12"},
    {"role": "assistant", "content": None, "reasoning": "hm",
     "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1, "y": "é"}}}]},
    {"role": "tool", "content": "3"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<d> é", "parameters": {}}}]
TEMPLATES = {
    "loops": "{% for m in messages %}\n  {% if m.role == 'tool' %}{% continue %}{% endif %}\n"
             "{{ bos_token }}{{ m['role'] }}: {{ m.content }}{{ eos_token }}\n{% endfor %}\n"
             "{% if add_generation_prompt %}assistant:{% endif %}",
    "json": "{{ tools | tojson }}{{ tools | tojson(indent=2) }}{{ messages | tojson }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
                  "{% endfor %}",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}{{ m.thinking }}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
                 "{% endfor %}{{ ns.n }}{{ dict(a=1) }}{{ messages[2].content is defined }}",
    "year": "{{ strftime_now('%Y') }}",
}


def tokenizer(folder: Path, template: str | None = None) -> PreTrainedTokenizerFast:
    """A small byte-level tokenizer, saved in a folder."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate([*letters, "he", "<s>", "</s>"])}
    backend = Tokenizer(models.BPE(vocab, [("h", "e")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    made.chat_template = template
    made.save_pretrained(folder)
    return made


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_template_renders_as_in_transformers(name: str, tmp_path: Path) -> None:
    theirs = tokenizer(tmp_path, TEMPLATES[name])
    for tools in (None, TOOLS):
        wanted = theirs.apply_chat_template(
            MESSAGES, tools=tools, tokenize=False, add_generation_prompt=True
        )
        values = {**theirs.special_tokens_map, "add_generation_prompt": True}
        assert render(TEMPLATES[name], MESSAGES, tools, **values) == wanted


@pytest.mark.parametrize("template", [
    "{{ raise_exception('no') }}", "{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}",
    "{% set ns = namespace(__init__=1) %}",
])  # fmt: skip
def test_chat_templates_are_sandboxed(template: str) -> None:
    with pytest.raises(Exception, match=r"no|immutable|unsafe|cannot store"):
        render(template, MESSAGES, None)


@pytest.mark.parametrize("mine", [None, "qwen2", "gpt2"])
def test_cached_tokenizer_equals_the_one_built_by_transformers(
    mine: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path if mine is None else shared("tokenizers", mine)
    if mine is None:
        tokenizer(tmp_path, TEMPLATES["loops"])
    monkeypatch.setenv("DRAFTPROOF_CACHE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    theirs = AutoTokenizer.from_pretrained(folder)
    folder_tokenizer(str(folder), lambda: theirs)
    ours = folder_tokenizer(str(folder), lambda: theirs)
    assert isinstance(ours, FolderTokenizer)
    for text in ("he said: Grüße, e\u0301 </s> 12  34\n", "", "<|im_end|>x", "def f():\n\treturn"):
        for special in (True, False):
            ids = theirs(text, add_special_tokens=special).input_ids
            assert ours(text, add_special_tokens=special).input_ids == ids
            assert ours.decode(ids, skip_special_tokens=special) == theirs.decode(
                ids, skip_special_tokens=special, clean_up_tokenization_spaces=False)
    assert ours.get_vocab() == theirs.get_vocab() and len(ours) == len(theirs)
    assert ours.all_special_ids == theirs.all_special_ids
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.added_tokens_decoder.keys() == theirs.added_tokens_decoder.keys()
    assert ours.special_tokens_map == dict(theirs.special_tokens_map)
    assert ours.transformers is theirs and state_of(theirs) is not None


def test_a_cached_tokenizer_neither_cuts_nor_pads_a_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some files have the lengths of their training; transformers applies them only on request."""
    plain, file = tokenizer(tmp_path), str(tmp_path / "tokenizer.json")
    stored = Tokenizer.from_file(file)
    stored.enable_truncation(4)
    stored.enable_padding(length=9)
    stored.save(file)
    monkeypatch.setenv("DRAFTPROOF_CACHE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for kind in (PreTrainedTokenizerFast, FolderTokenizer):
        ours = folder_tokenizer(str(tmp_path), lambda: AutoTokenizer.from_pretrained(tmp_path))
        assert isinstance(ours, kind)
        for text in ("a", "longer than four tokens"):
            assert ours(text).input_ids == plain(text).input_ids


@pytest.mark.parametrize("settings", [
    {"eos_token_id": [2, 3]}, {"do_sample": True, "eos_token_id": 1}, {"temperature": 0.3},
    {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1},
    {"do_sample": True, "top_k": 0, "num_beams": 4}, {"suppress_tokens": [3]}, {},
    {"max_new_tokens": 7, "pad_token_id": 0}, {"do_sample": False, "top_p": 0.5},
])  # fmt: skip
def test_the_defaults_of_a_folder_are_those_transformers_gives(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    class Model:
        class config:
            name_or_path, eos_token_id = str(tmp_path), 5

        generation_config: Any = None

    model: Any = Model()
    assert native_defaults(model) == (Sampling(), (5,))
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    model.generation_config = GenerationConfig.from_pretrained(tmp_path)
    wanted = default_sampling(model)
    ours, ends = native_defaults(model)
    assert [rule.name for rule in ours.logits_rules] == [rule.name for rule in wanted.logits_rules]
    asked = {**vars(ours), "logits_rules": ()}
    assert asked == {**vars(wanted), "logits_rules": ()}
    token = settings.get("eos_token_id")
    assert ends == (() if token is None else tuple(token) if isinstance(token, list) else (token,))


@pytest.mark.skipif(kernels() is None, reason="nothing is read natively without kernels")
def test_a_second_start_imports_no_transformers(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    fresh("llama", vocab_size=320, eos_token_id=258).bfloat16().save_pretrained(folder)
    tokenizer(folder, TEMPLATES["loops"])
    code = (
        "import sys, draftproof as dp\n"
        "engine = dp.load(sys.argv[1])\n"
        "chat = [{'role': 'user', 'content': 'hello'}]\n"
        "print(engine.generate([chat], max_new_tokens=4)[0].tokens)\n"
        "print(*sorted({'transformers', 'scipy', 'psutil', 'matplotlib'} & sys.modules.keys()))\n"
    )
    env = {**os.environ, "DRAFTPROOF_CACHE": "1", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    runs = [subprocess.run([sys.executable, "-c", code, str(folder)], env=env, check=True,
                           capture_output=True, text=True).stdout for _ in range(2)]
    (first, _), (second, imported) = (run.split("\n")[:2] for run in runs)
    assert first == second and imported == ""
    assert load_tokenizer(folder) is not None
