"""``draftproof doctor``: describes this machine and a model's guarantees on it."""

from __future__ import annotations

import os
from typing import Any

from rich.table import Table

from draftproof.cli import options as opt
from draftproof.cli import show
from draftproof.cli.setup import engine_of, lost
from draftproof.engine.config import EngineConfig

NAMES = (
    "assistant_model", "drafter", "dtype", "device", "quantize", "quantize_draft", "kv_cache",
    "trust_remote_code",
)  # fmt: skip


@opt.with_options(engine=NAMES)
def doctor(model: opt.Model = "demo", json_: opt.Json = False, *, engine: dict[str, Any]) -> None:
    """Show what this machine can do, and what is guaranteed on it."""
    from draftproof.model.device import Device, versions
    from draftproof.model.diagnosis import paths
    from draftproof.model.exactness import probe
    from draftproof.native.threads import thread_count

    with show.status("looking at the machine ..."):
        if not engine.keys() & {"drafter", "assistant_model"}:
            engine["drafter"] = "none"
        made = engine_of(EngineConfig(model, **engine))
        target, probed = made.target, probe(made.target)
        device = Device(target.device)
        free, total = (size / 2**30 for size in device.memory())
    facts: dict[str, Any] = {
        "versions": versions(),
        "device": f"{probed.device}: {device.name}, {os.cpu_count()} cores, "
                  f"{thread_count()} in use",
        "memory": f"{free:.1f} of {total:.1f} GiB free",
        "bfloat16": "native" if device.bf16_is_native else "not native: only if asked for",
        **paths(target),
        "model": f"{model}, {probed.dtype}, {target.context} tokens of context, reads "
                 + ("chains and trees" if target.reads_trees else "chains only"),
        **({"quantised": lines} if (lines := lost(made)) else {}),
    }  # fmt: skip
    if drafts := made.budget.max_draft_tokens:          # a named drafter loads and fits
        facts["drafter"] = f"{made.drafter.name} fits, and drafts up to {drafts} tokens per round"
    facts |= {"same bits": probed.same, "other bits": probed.differ}
    if json_:
        bits = {"exact_nodes": probed.exact_nodes, "guarantee": probed.guarantee}
        show.print_json({**facts, "dtype": probed.dtype, **bits})
        return
    if probed.differ:
        gap = f"logits differ by up to {max(probed.differ.values()):.1g}"
        facts["other bits"] = [*probed.differ, gap]
    page = Table.grid(padding=(0, 2))
    page.add_column(style="bold")
    for name, value in facts.items():
        several = [f"{what} {number}" for what, number in value.items()] if isinstance(
            value, dict) else value
        page.add_row(name, several if isinstance(several, str) else " · ".join(several) or "none")
    console = show.page()
    console.print(page)
    style = "bold green" if probed.exact_nodes > 1 else "bold yellow"
    console.print(f"\nGuarantee for this model on this machine: {probed.guarantee}.", style=style)
