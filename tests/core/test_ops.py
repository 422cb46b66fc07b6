"""`CpuOps` computes what `Ops` does, on random inputs, wherever it has functions of its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from drafting import assert_well_formed, commit_of, frontier_of
from helpers.pools import assert_alike, pools
from tiny import CPU, paths_of, sampler_of

from draftproof.core import messages, noise
from draftproof.core.acceptance import accept_by_matching
from draftproof.core.messages import Accepted, Commit, Frontier
from draftproof.core.noise import Role
from draftproof.core.ops import TORCH, Ops
from draftproof.core.params import Sampling
from draftproof.core.prefix import Paths
from draftproof.core.sampling import sample
from draftproof.core.tree import NO_TOKEN, TokenTree, TreeShape
from draftproof.drafters.base import Drafter
from draftproof.drafters.portfolio import Portfolio, merge_proposals
from draftproof.drafters.prompt_lookup import PromptLookup
from draftproof.drafters.suffix import SIZES, SLOTS, SuffixDrafter, slot_of
from draftproof.drafters.token_recycling import TokenRecycling
from draftproof.native import cpu_ops
from draftproof.native.kernels import Kernels, kernels
from draftproof.native.structures import LANES

pytestmark = pytest.mark.skipif(kernels() is None, reason="no C compiler here")

VOCAB = 7
TEXTS = [[1, 2, 3, 1, 2], [4, 4, 4], [0, 5, 6, 7, 5, 6, 7, 5, 6]]


@pytest.mark.parametrize("nodes", [1, 2, 5, 30, 99])
def test_likeliest_tree_kernel_matches_the_operator(nodes: int) -> None:
    dice = torch.Generator().manual_seed(nodes)
    for size in (1, 2, 9, 40):
        tokens, parents, confidence = pools(dice, 3, size)
        ours = CPU.run(TokenTree.likeliest, tokens, parents, confidence, nodes, size)
        theirs = TokenTree.likeliest(tokens, parents.clamp(min=0), confidence, nodes, size)
        width = ours.tokens.shape[1]
        assert int(theirs.present.sum(1).amax()) == width and not theirs.present[:, width:].any()
        for name in ("tokens", "parents", "confidence"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)[:, :width])


@pytest.mark.parametrize("temperatures",
                         [(0.0, 0.0, 0.0), (1.0, 1.0, 1.0), (0.7, 0.7, 0.7), (0.0, 0.3, 1.8)])
def test_the_target_samples_the_same_tokens(temperatures: tuple[float, ...]) -> None:
    """To the bit: of equals the first; nothing where nothing is allowed or one logit is NaN."""
    wants = [Sampling(temperature=value, seed=row) for row, value in enumerate(temperatures)]
    for trial, vocab in enumerate((1, 12, 16, 100, 4096, 4100)):
        tree = TokenTree.shaped(torch.randint(0, 12, (3, 7)), TreeShape.branching((2, 2)))
        paths = Paths(paths_of(TEXTS).prefix, tree)
        logits = torch.randn(3, 7, vocab, generator=torch.Generator().manual_seed(trial))
        logits[0, 1], logits[1, 2, vocab // 2], logits[2, 4, 1:], logits[2, 5] = (
            -torch.inf, torch.nan, -torch.inf, 1.0
        )
        result, wanted = (sampler_of(*wants, ops=ops).sample(logits.bfloat16(), paths)
                         for ops in (CPU, TORCH))
        assert torch.equal(result, wanted)
        assert result[0, 1] == result[1, 2] == NO_TOKEN and (temperatures[2] or result[2, 5] == 0)


@pytest.mark.parametrize("vocab", [12, 16, 100])
def test_of_equally_likely_tokens_the_first_is_chosen(vocab: int) -> None:
    """Wherever in a vector of numbers they are."""
    dice = torch.Generator().manual_seed(vocab)
    logits = torch.randint(3, (1, 64, vocab), generator=dice).bfloat16()
    for row in range(60):                                       # two at any distance
        logits[0, row, torch.randperm(vocab, generator=dice)[:2]] = 9
    paths = Paths(paths_of([[1, 2]]).prefix, TokenTree.chain(torch.zeros(1, 64, dtype=torch.int64)))
    first = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)
    for ops in (CPU, TORCH):
        assert torch.equal(sampler_of(Sampling(), ops=ops).sample(logits, paths), first)


@pytest.mark.parametrize("vocab", [12, 100, 4096])
@pytest.mark.parametrize("temperatures", [(0.0, 0.0, 0.0), (0.7, 0.7, 0.7), (0.0, 0.4, 1.8)])
def test_top_candidates_match_the_gumbel_race(temperatures: tuple[float, ...], vocab: int) -> None:
    """Tokens, their chances, and nothing where there is none; by a kernel where there is one."""
    wants = [Sampling(temperature=value, seed=row) for row, value in enumerate(temperatures)]
    tree = TokenTree.shaped(torch.randint(0, 12, (3, 7)), TreeShape.branching((2, 2)))
    paths = Paths(paths_of(TEXTS).prefix, tree)
    logits = 4 * torch.randn(3, 7, vocab, generator=torch.Generator().manual_seed(1))
    logits[0, 1], logits[1, 2, 3], logits[2, 4, 2:] = -torch.inf, torch.nan, -torch.inf
    logits = logits.bfloat16()
    for first in (0, 3):
        few = Paths(paths.prefix, tree, first)
        asked = logits[:, first:]
        result, wanted = (sampler_of(*wants, ops=ops).best(asked, few, 5) for ops in (CPU, TORCH))
        torch.testing.assert_close(result[0].float(), wanted[0].float(), rtol=1e-4, atol=1e-4)
        gumbel_logits = sampler_of(*wants).gumbel_logits(asked, few, Role.TARGET)
        there = wanted[0] > -torch.inf
        won, meant = gumbel_logits.gather(-1, result[1]), gumbel_logits.gather(-1, wanted[1])
        # equals may come in any order
        torch.testing.assert_close(won[there], meant[there], rtol=1e-5, atol=1e-5)
        assert all(len(set(row)) == 5 for row in result[1][there.all(-1)].tolist())


@pytest.mark.parametrize("count", [1, 8, 16, 17])
def test_the_top_tokens_are_those_of_the_highest_logits(count: int) -> None:
    """Of equals the first; NaN is none of them."""
    dice = torch.Generator().manual_seed(count)
    for vocab in (17, 100, 4100):
        logits = (4 * torch.randn(3, 6, vocab, generator=dice)).bfloat16()
        logits[1, 1, 3:9], logits[2, 2], logits[0, 5, 5] = -torch.inf, 1, torch.nan
        tokens, best = CPU.run(messages.top_tokens, logits, count)
        whole = logits.float().nan_to_num(-torch.inf, neginf=-torch.inf)
        order = whole.sort(stable=True, dim=-1, descending=True)
        there = order.values[..., :count] > -torch.inf
        assert torch.equal(best, order.values[..., :count])
        assert torch.equal(tokens[there], order.indices[..., :count][there])


def test_stream_kernels_match_operators_bitwise() -> None:
    keys, dice = (noise.row_keys([0, -1, 2**63 - 1, 7], [0, 5, 1, 2]),
                  torch.Generator().manual_seed(0))
    places = torch.randint(2**20, (4, 9), generator=dice)
    for role in Role:
        for origin in (None, torch.randint(2**20, (4, 9), generator=dice),
                       torch.tensor([[3], [4], [5], [6]]).expand(4, 9)):
            ours = CPU.run(noise.stream, keys, role, places, origin)
            assert (torch.equal(ours, noise.stream(keys, role, places, origin))
                    and ours.dtype == torch.int32)


def test_cpu_acceptance_kernel_equals_matching() -> None:
    """On ragged trees where much is hit, siblings twice; and where nothing could be picked."""
    for seed in range(60):
        dice = torch.Generator().manual_seed(seed)
        tokens, parents, confidence = pools(dice, 4, 14, 4)
        tree = TokenTree.likeliest(tokens, parents.clamp(min=0), confidence, 10, 9)
        target_tokens = torch.randint(-1, 4, tree.tokens.shape, generator=dice)
        target_tokens = torch.where(target_tokens == -1, NO_TOKEN, target_tokens)
        result, wanted = (ops.run(accept_by_matching, tree, target_tokens) for ops in (CPU, TORCH))
        assert torch.equal(result.count, wanted.count) and torch.equal(result.root, wanted.root)
        assert torch.equal(result.nodes, wanted.nodes)
        assert result.drafted is None or torch.equal(result.drafted, tree.drafted)


def test_append_kernel_matches_operator() -> None:
    dice = torch.Generator().manual_seed(0)
    for trial in range(20):
        count, position = (torch.randint(1, 6, (3,), generator=dice),
                           torch.randint(9, (3,), generator=dice))
        root = torch.tensor([4, NO_TOKEN, trial])
        accepted = Accepted(torch.arange(5).expand(3, -1), count, root)
        tokens = torch.randint(50, (3, 5), generator=dice)
        ours, theirs = torch.zeros(2, 4, 20, dtype=torch.int64)
        new = [ops.run(messages.append_tokens, text, position, tokens, accepted)
               for ops, text in ((CPU, ours), (TORCH, theirs))]
        for row in range(3):
            written, size = int(position[row]) + 1 + int(count[row]), int(count[row])
            assert torch.equal(ours[row, :written], theirs[row, :written])
            assert (new[0][row, :size].tolist() == new[1][row, :size].tolist()
                    and new[0][row, size - 1] == root[row])


def test_values_reach_the_host_unchanged() -> None:
    columns = (torch.tensor([[1, -2], [3, 2**20]]),
               torch.tensor([[0.5], [-torch.inf]], dtype=torch.float64))
    numbers = [[[1, -2], [3, 2**20]], [[0.5], [-torch.inf]]]
    assert CPU.to_host(*columns) == TORCH.to_host(*columns) == numbers
    assert TORCH.to_host(columns[0]) == [[[1, -2], [3, 2**20]]]


def test_kernels_have_the_arguments_of_the_functions_they_stand_for() -> None:
    for function, kernel in cpu_ops._KERNELS.items():
        theirs = list(inspect.signature(function).parameters)
        assert list(inspect.signature(kernel).parameters)[1:] == theirs, function.__name__
    assert {noise.gumbel, sample, merge_proposals, TokenTree.likeliest} < cpu_ops._KERNELS.keys()


def test_user_functions_named_like_a_kernel_run_unchanged() -> None:
    """Kernels belong to function objects: a name says nothing."""
    def named(name: str) -> Callable[..., str]:
        def function(*args: object, **kwargs: object) -> str:
            return f"its own {name}"

        function.__name__ = name
        return function

    for function in cpu_ops._KERNELS:
        name = function.__name__
        assert CPU.run(named(name), 1, key=2) == f"its own {name}"
    assert CPU.run(named("append_tokens"), 1) == "its own append_tokens"


@pytest.mark.parametrize("ops", [CPU, TORCH], ids=["kernels", "operators"])
def test_ops_run_accepts_any_callable(ops: Ops) -> None:
    class Callable_:
        __hash__ = None

        def __call__(self, number: int) -> int:
            return number + 1

    assert ops.run(partial(pow, 2), 5) == 32 and ops.run(lambda number: -number, 3) == -3
    assert ops.run(Callable_(), 1) == 2 and ops.run(len, [1, 2]) == 2
    tokens = torch.tensor([[1, 2]])
    chain = ops.run(partial(TokenTree.chain, draft_probs=None), tokens)
    assert torch.equal(chain.tokens, tokens)


def test_a_drafter_registers_a_kernel_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is called where there is a library, and asked first whether it is made for this."""
    monkeypatch.setattr(cpu_ops, "_KERNELS", dict(cpu_ops._KERNELS))

    def twice(number: int) -> str:
        return f"torch: {2 * number}"

    @cpu_ops.cpu_kernel(twice)
    def _twice(library: Kernels, number: int) -> str | cpu_ops.Unsupported:
        return cpu_ops.UNSUPPORTED if number < 0 else f"C: {2 * number}"

    assert CPU.run(twice, 4) == "C: 8" and CPU.run(twice, number=-4) == "torch: -8"
    assert TORCH.run(twice, 4) == "torch: 8"


