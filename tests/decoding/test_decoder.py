"""The decoder's economy: no host read inside a round, storage that never moves, no token read twice."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy
import pytest
import torch
from drafting import DRAFTERS, LEARNERS, Fading, Oracle
from tiny import VOCAB, prompts, target
from torch.utils._python_dispatch import TorchDispatchMode

from draftproof.core.acceptance import RULES
from draftproof.core.messages import Accepted, Commit, Frontier
from draftproof.core.tree import TokenTree
from draftproof.core.wishes import Sampling, Wishes
from draftproof.decoding import decoder as decoder_module
from draftproof.decoding.budget import Budget, Fixed, Script
from draftproof.decoding.decoder import SHORT, Decoder
from draftproof.decoding.engine import Engine
from draftproof.decoding.sequence import Running
from draftproof.decoding.shapes import Shapes
from draftproof.drafters.base import Drafter
from draftproof.drafters.draft_model import DraftModel
from draftproof.drafters.prompt_lookup import PromptLookup
from draftproof.errors import DrafterMismatch
from draftproof.target.cache import RowCache
from draftproof.target.fused import NODES
from draftproof.target.target import Target

SYNCING = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "equal", "unique", "unique2", "_unique2", "item")


HIDDEN = ("tolist", "numpy", "cpu")  # these never reach the dispatcher for a tensor on the CPU


class NoHostReads(TorchDispatchMode):
    """Refuses whatever must wait for the device."""

    def __enter__(self) -> Any:
        self.patch = pytest.MonkeyPatch()
        for name in HIDDEN:
            self.patch.setattr(torch.Tensor, name, lambda *_, name=name: pytest.fail(f"{name} reads from the device"))
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


def running(prompt: Sequence[int], limit: int = 30, sample: int = 0, **wishes: Any) -> Running:
    return Running(prompt, Wishes(Sampling(**wishes), len(prompt), sample=sample), limit)


def decoder(drafter: Any, rule: str = "match", rows: int = 4, budget: Budget | int = 5, own: Any = None) -> Decoder:
    asked = Fixed(budget) if isinstance(budget, int) else budget
    return Decoder(own or target(), drafter, RULES[rule], asked, rows, 128)


@pytest.mark.parametrize("rule", ["match", "rejection", "block"])
@pytest.mark.parametrize("drafter", ["plain", "prompt-lookup", *LEARNERS, "draft chain", "draft tree", "smaller vocabulary"])
def test_a_round_reads_nothing_back_before_it_delivers(drafter: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft, read, accept, keep and observe wait for nothing; the one copy to the host is in `_deliver`."""
    one = decoder(DRAFTERS[drafter](target()), rule)
    one.at_hand = False                                                         # as on any device
    wants = [{"temperature": 1.0}, {"top_k": 4, "temperature": 0.7, "top_p": 0.9, "min_p": 0.01}, {}]
    for prompt, want in zip(prompts(3, seed=1), wants, strict=True):
        one.admit([running(prompt, **want)])
    one.step()
    delivered: list[Any] = []
    deliver = one._deliver

    monkeypatch.setattr(one, "_deliver", lambda *args: delivered.append(args))
    for _ in range(3):
        with NoHostReads():
            one.step()
        with torch.inference_mode():
            deliver(*delivered.pop())


@pytest.mark.parametrize(
    "wrong",
    [
        lambda t: t[0].item(),
        lambda t: t.nonzero(),
        lambda t: bool(t[0] > 0),
        lambda t: t[t > 0],
        lambda t: t.unique(),
        lambda t: t.tolist(),
        lambda t: int(t[0]),
        lambda t: torch.equal(t, t),
        lambda t: t.numpy(),
    ],
)
def test_the_watchman_is_awake(wrong: Any) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception)), NoHostReads():
        wrong(torch.ones(2))


