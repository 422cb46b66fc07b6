"""Drafters for tests: one that knows the answer, one that guesses, one that errs; all others."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import pytest
import torch
import transformers
from tiny import CPU, VOCAB, paths_of, prompts, sampler_of, target
from torch import Tensor

from draftproof.core.messages import Commit, Frontier
from draftproof.core.ops import Ops
from draftproof.core.params import Sampling
from draftproof.core.tree import ABSENT, NO_TOKEN, TokenTree, TreeShape
from draftproof.drafters.base import Drafter, Plain
from draftproof.drafters.draft_model import DraftModel, SelfDraft
from draftproof.drafters.heads import DraftHead
from draftproof.drafters.losses import head_loss
from draftproof.drafters.medusa import Medusa, MedusaHead
from draftproof.drafters.portfolio import Portfolio
from draftproof.drafters.prompt_lookup import PromptLookup
from draftproof.drafters.redrafter import ReDrafter, ReDrafterHead
from draftproof.drafters.suffix import SuffixDrafter
from draftproof.drafters.token_recycling import TokenRecycling
from draftproof.engine.budget import Budget
from draftproof.engine.engine import Completion, Engine
from draftproof.engine.wrappers import DrafterWrapper
from draftproof.model.target import Target
from draftproof.native.cpu_ops import CpuOps
from draftproof.native.kernels import kernels
from draftproof.requests.stats import State
from draftproof.weights.packed_linear import pack_linears


class Oracle(Drafter):
    """Knows what every row will write: `answers` maps a prompt to its continuation."""

    name = "oracle"

    def __init__(self, answers: dict[tuple[int, ...], Sequence[int]], wrong: bool = False) -> None:
        self.answers, self.wrong = answers, wrong

    def propose(self, frontier: Frontier) -> TokenTree:
        rows = [self._row(frontier, row) for row in range(len(frontier.prefix.position))]
        return TokenTree.chain(torch.tensor(rows, device=frontier.prefix.tokens.device))

    def _row(self, frontier: Frontier, row: int) -> list[int]:
        place = int(frontier.prefix.position[row])
        text = frontier.prefix.tokens[row, : place + 1].tolist()
        for prompt, answer in self.answers.items():
            whole = [*prompt, *answer]
            if tuple(text[: len(prompt)]) == prompt and whole[: len(text)] == text:
                ahead = whole[place + 1 : place + 1 + frontier.max_draft_tokens]
                ahead = [(token + 1) % VOCAB for token in ahead] if self.wrong else ahead
                return [text[-1], *ahead, *[ABSENT] * (frontier.max_draft_tokens - len(ahead))]
        return [text[-1], *[ABSENT] * frontier.max_draft_tokens]


class Guess(Drafter):
    """Random trees of another shape in every round and row: with absent nodes, ragged."""

    name = "guess"
    max_draft_tokens = 6

    def __init__(self, vocab: int = VOCAB) -> None:
        self.vocab, self.dice = vocab, torch.Generator().manual_seed(5)

    def propose(self, frontier: Frontier) -> TokenTree:
        rows = len(frontier.prefix.position)
        width = int(torch.randint(2, 4, (), generator=self.dice))
        paths = torch.randint(self.vocab, (rows, width, 4), generator=self.dice)
        paths[torch.rand(paths.shape, generator=self.dice) < 0.2] = ABSENT
        paths[:, :, 0] = frontier.prefix.root[:, None].cpu()
        if frontier.max_draft_tokens + 1 < 4:
            return TokenTree.root(frontier.prefix.root)
        device, nodes = frontier.prefix.root.device, frontier.max_draft_tokens + 1
        return TokenTree.from_paths(paths.to(device), nodes)


class Hinted(Drafter):
    """Trees that hold the truth on one branch and noise on the others; `inner` is an `Oracle`."""

    name = "hinted"
    max_draft_tokens = 8

    def __init__(self, inner: Oracle) -> None:
        self.inner, self.dice = inner, torch.Generator().manual_seed(7)

    def propose(self, frontier: Frontier) -> TokenTree:
        proposed = self.inner.propose(frontier).tokens  # [B, K+1]
        if frontier.max_draft_tokens < 8:
            return TokenTree.chain(proposed)
        known = proposed.cpu()
        right = known[:, :4]
        noise = torch.randint(VOCAB, (len(known), 2, 4), generator=self.dice)
        noise[:, :, 0], noise[:, 0, 1] = right[:, :1], right[:, 1]
        errs = torch.rand(right.shape, generator=self.dice) < 0.15
        right = torch.where(errs, (right + 1).clamp(max=VOCAB - 1), right)
        right[:, 0] = known[:, 0]
        paths = torch.cat([noise, right[:, None]], 1)
        return TokenTree.from_paths(paths.to(proposed.device), 9)


class Fading(Budget):
    """A budget that goes to 0 for a while and comes back: K → 0 → K."""

    def __init__(self, most: int = 5) -> None:
        self.max_draft_tokens, self.round = most, 0

    def choose(self, state: State) -> int:
        self.round += 1
        most = self.max_draft_tokens
        return (most, most, 0, 0, 0, 1, most, 0, 2)[self.round % 9]


class Watch(DrafterWrapper):
    """Passes everything on to `inner` and checks what must hold of any drafter."""

    def start(self, rows: int, capacity: int, ops: Ops) -> None:
        super().start(rows, capacity, ops)
        self.observed: list[list[int]] = []

    def observe(self, commit: Commit) -> None:
        for index, row in enumerate(commit.rows):
            if row == len(self.observed):
                self.observed.append([])
            self.observed[row] += commit.tokens[index, : int(commit.count[index])].tolist()
        super().observe(commit)

    def select(self, rows: Sequence[int]) -> None:
        self.observed = [list(self.observed[row]) for row in rows]
        super().select(rows)

    def propose(self, frontier: Frontier) -> TokenTree:
        position = frontier.prefix.position.tolist()
        for row, text in enumerate(self.observed):  # what was observed is the text before the root
            assert text == frontier.prefix.tokens[row, : position[row]].tolist()
        before = frontier.prefix.tokens.clone()
        tree = super().propose(frontier)
        assert torch.equal(before, frontier.prefix.tokens), "a drafter may not write into the text"
        assert_well_formed(tree, frontier)
        return tree


def assert_well_formed(tree: TokenTree, frontier: Frontier) -> None:
    """The root first, parents before children, within the budget, nothing below an absent node."""
    assert torch.equal(tree.tokens[:, 0], frontier.prefix.root)
    unsure = tree.confidence is None and tree.budget_rank is None
    allowed = frontier.max_draft_tokens if unsure else frontier.max_nodes
    assert ((tree.tokens != ABSENT).sum(1) - 1 <= allowed).all()
    numbers = torch.arange(tree.tokens.shape[1])
    assert (tree.parents < numbers).all() and (tree.parents[:, 1:] >= 0).all()
    assert (tree.parents[:, 0] == -1).all()
    orphan = (tree.tokens.gather(1, tree.parents.clamp(min=0)) == ABSENT) & (tree.tokens != ABSENT)
    assert not orphan[:, 1:].any()
    assert (tree.tokens >= ABSENT).all() and (tree.tokens < VOCAB + 100).all()
    if tree.is_chain:
        assert (tree.parents == numbers - 1).all()
    assert (tree.depths.amax() if tree.tokens.shape[1] else 0) <= tree.depth_limit


def frontier_of(
    texts: Sequence[Sequence[int]], budget: int, *params: Sampling, trees: bool = True,
    ops: Ops = CPU, capacity: int = 64,
) -> Frontier:  # fmt: skip
    """Texts whose last token is the root, with scratch after them; greedy if nothing is said."""
    rows = params if len(params) == len(texts) else (params or (Sampling(),)) * len(texts)
    prefix = paths_of(texts, capacity=capacity).prefix
    return Frontier(prefix, sampler_of(*rows, ops=ops), budget, trees=trees)


def commit_of(
    rows: Sequence[int], texts: Sequence[Sequence[int]], hidden: Tensor | None = None
) -> Commit:
    """Ragged pieces of text, with tokens after them that must not be read."""
    width = max(map(len, texts))
    tokens = torch.tensor([[*text, *[1] * (width - len(text))] for text in texts])
    count = torch.tensor([len(text) for text in texts])
    return Commit(rows, tokens, torch.arange(width).expand(len(rows), -1), count, hidden)


def proposed(
    drafter: Drafter, texts: Sequence[Sequence[int]], budget: int = 6, trees: bool = True
) -> TokenTree:
    """A well-formed proposal after texts whose last token is the root, all before it observed."""
    frontier = frontier_of(texts, budget, trees=trees)
    tree = drafter.propose(frontier)
    assert_well_formed(tree, frontier)
    return tree


def drafted(tree: TokenTree, row: int = 0) -> dict[tuple[int, ...], float]:
    """The paths of a row's nodes, root excluded, in node order, and their confidence."""
    confidence = tree.confidence if tree.confidence is not None else torch.ones(tree.tokens.shape)
    settings = {}
    for text, chance in zip(tree.texts[row].tolist(), confidence[row].tolist(), strict=True):
        path = tuple(token for token in text[1:] if token != NO_TOKEN)
        if path and ABSENT not in path:
            settings[path] = chance
    return settings


