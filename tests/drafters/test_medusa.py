"""Medusa: the published trees, heads that start as the target's own, the best tree of a budget, and the same text."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from drafting import MEDUSA_TREE, Watch, accepted_share, medusa_head, needs_kernels, packed_target, paired_head, texts
from tiny import CPU, VOCAB, paths_of, prompts, sampler_of, target
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from draftproof.core.messages import Commit, Features, Frontier
from draftproof.core.ops import TORCH, Ops
from draftproof.core.params import Sampling
from draftproof.core.prefix import Paths, Prefix
from draftproof.core.tree import ABSENT, TokenTree, TreeShape
from draftproof.drafters.base import Drafter
from draftproof.drafters.medusa import NODES, Medusa, MedusaConfig, MedusaHead
from draftproof.drafters.medusa_trees import CHOICES
from draftproof.engine.engine import Engine
from draftproof.errors import BadInput, DrafterMismatch

Path = tuple[int, ...]


# Published trees --------------------------------------------------------------------------------------------------------

PER_DEPTH = {
    "mc_sim_7b_63": [10, 28, 23, 2],
    "vicuna_7b_stage1": [10, 32, 20, 1],
    "vicuna_7b_stage1_ablation": [10, 21, 25, 7],
    "vicuna_7b_stage2": [10, 23, 23, 7],
    "vicuna_13b_stage1": [10, 29, 23, 1],
    "vicuna_13b_stage2": [10, 19, 25, 9],
    "vicuna_33b_stage1": [10, 34, 19, 0],
    "vicuna_33b_stage2": [10, 24, 24, 5],
    "zephyr_stage2": [10, 27, 23, 3],
}


class Published:
    """The buffers of FasterDecoding/Medusa, written down plainly from their description."""

    def __init__(self, choices: Sequence[Path]) -> None:
        order = sorted(choices, key=lambda path: (len(path), path))
        node = {path: index + 1 for index, path in enumerate(order)}
        width = len(order) + 1
        self.mask = [[int(column in (0, row)) for column in range(width)] for row in range(width)]
        self.places, self.indices = [0] * width, [0] * width
        for path in order:
            for size in range(1, len(path)):
                self.mask[node[path]][node[path[:size]]] = 1
            self.places[node[path]] = len(path)
            self.indices[node[path]] = path[-1] + 10 * (len(path) - 1) + 1
        covered: set[Path] = set()
        self.retrieve: list[list[int]] = []
        for path in reversed(order):
            if path not in covered:
                self.retrieve.append([0, *(node[path[:size]] for size in range(1, len(path) + 1))])
                covered |= {path[:size] for size in range(1, len(path) + 1)}
        longest = max(map(len, self.retrieve))
        self.retrieve = [[*row, *[-1] * (longest - len(row))] for row in self.retrieve]


SMALL = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
TREES = {**CHOICES, "small": SMALL}


def test_the_reference_itself_gives_the_known_vector() -> None:
    known = Published(SMALL)
    rows = ["1000000", "1100000", "1010000", "1101000", "1100100", "1010010", "1101001"]
    assert ["".join(map(str, row)) for row in known.mask] == rows
    assert known.indices == [0, 1, 2, 11, 12, 11, 21] and known.places == [0, 1, 1, 2, 2, 2, 3]
    assert known.retrieve == [[0, 1, 3, 6], [0, 2, 5, -1], [0, 1, 4, -1]]


@pytest.mark.parametrize("name", TREES)
def test_our_trees_are_the_published_buffers(name: str) -> None:
    known, shape = Published(TREES[name]), TreeShape(TREES[name])
    tree = TokenTree.shaped(torch.zeros(1, len(shape), dtype=torch.int64), shape)
    assert tree.ancestors[0].int().tolist() == known.mask and tree.depths[0].tolist() == known.places
    leaves = [node for node in range(len(shape)) if node not in shape.parents]
    ours = [tree.path_to(torch.tensor([leaf]))[0, : known.places[leaf] + 1].tolist() for leaf in reversed(leaves)]
    longest = tree.depth_limit + 1
    assert [[*path, *[-1] * (longest - len(path))] for path in ours] == known.retrieve


@pytest.mark.parametrize("name", TREES)
def test_drafted_tokens_are_those_of_the_published_indices(name: str) -> None:
    """Greedy: flat candidates [root, ten of head 0, ten of head 1, ...] at the tree's indices."""
    stage = Scene(noisy_head(4), Sampling(), tree=TREES[name])
    tree = stage.propose(63)
    best = stage.logits.topk(10, -1).indices.flatten(1)
    flat = torch.cat([tree.tokens[:, :1], best], 1)
    assert torch.equal(tree.tokens, flat[:, Published(TREES[name]).indices])


