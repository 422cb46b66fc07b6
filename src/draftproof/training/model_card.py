"""The model card of a trained head: what it came from, how good it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

NAMES = {"medusa": "Medusa heads", "redrafter": "recurrent drafter (ReDrafter)"}
PAPERS = {"medusa": "2401.10774", "redrafter": "2403.09919"}
SHOWN = ("heads", "horizon", "layers", "exit_dim", "share_lm_head", "objective", "length", "batch",
         "accumulate", "learning_rate", "warmup", "weight_decay", "clip", "seed")  # fmt: skip


def write_card(file: Path, record: Mapping[str, Any]) -> None:
    """Write the card of the run that `record` describes, from the template `model_card.md`."""
    settings, base = record["settings"], record["base_model"]
    method, tags = settings["method"], ["speculative-decoding", settings["method"]]
    data = ModelCardData(license="other", base_model=base, library_name="draftproof", tags=tags)
    card = ModelCard.from_template(
        data, template_path=str(Path(__file__).with_suffix(".md")), name=NAMES[method],
        paper=PAPERS[method], joint=settings.get("joint"), shown=SHOWN, **record,
    )
    file.write_text(str(card))


def public_name(model: str) -> str:
    """A model's name in what is given away: a hub id as it is, of a folder its name alone."""
    return Path(model).resolve().name if Path(model).is_dir() else model
