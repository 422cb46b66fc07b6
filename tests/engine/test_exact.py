"""What the model would write alone, token for token, with any drafter, alone and in a batch."""

from __future__ import annotations

import pytest
import torch
from drafting import DRAFTERS, Hinted, Oracle, Watch, accepted_share, texts
from tiny import build, model, prompts, shared, target
from transformers import PreTrainedModel

from draftproof.core.params import Sampling
from draftproof.drafters.draft_model import DraftModel
from draftproof.drafters.prompt_lookup import PromptLookup
from draftproof.engine.engine import Engine
from draftproof.engine.load import load
from draftproof.errors import DrafterMismatch
from draftproof.model.target import Target

FAMILIES = ["llama", "qwen3", "gemma2", "gemma3", "gpt2", "gpt-neox", "phi", "mistral-sliding"]
NEW = 20
SAMPLED = Sampling(temperature=0.9, seed=11)


def reference(ours: PreTrainedModel, text: list[int], new: int = NEW) -> list[int]:
    """transformers' own greedy continuation; a token that doubles as padding is text."""
    ids = torch.tensor([text], device=ours.device)
    everything = torch.ones_like(ids)
    out = ours.generate(ids, attention_mask=everything, max_new_tokens=new,
                       do_sample=False, pad_token_id=0)
    return out[0, len(text) :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_matches_transformers(family: str) -> None:
    """Eight at a time, by lookup, a chain, a tree, and a drafter that knows; alone."""
    asked = prompts(8, seed=1)
    wanted = [reference(model(family), text) for text in asked]
    assert len({tuple(text) for text in wanted}) > 4, "it says the same to everything"
    answers = {tuple(text): answer for text, answer in zip(asked, wanted, strict=True)}
    names = ("plain", "prompt-lookup", "draft chain", "target itself, tree")
    hinted = Hinted(Oracle(answers))
    for drafter in [*(DRAFTERS[name](target(family)) for name in names), hinted]:
        done = Engine(target(family), Watch(drafter)).generate(asked, max_new_tokens=NEW)
        assert [completion.tokens for completion in done] == wanted, drafter.name
    assert accepted_share(done) > 0.2
    alone = Engine(target(family), hinted).generate(asked[2], max_new_tokens=NEW)
    assert alone[0].tokens == wanted[2]


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_greedy_is_the_same_under_every_rule(acceptance: str) -> None:
    asked = prompts(6, seed=5)
    wanted = texts(Engine(target()), asked, max_new_tokens=16)
    for drafter in DRAFTERS:
        engine = Engine(target(), DRAFTERS[drafter](target()), acceptance=acceptance)
        assert texts(engine, asked, max_new_tokens=16) == wanted, drafter


def test_a_prompt_of_several_chunks() -> None:
    """Prefill in pieces of 256 tokens, with a draft that must catch up through all of them."""
    ours = target("llama", max_position_embeddings=1024)
    long = torch.randint(40, (600,), generator=torch.Generator().manual_seed(0)).tolist()
    asked = [long, [3, 4], long[:257], long[:256]]
    wanted = texts(Engine(ours), asked, max_new_tokens=8)
    assert wanted[0][0] == reference(ours.model, long, 8)
    for drafter in (DraftModel(target(max_position_embeddings=1024, num_hidden_layers=1), 40),
                    PromptLookup()):
        assert texts(Engine(ours, Watch(drafter)), asked, max_new_tokens=8, batch_size=2) == wanted


def test_more_prompts_than_rows_and_samples_of_each() -> None:
    """The seed decides, and the number of the sample."""
    asked, options = prompts(9, seed=6), {"max_new_tokens": 10, "sampling": SAMPLED}
    engine = Engine(target(), DRAFTERS["draft chain"](target()))
    wanted = [texts(Engine(target()), [text], **options)[0] for text in asked]
    for rows in (1, 2, 5, 64):
        assert texts(engine, asked, batch_size=rows, **options) == wanted
    three = engine.generate(asked[:4], n=3, batch_size=4, **options)
    pairs = [(prompt, sample) for prompt in range(4) for sample in range(3)]
    assert [(sample.prompt, sample.sample) for sample in three] == pairs
    two = engine.generate(asked[:4], n=2, **options)
    first_two = [sample.tokens for sample in three if sample.sample < 2]
    assert first_two == [sample.tokens for sample in two]
    first = [tokens for tokens, _ in wanted[:4]]
    assert [sample.tokens for sample in three if sample.sample == 0] == first
    assert len({tuple(sample.tokens) for sample in three}) > 8, "samples differ"
    other = Sampling(temperature=0.9, seed=12)
    assert texts(engine, asked, max_new_tokens=10, sampling=other) != wanted


@pytest.mark.parametrize("acceptance", ["match", "rejection", "block"])
def test_real_models_write_what_transformers_writes(acceptance: str) -> None:
    loaded = load(shared("models", "tinystories-bitnet-3m"),
               assistant_model=shared("models", "tinystories-llama-260k"), dtype="float64",
               acceptance=acceptance, budget=5)
    asked = [loaded.codec.encode(text) for text in (
        "Once upon a time", "The dog saw a big", "One day, Tom and Lily went to the park. They")]
    wanted = [reference(loaded.target.model, text, 30) for text in asked]
    done = loaded.generate(asked, max_new_tokens=30, sampling=Sampling())
    assert [completion.tokens for completion in done] == wanted and accepted_share(done) > 0.4


def test_a_target_of_chains_only_gets_chains_only() -> None:
    """Chains are the text of transformers, a tree is refused."""
    sizes = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
    ours = Target(build("MambaConfig", **sizes, initializer_range=0.4))
    asked = prompts(3, seed=9)
    for drafter in (PromptLookup(), DraftModel(target(seed=1), 40)):
        done = Engine(ours, drafter).generate(asked, max_new_tokens=NEW)
        assert [sample.tokens for sample in done] == [reference(ours.model, text) for text in asked]
    with pytest.raises(DrafterMismatch, match="trees"):
        Engine(ours, DRAFTERS["draft tree"](ours)).generate(asked)
