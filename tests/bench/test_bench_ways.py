"""Ways that really write: watched from outside, they write what they write unwatched."""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Sequence

import pytest
import tiny
import torch
from drafting import needs_kernels

from draftproof.bench import ours
from draftproof.bench.against_transformers import Generate
from draftproof.bench.measure import Bench, Setting, Shape, Task
from draftproof.bench.ours import Heard, Ours, Watched, bare_seconds, drafter_bytes
from draftproof.core.messages import Frontier
from draftproof.core.params import Sampling
from draftproof.core.prefix import Prefix
from draftproof.core.tree import ABSENT, TokenTree
from draftproof.drafters.base import Drafter
from draftproof.drafters.draft_model import DraftModel
from draftproof.engine.budget import Adaptive
from draftproof.engine.engine import Completion, Engine
from draftproof.engine.load import load
from draftproof.model.loading import embedded, load_model, load_tokenizer
from draftproof.model.target import Target
from draftproof.model.tokenizer import Codec
from draftproof.native.kernels import Chains, DraftSampling

PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 3, 5, 3]]
GREEDY = Sampling()
NEW = 14


class Within(Drafter):
    """A drafter that has another inside it, as a portfolio has."""

    name = "within"

    def __init__(self, inner: Drafter) -> None:
        self.choices = [inner]

    def propose(self, frontier: Frontier) -> TokenTree:
        return self.choices[0].propose(frontier)


def engine(drafter: Drafter | None = None, budget: int | None = None) -> Engine:
    tokenizer = load_tokenizer(embedded("demo"))
    assert tokenizer is not None
    return Engine(Target(tiny.model("llama")), drafter, codec=Codec(tokenizer), budget=budget)


def draft_model(layers: int = 1) -> DraftModel:
    return DraftModel(Target(tiny.model("llama", 1, num_hidden_layers=layers)), tiny.VOCAB)


def written(engine: Engine, wanted: Sampling) -> list[Completion]:
    return engine.generate(PROMPTS, sampling=wanted, max_new_tokens=NEW)


@pytest.mark.parametrize("wanted", [GREEDY, Sampling(temperature=0.8, seed=3)], ids=["greedy", "sampled"])
def test_a_watched_engine_writes_what_it_wrote_before(wanted: Sampling) -> None:
    mine, before = engine(draft_model(), 3), written(engine(draft_model(), 3), wanted)
    texts = Ours("draft", mine).write(Task(PROMPTS, wanted, NEW, 3), time.perf_counter)
    assert [text.tokens for text in texts] == [completion.tokens for completion in before]
    for text, completion in zip(texts, before, strict=True):
        assert text.stats is not None and text.stats.emitted == completion.stats.emitted
        assert sum(chunk.tokens for chunk in text.chunks) == len(text.tokens)
        assert text.chunks[0].tokens == 1 and len(text.rounds) == completion.stats.rounds
        assert sum(text.rounds) == completion.stats.emitted


def test_tokens_of_one_round_come_together_and_rounds_one_after_the_other() -> None:
    way = Ours("draft", engine(DraftModel(Target(tiny.model("llama")), tiny.VOCAB), 4))     # its own draft: all stand
    (text,) = way.write(Task(PROMPTS[:1], GREEDY, NEW), time.perf_counter)
    assert [chunk.tokens for chunk in text.chunks] == [1, 5, 5, 3]
    times = [chunk.at for chunk in text.chunks]
    assert times == sorted(times) and len(set(times)) == len(times)


def test_reads_are_counted_by_shape_and_prompts_are_not() -> None:
    way = Ours("draft", engine(draft_model(), 3))
    texts = way.write(Task(PROMPTS[:1], GREEDY, NEW), time.perf_counter)
    reads, rounds = way.reads(), len(texts[0].rounds)
    drafts = next(name for name in reads if name != "target")
    assert reads["target"] == {Shape(1, 4, 128): rounds}
    assert reads[drafts] == {Shape(1, 2, 128): rounds, Shape(1, 1, 128): 2 * rounds}
    way.write(Task(PROMPTS[:1], GREEDY, NEW), time.perf_counter)
    assert way.reads() == reads                                        # of the last call only


