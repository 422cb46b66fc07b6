"""Programs written for an earlier layout of the package go on running."""

from __future__ import annotations

import draftproof as dp
from draftproof.cache import kv_cache
from draftproof.requests import sequence
from draftproof.server import schema
from draftproof.server.api import Server
from draftproof.tokenizer import codec
from draftproof.weights import disk_cache


def test_former_module_paths_still_import() -> None:
    from draftproof.engine.rows import understood
    from draftproof.engine.sequence import SequenceState
    from draftproof.model import kept
    from draftproof.model.kv_cache import KVCache
    from draftproof.model.tokenizer import Codec

    assert kept is disk_cache                   # a setting changed there holds here
    assert Codec is codec.Codec and KVCache is kv_cache.KVCache
    assert SequenceState is sequence.SequenceState
    assert understood(b'{"prompt": "a"}', dp.Sampling(), False).prompt == "a"


def test_a_former_progress_is_an_update() -> None:
    from draftproof.server.scheduler import Progress

    update = Progress(2, [("a", "")], [5], [-0.1], [[(5, -0.1)]], None, None)
    assert (update.sample, update.text, update.tokens, update.finished) == (2, "a", [5], False)
    assert update.top_logprobs == [[(5, -0.1)]]


def test_former_attributes_of_an_answer() -> None:
    server = Server(dp.load("demo", drafter="none"), "m")
    answer = server._read(schema.Completion(prompt="Once", max_tokens=4))
    assert answer.tickets[0].rows[0] is answer.requests[0].sequences[0]
