"""``draftproof doctor``: what this machine is, and what may be promised of a model on it."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from rich.table import Table

from draftproof.cli import options as opt
from draftproof.cli import show
from draftproof.cli.setup import engine_of, lost, quantised
from draftproof.engine.config import EngineConfig

if TYPE_CHECKING:
    from draftproof.model.exactness import Exactness
    from draftproof.model.target import Target

NAMES = (
    "assistant_model", "drafter", "dtype", "device", "quantize", "quantize_draft", "kv_cache",
    "trust_remote_code",
)  # fmt: skip


@opt.with_options(engine=NAMES)
def doctor(model: opt.Model = "demo", json_: opt.Json = False, *, engine: dict[str, Any]) -> None:
    """Show what this machine is, and what is promised on it."""
    from draftproof.model.exactness import probe

    with show.status("looking at the machine ..."):
        if not engine.keys() & {"drafter", "assistant_model"}:
            engine["drafter"] = "none"
        made = engine_of(EngineConfig(model, **engine))
        target = made.target
        facts, found = {"model": model, **_facts(target), **quantised(made)}, probe(target)
        if drafts := made.budget.most:                  # a drafter was named, loads and fits
            facts |= {"drafter": made.drafter.name, "draft_tokens": drafts}
    if json_:
        promised = {"exact_nodes": found.exact_nodes, "promise": found.promise}
        print(json.dumps({**facts, **found._asdict(), **promised}))
        return
    console = show.page()
    console.print(_page(facts, found, lost(made)))
    console.print()
    style = "bold green" if found.exact_nodes > 1 else "bold yellow"
    console.print(f"Promise for this model on this machine: {found.promise}.", style=style)


def _facts(target: Target) -> dict[str, Any]:
    """Versions, device, threads, memory, and which path is used for what."""
    import torch

    from draftproof.model.device import Device, versions
    from draftproof.model.paths import paths

    device = Device(target.device)
    free, total = (size / 2**30 for size in device.memory())
    return {
        "versions": versions(), "device_name": device.name, "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": {"free": free, "total": total}, "bf16_native": device.bf16_is_native,
        "kernels": _kernels(), "paths": paths(target), "context": target.context,
        "vocab_size": target.vocab_size, "reads_trees": target.reads_trees,
    }  # fmt: skip


def _kernels() -> str:
    """Which library serves, for what, and why not a quicker one."""
    from draftproof.native.kernels import kernels, library

    found, told = kernels(), library().reason
    if found is None:
        return f"none: torch's operators do everything; {told}"
    what = "linear layers in bfloat16, 8 and 4 bits, attention, norms, gates, noise and lookup"
    return f"{library().build}: {what}" + (f"; {told}" if told else "")


def _page(facts: dict[str, Any], found: Exactness, lost: list[str]) -> Table:
    """Everything in two columns."""
    page = Table.grid(padding=(0, 2))
    page.add_column(style="bold")
    page.add_column()
    versions = [f"{what} {number}" for what, number in facts["versions"].items()]
    page.add_row("versions", " · ".join(versions))
    cores = f"{facts['cores']} cores, {facts['threads']} in use"
    page.add_row("device", f"{found.device}: {facts['device_name']}, {cores}")
    memory = facts["memory_gib"]
    page.add_row("memory", f"{memory['free']:.1f} of {memory['total']:.1f} GiB free")
    native = "native" if facts["bf16_native"] else "not native, float32 is used unless asked"
    page.add_row("bfloat16", native)
    page.add_row("kernels", facts["kernels"])
    for what, told in facts["paths"].items():
        page.add_row(what, told)
    trees = "reads chains and trees" if facts["reads_trees"] else "reads chains only"
    context = f"{facts['context']} tokens of context"
    page.add_row("model", f"{facts['model']}, {found.dtype}, {context}, {trees}")
    for line in lost:
        page.add_row("quantised", line)
    if "drafter" in facts:
        most = f"drafts up to {facts['draft_tokens']} tokens per round"
        page.add_row("drafter", f"{facts['drafter']} fits, and {most}")
    page.add_row("same bits", _grouped(found.same))
    gap = f"; logits differ by up to {max(found.differ.values()):.1g}" if found.differ else ""
    page.add_row("other bits", _grouped(list(found.differ)) + gap)
    return page


def _grouped(cases: list[str]) -> str:
    """Cases by their kind: "chain of 2, 3, 4 · tree of 9, 17"."""
    kinds: dict[str, list[str]] = {}
    for case in cases:
        kind, _, size = case.rpartition(" ")
        kinds.setdefault(kind, []).append(size)
    return " · ".join(f"{kind} {', '.join(sizes)}" for kind, sizes in kinds.items()) or "none"
