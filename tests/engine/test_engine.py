"""Every wish is honoured exactly, whatever drafts: penalties, processors, logprobs, counts."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from drafting import DRAFTERS, Fading, accepted_share, assert_counts
from tiny import VOCAB, fresh, model, prompts, target
from torch import Tensor

from draftproof.core.acceptance import RULES
from draftproof.core.params import Sampling
from draftproof.engine.engine import Engine
from draftproof.errors import BadInput, BrokenModel
from draftproof.model.target import Target

NEW = 16
WARM = Sampling(temperature=0.9, seed=5)


def test_wishes_are_those_of_transformers_generate() -> None:
    """Greedy with processors: the same text as ``generate`` with the same options."""
    own, asked = (
        model(),
        [text for text in prompts(9, seed=9) if len(text) > 2],
    )  # transformers skips words longer than the text
    want = Sampling(repetition_penalty=1.3, no_repeat_ngram=2, banned_words=[[3], [5, 6]],
                    min_new_tokens=6, stop_tokens=[1, 2, 4, 8, 9])
    engine = Engine(target(), DRAFTERS["target itself, tree"](target()))
    for text in asked:
        theirs = own.generate(torch.tensor([text]), attention_mask=torch.ones(1, len(text)),
                              max_new_tokens=NEW, do_sample=False, pad_token_id=0,
                              repetition_penalty=1.3, no_repeat_ngram_size=2,
                              bad_words_ids=[[3], [5, 6]], min_new_tokens=6,
                              eos_token_id=[1, 2, 4, 8, 9])
        (ours,) = engine.generate(text, max_new_tokens=NEW, sampling=want)
        assert ours.tokens == theirs[0, len(text) :].tolist()


@pytest.mark.parametrize("sampling",
                         [Sampling(logprobs=True),
                          replace(WARM, top_k=5, repetition_penalty=1.5, logprobs=True)])
def test_logprobs_are_those_of_the_unprocessed_model(sampling: Sampling) -> None:
    asked = prompts(5, seed=10)
    for drafter in ("plain", "draft tree", "guess", "target itself"):
        for one in Engine(target(), DRAFTERS[drafter](target())).generate(
            asked, max_new_tokens=NEW,
            sampling=[replace(sampling, top_logprobs=top) for top in range(len(asked))],
        ):
            text = [*asked[one.prompt], *one.tokens]
            law = model()(torch.tensor([text])).logits[0].detach().log_softmax(-1)
            scores, tokens = law[len(asked[one.prompt]) - 1 : -1].topk(one.prompt)
            assert (one.top_logprobs is None) == (one.prompt == 0)
            for found, score, token in zip(one.top_logprobs or (), scores, tokens, strict=False):
                assert [place for place, _ in found] == token.tolist()
                assert [value for _, value in found] == pytest.approx(score.tolist(), abs=1e-9)
            assert len(one.top_logprobs or one.tokens) == len(one.tokens)
            wanted = [float(law[place - 1, text[place]])
                      for place in range(len(asked[one.prompt]), len(text))]
            assert one.logprobs == pytest.approx(wanted, abs=1e-9)
    assert Engine(target()).generate(asked[0], max_new_tokens=2)[0].logprobs is None


# What cannot be honoured --------------------------------------------------------------------------


class Counting:
    """Keeps state: answers by how often it was asked."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, text: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return scores + self.calls


@pytest.mark.parametrize(("processor", "word"),
                         [(Counting(), "state"),
                          (lambda text, scores: scores + torch.rand(1), "state"),
                          (lambda text, scores: scores[:, :3], "shape"),
                          (lambda text, scores: 1 / 0, "fails")],
                         ids=["counts", "random", "shape", "raises"])
def test_a_processor_that_is_no_function_of_the_text_is_refused(processor, word: str) -> None:
    with pytest.raises(BadInput, match=word):
        Engine(target()).generate([[1, 2]], sampling=Sampling(processors=[processor]))
    if isinstance(processor, Counting):
        assert processor.calls == 0, "the user's object is not touched"


