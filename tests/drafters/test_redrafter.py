"""Recurrent Drafter: its recurrence, and its beams against the published search in plain Python."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from drafting import commit_of, drafted, frontier_of, needs_kernels, packed_target
from tiny import CPU
from torch import Tensor

from draftproof.core.messages import Frontier
from draftproof.core.noise import Role
from draftproof.core.ops import TORCH, Ops
from draftproof.core.params import Sampling
from draftproof.core.prefix import Paths
from draftproof.core.tree import ABSENT, TokenTree
from draftproof.drafters.base import Drafter
from draftproof.drafters.redrafter import ReDrafter, ReDrafterHead


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


FORMS: dict[str, dict[str, Any]] = {
    "published": {}, "two blocks": {"num_layers": 2}, "no block": {"num_layers": 0},
    "narrow": {"exit_dim": 11}, "sums": {"rnn": False}, "shared": {"share_lm_head": True},
    "tensorrt-llm": {"rnn_activation": "none", "skip_u_at_first_step": True},
    "skips u": {"skip_u_at_first_step": True}, "few": {"known": 20},
    "few, shared": {"known": 20, "share_lm_head": True},
}  # fmt: skip


def random_head(vocabulary: Any, **form: Any) -> ReDrafterHead:
    """A head of this form in which every weight matters."""
    known = form.pop("known", None) if (form := dict(form)) else None
    head = ReDrafterHead.fresh(vocabulary, **form)
    if known is not None:
        dice = torch.Generator().manual_seed(9)
        some = torch.randperm(vocabulary.vocab_size, generator=dice)[:known]
        head.limit_vocabulary(some, vocabulary)
    dice = torch.Generator().manual_seed(4)
    for weight in head.parameters():
        if weight.requires_grad:
            weight.data.copy_(torch.randn(weight.shape, generator=dice, dtype=torch.float64) * 0.6)
    return head


def asking(
    drafter: Drafter, hidden: Tensor, roots: list[int], budget: int, *, ops: Ops = CPU,
    **params: Any
) -> Frontier:
    """The drafter observed a token per row with these hidden states [B, H], and `roots` follow."""
    drafter.start(len(roots), 64, ops)
    for row, state in enumerate(hidden[: len(roots)]):
        drafter.observe(commit_of([row], [[0]], state.view(1, 1, 1, -1)))
    frontier = frontier_of([[0, root] for root in roots], budget, Sampling(**params), ops=ops)
    return replace(frontier, prefix=replace(frontier.prefix, ahead=budget))


FEW = -50000.0


def law_after(head: ReDrafterHead, vocabulary: Any, context: Tensor, drafted: list[int]) -> Tensor:
    """[V] log-probabilities after `drafted` tokens, the state run through from the beginning."""
    weights = {name: weight.detach() for name, weight in head.state_dict().items()}
    form, state = head.config, torch.zeros_like(context)
    for place, token in enumerate(drafted):
        embedded = vocabulary.table[token]
        if not form.rnn:
            state = embedded + state
            continue
        mixed = weights["rnn_w.weight"] @ embedded
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
    last = f"lm_head.{form.num_layers}"
    logits = weights[f"{last}.weight"] @ inner + weights.get(f"{last}.bias", 0)
    if "token_map" in weights:                              # the others never come
        few, logits = logits, logits.new_full((len(vocabulary.table),), -math.inf)
        logits[weights["token_map"]] = few
    return logits.log_softmax(0)


def published_beams(
    head: ReDrafterHead, vocabulary: Any, context: Tensor, root: int, width: int, length: int
) -> list[list[int]]:
    """Apple's `beam_search_candidates`: beams begin with the root, all but one without chance."""
    beams, scores = [[root]] * width, [0.0, *[FEW] * (width - 1)]
    for _ in range(length):
        laws = [law_after(head, vocabulary, context, beam).tolist() for beam in beams]
        grown = [(score + step, [*beam, token])
                 for beam, score, law in zip(beams, scores, laws, strict=True)
                 for token, step in enumerate(law)]
        best = sorted(grown, key=lambda one: -one[0])[:width]
        scores, beams = [score for score, _ in best], [beam for _, beam in best]
    return beams


