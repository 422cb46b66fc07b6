"""Closed shapes: the same text, few graphs, one read a round; and what breaks that is seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from drafting import DRAFTERS, LEARNERS, texts
from helpers.device_emulation import LENGTHS, PARTS, ForbiddenOnDevice, emulate
from tiny import fresh, prompts, target

from draftproof.cache.kv_cache import KVCache
from draftproof.core.messages import Commit, Frontier
from draftproof.core.params import Sampling
from draftproof.core.tree import TokenTree, TreeShape
from draftproof.drafters.base import Drafter, Plain
from draftproof.drafters.draft_model import DraftModel
from draftproof.drafters.prompt_lookup import PromptLookup
from draftproof.engine.budget import Adaptive, Budget
from draftproof.engine.engine import Engine
from draftproof.engine.shape_policy import ShapePolicy
from draftproof.errors import BadInput
from draftproof.model.target import Target

CLOSED = ShapePolicy(closed=True)
WARM = Sampling(temperature=0.9, top_k=30, top_p=0.95, seed=3)


@lru_cache(maxsize=4)
def single(layers: int = 2, seed: int = 0) -> Target:
    """A target in float32: a Gaudi has no float64."""
    return Target(fresh("llama", seed, num_hidden_layers=layers).float())


def made(name: str) -> Drafter:
    """As `DRAFTERS` has it; a draft model in float32, too."""
    shapes = {"draft chain": None, "draft tree": TreeShape.branching((2, 2))}
    if name in shapes:
        return DraftModel(single(1, 1), single().vocab_size, shapes[name])
    return DRAFTERS[name](single())


# The text -----------------------------------------------------------------------------------------


class Fading(Budget):
    """A budget that goes to 0 for long, and comes back: a draft reads what it missed."""

    most, round = 3, 0

    def choose(self, state: object) -> int:
        self.round += 1
        return (3, 0, 0, 3, *[0] * 10, 1)[self.round % 15]


@pytest.mark.parametrize("name", [name for name in DRAFTERS if name != "guess"])
def test_closed_shapes_change_no_text(name: str) -> None:
    """More ragged prompts than rows, one of several chunks; rows that nobody needs are not heard,
    and as much is accepted."""
    asked = [*prompts(5), list(range(13)) * 30]
    params = [Sampling(), WARM, *[Sampling(logprobs=True)] * 2, WARM,
              replace(WARM, repetition_penalty=1.3)]
    wish = {"max_new_tokens": 9, "sampling": params, "batch_size": 3, "n": 1 + (name == "medusa")}
    model = target("llama", max_position_embeddings=512)
    done = [Engine(model, DRAFTERS[name](model), shapes=shapes).generate(asked, **wish)
            for shapes in (None, CLOSED)]
    tokens = [[sample.tokens for sample in completion] for completion in done]
    assert tokens[0] == tokens[1] == [text for text, _ in texts(Engine(model), asked, **wish)]
    if name not in LEARNERS:
        accepted = [[sample.stats.accepted for sample in completion] for completion in done]
        assert accepted[0] == accepted[1]
    fading = Engine(model, DRAFTERS[name](model), shapes=CLOSED, budget=Fading())
    assert [text for text, _ in texts(fading, asked, **wish)] == tokens[0]


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_closed_shapes_draw_the_same(rule: str) -> None:
    drafter = DRAFTERS["draft chain"]
    runs = [texts(Engine(target(), drafter(target()), acceptance=rule, shapes=shapes), prompts(4),
                  max_new_tokens=9, sampling=WARM)
            for shapes in (None, CLOSED)]
    assert runs[0] == runs[1]


# The set of shapes --------------------------------------------------------------------------------


def test_sizes_come_from_a_small_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {CLOSED.capacity(tokens) for tokens in range(1, 2049)} == {128, 256, 512, 1024, 2048}
    assert {CLOSED.rows(rows) for rows in range(1, 33)} == {1, 2, 4, 8, 16, 32}
    assert {CLOSED.chunk(tokens) for tokens in range(1, 2000)} == {32, 128, 256}
    assert CLOSED.sizes(10) == (0, 1, 3, 7, 10) and CLOSED.sizes(0) == (0,)
    assert all(CLOSED.capacity(tokens) >= tokens and CLOSED.rows(tokens) >= tokens
               for tokens in range(1, 600))
    assert ShapePolicy(True, bucket=100).capacity(1) == 128
    assert ShapePolicy(True, bucket=256).capacity(300) == 512
    shape_policy = ShapePolicy()
    assert (shape_policy.capacity(300), shape_policy.rows(3), shape_policy.chunk(5)) == (384, 3, 5)
    with pytest.raises(BadInput, match="bucket"):
        ShapePolicy(bucket=0)
    monkeypatch.setattr("draftproof.engine.engine.usual_budget",
                        lambda drafter: Adaptive(drafter.max_draft_tokens))
    budget = Engine(target(), PromptLookup(), shapes=CLOSED).budget
    assert isinstance(budget, Adaptive) and budget.sizes == (0, 1, 3, 7)


# The device emulation -----------------------------------------------------------------------------


@pytest.mark.parametrize("name",
                         ["plain", "draft chain", "draft tree", "medusa", "medusa, fixed tree",
                          "redrafter", "prompt-lookup", "suffix", "recycling", "portfolio"])
def test_every_drafter_passes_the_emulation(name: str) -> None:
    """One read a round, and a handful of graphs whatever the prompt's length."""
    assert len(set(LENGTHS)) == 20
    report = emulate(Engine(single(), made(name)), new_tokens=4, sampling=WARM)
    assert report.rounds == report.reads > 5
    assert all(1 <= report.graphs[part] <= 3 for part in PARTS if part not in ("draft", "observe"))
    assert report.graphs["draft"] <= 3 and report.graphs["observe"] <= 3
    assert len(report.tokens) == 20 and all(len(tokens) == 4 for tokens in report.tokens)


