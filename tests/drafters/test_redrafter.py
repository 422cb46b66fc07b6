"""Recurrent Drafter: its recurrence, beams as published, heads, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from drafting import commit_of, drafted, frontier_of, needs_kernels, packed_target
from tiny import CPU
from torch import Tensor

from draftproof.core.messages import Features, Frontier
from draftproof.core.noise import Role
from draftproof.core.params import Sampling
from draftproof.core.prefix import Paths
from draftproof.core.tree import ABSENT, TokenTree
from draftproof.drafters.base import Drafter
from draftproof.drafters.redrafter import ReDrafter, ReDrafterConfig, ReDrafterHead
from draftproof.errors import BadInput, DrafterMismatch


def random(*shape: int, seed: int = 6) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Tables:
    """A target of which only the tables exist: random, more tokens than Apple's search looks at."""

    name, context, native, device = "tables", 512, None, torch.device("cpu")

    def __init__(
        self, vocab: int = 90, hidden: int = 8, trees: bool = True,
        dtype: torch.dtype = torch.float64,
    ) -> None:  # fmt: skip
        self.vocab_size, self.hidden_size, self.dtype = vocab, hidden, dtype
        self.reads_trees = trees
        self.table, self.out = random(2, vocab, hidden, seed=3).to(dtype)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.table[tokens.clamp(min=0)]

    def unembed(self, hidden: Tensor) -> Tensor:
        return hidden @ self.out.T + 0.25

    def head_rows(self, tokens: Tensor) -> None:
        return None


FORMS: dict[str, dict[str, Any]] = {
    "published": {}, "two blocks": {"num_layers": 2}, "no block": {"num_layers": 0},
    "narrow": {"exit_dim": 11}, "shared": {"share_lm_head": True},
    "tensorrt-llm": {"rnn_activation": "none", "skip_u_at_first_step": True},
    "few": {"known": 20}, "few, shared": {"known": 20, "share_lm_head": True},
}  # fmt: skip


def random_head(
    vocabulary: Any, known: int | None = None, rnn_activation: str = "silu",
    skip_u_at_first_step: bool = False, **form: Any,
) -> ReDrafterHead:  # fmt: skip
    """A head of this form in which every weight matters."""
    head, dice = ReDrafterHead.fresh(vocabulary, **form), torch.Generator().manual_seed(4)
    head.config = replace(head.config, rnn_activation=rnn_activation,
                          skip_u_at_first_step=skip_u_at_first_step)  # fmt: skip
    if known is not None:
        head.limit_vocabulary(torch.randperm(vocabulary.vocab_size, generator=dice)[:known],
                              vocabulary)  # fmt: skip
    for weight in head.parameters():
        if weight.requires_grad:
            weight.data.copy_(torch.randn(weight.shape, generator=dice, dtype=torch.float64) * 0.6)
    return head


def asking(
    drafter: Drafter, hidden: Tensor, roots: list[int], budget: int, **params: Any
) -> Frontier:
    """The drafter observed a token per row with these hidden states [B, H], and `roots` follow."""
    drafter.start(len(roots), 64, CPU)
    for row, state in enumerate(hidden[: len(roots)]):
        drafter.observe(commit_of([row], [[0]], state.view(1, 1, 1, -1)))
    frontier = frontier_of([[0, root] for root in roots], budget, Sampling(**params))
    return replace(frontier, prefix=replace(frontier.prefix, ahead=budget))


def distribution_after(
    head: ReDrafterHead, vocabulary: Any, context: Tensor, drafted: list[int]
) -> Tensor:
    """[V] log-probabilities after `drafted` tokens, the state run through from the beginning."""
    weights = {name: weight.detach() for name, weight in head.state_dict().items()}
    form, state = head.config, torch.zeros_like(context)
    for place, token in enumerate(drafted):
        mixed = weights["rnn_w.weight"] @ vocabulary.table[token]
        if place > 0 or not form.skip_u_at_first_step:
            mixed = mixed + weights["rnn_u.weight"] @ state + weights["rnn_u.bias"]
        state = mixed * torch.sigmoid(mixed) if form.rnn_activation == "silu" else mixed
    inner = torch.cat([context, state])
    if "input_proj.weight" in weights:
        inner = weights["input_proj.weight"] @ inner + weights["input_proj.bias"]
    for block in range(form.num_layers):
        name = f"lm_head.{block}.linear"
        mixed = weights[f"{name}.weight"] @ inner + weights[f"{name}.bias"]
        inner = inner + mixed * torch.sigmoid(mixed)
    ours = weights.get(f"lm_head.{form.num_layers}.weight")
    logits = ours @ inner if ours is not None else vocabulary.unembed(inner)
    if (known := weights.get("token_map")) is not None:     # the others never come
        few, logits = logits if ours is not None else logits[known], torch.full((90,), -math.inf)
        logits = logits.double().index_copy(0, known, few)
    return logits.log_softmax(0)


