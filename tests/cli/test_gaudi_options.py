"""What users of a Gaudi type today is understood, what is not there is said in one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from draftproof.cli.setup import Setup, as_on_gaudi
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
        (["--bucket_size", "0"], "--bucket-size"),
    ],
)
def test_what_cannot_be_had_is_said_in_one_sentence(call: Call, target: str, words: list[str], said: str) -> None:
    done = call("run", target, "--prompt", "a", *words)
    assert done.code == 1 and said in done.err and done.err.count("\n") == 1 and done.out == ""


def test_the_words_mean_what_they_mean_there() -> None:
    assert as_on_gaudi(None, None, True, True) == ("bfloat16", "hpu")
    assert as_on_gaudi("bfloat16", "cuda", True, True) == ("bfloat16", "cuda")
    assert as_on_gaudi("float32", None, False, False) == ("float32", None)
    shapes = Setup("demo", bucket=256)._shapes()
    assert shapes is not None and shapes.closed and shapes.bucket == 256
    closed = Setup("demo", graphs=True)._shapes()
    assert closed is not None and closed.closed and Setup("demo")._shapes() is None
    with pytest.raises(BadInput, match="bucket"):
        Setup("demo", bucket=-1)
