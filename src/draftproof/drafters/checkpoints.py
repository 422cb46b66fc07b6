"""Checkpoints of draft heads: folders written here and by other engines.

Read are our own layout; for Medusa those of FasterDecoding/Medusa (heads alone, with or without
projections, or inside the merged model), Text Generation Inference, vLLM, TensorRT-LLM and NVIDIA
ModelOpt; for ReDrafter the three families of names of Apple's ml-recurrent-drafter, and the
drafter's part of a TensorRT-LLM checkpoint. How many heads and layers there are is read off the
tensors: the settings of published heads are known to be wrong. Of a merged model only the heads'
tensors are read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftproof.drafters import weight_files
from draftproof.drafters.base import DraftHead, Vocabulary, filled, lm_head_rows, must_fit
from draftproof.drafters.medusa import MedusaConfig, MedusaHead
from draftproof.drafters.redrafter import STEPS, ReDrafterConfig, ReDrafterHead
from draftproof.drafters.weight_files import CONFIG
from draftproof.errors import BadInput, DrafterMismatch, ModelNotFound, first_line

Config = dict[str, Any]
Tensors = dict[str, Tensor]
Names = dict[str, str]
"""Our name of each tensor, and the file's."""

OWN, WEIGHTS = "draftproof", "model.safetensors"
"""Our own layout, and the file that weights are written to."""
MEDUSA = {
    OWN: (r"heads\.(\d+)\.blocks\.(\d+)\.(weight|bias)", r"heads\.(\d+)\.proj\.weight"),
    "vllm": (
        r"(?:medusa_heads\.)?blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)",
        r"(?:medusa_heads\.)?lm_heads\.(\d+)\.weight",
    ),
    "tensorrt-llm": (
        r"(?:.+\.)?medusa_heads\.(\d+)\.medusa_layers\.(\d+)\.linear\.(weight|bias)",
        r"(?:.+\.)?medusa_heads\.(\d+)\.lm_head\.weight",
    ),
    "merged": (
        r"(?:.+\.)?medusa_head\.(\d+)\.(\d+)\.linear\.(weight|bias)",
        r"(?:.+\.)?medusa_head\.(\d+)\.\d+\.weight",
    ),
    "legacy": (r"(\d+)\.(\d+)\.linear\.(weight|bias)", r"(\d+)\.\d+\.weight"),
}
"""By layout, the names of a block (head, layer, kind) and of a projection (head)."""
REDRAFTER = (
    (r"(?:drafter\.)?input_projs?\.(weight|bias)", r"input_proj.\1"),
    (r"(?:drafter\.)?rnn_(u\.weight|u\.bias|w\.weight)", r"rnn_\1"),
    (r"(?:lm_heads?|0|drafter\.layers)\.(\d+)\.linear\.(weight|bias)", r"lm_head.\1.linear.\2"),
    (r"(?:lm_heads?|0)\.\d+\.weight|drafter\.lm_head\.weight", "projection.weight"),
    (r"token_map", "token_map"),
)
"""Names of Apple's three families and of TensorRT-LLM, and ours."""
REDRAFTER_SETTINGS = ("num_draft_layers", "redrafter_num_layers")
"""Settings that only a recurrent drafter has."""
MARKS = ("speculator_type", "model_type", "architectures")
"""Settings that say what a folder is; where they differ, nothing is overwritten."""


def is_head(folder: str | Path) -> bool:
    """Whether a folder holds, or says that it holds, a draft head known here. Never raises."""
    try:
        folder = Path(folder)
        config = weight_files.read_settings(folder) if (folder / CONFIG).is_file() else {}
        return config.get("speculator_type") in READERS or _recognised(folder) is not None
    except (ModelNotFound, OSError):
        return False


