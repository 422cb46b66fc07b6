"""No host read inside a round, storage that never moves, no token read twice, no broken tree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from batches import Counted, Script, decoder, running
from drafting import DRAFTERS, LEARNERS, Fading
from tiny import CPU, prompts, target
from torch.utils._python_dispatch import TorchDispatchMode

from draftproof.core.acceptance import RULES
from draftproof.core.messages import Accepted, Commit, Frontier
from draftproof.core.ops import TORCH, Ops
from draftproof.core.tree import TokenTree, TreeShape
from draftproof.drafters.base import Drafter
from draftproof.drafters.draft_model import DraftModel
from draftproof.drafters.prompt_lookup import PromptLookup
from draftproof.engine import deferred
from draftproof.engine.budget import Fixed
from draftproof.engine.decoder import Decoder
from draftproof.engine.engine import Engine
from draftproof.engine.shape_policy import ShapePolicy
from draftproof.engine.stats import Round
from draftproof.errors import DrafterMismatch
from draftproof.model.kv_cache import KVCache
from draftproof.native.cpu_ops import CpuOps

SYNCING = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "equal", "unique",
           "unique2", "_unique2", "item")


HIDDEN = ("tolist", "numpy", "cpu")  # these never reach the dispatcher for a tensor on the CPU


class NoHostReads(TorchDispatchMode):
    """Refuses whatever must wait for the device."""

    def __enter__(self) -> Any:
        self.patch = pytest.MonkeyPatch()
        for name in HIDDEN:
            self.patch.setattr(torch.Tensor, name,
                               lambda *_, name=name: pytest.fail(f"{name} reads from the device"))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self.patch.undo()
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        assert name not in SYNCING, f"{name} reads from the device"
        if name in ("index", "index_put", "index_put_"):
            indices = args[1]
            assert all(index is None or index.dtype != torch.bool for index in indices), (
                "a mask as an index has a size only the host knows"
            )
        return func(*args, **(kwargs or {}))


DRAWERS = ("draft chain", "draft tree", "smaller vocabulary")


@pytest.mark.parametrize(("drafter", "rule"), [
    *((name, "match") for name in DRAFTERS if name not in ("guess", *DRAWERS)),
    *((name, rule) for name in DRAWERS for rule in RULES),
])  # fmt: skip
def test_a_round_reads_nothing_back_before_it_delivers(
    drafter: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but `_deliver`, which makes the one copy to the host, waits for nothing."""
    one = decoder(DRAFTERS[drafter](target()), rule, ops=TORCH)
    wants = [{"temperature": 1.0}, {"top_k": 4, "temperature": 0.7, "top_p": 0.9, "min_p": 0.01},
             {"repetition_penalty": 1.2}]
    for prompt, want in zip(prompts(3, seed=1), wants, strict=True):
        one.admit([running(prompt, **want)])
    one.step()
    delivered: list[Any] = []
    deliver = one._deliver

    monkeypatch.setattr(one, "_deliver",
                        lambda *args: delivered.append(args) or Round(0, 3, [], 3, 0.0))
    for _ in range(3):
        with NoHostReads():
            one.step()
        with torch.inference_mode():
            deliver(*delivered.pop())


@pytest.mark.parametrize("wrong",
                         [lambda t: t[0].item(), lambda t: t.nonzero(), lambda t: bool(t[0] > 0),
                          lambda t: t[t > 0], lambda t: t.unique(), lambda t: t.tolist(),
                          lambda t: int(t[0]), lambda t: torch.equal(t, t), lambda t: t.numpy()])
def test_the_watchman_is_awake(wrong: Any) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception)), NoHostReads():
        wrong(torch.ones(2))


@pytest.mark.parametrize("drafter", ["prompt-lookup", "draft chain", "draft tree"])
def test_storage_never_moves(drafter: str) -> None:
    one = decoder(DRAFTERS[drafter](target()))
    inner = getattr(one.drafter, "inner", one.drafter)
    caches = [one.batch.cache] + ([inner.cache] if isinstance(inner, DraftModel) else [])
    places = _places(caches)
    for round_ in range(14):
        if len(one.running) < 4 and round_ % 3 == 0:
            one.admit([running(prompts(5, seed=2)[round_ % 5], limit=9)])
        one.step() if one.running else None
        assert _places(caches) == places


