"""Recurrent Drafter: its recurrence, its beams against the published search in plain Python, and exactness."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any, ClassVar

import pytest
import torch
from drafting import Watch, accepted_share, needs_kernels, packed_target, redrafter_head, texts
from tiny import CPU, VOCAB, prompts, sampler_of, target
from torch import Tensor

from draftproof.core.messages import Commit, Features, Frontier
from draftproof.core.noise import Role
from draftproof.core.ops import TORCH, Ops
from draftproof.core.params import Sampling
from draftproof.core.prefix import Paths, Prefix
from draftproof.core.tree import ABSENT, TokenTree
from draftproof.drafters.base import Drafter, DraftHead, Vocabulary
from draftproof.drafters.losses import head_loss
from draftproof.drafters.redrafter import ReDrafter, ReDrafterConfig, ReDrafterHead
from draftproof.engine.engine import Engine
from draftproof.errors import BadInput, DrafterMismatch


class Tables:
    """A target of which only the tables exist: random, more tokens than Apple's search looks at."""

    name, context = "tables", 512
    native = None

    def __init__(
        self, vocab: int = 90, hidden: int = 8, trees: bool = True, device: str = "cpu", dtype: torch.dtype = torch.float64
    ) -> None:
        dice = torch.Generator().manual_seed(3)
        self.vocab_size, self.hidden_size, self.reads_trees = vocab, hidden, trees
        self.device, self.dtype = torch.device(device), dtype
        self.table = torch.randn(vocab, hidden, generator=dice, dtype=torch.float64).to(device, dtype)
        self.out = torch.randn(vocab, hidden, generator=dice, dtype=torch.float64).to(device, dtype)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.table[tokens.clamp(min=0)]

    def unembed(self, hidden: Tensor) -> Tensor:
        return hidden @ self.out.T + 0.25


FORMS: dict[str, dict[str, Any]] = {
    "published": {},
    "two blocks": {"num_layers": 2},
    "no block": {"num_layers": 0},
    "narrow": {"exit_dim": 11},
    "sums": {"rnn": False},
    "tensorrt-llm": {"rnn_activation": "none", "skip_u_at_first_step": True},
    "skips u": {"skip_u_at_first_step": True},
    "shared": {"share_lm_head": True},
}


def random_head(vocabulary: Any, **form: Any) -> ReDrafterHead:
    """A head of this form in which every weight matters."""
    head = ReDrafterHead.fresh(vocabulary, **form)
    dice = torch.Generator().manual_seed(4)
    for weight in head.parameters():
        if weight.requires_grad:
            weight.data.copy_(torch.randn(weight.shape, generator=dice, dtype=torch.float64) * 0.6)
    return head


def asking(
    drafter: Drafter, hidden: Tensor, roots: list[int], budget: int, *, ops: Ops = CPU, **params: Any
) -> Frontier:
    """The drafter has observed one token per row, with these hidden states [B, H] behind it, and is to go on at `roots`."""
    rows = len(roots)
    drafter.start(rows, 64, ops)
    for row in range(rows):
        one = torch.zeros(1, 1, dtype=torch.int64)
        drafter.observe(Commit([row], one, one, one[0] + 1, hidden[row].view(1, 1, 1, -1)))
    tokens = torch.zeros(rows, 65, dtype=torch.int64)
    tokens[:, 1] = torch.tensor(roots)
    prefix = Prefix(tokens, torch.ones(rows, dtype=torch.int64), ahead=budget)
    return Frontier(prefix, sampler_of(*[Sampling(**params) for _ in roots], ops=ops), budget)


# The published search, token by token ----------------------------------------------------------------------------------------

FEW = -50000.0


