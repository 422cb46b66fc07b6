"""`CpuOps` computes what `Ops` does: every function that has an implementation of its own, on
random inputs."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from helpers.pools import assert_alike, pools
from tiny import CPU, paths_of, sampler_of

from draftproof.core import noise
from draftproof.core.acceptance import accept_by_matching
from draftproof.core.messages import Accepted, append_tokens, top_tokens
from draftproof.core.noise import Role
from draftproof.core.ops import TORCH
from draftproof.core.params import Sampling
from draftproof.core.prefix import Paths
from draftproof.core.sampling import best_tokens, sample
from draftproof.core.tree import ABSENT, NO_TOKEN, TokenTree, TreeShape, well_formed
from draftproof.drafters.bigram import bigram_tree
from draftproof.drafters.medusa import heads_logits, medusa_tree, prepare_heads
from draftproof.drafters.portfolio import judge, merge_trees
from draftproof.drafters.prompt_lookup import match_prompt
from draftproof.drafters.redrafter import beam_search, prepare_recurrence
from draftproof.drafters.suffix import continue_text, learn_text
from draftproof.drafters.token_recycling import learn_pairs, likely_successors, recycle
from draftproof.native.build import SOURCES
from draftproof.native.cpu_lookup import Same
from draftproof.native.kernels import SIGNATURES, kernels

pytestmark = pytest.mark.skipif(kernels() is None, reason="no C compiler here")

VOCAB = 7
TEXTS = [[1, 2, 3, 1, 2], [4, 4, 4], [0, 5, 6, 7, 5, 6, 7, 5, 6]]


def grown(same: Same, *pool: Any) -> TokenTree:
    """The tree of a pool, some of whose nodes may have the same text."""
    tree: TokenTree = CPU._own["likeliest"](*pool, same)
    return tree


@pytest.mark.parametrize("nodes", [1, 2, 5, 30, 99])
def test_a_pool_grows_into_the_tree_of_its_likeliest_nodes(nodes: int) -> None:
    dice = torch.Generator().manual_seed(nodes)
    for size in (1, 2, 9, 40):
        tokens, parents, confidence = pools(dice, 3, size)
        ours = CPU.run(TokenTree.likeliest, tokens, parents, confidence, nodes, size)
        theirs = TokenTree.likeliest(tokens, parents.clamp(min=0), confidence, nodes, size)
        width = ours.tokens.shape[1]
        assert int(theirs.present.sum(1).amax()) == width and not theirs.present[:, width:].any()
        assert torch.equal(ours.tokens, theirs.tokens[:, :width]) and torch.equal(
            ours.parents, theirs.parents[:, :width]
        )
        assert torch.equal(ours.confidence, theirs.confidence[:, :width])  # type: ignore[arg-type]


def test_trees_side_by_side_grow_together() -> None:
    dice = torch.Generator().manual_seed(1)
    for sizes in ((1,), (1, 1), (4, 7), (12, 1, 20)):
        trees, confidence = [], []
        for size in sizes:
            tokens, parents, chances = pools(dice, 3, size)
            tokens[:, 0] = 1
            trees.append(TokenTree(tokens, parents, size))
            confidence.append(chances)
        pool, chances = TokenTree.concat(trees), torch.cat(confidence, 1)
        ours = grown(Same.LIKELIEST, pool.tokens, pool.parents, chances, 12, max(sizes))
        assert_alike(ours, pool.merged(chances, 12))


def test_paths_grow_into_a_tree_as_their_votes_add_up() -> None:
    """Up to the odds of what they begin with."""
    dice = torch.Generator().manual_seed(2)
    for width, length, most in ((1, 1, 0.2), (3, 2, 0.2), (6, 5, 0.2), (6, 5, 0.7)):
        paths = torch.randint(3, (4, width, length), generator=dice)
        paths[:, :, 0] = 2
        steps = (
            0.05
            + most * torch.rand(4, width, length, generator=dice).sort(-1, descending=True).values
        )
        steps = torch.where(
            (torch.rand(4, width, length, generator=dice) < 0.1).cumsum(-1) > 0, 0, steps
        )
        steps[..., 0] = 1
        votes, paths = steps.cumprod(-1), torch.where(steps > 0, paths, ABSENT)
        place = torch.arange(width * length).view(width, length)
        above = torch.cat([place[:, :1], place[:, :-1]], 1).flatten().expand(4, -1)
        ours = grown(Same.SUMMED, paths.flatten(1), above, votes.flatten(1), 9, length)
        assert_alike(ours, TokenTree.from_paths(paths, 9, votes))


@pytest.mark.parametrize(
    "temperatures", [(0.0, 0.0, 0.0), (1.0, 1.0, 1.0), (0.7, 0.7, 0.7), (0.0, 0.3, 1.8)]
)
def test_the_target_samples_the_same_tokens(temperatures: tuple[float, ...]) -> None:
    """To the bit: of equals, of which bfloat16 has many, the first; nothing where nothing is
    allowed or one logit is NaN."""
    wants = [Sampling(temperature=heat, seed=row) for row, heat in enumerate(temperatures)]
    for trial, vocab in enumerate((1, 12, 16, 100, 4096, 4100)):
        tree = TokenTree.shaped(torch.randint(0, 12, (3, 7)), TreeShape.branching((2, 2)))
        paths = Paths(paths_of(TEXTS).prefix, tree)
        logits = torch.randn(3, 7, vocab, generator=torch.Generator().manual_seed(trial))
        logits[0, 1], logits[1, 2, vocab // 2], logits[2, 4, 1:], logits[2, 5] = (
            -torch.inf, torch.nan, -torch.inf, 1.0
        )
        found, wanted = (
            sampler_of(*wants, ops=ops).sample(logits.bfloat16(), paths) for ops in (CPU, TORCH)
        )
        assert torch.equal(found, wanted)
        assert found[0, 1] == found[1, 2] == NO_TOKEN and (temperatures[2] or found[2, 5] == 0)


@pytest.mark.parametrize("vocab", [12, 100, 4096])
@pytest.mark.parametrize("temperatures", [(0.0, 0.0, 0.0), (0.7, 0.7, 0.7), (0.0, 0.4, 1.8)])
def test_the_best_are_those_of_the_race(temperatures: tuple[float, ...], vocab: int) -> None:
    """By a kernel, where there is one, as by operators: tokens, their chances, and nothing where
    there is none."""
    wants = [Sampling(temperature=heat, seed=row) for row, heat in enumerate(temperatures)]
    tree = TokenTree.shaped(torch.randint(0, 12, (3, 7)), TreeShape.branching((2, 2)))
    paths = Paths(paths_of(TEXTS).prefix, tree)
    logits = 4 * torch.randn(3, 7, vocab, generator=torch.Generator().manual_seed(1))
    logits[0, 1], logits[1, 2, 3], logits[2, 4, 2:] = -torch.inf, torch.nan, -torch.inf
    logits = logits.bfloat16()
    for first in (0, 3):
        some = Paths(paths.prefix, tree, first)
        asked = logits[:, first:]
        found, wanted = (sampler_of(*wants, ops=ops).best(asked, some, 5) for ops in (CPU, TORCH))
        torch.testing.assert_close(found[0].float(), wanted[0].float(), rtol=1e-4, atol=1e-4)
        gumbel_logits = sampler_of(*wants).gumbel_logits(asked, some, Role.TARGET)
        there = wanted[0] > -torch.inf
        won, meant = gumbel_logits.gather(-1, found[1]), gumbel_logits.gather(-1, wanted[1])
        # equals may come in any order
        torch.testing.assert_close(won[there], meant[there], rtol=1e-5, atol=1e-5)
        assert all(len(set(row)) == 5 for row in found[1][there.all(-1)].tolist())


@pytest.mark.parametrize("count", [1, 8, 16, 17])
def test_the_top_tokens_are_those_of_the_highest_logits(count: int) -> None:
    """Also of several logits side by side; of equals, of which bfloat16 has many, the first; NaN is
    none of them."""
    found, dice = kernels(), torch.Generator().manual_seed(count)
    assert found is not None
    for vocab in (17, 100, 4100):
        parts = [
            (4 * torch.randn(3, nodes, vocab, generator=dice)).bfloat16() for nodes in (2, 2, 2)
        ]
        parts[0][1, 1, 3:9], parts[1][2, 0], parts[2][0, 1, 5] = -torch.inf, 1, torch.nan
        tokens, logits = CPU.run(top_tokens, parts, count)
        whole = torch.cat(parts, 1).float().nan_to_num(-torch.inf, neginf=-torch.inf)
        order = whole.sort(stable=True, dim=-1, descending=True)
        there = order.values[..., :count] > -torch.inf
        assert torch.equal(logits, order.values[..., :count])
        assert torch.equal(tokens[there], order.indices[..., :count][there])


def test_streams_have_the_very_bits_of_the_operators() -> None:
    keys, dice = (
        noise.row_keys([0, -1, 2**63 - 1, 7], [0, 5, 1, 2]), torch.Generator().manual_seed(0)
    )
    places = torch.randint(2**20, (4, 9), generator=dice)
    for role in Role:
        for origin in (
            None, torch.randint(2**20, (4, 9), generator=dice),
            torch.tensor([[3], [4], [5], [6]]).expand(4, 9)
        ):
            ours = CPU.run(noise.stream, keys, role, places, origin)
            assert (
                torch.equal(ours, noise.stream(keys, role, places, origin))
                and ours.dtype == torch.int32
            )


def test_the_cpu_accepts_what_matching_accepts() -> None:
    """On ragged trees of few tokens, where much is hit, siblings twice; and where nothing could be
    picked."""
    for seed in range(60):
        tree = TokenTree.likeliest(*likely_pool(4, 14, seed), 10, 9)
        target_tokens = torch.randint(
            -1, 4, tree.tokens.shape, generator=torch.Generator().manual_seed(seed)
        )
        target_tokens = torch.where(target_tokens == -1, NO_TOKEN, target_tokens)
        found, wanted = (ops.run(accept_by_matching, tree, target_tokens) for ops in (CPU, TORCH))
        assert torch.equal(found.count, wanted.count) and torch.equal(found.root, wanted.root)
        assert torch.equal(found.nodes, wanted.nodes)
        assert found.drafted is None or torch.equal(found.drafted, tree.drafted)


def likely_pool(rows: int, size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random pools [rows, size]: tokens, parents that come before their children, odds that fall
    along each path."""
    dice = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 4, (rows, size), generator=dice)
    parents = torch.cat(
        [torch.zeros(rows, 1), torch.rand(rows, size - 1, generator=dice) * torch.arange(1, size)],
        1
    ).long()
    shares, confidence = torch.rand(rows, size, generator=dice) - 0.1, torch.ones(rows, size)
    for node in range(1, size):
        above = confidence.gather(1, parents[:, node, None])[:, 0]
        confidence[:, node] = above * shares[:, node].clamp(min=0)            # now and then nothing
    return tokens, parents, confidence


