"""Every wish is honoured exactly, whatever drafts: penalties, processors, logprobs, counts."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from devices import DEVICE
from drafting import DRAFTERS, Fading, accepted_share, assert_counts
from tiny import VOCAB, fresh, model, prompts, target
from torch import Tensor

from draftproof.core.acceptance import RULES
from draftproof.core.params import Sampling
from draftproof.engine.config import EngineConfig
from draftproof.engine.engine import Engine
from draftproof.errors import BadInput, BrokenModel
from draftproof.model.target import Target
from draftproof.requests import stats
from draftproof.requests.stats import Clock

NEW = 16
WARM = Sampling(temperature=0.9, seed=5)


def test_options_match_transformers_generate() -> None:
    """Greedy with processors: the same text as ``generate`` with the same options."""
    asked = [text for text in prompts(9, seed=9) if len(text) > 2]  # it skips words longer than it
    want = Sampling(repetition_penalty=1.3, no_repeat_ngram=2, banned_words=[[3], [5, 6]],
                    min_new_tokens=6, stop_tokens=[1, 2, 4, 8, 9])
    engine = Engine(target(), DRAFTERS["target itself, tree"](target()))
    for text in asked:
        theirs = model().generate(
            torch.tensor([text], device=DEVICE), max_new_tokens=NEW,
            attention_mask=torch.ones(1, len(text), device=DEVICE),
            do_sample=False, pad_token_id=0, repetition_penalty=1.3, no_repeat_ngram_size=2,
            bad_words_ids=[[3], [5, 6]], min_new_tokens=6, eos_token_id=[1, 2, 4, 8, 9])
        (ours,) = engine.generate(text, max_new_tokens=NEW, sampling=want)
        assert ours.tokens == theirs[0, len(text) :].tolist()


@pytest.mark.parametrize("sampling",
                         [Sampling(logprobs=True),
                          replace(WARM, top_k=5, repetition_penalty=1.5, logprobs=True)])
def test_logprobs_are_those_of_the_unprocessed_model(sampling: Sampling) -> None:
    """And so are the likeliest tokens: none for the first prompt, one for the second, ..."""
    asked = prompts(5, seed=10)
    wanted = [replace(sampling, top_logprobs=top) for top in range(len(asked))]
    for drafter in ("plain", "draft tree", "guess", "target itself"):
        engine = Engine(target(), DRAFTERS[drafter](target()))
        for item in engine.generate(asked, max_new_tokens=NEW, sampling=wanted):
            text, start = [*asked[item.prompt], *item.tokens], len(asked[item.prompt])
            logits = model()(torch.tensor([text], device=DEVICE)).logits[0].detach()
            distribution = logits.log_softmax(-1)[start - 1 : -1]
            chosen = distribution.gather(1, torch.tensor(item.tokens, device=DEVICE)[:, None])[:, 0]
            assert item.logprobs == pytest.approx(chosen.tolist(), abs=1e-9)
            assert (item.top_logprobs is None) == (item.prompt == 0)
            scores, tokens = distribution.topk(item.prompt)
            for result, score, token in zip(item.top_logprobs or (), scores, tokens, strict=False):
                assert [place for place, _ in result] == token.tolist()
                assert [value for _, value in result] == pytest.approx(score.tolist(), abs=1e-9)
            assert len(item.top_logprobs or item.tokens) == len(item.tokens)


# What cannot be honoured --------------------------------------------------------------------------


class Counting:
    """Keeps state: answers by how often it was asked."""

    calls = 0

    def __call__(self, text: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return scores + self.calls


@pytest.mark.parametrize(("processor", "word"),
                         [(Counting(), "state"),
                          (lambda text, scores: scores + torch.rand(1), "state"),
                          (lambda text, scores: scores[:, :3], "shape"),
                          (lambda text, scores: 1 / 0, "fails")],
                         ids=["counts", "random", "shape", "raises"])
def test_processors_that_do_not_depend_on_the_text_alone_are_refused(
    processor: Any, word: str
) -> None:
    with pytest.raises(BadInput, match=word):
        Engine(target()).generate([[1, 2]], sampling=Sampling(processors=[processor]))
    assert not getattr(processor, "calls", 0), "the user's object is not touched"


@pytest.mark.parametrize("acceptance", RULES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_failing_row_does_not_affect_others(acceptance: str, temperature: float) -> None:
    """One meets NaN, one has no next token; the others, and those that come, notice nothing."""
    def not_after_seven(text: Tensor, scores: Tensor) -> Tensor:
        stuck = (text[:, 0] == 7) & (text.shape[1] > 4)
        return torch.where(stuck[:, None], -torch.inf, scores)

    broken, kept = Target(fresh("llama")), [[1, 2, 3], [4, 2, 9], [8, 8, 1], [6, 2, 2], [3, 1, 4]]
    wanted = Sampling(temperature, processors=[not_after_seven], banned_words=[(5,)])
    options = {"max_new_tokens": 8, "sampling": wanted, "batch_size": 3}
    for drafter in ("draft tree", "prompt-lookup"):
        engine = Engine(target(), DRAFTERS[drafter](target()), acceptance=acceptance)
        (done,) = engine.generate([[7, 2, 3]], **options)
        assert done.finish_reason == "error" and len(done.tokens) == 2
    engine = Engine(broken, DRAFTERS["draft chain"](broken), acceptance=acceptance)
    before = [completion.tokens for completion in engine.generate(kept, **options)]
    with torch.no_grad():
        broken.model.model.embed_tokens.weight[5] = torch.nan
    asked = [[1, 5, 3], kept[0], [7, 2, 3], *kept[1:3], [2, 5], *kept[3:]]
    done = engine.generate(asked, **options)
    ended = ((0, BrokenModel, "NaN"), (2, BadInput, "forbidden"), (5, BrokenModel, "NaN"))
    for place, kind, why in ended:
        assert done[place].finish_reason == "error" and len(done[place].tokens) == (place == 2) * 2
        with pytest.raises(kind, match=why):
            done[place].checked()
    alone = [completion.tokens for completion in done if completion.error is None]
    if temperature and acceptance != "match":               # coins fall otherwise next to others
        alone, before = ([len(tokens) for tokens in texts] for texts in (alone, before))
    assert alone == before


@pytest.mark.parametrize(("prompts", "call", "word"), [
    ([[]], {}, "empty"), ([[1, 99]], {}, "99"), ("text", {}, "tokenizer"),
    ([[1]], {"max_new_tokens": 0}, "max_new_tokens"), ([[1]], {"n": 0}, "n was 0"),
    ([[1]], {"batch_size": 0}, "batch_size"),
    ([[1]], {"sampling": [Sampling()] * 2}, "sampling was"), ([[1]], {"sampling": 0.7}, "0.7"),
    ([[1]], {"n": 1.5}, "n was 1.5"), ([[1]], {"batch_size": "2"}, "batch_size was '2'"),
    ([[1]], {"max_new_tokens": 1.5}, "max_new_tokens was 1.5"),
    ([[1, 2]], {"sampling": Sampling(max_length=2)}, "the 2 tokens of the prompt"),
    ([[1, None]], {}, "None"), ([[1]], {"sampling": Sampling(processors=[print])}, "no tensor"),
    ([[1]], {"sampling": Sampling(stop="x")}, "tokenizer"),
    ([[1]], {"sampling": Sampling(banned_words="x")}, "tokenizer"),
    ([[1]], {"sampling": Sampling(logit_bias={VOCAB: 1.0})}, "logit_bias"),
    ([[1]], {"sampling": Sampling(banned_words=[[-1]])}, "banned_words")], ids=str)
def test_bad_requests_are_reported_in_one_sentence(
    prompts: Any, call: dict[str, Any], word: str
) -> None:
    with pytest.raises(BadInput, match=word) as error:
        Engine(target()).generate(prompts, **call)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("wrong", [
    {"model": None}, {"model": 5}, {"assistant_model": [1]}, {"tokenizer": 5},
    {"budget": "5"}, {"budget": 1.5}, {"draft_tree": (3, 2)}, {"lossy": 0.5}, {"bucket_size": "x"},
    {"shapes": True}, {"ignore_generation_config": ["num_beams"]}], ids=str)  # fmt: skip
def test_options_of_wrong_types_are_reported_in_one_sentence(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=f"{next(iter(wrong))} was .*; it must be "):
        EngineConfig(**{"model": "demo", **wrong})


# Rounds and counts --------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["recycling", "draft chain", "medusa"])
def test_a_request_that_is_aborted_leaves_the_others_as_they_are(drafter: str) -> None:
    """Also after plain rounds, of which the drafter has yet to hear."""
    engine = Engine(target(), DRAFTERS[drafter](target()), budget=Fading(5))
    alone = [item.tokens for item in engine.generate(prompts(3), max_new_tokens=NEW, batch_size=3)]
    requests = engine.read(prompts(3), max_new_tokens=NEW)
    with engine.scheduled(requests, 3) as scheduler:
        for step in count():
            scheduler.step()
            if step == 3:
                scheduler.abort(requests[0])
            if not scheduler.has_unfinished_requests():
                break
    first, *others = [request.sequences[0] for request in requests]
    assert [row.tokens for row in others] == alone[1:]
    assert first.tokens == alone[0][: len(first.tokens)] and first.finish_reason == "abort"
    assert all(sum(row.stats.seconds.values()) > 0 for row in (first, *others))


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("acceptance", RULES)
def test_the_counts_add_up(drafter: str, acceptance: str) -> None:
    """Also over all calls; seconds are wall time, of a row those in which it ran."""
    engine = Engine(target(), DRAFTERS[drafter](target()), budget=Fading(8), acceptance=acceptance)
    done = engine.generate(prompts(6, seed=12), max_new_tokens=NEW,
                           sampling=replace(WARM, stop_tokens=[7]), n=2)
    for completion in done:
        assert_counts(completion)
    if drafter == "target itself" and acceptance != "match":
        assert accepted_share(done) > 0.5  # what the limit cuts off was drafted in vain
    *_, last = engine.stream([1, 2], max_new_tokens=NEW)
    done.append(last.completion)
    for name in ("rounds", "emitted", "drafted", "accepted"):
        assert getattr(engine.stats, name) == sum(getattr(item.stats, name) for item in done), name
    longest = max(sum(item.stats.seconds.values()) for item in done)
    assert 0 < longest < sum(engine.stats.seconds.values()), "wall time of two calls"


def test_nested_timers_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it fails; time stands still unless it is told."""
    now, clock = [0.0], Clock()
    monkeypatch.setattr(stats, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    with pytest.raises(TimeoutError), clock.decide:
        now[0] += 5
        with clock.draft:
            now[0] += 1
            with clock.verify:
                now[0] += 3
        raise TimeoutError
    assert clock.seconds == {"prefill": 0.0, "draft": 1.0, "verify": 3.0, "decide": 5.0}
    assert clock.total == now[0] == 9.0


def test_options_of_one_row_do_not_affect_others() -> None:
    alone = Sampling(logprobs=True, max_new_tokens=9)
    asked = [alone, replace(alone, top_logprobs=3, max_new_tokens=4), Sampling(max_new_tokens=6)]
    engine = Engine(target())
    requests = engine.read(prompts(3, seed=3), sampling=asked)
    with engine.scheduled(requests, 3) as scheduler:
        while scheduler.has_unfinished_requests():
            scheduler.step()
    assert [len(request.sequences[0].top_logprobs) for request in requests] == [0, 4, 0]
    done = [request.completion(request.sequences[0]).logprobs for request in requests]
    assert [None if scores is None else len(scores) for scores in done] == [9, 4, None]


def test_a_warm_up_goes_on_after_an_end_token() -> None:
    Engine(target(), budget=2, stop_tokens=range(VOCAB)).warm_up(24)