@pytest.mark.parametrize("drafter", ["prompt-lookup", "draft chain", "draft tree"])
def test_storage_never_moves(drafter: str) -> None:
    one = decoder(DRAFTERS[drafter](target()))
    caches = [one.cache] + ([one.drafter.cache] if isinstance(one.drafter, DraftModel) else [])
    places = _places(caches)
    for round_ in range(14):
        if len(one.running) < 4 and round_ % 3 == 0:
            one.admit([running(prompts(5, seed=2)[round_ % 5], limit=9)])
        one.step() if one.running else None
        assert _places(caches) == places


def _places(caches: list[RowCache]) -> list[int]:
    return [store.data_ptr() for cache in caches for layer in cache.layers for store in (layer.keys, layer.values)]


class Counted:
    """A target that writes down which committed place of which row it reads."""

    def __init__(self, inner: Target) -> None:
        self.inner, self.reads = inner, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def read(self, tree: TokenTree, cache: RowCache, **options: Any) -> Any:
        self.reads.append((tree.tokens.clone(), cache.lengths.clone()))
        return self.inner.read(tree, cache, **options)


def test_the_target_reads_each_prompt_token_once_and_each_new_one_once_where_it_stands() -> None:
    """Every read starts where the committed text ends: nothing committed is read again, also with several samples."""
    own = Counted(target())
    one = decoder(PromptLookup(), own=own)
    prompt = list(range(2, 14))
    one.admit([running(prompt, limit=12, temperature=1.0, sample=sample) for sample in range(3)])
    assert [tokens.tolist() for tokens, _ in own.reads] == [[prompt]]
    while one.running:
        before = one._view.lengths.clone()
        own.reads.clear()
        one.step()
        ((_, starts),) = own.reads
        assert starts.equal(before)


def test_a_draft_reads_each_prompt_token_once() -> None:
    """Tokens that the draft cache has are not read again; after rounds without a draft it catches up once."""
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
            assert int(drafter.cache.lengths[0]) <= int(one.cache.lengths[0])


class Roomy(Counted):
    """A target that must know of every read that its cache holds it: else operators read it, whose last bits are others."""

    def read(self, tree: TokenTree, cache: RowCache, **options: Any) -> Any:
        assert cache.holds(tree.tokens.shape[1])
        return super().read(tree, cache, **options)


def test_a_prompt_is_read_alike_however_long_the_others_are() -> None:
    """A row begins while another fills the cache nearly to the end."""
    one = Decoder(Roomy(target()), PromptLookup(), RULES["match"], Fixed(3), 2, 64)
    one.admit([running(list(range(2, 10)), limit=50)])
    while len(one.running[0].tokens) < 44:
        one.step()
    one.admit([running(list(range(2, 22)), limit=8)])
    while one.running:
        one.step()


def test_rows_leave_and_join_in_any_order() -> None:
    """Rows of every length of life, admitted whenever there is room: each writes what it writes alone."""
    asked = prompts(12, seed=3)
    limits = [1 + 3 * (index % 5) for index in range(12)]
    alone = []
    for index, prompt in enumerate(asked):
        one = decoder(PromptLookup(), rows=1)
        alone.append(running(prompt, limit=limits[index], temperature=0.8, seed=index))
        one.admit([alone[-1]])
        while one.running:
            one.step()
    for name in ("draft chain", "draft tree", "guess", "target itself, tree"):
        one = decoder(DRAFTERS[name](target()), rows=3, budget=10)
        rows = [running(prompt, limit=limits[index], temperature=0.8, seed=index) for index, prompt in enumerate(asked)]
        waiting = list(rows)
        while waiting or one.running:
            while waiting and len(one.running) < 3:
                one.admit([waiting.pop(0)])
            if one.running:
                one.step()
        assert [row.tokens for row in rows] == [row.tokens for row in alone]
        assert not one.cache.lengths.any(), "an empty batch has an empty cache"


