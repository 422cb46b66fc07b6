"""Drafts from a grammar: what a rule forces is drafted first, merged with any drafter's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import drafting
import pytest
import torch
from drafting import DRAFTERS, per_round, texts
from tiny import VOCAB, prompts, target
from torch import Tensor

from draftproof.core.acceptance import RULES
from draftproof.core.params import LogitsRule, RuleContext, Sampling
from draftproof.core.tree import ABSENT, TokenTree
from draftproof.drafters.base import Plain
from draftproof.engine.engine import Engine
from draftproof.engine.forced_tokens import with_forced


class Form:
    """A grammar: after each free token, a run that is the same for all texts."""

    def __init__(self, start: int, runs: Sequence[Sequence[int]], honest: bool) -> None:
        self.start, self.honest = start, honest
        self.form = [token for run in runs for token in (-1, *run)]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        place = input_ids.shape[1] - self.start
        token = self.form[place] if place < len(self.form) else -1
        if token < 0:
            return scores
        return scores.masked_fill(torch.arange(scores.shape[1]) != token, -torch.inf)

    def forced(self, text: Sequence[int]) -> list[int]:
        tokens = list[int]()
        for token in self.form[len(text) - self.start :]:
            if token < 0:
                break
            tokens.append(token if self.honest else (token + 1) % VOCAB)
        return tokens


def rule(runs: Sequence[Sequence[int]], forces: bool = True, honest: bool = True) -> LogitsRule:
    def make(request: RuleContext) -> Any:
        return Form(len(request.prompt), runs, honest)

    return LogitsRule("form", make, forces=forces)


RUNS = [[3, 4, 5], [], [9, 8], [1], [7, 7, 7, 7, 7, 7, 7, 7]]


@pytest.mark.parametrize("drafter", ["prompt-lookup", "draft chain", "portfolio", "medusa"])
def test_the_text_is_the_same_in_fewer_rounds(drafter: str) -> None:
    """Under every rule when greedy, and when drawn under the rule that keeps the text."""
    asked = prompts(3, seed=2)
    for temperature in (0.0, 0.8):
        want: dict[str, Any] = {"max_new_tokens": 24}
        made = [Sampling(temperature, seed=3, logits_rules=[rule(RUNS, forces)])
                for forces in (False, True)]  # fmt: skip
        plain = texts(Engine(target(), Plain()), asked, **want, sampling=made[0])
        for name in RULES if temperature == 0 else ("match",):
            engine = Engine(target(), DRAFTERS[drafter](target()), acceptance=name, budget=8)
            assert texts(engine, asked, **want, sampling=made[1], batch_size=2) == plain, name


def test_forced_tokens_need_no_extra_round() -> None:
    asked, rounds = prompts(1), []
    for forces in (False, True):
        engine = Engine(target(), drafting.Oracle({}), budget=8)
        want = Sampling(logits_rules=[rule(RUNS, forces)], max_new_tokens=19)
        rounds.append(engine.generate(asked, sampling=want))
    assert per_round(rounds[0]) == 1.0 and per_round(rounds[1]) == 18 / 5
    assert rounds[0][0].tokens == rounds[1][0].tokens


def test_tokens_that_the_target_would_not_write_are_rejected() -> None:
    """Guesses at how it would cut forced bytes into tokens: wrong ones change nothing."""
    asked = prompts(2)
    for acceptance in RULES:
        wrong, right = (
            texts(Engine(target(), DRAFTERS["portfolio"](target()), acceptance=acceptance,
                         budget=8), asked, max_new_tokens=20,
                  sampling=Sampling(logits_rules=[rule(RUNS, honest=honest)]))
            for honest in (False, True)
        )  # fmt: skip
        assert wrong == right


def test_drafts_that_start_with_forced_tokens_are_kept() -> None:
    frontier = drafting.frontier_of([[5, 6], [5, 6]], 6)
    paths = torch.tensor([[[6, 1, 2, 3], [6, 2, 9, 9]], [[6, 1, 2, 3], [6, 2, 9, 9]]])
    tree = TokenTree.from_paths(paths, 7)
    merged = with_forced(tree, [[1, 2], []], frontier, 8)
    drafted = [set(drafting.drafted(merged, row)) for row in (0, 1)]
    assert drafted[0] == {(1,), (1, 2), (1, 2, 3)}
    assert drafted[1] == {(1,), (1, 2), (1, 2, 3), (2,), (2, 9), (2, 9, 9)}
    chain = TokenTree.chain(torch.tensor([[6, 1, 2, 3], [6, 4, 4, 4]]))
    chains = with_forced(chain, [[1, 2], [1]], frontier.__class__(
        frontier.prefix, frontier.sampler, 6, trees=False), 8)  # fmt: skip
    assert chains.tokens.tolist() == [[6, 1, 2, 3], [6, 1, ABSENT, ABSENT]]


def test_forced_tokens_are_certain_where_drafts_are_drawn() -> None:
    """Each of them, and no other; a token with probabilities of another draw biases the text."""
    frontier = replace(drafting.frontier_of([[5, 6]] * 3, 6), needs_draft_probs=True)
    chain = TokenTree.chain(torch.tensor([[6, 1, 2, 3], [6, 4, 4, 4], [6, 4, 4, ABSENT]]),
                            torch.full((3, 4, VOCAB), 1 / VOCAB))
    made = with_forced(chain, [[1, 2], [1], [8, 8, 9, 9]], frontier, 8)
    assert made.draft_probs is not None
    certain = torch.nn.functional.one_hot(made.tokens.clamp(min=0), VOCAB).float()
    is_forced = torch.tensor([[0, 1, 1, 0, 0], [0, 1, 0, 0, 0], [0, 1, 1, 1, 1]]).bool()
    for row, place in is_forced.nonzero().tolist():
        assert torch.equal(made.draft_probs[row, place], certain[row, place])
    assert (made.draft_probs[0, 3] == 1 / VOCAB).all(), "what the drafter drew itself"