@pytest.mark.parametrize("form", FORMS)
def test_nodes_are_the_likeliest_that_the_published_search_weighs(form: str) -> None:
    """The first levels of every beam, by the probability of the whole path; in every row."""
    tables, (width, length), roots = Tables(), (3, 4), [5, 80, 41]
    head, hidden = random_head(tables, **FORMS[form]), random(3, 8, seed=1)
    for budget in (1, 2, 5, 9, 100):
        drafter = ReDrafter(head, tables, width=width, length=length)
        tree = drafter.propose(asking(drafter, hidden, roots, budget))
        for row, root in enumerate(roots):
            beams, weighed = [((), 0.0)], {(): 0.0}
            for _ in range(length):
                grown = []
                for path, score in beams:
                    best = distribution_after(head, tables, hidden[row], [root, *path]).topk(width)
                    for step, token in zip(*best, strict=True):
                        grown.append(((*path, int(token)), score + float(step)))
                beams = sorted(grown, key=lambda item: -item[1])[:width]
                weighed |= dict(grown)
            deep = [path for path in weighed if len(path) <= budget]
            wanted = sorted(deep, key=lambda path: -weighed[path])[: budget + 1]
            if budget >= width:  # a narrower budget searches with fewer beams
                chances = {path: math.exp(weighed[path]) for path in wanted if path}
                assert drafted(tree, row) == pytest.approx(chances, rel=1e-5, abs=1e-7)
            assert len(drafted(tree, row)) <= budget


def test_a_target_of_chains_gets_the_best_first_chain() -> None:
    hidden = random(2, 8, seed=1)
    for trees in (False, True):
        tables = Tables(trees=trees)
        head = random_head(tables)
        drafter = ReDrafter(head, tables, width=4, length=3)
        frontier = asking(drafter, hidden, [5, 80], budget=9)
        tree = drafter.propose(Frontier(frontier.prefix, frontier.sampler, 9, trees=False))
        assert tree.is_chain and tree.tokens.shape == (2, 4)
        for row, chain in enumerate(tree.tokens.tolist()):
            for place in range(1, 4):
                distribution = distribution_after(head, tables, hidden[row], chain[:place])
                assert int(distribution.argmax()) == chain[place]


@pytest.mark.parametrize("params",
                         [{"temperature": 0.5, "seed": 5}, {"repetition_penalty": 1.7},
                          {"temperature": 2.0, "no_repeat_ngram": 1, "top_p": 0.95, "seed": 2}])
def test_each_beam_uses_the_noise_of_its_own_path(params: dict[str, Any]) -> None:
    """Children are the target's best tokens, noise and penalties included, given their own path.

    A temperature below 1 magnifies the differences between draft and target: less is sure."""
    tables = Tables()
    head = random_head(tables)
    hidden = random(1, 8, seed=6)
    drafter = ReDrafter(head, tables, width=3, length=3)
    frontier = asking(drafter, hidden, [7], budget=18, **params)
    tree = drafter.propose(frontier)
    confidence = drafted(tree)
    paths = [(), *confidence]
    for path in paths:
        children = {other[-1] for other in paths if other[:-1] == path and other}
        logits = distribution_after(head, tables, hidden[0], [7, *path])[None, None]
        chain = TokenTree.chain(torch.tensor([[7, *path]]))
        here = Paths(frontier.prefix, chain, first=len(path))
        scores = frontier.sampler.gumbel_logits(logits, here, Role.TARGET)
        assert children <= set(scores[0, 0].topk(3).indices.tolist())
        sure = (scores * min(params.get("temperature", 1), 1)).softmax(-1)[0, 0]
        for child in children:
            chance = float(sure[child]) * confidence.get(path, 1.0)
            assert confidence[*path, child] == pytest.approx(chance, rel=1e-3)
    inner = [path for path in paths if any(other[:-1] == path for other in paths if other)]
    assert len(paths) == 19 and len(inner) > 3