def fitted(head: DraftHead, rounds: int = 40, rate: float = 0.05) -> DraftHead:
    """The head, fitted to what `target()` writes after `prompts(8)`, at temperatures 0 and 1."""
    asked, params = prompts(8) * 2, [Sampling()] * 8 + [Sampling(temperature=1.0, seed=5)] * 8
    done = Engine(target()).generate(asked, max_new_tokens=40, sampling=params, batch_size=16)
    texts = [torch.tensor([*prompt, *item.tokens])
             for prompt, item in zip(asked, done, strict=True)]
    tokens = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=ABSENT)
    with torch.no_grad():
        features = target().features(tokens, (tokens != ABSENT).double(),
                                     hidden_layers=head.hidden_layers)
    descent = torch.optim.Adam(head.parameters(), lr=rate)
    for _ in range(rounds):
        descent.zero_grad()
        head_loss(head, features, target()).backward()
        descent.step()
    return head


@lru_cache(maxsize=4)
def medusa_head(share_lm_head: bool = False) -> MedusaHead:
    """Three heads that know what `target()` writes; one for all tests."""
    head = fitted(MedusaHead.fresh(target(), 3, 1, share_lm_head))
    assert isinstance(head, MedusaHead)
    return head


@lru_cache(maxsize=1)
def paired_head() -> MedusaHead:
    """The same heads, with the pairs of tokens that `target()` writes after `prompts(8)`."""
    head = copy.deepcopy(medusa_head())
    done = Engine(target()).generate(prompts(8), max_new_tokens=40)
    chains = [[*prompt, *item.tokens] for prompt, item in zip(prompts(8), done, strict=True)]
    head.count(*torch.tensor([pair for chain in chains for pair in pairwise(chain)]).unbind(1))
    return head


