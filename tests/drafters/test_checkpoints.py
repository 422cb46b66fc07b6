"""Folders of draft heads: crashes, strangers, misfits; and every layout of recurrent drafters."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import (
    BASE,
    LEGACY,
    SIZE,
    Config,
    Tensors,
    blocks_alone,
    folder_of,
    made,
    merged,
    numbered,
    weights,
)
from safetensors.torch import load_file
from tiny import VOCAB, target

from draftproof.drafters import weight_files
from draftproof.drafters.checkpoints import is_head, read_head, write_head
from draftproof.drafters.medusa import MedusaHead
from draftproof.drafters.redrafter import ReDrafterConfig, ReDrafterHead
from draftproof.errors import BadInput, DrafterMismatch, DraftproofError, ModelNotFound


def test_a_crash_leaves_nothing_that_reads_as_a_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether there was a head before or not, whether weights or settings were being written."""
    write, put = weight_files.save, weight_files.replace

    def no_weights(tensors: Tensors, file: Path) -> None:
        write(tensors, file)
        raise OSError("the disk is full")

    def no_settings(file: Path, writing: Any) -> None:
        if file.name == "config.json":
            raise OSError("the disk is full")
        put(file, writing)

    for before in (False, True):
        for name, broken in (("save", no_weights), ("replace", no_settings)):
            folder = tmp_path / f"{before}{name}"
            if before:
                write_head(made(), folder)
            with monkeypatch.context() as patched, pytest.raises(OSError, match="full"):
                patched.setattr(weight_files, name, broken)
                write_head(made(layers=2), folder)
            assert not is_head(folder) and not list(folder.glob(".*"))
            write_head(made(layers=2), folder)
            assert is_head(folder)


def test_nothing_else_is_overwritten(tmp_path: Path) -> None:
    """Models, merged models, heads of another layout; a head of the same layout is."""
    both = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "medusa_num_heads": 3}
    folder_of(tmp_path / "model", {"model_type": "llama"}, BASE)
    folder_of(tmp_path / "merged", both, merged(weights()) | BASE)
    write_head(made(), tmp_path / "other", "vllm")
    for folder in (tmp_path / "model", tmp_path / "merged", tmp_path / "other"):
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        with pytest.raises(BadInput, match="something else already"):
            write_head(made(), folder)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    write_head(made(), tmp_path / "mine")
    (tmp_path / "mine" / "optimizer.pt").write_bytes(b"state of a training run")
    write_head(made(layers=2), tmp_path / "mine")
    head = read_head(tmp_path / "mine", target())
    assert isinstance(head, MedusaHead) and head.config.num_layers == 2
    with pytest.raises(BadInput, match=r"gguf.*draftproof, vllm"):
        write_head(made(), tmp_path, "gguf")
    (tmp_path / "new").touch()                                          # files follow the umask
    files = [*(tmp_path / "mine").glob("[cm]*"), tmp_path / "new"]
    assert len({file.stat().st_mode for file in files}) == 1


# Mistakes -------------------------------------------------------------------------------------


def refused(folder: Path, kind: type[DraftproofError], *words: str) -> None:
    """One sentence with all words."""
    with pytest.raises(kind) as error:
        read_head(folder, target())
    text = str(error.value)
    assert "\n" not in text and all(word in text for word in words), text


def test_heads_of_another_target_and_broken_ones_are_one_sentence(tmp_path: Path) -> None:
    tensors, head = numbered(weights()), {"speculator_type": "medusa"}
    gap = {name: tensor for name, tensor in tensors.items() if name[:2] != "1."}
    cases: dict[str, tuple[Config, Tensors, tuple[str, ...]]] = {
        "wide": ({}, numbered(weights(size=48)), ("48", "32")),
        "large": ({}, numbered(weights(vocab=4096)), ("4096", "40")),
        "shared": ({"vocab_size": 4096}, blocks_alone(weights()), ("4096", "40")),
        "gap": ({}, gap, ("lack", "heads.1")),
        "odd": ({}, tensors | {"2.0.linear.bias": torch.zeros(7)}, ("(7,)", "(32,)")),
        "uneven": ({}, tensors | {"2.1.weight": torch.zeros(9, SIZE)}, ("different sizes",)),
    }
    for name, (config, given, words) in cases.items():
        refused(folder_of(tmp_path / name, config, given), DrafterMismatch, *words)
    file = folder_of(tmp_path / "cut", head, tensors) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:200])
    assert is_head(tmp_path / "cut")                            # reading says what is wrong
    refused(tmp_path / "cut", ModelNotFound, "model.safetensors", "cannot be read")
    (folder_of(tmp_path / "settings", {}, tensors) / "config.json").write_text("{")
    refused(tmp_path / "settings", ModelNotFound, "config.json", "cannot be read")
    folder_of(tmp_path / "words", {**head, "vocab_size": "many"}, blocks_alone(weights()))
    refused(tmp_path / "words", ModelNotFound, "config.json", "many")
    refused(tmp_path / "nowhere", ModelNotFound, "no draft head")