@pytest.mark.parametrize("name", CHOICES)
def test_published_sets_are_trees_at_every_size(name: str) -> None:
    paths = CHOICES[name]
    assert len(paths) == len(set(paths)) == 63
    assert [sum(len(path) == depth for path in paths) for depth in (1, 2, 3, 4)] == PER_DEPTH[name]
    for size in range(1, 64):
        assert len(TreeShape(paths[:size])) == size + 1                 # refuses a path without its parent
    assert max(map(max, paths)) == 9


# Heads ------------------------------------------------------------------------------------------------------------------


def noisy_head(heads: int = 3, layers: int = 2, share: bool = True, seed: int = 0) -> MedusaHead:
    head = MedusaHead.fresh(target(), heads, layers, share)
    torch.manual_seed(seed)
    for parameter in head.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return head


def logits_of(drafter: Medusa, hidden: Tensor, heads: int, ops: Ops = CPU) -> Tensor:
    """[B, heads, V] what it says of hidden states [B, H]."""
    drafter.start(len(hidden), 64, ops)
    drafter.hidden[:] = hidden
    return drafter.logits(len(hidden), heads)


def features(length: int = 12) -> Features:
    tokens = torch.randint(VOCAB, (3, length), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return target().features(tokens, torch.ones(3, length))


@pytest.mark.parametrize("share", [True, False])
def test_fresh_heads_say_what_the_target_says(share: bool) -> None:
    head, given = MedusaHead.fresh(target(), 3, 2, share), features()
    own = target().unembed(given.hidden[:, :, 0])
    for step, logits in enumerate(head.predict(given, target())):
        torch.testing.assert_close(logits, own[:, : -2 - step], rtol=0, atol=1e-12)


@pytest.mark.parametrize("share", [True, False])
def test_decoding_runs_what_training_trains(share: bool) -> None:
    """The stacked heads behind token t say what step i of the trained form says of token t + 2 + i."""
    head, given = noisy_head(share=share), features()
    drafter = Medusa(head, target())
    with torch.no_grad():
        trained = list(head.predict(given, target()))
        assert [len(logits[0]) for logits in trained] == [10, 9, 8] and head.steps == 3
        for place in range(8):
            stacked = logits_of(drafter, given.hidden[:, place, 0], 3)
            for step in range(3):
                torch.testing.assert_close(stacked[:, step], trained[step][:, place], rtol=0, atol=1e-10)
    assert [logits.shape[1] for logits in head.predict(features(3), target())] == [1, 0, 0]


def test_layers_are_distinct_and_weights_are_copied() -> None:
    head = noisy_head(layers=2)
    first, second = head.heads[0].blocks                                # type: ignore[union-attr, misc]
    assert not torch.equal(first.weight, second.weight)
    stage = Scene(head, Sampling())
    before = stage.propose(16).tokens
    for parameter in head.parameters():
        parameter.data.zero_()
    assert torch.equal(stage.propose(16).tokens, before)


def test_unshared_heads_say_the_same() -> None:
    shared = noisy_head()
    own = shared.unshared(target())
    assert not own.config.share_lm_head and own.unshared(target()) is own
    for ours, theirs in zip(own.predict(features(), target()), shared.predict(features(), target()), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


def test_tokens_that_heads_do_not_know_are_never_drafted() -> None:
    """A smaller table, a larger one, and one of chosen rows."""
    torch.manual_seed(0)
    known = torch.tensor([3, 9, 11, 20, 38])
    for rows, token_map in ((VOCAB - 7, None), (VOCAB + 5, None), (5, known)):
        size = VOCAB if token_map is not None else rows
        config = MedusaConfig(3, 1, 32, size, share_lm_head=False, draft_vocab_size=5 if token_map is not None else None)
        head = MedusaHead(config).double()
        for parameter in head.parameters():
            torch.nn.init.normal_(parameter)
        if token_map is not None:
            head.token_map = token_map
        tree = Scene(head, Sampling(temperature=1.0)).propose(30)
        drafted = tree.tokens[:, 1:]
        allowed = set(known.tolist()) if token_map is not None else set(range(min(rows, VOCAB)))
        assert set(drafted[drafted != ABSENT].tolist()) <= allowed and (drafted != ABSENT).any()
        assert all(logits.shape[-1] == VOCAB for logits in head.predict(features(), target()))


# The tree of a round ------------------------------------------------------------------------------------------------------


class Scene:
    """Rows with random hidden states and texts, in front of a drafter."""

    def __init__(
        self, head: MedusaHead, *params: Sampling, tree: Any = "dynamic", vocabulary: Any = None, ops: Ops = CPU
    ) -> None:
        self.vocabulary = vocabulary if vocabulary is not None else target()
        self.drafter = Medusa(head, self.vocabulary, tree)
        texts = [[5, 1, 7, 2], [4, 4], [9, 8, 7, 6, 5]]
        self.sampler = sampler_of(*(params * 3)[:3], ops=ops)
        self.prefix = paths_of(texts).prefix
        self.hidden = torch.randn(3, 1, 1, 32, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
        self.drafter.start(6, 64, ops)
        places = torch.zeros(3, 1, dtype=torch.int64)
        self.drafter.observe(Commit(range(3), places, places, torch.ones(3, dtype=torch.int64), self.hidden))
        with torch.no_grad():
            self.logits: Tensor = self.drafter.logits(3, head.config.num_heads)

    def propose(self, budget: int, trees: bool = True) -> TokenTree:
        with torch.inference_mode():
            return self.drafter.propose(Frontier(self.prefix, self.sampler, budget, trees=trees))


def drafted_paths(tree: TokenTree, row: int) -> list[Path]:
    """The token paths of a row's nodes, root excluded."""
    nodes = [node for node in range(1, tree.tokens.shape[1]) if tree.tokens[row, node] != ABSENT]
    return [tuple(tree.tokens[row, tree.ancestors[row, node]].tolist()[1:]) for node in nodes]


@pytest.mark.parametrize("ops", [CPU, TORCH], ids=["cpu", "torch"])
@pytest.mark.parametrize("budget", [1, 2, 5, 16, 31])
def test_the_dynamic_tree_holds_the_most_likely_paths(budget: int, ops: Ops) -> None:
    """Of all paths of all tokens: 40 + 40^2 + 40^3."""
    stage = Scene(noisy_head(seed=2), Sampling(), ops=ops)
    tree = stage.propose(budget)
    laws = stage.logits.log_softmax(-1)
    for row in range(3):
        values: dict[Path, float] = {}
        for depth in (1, 2, 3):
            steps = laws[row, :depth].tolist()
            for path in itertools.product(range(VOCAB), repeat=depth):
                values[path] = sum(step[token] for step, token in zip(steps, path, strict=True))
        best = sorted(values, key=lambda path: -values[path])[:budget]
        assert set(drafted_paths(tree, row)) == set(best)


@pytest.mark.parametrize("wish", [Sampling(), Sampling(temperature=1.0, seed=3), Sampling(temperature=0.7, top_k=5, top_p=0.9)])
def test_drafts_are_what_the_target_would_choose_with_these_logits(wish: Sampling) -> None:
    """The first choice of each head is the target's own pick, with its noise, were the head's logits its own."""
    stage = Scene(noisy_head(), wish, tree=((0,), (0, 0), (0, 0, 0)))
    tree = stage.propose(3)
    chain = TokenTree.chain(tree.tokens[:, :3])
    assert torch.equal(stage.sampler.pick(stage.logits, Paths(stage.prefix, chain)), tree.tokens[:, 1:])


def test_a_breath_of_warmth_drafts_as_cold_does() -> None:
    """Values go over into those of greedy decoding as the temperature goes to 0."""
    cold, warm = (Scene(noisy_head(seed=5), Sampling(temperature=heat)).propose(20) for heat in (0.0, 1e-5))
    assert [set(drafted_paths(cold, row)) for row in range(3)] == [set(drafted_paths(warm, row)) for row in range(3)]


def test_forbidden_tokens_are_absent_with_all_below_them() -> None:
    for tree in ("dynamic", "mc_sim_7b_63"):
        stage = Scene(noisy_head(4), Sampling(temperature=1.0, top_k=2), tree=tree)
        drafted = stage.propose(30)
        for row in range(3):
            paths = drafted_paths(drafted, row)
            assert 0 < len(paths) <= 30 and {path[:-1] for path in paths} <= {(), *paths}
            assert len({path[0] for path in paths}) <= 2


@pytest.mark.parametrize("tree", ["dynamic", MEDUSA_TREE], ids=["dynamic", "fixed"])
def test_odds_are_products_of_what_the_heads_say(tree: Any) -> None:
    """1 at the root, never more than the parent's, 0 where absent; greedily the heads' own probabilities."""
    stage = Scene(noisy_head(), Sampling(), tree=tree)
    drafted, laws = stage.propose(7), stage.logits.softmax(-1)
    assert drafted.confidence is not None and (drafted.confidence[:, 0] == 1).all()
    for row in range(3):
        for path, confidence in zip(drafted_paths(drafted, row), drafted.confidence[row, 1:].tolist(), strict=True):
            assert confidence == pytest.approx(float(torch.stack([laws[row, head, token] for head, token in enumerate(path)]).prod()))
    warm = Scene(noisy_head(4), Sampling(temperature=1.3, top_k=3), tree=tree).propose(40)
    assert warm.confidence is not None and (warm.confidence <= warm.confidence.gather(1, warm.parents.clamp(min=0))).all()
    assert torch.equal(warm.confidence > 0, warm.present)


def test_broken_heads_draft_nothing() -> None:
    """NaN is no token, and no reason to lose the root."""
    head = noisy_head()
    head.heads[1].blocks[0].weight.data.fill_(torch.nan)                # type: ignore[union-attr, index]
    for tree in ("dynamic", MEDUSA_TREE):
        stage = Scene(head, Sampling(temperature=1.0), tree=tree)
        drafted = stage.propose(7)
        assert torch.equal(drafted.tokens[:, 0], stage.prefix.root)
        assert all({len(path) for path in drafted_paths(drafted, row)} == {1} for row in range(3))
        done = Engine(target(), Watch(Medusa(head, target(), tree))).generate(prompts(2), max_new_tokens=9)
        assert [one.tokens for one in done] == [tokens for tokens, _ in texts(Engine(target()), prompts(2), max_new_tokens=9)]


def test_a_smaller_budget_takes_the_first_paths() -> None:
    tree = CHOICES["vicuna_33b_stage1"]
    stage = Scene(noisy_head(4), Sampling(), tree="vicuna_33b_stage1")
    best = stage.logits.topk(10, -1).indices
    for budget in (0, 1, 2, 7, 40, 63, 100):
        drafted = stage.propose(budget)
        for row in range(3):
            wanted = {tuple(int(best[row, head, rank]) for head, rank in enumerate(path)) for path in tree[:budget]}
            assert set(drafted_paths(drafted, row)) == wanted


class Chains:
    """The target, if it could not read trees."""

    def __init__(self) -> None:
        self.reads_trees = False

    def __getattr__(self, name: str) -> Any:
        return getattr(target(), name)


def test_a_target_that_cannot_read_trees_is_drafted_a_chain_by_pairs() -> None:
    """Each choice is the likeliest behind the one before."""
    head = paired_head()
    stage = Scene(head, Sampling(), vocabulary=Chains())
    for budget, length in ((0, 0), (2, 2), (9, 3)):
        drafted = stage.propose(budget)
        assert drafted.is_chain and drafted.tokens.shape == (3, length + 1)
        for step in range(length):
            choice = head.given_previous(drafted.tokens[:, step], stage.logits[:, step]).argmax(-1)
            assert torch.equal(choice, drafted.tokens[:, step + 1])
    asked = Scene(head, Sampling()).propose(9, trees=False)
    assert asked.is_chain and torch.equal(asked.tokens, drafted.tokens)


def test_ranks_of_a_fixed_tree_are_those_behind_the_parent() -> None:
    head = paired_head()
    stage = Scene(head, Sampling(), tree=MEDUSA_TREE)
    for budget in (2, 7):
        drafted = stage.propose(budget)
        for row in range(3):
            wanted = set()
            for path in MEDUSA_TREE[:budget]:
                text = [int(stage.prefix.root[row])]
                for step, rank in enumerate(path):
                    law = head.given_previous(torch.tensor(text[-1:]), stage.logits[row, step][None])[0]
                    text.append(int(law.argsort(descending=True)[rank]))
                wanted.add(tuple(text[1:]))
            assert set(drafted_paths(drafted, row)) == wanted


def test_unshared_heads_keep_their_pairs() -> None:
    head = MedusaHead.fresh(target(), 2)
    head.count(torch.tensor([1, 1, 1]), torch.tensor([2, 2, 2]))
    own = head.unshared(target())
    assert own.pairs is head.pairs and own.config.pairs == head.config.pairs == 1


def test_a_target_that_cannot_read_trees_is_drafted_a_chain() -> None:
    for tree in (None, "dynamic", MEDUSA_TREE):
        stage = Scene(noisy_head(), Sampling(), tree=tree, vocabulary=Chains())
        for budget, length in ((0, 0), (2, 2), (9, 3)):
            drafted = stage.propose(budget)
            assert drafted.is_chain and torch.equal(drafted.tokens[:, 1:], stage.logits.argmax(-1)[:, :length])
        assert stage.drafter.default_budget == stage.drafter.deepest == 3
        asked = Scene(noisy_head(), Sampling(), tree=tree).propose(9, trees=False)
        assert asked.is_chain and torch.equal(asked.tokens, drafted.tokens)


def test_what_a_drafter_says_of_itself() -> None:
    head = noisy_head(4)
    dynamic, fixed, short = (Medusa(head, target(), tree) for tree in (None, "zephyr_stage2", ((0,), (1,))))
    assert (dynamic.default_budget, dynamic.deepest) == (NODES, 4)
    assert (fixed.default_budget, fixed.deepest) == (63, 4) and (short.default_budget, short.deepest) == (2, 1)
    head.config = MedusaConfig(4, 2, 32, VOCAB, tree=MEDUSA_TREE)
    assert Medusa(head, target()).tree == MEDUSA_TREE and Medusa(head, target(), "dynamic").tree is None
    drafter = head.drafter(target())
    assert isinstance(drafter, Medusa) and drafter.hidden_layers == (-1,) and drafter.tree == MEDUSA_TREE


# Memory -------------------------------------------------------------------------------------------------------------------


def test_it_remembers_the_last_committed_state_of_each_row() -> None:
    drafter = Medusa(noisy_head(), target())
    drafter.start(5, 64, CPU)
    hidden = torch.randn(3, 4, 1, 32, dtype=torch.float64)
    places = torch.arange(4).repeat(3, 1)
    drafter.observe(Commit(range(3), places, places, torch.tensor([1, 4, 2]), hidden))
    wanted = torch.stack([hidden[0, 0, 0], hidden[1, 3, 0], hidden[2, 1, 0]])
    assert torch.equal(drafter.hidden[:3], wanted)
    drafter.select([2, 0, 0, 1])
    assert torch.equal(drafter.hidden[:4], wanted[[2, 0, 0, 1]])
    drafter.observe(Commit([1, 2], places[:2], places[:2], torch.tensor([3, 2]), hidden[:2]))
    assert torch.equal(drafter.hidden[:4], torch.stack([wanted[2], hidden[0, 2, 0], hidden[1, 1, 0], wanted[1]]))
    for count in (4, 2):
        drafter.observe(Commit([2], places[:1], places[:1], torch.tensor([count]), hidden[2:]))
        assert torch.equal(drafter.hidden[2], hidden[2, count - 1, 0]) and torch.equal(drafter.hidden[1], hidden[0, 2, 0])


@pytest.mark.parametrize("tree", ["dynamic", MEDUSA_TREE, "pairs"], ids=["dynamic", "fixed", "pairs"])
@pytest.mark.parametrize("wish", [Sampling(), Sampling(temperature=0.9, top_k=7)])
def test_a_round_reads_nothing_back(tree: Any, wish: Sampling) -> None:
    """Observing and proposing run on tensors that have no values."""
    head, tree = (paired_head(), "dynamic") if tree == "pairs" else (noisy_head(), tree)
    stage = Scene(head, wish, tree=tree, ops=TORCH)
    stage.propose(7)                                                    # what is made once is made
    with torch.inference_mode(), FakeTensorMode(allow_non_fake_inputs=True):
        places = torch.zeros(3, 2, dtype=torch.int64)
        states = torch.zeros(3, 2, 1, 32, dtype=torch.float64)
        stage.drafter.start(6, 64, TORCH)
        stage.drafter.observe(Commit(range(3), places, places, torch.ones(3, dtype=torch.int64), states))
        prefix = Prefix(torch.zeros(3, 24, dtype=torch.int64), torch.ones(3, dtype=torch.int64))
        drafted = stage.drafter.propose(Frontier(prefix, stage.sampler, 7))
        assert drafted.ancestors.shape == (3, 8, 8)


# The text -----------------------------------------------------------------------------------------------------------------

WISHES = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=1.0, seed=5),
    "cool": Sampling(temperature=0.5, seed=1),
    "top-k": Sampling(temperature=0.9, top_k=4, seed=2),
    "top-p": Sampling(temperature=1.1, top_p=0.7, seed=3),
    "min-p": Sampling(temperature=1.0, min_p=0.2, seed=4),
    "repetition": Sampling(repetition_penalty=1.4),
    "presence": Sampling(temperature=0.8, presence_penalty=0.9, frequency_penalty=0.5, seed=6),
    "n-gram": Sampling(no_repeat_ngram=3),
    "bias": Sampling(logit_bias={3: 2.5, 7: -4.0}),
    "banned": Sampling(banned_words=([5], [1, 2])),
    "minimum": Sampling(min_new_tokens=9, stop_tokens=tuple(range(0, VOCAB, 6))),
    "processor": Sampling(processors=[lambda ids, scores: scores - 0.5 * (torch.arange(VOCAB) == ids[0, -1])]),
}
CHAIN = ((0,), (0, 0), (0, 0, 0))
DRAFTS: dict[str, Callable[[], Drafter]] = {
    "dynamic": lambda: Medusa(medusa_head(), target(), "dynamic"),
    "fixed": lambda: Medusa(medusa_head(), target(), MEDUSA_TREE),
    "chain": lambda: Medusa(medusa_head(), target(), CHAIN),
    "pairs": lambda: Medusa(paired_head(), target(), "dynamic"),
}


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("wish", WISHES)
def test_the_same_text_as_plain(wish: str, draft: str) -> None:
    """Ragged prompts in fewer rows than there are: rows join and leave while others run."""
    asked = prompts(8)
    wanted = texts(Engine(target()), asked, max_new_tokens=30, sampling=WISHES[wish])
    drafter = Watch(DRAFTS[draft]())
    done = Engine(target(), drafter).generate(asked, max_new_tokens=30, sampling=WISHES[wish], batch_size=3)
    assert [(one.tokens, one.finish_reason) for one in done] == wanted
    assert accepted_share(done) > 0.01


def test_heads_that_know_the_text_are_accepted() -> None:
    """Equality would mean little if nothing were accepted: what the heads learnt by heart they draft, all rows at once."""
    for wish, least in ((Sampling(), 1.5), (Sampling(temperature=1.0, seed=5), 1.0)):
        for name, drafter in DRAFTS.items():
            done = Engine(target(), drafter()).generate(prompts(8), max_new_tokens=40, sampling=wish)
            assert sum(one.stats.accepted for one in done) > least * sum(one.stats.rounds for one in done), (wish, name)


# Mistakes -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ("oak", "oak.*dynamic.*mc_sim_7b_63"),
        ("mc_sim_7b_63", "4 deep.*3 heads"),
        (((0,), (0, 50)), "51 choices.*40"),
        (((0, 0), (0,)), "before its parent"),
        (((0,), (0,)), "comes twice"),
        ((), "empty"),
    ],
)
def test_trees_that_cannot_be_drafted_are_refused(tree: Any, words: str) -> None:
    with pytest.raises((BadInput, DrafterMismatch), match=words):
        Medusa(noisy_head(3), target(), tree)