@lru_cache(maxsize=4)
def redrafter_head(share_lm_head: bool = False) -> ReDrafterHead:
    """A recurrence over four tokens that knows what `target()` writes; one for all tests."""
    head = fitted(ReDrafterHead.fresh(target(), steps=4, share_lm_head=share_lm_head))
    assert isinstance(head, ReDrafterHead)
    return head


def _draft_model(ours: Target, *branches: int, **overrides: Any) -> DraftModel:
    """A small draft model that agrees with this target now and then; chains, or trees."""
    shape = TreeShape.branching(branches) if branches else None
    return DraftModel(target(seed=1, **overrides), ours.vocab_size, shape)


MEDUSA_TREE = ((0,), (0, 0), (1,), (0, 1), (0, 0, 0), (1, 0), (2,))

DRAFTERS: dict[str, Callable[[Any], Drafter]] = {
    "plain": lambda target: Plain(), "prompt-lookup": lambda target: PromptLookup(),
    "suffix": lambda target: SuffixDrafter(memory=300),
    "recycling": lambda target: TokenRecycling(memory=50),
    "portfolio": lambda target: Portfolio([PromptLookup(), SuffixDrafter(300), TokenRecycling(50)]),
    "portfolio, medusa": lambda target: Portfolio([SuffixDrafter(300), DRAFTERS["medusa"](target)]),
    "draft chain": lambda target: _draft_model(target, num_hidden_layers=1),
    "draft tree": lambda target: _draft_model(target, 2, 2, 1, num_hidden_layers=1),
    "smaller vocabulary": lambda target: _draft_model(target, vocab_size=VOCAB - 9),
    "larger vocabulary": lambda target: _draft_model(target, 3, 1, vocab_size=VOCAB + 7),
    "target itself": lambda target: DraftModel(target, target.vocab_size),
    "target itself, tree": lambda target: SelfDraft(target, shape=TreeShape.branching((2, 2, 1))),
    "medusa": lambda target: Medusa(medusa_head(), target),
    "medusa, pairs": lambda target: Medusa(paired_head(), target),
    "medusa, fixed tree": lambda target: Medusa(medusa_head(True), target, MEDUSA_TREE),
    "redrafter": lambda target: ReDrafter(redrafter_head(), target),
    "redrafter, shared": lambda target: ReDrafter(redrafter_head(True), target),
    "guess": lambda target: Guess(target.vocab_size)
}


