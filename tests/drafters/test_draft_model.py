"""The draft model: what it drafts in one call is what it drafts token by token."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from drafting import packed_target
from tiny import CPU, of_family
from torch import Tensor

from draftproof.cache.kv_cache import KVCache
from draftproof.core.messages import Frontier
from draftproof.core.params import Sampling, SamplingParams
from draftproof.core.prefix import Paths, Prefix
from draftproof.core.sampling import Sampler
from draftproof.core.tree import ABSENT, TokenTree
from draftproof.drafters.draft_model import CONFIDENCE_SCALE, DraftModel
from draftproof.engine.budget import Budget, Fixed
from draftproof.engine.engine import Engine
from draftproof.engine.load import load
from draftproof.model.target import Target
from draftproof.native.kernels import kernels
from draftproof.requests.stats import State
from draftproof.weights.packed_linear import pack_linears

pytestmark = pytest.mark.skipif(kernels() is None, reason="no kernels for it here")
VOCAB = 96


def model(layers: int) -> Target:
    return packed_target(layers=layers)


FAMILIES = {
    "divided logits": ("Granite",
                       {"embedding_multiplier": 3.0, "residual_multiplier": 0.4,
                        "attention_multiplier": 0.2, "logits_scaling": 4.0}),
    "heads that do not turn": ("SmolLM3", {"no_rope_layers": [0, 1]}),
    "windows and angles of two kinds": ("Gemma3",
                                        {"head_dim": 16, "sliding_window": 70,
                                         "layer_types": ["full_attention", "sliding_attention"],
                                         "query_pre_attn_scalar": 16})
}  # fmt: skip


def of_kind(family: str) -> Target:
    name, extra = FAMILIES[family]
    ours = of_family(name, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                    num_attention_heads=4, num_key_value_heads=2, vocab_size=VOCAB,
                    initializer_range=0.3, max_position_embeddings=256, eos_token_id=None,
                    pad_token_id=None, **extra).to(torch.bfloat16)  # fmt: skip
    pack_linears(ours)
    return Target(ours)


class Recording(DraftModel):
    """Remembers what it drafted, and may be told to draft token by token."""

    def __init__(self, draft: Target, in_calls: bool = False) -> None:
        super().__init__(draft, VOCAB)
        self.in_calls, self.at_once = in_calls, list[TokenTree]()
        self.told: list[tuple[TokenTree, list[int], list[Tensor]]] = []
        """Trees, reads of each row, and keys up to there."""

    def propose(self, frontier: Frontier) -> TokenTree:
        tree = super().propose(frontier)
        assert isinstance(self.cache, KVCache) and self.scratch is not None
        reads = torch.as_tensor(self.scratch).expand(len(tree.tokens)).tolist()
        ends = [length + ours
                for length, ours in zip(self.cache.lengths.tolist(), reads, strict=False)]
        keys = [layer.keys[row, :, :end].clone() for layer in self.cache.layers
                for row, end in enumerate(ends)]
        most = frontier.max_draft_tokens
        self.told.append((tree.within_budget(most) if tree.budget_rank is None else tree,
                          reads, keys))
        return tree

    def _in_one_call(self, frontier: Frontier, steps: int) -> TokenTree | None:
        chain = None if self.in_calls else super()._in_one_call(frontier, steps)
        self.at_once += [chain] if chain is not None else []
        return chain


def written(
    drafter: Recording | None, target: Target, params: Sequence[Sampling], budget: Budget, rows: int
) -> list[tuple[object, ...]]:
    prompts = [[5, 1, 7, 2], [4, 4], [9, 8, 7, 6, 5, 9, 8]][:rows]
    options = {"max_new_tokens": 30, "sampling": params[:rows], "batch_size": rows}
    done = Engine(target, drafter, budget=budget).generate(prompts, **options)
    return [(item.tokens, item.stats.drafted, item.stats.rounds) for item in done]


class Shared(Budget):
    """So many tokens per row, of which one row may have more."""

    def __init__(self, count: int, most: int, floor: float) -> None:
        self.count, self.max_draft_tokens, self.min_confidence = count, most, floor

    def choose(self, state: State) -> int:
        return self.count


COOL, HOT = Sampling(temperature=0.7, seed=3), Sampling(temperature=1.6, seed=4)
BUDGETS = {"one": Fixed(1), "six": Fixed(6), "while confident": Fixed(6, 0.2),
           "two shared": Shared(2, 6, 1e-9), "three shared": Shared(3, 10, 0.02)}  # fmt: skip


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
@pytest.mark.parametrize("params",
                         [[Sampling()] * 3, [COOL] * 3, [HOT] * 3, [COOL, HOT, Sampling()]],
                         ids=["greedy", "cool", "hot", "each its own"])
def test_a_chain_drafted_in_one_call_equals_step_by_step(
    params: Sequence[Sampling], budget: Budget, rows: int
) -> None:
    target, draft = model(3), model(1)
    once, often = Recording(draft), Recording(draft, in_calls=True)
    text = written(once, target, params, budget, rows)
    assert text == written(often, target, params, budget, rows)
    assert [item[0] for item in text] == [item[0]
                                         for item in written(None, target, params, Fixed(0), rows)]
    assert len(once.at_once) == len(once.told) > 0 and not often.at_once
    for (tree, reads, keys), (same, often_read, alike) in zip(once.told, often.told, strict=True):
        assert torch.equal(tree.tokens, same.tokens)
        assert all(max(1, size) <= mine <= other
                   for mine, size, other in zip(reads, tree.sizes, often_read, strict=True))
        assert all(torch.equal(ours, theirs[:, : ours.shape[1]])
                   for ours, theirs in zip(keys, alike, strict=True))
        if tree.budget_rank is not None and same.budget_rank is not None:
            assert torch.equal(tree.budget_rank * tree.present, same.budget_rank * same.present)
    if rows > 1 and isinstance(budget, Shared):
        trees = [tree for tree, *_ in once.told if len(tree.tokens) == rows]
        assert all(sum(tree.sizes) <= budget.count * rows for tree in trees)
        assert any(max(tree.sizes) > budget.count > min(tree.sizes) for tree in trees)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_drafts_by_its_own_distribution(family: str) -> None:
    """For itself it is right nearly always, however it is drawn: rounding decides little."""
    target = of_kind(family)
    for params in ([Sampling()] * 3, [COOL] * 3):
        drafter = Recording(target)
        texts = written(drafter, target, params, Fixed(4), 1)
        assert [text[0] for text in texts] == [text[0]
                                             for text in written(None, target, params, Fixed(0), 1)]
        assert len(drafter.at_once) == len(drafter.told) > 0
        assert len(drafter.told) < 1.1 * sum(len(text[0]) for text in texts) / 5
        assert max(tree.sizes[0] for tree, *_ in drafter.told) == 4


def test_chains_end_where_no_token_is_allowed() -> None:
    """NaN in one row leaves the other alone; what is after it is absent."""
    draft, target = model(1), model(3)

    class Broken(Recording):
        def propose(self, frontier: Frontier) -> TokenTree:
            assert isinstance(self.cache, KVCache)
            for layer in self.cache.layers:
                layer.values[1:] = torch.nan
            return super().propose(frontier)

    drafter = Broken(draft)
    Engine(target, drafter, budget=4).generate([[5, 1, 7], [4, 4, 9]], max_new_tokens=12,
                                               batch_size=2)
    both = [tree.tokens for tree, *_ in drafter.told if len(tree.tokens) == 2]
    assert drafter.at_once and len(both) > 1
    for tokens in both[1:]:  # the first proposal reads the prompts again
        assert (tokens[0] != ABSENT).all() and (tokens[1, 1:] == ABSENT).all()


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.5])
def test_draft_tokens_follow_the_draft_distribution(temperature: float) -> None:
    """The draft model's first choice is the target's as often as its chance says."""
    engine = load("demo", assistant_model="demo-draft", quantize_draft="none")
    assert isinstance(engine.drafter, DraftModel) and engine.codec is not None
    draft, chances, hits = engine.drafter.model, list[Tensor](), list[Tensor]()
    prompts = ["Once upon a time", "Lily and Tom", "The big dog", "One day, Ben"]
    for seed, prompt in enumerate(prompts * (2 if temperature else 1)):
        want, begin = Sampling(temperature=temperature, seed=seed), engine.codec.encode(prompt)
        done = engine.generate([prompt], max_new_tokens=96, sampling=want)[0]
        text, first = torch.tensor([[*begin, *done.tokens]]), len(begin)
        tree = TokenTree.chain(text[:, :-1])
        with torch.inference_mode():
            logits = draft.read(tree, draft.new_cache(1, 128)).logits
        paths = Paths(Prefix(text, torch.tensor([0])), tree)
        sampler = Sampler([SamplingParams(want, first)], ops=CPU)
        confidence, choices = sampler.best(logits, paths, 1, CONFIDENCE_SCALE)
        chances.append(confidence[0, first - 1 :, 0].exp())
        hits.append(choices[0, first - 1 :, 0] == text[0, first:])
    supposed, came = torch.cat(chances), torch.cat(hits).float()
    assert float(supposed.mean()) == pytest.approx(float(came.mean()), abs=0.1)
