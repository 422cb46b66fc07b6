"""A draft model with another tokenizer: the text stays, and its distribution, by three conditions.

The draft's probabilities are those its tokens were drawn from, over the target's tokens and zero
elsewhere; each drafted token is one token of the target, special ones only if both have them; the
draft may read another text than was written.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drafting import texts
from tiny import prompts
from torch import Tensor
from two_tokenizers import LETTERS, OURS, THEIRS, codec, pair, shared

from draftproof.core.acceptance import RULES
from draftproof.core.params import Sampling
from draftproof.core.tree import TokenTree, TreeShape
from draftproof.drafters.draft_other_tokenizer import OtherTokenizer
from draftproof.drafters.draft_vocabulary import SharedVocabulary
from draftproof.engine.engine import Engine
from draftproof.errors import DrafterMismatch


def drafter(shape: TreeShape | None = None) -> OtherTokenizer:
    return OtherTokenizer(pair()[1], shared(), shape)


def test_tokens_are_mapped_by_their_bytes() -> None:
    """Special ones only if both have them. The others have no chance."""
    known = shared().to_draft.tolist()
    settings = {OURS[index]: THEIRS[theirs] for index, theirs in enumerate(known) if theirs >= 0}
    same = {item: item for item in (*LETTERS, "th", "he", "<user>", "<s>")}
    assert settings == {**same, "Ġ": "▁", "<end>": "<eos>"} and shared().count == len(settings)
    ours, theirs = codec(OURS, "<end>", "<user>", "<s>"), codec(THEIRS, "<eos>", "<s>")
    other = SharedVocabulary(ours, theirs, len(OURS), len(THEIRS))
    assert other.to_draft[OURS.index("<user>")] == -1       # their <user> is a text as any other
    assert other.to_draft[OURS.index("<end>")] == THEIRS.index("<eos>")
    logits = torch.randn(2, 3, len(THEIRS), dtype=torch.float64)
    for ours, mine in zip(shared().over_target(logits).unbind(-1), known, strict=True):
        assert torch.equal(ours, logits[..., mine]) if mine >= 0 else (ours == -torch.inf).all()


def test_texts_are_translated_between_tokenizers() -> None:
    ours, theirs, both = OURS.index, THEIRS.index, shared()
    prompt = [ours("<user>"), ours("th"), ours("i"), ours("in"), ours("Ġ"), ours("a")]
    assert both.draft.bytes_for(both.begin(prompt)[1:]) == b"thiin a"
    assert both.begin(prompt)[0] == theirs("<user>")
    assert both.follow([ours("th"), ours("e")]) == [theirs("th"), theirs("e")]
    assert both.draft.bytes_for(both.follow([ours("th"), ours("er"), ours("a")])) == b"thera"
    assert both.target.bytes_for(both.back([theirs("ing"), theirs("▁a")])) == b"ing a"
    assert both.back([theirs("b"), theirs("<eos>")]) == [ours("b"), ours("<end>")]


@pytest.mark.parametrize("shape", [None, TreeShape.branching((2, 2))], ids=["chain", "tree"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.9, seed=2)])
def test_text_equals_plain_decoding(shape: TreeShape | None, sampling: Sampling) -> None:
    """Ragged prompts, in fewer rows than texts; under every rule where greedy, rules agree."""
    ours, asked = pair()[0], prompts(7, vocab=len(OURS))
    options: dict[str, Any] = {"max_new_tokens": 24, "sampling": sampling}
    wanted = texts(Engine(ours), asked, **options)
    rules = RULES if sampling.temperature == 0 and shape is None else ("match",)
    for rule in rules:
        engine = Engine(ours, drafter(shape), acceptance=rule, budget=6 if shape else 4)
        assert texts(engine, asked, **options, batch_size=3) == wanted, rule


def test_a_draft_that_forgets_the_beginning_changes_no_text() -> None:
    """A text longer than the draft's context: it goes on from the last half."""
    ours, asked = pair()[0], prompts(3, vocab=len(OURS))
    short = OtherTokenizer(pair(max_position_embeddings=24)[1], shared())
    wanted = texts(Engine(ours), asked, max_new_tokens=50)
    assert texts(Engine(ours, short, budget=3), asked, max_new_tokens=50) == wanted


def test_the_draft_cache_matches_the_tokens_read() -> None:
    """A draft proposes what one does that reads again, also where rows take the places of
    others."""
    class Fresh(OtherTokenizer):
        def _own_prefix(self, frontier: Any) -> Any:
            prefix = super()._own_prefix(frontier)
            for row in self.rows:
                row.held = 0
            self._cache(len(self.rows)).lengths.zero_()
            self.lag = [len(row.tokens) - 1 for row in self.rows]
            return prefix

    def drafted(kind: Any, temperature: float) -> list[Any]:
        items = list[Any]()

        class Noted(kind):
            def propose(self, frontier: Any) -> TokenTree:
                items.append(super().propose(frontier))
                return items[-1]

        wants = [Sampling(temperature, seed=5, max_new_tokens=8 + 5 * row) for row in range(6)]
        asked, engine = prompts(6, vocab=len(OURS)), Engine(
            pair()[0], Noted(pair()[1], shared()), budget=4)
        engine.generate(asked, sampling=wants, batch_size=4)
        return [tree.tokens.tolist() for tree in items]

    for temperature in (0.0, 0.8):
        assert drafted(OtherTokenizer, temperature) == drafted(Fresh, temperature)


def test_attached_probabilities_are_those_drawn_from() -> None:
    """The draft's distribution of every node is that of its restricted logits after the text before
    it."""
    ours, asked = pair()[0], prompts(2, vocab=len(OURS), seed=3)
    seen: list[tuple[Tensor, Tensor]] = []

    class Kept(OtherTokenizer):
        def propose(self, frontier: Any) -> Any:
            tree = super().propose(frontier)
            seen.append((tree.tokens, tree.draft_probs))
            return tree

    engine = Engine(ours, Kept(pair()[1], shared()), acceptance="rejection", budget=3)
    engine.generate(asked, max_new_tokens=8, sampling=Sampling(temperature=1.0, seed=4))
    known = shared().to_draft >= 0
    for tokens, distribution in seen:
        if distribution is None:
            continue
        assert (distribution[:, 1:, ~known] == 0).all()
        picked = distribution[:, 1:].gather(-1, tokens[:, 1:, None].clamp(min=0))[..., 0]
        assert (picked[tokens[:, 1:] >= 0] > 0).all()
        torch.testing.assert_close(distribution[:, 1:].sum(-1), torch.ones_like(picked))
    assert seen


def test_tokenizers_without_shared_tokens_are_refused() -> None:
    strange = codec(["Ġqq", "qqq", "<x>"], "<x>")
    with pytest.raises(DrafterMismatch, match="share"):
        SharedVocabulary(codec(OURS, "<end>"), strange, len(OURS), 3)