LEARNERS = ("suffix", "recycling", "portfolio", "portfolio, medusa")
"""What other rows and earlier texts taught them may change what they propose: never the text."""


def without_lookup(patch: pytest.MonkeyPatch) -> None:
    """Have torch's operators do what drafters that need no model do, as on any device."""
    patch.setattr(CpuOps, "run", Ops.run)


def texts(
    engine: Engine, prompts: Sequence[Sequence[int]], **params: Any
) -> list[tuple[list[int], str]]:
    """Tokens and finish reason of each completion."""
    return [(item.tokens, item.finish_reason) for item in engine.generate(prompts, **params)]


def accepted_share(done: Sequence[Completion]) -> float:
    """Accepted over drafted tokens: a test of equality that accepts nothing tests nothing."""
    drafted = sum(completion.stats.drafted for completion in done)
    return sum(completion.stats.accepted for completion in done) / drafted if drafted else 0.0


def per_round(done: Sequence[Completion]) -> float:
    """Tokens per round, of all texts together."""
    return sum(item.stats.emitted for item in done) / sum(item.stats.rounds for item in done)


def assert_counts(done: Completion) -> None:
    """Emitted tokens and rounds agree, and nothing that was cut off is counted."""
    stats = done.stats
    assert stats.emitted + 1 == len(done.tokens)
    assert stats.rounds <= stats.emitted or len(done.tokens) == 1
    assert stats.accepted <= min(stats.drafted, stats.emitted)
    assert all(0 <= rate <= 1 for rate in (*stats.acceptance_by_position, stats.acceptance))


needs_kernels = pytest.mark.skipif(kernels() is None, reason="no kernels for it here")


def packed_target(tied: bool = True, layers: int = 2) -> Target:
    """A small target in bfloat16 whose draft heads our kernels can read."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, vocab_size=96, initializer_range=0.2,
        max_position_embeddings=256, eos_token_id=None, tie_word_embeddings=tied,
    )  # fmt: skip
    ours = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()
    pack_linears(ours)
    return Target(ours)
