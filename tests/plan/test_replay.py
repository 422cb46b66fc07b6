"""Replays: the rounds counted without a target are those an engine takes; seconds are a machine's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from tiny import model, prompts, target

from draftproof.core.messages import Commit, Successors
from draftproof.core.params import Sampling
from draftproof.core.tree import ABSENT, TokenTree
from draftproof.drafters.base import Drafter, Plain
from draftproof.drafters.draft_model import DraftModel
from draftproof.drafters.medusa import MedusaHead
from draftproof.drafters.portfolio import Portfolio
from draftproof.drafters.prompt_lookup import PromptLookup
from draftproof.drafters.redrafter import ReDrafterHead
from draftproof.drafters.suffix import SuffixDrafter
from draftproof.drafters.token_recycling import TokenRecycling
from draftproof.engine.budget import Adaptive, Fixed
from draftproof.engine.engine import Engine
from draftproof.model.target import Target
from draftproof.plan.machine import LIGHT, Machine, RoundTiming
from draftproof.plan.planner import begin_with, learned
from draftproof.plan.playback import PlayedDraft, PlayedDrafter
from draftproof.plan.recording import Text, drafts_of, recorded
from draftproof.plan.replay import replay
from draftproof.requests.stats import Round, State

NEW = 24
ONE = Machine("one", "", tuple(RoundTiming("", False, rows, 0, 1.0) for rows in (1, 2)))
"""Where each round takes a second and nothing else takes any."""


def medusa() -> Drafter:
    torch.manual_seed(0)
    made = MedusaHead.fresh(target(), num_heads=3)
    for parameter in made.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return made.drafter(target())


def alike() -> DraftModel:
    """Nearly the target, so that some drafts are accepted."""
    draft = model("llama", seed=0, initializer_range=0.4001)
    return DraftModel(Target(draft), target().vocab_size)


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "merged": lambda: Portfolio([PromptLookup(), SuffixDrafter()]), "medusa": medusa,
    "redrafter": lambda: ReDrafterHead.fresh(target()).drafter(target()), "draft model": alike,
}  # fmt: skip


def texts_of(temperature: float, ends: tuple[int, ...], layers: tuple[int, ...] = ()) -> list[Text]:
    """What the target writes after some prompts."""
    engine = Engine(target(), Plain(), stop_tokens=ends)
    asked = prompts(5, seed=4)
    samplings = [Sampling(temperature=temperature, seed=seed) for seed in range(len(asked))]
    done = engine.generate(asked, sampling=samplings, max_new_tokens=NEW)
    rows = zip(asked, done, samplings, strict=True)
    return [recorded(engine, Text(prompt + item.tokens, len(prompt), sampling), layers)
            for prompt, item, sampling in rows]  # fmt: skip


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize(("temperature", "rows"), [(0.0, 3), (1.0, 1), (1.0, 3)])
def test_replays_take_as_many_rounds_as_the_engine(
    name: str, temperature: float, rows: int
) -> None:
    ends, drafter = (3, 7), DRAFTERS[name]()
    texts = texts_of(temperature, ends, drafter.hidden_layers)
    plain = Engine(target(), Plain(), stop_tokens=ends)
    asked = [text.tokens[: text.prompt] for text in texts]
    for size in (1, 4):
        engine = Engine(target(), DRAFTERS[name](), budget=size, stop_tokens=ends)
        real = engine.generate(asked, sampling=[text.sampling for text in texts],
                               max_new_tokens=NEW, batch_size=rows)
        played: Drafter
        if isinstance(drafter, DraftModel):
            results = [drafts_of(plain, text, drafter.model) for text in texts]
            played = PlayedDraft(texts, results, drafter)
        else:
            played = PlayedDrafter(texts, DRAFTERS[name]())
        seconds, done = replay(plain, played, texts, Fixed(size), ONE, rows, name)
        for item, other in zip(done, real, strict=True):
            assert item.tokens == other.tokens and item.stats.by_width == other.stats.by_width
            assert item.stats.accepted == other.stats.accepted
        rounds = [completion.stats.rounds for completion in done]
        assert max(rounds) <= seconds <= sum(rounds) + 5        # drafts are made, and take a little
        assert rows > 1 or seconds > sum(rounds) - 1e-6


def test_replayed_successors_are_known_only_after_accepted_nodes() -> None:
    """Of a tree 5 - (6 - 9), 7 the text has 5, 6; another text, which comes later, has 7."""
    known = [(torch.tensor([[10 * number + place] for place in range(4)]),) * 2
             for number in (1, 2)]  # fmt: skip
    texts = [Text([4, 5, 6, 7], 1, Sampling(), None, known[0]),
             Text([1, 7, 9, 2], 1, Sampling(), None, known[1])]
    played = PlayedDrafter(texts, TokenRecycling())
    tree = TokenTree(torch.tensor([[5, 6, 7, 9]]), torch.tensor([[-1, 0, 0, 1]]), 2)
    nothing = Successors(tree, torch.zeros(1, 4, 1), torch.zeros(1, 4, 1))
    commit = Commit([0], torch.tensor([[5, 6]]), torch.tensor([[0, 1]]), torch.tensor([2]), None,
                    nothing)  # fmt: skip
    seen = played._successors(commit, [(0, 1)])
    assert seen.tree.tokens.tolist() == [[5, 6, ABSENT, ABSENT]]
    assert seen.tokens[0, [0, 1], 0].tolist() == [11, 12]


def test_replayed_seconds_include_reading_drafting_and_overhead() -> None:
    """Where a read token takes a second, texts take their tokens, whenever prompts are read; what a
    drafter without weights costs in addition is counted in every round that may draft."""
    texts, engine, played = texts_of(0.0, ()), Engine(target()), Portfolio([TokenRecycling()])
    read = tuple(RoundTiming("", False, rows, nodes, float(rows * (1 + nodes)))
                 for rows in (1, 2) for nodes in (0, 1))  # fmt: skip
    slow, tokens = Machine("", "", read, ((0, 0), (1, 1))), sum(len(text.tokens) for text in texts)
    for rows in (1, 3):
        plain = PlayedDrafter(texts, Plain())
        seconds, _ = replay(engine, plain, texts, Fixed(0), slow, rows, "none")
        assert seconds == pytest.approx(tokens - len(texts), abs=1)     # the last is never read
    timed = tuple(RoundTiming(name, False, 1, 0, seconds)
                  for name, seconds in (("", 0), (LIGHT, 9), ("a", 7)))
    for name, each in (("portfolio", 9), ("a", 7)):
        replayed = PlayedDrafter(texts, played)
        seconds, done = replay(engine, replayed, texts, Fixed(2), Machine("", "", timed), 1, name)
        assert seconds == pytest.approx(each * sum(item.stats.rounds for item in done), abs=2)


def test_replays_ask_in_a_cooldown_as_the_engine_does() -> None:
    """A drafter with a KV cache is not asked there."""
    texts, asked = texts_of(0.0, ()), list[int]()

    class Cooling(Adaptive):
        def choose(self, state: State) -> int:
            self.cooldown = 9
            return 0

        def peek(self, state: State) -> int:
            asked.append(state.rows)
            return 3

        def worth_reading(self, confidence: Sequence[float]) -> int:
            return 0

    slow = replace(ONE, timed=(RoundTiming("", False, 1, 0, 100.0),))
    replay(Engine(target()), PlayedDrafter(texts, PromptLookup()), texts, Cooling(4), slow, 1,
           "prompt-lookup")  # fmt: skip
    assert len(asked) > 8
    draft = DraftModel(target(), target().vocab_size)
    assert PlayedDrafter(texts, draft).has_kv_cache and draft.has_kv_cache


def test_a_budget_receives_the_seconds_of_the_machine_not_of_the_clock() -> None:
    texts, heard = texts_of(0.0, ()), list[float]()

    class Receives(Adaptive):
        def record(self, done: Round) -> None:
            heard.append(done.seconds)
            super().record(done)

    slow = replace(ONE, timed=(RoundTiming("", False, 1, 0, 100.0),
                               RoundTiming("", False, 1, 4, 500.0)))
    budget = Receives(4)
    seconds, _ = replay(Engine(target()), PlayedDrafter(texts, PromptLookup()), texts, budget, slow,
                        1, "prompt-lookup")  # fmt: skip
    assert 100 <= min(heard) < 101 and max(heard) < 502
    assert seconds == pytest.approx(sum(heard), rel=1e-3)
    assert learned(begin_with(learned(budget))) == learned(budget)