@pytest.mark.parametrize("acceptance", RULES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_allowed_is_said_not_chosen(acceptance: str, temperature: float) -> None:
    def only_at_first(text: Tensor, scores: Tensor) -> Tensor:
        return scores if text.shape[1] < 5 else torch.full_like(scores, -torch.inf)

    for drafter in ("prompt-lookup", "draft chain", "draft tree"):
        engine = Engine(target(), DRAFTERS[drafter](target()), acceptance=acceptance)
        wanted = Sampling(temperature=temperature, processors=[only_at_first])
        (done,) = engine.generate([[1, 2, 3]], max_new_tokens=9, sampling=wanted)
        assert done.finish_reason == "error" and len(done.tokens) == 2
        with pytest.raises(BadInput, match="forbidden"):
            done.checked()


@pytest.mark.parametrize("acceptance", RULES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_cannot_go_on_ends_alone(acceptance: str, temperature: float) -> None:
    """One meets NaN, one has no next token; the others, and those that come, notice nothing."""
    def not_behind_seven(text: Tensor, scores: Tensor) -> Tensor:
        stuck = (text[:, 0] == 7) & (text.shape[1] > 4)
        return torch.where(stuck[:, None], -torch.inf, scores)

    broken, kept = Target(fresh("llama")), [[1, 2, 3], [4, 2, 9], [8, 8, 1], [6, 2, 2], [3, 1, 4]]
    engine = Engine(broken, DRAFTERS["draft chain"](broken), acceptance=acceptance)
    wanted = Sampling(temperature, processors=[not_behind_seven], banned_words=[(5,)])
    options = {"max_new_tokens": 8, "sampling": wanted, "batch_size": 3}
    before = [one.tokens for one in engine.generate(kept, **options)]
    with torch.no_grad():
        broken.model.model.embed_tokens.weight[5] = torch.nan
    asked = [[1, 5, 3], kept[0], [7, 2, 3], *kept[1:3], [2, 5], *kept[3:]]
    done = engine.generate(asked, **options)
    ended = ((0, BrokenModel, "NaN"), (2, BadInput, "forbidden"), (5, BrokenModel, "NaN"))
    for place, kind, why in ended:
        assert done[place].finish_reason == "error" and len(done[place].tokens) == (place == 2) * 2
        with pytest.raises(kind, match=why):
            done[place].checked()
    alone = [one.tokens for one in done if one.error is None]
    if temperature and acceptance != "match":               # coins fall otherwise beside others
        alone, before = ([len(tokens) for tokens in texts] for texts in (alone, before))
    assert alone == before


@pytest.mark.parametrize(
    ("call", "word"),
    [({"prompts": []}, None), ({"prompts": [[]]}, "empty"), ({"prompts": [[1, 99]]}, "99"),
     ({"prompts": "text"}, "tokenizer"),
     ({"prompts": [[1]], "max_new_tokens": 0}, "max_new_tokens"),
     ({"prompts": [[1]], "n": 0}, "n was 0"), ({"prompts": [[1]], "batch_size": 0}, "batch_size"),
     ({"prompts": [[1]], "sampling": [Sampling()] * 2}, "2 samplings"),
     ({"prompts": [[1]], "sampling": Sampling(stop="x")}, "tokenizer"),
     ({"prompts": [[1]], "sampling": Sampling(banned_words="x")}, "tokenizer"),
     ({"prompts": [[1]], "sampling": Sampling(logit_bias={VOCAB: 1.0})}, "logit_bias"),
     ({"prompts": [[1]], "sampling": Sampling(banned_words=[[-1]])}, "banned_words")],
    ids=str
)
def test_bad_requests_are_one_sentence(call: dict, word: str | None) -> None:
    if word is None:
        assert Engine(target()).generate(**call) == []
        return
    with pytest.raises(BadInput, match=word) as error:
        Engine(target()).generate(**call)
    assert "\n" not in str(error.value)


def test_rounds_show_every_row_until_it_has_ended() -> None:
    """All rows at first, then those that had not ended; the texts are those of `generate`."""
    engine, texts = Engine(target(), budget=3), prompts(5, seed=3)
    wanted = replace(WARM, stop_tokens=[7, 11])
    seen = [[(row.request, len(row.tokens)) for row in rows]
            for rows in engine.rounds(texts, max_new_tokens=NEW, sampling=wanted, batch_size=2)]
    assert seen[0] == [(0, 1), *((later, 0) for later in range(1, 5))] and len(seen[-1]) <= 2
    whole = {one.prompt: len(one.tokens)
             for one in engine.generate(texts, max_new_tokens=NEW, sampling=wanted, batch_size=2)}
    for before, after in pairwise(seen):
        ended = dict(before).keys() - dict(after).keys()
        assert {row: dict(before)[row] for row in ended} == {row: whole[row] for row in ended}
        assert all(dict(after)[row] >= dict(before)[row] for row in dict(after))
    assert dict(seen[-1]) == {row: whole[row] for row in dict(seen[-1])}


def test_whoever_stops_listening_is_told_the_seconds() -> None:
    """Of rows that ended and of those that would have gone on, whose rounds are more."""
    rounds = Engine(target(), DRAFTERS["draft chain"](target()), budget=2).rounds(
        prompts(2, seed=3), sampling=[Sampling(max_new_tokens=2), Sampling(max_new_tokens=40)]
    )
    rows = next(rounds)
    for _ in range(3):
        next(rounds)
    short, long = (row.stats for row in rows)
    assert rows[0].finish_reason == "length" and rows[1].finish_reason is None
    ended = dict(short.seconds)
    rounds.close()  # type: ignore[attr-defined]
    assert short.seconds == ended and all(long.seconds[part] > ended[part] > 0
                                          for part in ("draft", "verify", "decide"))


# Counts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("acceptance", RULES)
def test_the_counts_add_up(drafter: str, acceptance: str) -> None:
    engine = Engine(target(), DRAFTERS[drafter](target()), budget=Fading(8), acceptance=acceptance)
    done = engine.generate(prompts(6, seed=12), max_new_tokens=NEW,
                           sampling=replace(WARM, stop_tokens=[7]), n=2)
    for one in done:
        assert_counts(one)
    if drafter == "target itself" and acceptance != "match":
        assert accepted_share(done) > 0.5  # what the limit cuts off was drafted in vain
