"""Reads a generation_config.json with common settings alone, without transformers."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from draftproof.core.params import Sampling

if TYPE_CHECKING:
    from draftproof.model.native_model import NativeModel

TOKENS = {"bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"}
WITHOUT_EFFECT = TOKENS | {
    "_from_model_config", "transformers_version", "use_cache", "output_attentions",
    "output_hidden_states", "output_scores", "return_dict_in_generate", "do_sample",
}
"""Fields that change no text, or are read here under their own names."""
SAMPLED = {"temperature": 1.0, "top_k": 50, "top_p": 1.0}
"""The defaults of a configuration that samples, as in transformers."""
FIELDS = {"repetition_penalty": "repetition_penalty", "max_new_tokens": "max_new_tokens"}
"""Fields that are options here, and their names here."""


def read_generation(folder: Path) -> dict[str, object] | None:
    """The settings of a folder if all are understood here; None if transformers has to read
    them."""
    try:
        settings = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    known = WITHOUT_EFFECT | SAMPLED.keys() | FIELDS.keys()
    if not isinstance(settings, dict) or not settings.keys() <= known:
        return None
    return settings


def native_defaults(
    model: NativeModel, ignored: str | None = None
) -> tuple[Sampling, tuple[int, ...]]:
    """The defaults of a native model's folder: a sampling, and the tokens that end a text.

    Args:
        model: The model; a GGUF file's end tokens are in its configuration.
        ignored: Fields to ignore, such as "num_beams,guidance_scale".
    """
    folder = Path(model.config.name_or_path)
    if not (folder / "generation_config.json").is_file():
        return Sampling(), _ends(model.config.eos_token_id)
    settings = read_generation(folder)
    if settings is not None and ignored is None:
        return sampling_of(settings), _ends(settings.get("eos_token_id"))
    from transformers import GenerationConfig

    from draftproof.model.end_tokens import stop_tokens
    from draftproof.model.generation_defaults import default_sampling

    config: object = GenerationConfig.from_pretrained(folder)
    shell: object = SimpleNamespace(generation_config=config, config=model.config)
    return default_sampling(shell, ignored), stop_tokens(shell)


def _ends(token: Any) -> tuple[int, ...]:
    return () if token is None else tuple(token) if isinstance(token, list) else (int(token),)


def sampling_of(settings: dict[str, Any]) -> Sampling:
    """The sampling from these settings, as transformers' `generate` would apply it."""
    values = {ours: settings[theirs] for theirs, ours in FIELDS.items()
              if settings.get(theirs) is not None}
    if settings.get("do_sample"):
        values |= {name: usual if settings.get(name) is None else settings[name]
                   for name, usual in SAMPLED.items()}
        values["temperature"] = values["temperature"] or 1.0
    return Sampling(**values)
