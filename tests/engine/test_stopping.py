"""End tokens, limits, the context, stop strings, wherever in a round they fall."""

from __future__ import annotations

from dataclasses import replace

import pytest
from drafting import DRAFTERS, Oracle, assert_counts, texts
from tiny import VOCAB, prompts, target

from draftproof.core.params import Sampling, SamplingParams
from draftproof.drafters.draft_model import DraftModel
from draftproof.engine.engine import Completion, Engine
from draftproof.errors import BadInput
from draftproof.model.loading import embedded, load_tokenizer
from draftproof.model.target import Target
from draftproof.requests.sequence import SequenceState
from draftproof.tokenizer.codec import Codec

PROMPT, WARM = [3, 1, 4], Sampling(temperature=0.9, seed=5)


def known(answer: list[int], limit: int, sampling: Sampling) -> Completion:
    """What an engine writes whose drafter knows the answer."""
    engine = Engine(target(), Oracle({tuple(PROMPT): answer}), budget=5)
    (done,) = engine.generate(PROMPT, max_new_tokens=limit, sampling=sampling)
    assert_counts(done)
    return done


def test_tokens_after_an_accepted_end_are_dropped() -> None:
    """An end token, or the limit, wherever it falls in a round; at the limit it is a stop."""
    answer = texts(Engine(target()), [PROMPT], max_new_tokens=20, sampling=WARM)[0][0]
    for place in range(12):
        want, end = replace(WARM, stop_tokens=[answer[place]]), answer.index(answer[place]) + 1
        for limit in (20, end):
            done = known(answer, limit, want)
            assert (done.tokens, done.finish_reason) == (answer[:end], "stop")
    for limit in range(1, 15):
        done = known(answer, limit, WARM)
        assert (done.tokens, done.finish_reason) == (answer[:limit], "length")
        assert done.stats.rounds == -(-(limit - 1) // 6)


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gemma3"])
@pytest.mark.parametrize("size", [1, 20, 31])
def test_the_context_ends_the_text(family: str, size: int) -> None:
    """Learned positions end with the context: no crash, the same text, finish 'length'."""
    small = {"n_positions": 32} if family == "gpt2" else {"max_position_embeddings": 32}
    model, asked = target(family, **small), [[index % VOCAB for index in range(size)], [7, 3]]
    wanted = texts(Engine(model), asked, max_new_tokens=500)
    assert [len(text) for text, _ in wanted] == [32 - size, 30]
    assert {reason for _, reason in wanted} == {"length"}
    for drafter in ("prompt-lookup", "target itself", "target itself, tree", "guess"):
        assert texts(Engine(model, DRAFTERS[drafter](model)), asked, max_new_tokens=500) == wanted
    with pytest.raises(BadInput, match="32"):
        Engine(model).generate([list(range(32))])


def test_a_draft_of_smaller_context_only_drafts_worse() -> None:
    asked = prompts(3, seed=11)
    wanted = texts(Engine(target()), asked, max_new_tokens=40)
    for family, small in (("gpt2", {"n_positions": 16}),
                          ("llama", {"max_position_embeddings": 16})):
        drafter = DraftModel(target(family, seed=1, **small), VOCAB)
        assert texts(Engine(target(), drafter), asked, max_new_tokens=40) == wanted


@pytest.fixture(scope="module")
def model_with_the_demo_tokenizer() -> tuple[Target, Codec]:
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
def test_stop_strings_end_the_text_across_rounds(
    model_with_the_demo_tokenizer: tuple[Target, Codec], seed: int
) -> None:
    """The first to be complete, in one token, in many, or across a round's border; chunks of a
    stream join to the same text, and hold back what may begin a stop string."""
    ours, codec = model_with_the_demo_tokenizer
    want, prompt = Sampling(temperature=0.8, seed=seed), codec.encode("Once upon a time")
    (whole,) = Engine(ours, codec=codec).generate([prompt], max_new_tokens=24, sampling=want)
    oracle = Oracle({tuple(prompt): whole.tokens})
    for start in range(0, len(whole.text) - 4, 5):
        for stop in ([whole.text[start : start + 4]], [whole.text[start], "@@"],
                     [whole.text[start : start + 9], whole.text[start + 2 : start + 5]]):
            cut, asked = _cut(codec, prompt, whole.tokens, stop), replace(want, stop=stop)
            for budget in (0, 3, 7):
                engine = Engine(ours, oracle if budget else None, codec=codec, budget=budget)
                *_, last = chunks = list(engine.stream(prompt, max_new_tokens=24, sampling=asked))
                done = last.completion
                assert done is not None and all(chunk.completion is None for chunk in chunks[:-1])
                assert (done.text, done.finish_reason) == (whole.text[:cut], "stop"), (stop, budget)
                assert "".join(chunk.text for chunk in chunks) == done.text
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
    stop = Sampling(stop=[codec.special_tokens[end] + "!"])
    state = SequenceState([1], SamplingParams(stop, 1), 3, codec.stream([1]))
    state.extend([word, end, word], None, ())
    assert (state.text, state.finish_reason) == (" dog dog", "length")


@pytest.mark.parametrize("stop", ["g zzz", " dog zzz", "\ufffdzzz", "zzz", None])
def test_withheld_text_is_released_before_a_truncated_character(stop: str | None) -> None:
    codec = Codec(load_tokenizer(embedded("demo")))
    tokens = [part for word in (" dog", "🐕") for part in codec.encode(word, special=False)][:-1]
    asked = SamplingParams(Sampling(stop=[stop] if stop else []), 1)
    state = SequenceState([1], asked, len(tokens), codec.stream([1]))
    state.extend(tokens, None, ())
    assert (state.text.rstrip("\ufffd"), state.finish_reason) == (" dog", "length")
    assert state.text != " dog" and "".join(piece for piece, _ in state.pieces()) == state.text


@pytest.mark.parametrize("aborted", [False, True])
def test_a_stop_string_may_end_with_an_incomplete_final_character(aborted: bool) -> None:
    """It says why the text ended, whatever else ended it in the same moment."""
    codec = Codec(load_tokenizer(embedded("demo")))
    tokens = [part for word in (" dog", "🐕") for part in codec.encode(word, special=False)][:-1]
    asked = SamplingParams(Sampling(stop=["g\ufffd"]), 1)
    state = SequenceState([1], asked, len(tokens) + aborted, codec.stream([1]))
    state.extend(tokens, None, ())
    if aborted:
        state.abort()
    assert (state.text, state.finish_reason, state.stop_string) == (" do", "stop", "g\ufffd")


def test_end_tokens_the_model_does_not_know_are_harmless() -> None:
    plain, odd = (Sampling(temperature=1.0, **more)
                  for more in ({}, {"stop_tokens": [-1, VOCAB + 5], "min_new_tokens": 3}))
    assert texts(Engine(target()), [[1, 2]], max_new_tokens=9, sampling=odd) == texts(
        Engine(target()), [[1, 2]], max_new_tokens=9, sampling=plain)


class _Tags:
    """A detokenizer whose token 9 is the special token "<end>"; others are letters."""

    def push(self, token: int) -> str:
        return "" if token == 9 else "abcdefgh"[token]

    def special(self, token: int) -> str:
        return "<end>" if token == 9 else ""

    def finish(self) -> str:
        return ""


@pytest.mark.parametrize("stop", ["<end>a", "end>a", "d>a", ">a", "c<end>b", "d>aa"])
@pytest.mark.parametrize("tokens", [[2, 9, 1, 0], [9, 9, 2], [2, 9, 0, 1], [9, 0, 0], [2, 2, 9]])
def test_no_part_of_a_special_token_is_ever_shown(stop: str, tokens: list[int]) -> None:
    """A stop string may begin inside one: what was held back of it is not text afterwards."""
    state = SequenceState([1], SamplingParams(Sampling(stop=[stop]), 1), len(tokens), _Tags())
    state.extend(tokens, None, ())
    pieces = ["<end>" if token == 9 else "abcdefgh"[token] for token in tokens]
    places = [index for index, piece in enumerate(pieces) for _ in piece]
    end = next((end for end in range(len(places) + 1) if "".join(pieces)[:end].endswith(stop)), 0)
    shown = places[: end - len(stop)] if end else places
    assert state.text == "".join(pieces[index] for index in shown if tokens[index] != 9)
    assert "".join(piece for piece, _ in state.pieces()) == state.text
    assert state.finish_reason == ("stop" if end else "length")


@pytest.mark.parametrize("stop", ["cx", "cdx", "d<end>x", "<end>x"])
@pytest.mark.parametrize("end", [2, 3, 9])
def test_an_end_token_ends_a_text_that_is_held_for_a_stop_string(stop: str, end: int) -> None:
    tokens = [0, 2, 3, 9, 1, 1]
    state = SequenceState([1], SamplingParams(Sampling(stop=[stop]), 1, (end,)), 6, _Tags())
    count = state.extend(tokens, None, ())
    assert count == tokens.index(end) + 1 and state.tokens == tokens[:count]
    assert (state.text, state.finish_reason) == ("acd"[:count], "stop")