def read_head(folder: str | Path, vocabulary: Vocabulary) -> DraftHead:
    """The head in a folder, of any method and layout, in the dtype of its file.

    Raises ModelNotFound if there is none or it cannot be read, DrafterMismatch if it is not for
    this target.
    """
    found = _recognised(Path(folder))
    if found is None:
        known = ", ".join(READERS)
        raise ModelNotFound(
            f"{folder} holds no draft head in a layout known here ({known}); give another folder"
        )
    kind, config, names, files = found
    tensors = weight_files.read_tensors(names, files)
    try:
        return READERS[kind][1](config, names, tensors, vocabulary)
    except (TypeError, ValueError, KeyError) as error:
        if isinstance(error, BadInput):
            raise
        where, why = Path(folder, CONFIG), first_line(error)
        raise ModelNotFound(f"the settings in {where} describe no draft head: {why}") from error


def write_head(head: DraftHead, folder: str | Path, layout: str = OWN) -> None:
    """Write a head so that `read_head`, and the engines of that layout, read it.

    Overwrites a head of the same layout; raises BadInput for a folder that holds other weights.
    """
    writers, folder = WRITERS[head.kind], Path(folder)
    if layout not in writers:
        known = ", ".join(writers)
        raise BadInput(f"the layout was {layout!r}; {head.kind} heads are written as {known}")
    config, tensors = writers[layout](head)
    files = [file.name for kind in weight_files.weight_files(folder) for file in kind]
    others = [file for file in files if file != WEIGHTS]
    old = weight_files.read_settings(folder) if (folder / CONFIG).is_file() else config
    others += [CONFIG] if any(old.get(mark) != config.get(mark) for mark in MARKS) else []
    if others:
        raise BadInput(
            f"{folder} holds something else already ({others[0]}); write to a folder of its own"
        )
    weight_files.write(folder, config, tensors, WEIGHTS)


def _recognised(folder: Path) -> tuple[str, Config, Names, dict[str, Path]] | None:
    """The kind of head in a folder, its settings, the names of its tensors, and their files."""
    if not (folder / CONFIG).is_file():
        return None
    config = weight_files.read_settings(folder)
    for files in weight_files.weight_files(folder):
        where = weight_files.tensor_files(folder, files)
        for kind, (recognise, _) in READERS.items():
            if names := recognise(config, where):
                return kind, config, names, where
    return None


def _renamed(names: Collection[str], rules: Sequence[tuple[str, str]]) -> Names:
    """By rules (pattern, new name), the new names, and the names they were made of."""
    matches = ((re.fullmatch(old, name), new, name) for name in names for old, new in rules)
    return {match.expand(new): name for match, new, name in matches if match}


# Medusa ---------------------------------------------------------------------------------------


def _medusa_names(config: Config, names: Collection[str]) -> Names:
    """Which tensor is which of ours; empty if they are no Medusa heads."""
    if config.get("speculator_type", "medusa") != "medusa":
        return {}
    for layout, (block, projection) in MEDUSA.items():
        ours = ((block, r"heads.\1.blocks.\2.\3"), (projection, r"heads.\1.proj.weight"))
        found = _renamed(names, (*ours, (r"(token_map|pairs\.\w+)", r"\1")))
        alone = layout != "legacy" or len(found) == len(names)      # numbers might name anything
        if alone and any(".blocks." in name for name in found):
            return found
    return {}


def _medusa(config: Config, names: Names, state: Tensors, vocabulary: Vocabulary) -> MedusaHead:
    blocks = [name.split(".") for name in names if ".blocks." in name]  # heads.H.blocks.L.KIND
    heads, layers = (1 + max(int(name[part]) for name in blocks) for part in (1, 3))
    projections = _projections(config, state, heads)
    ids = state.pop("token_map", None)
    rows = len(next(iter(projections.values()))) if projections else 0
    token_map = _token_map(ids, rows if projections or ids is None else len(ids), vocabulary)
    known = config.get("vocab_size")
    form = MedusaConfig(
        num_heads=heads, num_layers=layers,
        hidden_size=int(state["heads.0.blocks.0.weight"].shape[1]),
        vocab_size=rows if rows and token_map is None else int(known or vocabulary.vocab_size),
        share_lm_head=not projections, bias=any(name[-1] == "bias" for name in blocks),
        base_model=_base_model(config),
        draft_vocab_size=None if token_map is None else len(token_map),
        pairs=len(state.get("pairs.tokens", ())),
    )  # fmt: skip
    must_fit("the set of Medusa heads", form, vocabulary)
    state |= projections
    if token_map is not None:
        state["token_map"] = token_map
    head = filled(MedusaHead, form, state, "the set of Medusa heads")
    if token_map is not None and form.share_lm_head:
        head.limit_vocabulary(token_map, vocabulary)
    return head