def test_accepted_tokens_are_appended_alike() -> None:
    dice = torch.Generator().manual_seed(0)
    for trial in range(20):
        count, position = (
            torch.randint(1, 6, (3,), generator=dice), torch.randint(9, (3,), generator=dice)
        )
        root = torch.tensor([4, NO_TOKEN, trial])
        accepted = Accepted(torch.arange(5).expand(3, -1), count, root)
        tokens = torch.randint(50, (3, 5), generator=dice)
        ours, theirs = torch.zeros(2, 4, 20, dtype=torch.int64)
        new = [
            ops.run(append_tokens, text, position, tokens, accepted)
            for ops, text in ((CPU, ours), (TORCH, theirs))
        ]
        for row in range(3):
            written, size = int(position[row]) + 1 + int(count[row]), int(count[row])
            assert torch.equal(ours[row, :written], theirs[row, :written])
            assert (
                new[0][row, :size].tolist() == new[1][row, :size].tolist()
                and new[0][row, size - 1] == root[row]
            )


def test_numbers_come_to_the_host_as_they_are() -> None:
    columns = (
        torch.tensor([[1, -2], [3, 2**20]]),
        torch.tensor([[0.5], [-torch.inf]], dtype=torch.float64)
    )
    assert (
        CPU.to_host(*columns)
        == TORCH.to_host(*columns)
        == [[[1, -2], [3, 2**20]], [[0.5], [-torch.inf]]]
    )
    assert TORCH.to_host(columns[0]) == [[[1, -2], [3, 2**20]]]


