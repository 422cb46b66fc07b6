"""What users of a Gaudi type today is understood."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from draftproof.cli.setup import gaudi_words

Call = Callable[..., Any]


def test_the_command_line_of_gaudi_examples_is_understood(
    call: Call, target: str, draft: str
) -> None:
    words = ["run", target, "-p", "the cat", "--max_new_tokens", "5", "--json", "--assistant_model"]
    told = json.loads(call(*words, draft, "--bf16", "--bucket_size", "128").out)
    assert told["settings"]["dtype"] == "bfloat16" and len(told["tokens"]) == 5
    exact = [
        json.loads(call(*words, draft, "--dtype", "float64", *more).out)["tokens"]
        for more in (["--bucket_size", "1"], [])
    ]
    assert exact[0] == exact[1], "closed shapes change no text"
    graphs = {"graphs": True, "device": "hpu", "dtype": "bfloat16"}
    assert gaudi_words({"graphs": True}, bf16=True) == graphs
    both = {"dtype": "bfloat16", "device": "cuda", "graphs": True}
    assert gaudi_words(both, bf16=True) == both
    assert gaudi_words({"dtype": "float32"}, bf16=False) == {"dtype": "float32"}