class _Evil:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def test_pickles_are_never_run(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "evil", {"speculator_type": "medusa"}, {}, LEGACY)
    for write in (partial(pickle.dump, protocol=2), torch.save):
        with (folder / LEGACY).open("wb") as file:
            write({"0.0.linear.weight": _Evil(tmp_path / "run")}, file)
        refused(folder, ModelNotFound, LEGACY, "cannot be read")
        assert not (tmp_path / "run").exists()


def test_models_are_no_heads(tmp_path: Path) -> None:
    assert not is_head(folder_of(tmp_path / "model", {"model_type": "llama"}, BASE))
    table = {"lm_head.weight": torch.zeros(VOCAB, SIZE)}
    assert not is_head(folder_of(tmp_path / "table", {"model_type": "llama"}, BASE | table))
    assert not is_head(folder_of(tmp_path / "numbers", {},
                                 numbered(weights()) | {"norm.weight": torch.ones(1)}))
    assert not is_head(folder_of(tmp_path / "other", {"speculator_type": "eagle"},
                                 numbered(weights())))
    assert not is_head(tmp_path) and not is_head(tmp_path / "nowhere")


# Recurrent drafters ---------------------------------------------------------------------------

FORMS: dict[str, Config] = {
    "published": {}, "two blocks": {"num_layers": 2, "steps": 3}, "narrow": {"exit_dim": 40},
    "sums": {"rnn": False}, "sums, narrow": {"rnn": False, "exit_dim": 40},
    "tensorrt-llm": {"rnn_activation": "none", "skip_u_at_first_step": True},
    "shared": {"share_lm_head": True},
}  # fmt: skip


def random_head(**form: Any) -> ReDrafterHead:
    torch.manual_seed(0)
    head = ReDrafterHead.fresh(target(), **form)
    for weight in head.parameters():
        if weight.requires_grad:
            weight.data.normal_()
    return head