def _places(caches: list[KVCache]) -> list[int]:
    return [store.data_ptr() for cache in caches for layer in cache.layers
            for store in (layer.keys, layer.values)]


def test_the_target_reads_each_prompt_token_once_and_each_new_one_once_where_it_stands() -> None:
    """Every read starts where the committed text ends, also with several samples."""
    own = Counted(target())
    one = decoder(PromptLookup(), own=own)
    prompt = list(range(2, 14))
    one.admit([running(prompt, limit=12, temperature=1.0, sample=sample) for sample in range(3)])
    assert [tokens.tolist() for tokens, _ in own.reads] == [[prompt]]
    while one.running:
        before = one.batch.view.lengths.clone()
        own.reads.clear()
        one.step()
        ((_, starts),) = own.reads
        assert starts.equal(before)


def test_a_draft_reads_each_prompt_token_once() -> None:
    """What its cache has is not read again; after rounds without a draft it catches up once."""
    own = Counted(target(seed=1))
    drafter = DraftModel(own, 40)
    fade = Fading(5)
    one = Decoder(target(), drafter, RULES["match"], fade, 2, 128)
    one.admit([running(list(range(2, 30)), limit=40)])
    covered = 0
    while one.running:
        own.reads.clear()
        one.step()
        for _tokens, lengths in own.reads:
            assert int(lengths[0]) >= covered - 1, "read again"
            covered = max(covered, int(lengths[0]))
        if drafter.cache is not None and one.running:
            assert int(drafter.cache.lengths[0]) <= int(one.batch.cache.lengths[0])


