"""Drawn drafts through the real engine and its real noise: the joint distribution of the text is
the target's.

What enumeration cannot see, counting can: the seams between engine, drafter, rule and noise. Each
test raises a false alarm once in a million seeds, and always says the same since its seeds are
fixed; the control must be seen.
"""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from scipy.stats import chi2
from tiny import target
from two_tokenizers import five

from draftproof.core.messages import Frontier
from draftproof.core.params import Sampling
from draftproof.core.tree import TokenTree, TreeShape
from draftproof.drafters.base import Drafter
from draftproof.drafters.draft_model import DraftModel
from draftproof.drafters.draft_other_tokenizer import OtherTokenizer
from draftproof.engine.engine import Engine
from draftproof.engine.wrappers import DrafterWrapper

VOCAB, LENGTH, SAMPLES, ALARM = 5, 4, 3000, 1e-6
PROMPT = [1, 3]
WARM = Sampling(temperature=1.1, seed=17)
OWN = {"vocab_size": VOCAB, "bos_token_id": None, "hidden_size": 8, "num_attention_heads": 2,
       "num_key_value_heads": 1, "num_hidden_layers": 1, "initializer_range": 0.7}


def exact(sampling: Sampling) -> dict[tuple[int, ...], float]:
    """The distribution of the tokens after the first, by the model's own forward on every text."""
    texts = torch.tensor([[*PROMPT, *rest]
                          for rest in itertools.product(range(VOCAB), repeat=LENGTH)])
    with torch.inference_mode():
        logits = target(**OWN).model(texts).logits[:, len(PROMPT) - 1 : -1] / sampling.temperature
    if sampling.top_k:
        least = logits.topk(sampling.top_k, -1).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    steps = logits.softmax(-1).gather(-1, texts[:, len(PROMPT) :, None])[..., 0].prod(-1)
    distribution = Counter[tuple[int, ...]]()
    for text, chance in zip(texts[:, len(PROMPT) + 1 :].tolist(), steps.tolist(), strict=True):
        distribution[tuple(text)] += chance
    return distribution


def p_value(
    drafter: Drafter, rule: str, sampling: Sampling = WARM, budget: int | None = None
) -> float:
    """G-test of what the engine writes; cells expected fewer than five times are one cell."""
    engine = Engine(target(**OWN), drafter, acceptance=rule, budget=budget)
    done = engine.generate([PROMPT], max_new_tokens=LENGTH, sampling=sampling, n=SAMPLES)
    seen = Counter(tuple(completion.tokens[1:]) for completion in done)
    distribution = exact(sampling)
    assert all(distribution[text] > 0 for text in seen), "an impossible text"
    cells = [(seen[text], chance * SAMPLES) for text, chance in distribution.items()
             if chance * SAMPLES >= 5]
    rest = (SAMPLES - sum(count for count, _ in cells), SAMPLES - sum(mean for _, mean in cells))
    cells += [rest] if rest[1] >= 5 else []
    counts, means = torch.tensor(cells, dtype=torch.float64).T
    statistic = 2 * torch.xlogy(counts, counts / means).sum()
    return float(chi2.sf(statistic, len(cells) - 1))


def draft(shape: TreeShape | None = None) -> DraftModel:
    return DraftModel(target(seed=1, **OWN), VOCAB, shape)


TREE, FIVE = TreeShape.branching((2, 2)), TreeShape.branching((5,))


@pytest.mark.parametrize(("rule", "shape"), [
    ("match", TREE), ("rejection", None), ("rejection", TREE), ("rejection", FIVE),
    ("block", None)], ids=str)  # fmt: skip
def test_the_text_has_the_distribution_of_the_target(rule: str, shape: TreeShape | None) -> None:
    assert p_value(draft(shape), rule, budget=None if shape else 3) > ALARM


def test_the_distribution_under_a_filter() -> None:
    assert p_value(draft(), "block", Sampling(temperature=0.9, top_k=3, seed=3), budget=2) > ALARM


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_the_distribution_of_a_draft_with_another_tokenizer(rule: str) -> None:
    shared, size = five()
    other = OtherTokenizer(target(seed=1, **{**OWN, "vocab_size": size}), shared)
    assert p_value(other, rule, budget=3) > ALARM


class Boastful(DrafterWrapper):
    """Attaches a distribution that is not the one it drew from."""

    def propose(self, frontier: Frontier) -> TokenTree:
        tree = self.inner.propose(frontier)
        assert tree.draft_probs is not None
        wrong = tree.draft_probs.sqrt()
        return TokenTree.chain(tree.tokens, wrong / wrong.sum(-1, keepdim=True).clamp(min=1e-9))


def test_a_wrong_draft_distribution_is_seen() -> None:
    assert p_value(Boastful(draft()), "block", budget=3) < ALARM


def test_rejection_and_block_accept_more_than_matching() -> None:
    """Block accepts at least what rejection does, and rejection more than matching."""
    rates = {}
    for rule in ("match", "rejection", "block"):
        engine = Engine(target(**OWN), draft(), acceptance=rule, budget=3)
        engine.generate([PROMPT], max_new_tokens=9, sampling=WARM, n=600)
        rates[rule] = engine.stats.accepted / engine.stats.rounds
    assert rates["block"] > rates["rejection"] - 0.05
    assert rates["rejection"] > rates["match"] - 0.05
