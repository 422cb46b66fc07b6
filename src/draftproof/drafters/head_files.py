"""Files of Medusa and recurrent heads: our own, and those of other engines.

The number of heads and layers is taken from the tensors, because settings of published heads are
sometimes wrong. Of a merged model only the heads' tensors are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftproof.drafters import checkpoint, weight_files
from draftproof.drafters.base import Drafter, Vocabulary, must_fit
from draftproof.drafters.bigram import MOST, Bigrams
from draftproof.drafters.checkpoint import Checkpoint, Format
from draftproof.drafters.heads import DraftHead, must_hold
from draftproof.drafters.medusa import MedusaConfig, MedusaHead
from draftproof.drafters.redrafter import STEPS, ReDrafterConfig, ReDrafterHead
from draftproof.drafters.weight_files import CONFIG
from draftproof.errors import BadInput, DrafterMismatch, ModelNotFound, first_line

WEIGHTS = "model.safetensors"
KIND = "speculator_type"
"""The setting that names the kind of a head written here."""
BLOCK, PROJECTION = r"heads.\1.blocks.\2.\3", r"heads.\1.proj.weight"
LINEAR, LM_HEAD = r"lm_head.\1.linear.\2", r"lm_head.\1.weight"
NAMES: dict[str, dict[str, str]] = {
    "redrafter": {
        # ours, and the three families of Apple's ml-recurrent-drafter
        r"input_projs?\.(weight|bias)": r"input_proj.\1",
        r"rnn_(u\.weight|u\.bias|w\.weight)": r"rnn_\1",
        r"(?:lm_heads?|0)\.(\d+)\.linear\.(weight|bias)": LINEAR,
        r"(?:lm_heads?|0)\.(\d+)\.weight": LM_HEAD,
        r"token_map": "token_map",
        # the drafter's part of a checkpoint of TensorRT-LLM
        r"drafter\.(input_proj|rnn_u|rnn_w)\.(weight|bias)": r"\1.\2",
        r"drafter\.layers\.(\d+)\.linear\.(weight|bias)": LINEAR,
        r"drafter\.lm_head\.weight": "lm_head.last.weight",
        r".*": "",
    },
    "medusa": {
        r"heads\.(\d+)\.blocks\.(\d+)\.(weight|bias)": BLOCK,
        r"heads\.(\d+)\.proj\.weight": PROJECTION,
        r"(token_map|pairs\.\w+)": r"\1",
        # vLLM
        r"(?:medusa_heads\.)?blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)": BLOCK,
        r"(?:medusa_heads\.)?lm_heads\.(\d+)\.weight": PROJECTION,
        # TensorRT-LLM and NVIDIA ModelOpt, next to the target's tensors
        r"(?:.+\.)?medusa_heads\.(\d+)\.medusa_layers\.(\d+)\.linear\.(weight|bias)": BLOCK,
        r"(?:.+\.)?medusa_heads\.(\d+)\.lm_head\.weight": PROJECTION,
        # FasterDecoding/Medusa and TGI: inside a merged model, or alone
        r"(?:(?:.+\.)?medusa_head\.)?(\d+)\.(\d+)\.linear\.(weight|bias)": BLOCK,
        r"(?:(?:.+\.)?medusa_head\.)?(\d+)\.\d+\.weight": PROJECTION,
        r".*": "",
    },
}
"""Patterns of tensor names in files and our names, by kind; other tensors have no name."""
MARKS = {"redrafter": "rnn_w.weight", "medusa": "heads.0.blocks.0.weight"}
"""A tensor that every head of this kind has."""
SUMS = ("rnn", "redrafter_is_rnn")
"""Settings that say, if false, that a recurrent drafter has no weights for its recurrence."""


def _recognises(kind: str, source: Checkpoint) -> bool:
    if KIND in source.settings:
        return bool(source.settings[KIND] == kind)
    try:
        return (source.folder / CONFIG).is_file() and _named(kind, source) is not None
    except ModelNotFound:
        return False


def _named(kind: str, source: Checkpoint) -> tuple[dict[str, str], dict[str, Path]] | None:
    """The file's name and the file of each of our tensors; None if this is not such a head.

    A merged model may be in .safetensors and its heads in a pickle."""
    if source.path.is_file():
        kinds = [[source.path]]
    else:
        kinds = list(weight_files.weight_files(source.folder))
    for files in kinds:
        where = weight_files.tensor_files(source.folder, files)
        names = checkpoint.renamed(where, NAMES[kind])
        sums = kind == "redrafter" and any(source.settings.get(key) is False for key in SUMS)
        if (sums and names) or MARKS[kind] in names:
            return names, where
    return None


def read(kind: str, source: Checkpoint, vocabulary: Vocabulary) -> DraftHead:
    """The head in a checkpoint, in the dtype of its file.

    Raises:
        ModelNotFound: There is none, or it cannot be read.
        DrafterMismatch: It is not for this target.
    """
    settings = source.settings
    weight_files.must_be_possible(settings, f"the {kind} head in {source.path}")
    checkpoint.must_be_for(settings, vocabulary, f"the {kind} head {source.path.name}")
    known = _named(kind, source)
    if known is None:
        raise ModelNotFound(f"{source.path} holds no {kind} head known here; give another folder")
    names, files = known
    state = weight_files.read_tensors(names, files)
    try:
        if kind == "medusa":
            return _filled(_medusa(settings, state, vocabulary), state, vocabulary)
        if any(name.startswith("drafter.") for name in names.values()):     # as that engine runs
            settings = {"rnn_activation": "none", "skip_u_at_first_step": True, **settings}
        return _filled(_redrafter(settings, state, vocabulary), state, vocabulary)
    except (TypeError, ValueError, KeyError, IndexError, RuntimeError) as error:
        if isinstance(error, BadInput):
            raise
        where, why = source.folder / CONFIG, first_line(error)
        raise ModelNotFound(f"the settings in {where} describe no draft head: {why}") from error


def write_head(head: DraftHead, folder: str | Path) -> None:
    """Write a head for `read_head`, without the weights that it shares with the target.

    Overwrites a head of the same kind; raises BadInput for a folder that holds other weights.

    Args:
        head: The head.
        folder: The folder to write to; created if necessary.
    """
    folder = Path(folder)
    files = [file.name for kind in weight_files.weight_files(folder) for file in kind]
    others = [file for file in files if file != WEIGHTS]
    if (folder / CONFIG).is_file():
        settings = weight_files.read_settings(folder)
        others += [CONFIG] if settings.get(KIND) != head.kind else []
    if others:
        raise BadInput(
            f"{folder} holds something else already ({others[0]}); write to a folder of its own"
        )
    tensors = {name: tensor for name, tensor in head.state_dict().items()
               if not name.startswith("projection.")}  # fmt: skip
    if isinstance(head, MedusaHead) and head.pairs is not None:
        columns = zip(Bigrams._fields[:4], head.pairs[:4], strict=True)
        tensors |= {f"pairs.{name}": column for name, column in columns}
    settings = {KIND: head.kind, **asdict(head.config)}
    weight_files.write(folder, settings, tensors, WEIGHTS)


def _medusa(
    settings: dict[str, Any], state: dict[str, Tensor], vocabulary: Vocabulary
) -> MedusaConfig:
    """The form of the heads with these tensors."""
    blocks = [name.split(".") for name in state if ".blocks." in name]  # heads.H.blocks.L.KIND
    heads, layers = (
        weight_files.numbered((int(name[place]) for name in blocks), what)
        for place, what in ((1, "heads"), (3, "heads.0.blocks"))
    )
    first = state["heads.0.blocks.0.weight"]
    if first.dim() != 2:
        raise DrafterMismatch(
            f"the first block of the Medusa heads has shape {tuple(first.shape)}, a matrix was "
            "expected; fetch the heads again"
        )
    if float(settings.get("logit_scale") or 1) != 1:
        raise DrafterMismatch(
            f"the Medusa heads scale their logits by {settings['logit_scale']}, which is not known "
            "here; use others"
        )
    for head in range(heads):
        if settings.get("original_lm_head"):
            state.pop(f"heads.{head}.proj.weight", None)
        for layer in range(layers):                                     # vLLM's may have none
            state.setdefault(f"heads.{head}.blocks.{layer}.bias", torch.zeros_like(first[0]))
    projection = state.get("heads.0.proj.weight")
    form = _form(settings, state, projection, vocabulary)
    return MedusaConfig(num_heads=heads, num_layers=layers, hidden_size=first.shape[1],
                        share_lm_head=projection is None, **form)  # fmt: skip


def _redrafter(
    settings: dict[str, Any], state: dict[str, Tensor], vocabulary: Vocabulary
) -> ReDrafterConfig:
    """The form of the head with these tensors."""
    layers = sum(name.endswith(".linear.weight") for name in state)
    narrow, last = state.get("input_proj.weight"), None
    shared = bool(settings.get("share_lm_head"))
    if not shared:
        last = state.pop("lm_head.last.weight", state.get(f"lm_head.{layers}.weight"))
        if last is None:
            raise DrafterMismatch(
                "the recurrent drafter lacks its projection to the vocabulary; fetch it again"
            )
        state[f"lm_head.{layers}.weight"] = last
    if "rnn_w.weight" not in state:                         # it sums the embeddings
        settings = {**settings, "rnn_activation": "none"}
        like = state["input_proj.weight"] if narrow is not None or last is None else last
        for name in ("rnn_w", "rnn_u"):
            state[f"{name}.weight"] = torch.eye(like.shape[1] // 2, dtype=like.dtype)
        state["rnn_u.bias"] = torch.zeros_like(state["rnn_u.weight"][0])
    form, hidden = _form(settings, state, last, vocabulary), len(state["rnn_w.weight"])
    return ReDrafterConfig(
        hidden_size=hidden, exit_dim=2 * hidden if narrow is None else len(narrow),
        num_layers=layers, share_lm_head=shared,
        steps=int(settings.get("steps") or settings.get("redrafter_draft_len_per_beam") or STEPS),
        rnn_activation=str(settings.get("rnn_activation", "silu")),
        skip_u_at_first_step=bool(settings.get("skip_u_at_first_step")), **form,
    )  # fmt: skip


def _form(
    settings: Mapping[str, Any], state: dict[str, Tensor], projection: Tensor | None,
    vocabulary: Vocabulary,
) -> dict[str, Any]:
    """The draft vocabulary of a head, and the target it was trained for. own: its projection, if
    any."""
    ids, known = state.get("token_map"), vocabulary.vocab_size
    rows = len(projection) if projection is not None else len(ids) if ids is not None else 0
    if ids is not None and len(ids) < rows:                 # vLLM's heads may know all, with a map
        ids = None
    if ids is not None and (ids.dim() != 1 or not len(ids) or ids.is_floating_point()
                            or len(torch.unique(ids)) < len(ids)):
        raise DrafterMismatch(
            f"the token map of the draft heads is no list of different tokens ({ids.dtype}, shape "
            f"{tuple(ids.shape)}); fetch the heads again"
        )
    if ids is not None and (len(ids) > rows or not 0 <= int(ids.min()) <= int(ids.max()) < known):
        raise DrafterMismatch(
            f"the draft heads map {rows} rows to {len(ids)} tokens up to {int(ids.max())}, "
            f"{vocabulary.name} has {known}; use heads trained for this target"
        )
    whole = projection is not None and ids is None
    every = rows if whole else int(settings.get("vocab_size") or known)
    base = settings.get("base_model") or settings.get("base_model_name_or_path") or ""
    few = None if ids is None else len(ids)
    return {"vocab_size": every, "draft_vocab_size": few, "base_model": str(base)}


def _filled(
    form: MedusaConfig | ReDrafterConfig, state: dict[str, Tensor], vocabulary: Vocabulary
) -> DraftHead:
    """The head of this form with these tensors (not copied), and the target's shared weights."""
    with torch.device("meta"):
        head = MedusaHead(form) if isinstance(form, MedusaConfig) else ReDrafterHead(form)
    must_fit(f"the {head.kind} head", form.hidden_size, form.vocab_size, vocabulary)
    wanted = head.state_dict()
    must_hold(state, wanted, f"the {head.kind} head")
    head.load_state_dict({name: state[name] for name in wanted}, assign=True)
    if head.token_map is not None:
        head.token_map = head.token_map.to(torch.int64)
        if head.config.share_lm_head:
            head.limit_vocabulary(head.token_map, vocabulary)
    if isinstance(head, MedusaHead) and "pairs.tokens" in state:
        names = [f"pairs.{name}" for name in Bigrams._fields[:4]]
        if missing := [name for name in names if name not in state]:
            raise DrafterMismatch(f"the Medusa heads lack {missing[0]}; fetch them again")
        head.pairs = Bigrams._make([*(state[name] for name in names), MOST])
        head.pairs.check(vocabulary.vocab_size)
    return head


def _format(kind: str, title: str) -> Format:
    def recognises(source: Checkpoint) -> bool:
        return _recognises(kind, source)

    def load(source: Checkpoint, target: Vocabulary) -> Drafter:
        return read(kind, source, target).drafter(target)

    return Format(title, recognises, load, keys=NAMES[kind], shaped=kind == "medusa")


FORMATS = (_format("redrafter", "ReDrafter head"), _format("medusa", "Medusa heads"))
