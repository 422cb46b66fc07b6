"""What one user's texts taught cannot be measured by another."""

from __future__ import annotations

from typing import Any

import pytest
from asking import PROMPTS
from fastapi.testclient import TestClient

import draftproof as dp
from draftproof.core.params import RuleContext
from draftproof.engine.prefix_cache import PrefixCache
from draftproof.server.api import Server
from draftproof.server.grammar import Grammars
from draftproof.server.guard import Access
from draftproof.server.json_schema import json_rule
from draftproof.server.owners import Owners
from draftproof.server.schema import Completion


def test_owners_are_keys_and_salts() -> None:
    owners, others = Owners(), Owners()
    pairs = [("a", ""), ("b", ""), ("a", "b"), ("ab", ""), ("", "ab"), ("", "\ud800")]
    numbers = [owners.number(*pair) for pair in pairs]
    assert len({*numbers, 0}) == len(pairs) + 1 and owners.number("", "") == 0
    assert numbers == [owners.number(*pair) for pair in pairs]
    assert numbers[0] != others.number("a", ""), "nobody can compute them"
    assert all(-(1 << 63) <= number < 1 << 63 for number in numbers)
    shared = Owners(shared=True)
    assert shared.number("a", "") == shared.number("b", "") == 0 != shared.number("a", "s")


def test_every_prompt_of_a_request_has_its_owner_and_priority() -> None:
    hosted = Server(dp.load("demo", drafter="none"), "demo", length=64).first
    body: dict[str, object] = {"prompt": PROMPTS[:3], "temperature": 1, "priority": 5}
    requests, _ = hosted.read(Completion.model_validate(body), owner=7)
    assert [(request.owner, request.priority) for request in requests] == [(7, 5)] * 3
    for seed in (None, -1):                                     # a new text each time
        again = Completion.model_validate({**body, "seed": seed})
        seeds = {hosted.read(again)[0][0].sampling.seed for _ in range(2)}
        assert len(seeds) == 2 and not seeds & {None, -1}


@pytest.mark.needs_kernels
@pytest.mark.parametrize(("drafter", "shared"), [
    ("suffix", False), ("suffix", True), ("recycling", False)])
def test_a_repeated_prompt_is_quicker_for_its_owner_alone(drafter: str, shared: bool) -> None:
    engine = dp.load("demo", drafter=drafter, budget=6)
    engine.prefixes = PrefixCache(8 << 20)
    server = Server(engine, "demo", length=256, access=Access(["a", "b"]), shared=shared)
    body = {"prompt": PROMPTS[3] * 3, "max_tokens": 40, "temperature": 0}
    seen = []
    with TestClient(server.app(), base_url="http://127.0.0.1") as client:
        for key, salt in (("a", None), ("b", None), ("b", "s"), ("a", None)):
            before = engine.prefixes.reused
            answer = client.post("/v1/completions", json={**body, "cache_salt": salt},
                                 headers={"Authorization": f"Bearer {key}"}).json()
            details = answer["usage"]["completion_tokens_details"]
            seen.append((answer["choices"][0]["text"], engine.prefixes.reused - before,
                         details["accepted_prediction_tokens"]))
        about = client.get("/v1/models", headers={"Authorization": "Bearer a"}).json()["data"][0]
    (text, read, accepted), other, salted, again = seen
    assert {item for item, *_ in seen} == {text} and read == 0
    assert again[1] > 0 and again[2] > accepted, "the owner's own text is remembered"
    assert salted == (text, 0, accepted)
    assert (other == (text, 0, accepted)) != shared
    assert about["drafts_from"] == ("all texts" if shared else "your texts")


def test_a_grammar_is_compiled_for_each_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, compiled = dp.load("demo", drafter="none"), []
    import llguidance

    matcher: Any = llguidance.LLMatcher
    monkeypatch.setattr(llguidance, "LLMatcher", lambda *args, **more: compiled.append(1)
                        or matcher(*args, **more))
    grammars = Grammars(engine.codec, engine.target.vocab_size, engine.stop_tokens)
    grammar = f"start: {json_rule({'type': 'object'})}"
    for owner, count in ((1, 1), (1, 1), (2, 2), (1, 2)):
        rule = grammars.lark(grammar, owner)
        rule.make(RuleContext([5], 9, engine.stop_tokens, engine.target.device))
        assert len(compiled) == count