def law_behind(head: ReDrafterHead, vocabulary: Any, context: Tensor, drafted: list[int]) -> Tensor:
    """[V] log-probabilities behind `drafted` tokens, the state run through from the beginning."""
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
        mixed = weights[f"lm_head.{block}.linear.weight"] @ inner + weights[f"lm_head.{block}.linear.bias"]
        inner = inner + mixed * torch.sigmoid(mixed)
    logits = weights[f"lm_head.{form.num_layers}.weight"] @ inner + weights.get(f"lm_head.{form.num_layers}.bias", 0)
    logits = logits - logits.max()
    return logits.log_softmax(0)


def published_beams(
    head: ReDrafterHead, vocabulary: Any, context: Tensor, root: int, width: int, length: int
) -> list[list[int]]:
    """Apple's `beam_search_candidates`: all beams begin with the root, all but the first without any probability."""
    beams, scores = [[root]] * width, [0.0, *[FEW] * (width - 1)]
    for _ in range(length):
        laws = [law_behind(head, vocabulary, context, beam).tolist() for beam in beams]
        grown = [
            (score + step, [*beam, token])
            for beam, score, law in zip(beams, scores, laws, strict=True)
            for token, step in enumerate(law)
        ]
        best = sorted(grown, key=lambda one: -one[0])[:width]
        scores, beams = [score for score, _ in best], [beam for _, beam in best]
    return beams


def paths_in(tree: TokenTree, row: int) -> list[tuple[int, ...]]:
    """The text of every node that is there, behind the root, in node order."""
    found = [tuple(text[text >= 0].tolist()[1:]) for text in tree.texts[row]]
    return [path for path, there in zip(found, tree.present[row].tolist(), strict=True) if there]