def assert_same(folder: Path, head: ReDrafterHead, form: ReDrafterConfig | None = None) -> None:
    """The folder holds these very tensors, in this form."""
    found = read_head(folder, target())
    assert isinstance(found, ReDrafterHead) and found.config == (form or head.config)
    mine, theirs = head.state_dict(), found.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert found.projection.weight.requires_grad != found.config.share_lm_head


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_a_recurrent_drafter_is_written_and_read(
    form: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Ours; a projection shared with the target is not written."""
    head = random_head(**FORMS[form]).to(dtype)
    write_head(head, tmp_path)
    assert_same(tmp_path, head)
    held = load_file(tmp_path / "model.safetensors")
    assert form != "shared" or all(VOCAB not in tensor.shape for tensor in held.values())
    assert json.loads((tmp_path / "config.json").read_text())["speculator_type"] == "redrafter"


@pytest.mark.parametrize("form", FORMS)
def test_apples_layout_is_written_and_read(form: str, tmp_path: Path) -> None:
    """With the settings that their engine and TensorRT-LLM's converter ask for, by their names."""
    head = random_head(**FORMS[form])
    if form == "shared":
        with pytest.raises(BadInput, match="unshared"):
            write_head(head, tmp_path, "apple")
        states, own = torch.randn(3, 2, SIZE, dtype=torch.float64), head.unshared()
        torch.testing.assert_close(own.logits(*states.unbind(1)), head.logits(*states.unbind(1)))
        head = own
    write_head(head, tmp_path, "apple")
    assert_same(tmp_path, head)
    config, wanted = json.loads((tmp_path / "config.json").read_text()), head.config
    theirs = {"vocab_size": VOCAB, "hidden_size": SIZE, "exit_dim": wanted.exit_dim}
    theirs |= {"rnn": wanted.rnn, "num_draft_layers": wanted.num_layers, **APPLE}
    assert theirs.items() <= config.items()
    names = set(load_file(tmp_path / "model.safetensors"))
    linears = [f"lm_head.{one}.linear" for one in range(wanted.num_layers)]
    blocks = {f"{name}.{kind}" for name in linears for kind in ("weight", "bias")}
    rest = {"rnn_u.weight", "rnn_u.bias", "rnn_w.weight"} if wanted.rnn else set()
    narrow = {"input_proj.weight", "input_proj.bias"} if wanted.exit_dim != 2 * SIZE else set()
    assert names == blocks | rest | narrow | {f"lm_head.{wanted.num_layers}.weight"}


APPLE = {"model_type": "recurrent_drafting_drafter"}
RENAMES: dict[str, tuple[tuple[str, str], ...]] = {
    "as it is": (), "older": (("input_proj.", "input_projs."), ("lm_head.", "lm_heads.")),
    "numbered": (("lm_head.", "0."),),
}  # fmt: skip


@pytest.mark.parametrize("file", ["model.safetensors", "model.pt"])
@pytest.mark.parametrize("rename", RENAMES)
@pytest.mark.parametrize("form", ["published", "two blocks", "narrow", "sums"])
def test_every_family_of_apples_names_is_read(
    form: str, rename: str, file: str, tmp_path: Path
) -> None:
    """How many blocks there are is read off the tensors."""
    head = random_head(**{**FORMS[form], "steps": 5})
    settings = {**APPLE, "hidden_size": SIZE, "num_draft_layers": 9}
    tensors = head.state_dict()
    for old, new in RENAMES[rename]:
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    folder = folder_of(tmp_path, settings, tensors, file)
    assert_same(folder, head, replace(head.config, base_model=""))


@pytest.mark.parametrize("form", ["published", "two blocks", "narrow"])
def test_the_drafter_of_a_tensorrt_llm_checkpoint_is_read(form: str, tmp_path: Path) -> None:
    """Beside the base model's tensors, and run as that engine runs it."""
    head = random_head(**FORMS[form])
    last = f"lm_head.{head.config.num_layers}.weight"
    tensors = {"base_model.lm_head.weight": torch.zeros(VOCAB, SIZE)}
    for name, tensor in head.state_dict().items():
        theirs = "lm_head.weight" if name == last else name.replace("lm_head.", "layers.")
        tensors[f"drafter.{theirs}"] = tensor
    settings = {"architecture": "ReDrafterForCausalLM", "redrafter_num_layers": 1}
    settings |= {"redrafter_draft_len_per_beam": 4}
    theirs = {"rnn_activation": "none", "skip_u_at_first_step": True, "steps": 4, "base_model": ""}
    folder = folder_of(tmp_path, settings, tensors, "rank0.safetensors")
    assert_same(folder, head, replace(head.config, **theirs))


def test_recurrent_drafters_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """Of another target, with both numbers; with a tensor missing or misshapen, by its name."""
    for layout in ("draftproof", "apple"):
        write_head(ReDrafterHead.fresh(target(hidden_size=64)), tmp_path / layout, layout)
        refused(tmp_path / layout, DrafterMismatch, "64 numbers", "32")
    write_head(ReDrafterHead(ReDrafterConfig(SIZE, 5000, 64)), tmp_path / "many")
    refused(tmp_path / "many", DrafterMismatch, "5000 tokens", str(VOCAB))
    whole, settings = random_head(num_layers=2).state_dict(), APPLE
    words = {"rnn_u.bias": "rnn_u.bias", "lm_head.0.linear.bias": "lm_head.0"}
    for missing, word in (words | {"lm_head.2.weight": "draft"}).items():
        tensors = {name: tensor for name, tensor in whole.items() if name != missing}
        refused(folder_of(tmp_path / missing, settings, tensors), DraftproofError, word)
    odd = {**whole, "rnn_w.weight": torch.zeros(SIZE, 31)}
    refused(folder_of(tmp_path / "shape", settings, odd), DrafterMismatch, "rnn_w", "31")
