"""The model card of a trained head: what it is for, what it came from, how good it is. Knows the record of a run."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard, ModelCardData

from draftproof import __version__

NAMES = {"medusa": "Medusa heads", "redrafter": "recurrent drafter (ReDrafter)"}
PAPERS = {"medusa": "2401.10774", "redrafter": "2403.09919"}
SHOWN = ("heads", "horizon", "layers", "exit_dim", "share_lm_head", "objective", "length", "batch", "accumulate",
         "learning_rate", "warmup", "weight_decay", "clip", "seed")  # fmt: skip
TEMPLATE = """---
{{ card_data }}
---

# {{ name }} for {{ base_model }}

Predicts several of the tokens `{{ base_model }}` will write, for speculative decoding ([arXiv {{ paper }}](https://arxiv.org/abs/{{ paper }})).
The target checks every token: the heads decide how fast a text comes, never which.
{% if joint %}
**The backbone was trained along (Medusa-2): `model` in this folder is another model than the base.** Decoding
is lossless with respect to this new model, whose texts differ from the base model's.
{% endif %}
```sh
draftproof run {{ "FOLDER/model --drafter FOLDER/heads" if joint else base_model ~ " --drafter FOLDER" }}
```

## Accuracy

On held-out text that was never trained on, teacher-forced; token 1 is the target's own.

| token ahead | first choice right | one of five right |
|---|---|---|
{%- for one in held_out.top1 %}
| {{ loop.index + 1 }} | {{ "%.1f" | format(100 * one) }}% | {{ "%.1f" | format(100 * held_out.top5[loop.index0]) }}% |
{%- endfor %}

Expected tokens per round with a chain of first choices: **{{ "%.2f" | format(held_out.tokens_per_round) }}**; a tree accepts more
{%- if pairs %}, and more with the {{ "{:,}".format(pairs) }} pairs of tokens that were counted{% endif %}.
{% if plots %}
![accuracy on held-out text](accuracy.png)

![loss](loss.png)
{% endif %}
## Training

{% if joint -%}
The backbone learnt through low-rank adapters {{ "in one stage" if joint.one_stage else "in a second stage behind one of heads alone" }},
{{ "distilled from itself with the adapters off" if joint.distil else "trained on the texts" }}, and was merged. On held-out text its loss is
{{ "%.3f" | format(held_out.figures.backbone_loss) }} nats per token, the original's {{ "%.3f" | format(held_out.figures.original_loss) }},
and its distribution is KL {{ "%.4f" | format(held_out.figures.backbone_kl) }} away.
{%- else -%}
The target was frozen.
{%- endif %} {{ "{:,}".format(steps) }} steps of AdamW, {{ "{:,}".format(tokens) }} tokens read,
{{ (training_seconds / 60) | round | int }} minutes on a {{ machine }}.

| setting | |
|---|---|
{%- for key in shown if settings[key] is not none and settings[key] is defined %}
| {{ key.replace("_", " ") }} | {{ settings[key] }} |
{%- endfor %}

Versions: {% for key, number in versions.items() %}{{ key }} {{ number }}{{ ", " if not loop.last }}{% endfor %}.

## Data

{% if settings.self_generate -%}
The target wrote what was trained on, from the beginnings of these texts,
at temperature {{ settings.self_generate.temperatures | join(", ") }} in turn:
{% endif -%}
{{ "{:,}".format(rows) }} rows with {{ "{:,}".format(counted) }} tokens to learn,
from {{ "{:,}".format(documents) }} documents; {{ "{:,}".format(held_out_rows) }} rows held out.
{% for file, digest in settings.data.items() %}
- `{{ file }}` sha256 `{{ digest }}`
{%- endfor %}

The licences of the target and of this data hold for what is made from them: see to them before you pass this on.
"""


def write_card(file: Path, record: Mapping[str, Any], plots: bool) -> None:
    """Write the card of the run that `record` describes."""
    settings, base = record["settings"], record["base_model"]
    method, tags = settings["method"], ["speculative-decoding", settings["method"]]
    data = ModelCardData(license="other", base_model=base, library_name="draftproof", tags=tags)
    card = ModelCard.from_template(
        data, template_str=TEMPLATE, name=NAMES[method], paper=PAPERS[method], joint=settings.get("joint"),
        plots=plots, shown=SHOWN, **record,
    )  # fmt: skip
    file.write_text(str(card))


def public_name(model: str) -> str:
    """How a model is called in what is given away: a hub id as it is, of a folder its name alone."""
    return Path(model).resolve().name if Path(model).is_dir() else model


def machine() -> str:
    """What kind of machine this is."""
    if torch.accelerator.is_available():
        where = torch.accelerator.current_accelerator()
        return torch.cuda.get_device_name() if where is not None and where.type == "cuda" else str(where)
    threads = torch.get_num_threads()
    kind = f"{os.cpu_count()}-core CPU ({torch.backends.cpu.get_cpu_capability()})"
    return f"{kind}, {threads} thread{'s' * (threads != 1)}"


def versions() -> dict[str, str]:
    """Of what the run depended on."""
    named = {name: version(name) for name in ("torch", "transformers")}
    return {"draftproof": __version__, "python": platform.python_version(), **named}