@pytest.mark.parametrize("form", FORMS)
def test_beams_are_those_of_the_published_search(form: str) -> None:
    """The same beams in the same order, shared prefixes merged, in every row of a batch."""
    tables = Tables()
    head = random_head(tables, **FORMS[form])
    hidden = torch.randn(3, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for width, length in ((4, 4), (2, 5), (6, 2)):
        drafter = ReDrafter(head, tables, width=width, length=length, tree="beams")
        tree = drafter.propose(asking(drafter, hidden, [5, 80, 41], budget=width * length))
        for row, root in enumerate((5, 80, 41)):
            beams = published_beams(head, tables, hidden[row], root, width, length)
            prefixes = [tuple(beam[1:size]) for beam in beams for size in range(1, length + 2)]
            assert paths_in(tree, row) == list(dict.fromkeys(prefixes))


@pytest.mark.parametrize("ops", [CPU, TORCH], ids=["cpu", "torch"])
@pytest.mark.parametrize("form", FORMS)
def test_nodes_are_the_likeliest_that_the_search_weighed(form: str, ops: Ops) -> None:
    """The first levels of every beam, ordered by the probability of the whole path, as plain Python finds them."""
    tables = Tables()
    head = random_head(tables, **FORMS[form])
    context = torch.randn(8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    width, length, root = 3, 4, 17
    beams, weighed = [((), 0.0)], {(): 0.0}
    for _ in range(length):
        grown = []
        for path, score in beams:
            law = law_behind(head, tables, context, [root, *path])
            best = law.topk(width)
            grown += [((*path, int(token)), score + float(step)) for step, token in zip(*best, strict=True)]
        beams = sorted(grown, key=lambda one: -one[1])[:width]
        weighed |= dict(grown)
    for budget in (1, 2, 5, 9, 100):
        drafter = ReDrafter(head, tables, width=width, length=length)
        tree = drafter.propose(asking(drafter, context[None], [root], budget, ops=ops))
        deep = [path for path in weighed if len(path) <= budget]
        wanted = sorted(deep, key=lambda path: -weighed[path])[: budget + 1]
        if budget >= width:  # a narrower budget searches with fewer beams
            assert set(paths_in(tree, 0)) == set(wanted)
            told = torch.tensor([weighed[path] for path in paths_in(tree, 0)]).exp()
            torch.testing.assert_close(tree.confidence[0, : len(told)].double(), told.double(), rtol=1e-5, atol=1e-7)
        assert len(paths_in(tree, 0)) <= budget + 1


def test_a_target_of_chains_gets_the_best_first_chain() -> None:
    hidden = torch.randn(2, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for trees in (False, True):
        tables = Tables(trees=trees)
        head = random_head(tables)
        drafter = ReDrafter(head, tables, width=4, length=3, tree="beams")
        frontier = asking(drafter, hidden, [5, 80], budget=9)
        tree = drafter.propose(Frontier(frontier.prefix, frontier.sampler, 9, trees=False))
        assert tree.is_chain and tree.tokens.shape == (2, 4)
        for row, root in enumerate((5, 80)):
            assert tree.tokens[row].tolist() == published_beams(head, tables, hidden[row], root, 1, 3)[0]


@pytest.mark.parametrize("params", [
    {"temperature": 0.8, "seed": 5},
    {"repetition_penalty": 1.7},
    {"temperature": 2.0, "no_repeat_ngram": 1, "top_p": 0.95, "seed": 2},
])  # fmt: skip
def test_every_beam_races_by_its_own_path(params: dict[str, Any]) -> None:
    """Children are the winners of the target's race, noise and penalties included, at the very path they hang on."""
    tables = Tables()
    head = random_head(tables)
    hidden = torch.randn(1, 8, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    drafter = ReDrafter(head, tables, width=3, length=3)
    frontier = asking(drafter, hidden, [7], budget=18, **params)
    tree = drafter.propose(frontier)
    paths = paths_in(tree, 0)
    for path in paths:
        children = {other[-1] for other in paths if other[:-1] == path and other}
        logits = law_behind(head, tables, hidden[0], [7, *path])[None, None]
        chain = TokenTree.chain(torch.tensor([[7, *path]]))
        gumbel_logits = frontier.sampler.gumbel_logits(logits, Paths(frontier.prefix, chain, first=len(path)), Role.TARGET)
        assert children <= set(gumbel_logits[0, 0].topk(3).indices.tolist())
    inner = [path for path in paths if any(other[:-1] == path for other in paths if other)]
    assert len(paths) == 19 and len(inner) > 3


@pytest.mark.parametrize("ops", [CPU, TORCH], ids=["cpu", "torch"])
@pytest.mark.parametrize(("temperature", "trust"), [(0.0, 1.0), (0.5, 0.5), (1.0, 1.0), (2.0, 1.0)])
def test_what_a_head_errs_by_weighs_more_where_it_is_cold(temperature: float, trust: float, ops: Ops) -> None:
    """A temperature below 1 magnifies the differences between draft and target; the odds allow for it."""
    tables = Tables()
    head = random_head(tables)
    hidden = torch.randn(1, 8, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    drafter = ReDrafter(head, tables, width=3, length=1)
    frontier = asking(drafter, hidden, [7], budget=3, ops=ops, temperature=temperature, seed=3)
    tree = drafter.propose(frontier)
    logits = law_behind(head, tables, hidden[0], [7])[None, None]
    gumbel_logits = frontier.sampler.gumbel_logits(logits, Paths(frontier.prefix, TokenTree.root(torch.tensor([7]))), Role.TARGET)
    assert tree.confidence is not None
    wanted = (gumbel_logits * trust).softmax(-1)[0, 0, tree.tokens[0, 1:]]
    torch.testing.assert_close(tree.confidence[0, 1:].double(), wanted.double(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("ops", [CPU, TORCH], ids=["cpu", "torch"])
def test_what_may_not_come_is_absent(ops: Ops) -> None:
    """Fewer tokens allowed than beams: the rest is absent, and so is what would follow."""
    tables = Tables()
    hidden = torch.randn(2, 8, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    for tree in ("nodes", "beams"):
        drafter = ReDrafter(random_head(tables), tables, width=4, length=3, tree=tree)
        allowed = {token: float("-inf") for token in range(90) if token not in (3, 8)}
        drafted = drafter.propose(asking(drafter, hidden, [7, 9], budget=30, ops=ops, logit_bias=allowed))
        found = drafted.tokens[drafted.present]
        assert set(found.tolist()) == {3, 7, 8, 9} and found.numel() <= 2 * (1 + 2 + 4 + 8)
        nothing = {token: float("-inf") for token in range(90)}
        drafted = drafter.propose(asking(drafter, hidden, [7, 9], budget=30, ops=ops, logit_bias=nothing))
        assert (drafted.tokens[:, 1:] == ABSENT).all()


# The training form -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_training_unrolls_the_same_recurrence(form: str) -> None:
    """Row t of step i: the hidden state of token t, run over tokens t + 1 to t + 1 + i of the text."""
    tables = Tables(vocab=30)
    head = random_head(tables, steps=3, **FORMS[form])
    dice = torch.Generator().manual_seed(1)
    tokens = torch.randint(30, (2, 7), generator=dice)
    hidden = torch.randn(2, 7, 1, 8, generator=dice, dtype=torch.float64)
    found = list(head.predict(Features(tokens, hidden, torch.ones(2, 7)), tables))
    assert [one.shape for one in found] == [(2, 5 - step, 30) for step in range(3)]
    for step, logits in enumerate(found):
        for row in range(2):
            for t in range(5 - step):
                consumed = tokens[row, t + 1 : t + 2 + step].tolist()
                law = law_behind(head, tables, hidden[row, t, 0], consumed)
                torch.testing.assert_close(logits[row, t].log_softmax(-1), law)


def test_the_loss_is_apples() -> None:
    """Their own test vector: two steps over four tokens."""
    logits = torch.tensor([
        [[-4.2755, -4.0159, -5.4326], [-7.3534, -5.2731, -4.7144], [-6.3034, -5.6929, -4.1427], [-4.4837, -4.3300, -6.1975]],
        [[-5.6221, -2.1564, -5.9357], [-2.7976, -5.3193, -4.0888], [-4.9951, -4.7358, -6.5123], [-4.8608, -4.8744, -6.2276]],
    ])  # fmt: skip

    class Said(DraftHead):
        kind: ClassVar[str] = "said"
        decay = ReDrafterHead.decay
        steps = 2

        def predict(self, features: Features, vocabulary: Vocabulary) -> Iterator[Tensor]:
            return (logits[None, step, : 4 - 2 - step] for step in range(2))

        def drafter(self, vocabulary: Vocabulary) -> Drafter:
            raise NotImplementedError

    features = Features(torch.tensor([[0, 1, 2, 1]]), torch.zeros(1, 4, 1, 1), torch.ones(1, 4))
    assert float(head_loss(Said(), features, Tables())) == pytest.approx(1.586109 + 0.052678, abs=1e-5)


def test_a_fresh_head_begins_near_the_target() -> None:
    """Without the recurrence's share, its first logits are the target's own, its shared projection always."""
    tables = Tables()
    hidden = torch.randn(5, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for form in ({}, {"exit_dim": 11}, {"share_lm_head": True}):
        head = ReDrafterHead.fresh(tables, **form)
        offset = 0.0 if form.get("share_lm_head") else 0.25
        torch.testing.assert_close(head.logits(hidden, torch.zeros_like(hidden)) + offset, tables.unembed(hidden))
    narrow = ReDrafterHead.fresh(tables, share_lm_head=True)
    assert not narrow.projection.weight.requires_grad
    head = ReDrafterHead.fresh(tables)
    states = head.advance(tables.embed(torch.arange(90)), None)
    assert 0.1 < float(states.detach().square().mean().sqrt()) < 3
    again = ReDrafterHead.fresh(tables)
    assert all(torch.equal(mine, other) for mine, other in zip(head.parameters(), again.parameters(), strict=True))


# Exactness -------------------------------------------------------------------------------------------------------------------


def _halve_even(tokens: Tensor, scores: Tensor) -> Tensor:
    return torch.where((torch.arange(scores.shape[-1]) + tokens[:, -1:]) % 3 == 0, scores - 1.0, scores)


WISHES = [
    Sampling(),
    Sampling(temperature=1.0, seed=5),
    Sampling(temperature=0.6, top_k=6, seed=1),
    Sampling(temperature=1.3, top_p=0.8, seed=2),
    Sampling(temperature=1.0, min_p=0.1, seed=3),
    Sampling(repetition_penalty=1.3),
    Sampling(temperature=0.8, presence_penalty=0.7, frequency_penalty=0.3, seed=4),
    Sampling(no_repeat_ngram=2),
    Sampling(temperature=1.0, logit_bias={3: 4.0, 5: float("-inf")}, seed=6),
    Sampling(banned_words=[[7], [1, 2]]),
    Sampling(temperature=1.0, min_new_tokens=6, stop_tokens=[1, 2, 3], seed=7),
    Sampling(processors=[_halve_even]),
]


@pytest.mark.parametrize("tree", ["nodes", "beams"])
def test_same_text_whatever_is_asked(tree: str) -> None:
    """Every sampling parameter, in one ragged batch and a few rows at a time, with a head that is believed."""
    asked = prompts(len(WISHES), seed=0)
    wanted = texts(Engine(target()), asked, max_new_tokens=24, sampling=WISHES, batch_size=12)
    engine = Engine(target(), Watch(ReDrafter(redrafter_head(), target(), tree=tree)), budget=10)
    assert texts(engine, asked, max_new_tokens=24, sampling=WISHES, batch_size=12) == wanted
    assert texts(engine, asked, max_new_tokens=24, sampling=WISHES, batch_size=3) == wanted
    believed = engine.generate(prompts(8), max_new_tokens=24)
    assert accepted_share(believed) > 0.2


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_other_rules_fall_back_to_matching(acceptance: str) -> None:
    asked = prompts(4, seed=0)
    wanted = texts(Engine(target()), asked, max_new_tokens=16)
    engine = Engine(target(), Watch(ReDrafter(redrafter_head(), target())), acceptance=acceptance, budget=8)
    assert texts(engine, asked, max_new_tokens=16) == wanted


# Against the published loop ---------------------------------------------------------------------------------------------------

WIDTH, LENGTH, NEW = 3, 4, 24


class _Story:
    """A text of the target and its hidden states."""

    def __init__(self, prompt: list[int]) -> None:
        done = Engine(target()).generate([prompt], max_new_tokens=NEW + LENGTH + 1)[0]
        self.tokens, self.start = [*prompt, *done.tokens], len(prompt)
        with torch.no_grad():
            features = target().features(torch.tensor([self.tokens]), torch.ones(1, len(self.tokens)))
        self.hidden = features.hidden[0, :, 0]


@lru_cache(maxsize=1)
def stories() -> list[_Story]:
    return [_Story(prompt) for prompt in prompts(8)[:6]]


class _Known(Tables):
    def __init__(self) -> None:
        super().__init__()
        self.table = target().embed(torch.arange(VOCAB)).detach()


def right(tree: TokenTree, truth: list[int]) -> int:
    """How many drafted tokens of the best path are the text's."""
    return max(len(path) for path in paths_in(tree, 0) if list(path) == truth[: len(path)])


def test_as_many_rounds_as_the_published_loop() -> None:
    """Draft, keep the longest beam that is right, go on behind it: the engine with "beams" takes the very same rounds."""
    head, known = redrafter_head(), _Known()
    rounds = []
    for story in stories():
        place, count = story.start, 0
        while place - story.start < NEW - 1:
            beams = published_beams(head, known, story.hidden[place - 1], story.tokens[place], WIDTH, LENGTH)
            ahead = story.tokens[place + 1 : place + 1 + LENGTH]
            hits = [[mine == own for mine, own in zip(beam[1:], ahead, strict=False)] for beam in beams]
            place += 1 + max([*hit, False].index(False) for hit in hits)
            count += 1
        rounds.append(count)
    drafter = ReDrafter(head, target(), width=WIDTH, length=LENGTH, tree="beams")
    done = Engine(target(), drafter, budget=WIDTH * LENGTH).generate(prompts(8)[:6], max_new_tokens=NEW)
    assert [one.stats.rounds for one in done] == rounds
    assert sum(rounds) < 6 * (NEW - 1) / 2, "hardly anything was accepted: it tests nothing"


def test_the_likeliest_nodes_are_worth_as_much_as_the_beams() -> None:
    """Of as many nodes as the published tree has, those of highest probability are right at least as far, on average."""
    beams, nodes = [], []
    for story in stories():
        for place in range(story.start, story.start + NEW, 2):
            ahead = story.tokens[place + 1 : place + 1 + LENGTH]
            found = []
            for tree in ("beams", "nodes"):
                drafter = ReDrafter(redrafter_head(), target(), width=WIDTH, length=LENGTH, tree=tree)
                budget = WIDTH * LENGTH if tree == "beams" else len(paths_in(found[0], 0)) - 1
                frontier = asking(drafter, story.hidden[place - 1 : place], [story.tokens[place]], budget)
                found.append(drafter.propose(frontier))
            assert len(paths_in(found[1], 0)) == len(paths_in(found[0], 0))
            beams.append(right(found[0], ahead))
            nodes.append(right(found[1], ahead))
    assert sum(nodes) >= sum(beams) > len(beams)


# The rest ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tree", ["nodes", "beams"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_is_read_back_to_the_host(tree: str, temperature: float) -> None:
    """Everything runs on tensors that have no values."""
    tables = Tables(device="meta", dtype=torch.float32)
    head = ReDrafterHead(ReDrafterConfig(8, 90, 16, steps=3))
    drafter = ReDrafter(head, tables, width=4, tree=tree)
    drafter.start(2, 64, TORCH)
    with torch.inference_mode():
        for row in range(2):
            prompt = torch.zeros(1, 5, dtype=torch.int64, device="meta")
            drafter.observe(Commit([row], prompt, prompt, prompt[:, 0], torch.zeros(1, 5, 1, 8, device="meta")))
        prefix = Prefix(torch.zeros(2, 65, dtype=torch.int64, device="meta"), torch.ones(2, dtype=torch.int64, device="meta"))
        sampler = type(sampler_of(Sampling()))(
            [*sampler_of(*[Sampling(temperature=temperature, repetition_penalty=1.2)] * 2).rows], "meta"
        )
        drafted = drafter.propose(Frontier(prefix, sampler, 7))
        nodes = torch.zeros(2, 3, dtype=torch.int64, device="meta")
        drafter.observe(Commit(range(2), nodes, nodes, nodes[:, 0], torch.zeros(2, 3, 1, 8, device="meta")))
        assert drafted.tokens.shape == (2, 8)


def test_the_head_that_was_given_stays_as_it_is() -> None:
    """Decoding copies, in half precision too: packing and freeing its own weights must not reach the user's."""
    tables = Tables(vocab=256, hidden=64, dtype=torch.bfloat16)
    head = ReDrafterHead.fresh(tables).bfloat16()
    given = {name: weight.clone() for name, weight in head.state_dict().items()}
    drafter = ReDrafter(head, tables)
    hidden = torch.randn(1, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.inference_mode():
        assert bool(drafter.propose(asking(drafter, hidden, [3], budget=9)).present.all())
    assert all(torch.equal(given[name], weight) for name, weight in head.state_dict().items())


def test_a_few_rows_more_or_less_are_padding() -> None:
    """A head over a padded vocabulary drafts no token the target lacks, one over fewer none it does not know."""
    hidden = torch.randn(1, 8, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    for rows in (80, 100):
        tables = Tables()
        form = ReDrafterConfig(8, rows, 16)
        head = ReDrafterHead(form).double()
        drafter = ReDrafter(head, tables, width=90 if rows > 90 else 80, length=1)
        tokens = drafter.propose(asking(drafter, hidden, [3], budget=90)).tokens[0, 1:]
        assert set(tokens.tolist()) - {ABSENT} == set(range(min(rows, 90)))


def test_what_does_not_fit_is_refused() -> None:
    tables = Tables()
    with pytest.raises(DrafterMismatch, match="16 numbers, tables has 8"):
        ReDrafter(ReDrafterHead(ReDrafterConfig(16, 90, 32)), tables)
    with pytest.raises(DrafterMismatch, match="5000 tokens, tables has 90"):
        ReDrafter(ReDrafterHead(ReDrafterConfig(8, 5000, 16)), tables)
    head = ReDrafterHead.fresh(tables)
    for wrong in ({"width": 0}, {"length": 0}, {"width": 91}, {"tree": "bush"}):
        with pytest.raises(BadInput):
            ReDrafter(head, tables, **wrong)
    for wrong in ({"exit_dim": 7}, {"exit_dim": 17}, {"share_lm_head": True, "exit_dim": 9}, {"steps": 0}):
        with pytest.raises(BadInput):
            ReDrafterHead.fresh(tables, **wrong)
    with pytest.raises(BadInput, match="rnn_activation"):
        ReDrafterConfig(8, 90, 16, rnn_activation="tanh")
    with pytest.raises(BadInput, match="bias"):
        ReDrafterHead.fresh(tables, share_lm_head=True).unshared()


# In one call ---------------------------------------------------------------------------------------------------------------

@needs_kernels
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "form",
    [{}, {"share_lm_head": True, "num_layers": 2}, {"exit_dim": 96, "rnn_activation": "none"}, {"rnn": False},
     {"num_layers": 0, "skip_u_at_first_step": True}],
    ids=["published", "shared", "narrow", "sums", "skips u"],
)  # fmt: skip
def test_a_search_in_one_call_is_that_of_many(form: dict[str, Any], tied: bool) -> None:
    """The same nodes and odds, but where two are within a rounding: sampled and greedy, ragged rows, ending early."""
    tables = packed_target(tied)
    head = ReDrafterHead.fresh(tables, **form)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(parameter))) / 8
    drafter = ReDrafter(head, tables, width=3, length=4)
    hidden = torch.randn(40, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    same = nodes = 0
    with torch.inference_mode():
        for trial, heat in enumerate((0.0, 0.7, 1.3, 0.0)):
            frontier = asking(drafter, hidden, list(range(40)), 99, ops=CPU, temperature=heat, seed=trial)
            frontier = replace(frontier, floor=0.3 if trial == 3 else 0.0)
            once, native = drafter.propose(frontier), drafter.prepared
            drafter.prepared = None
            often, drafter.prepared = drafter.propose(frontier), native
            assert native is not None and once.tokens.shape == often.tokens.shape
            assert once.tokens.shape[1] == 1 + 3 + 9 + 9 + 9 or trial == 3
            for row in range(40):
                confidence = dict(walked(once, row))
                for path, chance in walked(often, row):
                    nodes += 1
                    same += path in confidence and abs(confidence[path] - chance) <= 0.05 * chance + 1e-6
    assert same > 0.97 * nodes


def walked(tree: TokenTree, row: int) -> list[tuple[tuple[int, ...], float]]:
    """The tokens to each node of a row, and its odds."""
    assert tree.confidence is not None
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens[row].tolist(), tree.parents[row].tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return list(zip(paths, tree.confidence[row].tolist(), strict=True))