@pytest.mark.parametrize("form", FORMS)
def test_beams_are_those_of_the_published_search(form: str) -> None:
    """Of all nodes that were weighed, in every row of a batch."""
    tables = Tables()
    head = random_head(tables, **FORMS[form])
    hidden = random(3, 8, seed=1)
    for width, length in ((4, 4), (2, 5), (6, 2)):
        drafter = ReDrafter(head, tables, width=width, length=length)
        tree = drafter.propose(asking(drafter, hidden, [5, 80, 41], budget=200))
        for row, root in enumerate((5, 80, 41)):
            beams = published_beams(head, tables, hidden[row], root, width, length)
            prefixes = {tuple(beam[1:size]) for beam in beams for size in range(2, length + 2)}
            assert prefixes <= drafted(tree, row).keys()


@pytest.mark.parametrize("ops", [CPU, TORCH], ids=["cpu", "torch"])
@pytest.mark.parametrize("form", FORMS)
def test_nodes_are_the_likeliest_that_the_search_weighed(form: str, ops: Ops) -> None:
    """The first levels of every beam, by the probability of the whole path."""
    tables = Tables()
    head = random_head(tables, **FORMS[form])
    context = random(8, seed=2)
    width, length, root = 3, 4, 17
    beams, weighed = [((), 0.0)], {(): 0.0}
    for _ in range(length):
        grown = []
        for path, score in beams:
            best = law_after(head, tables, context, [root, *path]).topk(width)
            for step, token in zip(*best, strict=True):
                grown.append(((*path, int(token)), score + float(step)))
        beams = sorted(grown, key=lambda one: -one[1])[:width]
        weighed |= dict(grown)
    for budget in (1, 2, 5, 9, 100):
        drafter = ReDrafter(head, tables, width=width, length=length)
        tree = drafter.propose(asking(drafter, context[None], [root], budget, ops=ops))
        deep = [path for path in weighed if len(path) <= budget]
        wanted = sorted(deep, key=lambda path: -weighed[path])[: budget + 1]
        if budget >= width:  # a narrower budget searches with fewer beams
            chances = {path: math.exp(weighed[path]) for path in wanted if path}
            assert drafted(tree) == pytest.approx(chances, rel=1e-5, abs=1e-7)
        assert len(drafted(tree)) <= budget


def test_a_target_of_chains_gets_the_best_first_chain() -> None:
    hidden = random(2, 8, seed=1)
    for trees in (False, True):
        tables = Tables(trees=trees)
        head = random_head(tables)
        drafter = ReDrafter(head, tables, width=4, length=3)
        frontier = asking(drafter, hidden, [5, 80], budget=9)
        tree = drafter.propose(Frontier(frontier.prefix, frontier.sampler, 9, trees=False))
        assert tree.is_chain and tree.tokens.shape == (2, 4)
        for row, root in enumerate((5, 80)):
            beams = published_beams(head, tables, hidden[row], root, 1, 3)
            assert tree.tokens[row].tolist() == beams[0]


@pytest.mark.parametrize("params",
                         [{"temperature": 0.8, "seed": 5}, {"repetition_penalty": 1.7},
                          {"temperature": 2.0, "no_repeat_ngram": 1, "top_p": 0.95, "seed": 2}])
def test_every_beam_is_sampled_by_its_own_path(params: dict[str, Any]) -> None:
    """Children are the target's best tokens, noise and penalties included, given their own path."""
    tables = Tables()
    head = random_head(tables)
    hidden = random(1, 8, seed=6)
    drafter = ReDrafter(head, tables, width=3, length=3)
    frontier = asking(drafter, hidden, [7], budget=18, **params)
    tree = drafter.propose(frontier)
    paths = [(), *drafted(tree)]
    for path in paths:
        children = {other[-1] for other in paths if other[:-1] == path and other}
        logits = law_after(head, tables, hidden[0], [7, *path])[None, None]
        chain = TokenTree.chain(torch.tensor([[7, *path]]))
        here = Paths(frontier.prefix, chain, first=len(path))
        scores = frontier.sampler.gumbel_logits(logits, here, Role.TARGET)
        assert children <= set(scores[0, 0].topk(3).indices.tolist())
    inner = [path for path in paths if any(other[:-1] == path for other in paths if other)]
    assert len(paths) == 19 and len(inner) > 3


