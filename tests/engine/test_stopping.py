"""End tokens, limits, the context, stop strings, wherever in a round they fall."""

from __future__ import annotations

from dataclasses import replace

import pytest
from drafting import DRAFTERS, Oracle, assert_counts, texts
from tiny import VOCAB, prompts, target

from draftproof.core.params import Sampling, SamplingParams
from draftproof.drafters.draft_model import DraftModel
from draftproof.engine.engine import Engine
from draftproof.engine.sequence import SequenceState
from draftproof.errors import BadInput
from draftproof.model.loading import embedded, load_tokenizer
from draftproof.model.target import Target
from draftproof.model.tokenizer import Codec

WARM = Sampling(temperature=0.9, seed=5)


def _knows(answer: list[int], prompt: list[int]) -> Oracle:
    return Oracle({tuple(prompt): answer})


@pytest.mark.parametrize("place", range(12))
def test_an_end_token_inside_an_accepted_run_ends_the_text(place: int) -> None:
    """Wherever it falls in a round; what was accepted behind it is dropped, and counted nowhere."""
    prompt = [3, 1, 4]
    answer = texts(Engine(target()), [prompt], max_new_tokens=20, sampling=WARM)[0][0]
    want = replace(WARM, stop_tokens=[answer[place]])
    (done,) = Engine(target(), _knows(answer, prompt), budget=5).generate(
        prompt, max_new_tokens=20, sampling=want
    )
    assert done.tokens == answer[: answer.index(answer[place]) + 1] and done.finish_reason == "stop"
    assert_counts(done)