def test_heads_of_another_target_are_refused() -> None:
    for hidden, vocab, words in ((16, VOCAB, "16 numbers.*has 32"), (32, 4096, "4096 tokens.*has 40")):
        with pytest.raises(DrafterMismatch, match=words):
            Medusa(MedusaHead(MedusaConfig(2, 1, hidden, vocab)), target())
    with pytest.raises(BadInput, match=r"num_heads.*0"):
        MedusaConfig(0, 1, 32, VOCAB)
    with pytest.raises(BadInput, match="share"):
        MedusaConfig(2, 1, 32, VOCAB, share_lm_head=True, draft_vocab_size=5)


@needs_kernels
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "own projections"])
@pytest.mark.parametrize("layers", [1, 2])
def test_kernels_say_what_operators_say(shared: bool, layers: int) -> None:
    """Logits of all heads, as closely as bfloat16 can, and the trees drawn from them."""
    tables = packed_target()
    head = MedusaHead.fresh(tables, num_heads=3, num_layers=layers, share_lm_head=shared)
    dice = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in head.parameters():                     # no two heads alike
            parameter += 0.1 * torch.randn(parameter.shape, generator=dice)
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    drafter = Medusa(head, tables)
    with torch.inference_mode():
        wanted = logits_of(drafter, hidden, 3, TORCH)
        assert drafter.prepared is None
        for heads in (1, 3):
            found = logits_of(drafter, hidden, heads)
            assert drafter.prepared is not None and found.shape == (5, heads, 96)
            assert (found - wanted[:, :heads]).float().norm() < 0.01 * wanted.float().norm()