@pytest.mark.parametrize("ops", [CPU, TORCH], ids=["cpu", "torch"])
@pytest.mark.parametrize(("temperature", "scale"), [(0.0, 1.0), (0.5, 0.5), (1.0, 1.0), (2.0, 1.0)])
def test_confidence_allows_for_low_temperatures(temperature: float, scale: float, ops: Ops) -> None:
    """A temperature below 1 magnifies the differences between draft and target."""
    tables = Tables()
    head = random_head(tables)
    hidden = random(1, 8, seed=6)
    drafter = ReDrafter(head, tables, width=3, length=1)
    frontier = asking(drafter, hidden, [7], budget=3, ops=ops, temperature=temperature, seed=3)
    tree = drafter.propose(frontier)
    logits = law_after(head, tables, hidden[0], [7])[None, None]
    here = Paths(frontier.prefix, TokenTree.root(torch.tensor([7])))
    scores = frontier.sampler.gumbel_logits(logits, here, Role.TARGET)
    assert tree.confidence is not None
    wanted = (scores * scale).softmax(-1)[0, 0, tree.tokens[0, 1:]]
    assert tree.confidence[0, 1:].tolist() == pytest.approx(wanted.tolist(), rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("ops", [CPU, TORCH], ids=["cpu", "torch"])
def test_what_may_not_come_is_absent(ops: Ops) -> None:
    """Fewer tokens allowed than beams: the rest is absent, and so is what would follow."""
    tables = Tables()
    hidden = random(2, 8, seed=6)
    drafter = ReDrafter(random_head(tables), tables, width=4, length=3)
    allowed = {token: float("-inf") for token in range(90) if token not in (3, 8)}
    given = (drafter, hidden, [7, 9], 30)
    found = drafter.propose(asking(*given, ops=ops, logit_bias=allowed))
    tokens = found.tokens[found.present]
    assert set(tokens.tolist()) == {3, 7, 8, 9} and tokens.numel() <= 2 * (1 + 2 + 4 + 8)
    nothing = {token: float("-inf") for token in range(90)}
    found = drafter.propose(asking(*given, ops=ops, logit_bias=nothing))
    assert (found.tokens[:, 1:] == ABSENT).all()


@needs_kernels
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "form",
    [{}, {"share_lm_head": True, "num_layers": 2}, {"exit_dim": 96, "rnn_activation": "none"},
     {"rnn": False}, {"num_layers": 0, "skip_u_at_first_step": True},
     {"share_lm_head": True, "known": 30}, {"known": 30}],
    ids=["published", "shared", "narrow", "sums", "skips u", "few, shared", "few"],
)  # fmt: skip
def test_a_search_in_one_call_is_that_of_many(form: dict[str, Any], tied: bool) -> None:
    """The same nodes and confidence but for near ties: sampled and greedy, ending early."""
    tables, form = packed_target(tied), dict(form)
    known = form.pop("known", None)
    head = ReDrafterHead.fresh(tables, **form)
    if known is not None:
        head.limit_vocabulary(torch.arange(known).flip(0) * 2, tables)
    with torch.no_grad():
        for parameter in head.parameters():
            dice = torch.Generator().manual_seed(len(parameter))
            parameter += 0.2 * torch.randn(parameter.shape, generator=dice) / 8
    drafter = ReDrafter(head, tables, width=3, length=4)
    hidden = torch.randn(40, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    same = nodes = 0
    with torch.inference_mode():
        for trial, temperature in enumerate((0.0, 0.7, 1.3, 0.0)):
            params = {"temperature": temperature, "seed": trial}
            frontier = asking(drafter, hidden, list(range(40)), 99, **params)
            frontier = replace(frontier, floor=0.3 if trial == 3 else 0.0)
            once, native = drafter.propose(frontier), drafter.prepared
            drafter.prepared = None
            often, drafter.prepared = drafter.propose(frontier), native
            assert native is not None and once.tokens.shape == often.tokens.shape
            assert once.tokens.shape[1] == 1 + 3 + 9 + 9 + 9 or trial == 3
            for row in range(40):
                confidence = drafted(once, row)
                for path, chance in drafted(often, row).items():
                    nodes += 1
                    same += abs(confidence.get(path, -1) - chance) <= 0.05 * chance + 1e-6
    assert same > 0.97 * nodes
