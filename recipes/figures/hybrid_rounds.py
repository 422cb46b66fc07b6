"""Time per token of a random hybrid whose drafts are always rejected, over plain decoding, and the
memory after 1,000 rounds.

    python recipes/figures/hybrid_rounds.py --rounds 300
    python recipes/figures/hybrid_rounds.py --memory 1000

The model has 0.5 B parameters: 24 layers of Qwen3.5's kind, three of four with a gated delta net.
Plain decoding and drafts of each length write in turns, so a machine that drifts slows all alike.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import psutil
import torch
import transformers

import draftproof as dp
from draftproof.model.target import Target
from draftproof.weights.packed_linear import pack_linears

KINDS = ["linear_attention"] * 3 + ["full_attention"]


class Wrong(dp.Drafter):
    """Drafts so many tokens, none of which the target would choose but by chance."""

    name = "wrong"

    def __init__(self, count: int) -> None:
        self.max_draft_tokens = count
        self.memory = list[float]()
        """MiB that the process holds, in each round."""

    def propose(self, frontier: dp.Frontier) -> dp.TokenTree:
        self.memory.append(psutil.Process().memory_info().rss / 2**20)
        root = frontier.prefix.root[:, None]
        ahead = torch.arange(frontier.max_draft_tokens + 1, device=root.device)
        return dp.TokenTree.chain((root + 7919 * ahead) % 32000)


def hybrid() -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen3_5TextConfig(
        vocab_size=32000, hidden_size=1024, intermediate_size=3584, num_hidden_layers=24,
        num_attention_heads=8, num_key_value_heads=2, head_dim=256, layer_types=KINDS * 6,
        linear_num_key_heads=16, linear_num_value_heads=16, linear_key_head_dim=128,
        linear_value_head_dim=128, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.generation_config = transformers.GenerationConfig()
    parameters = sum(weight.numel() for weight in model.parameters())
    print(f"{parameters / 1e9:.2f} B parameters")
    pack_linears(model)                                         # as `load` does
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 1, 3])
    parser.add_argument("--adaptive", action="store_true", help="with the adaptive budget")
    parser.add_argument("--memory", type=int, help="only the memory, over this many rounds")
    options = parser.parse_args()
    target = Target(hybrid())
    if options.memory:
        drafter = Wrong(3)
        engine = dp.Engine(target, drafter, budget=3)
        done = engine.generate([[1, 2]], max_new_tokens=options.memory + 1)[0]
        marks = sorted({min(10, len(drafter.memory) - 1), *range(99, len(drafter.memory), 100)})
        print(f"{done.stats.rounds} rounds, {done.stats.emitted} tokens; MiB in round: "
              + ", ".join(f"{mark + 1}: {drafter.memory[mark]:.1f}" for mark in marks))
        return
    seconds, counts = dict.fromkeys(options.drafts, 0.0), dict.fromkeys(options.drafts, 0)
    texts, equal = dict[int, list[int]](), 0
    turns = max(1, options.rounds // 25)
    for turn in range(turns):
        for count in options.drafts:
            budget = None if options.adaptive else count
            engine = dp.Engine(target, Wrong(count), budget=budget)
            begin = time.perf_counter()
            done = engine.generate([[1, 2, 3, 4 + turn]], max_new_tokens=26)[0]
            if turn:                                                # the first warms up
                seconds[count] += time.perf_counter() - begin - done.stats.seconds["prefill"]
                counts[count] += done.stats.emitted
            equal += texts.setdefault(turn, done.tokens) == done.tokens
    print(f"{equal} of {turns * len(options.drafts)} texts are those of the first kind")
    plain = seconds[0] / counts[0]
    for count in options.drafts:
        each = seconds[count] / counts[count]
        print(f"{count} rejected: {1e3 * each:.1f} ms per token, {each / plain:.2f} x plain")


if __name__ == "__main__":
    main()