def test_disallowed_tokens_are_not_drafted() -> None:
    """Fewer tokens allowed than beams: the rest is absent, and so is what would follow."""
    tables = Tables()
    hidden = random(2, 8, seed=6)
    drafter = ReDrafter(random_head(tables), tables, width=4, length=3)
    allowed = {token: float("-inf") for token in range(90) if token not in (3, 8)}
    inputs = (drafter, hidden, [7, 9], 30)
    tree = drafter.propose(asking(*inputs, logit_bias=allowed))
    tokens = tree.tokens[tree.present]
    assert set(tokens.tolist()) == {3, 7, 8, 9} and tokens.numel() <= 2 * (1 + 2 + 4 + 8)
    nothing = {token: float("-inf") for token in range(90)}
    tree = drafter.propose(asking(*inputs, logit_bias=nothing))
    assert (tree.tokens[:, 1:] == ABSENT).all()


@needs_kernels
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "form",
    [{}, {"share_lm_head": True, "num_layers": 2}, {"exit_dim": 96, "num_layers": 0},
     {"share_lm_head": True, "known": 30, "rnn_activation": "none", "skip_u_at_first_step": True},
     {"known": 30}], ids=["published", "shared", "narrow", "few, shared", "few"],
)  # fmt: skip
def test_a_search_in_one_call_matches_step_by_step(form: dict[str, Any], tied: bool) -> None:
    """The same nodes and confidence but for near ties: sampled and greedy, ending early."""
    tables = packed_target(tied)
    head = random_head(tables, **form)
    for weight in head.parameters():
        weight.data *= 0.15                                 # what bfloat16 tells apart
    drafter = ReDrafter(head, tables, width=3, length=4)
    hidden = torch.randn(40, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    same = nodes = 0
    with torch.inference_mode():
        for trial, temperature in enumerate((0.0, 0.7, 1.3, 0.0)):
            params = {"temperature": temperature, "seed": trial}
            frontier = asking(drafter, hidden, list(range(40)), 99, **params)
            frontier = replace(frontier, min_confidence=0.3 if trial == 3 else 0.0)
            once, native = drafter.propose(frontier), drafter.packed
            drafter.packed = None
            often, drafter.packed = drafter.propose(frontier), native
            assert native is not None and once.tokens.shape == often.tokens.shape
            assert once.tokens.shape[1] == 1 + 3 + 9 + 9 + 9 or trial == 3
            for row in range(40):
                confidence = drafted(once, row)
                for path, chance in drafted(often, row).items():
                    nodes += 1
                    same += abs(confidence.get(path, -1) - chance) <= 0.05 * chance + 1e-6
    assert same > 0.97 * nodes


# Heads ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_training_unrolls_the_same_recurrence(form: str) -> None:
    """Row t of step i: the hidden state of token t, run over tokens t + 1 to t + 1 + i."""
    tables = Tables()
    head = random_head(tables, steps=3, **FORMS[form])
    tokens = torch.randint(90, (2, 7), generator=torch.Generator().manual_seed(1))
    hidden = random(2, 7, 1, 8, seed=1)
    items = list(head.predict(Features(tokens, hidden, torch.ones(2, 7)), tables))
    known = slice(None) if head.token_map is None else head.token_map
    assert [len(item[0]) for item in items] == [5, 4, 3]
    for step, logits in enumerate(items):
        for row in range(2):
            for t in range(5 - step):
                consumed = tokens[row, t + 1 : t + 2 + step].tolist()
                distribution = distribution_after(head, tables, hidden[row, t, 0], consumed)
                torch.testing.assert_close(logits[row, t].log_softmax(-1), distribution[known])


def test_a_fresh_head_begins_near_the_target() -> None:
    """Without the recurrence's share, its first logits are the target's own."""
    tables = Tables()
    hidden = random(5, 8, seed=1)
    for form in ({}, {"exit_dim": 11}, {"share_lm_head": True}):
        head = ReDrafterHead.fresh(tables, **form)
        offset = 0.0 if form.get("share_lm_head") else 0.25
        result = head.logits(hidden, torch.zeros_like(hidden), tables) + offset
        torch.testing.assert_close(result, tables.unembed(hidden))
    head = ReDrafterHead.fresh(tables)
    states = head.advance(tables.embed(torch.arange(90)), None)
    assert 0.1 < float(states.detach().square().mean().sqrt()) < 3
    again = ReDrafterHead.fresh(tables).state_dict()
    assert all(torch.equal(again[name], weight) for name, weight in head.state_dict().items())


def test_least_squares_find_a_distribution_between_hidden_states() -> None:
    """Texts whose every hidden state is P [h; s; 1] of the one before give P; else nothing moves.

    Of tokens that are not in the loss they may be anything."""
    tables, rng = Tables(), torch.Generator().manual_seed(0)
    head = ReDrafterHead.fresh(tables, steps=1, share_lm_head=True).double()
    distribution = ReDrafterHead.fresh(tables, steps=1, share_lm_head=True).double().input_proj
    torch.nn.init.normal_(distribution.weight, std=0.2, generator=rng)
    tokens = torch.randint(90, (20, 30), generator=rng)
    states = head.advance(tables.embed(tokens), None)
    hidden = [random(20, 8, seed=2)]
    for place in range(1, 30):
        hidden.append(distribution(torch.cat([hidden[-1], states[:, place]], -1)))
    weights = torch.ones(tokens.shape)
    hidden[12], weights[:, 13:15] = random(20, 8, seed=3), 0.0      # it is broken around here
    features = Features(tokens, torch.stack(hidden, 1)[:, :, None].detach(), weights)
    head.solve(iter([features]), tables)
    torch.testing.assert_close(head.input_proj.weight, distribution.weight, atol=2e-2, rtol=0)
    torch.testing.assert_close(head.input_proj.bias, distribution.bias, atol=2e-2, rtol=0)
    fresh, wide = (ReDrafterHead.fresh(tables) for _ in range(2))
    wide.solve(iter([features]), tables)                            # as published: no projection
    pairs = zip(wide.parameters(), fresh.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


def test_the_head_that_was_given_stays_as_it_is() -> None:
    """Decoding copies, in half precision too: packing must not reach the user's weights."""
    tables = Tables(vocab=256, hidden=64, dtype=torch.bfloat16)
    head = ReDrafterHead.fresh(tables).bfloat16()
    settings = {name: weight.clone() for name, weight in head.state_dict().items()}
    drafter = ReDrafter(head, tables)
    hidden = torch.randn(1, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.inference_mode():
        assert bool(drafter.propose(asking(drafter, hidden, [3], budget=9)).present.all())
    assert all(torch.equal(settings[name], weight) for name, weight in head.state_dict().items())


def test_mismatched_drafters_are_refused() -> None:
    """But a few rows more or less, which are padding: no token is drafted that either lacks."""
    tables = Tables()
    for rows in (80, 100):
        form = ReDrafterConfig(hidden_size=8, vocab_size=rows, exit_dim=16, share_lm_head=False)
        drafter = ReDrafter(ReDrafterHead(form).double(), tables, width=min(rows, 90), length=1)
        frontier = asking(drafter, random(1, 8), [3], budget=90)
        tokens = drafter.propose(frontier).tokens[0, 1:]
        assert set(tokens.tolist()) - {ABSENT} == set(range(min(rows, 90)))
    for wrong in ({"hidden_size": 16}, {"vocab_size": 5000}):
        with pytest.raises(DrafterMismatch, match=f"{next(iter(wrong.values()))}.*tables has"):
            ReDrafter(ReDrafterHead(replace(form, **wrong)), tables)
    head = ReDrafterHead.fresh(tables)
    for wrong in ({"width": 0}, {"length": 0}, {"width": 91}):
        with pytest.raises(BadInput):
            ReDrafter(head, tables, **wrong)
    for wrong in ({"exit_dim": 7}, {"exit_dim": 17}, {"share_lm_head": True, "exit_dim": 9},
                  {"steps": 0}):
        with pytest.raises(BadInput):
            ReDrafterHead.fresh(tables, **wrong)
    with pytest.raises(BadInput, match="rnn_activation"):
        replace(form, rnn_activation="tanh")
