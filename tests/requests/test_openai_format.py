"""Rows of files of prompts: options in the words of other engines mean what they mean there."""

from __future__ import annotations

import json
from typing import Any

import pytest

import draftproof as dp
from draftproof.errors import BadInput
from draftproof.requests.foreign_options import HARMLESS, NO_OP_VALUES, UNSUPPORTED, is_neutral
from draftproof.requests.openai_format import parse_row, refuse_unrecognized

NAMES = sorted({name for names in UNSUPPORTED.values() for name in names})
BASE = dp.Sampling(top_k=40, max_new_tokens=9)


def sampling(**row: Any) -> dp.Sampling:
    """What a row asks for, besides a model's own defaults."""
    return parse_row(json.dumps({"prompt": "Once", **row}).encode(), BASE, False).sampling


@pytest.fixture(scope="module")
def engine() -> dp.Engine:
    return dp.load("demo", drafter="none")


@pytest.mark.parametrize(("row", "others", "flag"), [
    ({"stop_token_ids": [5]}, {5}, True),
    ({"sampling_params": {"stop_token_ids": [5, 6]}}, {5, 6}, True),
    ({"stop_token_ids": []}, set(), True),
    ({"ignore_eos": True}, set(), False),
    ({"ignore_eos": True, "stop_token_ids": [5]}, {5}, False),
    ({"stop_tokens": [7], "stop_token_ids": [5]}, {5, 7}, False),
    ({"stop_tokens": [7], "ignore_eos": True}, {7}, False),
])  # fmt: skip
def test_stop_options_have_vllm_semantics(
    engine: dp.Engine, row: dict[str, Any], others: set[int], flag: bool
) -> None:
    """stop_token_ids add to the model's own end tokens; ignore_eos drops the model's own alone."""
    ends = engine.requests.params(sampling(**row), [1, 2], 5).stop_tokens
    assert set(ends) == others | (set(engine.stop_tokens) if flag else set())


def test_neutral_values_of_other_engines_are_accepted() -> None:
    """Rows made from dumps of vLLM's SamplingParams."""
    row = {"top_k": -1, "max_tokens": -1, "min_p": 0, "top_p": 1, "seed": -1, "stop": [],
           "stop_token_ids": [], "skip_special_tokens": True, "detokenize": True, "n": 1,
           "spaces_between_special_tokens": True, "logprobs": None, "min_tokens": 0,
           "ignore_eos": False, "include_stop_str_in_output": False, "bad_words": [],
           "truncate_prompt_tokens": None, "output_kind": 2, "guided_decoding": None}
    result = sampling(**row)
    assert sampling(sampling_params=row) == result
    assert result.top_k == 0 and result.max_new_tokens is None and result.seed == BASE.seed
    assert not (result.stop or result.banned_words or result.stop_token_ids)
    assert result.stop_tokens is None


@pytest.mark.parametrize("name", NAMES)
def test_unsupported_options_are_refused(name: str) -> None:
    """In a file and in a request; the values that ask for nothing pass."""
    strange: Any = next(item for item in (7, True, "7") if not is_neutral(name, item))
    for row in ({name: strange}, {"sampling_params": {name: strange}}):
        with pytest.raises(BadInput, match=name):
            sampling(**row)
        with pytest.raises(BadInput, match=name):
            refuse_unrecognized(row, BASE)
    for neutral in (None, *NO_OP_VALUES.get(name, ())):
        assert sampling(**{name: neutral}) == BASE
        refuse_unrecognized({name: neutral}, BASE)


@pytest.mark.parametrize(("name", "value"), [
    ("eos_token_id", 0), ("eos_token_id", False), ("enable_thinking", False), ("think", False),
    ("skip_special_tokens", False), ("add_generation_prompt", False), ("echo", 0), ("best_of", 0),
    ("truncate_prompt_tokens", 0), ("best_of", True), ("mirostat", True),
    ("thinking", False), ("reasoning", False), ("detokenize", False), ("add_bos_token", False),
])  # fmt: skip
def test_zero_and_false_are_distinguished(name: str, value: Any) -> None:
    with pytest.raises(BadInput, match=name):
        sampling(**{name: value})


def test_fields_of_the_users_own_pass_in_files_and_not_in_requests() -> None:
    settings = {"category": "math", "answer": "42", "id": 3, "choice": ["a"]}
    assert sampling(**settings) == BASE
    for name in settings:
        with pytest.raises(BadInput, match=f"^Unrecognized request argument: {name}$"):
            refuse_unrecognized({name: 1}, BASE)
    refuse_unrecognized(dict.fromkeys(HARMLESS, 1), BASE)
    refuse_unrecognized({"max_tokens": 3, "n_predict": 3, "n": 2, "ignore_eos": True}, BASE)


@pytest.mark.parametrize(("names", "value", "wanted"), [
    (("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict", "num_predict"), 3,
     {"max_new_tokens": 3}),                            # OpenAI, llama.cpp, Ollama
    (("min_tokens",), 2, {"min_new_tokens": 2}),        # vLLM
    (("stop_strings", "stop_sequences", "stop_sequence", "stopping_strings"), ["."],
     {"stop": ["."]}),                                  # transformers, TGI, KoboldAI
    (("bad_words", "bad_words_ids"), [[5, 6]], {"banned_words": [[5, 6]]}),
    (("no_repeat_ngram_size",), 4, {"no_repeat_ngram": 4}), (("random_seed",), 7, {"seed": 7}),
])  # fmt: skip
def test_options_have_the_names_of_other_engines(
    names: tuple[str, ...], value: Any, wanted: dict[str, Any]
) -> None:
    for name in names:
        for row in ({name: value}, {"sampling_params": {name: value}}):
            assert sampling(**row) == sampling(**wanted) != BASE, name
            refuse_unrecognized(row, BASE)


def test_a_system_message_next_to_a_prompt() -> None:
    items = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    for row in ({"prompt": "Hi"}, {"messages": items[1:]}):
        text = json.dumps({**row, "system": "Be brief."}).encode()
        assert parse_row(text, BASE, True).prompt == items
    both = json.dumps({"messages": items, "system": "Be brief."}).encode()
    with pytest.raises(BadInput, match="system"):
        parse_row(both, BASE, True)


def test_a_row_whose_json_programs_read_differently_is_refused() -> None:
    for text, word in ((b'{"prompt": "a", "seed": 1, "seed": 2}', '"seed"'),
                       (b'{"prompt": "a", "temperature": NaN}', "NaN"), (b"{", "line 1"),
                       (b"[" * 100_000, "nested too deeply"), (b'"\xff"', "UTF-8")):
        with pytest.raises(BadInput, match=f"the row is not JSON: .*{word}"):
            parse_row(text, BASE, False)