CAPACITY = 160
APART = [int((slot_of(torch.arange(50)) == number).int().argmax()) for number in range(SLOTS)]
"""Of different slots: of two in one slot within a commit, operators count both as the last."""


def frontier(texts: list[list[int]], budget: int, trees: bool = True) -> Frontier:
    return frontier_of(texts, budget, trees=trees, capacity=CAPACITY)


def written(dice: torch.Generator, most: int) -> list[int]:
    """Tokens among which much comes again."""
    size = int(torch.randint(1, most, (), generator=dice))
    return [APART[int(4 * number**2)] for number in torch.rand(size, generator=dice)]


def asked_alike(drafters: Sequence[Drafter], asked: Frontier) -> None:
    trees = [drafter.propose(asked) for drafter in drafters]
    for tree in trees:
        assert_well_formed(tree, asked)
    if asked.trees:
        assert_alike(*trees)


def observed_alike(drafters: Sequence[Drafter], commit: Commit) -> None:
    for drafter in drafters:
        drafter.observe(commit)


def test_lookup_kernel_matches_operator() -> None:
    dice = torch.Generator().manual_seed(3)
    for longest, shortest in ((16, 1), (1, 1), (3, 2), (5, 5)):
        drafters = [PromptLookup(longest, shortest), PromptLookup(longest, shortest)]
        drafters[1].ops, drafters[0].ops = TORCH, CPU
        for budget in (1, 4, 9):
            asked_alike(drafters, frontier([written(dice, 60) for _ in range(5)], budget))
            # more places than are looked at
            many = torch.randint(2, (150,), generator=dice).tolist()
            asked_alike(drafters, frontier([many], budget))