@pytest.mark.parametrize("rule", ["rejection", "block", "typical"])
@pytest.mark.parametrize("name", ["plain", "draft chain", "medusa"])
def test_every_rule_passes_the_emulation(name: str, rule: str) -> None:
    how: dict[str, Any] = {"lossy": True} if rule == "typical" else {"acceptance": rule}
    engine = Engine(single(), made(name), **how)
    report = emulate(engine, new_tokens=4, lengths=(3, 9, 20, 50), sampling=WARM)
    assert report.rounds == report.reads > 1
    assert not engine.shapes.closed, "the engine itself is left as it was"


def test_sampling_options_and_adaptive_budget_pass_the_emulation() -> None:
    """Penalties and bans copy nothing to the device in a round, and write through no view. With
    several sizes, pauses included, there are at most three graphs of a part for each."""
    wish = Sampling(temperature=0.8, min_p=0.02, repetition_penalty=1.2, presence_penalty=0.3,
                    frequency_penalty=0.1, no_repeat_ngram=3, logit_bias={3: 1.0},
                    banned_words=([1, 2], [4]), min_new_tokens=3, stop_tokens=(5,), logprobs=True)
    engine = Engine(single(), PromptLookup())
    assert emulate(engine, new_tokens=3, lengths=(3, 9, 20), sampling=wish).reads > 0
    chooses = Engine(single(), made("draft chain"), budget=Adaptive(3, sizes=(0, 1, 3)))
    report = emulate(chooses, lengths=(3, 11, 30), new_tokens=20)
    assert max(report.graphs.values()) <= 9 and report.reads == report.rounds


class Planted(PromptLookup):
    """Prompt lookup with a fault."""

    def __init__(self, fault: Callable[[Frontier, TokenTree], TokenTree]) -> None:
        super().__init__()
        self.fault = fault

    def propose(self, frontier: Frontier) -> TokenTree:
        return self.fault(frontier, super().propose(frontier))


def _reads_back(frontier: Frontier, tree: TokenTree) -> TokenTree:
    return tree if int(frontier.prefix.position[0]) >= 0 else TokenTree.root(frontier.prefix.root)


def _cut_to_size(frontier: Frontier, tree: TokenTree) -> TokenTree:
    """As narrow as the widest row: what engines do that were made for one GPU."""
    used = (tree.tokens >= -1).any(0)
    return TokenTree(tree.tokens[:, used], tree.parents[:, used], tree.depth_limit)


def _writes_a_slice(frontier: Frontier, tree: TokenTree) -> TokenTree:
    tree.parents[:, 0].fill_(-1)
    return tree


def _by_length(frontier: Frontier, tree: TokenTree) -> TokenTree:
    """A shape that the text's length decides, without reading anything back."""
    global _TURN
    _TURN += 1
    torch.zeros(1 + _TURN // 40)
    return tree


_TURN = 0


@pytest.mark.parametrize(("fault", "text"),
                         [(_reads_back, "host"), (_cut_to_size, "depends on data"),
                          (_writes_a_slice, "view"), (_by_length, "met a shape")])
def test_a_planted_fault_fails_the_emulation(
    fault: Callable[[Frontier, TokenTree], TokenTree], text: str
) -> None:
    with pytest.raises(ForbiddenOnDevice, match=text):
        emulate(Engine(single(), Planted(fault)), new_tokens=12)
    emulate(Engine(single(), Planted(lambda frontier, tree: tree)), new_tokens=3, lengths=(3, 9))


def test_a_drafter_that_moves_the_cache_fails_the_emulation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = KVCache.keep

    def keep(self: Any, nodes: Any, count: Any) -> None:
        kept(self, nodes, count)
        self.layers[0].keys = self.layers[0].keys.clone()

    monkeypatch.setattr(KVCache, "keep", keep)
    with pytest.raises(ForbiddenOnDevice, match="moved"):
        emulate(Engine(single()), new_tokens=3, lengths=(3,))


class Eager(Plain):
    """Observes with a look at the host."""

    def observe(self, commit: Commit) -> None:
        self.seen: Sequence[int] = commit.count.tolist()


def test_a_second_read_in_a_round_fails_the_emulation() -> None:
    """It would take the place of the declared one, which then fails."""
    with pytest.raises(ForbiddenOnDevice, match="host"):
        emulate(Engine(single(), Eager()), new_tokens=3, lengths=(3,))
