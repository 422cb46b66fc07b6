"""The model card of a trained head: what it is for, what it came from, how good it is. Knows the record of a run."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from draftproof import __version__

NAMES = {"medusa": "Medusa heads", "redrafter": "recurrent drafter (ReDrafter)"}
PAPERS = {"medusa": "2401.10774", "redrafter": "2403.09919"}
_CHANGED = """**The backbone was trained along (Medusa-2): `model` in this folder is another model than the base.** Decoding
is lossless with respect to this new model, whose texts differ from the base model's.

"""
_SHOWN = (
    "heads", "horizon", "layers", "exit_dim", "share_lm_head", "objective", "length", "batch", "accumulate", "rate",
    "warmup", "weight_decay", "clip", "seed",
)  # fmt: skip


def write_card(file: Path, record: Mapping[str, Any], plots: bool) -> None:
    """Write the card of the run that `record` describes."""
    pictures = "![accuracy on held-out text](accuracy.png)\n\n![loss](loss.png)\n"
    parts = [_opening(record), _figures(record), pictures if plots else "", _training(record), _data(record)]
    part = file.with_suffix(".part")
    part.write_text("\n".join(part for part in parts if part))
    part.replace(file)


def public_name(model: str) -> str:
    """How a model is called in what is given away: a hub id as it is, of a folder its name alone."""
    return Path(model).resolve().name if Path(model).is_dir() else model


def machine() -> str:
    """What kind of machine this is."""
    if torch.accelerator.is_available():
        where = torch.accelerator.current_accelerator()
        return torch.cuda.get_device_name() if where is not None and where.type == "cuda" else str(where)
    kind = torch.backends.cpu.get_cpu_capability()
    amx = "amx_bf16" in _flags()
    threads = torch.get_num_threads()
    return f"{os.cpu_count()}-core CPU ({'AMX' if amx else kind}), {threads} thread{'s' * (threads != 1)}"


def versions() -> dict[str, str]:
    """Of what the run depended on."""
    named = {name: version(name) for name in ("torch", "transformers")}
    return {"draftproof": __version__, "python": platform.python_version(), **named}


def _opening(record: Mapping[str, Any]) -> str:
    base, method = record["base_model"], record["settings"]["method"]
    lines = ["license: other", f"base_model: {base}", "library_name: draftproof", f"tags: [speculative-decoding, {method}]"]
    joint, paper = record["settings"].get("joint"), PAPERS[method]
    command = "FOLDER/model --drafter FOLDER/heads" if joint else f"{base} --drafter FOLDER"
    return (
        "---\n" + "\n".join(lines) + "\n---\n\n"
        f"# {NAMES[method]} for {base}\n\n"
        f"Foretells several of the tokens `{base}` will write, for speculative decoding ([arXiv {paper}]"
        f"(https://arxiv.org/abs/{paper})). The target checks every token: this decides how fast a text comes, never which.\n\n"
        f"{_CHANGED if joint else ''}```sh\ndraftproof run {command}\n```\n"
    )


def _figures(record: Mapping[str, Any]) -> str:
    exam = record["held_out"]
    hits = enumerate(zip(exam["top1"], exam["top5"], strict=True), 2)
    rows = [f"| {ahead} | {one:.1%} | {five:.1%} |" for ahead, (one, five) in hits]
    pairs = f", and more with the {record['pairs']:,} pairs of tokens that were counted" if record["pairs"] else ""
    return (
        "## Figures\n\nOn held-out text that was never trained on, teacher-forced; token 1 is the target's own.\n\n"
        "| token ahead | first choice right | one of five right |\n|---|---|---|\n" + "\n".join(rows) + "\n\n"
        f"Expected tokens per round with a chain of first choices: **{exam['tokens_per_round']:.2f}**; a tree accepts more"
        f"{pairs}.\n"
    )


def _training(record: Mapping[str, Any]) -> str:
    settings = record["settings"]
    shown = [f"| {name.replace('_', ' ')} | {settings[name]} |" for name in _SHOWN if settings.get(name) is not None]
    how = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    return (
        "## Training\n\n"
        f"{_backbone(record)} {record['steps']:,} steps of AdamW, {record['tokens']:,} tokens read, "
        f"{record['training_seconds'] / 60:.0f} minutes on a {record['machine']}.\n\n"
        "| setting | |\n|---|---|\n" + "\n".join(shown) + f"\n\nVersions: {how}.\n"
    )


def _backbone(record: Mapping[str, Any]) -> str:
    """What became of the target."""
    joint, found = record["settings"].get("joint"), record["held_out"]["figures"]
    if not joint:
        return "The target was frozen."
    how = "in one stage" if joint["one_stage"] else "in a second stage behind one of heads alone"
    kept = "distilled from its own law with the adapters off" if joint["distil"] else "trained on the texts"
    return (
        f"The backbone learnt through low-rank adapters {how}, {kept}, and was merged. On held-out text its loss is "
        f"{found['backbone_loss']:.3f} nats per token, the original's {found['original_loss']:.3f}, and its law is "
        f"KL {found['backbone_kl']:.4f} away."
    )


def _data(record: Mapping[str, Any]) -> str:
    settings, writing = record["settings"], record["settings"]["self_generate"]
    files = "\n".join(f"- `{name}` sha256 `{digest}`" for name, digest in settings["data"].items())
    made = ""
    if writing:
        heat = ", ".join(f"{temperature:g}" for temperature in writing["temperatures"])
        made = f"The target wrote what was trained on, from the beginnings of these texts, at temperature {heat} in turn: "
    return (
        f"## Data\n\n{made}{record['rows']:,} rows with {record['counted']:,} tokens that count, "
        f"from {record['documents']:,} documents; {record['held_out_rows']:,} rows held out.\n\n{files}\n\n"
        "The licences of the target and of this data hold for what is made from them: see to them before you pass this on.\n"
    )


def _flags() -> str:
    """What the CPU says it can."""
    file = Path("/proc/cpuinfo")
    return file.read_text(errors="replace") if file.exists() else ""