def test_suffix_kernels_match_operators() -> None:
    """Also when memory is used up, and old text lies where new is written."""
    assert SIZES[0] == LANES
    dice, drafters = torch.Generator().manual_seed(4), [SuffixDrafter(), SuffixDrafter()]
    indexes = [drafter._indexes[torch.device("cpu")] for drafter in drafters]
    texts: list[list[int]] = []
    for drafter in drafters:
        drafter.memory = 7 * CAPACITY  # an index without collisions, and room for few texts
    for turn in range(60):
        if turn % 12 == 0:
            for drafter, ops in zip(drafters, (CPU, TORCH), strict=True):
                drafter.start(3, CAPACITY, ops)
                drafter.assign_owners(range(3), [0, 0x53A9C01122334455 + turn, -0x7172737475767778])
            texts = [written(dice, 40) for _ in range(3)]
            for row in range(3):
                observed_alike(drafters, commit_of(range(row, row + 1), texts[row : row + 1]))
        if turn % 12 == 6:  # a row goes, another is there twice
            texts = [texts[2], texts[0], list(texts[0])]
            for drafter in drafters:
                drafter.select([2, 0, 0])
        roots = [*written(dice, 9), *range(3)]
        for budget in (1, 5):
            asked_alike(drafters,
                        frontier([[*text, root] for text, root in zip(texts, roots, strict=False)],
                                 budget))
        more = [written(dice, 6) for _ in texts]
        texts = [[*text, *new] for text, new in zip(texts, more, strict=True)]
        observed_alike(drafters, commit_of(range(3), more))
    ours, theirs = indexes
    assert ours.tags.count_nonzero() > 100
    for name in ("text", "owners", "tags", "positions", "counts"):
        # the last is for nothing
        assert torch.equal(getattr(ours, name)[:-1], getattr(theirs, name)[:-1])
    for item, other in zip(drafters[0]._rows, drafters[1]._rows, strict=True):
        assert torch.equal(item, other)