@pytest.mark.parametrize("name", DRAFTERS)
def test_prompts_that_come_together_are_read_in_one_pass(name: str) -> None:
    """Side by side, the shorter ones padded, with several samples, two that end at once: rows and drafter learn the same."""
    asked, limits = [prompt[: 3 + 4 * index] for index, prompt in enumerate(prompts(4, seed=3))], (20, 30, 25, 1)
    found = []
    for together in (True, False):
        requests = [
            [running(prompt, limit=limit, temperature=0.8, seed=index, sample=sample) for sample in range(1 + index % 2)]
            for index, (prompt, limit) in enumerate(zip(asked, limits, strict=True))
        ]
        own = Counted(target())
        one = decoder(DRAFTERS[name](target()), rows=7, budget=6, own=own)
        one.admit([running(asked[3], limit=6)])                                 # somebody is there before them
        one.step()
        own.reads.clear()
        if together:
            one.admit(*requests)
            assert [tokens.shape for tokens, _ in own.reads] == [(4, max(len(prompt) for prompt in asked))]
        for request in [] if together else requests:
            one.admit(request)
        assert len(own.reads) == (1 if together else 4)
        unread = one.unread
        while one.running:
            one.step()
        assert not one.cache.lengths.any(), "an empty batch has an empty cache"
        found.append((unread, [(row.tokens, row.stats.rounds, row.stats.drafted) for request in requests for row in request]))
    assert found[0] == found[1]


def test_prompts_that_are_read_together_are_read_by_the_same_layers_as_alone() -> None:
    assert SHORT <= NODES


def test_short_prompts_are_read_together_where_padding_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    one = decoder(PromptLookup(), rows=6)
    short, long, longer = ([running([3] * tokens)] for tokens in (3, 60, 70))
    twice = [running([3, 4, 5]), running([3, 4, 5], sample=1)]
    assert [one.room_for(waiting) for waiting in ([], [short], [short] * 3, [long] * 9)] == [0, 1, 1, 1]
    monkeypatch.setattr(Target, "skips_absent", True)
    assert [one.room_for([short] * count) for count in (3, 6, 9)] == [3, 6, 6]
    assert one.room_for([twice] * 4) == 3 and one.room_for([short, short, [*twice, *twice, *short]]) == 2
    assert one.room_for([long] * 6) == 4 and one.room_for([*[short] * 4, long]) == 4, "five would be 300 with padding"
    assert one.room_for([longer] * 2) == 1 and one.room_for([short, longer]) == 1
    one.admit([running([3, 4, 5]) for _ in range(5)])
    assert one.room_for([short, short]) == 1 and one.room_for([twice, short]) == 0
    one.at_hand = False
    assert one.room_for([short, short]) == 1


def test_short_prompts_may_join_in_a_round_where_padding_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    one, short, long = decoder(PromptLookup()), [running([3] * SHORT)], [running([3] * (SHORT + 1))]
    monkeypatch.setattr(Target, "skips_absent", True)
    assert not one.takes([short]), "nobody runs"
    one.admit([running([3, 4, 5])])
    assert one.takes([short]) and one.takes([short, [*short, *short]])
    assert not one.takes([long]) and not one.takes([short, long])
    one.at_hand = False
    assert not one.takes([short])
    one.at_hand = True
    monkeypatch.setattr(Target, "skips_absent", False)
    assert not one.takes([short])