def test_signatures_are_those_of_the_sources() -> None:
    sources = "".join(path.read_text() for path in SOURCES)
    for name, signature in SIGNATURES.items():
        returns, takes = re.search(
            rf"^(void|int64_t) draftproof_{name}\(([^)]*)\)", sources, re.M
        ).groups()  # type: ignore[union-attr]
        kinds = [
            "p" if "*" in one else "f" if one.strip().startswith("float") else "n"
            for one in takes.split(",")
        ]
        counted = re.findall(r"(\d*)([pnf])", signature.partition(":")[0])
        assert "".join(kinds) == "".join(kind * int(count or 1) for count, kind in counted), name
        assert (returns == "int64_t") == signature.endswith(":n"), name


def test_own_functions_have_the_arguments_of_those_they_stand_for() -> None:
    torch_functions = [
        noise.stream, noise.gumbel, sample, best_tokens, top_tokens, accept_by_matching,
        append_tokens,
        prepare_heads, heads_logits, medusa_tree, bigram_tree, prepare_recurrence,
        beam_search, TokenTree.likeliest, match_prompt, learn_text, continue_text, recycle,
        learn_pairs, likely_successors, judge,
        merge_trees, well_formed,
    ]  # fmt: skip
    assert {function.__name__ for function in torch_functions} == CPU._own.keys()
    for function in torch_functions:
        theirs = list(inspect.signature(function).parameters)
        assert (
            list(inspect.signature(CPU._own[function.__name__]).parameters)[: len(theirs)] == theirs
        ), function.__name__