def read(dice: torch.Generator, tree: TokenTree, spoiled: bool) -> messages.Successors:
    """What came out after its nodes: the best of random logits, sure of them or not."""
    sure = 3 * torch.rand(*tree.tokens.shape, 1, generator=dice)
    logits = sure * torch.randn(*tree.tokens.shape, VOCAB, generator=dice)
    if spoiled:
        logits[:, ::2] = torch.nan
    best = logits.topk(5, -1)
    return messages.Successors(tree, best.indices, best.values)


def test_recycling_kernels_match_operators() -> None:
    dice, drafters = torch.Generator().manual_seed(5), [TokenRecycling(300), TokenRecycling(300)]
    drafters[1].ops, drafters[0].ops = TORCH, CPU
    texts = [written(dice, 12) for _ in range(3)]
    for drafter in drafters:
        drafter.assign_owners(range(3), [5, 1 << 40, 5])
    for row, text in enumerate(texts):
        observed_alike(drafters, commit_of(range(row, row + 1), [text]))
    for turn in range(15):
        tokens, parents, _ = pools(dice, 3, 6, VOCAB)
        texts = [[*text, root] for text, root in zip(texts, tokens[:, 0].tolist(), strict=True)]
        asked_alike(drafters, frontier(texts, 1 + turn % 9, trees=turn != 3))
        commit = commit_of(range(3), [text[-1:] for text in texts])
        observed_alike(drafters, replace(
            commit, successors=read(dice, TokenTree(tokens, parents, 5), spoiled=turn == 7)
        ))
    ours, theirs = (drafter._tables[torch.device("cpu")] for drafter in drafters)
    assert ours.tags.count_nonzero() > 20
    assert torch.equal(ours.tags[:-1], theirs.tags[:-1]) and torch.equal(
        ours.tokens[:-1], theirs.tokens[:-1]
    )
    torch.testing.assert_close(ours.confidence[:-1], theirs.confidence[:-1], rtol=1e-5, atol=1e-7)


