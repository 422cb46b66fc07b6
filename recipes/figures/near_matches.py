"""What near matches add to prompt lookup: tokens per round with exact n-gram matches only, and with
matches in which one token may differ (as AdaPLD allows), alone and in the default portfolio.

    python recipes/figures/near_matches.py MODEL HumanEval.jsonl.gz spec_bench/question.jsonl

The prompts and the fixed budget are those of portfolio_ablation.py, and the text is the same in
every line.
"""

from __future__ import annotations

import sys

import torch
from portfolio_ablation import BUDGET, kinds

import draftproof as dp

PLACES, LONGEST = 4, 16
"""Matches whose continuations are drafted, and tokens that are compared."""


class NearLookup(dp.Drafter):
    """Prompt lookup whose matches may differ in one token, the last one included.

    A near match counts as long as its equal tokens, less `PENALTY`, and needs at least `shortest`
    equal tokens. Longer matches come first, later ones among equals.
    """

    name = "near-lookup"
    max_draft_tokens = 7

    def __init__(self, near: bool = True, penalty: int = 2, shortest: int = 4) -> None:
        self.near, self.penalty, self.shortest = near, penalty, shortest

    def propose(self, frontier: dp.Frontier) -> dp.TokenTree:
        """A tree of what followed the best matches of each row."""
        prefix, budget = frontier.prefix, frontier.max_draft_tokens
        paths = torch.full((len(prefix.position), PLACES, 1 + budget), dp.ABSENT)
        paths[..., 0] = prefix.root[:, None]
        votes = torch.zeros(paths.shape)
        for row, position in enumerate(prefix.position.tolist()):
            text = prefix.tokens[row, : position + 1].tolist()
            left = 1.0
            for place, (length, end) in enumerate(self._matches(text)):
                votes[row, place, 0] = left
                chance, period = left, len(text) - end
                for ahead in range(budget):
                    paths[row, place, 1 + ahead] = text[end + ahead % period]
                    chance *= (length + ahead) / (length + ahead + 3)
                    votes[row, place, 1 + ahead] = chance
                left *= 1 - length / (length + 3)
        tree = dp.TokenTree.from_paths(paths, budget + 1, votes)
        return tree if frontier.trees else tree.best_chain()

    def _matches(self, text: list[int]) -> list[tuple[int, int]]:
        """Lengths of the best matches, and where the text goes on after each."""
        result = []
        for end in range(1, len(text)):
            exact, equal, differing = 0, 0, 0
            for back in range(min(LONGEST, end)):
                if text[end - 1 - back] == text[-1 - back]:
                    equal += 1
                    exact += not differing
                else:
                    differing += 1
                    if differing > self.near:
                        break
            length = exact
            if self.near and equal >= self.shortest:
                length = max(exact, equal - self.penalty)
            if length:
                result.append((length, end))
        return sorted(result, reverse=True)[:PLACES]


DRAFTERS = {
    "prompt lookup": lambda: [dp.PromptLookup()],
    "exact, in this file": lambda: [NearLookup(near=False)],
    "near, penalty 1": lambda: [NearLookup(penalty=1)],
    "near, penalty 2": lambda: [NearLookup()],
    "near, penalty 4": lambda: [NearLookup(penalty=4, shortest=6)],
    "portfolio": lambda: [dp.PromptLookup(), dp.SuffixDrafter(), dp.TokenRecycling()],
    "portfolio, near": lambda: [NearLookup(), dp.SuffixDrafter(), dp.TokenRecycling()],
}


def main(model: str, tasks: str, questions: str, count: str = "8", tokens: str = "64") -> None:
    loaded = dp.load(model, drafter="none")
    prompts = kinds(loaded, tasks, questions, int(count))
    print(f"{'':22}" + "".join(f"{kind:>14}" for kind in prompts))
    texts: dict[str, list[list[int]]] = {}
    for name, members in DRAFTERS.items():
        line = f"{name:22}"
        for kind, each in prompts.items():
            drafter = members()[0] if len(members()) == 1 else dp.Portfolio(members())
            engine = dp.Engine(loaded.target, drafter, codec=loaded.codec, budget=BUDGET,
                               stop_tokens=loaded.stop_tokens)
            done = [engine.generate([prompt], max_new_tokens=int(tokens))[0] for prompt in each]
            written = [completion.tokens for completion in done]
            assert texts.setdefault(kind, written) == written, "another text"
            emitted = sum(completion.stats.emitted for completion in done)
            line += f"{emitted / sum(completion.stats.rounds for completion in done):14.2f}"
        print(line, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
