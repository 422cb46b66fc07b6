"""What each rank runs in test_parallel.py: many drafters over one sharded target, then the command
line.

    torchrun --nproc-per-node 2 two_ranks.py ENGINE FOLDER DTYPE
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from drafting import Fading, Guess, Hinted, Oracle
from tiny import prompts

import draftproof as dp
from draftproof.cache.kv_layer import KVLayer
from draftproof.cli.app import main
from draftproof.core.messages import Reading
from draftproof.drafters.base import Drafter
from draftproof.engine.engine import Engine
from draftproof.model.module_target import ModuleTarget
from draftproof.model.target import Target

PROMPTS = prompts(2, seed=4)
TEMPERATURES = (0.0, 1.0)
NEW = 10


class Rejected(ModuleTarget):
    """A target that rounds coarsely."""

    def __init__(self, inner: Target) -> None:
        self.__dict__ = dict(inner.__dict__)

    def read(self, *args: Any, **options: Any) -> Reading:
        reading = super().read(*args, **options)
        return Reading(reading.logits + torch.randn_like(reading.logits), reading.hidden)


def written(target: Target, drafter: Drafter | None, **options: Any) -> dict[str, Any]:
    """The tokens of all prompts at each temperature, and how many came per round."""
    params = [dp.Sampling(temperature=temperature, seed=2) for temperature in TEMPERATURES
              for _ in PROMPTS]
    engine = Engine(target, drafter, **{"budget": 6 if drafter else None, **options})
    done = engine.generate(PROMPTS * len(TEMPERATURES), sampling=params, max_new_tokens=NEW,
                           batch_size=3)
    tokens, size = [completion.tokens for completion in done], len(PROMPTS)
    settings = {str(temperature): tokens[at * size : (at + 1) * size]
             for at, temperature in enumerate(TEMPERATURES)}
    return {**settings, "per_round": max(completion.stats.tokens_per_round for completion in done)}


def told(target: Target, plain: dict[str, Any]) -> Oracle:
    return Oracle({tuple(prompt): answer
                   for prompt, answer in zip(PROMPTS, plain["1.0"], strict=True)})


def everything(folder: str, engine: str, dtype: str) -> dict[str, Any]:
    """Texts by drafter, and what the target looks like from inside."""
    target = dp.load(folder, parallel=engine, drafter="none", dtype=dtype).target
    rank = target.group.rank
    cache = target.new_cache(1, 8)
    assert isinstance(cache.layers[0], KVLayer)
    plain = written(target, None)
    torch.manual_seed(0)
    medusa = dp.Medusa(dp.MedusaHead.fresh(target, 3), target)
    redrafter = dp.ReDrafter(dp.ReDrafterHead.fresh(target), target)
    draft = dp.DraftModel(dp.load(folder, drafter="none", dtype=dtype).target, target.vocab_size)
    texts = {"plain": plain, "lookup": written(target, dp.PromptLookup()),
             "draft": written(target, draft), "medusa": written(target, medusa),
             "redrafter": written(target, redrafter),
             "tree": written(target, Hinted(told(target, plain)), budget=8),
             "adaptive": written(target, told(target, plain), budget=dp.Adaptive(6)),
             "fading": written(target, draft, budget=Fading()),
             "block": written(target, draft, acceptance="block")}
    guess = Guess()
    guess.dice.manual_seed(rank)  # each rank drafts something else
    strayed = Rejected(target) if rank else target  # and rank 1 would choose something else
    texts["astray"] = written(strayed, guess)
    texts["hasty"] = written(strayed, draft, budget=dp.Adaptive(6, debt=3.0 + rank))
    inside = {"heads": cache.layers[0].keys.shape[1], "fast": target.fast is not None}
    return {"texts": texts, "inside": inside}


def command(*args: str) -> None:
    """``draftproof ARGS``."""
    sys.argv = ["draftproof", *args]
    with suppress(SystemExit):
        main()


if __name__ == "__main__":
    engine, folder, dtype = sys.argv[1:]
    place, rank = Path(folder), os.environ["RANK"]
    report = everything(folder, engine, dtype)
    Path(place, f"found{rank}.json").write_text(json.dumps(report))
    options = ["run", folder, "--parallel", engine, "--dtype", dtype, "--drafter", "suffix",
               "--max-draft-tokens", "3"]
    command(*options, "--prompts", f"{folder}/rows.jsonl", "--out", f"{folder}/out.jsonl",
            "--max-new-tokens", "6")
    print("rows done", file=sys.stderr, flush=True)
    Path(place, f"pid{rank}").write_text(str(os.getpid()))
    sys.argv = ["draftproof", *options, "--prompt", "Once upon a time", "--max-new-tokens",
                "1000000"]
    main()                                                             # until somebody ends it