def _projections(config: Config, state: Tensors, heads: int) -> Tensors:
    """Each head's own table between hidden states and logits; empty if the target's serves."""
    scale, original = float(config.get("logit_scale") or 1.0), bool(config.get("original_lm_head"))
    names = [f"heads.{head}.proj.weight" for head in range(heads)]
    tables = {name: state[name] for name in names if name in state}
    if not tables or (original and scale == 1.0 and "token_map" not in state):
        return {}
    if original:
        tables = {name: tables[names[0]].clone() for name in names}
    if len({len(table) for table in tables.values()}) > 1:
        raise DrafterMismatch(
            "the Medusa heads have projections of different sizes; fetch the checkpoint again"
        )
    return {name: table * scale if scale != 1.0 else table for name, table in tables.items()}


def _token_map(ids: Tensor | None, rows: int, vocabulary: Vocabulary) -> Tensor | None:
    """The id of each row of projections that know some tokens alone; None if they know all."""
    if ids is None or len(ids) < rows or not rows:
        return None
    least, most, known = int(ids.min()), int(ids.max()), vocabulary.vocab_size
    if len(ids) > rows or most >= known or least < 0:
        raise DrafterMismatch(
            f"the draft heads map {rows} rows to {len(ids)} tokens up to {most}, "
            f"{vocabulary.name} has {known}; use heads trained for this target"
        )
    return ids.to(torch.int64)


def _vllm(head: MedusaHead) -> tuple[Config, Tensors]:
    """vLLM drops biases unless told of them, and takes any "num" with "heads" for their number."""
    if head.config.share_lm_head:
        raise BadInput(
            "the layout vllm holds a projection for every head, and these share the target's; copy "
            "it to them with unshared(target), or write the layout draftproof"
        )
    if head.config.draft_vocab_size is not None:
        raise BadInput("the layout vllm has no place for a smaller vocabulary; write draftproof")
    form, state, (block, projection) = head.config, head.state_dict(), MEDUSA[OWN]
    config = {
        "architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": form.hidden_size,
        "vocab_size": form.vocab_size, "num_heads": form.num_heads,
        "num_hidden_layers": form.num_layers, "medusa_fc_bias": form.bias,
        "original_lm_head": False, "max_paths": 64, "topk": 10,
        "base_model_name_or_path": form.base_model,
    }  # fmt: skip
    rules = (block, r"blocks.\1.layers.\2.\3"), (projection, r"lm_heads.\1.weight")
    return config, {theirs: state[ours] for theirs, ours in _renamed(state, rules).items()}


# ReDrafter ------------------------------------------------------------------------------------


def _redrafter_names(config: Config, names: Collection[str]) -> Names:
    """Which tensor is which of ours; empty if they are no recurrent drafter's."""
    found, kind = _renamed(names, REDRAFTER), config.get("speculator_type")
    known = kind or "rnn_w.weight" in found or any(key in config for key in REDRAFTER_SETTINGS)
    known = known or config.get("model_type") == "recurrent_drafting_drafter"
    whole = {"projection.weight", "input_proj.weight"} & found.keys()
    return found if known and whole and kind in (None, "redrafter") else {}