@pytest.mark.parametrize("drafter", [name for name in DRAFTERS if name not in ("plain", "guess")])
@pytest.mark.parametrize("patience", [2, 32])
def test_a_drafter_told_of_plain_rounds_together_drafts_the_same(
    drafter: str, patience: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several rows, unless drafters learn from the others in the order in which they write."""
    told: list[int] = []

    def drafts(patience: int) -> list[list[list[int]]]:
        monkeypatch.setattr(deferred, "TOGETHER", patience)
        inner, found = DRAFTERS[drafter](target()), list[TokenTree]()

        class Heard(type(inner)):  # type: ignore[misc]
            def propose(self, frontier: Frontier) -> TokenTree:
                found.append(super().propose(frontier))
                return found[-1]

            def observe(self, commit: Commit) -> None:
                told.append(commit.tokens.shape[1])
                super().observe(commit)

        inner.__class__ = Heard
        one = decoder(inner, budget=Fading(3))
        for prompt in prompts(1 if drafter in LEARNERS else 3, seed=4):
            one.admit([running(prompt, limit=25)])
            for _ in range(3):                          # rows join before and after plain rounds
                one.step()
        told.clear()
        while one.running:
            one.step()
        return [[tree.tokens.tolist(), tree.parents.tolist()] for tree in found]

    once = drafts(1)
    assert once and drafts(patience) == once and max(told, default=2) >= 2


@pytest.mark.parametrize("has_kv_cache", [False, True])
def test_what_answers_a_proposal_is_told_at_once(has_kv_cache: bool) -> None:
    """A drafter that keeps what it read of its own tree must hear what became of it, though it may
    have been the root alone."""
    told: list[int] = []

    class Bare(Drafter):
        name = "bare"

        def propose(self, frontier: Frontier) -> TokenTree:
            told.clear()
            return TokenTree.root(frontier.prefix.root)

        def observe(self, commit: Commit) -> None:
            told.append(commit.tokens.shape[1])

    inner = Bare()
    inner.has_kv_cache = has_kv_cache
    sizes = [0, 0, 3, 0, 0, 0, 3, 0, 0]
    one = decoder(inner, budget=Script(sizes))
    one.admit([running([3, 4, 5], limit=25)])
    for _ in sizes:
        one.step()
    assert told == ([1] if has_kv_cache else [])
    one.drafter.flush()
    assert told == ([1, 2] if has_kv_cache else [3])


def _broken(frontier: Frontier, kind: str) -> TokenTree:
    """A tree with one thing wrong."""
    tokens = frontier.prefix.root[:, None].repeat(1, 4)
    tree = TokenTree.shaped(tokens, TreeShape.branching((1, 2)))
    parents = tree.parents.clone()
    if kind in ("parent behind", "parent beyond", "two roots"):
        parents[:, 2] = {"parent behind": 3, "parent beyond": 1 << 40, "two roots": -1}[kind]
    elif kind in ("unknown token", "negative token"):
        tokens[:, 3] = 1 << 40 if kind == "unknown token" else -5
    tokens = {"int32": tokens.int(), "more rows": tokens.repeat(2, 1)}.get(kind, tokens)
    return TokenTree(tokens, parents, 1 if kind == "deeper than said" else 2)


@pytest.mark.parametrize("ops", [CPU, TORCH], ids=["kernels", "operators"])
@pytest.mark.parametrize("kind", [
    "parent behind", "parent beyond", "two roots", "unknown token", "negative token", "int32",
    "more rows", "deeper than said"])  # fmt: skip
def test_what_is_no_tree_is_refused(kind: str, ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Drafter):
        def propose(self, frontier: Frontier) -> TokenTree:
            return _broken(frontier, kind)

    monkeypatch.setattr(CpuOps, "run", ops.run)
    with pytest.raises(DrafterMismatch, match="proposed no tree"):
        Engine(target(), Broken(), budget=5).generate([[1, 2], [3]], max_new_tokens=4)


def test_a_drafter_that_ignores_its_budget_is_told_so() -> None:
    class Greedy(Drafter):
        name = "greedy"

        def propose(self, frontier: Frontier) -> TokenTree:
            return TokenTree.chain(frontier.prefix.root[:, None].repeat(1, frontier.budget + 3))

    engine = Engine(target(), Greedy(), budget=2)
    with pytest.raises(DrafterMismatch, match="greedy proposed 4 nodes, 2 were allowed"):
        engine.generate([[1, 2, 3]], max_new_tokens=8)


@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("closed", [False, True], ids=["at hand", "closed"])
@pytest.mark.parametrize("drafter",
                         ["medusa, pairs", "redrafter", "target itself", "medusa, fixed tree"])
def test_a_round_tells_which_nodes_stood(drafter: str, closed: bool, logprobs: bool) -> None:
    """By number where nodes are ranked, so that a budget can tell what fewer would have given."""
    said: list[Accepted] = []

    def noted(tree: TokenTree, logits: torch.Tensor, frontier: Frontier) -> Accepted:
        said.append(RULES["match"].accept(tree, logits, frontier))
        return said[-1]

    told: list[Round] = []

    class Told(Fixed):
        def __init__(self) -> None:
            super().__init__(6)

        def record(self, done: Round) -> None:
            told.append(done)

    rule = RULES["match"]._replace(accept=noted)
    one = Decoder(target(), DRAFTERS[drafter](target()), rule, Told(), 4, 128,
                  ShapePolicy(closed=closed))
    for prompt in prompts(3, seed=4):
        one.admit([running(prompt, limit=20, logprobs=logprobs)])
    accepted = 0
    while one.running:
        rows, before = list(one.running), [row.stats.accepted for row in one.running]
        one.step()
        nodes = [node for row in range(len(rows))
                 for node in said[-1].nodes[row, 1 : said[-1].count[row]].tolist()]
        assert told[-1].accepted == nodes and all(1 <= node <= 6 for node in nodes)
        counted = sum(row.stats.accepted for row in rows) - sum(before)
        assert len(nodes) >= counted  # what an end cut off was accepted as well
        accepted += counted
    assert accepted > 0
