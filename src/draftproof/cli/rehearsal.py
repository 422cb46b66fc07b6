"""``draftproof doctor --rehearse hpu``: decoding held to another device's rules, on this machine."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table

from draftproof.cli import show
from draftproof.cli.setup import Setup
from draftproof.errors import BadInput, ForbiddenOnDevice

FREE = ("none", "prompt-lookup", "suffix", "recycling", "portfolio")
"""Drafters for any model."""
RULES = ("match", "rejection", "block", "typical")
NEW_TOKENS, TEMPERATURE = 6, 0.8


def rehearse(setup: Setup, device: str, json_: bool) -> None:
    """Run every drafter, or the one that was named, under every rule; raises ForbiddenOnDevice if one breaks a rule."""
    if device != "hpu":
        raise BadInput(f"--rehearse was {device!r}; hpu is the device that can be rehearsed")
    found = []
    for case in _cases(replace(setup, dtype=setup.dtype or "float32", device="cpu")):
        with show.status(f"rehearsing {_name(case)}, {case.lossy or case.acceptance} ..."):
            found.append(_rehearsed(case))
    if json_:
        print(json.dumps({"rehearsed": device, "cases": found}))
    else:
        console = Console(highlight=False)
        console.print(_page(found))
        if not any(case["broke"] for case in found):
            console.print("\nEvery case passes: one read per round, and no new graph after warm-up.", style="bold green")
        console.print("These are the rules of Intel Gaudi, held on the CPU; nothing ran on a Gaudi.")
    failed = [case for case in found if case["broke"]]
    if failed:
        raise ForbiddenOnDevice(f"{failed[0]['drafter']}, {failed[0]['rule']}: {failed[0]['broke']}")


def _cases(setup: Setup) -> Iterator[Setup]:
    """What to try: all there is for the model, or what was named."""
    named = [setup]
    if setup.drafter is None and setup.assistant_model is None:
        named = [replace(setup, drafter=name) for name in FREE]
        if setup.model == "demo":
            named += [replace(setup, assistant_model="demo-draft")]
            named += [replace(setup, drafter=name) for name in ("medusa", "redrafter")]
    for case in named:
        drawn = case.assistant_model is not None
        for rule in RULES if drawn or case.drafter == "none" else ("match", "typical"):
            yield replace(case, lossy="typical") if rule == "typical" else replace(case, acceptance=rule)


def _rehearsed(case: Setup) -> dict[str, Any]:
    from draftproof.core.params import Sampling
    from draftproof.engine.budget import Fixed
    from draftproof.engine.emulate_device import rehearse

    engine = case.engine()
    gc.unfreeze()                                                   # another engine follows, and this one must go
    engine.budget = Fixed(engine.budget.most)                       # every round drafts: more to see in less time
    told = {"drafter": _name(case), "rule": case.lossy or case.acceptance, "draft_tokens": engine.budget.most}
    try:
        seen = rehearse(engine, new_tokens=NEW_TOKENS, sampling=Sampling(temperature=TEMPERATURE, top_p=0.95, seed=1))
    except ForbiddenOnDevice as error:
        return {**told, "broke": str(error)}
    counted = {"rounds": seen.rounds, "reads_per_round": seen.reads / seen.rounds, "graphs": dict(seen.graphs)}
    return {**told, "broke": "", **counted, "prompts": seen.prompts}


def _name(case: Setup) -> str:
    return case.assistant_model or case.drafter or "none"


def _page(found: list[dict[str, Any]]) -> Table:
    """A row for each case."""
    title = "graphs per part of a round, and of reading prompts"
    page = Table(box=None, padding=(0, 2, 0, 0), title=title, title_justify="left")
    parts = next((list(case["graphs"]) for case in found if not case["broke"]), [])
    for column in ("drafter", "rule", "rounds", "reads", *parts, "prompts"):
        page.add_column(column, justify="left" if column in ("drafter", "rule") else "right")
    for case in found:
        if case["broke"]:
            page.add_row(case["drafter"], case["rule"], "broken", style="red")
            continue
        counts = [f"{case['reads_per_round']:.0f}", *(str(count) for count in case["graphs"].values()), str(case["prompts"])]
        page.add_row(case["drafter"], case["rule"], str(case["rounds"]), *counts)
    return page