@pytest.mark.parametrize("limit", range(1, 15))
def test_max_new_tokens_cuts_an_accepted_run(limit: int) -> None:
    prompt = [3, 1, 4]
    answer = texts(Engine(target()), [prompt], max_new_tokens=20)[0][0]
    (done,) = Engine(target(), _knows(answer, prompt), budget=5).generate(
        prompt, max_new_tokens=limit
    )
    assert done.tokens == answer[:limit] and done.finish_reason == "length"
    assert done.stats.rounds == -(-(limit - 1) // 6)
    assert_counts(done)


def test_an_end_token_at_the_limit_is_a_stop() -> None:
    answer = texts(Engine(target()), [[3, 1, 4]], max_new_tokens=8)[0][0]
    first = answer.index(answer[5])
    assert (
        texts(
            Engine(target()), [[3, 1, 4]], max_new_tokens=first + 1,
            sampling=Sampling(stop_tokens=[answer[5]])
        )[0][1]
        == "stop"
    )


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gemma3"])
@pytest.mark.parametrize("size", [1, 20, 31])
def test_the_context_ends_the_text(family: str, size: int) -> None:
    """Learned positions end with the context: no crash, the same text, finish 'length'."""
    small = {"n_positions": 32} if family == "gpt2" else {"max_position_embeddings": 32}
    own = target(family, **small)
    assert own.context == 32
    asked = [[index % VOCAB for index in range(size)], [7, 3]]
    wanted = texts(Engine(own), asked, max_new_tokens=500)
    assert [len(text) for text, _ in wanted] == [32 - size, 30] and {
        reason for _, reason in wanted
    } == {"length"}
    for drafter in ("prompt-lookup", "target itself", "target itself, tree", "guess"):
        assert texts(Engine(own, DRAFTERS[drafter](own)), asked, max_new_tokens=500) == wanted
    with pytest.raises(BadInput, match="32"):
        Engine(own).generate([list(range(32))])


def test_a_draft_of_smaller_context_only_drafts_worse() -> None:
    asked = prompts(3, seed=11)
    for family, small in (("gpt2", {"n_positions": 16}),
                          ("llama", {"max_position_embeddings": 16})):
        drafter = DraftModel(target(family, seed=1, **small), VOCAB)
        assert texts(Engine(target(), drafter), asked, max_new_tokens=40) == texts(
            Engine(target()), asked, max_new_tokens=40
        )


@pytest.fixture(scope="module")
def spoken() -> tuple[Target, Codec]:
    """A random model that speaks the embedded tokenizer."""
    codec = Codec(load_tokenizer(embedded("demo")))
    return target("llama", vocab_size=len(codec.tokenizer)), codec


def _cut(codec: Codec, prompt: list[int], tokens: list[int], stops: list[str]) -> int:
    """Where the text ends: at the first stop string to be complete, token by token."""
    stream, text = codec.stream(prompt), ""
    for token in tokens:
        text += stream.push(token)
        if any(stop in text for stop in stops):
            break
    return min(text.find(stop) for stop in stops if stop in text)


@pytest.mark.parametrize("seed", range(3))
def test_stop_strings_end_the_text_across_rounds(spoken: tuple[Target, Codec], seed: int) -> None:
    """The first to be complete, in one token, in many, or across a round's border."""
    own, codec = spoken
    want, prompt = Sampling(temperature=0.8, seed=seed), codec.encode("Once upon a time")
    (whole,) = Engine(own, codec=codec).generate([prompt], max_new_tokens=24, sampling=want)
    oracle = Oracle({tuple(prompt): whole.tokens})
    for start in range(0, len(whole.text) - 4, 5):
        for stop in ([whole.text[start : start + 4]], [whole.text[start], "@@"],
                     [whole.text[start : start + 9], whole.text[start + 2 : start + 5]]):
            cut = _cut(codec, prompt, whole.tokens, stop)
            for budget in (0, 3, 7):
                drafter = oracle if budget else None
                engine = Engine(own, drafter, codec=codec, budget=budget)
                (done,) = engine.generate([prompt], max_new_tokens=24,
                                          sampling=replace(want, stop=stop))
                assert (done.text, done.finish_reason) == (whole.text[:cut], "stop"), (stop, budget)
                assert_counts(done)


@pytest.mark.parametrize("shape", ["{end}", "{end}{after}", "{before}{end}", "{end}{end}"])
def test_special_tokens_in_a_stop_string_end_the_text(shape: str) -> None:
    """They are not shown, and are found all the same: alone, or with the text around them."""
    codec = Codec(load_tokenizer(embedded("demo")))
    codec.tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    codec = Codec(codec.tokenizer)
    prompt = codec.encode("Once upon a time")
    first, second = codec.encode(" dog", special=False)[-1], codec.encode(" cat", special=False)[-1]
    end = codec.tokenizer.convert_tokens_to_ids("<|im_end|>")
    answer = ([first, end, end, second, first] if shape == "{end}{end}"
              else [first, end, second, first])
    stop = shape.format(end="<|im_end|>", before="og", after=" c")
    for split in ([answer], [[token] for token in answer]):
        state = SequenceState(prompt, SamplingParams(Sampling(stop=[stop, "@"]), len(prompt)), 9,
                              codec.stream(prompt))
        for tokens in split:
            if state.finish_reason is None:
                state.extend(tokens, None, ())
        assert state.finish_reason == "stop"
        assert state.text == (" d" if shape == "{before}{end}" else " dog")
        assert "".join(piece for piece, _ in state.pieces()) == state.text
        read = {"{end}{after}": answer.index(second) + 1, "{end}{end}": 3}
        assert state.tokens == answer[: read.get(shape, 2)]


def test_a_special_token_that_ends_nothing_is_not_shown() -> None:
    codec = Codec(load_tokenizer(embedded("demo")))
    end, word = next(iter(codec.special_tokens)), codec.encode(" dog", special=False)[-1]
    state = SequenceState([1], SamplingParams(Sampling(stop=[codec.special_tokens[end] + "!"]), 1),
                          3, codec.stream([1]))
    state.extend([word, end, word], None, ())
    assert (state.text, state.finish_reason) == (" dog dog", "length")


def test_a_stream_says_what_generate_says(spoken: tuple[Target, Codec]) -> None:
    """Chunks join to the text, take nothing back, and hold back what may begin a stop string."""
    own, codec = spoken
    for seed in range(3):
        want = Sampling(temperature=1.0, seed=seed)
        engine = Engine(own, DRAFTERS["target itself"](own), codec=codec)
        (whole,) = engine.generate("Once upon", max_new_tokens=30, sampling=want)
        for stop in ((), (whole.text[len(whole.text) // 2 :][:5],)):
            (wanted,) = engine.generate("Once upon", max_new_tokens=30,
                                        sampling=replace(want, stop=stop))
            chunks = list(engine.stream("Once upon", max_new_tokens=30,
                                        sampling=replace(want, stop=stop)))
            assert "".join(chunk.text for chunk in chunks) == wanted.text
            assert (chunks[-1].completion is not None
                    and chunks[-1].completion.tokens == wanted.tokens)
            assert all(chunk.completion is None for chunk in chunks[:-1])


def test_end_tokens_the_model_does_not_know_are_harmless() -> None:
    want = Sampling(stop_tokens=[-1, VOCAB + 5], min_new_tokens=3, temperature=1.0)
    assert texts(Engine(target()), [[1, 2]], max_new_tokens=9, sampling=want) == texts(
        Engine(target()), [[1, 2]], max_new_tokens=9, sampling=Sampling(temperature=1.0)
    )