@pytest.mark.parametrize("ours", [True, False])
def test_what_waits_for_a_row_is_written_too(ours: bool) -> None:
    """And the same as ever; ours reads shapes of so many rows, the seconds by part are those of the whole call."""
    way = Ours("draft", engine(draft_model(), 3)) if ours else Generate("transformers", tiny.model("llama"))
    texts = way.write(Task(PROMPTS, GREEDY, NEW, 2), time.perf_counter)
    alone = [way.write(Task([prompt], GREEDY, NEW), time.perf_counter)[0].tokens for prompt in PROMPTS]
    assert [text.tokens for text in texts] == alone and texts[2].chunks[0].at > texts[1].chunks[0].at
    if ours:
        start = time.perf_counter()
        way.write(Task(PROMPTS, GREEDY, NEW, 2), time.perf_counter)
        took = time.perf_counter() - start
        assert max(shape.rows for shape in way.reads()["target"]) == 2
        spent = way.spent()
        assert spent is not None and spent.keys() == {"prefill", "draft", "verify", "decide"} and all(spent.values())
        assert took / 2 < sum(spent.values()) < took
    else:
        assert way.spent() is None


@needs_kernels
def test_ragged_reads_count_as_their_mean() -> None:
    """What is not there costs nothing where the target skips it; chains that ended are not read on."""
    watched = Watched(Target(tiny.model("llama", head_dim=16).to(torch.bfloat16)))
    tree = TokenTree.chain(torch.tensor([[1, 2, 3, 4, 5, 6], [1, ABSENT, ABSENT, ABSENT, ABSENT, ABSENT]]))
    watched.read(tree, watched.new_cache(2, 64))
    assert watched.inner.skips_absent and watched.shapes == {Shape(2, 3, 64): 1}        # five drafted by two rows: 1 + 2
    inner = Target(tiny.model("llama"))
    Watched.read(dense := Watched(inner), tree, inner.new_cache(2, 64))
    assert not inner.skips_absent and dense.shapes == {Shape(2, 6, 64): 1}