@pytest.mark.parametrize("sizes", [(6,), (0, 6), (0, 0, 2)], ids=str)
@pytest.mark.parametrize("name", DRAFTERS)
def test_who_joins_in_a_round_begins_as_behind_it(name: str, sizes: tuple[int, ...]) -> None:
    """In each round some join: long and short ones, with several samples, one that ends at once, where others just ended.

    Rows have another order then, so drafters that learn from all of them draft something else."""
    limits, found = (20, 1, 7, 30, 12, 5, 9, 15, 3), []
    for beside in (True, False):
        requests = [
            [running(prompt[: 3 + 2 * index], limit=limit, temperature=0.8, seed=index, sample=sample) for sample in samples]
            for index, (prompt, limit) in enumerate(zip(prompts(9, seed=3), limits, strict=True))
            for samples in [range(1 + index % 2)]
        ]
        own, waiting, unread = Counted(target()), list(requests), list[int]()
        one = decoder(DRAFTERS[name](target()), rows=5, budget=Script(sizes * 40), own=own)
        one.admit(waiting.pop(0))
        while one.running:
            free = 5 - len(one.running)
            coming = [waiting.pop(0) for _ in range(min(2, len(waiting), free // 2))]
            own.reads.clear()
            if beside:
                one.step(None, coming)
                assert len(own.reads) == 1
            else:
                one.step()
                if coming:
                    one.admit(*coming)
            unread.append(one.unread)
            for place, row in enumerate(one.running):
                text = [*row.prompt, *row.tokens]
                assert int(one.cache.lengths[place]) == len(text) - 1 and one.text[place, : len(text)].tolist() == text
        assert not waiting and not one.cache.lengths.any()
        rows = [row for request in requests for row in request]
        rounds = [(row.stats.rounds, row.stats.drafted) for row in rows] if name not in LEARNERS else []
        found.append((unread, [row.tokens for row in rows], rounds))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("committed", "nodes", "apart"), [(44, 3, False), (45, 3, True), (20, SHORT - 1, False), (20, SHORT, True)]
)
def test_who_joins_is_read_apart_where_there_is_no_room(committed: int, nodes: int, apart: bool) -> None:
    """Where the longest row leaves less than the prompt takes, or where what is drafted is wider than fused layers read."""
    own, joins = Counted(target()), running([5] * 20, limit=8)
    one = Decoder(own, Oracle({}), RULES["match"], Script([nodes]), 2, 64 if nodes == 3 else 128)
    one.admit([running([3] * committed, limit=9)])
    own.reads.clear()
    one.step(None, [[joins]])
    assert [tokens.shape for tokens, _ in own.reads] == ([(1, nodes + 1), (1, 20)] if apart else [(2, max(20, nodes + 1))])
    assert len(one.running) == 2 and len(joins.tokens) == 1


def test_a_round_commits_the_root_and_what_stood() -> None:
    """The cache holds exactly the text before the root, in every row, after every round."""
    one = decoder(DRAFTERS["target itself, tree"](target()), budget=10)
    for prompt in prompts(4, seed=4):
        one.admit([running(prompt, limit=25)])
    while one.running:
        one.step()
        for index, row in enumerate(one.running):
            text = [*row.prompt, *row.tokens]
            assert int(one.cache.lengths[index]) == len(text) - 1
            assert one.text[index, : len(text)].tolist() == text


@pytest.mark.parametrize("drafter", [name for name in DRAFTERS if name not in ("plain", "guess")])
@pytest.mark.parametrize("patience", [2, 32])
def test_a_drafter_told_of_plain_rounds_together_drafts_the_same(
    drafter: str, patience: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several rows, but for drafters that learn from the others in the order in which they write."""
    told: list[int] = []

    def drafts(patience: int) -> list[list[list[int]]]:
        monkeypatch.setattr(decoder_module, "PATIENCE", patience)
        inner, found = DRAFTERS[drafter](target()), []
        propose, observe = inner.propose, inner.observe
        monkeypatch.setattr(inner, "propose", lambda frontier: found.append(propose(frontier)) or found[-1])
        monkeypatch.setattr(inner, "observe", lambda commit: told.append(commit.tokens.shape[1]) or observe(commit))
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
    assert once and drafts(patience) == once and max(told) >= 2


@pytest.mark.parametrize("rereads", [False, True])
def test_what_answers_a_proposal_is_told_at_once(rereads: bool) -> None:
    """A drafter that keeps what it read of its own tree must hear what became of it, though it may have been the root alone."""
    told: list[int] = []

    class Bare(Drafter):
        name = "bare"

        def propose(self, frontier: Frontier) -> TokenTree:
            told.clear()
            return TokenTree.root(frontier.prefix.root)

        def observe(self, commit: Commit) -> None:
            told.append(commit.tokens.shape[1])

    inner = Bare()
    inner.rereads = rereads
    sizes = [0, 0, 3, 0, 0, 0, 3, 0, 0]
    one = decoder(inner, budget=Script(sizes))
    one.admit([running([3, 4, 5], limit=25)])
    for _ in sizes:
        one.step()
    assert told == ([1] if rereads else [])
    one._tell()
    assert told == ([1, 2] if rereads else [3])


@pytest.mark.parametrize("drafter", ["recycling", "medusa"])
def test_no_more_logits_wait_than_there_is_room_for(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And only for drafters that want successors."""
    told: list[int] = []

    def waits(held: int) -> int:
        monkeypatch.setattr(decoder_module, "HELD", held)
        inner = DRAFTERS[drafter](target())
        observe = inner.observe
        monkeypatch.setattr(inner, "observe", lambda commit: told.append(commit.tokens.shape[1]) or observe(commit))
        one = decoder(inner, budget=Fixed(0))
        one.admit([running(prompts(1, seed=4)[0], limit=25)])
        told.clear()
        while one.running:
            one.step()
        return max(told)

    each = VOCAB * torch.zeros((), dtype=target().dtype).element_size()
    longest = waits(1 << 24)
    assert longest > 10
    assert [waits(0), waits(3 * each)] == ([1, 4] if drafter == "recycling" else [longest, longest])


@pytest.mark.parametrize(
    ("text", "repeats"),
    [
        ([7, 1, 2, 3, 4, 9, 1, 2, 3, 4], True),
        ([1, 2, 3, 4, 1, 2, 3, 4], True),
        ([5, 5, 5, 5, 5], True),
        ([5, 5, 5, 5], False),
        ([1, 2, 3, 9, 1, 2, 3, 4], False),
        ([256, 0, 0, 0, 0, 6, 1, 0, 0, 0], False),
        ([256, 0, 0, 0, 0, 1, 0, 0, 0, 6, 1, 0, 0, 0], True),
    ],
)
def test_what_a_row_ends_with_is_found_before(text: list[int], repeats: bool) -> None:
    """Token by token, and never in the room behind it, where older rows may have left theirs."""
    page = numpy.array([(5 * text)[:20], 5 * [1, 2, 3, 4]])
    rows = [SimpleNamespace(prompt=text[:3], tokens=text[3:]), SimpleNamespace(prompt=[1, 2], tokens=[3, 4])]
    assert Decoder.repeating(cast(Decoder, SimpleNamespace(_page=page, running=rows)), 4) == repeats


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
@pytest.mark.parametrize("drafter", ["medusa, pairs", "redrafter", "target itself", "medusa, fixed tree"])
def test_a_round_tells_which_nodes_stood(drafter: str, closed: bool, logprobs: bool) -> None:
    """By number where nodes are ranked, so that a budget can tell what fewer would have given; of running rows alone."""
    said: list[Accepted] = []

    def noted(tree: TokenTree, logits: torch.Tensor, frontier: Frontier) -> Accepted:
        said.append(RULES["match"].accept(tree, logits, frontier))
        return said[-1]

    rule = RULES["match"]._replace(accept=noted)
    one = Decoder(target(), DRAFTERS[drafter](target()), rule, Fixed(6), 4, 128, Shapes(closed=closed))
    for prompt in prompts(3, seed=4):
        one.admit([running(prompt, limit=20, logprobs=logprobs)])
    stood = accepted = 0
    while one.running:
        before, rows = one.stats.accepted, range(len(one.running))
        one.step()
        if drafter == "medusa, fixed tree":
            assert one.stood is None
            continue
        assert one.stood == [node for row in rows for node in said[-1].nodes[row, 1 : said[-1].count[row]].tolist()]
        assert all(1 <= node <= 6 for node in one.stood)
        assert len(one.stood) >= one.stats.accepted - before                    # what an end cut off stood as well
        stood, accepted = stood + len(one.stood), accepted + one.stats.accepted - before
    assert drafter == "medusa, fixed tree" or 0 < accepted <= stood
