"""Streamers, assistants and tokenizers of a call reach `draftproof.generate`, however it is
called; a streamer always ends; a model is freed with its engines."""

from __future__ import annotations

import functools
import gc
import logging
import weakref
from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch
from test_generate import GREEDY, OURS, Steps, batch
from tiny import fresh, model
from transformers.generation import MaxLengthCriteria, TextIteratorStreamer

import draftproof
from draftproof.errors import BadInput


def decode(model: Any, input_ids: Any, **options: Any) -> Any:
    return draftproof.generate(model, input_ids, **options)


class Decode:
    def __call__(self, *args: Any, **options: Any) -> Any:
        return decode(*args, **options)


WRAPPERS: dict[str, Callable[..., Any]] = {
    "itself": draftproof.generate,
    "partial": functools.partial(draftproof.generate, num_assistant_tokens=2),
    "lambda": lambda *args, **options: draftproof.generate(*args, **options),
    "function": decode,
    "no_grad": torch.no_grad()(draftproof.generate),
    "inference_mode": torch.inference_mode()(draftproof.generate),
    "object": Decode(),
    "nested": functools.partial(torch.no_grad()(Decode())),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_streamers_and_assistants_are_found_through_user_functions(name: str) -> None:
    mine, streams = fresh("llama"), [Steps(), Steps()]
    theirs = mine.generate(**batch(1), **GREEDY, streamer=streams[0])
    ours = mine.generate(
        **batch(1), **GREEDY, streamer=streams[1], assistant_model=model(seed=1),
        custom_generate=WRAPPERS[name],
    )
    assert torch.equal(theirs, ours) and streams[0].heard == streams[1].heard
    assert [engine.drafter.name for engine in mine._draftproof.values()] == ["draft-model"]


def test_an_explicit_streamer_takes_precedence() -> None:
    module, streams = model(), [Steps(), Steps()]
    how = functools.partial(draftproof.generate, streamer=streams[0])
    module.generate(**batch(1), **GREEDY, streamer=streams[1], custom_generate=how)
    assert streams[0].heard[-1] == "end" and len(streams[1].heard) == 1      # the prompt alone


def test_nested_calls_do_not_inherit_arguments() -> None:
    """A processor that asks another model about each token."""
    outer, stream = model(), Steps()
    lengths = list[int]()

    def ask(input_ids: Any, scores: Any) -> Any:
        ends = [MaxLengthCriteria(5)]
        inner = draftproof.generate(model("gpt2"), input_ids[:, :3], None, ends, drafter="none")
        lengths.append(inner.shape[1])
        return scores

    how = {**batch(1), **GREEDY, "max_new_tokens": 3}
    outer.generate(**how, logits_processor=[ask], streamer=stream, **OURS, drafter="none")
    outer.generate(**how, logits_processor=[ask], streamer=stream)
    assert lengths and stream.heard.count("end") == 2
    assert len(stream.heard) == 2 * (1 + 3 + 1)


@pytest.mark.parametrize("asked", [
    {"output_attentions": True, "return_dict_in_generate": True},
    {"num_assistant_tokens": 10**9},
    {"logits_processor": [lambda ids, scores: 1 / 0]},
])  # fmt: skip
def test_a_reader_of_a_streamer_never_waits_after_an_error(
    demo: tuple[Any, Any], asked: dict[str, Any]
) -> None:
    ours, tokenizer = demo
    streamer = TextIteratorStreamer(tokenizer, timeout=60)
    failed = list[BaseException]()

    def write() -> None:
        try:
            ours.generate(
                torch.tensor([[5, 6, 7]]), streamer=streamer, max_new_tokens=4,
                custom_generate=lambda *args, **more: draftproof.generate(*args, **more), **asked,
            )
        except Exception as error:
            failed.append(error)

    writer = Thread(target=write)
    writer.start()
    list(streamer)
    writer.join()
    assert len(failed) == 1


def test_stop_strings_and_a_tokenizer_are_taken_as_by_transformers(demo: tuple[Any, Any]) -> None:
    ours, tokenizer = demo
    inputs = tokenizer("Lily saw a big dog and", return_tensors="pt")
    how = {**inputs, "max_new_tokens": 40, "do_sample": False, "tokenizer": tokenizer,
           "stop_strings": ["oved to pl", "an to th", "."]}  # fmt: skip
    theirs = ours.generate(**how)
    for custom in (draftproof.generate, functools.partial(decode)):
        assert torch.equal(ours.generate(**how, custom_generate=custom), theirs)
    assert theirs.shape[1] < inputs["input_ids"].shape[1] + 40
    how.pop("tokenizer")
    with pytest.raises(ValueError, match="tokenizer"):
        ours.generate(**how, **OURS)


def test_a_transformers_that_hides_its_call_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("draftproof.hf.call.Call._fields", ("assistant_model", "stream"))
    with caplog.at_level(logging.WARNING, "draftproof"):
        model().generate(**batch(1), **GREEDY, **OURS)
    assert "functools.partial" in caplog.text
    caplog.clear()
    # transformers is not on the stack
    draftproof.generate(model(), torch.tensor([[1, 2, 3]]), None, [MaxLengthCriteria(5)])
    assert not caplog.text


@pytest.mark.parametrize("drafter", [None, "itself", "self-layers:1"])
def test_a_model_is_freed_at_once_with_its_engine(drafter: str | None) -> None:
    ours = fresh("llama")
    ours.generate(**batch(2), **GREEDY, drafter=ours if drafter == "itself" else drafter, **OURS)
    (engine,), held = ours._draftproof.values(), weakref.ref(ours)
    assert engine.target.model is ours
    gc.collect()
    gc.disable()
    try:
        del ours
        assert held() is None
    finally:
        gc.enable()
    with pytest.raises(BadInput, match="deleted"):
        engine.generate([[1, 2, 3]], max_new_tokens=2)