def test_chains_that_ended_are_not_read_on(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = Target(tiny.model("llama"))
    chains = Chains(torch.ones(3, 5), torch.ones(3, 5), torch.tensor([4, 1, 2]))
    monkeypatch.setattr(inner, "chain", lambda *asked: chains)
    watched, cache = Watched(inner), inner.new_cache(3, 64)
    prefix = Prefix(torch.ones(3, 9, dtype=torch.int64), torch.tensor([3, 2, 2]))
    assert watched.chain(prefix, 4, cache, 4, 6, DraftSampling(None, None, torch.ones(3), torch.ones(3), 0.0)) is chains
    assert watched.shapes == {Shape(3, 4, 64): 1, Shape(2, 1, 64): 1, Shape(1, 1, 64): 2}


def test_a_draft_model_inside_another_drafter_is_seen() -> None:
    inner = draft_model()
    way = Ours("within", engine(Within(inner), 2))
    assert isinstance(inner.model, Watched) and len(way.watched) == 2


def test_a_target_that_drafts_for_itself_is_seen_drafting() -> None:
    mine = engine(None, 3)
    mine.drafter = DraftModel(mine.target, tiny.VOCAB)
    way = Ours("itself", mine)
    (text,) = way.write(Task(PROMPTS[:1], GREEDY, NEW), time.perf_counter)
    reads = way.reads()
    assert reads.pop("target") == {Shape(1, 4, 128): len(text.rounds)}
    assert [sum(shapes.values()) for shapes in reads.values()] == [3 * len(text.rounds)]
    assert way.held == 0


def test_weights_are_counted_once() -> None:
    target, draft = tiny.model("llama"), tiny.model("llama", 1, num_hidden_layers=1)
    size = {id(model): sum(p.nbytes for p in model.parameters()) for model in (target, draft)}
    assert drafter_bytes(engine()) == 0
    buffers = sum(buffer.nbytes for buffer in draft.buffers())
    assert drafter_bytes(engine(draft_model())) == size[id(draft)] + buffers
    assert drafter_bytes(engine(DraftModel(Target(target), tiny.VOCAB))) == 0     # the target drafts for itself
    assert Ours("draft", engine(draft_model())).weights >= size[id(target)] + size[id(draft)]


@needs_kernels
def test_a_chain_in_one_call_counts_as_its_reads() -> None:
    """Per round one read that begins it, and one of each drafted token but the last."""
    way = Ours("draft model", load("demo", assistant_model="demo-draft", budget=4))
    way.write(Task([[1, 2, 3]], Sampling(), 20), time.perf_counter)
    target, draft = way.reads().values()
    rounds, widths = sum(target.values()), Counter[int]()
    for shape, count in draft.items():
        widths[shape.width] += count
    assert 0 < sum(widths[width] for width in widths if width > 1) < rounds         # where something was missing
    assert rounds < sum(widths.values()) <= 4 * rounds


def test_the_bare_forwards_are_timed_at_the_shapes_that_were_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from draftproof.engine.cost_curve import CostCurve

    asked: list[tuple[tuple[int, ...], int, int]] = []

    def costs(target: object, widths: Sequence[int], *, rows: int, context: int, repeats: int) -> CostCurve:
        asked.append((tuple(sorted(widths)), rows, repeats))
        return CostCurve(tuple(sorted(widths)), tuple(float(width * rows) for width in sorted(widths)))

    monkeypatch.setattr(ours, "measure_costs", costs)
    shapes = {Shape(1, 4, 128): 60, Shape(1, 8, 128): 20, Shape(2, 4, 128): 19, Shape(1, 64, 128): 1}
    seconds = bare_seconds(Target(tiny.model("llama")), shapes)
    assert sorted(asked) == [((4,), 2, 4), ((4, 8), 1, 10)]            # the rarest is left out, of others a quarter is read
    assert seconds == pytest.approx((60 * 4 + 20 * 8 + 19 * 8) * 100 / 99)
    way = Ours("draft", engine(draft_model(), 3))
    reads = {"target": {Shape(1, 4, 128): 10}, list(way.watched)[1]: {Shape(1, 2, 128): 10, Shape(1, 1, 128): 20}}
    assert way.bare(reads, Task(PROMPTS[:1], GREEDY, NEW)) == pytest.approx((4.0, 2.0 + 2 * 1.0))
    assert way.bare({}, Task(PROMPTS[:1], GREEDY, NEW)) is None
    assert Ours("plain", engine()).bare({"target": {Shape(1, 1, 128): 5}}, Task(PROMPTS[:1], GREEDY, NEW)) == (1.0, 0.0)


def test_a_drafter_heard_once_can_be_asked_again_alone() -> None:
    """The same messages give the same trees; the target is not asked."""
    heard, trees = Heard(draft_model()), list[torch.Tensor]()
    mine = engine(None, 3)
    mine.drafter = heard  # type: ignore[assignment]
    before = written(engine(draft_model(), 3), GREEDY)
    assert [completion.tokens for completion in written(mine, GREEDY)] == [completion.tokens for completion in before]
    inner = heard.inner
    propose = inner.propose

    def noted(frontier: Frontier) -> TokenTree:
        tree = propose(frontier)
        trees.append(tree.tokens)
        return tree

    inner.propose = noted  # type: ignore[method-assign]
    mine.target = None  # type: ignore[assignment]
    assert heard.again() > 0 and heard.again() > 0
    half = len(trees) // 2
    assert half == sum(verb == "propose" for verb, _ in heard.messages) > 0
    assert all(torch.equal(first, second) for first, second in zip(trees[:half], trees[half:], strict=True))


def test_a_budget_learns_nothing_while_its_drafter_is_timed_alone() -> None:
    mine = engine(draft_model())
    budget = mine.budget = Adaptive(3)
    way, drafter, known = Ours("draft", mine), mine.drafter, copy.deepcopy([costs.mean for costs in budget.costs.values()])
    assert way._drafter_alone(Task(PROMPTS, GREEDY, NEW, 3)) >= 0
    assert (mine.drafter, mine.budget) == (drafter, budget) and copy.deepcopy([costs.mean for costs in budget.costs.values()]) == known
    way.write(Task(PROMPTS, GREEDY, NEW, 3), time.perf_counter)
    assert copy.deepcopy([costs.mean for costs in budget.costs.values()]) != known


@pytest.mark.parametrize("batch", [1, 3])
def test_generate_writes_what_plain_decoding_writes(batch: int) -> None:
    mine, theirs = Ours("plain", engine()), Generate("transformers", tiny.model("llama"))
    own = mine.write(Task(PROMPTS, GREEDY, NEW, batch), time.perf_counter)
    stock = theirs.write(Task(PROMPTS, GREEDY, NEW, batch), time.perf_counter)
    assert [text.tokens for text in stock] == [text.tokens for text in own]
    assert all([chunk.tokens for chunk in text.chunks] == [1] * NEW for text in stock)
    assert theirs.reads() == {} and theirs.bare({}, Task(PROMPTS, GREEDY, NEW)) is None


def test_assisted_generation_hands_out_chunks_and_the_first_is_a_round() -> None:
    theirs = Generate("transformers assisted", tiny.model("llama"), tiny.fresh("llama", 1, num_hidden_layers=1))
    plain = Generate("transformers", tiny.model("llama"))
    (text,), (alone,) = (way.write(Task(PROMPTS[:1], GREEDY, NEW), time.perf_counter) for way in (theirs, plain))
    assert text.tokens == alone.tokens and theirs.most == 1
    assert sum(text.rounds) == len(text.tokens) and sum(alone.rounds) == len(alone.tokens) - 1


def test_texts_end_at_their_end_token() -> None:
    model = tiny.fresh("llama")
    plain = Generate("transformers", model)
    (whole,) = plain.write(Task(PROMPTS[:1], GREEDY, NEW), time.perf_counter)
    end = whole.tokens[5]
    first = whole.tokens.index(end)
    model.generation_config.eos_token_id = end
    texts = Generate("transformers", model).write(Task([PROMPTS[0], PROMPTS[1]], GREEDY, NEW, 3), time.perf_counter)
    assert texts[0].tokens == whole.tokens[: first + 1]
    assert all(sum(chunk.tokens for chunk in text.chunks) == len(text.tokens) for text in texts)


@pytest.mark.usefixtures("memory_is_not_looked_at")
def test_everything_together_on_the_embedded_pair() -> None:
    first = load("demo", drafter="none", dtype="float32")
    codec, model = first.codec, first.target.model
    assert codec is not None
    drafted = load(model, tokenizer=codec.tokenizer, assistant_model="demo-draft", dtype="float32", budget=3)
    ways = [Ours("plain", first), Ours("draft", drafted), Generate("transformers", load_model("demo", "float32"))]
    run = Bench(ways, [codec.encode("Once upon a time"), codec.encode("Tom")], [Setting(1, 0.0)], Sampling(), 10, 1)
    run.run()
    texts = {way.name: [trial.texts[0].tokens for trial in run.trials if trial.way == way.name] for way in ways}
    for name in texts:
        assert sorted(texts[name]) == sorted(texts["plain"])
    for way in ways:
        bare = next(trial.bare for trial in run.trials if trial.way == way.name)        # the first is always measured
        assert bare is None if way.name == "transformers" else bare is not None and bare.verify > 0