@needs_kernels
@pytest.mark.parametrize("tree", ["dynamic", MEDUSA_TREE], ids=["dynamic", "fixed"])
@pytest.mark.parametrize("wish", [Sampling(), Sampling(temperature=0.8, seed=3)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rows", [1, 3])
def test_heads_and_pairs_read_as_one_draft_what_they_draft_apart(rows: int, wish: Sampling, tree: Any) -> None:
    tables, dice = packed_target(), torch.Generator().manual_seed(0)
    head = MedusaHead.fresh(tables, num_heads=3, num_layers=2, share_lm_head=True)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=dice)
    head.count(*torch.randint(96, (2, 3000), generator=dice))
    drafter, apart = Medusa(head, tables, tree), Medusa(head, tables, tree)
    frontier = Frontier(paths_of([[5, 1, 7, 2], [4, 4], [9, 8, 7, 6, 5]][:rows]).prefix, sampler_of(*[wish] * rows), 7)
    hidden = torch.randn(rows, 64, generator=dice).bfloat16()
    drafted = []
    with torch.inference_mode():
        for one in (drafter, apart):
            one.start(4, 64, CPU)
            one.hidden[:rows] = hidden
            assert one.prepared.whole is not None                       # type: ignore[union-attr]
            if one is apart:
                one.prepared = one.prepared._replace(whole=None)        # type: ignore[union-attr]
            drafted.append(one.propose(frontier))
    one, other = drafted
    assert torch.equal(one.tokens, other.tokens) and torch.equal(one.parents, other.parents)
    assert one.confidence is not None and other.confidence is not None and torch.equal(one.confidence, other.confidence)
    assert one.tokens.shape == (rows, 8) and bool((one.confidence[:, 1:] > 0).all()) and bool((one.confidence[:, 0] == 1).all())
    assert rows == 1 or not torch.equal(one.tokens[0], one.tokens[1])


@needs_kernels
def test_heads_with_projections_of_their_own_are_read_apart() -> None:
    tables = packed_target()
    head = MedusaHead.fresh(tables, num_heads=2, num_layers=1, share_lm_head=False)
    head.count(*torch.randint(96, (2, 3000), generator=torch.Generator().manual_seed(0)))
    drafter = Medusa(head, tables)
    drafter.start(1, 64, CPU)
    assert drafter.prepared.whole is None                               # type: ignore[union-attr]
