"""The draft model: what it drafts in one call is what it drafts token by token."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor

from draftproof.core.messages import Accepted, Commit, Frontier, Reading
from draftproof.core.sampling import Prefix, Sampler, Sampling, Wishes
from draftproof.core.tree import ABSENT, TokenTree
from draftproof.decoding.budget import Budget, Confidence, Fixed
from draftproof.decoding.engine import Engine
from draftproof.drafters.draft_model import DraftModel
from draftproof.native.kernels import has_amx, kernels
from draftproof.target.cache import RowCache
from draftproof.target.pack import pack_linears
from draftproof.target.target import Target

found = kernels()
pytestmark = pytest.mark.skipif(found is None or not found.bf16 or has_amx(), reason="no kernels for it here")
VOCAB = 96


def model(layers: int, *, free: bool) -> Target:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=VOCAB, initializer_range=0.3, max_position_embeddings=256, eos_token_id=None,
        tie_word_embeddings=True,
    )  # fmt: skip
    own = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()
    pack_linears(own, free=free)
    return Target(own)


class Recording(DraftModel):
    """Remembers what it drafted, and may be told to draft token by token."""

    def __init__(self, draft: Target, in_calls: bool = False) -> None:
        super().__init__(draft, VOCAB)
        self.in_calls, self.at_once = in_calls, 0
        self.told: list[tuple[Tensor, int, list[Tensor]]] = []          # tokens, nodes in the scratch, and the keys there

    def propose(self, frontier: Frontier) -> TokenTree:
        tree = super().propose(frontier)
        assert isinstance(self.cache, RowCache)
        ends = [length + self.scratch for length in self.cache.lengths[: len(tree.tokens)].tolist()]
        keys = [layer.keys[row, :, :end].clone() for layer in self.cache.layers for row, end in enumerate(ends)]
        self.told.append((tree.tokens.clone(), self.scratch, keys))
        return tree

    def _at_once(self, frontier: Frontier, steps: int) -> Tensor | None:
        chain = None if self.in_calls else super()._at_once(frontier, steps)
        self.at_once += chain is not None
        return chain


def written(drafter: Recording, target: Target, wishes: Sampling, budget: Budget, rows: int) -> list[tuple[object, ...]]:
    prompts = [[5, 1, 7, 2], [4, 4], [9, 8, 7, 6, 5, 9, 8]][:rows]
    done = Engine(target, drafter, budget=budget).generate(prompts, max_new_tokens=30, sampling=wishes, batch_size=rows)
    return [(one.tokens, one.stats.drafted, one.stats.rounds) for one in done]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("budget", [Fixed(1), Fixed(6), Confidence(6, 0.2)], ids=["one", "six", "while confident"])
@pytest.mark.parametrize(
    "wishes",
    [Sampling(), Sampling(temperature=0.7, seed=3), Sampling(temperature=1.6, seed=4)],
    ids=["greedy", "cool", "hot"],
)
def test_a_chain_drafted_in_one_call_is_that_of_many(wishes: Sampling, budget: Budget, rows: int) -> None:
    target, draft = model(3, free=False), model(1, free=True)
    once, often = Recording(draft), Recording(draft, in_calls=True)
    assert written(once, target, wishes, budget, rows) == written(often, target, wishes, budget, rows)
    assert once.at_once == len(once.told) > 0 and not often.at_once
    for (tokens, scratch, keys), (same, so_many, alike) in zip(once.told, often.told, strict=True):
        assert torch.equal(tokens, same) and scratch == so_many
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(keys, alike, strict=True))


def test_a_chain_has_noise_as_far_as_it_goes() -> None:
    """Also of a prefix that does not say how far a draft may reach."""
    draft, chains = model(1, free=True), []
    for ahead in (0, 6):
        drafter = Recording(draft)
        drafter.start(1, 64)
        prompt = torch.tensor([[5, 1, 7, 2]])
        everything = Accepted(torch.arange(3)[None], torch.tensor([3]), prompt[:, 3])
        drafter.observe(Commit.of([0], TokenTree.chain(prompt[:, :3]), Reading(torch.zeros(1, 3, VOCAB)), everything))
        prefix = Prefix(torch.nn.functional.pad(prompt, (0, 20)), torch.tensor([3]), ahead, longest=3)
        wishes = Wishes(Sampling(temperature=0.9, seed=3), prompt_length=4)
        with torch.inference_mode():
            chains.append(drafter.propose(Frontier(prefix, Sampler([wishes]), budget=6)).tokens)
        assert drafter.at_once
    assert torch.equal(*chains)


def test_a_chain_ends_where_nothing_may_be_chosen() -> None:
    """NaN in one row leaves the other alone; what is behind it is absent."""
    draft, target = model(1, free=True), model(3, free=False)
    drafter = Recording(draft)
    propose = drafter.propose

    def broken(frontier: Frontier) -> TokenTree:
        assert isinstance(drafter.cache, RowCache)
        for layer in drafter.cache.layers:
            layer.values[1:] = torch.nan
        return propose(frontier)

    drafter.propose = broken  # type: ignore[method-assign]
    Engine(target, drafter, budget=4).generate([[5, 1, 7], [4, 4, 9]], max_new_tokens=12, batch_size=2)
    both = [tokens for tokens, *_ in drafter.told if len(tokens) == 2]
    assert drafter.at_once and len(both) > 1
    for tokens in both[1:]:                                             # the first proposal reads the prompts anew
        assert (tokens[0] != ABSENT).all() and (tokens[1, 1:] == ABSENT).all()