def _redrafter(
    config: Config, names: Names, state: Tensors, vocabulary: Vocabulary
) -> ReDrafterHead:
    tensorrt = any(theirs.startswith("drafter.") for theirs in names.values())
    layers = sum(name.endswith(".linear.weight") for name in state)
    projection, narrow = state.get("projection.weight"), state.get("input_proj.weight")
    shared = projection is None and bool(config.get("share_lm_head"))
    if projection is None and not shared:
        raise DrafterMismatch(
            "the recurrent drafter lacks its projection to the vocabulary; fetch the head again"
        )
    rows, width = projection.shape if projection is not None else (int(config["vocab_size"]), 0)
    width, inputs = narrow.shape if narrow is not None else (width, width)
    ids = state.pop("token_map", None)
    token_map = _token_map(ids, len(ids) if shared and ids is not None else rows, vocabulary)
    if token_map is not None:
        state["token_map"], rows = token_map, int(config["vocab_size"])
    form = ReDrafterConfig(
        hidden_size=inputs // 2, vocab_size=rows, exit_dim=width, num_layers=layers,
        steps=int(config.get("steps") or config.get("redrafter_draft_len_per_beam") or STEPS),
        rnn="rnn_w.weight" in state,
        rnn_activation=str(config.get("rnn_activation", "none" if tensorrt else "silu")),
        skip_u_at_first_step=bool(config.get("skip_u_at_first_step", tensorrt)),
        share_lm_head=shared, base_model=_base_model(config),
        draft_vocab_size=None if token_map is None else len(token_map),
    )  # fmt: skip
    must_fit("the recurrent drafter", form, vocabulary, padded=not shared or token_map is not None)
    if shared:
        some = torch.arange(vocabulary.vocab_size) if token_map is None else token_map
        table = lm_head_rows(vocabulary, some, state["input_proj.weight"])
        state["projection.weight"], state["projection.bias"] = table.weight, table.bias
    last = f"lm_head.{layers}"
    state = {name.replace("projection", last): tensor for name, tensor in state.items()}
    return filled(ReDrafterHead, form, state, "the recurrent drafter")


def _apple(head: ReDrafterHead) -> tuple[Config, Tensors]:
    """Apple's ml-recurrent-drafter; TensorRT-LLM's converter reads the same folder.

    Apple's engine applies SiLU in the recurrence and TensorRT-LLM's does not, whatever a head was
    trained for: train with the `rnn_activation` and `skip_u_at_first_step` of the engine to use.
    """
    form = head.config
    if form.share_lm_head:
        raise BadInput(
            "the layout apple holds a projection to the vocabulary, and this head shares the "
            "target's; give it a copy with unshared(), or write the layout draftproof"
        )
    if form.draft_vocab_size is not None:
        raise BadInput("the layout apple has no place for a draft vocabulary; write draftproof")
    config = {
        "architectures": ["Drafter"], "model_type": "recurrent_drafting_drafter",
        "vocab_size": form.vocab_size, "num_draft_layers": form.num_layers,
        "hidden_size": form.hidden_size, "redrafter_hidden_size": form.hidden_size,
        "exit_dim": form.exit_dim, "redrafter_exit_dim": form.exit_dim,
        "rnn": form.rnn, "redrafter_is_rnn": form.rnn, "redrafter_num_layers": form.num_layers,
        "redrafter_draft_len_per_beam": form.steps, "rnn_activation": form.rnn_activation,
        "skip_u_at_first_step": form.skip_u_at_first_step, "num_lookback_tokens": 1,
        "base_model_name_or_path": form.base_model,
    }  # fmt: skip
    return config, dict(head.state_dict())


# Both -----------------------------------------------------------------------------------------


def _own(head: MedusaHead | ReDrafterHead) -> tuple[Config, Tensors]:
    """Our own layout: all weights but a recurrent drafter's projection shared with the target."""
    form, state = head.config, dict(head.state_dict())
    if form.share_lm_head:
        recurrent = isinstance(head, ReDrafterHead)
        shared = f"lm_head.{form.num_layers}." if recurrent else "projection."
        state = {name: one for name, one in state.items() if not name.startswith(shared)}
    return {"speculator_type": head.kind, **asdict(form)}, state


def _base_model(config: Config) -> str:
    return str(config.get("base_model") or config.get("base_model_name_or_path") or "")


READERS = {"redrafter": (_redrafter_names, _redrafter), "medusa": (_medusa_names, _medusa)}
"""By kind, the names of a head's tensors in a file, and the head they make with the settings."""
WRITERS: dict[str, dict[str, Callable[[Any], tuple[Config, Tensors]]]] = {
    "medusa": {OWN: _own, "vllm": _vllm}, "redrafter": {OWN: _own, "apple": _apple},
}  # fmt: skip
"""By kind and layout, the settings and tensors of a checkpoint."""