def test_portfolio_kernels_match_operators() -> None:
    """Also by trees without probabilities, and while rows come and go."""
    dice = torch.Generator().manual_seed(6)

    class Silent(PromptLookup):
        def propose(self, frontier: Frontier) -> TokenTree:
            return replace(super().propose(frontier), confidence=None)

    drafters = [Portfolio([PromptLookup(), SuffixDrafter(2000), Silent(3)]) for _ in range(2)]
    for drafter, ops in zip(drafters, (CPU, TORCH), strict=True):
        drafter.start(3, CAPACITY, ops)
    texts: list[list[int]] = []
    for turn in range(14):
        if turn in (0, 1, 5):
            texts.append(written(dice, 20))
            observed_alike(drafters, commit_of(range(len(texts) - 1, len(texts)), texts[-1:]))
        if turn == 9:
            texts = [texts[2], texts[1]]
            for drafter in drafters:
                drafter.select([2, 1])
        new = [written(dice, 4) for _ in texts]
        asked_alike(drafters,
                    frontier([[*text, more[0]] for text, more in zip(texts, new, strict=True)], 6,
                             trees=turn != 11))
        texts = [[*text, *more] for text, more in zip(texts, new, strict=True)]
        observed_alike(drafters, commit_of(range(len(texts)), new))
    ours, theirs = (drafter._counts[torch.device("cpu")] for drafter in drafters)
    assert float(ours[:, 1].sum()) > 50
    torch.testing.assert_close(ours, theirs)
