"""What users of a Gaudi type today is understood, what is not there is said in one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from draftproof.cli.setup import gaudi_words
from draftproof.engine.config import EngineConfig
from draftproof.errors import BadInput

Call = Callable[..., Any]


def test_the_command_line_of_gaudi_examples_is_understood(call: Call, target: str, draft: str) -> None:
    words = ["--prompt", "the cat", "--max_new_tokens", "5", "--json", "--assistant_model", draft]
    told = json.loads(call("run", target, *words, "--bf16", "--bucket_size", "128").out)
    assert told["settings"]["dtype"] == "bfloat16" and len(told["tokens"]) == 5
    exact = [json.loads(call("run", target, *words, "--dtype", "float64", *more).out) for more in (["--bucket_size", "1"], [])]
    assert exact[0]["tokens"] == exact[1]["tokens"], "closed shapes change no text"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--use_hpu_graphs"], "habana_frameworks"),
        (["--device", "hpu"], "habana_frameworks"),
        (["--use_hpu_graphs", "--device", "cpu"], "cpu devices record none"),
        (["--bf16", "--dtype", "float32"], "--bf16"),
        (["--bucket_size", "0"], "bucket_size"),
    ],
)
def test_what_cannot_be_had_is_said_in_one_sentence(call: Call, target: str, words: list[str], said: str) -> None:
    done = call("run", target, "--prompt", "a", *words)
    assert done.code == 1 and said in done.err and done.err.count("\n") == 1 and done.out == ""


def test_the_words_mean_what_they_mean_there() -> None:
    assert gaudi_words({"graphs": True}, bf16=True) == {"graphs": True, "dtype": "bfloat16", "device": "hpu"}
    both = {"dtype": "bfloat16", "device": "cuda", "graphs": True}
    assert gaudi_words(both, bf16=True) == both
    assert gaudi_words({"dtype": "float32"}, bf16=False) == {"dtype": "float32"}
    with pytest.raises(BadInput, match="bucket"):
        EngineConfig("demo", bucket_size=-1)
