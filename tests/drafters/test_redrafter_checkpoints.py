"""Recurrent drafters in checkpoints: every layout is read as what it is, ours and Apple's are written and read again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import VOCAB, prompts, target
from torch import Tensor

from draftproof.drafters.checkpoints import is_head, read_head, write_head
from draftproof.drafters.redrafter import ReDrafterConfig, ReDrafterHead
from draftproof.engine.engine import Engine
from draftproof.errors import BadInput, DrafterMismatch, ModelNotFound

FORMS: dict[str, dict[str, Any]] = {
    "published": {},
    "two blocks": {"num_layers": 2, "steps": 3},
    "narrow": {"exit_dim": 40},
    "sums": {"rnn": False},
    "sums, narrow": {"rnn": False, "exit_dim": 40},
    "tensorrt-llm": {"rnn_activation": "none", "skip_u_at_first_step": True},
    "shared": {"share_lm_head": True},
}


def random_head(**form: Any) -> ReDrafterHead:
    torch.manual_seed(0)
    head = ReDrafterHead.fresh(target(), **form)
    for weight in head.parameters():
        if weight.requires_grad:
            weight.data.normal_()
    return head


def same(one: ReDrafterHead, other: object) -> bool:
    assert isinstance(other, ReDrafterHead)
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def put(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], file: str = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file(tensors, folder / file)
    else:
        torch.save(tensors, folder / file)
    return folder


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_what_is_written_is_read(form: str, dtype: torch.dtype, tmp_path: Path) -> None:
    head = random_head(**FORMS[form]).to(dtype)
    write_head(head, tmp_path)
    found = read_head(tmp_path, target())
    assert same(head, found) and found.config == head.config  # type: ignore[attr-defined]
    assert json.loads((tmp_path / "config.json").read_text())["speculator_type"] == "redrafter"
    assert is_head(tmp_path)


def test_what_is_written_follows_the_umask(tmp_path: Path) -> None:
    write_head(random_head(), tmp_path / "head")
    (tmp_path / "other").touch()
    modes = {file.stat().st_mode for file in (*(tmp_path / "head").iterdir(), tmp_path / "other")}
    assert len(modes) == 1


def test_a_shared_projection_is_not_written_and_stays_frozen(tmp_path: Path) -> None:
    head = random_head(share_lm_head=True)
    write_head(head, tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    assert all(VOCAB not in tensor.shape for tensor in held.values())
    found = read_head(tmp_path, target())
    assert isinstance(found, ReDrafterHead) and not found.projection.weight.requires_grad and found.rnn_w.weight.requires_grad


@pytest.mark.parametrize("form", [form for form in FORMS if form != "shared"])
def test_apples_layout_is_written_and_read(form: str, tmp_path: Path) -> None:
    """With the settings that their engine and TensorRT-LLM's converter ask for, by their names."""
    head = random_head(**FORMS[form])
    write_head(head, tmp_path, "apple")
    found = read_head(tmp_path, target())
    assert same(head, found) and found.config == head.config  # type: ignore[attr-defined]
    config, wanted = json.loads((tmp_path / "config.json").read_text()), head.config
    assert config["model_type"] == "recurrent_drafting_drafter"
    theirs = {"vocab_size": VOCAB, "hidden_size": 32, "exit_dim": wanted.exit_dim, "num_draft_layers": wanted.num_layers}
    assert {**theirs, "rnn": wanted.rnn}.items() <= config.items()
    names = set(load_file(tmp_path / "model.safetensors"))
    blocks = {f"lm_head.{block}.linear.{kind}" for block in range(wanted.num_layers) for kind in ("weight", "bias")}
    rest = {"rnn_u.weight", "rnn_u.bias", "rnn_w.weight"} if wanted.rnn else set()
    narrow = {"input_proj.weight", "input_proj.bias"} if wanted.exit_dim != 64 else set()
    assert names == blocks | rest | narrow | {f"lm_head.{wanted.num_layers}.weight"}


def test_a_shared_head_goes_to_apple_with_a_projection_of_its_own(tmp_path: Path) -> None:
    head = random_head(share_lm_head=True)
    with pytest.raises(BadInput, match="unshared"):
        write_head(head, tmp_path, "apple")
    own = head.unshared()
    write_head(own, tmp_path, "apple")
    found = read_head(tmp_path, target())
    assert same(own, found) and isinstance(found, ReDrafterHead) and found.projection.weight.requires_grad
    states = torch.randn(3, 2, 32, dtype=torch.float64)
    torch.testing.assert_close(found.logits(*states.unbind(1)), head.logits(*states.unbind(1)))


def _as_is(name: str) -> str:
    return name


def _older(name: str) -> str:
    return name.replace("input_proj.", "input_projs.").replace("lm_head.", "lm_heads.")


def _numbered(name: str) -> str:
    return name.replace("lm_head.", "0.")


@pytest.mark.parametrize("file", ["model.safetensors", "model.pt"])
@pytest.mark.parametrize("rename", [_as_is, _older, _numbered])
@pytest.mark.parametrize("form", ["published", "two blocks", "narrow", "sums"])
def test_every_family_of_apples_names_is_read(form: str, rename: Callable[[str], str], file: str, tmp_path: Path) -> None:
    head = random_head(**{**FORMS[form], "steps": 5})
    settings = {"model_type": "recurrent_drafting_drafter", "hidden_size": 32, "vocab_size": VOCAB, "num_draft_layers": 9}
    put(tmp_path, settings, {rename(name): tensor for name, tensor in head.state_dict().items()}, file)
    found = read_head(tmp_path, target())
    assert same(head, found), "how many blocks there are is told by the tensors"
    assert isinstance(found, ReDrafterHead) and found.config == replace(head.config, base_model="")


@pytest.mark.parametrize("form", ["published", "two blocks", "narrow"])
def test_the_drafter_of_a_tensorrt_llm_checkpoint_is_read(form: str, tmp_path: Path) -> None:
    """Beside the base model's tensors, and run as that engine runs it."""
    head = random_head(**FORMS[form])
    last = f"lm_head.{head.config.num_layers}.weight"
    names = {name: f"drafter.{name.replace('lm_head.', 'layers.')}" for name in head.state_dict()}
    tensors = {names[name]: tensor for name, tensor in head.state_dict().items() if name != last}
    tensors |= {"drafter.lm_head.weight": head.projection.weight.detach()}
    tensors |= {"base_model.lm_head.weight": torch.zeros(VOCAB, 32), "base_model.transformer.layers.0.fc.weight": torch.ones(3)}
    settings = {"architecture": "ReDrafterForCausalLM", "redrafter_num_layers": 1, "redrafter_draft_len_per_beam": 4}
    found = read_head(put(tmp_path, settings, tensors, "rank0.safetensors"), target())
    assert same(head, found) and isinstance(found, ReDrafterHead)
    wanted = replace(head.config, rnn_activation="none", skip_u_at_first_step=True, steps=4, base_model="")
    assert found.config == wanted


def test_a_head_that_was_read_drafts(tmp_path: Path) -> None:
    write_head(random_head(), tmp_path)
    wanted = [one.tokens for one in Engine(target()).generate(prompts(3), max_new_tokens=12)]
    drafter = read_head(tmp_path, target()).drafter(target())
    done = Engine(target(), drafter, budget=6).generate(prompts(3), max_new_tokens=12)
    assert [one.tokens for one in done] == wanted and all(one.stats.drafted for one in done)


def test_it_is_as_large_as_published() -> None:
    """For a model of 7 billion parameters: 67.1 M in the block, 262 M in the projection, 33.6 M in the recurrence."""
    with torch.device("meta"):
        head = ReDrafterHead(ReDrafterConfig(4096, 32000, 8192))
    sizes = [
        sum(weight.numel() for weight in part.parameters())
        for part in (head.lm_head[0], head.projection, torch.nn.ModuleList([head.rnn_u, head.rnn_w]))
    ]
    assert [round(size / 1e6, 1) for size in sizes] == [67.1, 262.1, 33.6]


def test_heads_of_another_target_are_refused_with_both_numbers(tmp_path: Path) -> None:
    wide = target(hidden_size=64)
    for layout in ("draftproof", "apple"):
        folder = tmp_path / layout
        write_head(ReDrafterHead.fresh(wide), folder, layout)
        with pytest.raises(DrafterMismatch, match=r"64 numbers.* 32"):
            read_head(folder, target())
    many = ReDrafterHead(ReDrafterConfig(32, 5000, 64))
    write_head(many, tmp_path / "many")
    with pytest.raises(DrafterMismatch, match=rf"5000 tokens.* {VOCAB}"):
        read_head(tmp_path / "many", target())


def test_what_is_missing_or_misshapen_is_named(tmp_path: Path) -> None:
    head = random_head(num_layers=2)
    settings = {"model_type": "recurrent_drafting_drafter"}
    for missing in ("rnn_u.bias", "lm_head.0.linear.bias"):
        tensors = {name: tensor for name, tensor in head.state_dict().items() if name != missing}
        with pytest.raises(DrafterMismatch, match=missing):
            read_head(put(tmp_path / missing, settings, tensors), target())
    tensors = {name: tensor for name, tensor in head.state_dict().items() if name != "lm_head.2.weight"}
    with pytest.raises((DrafterMismatch, ModelNotFound)):
        read_head(put(tmp_path / "projection", settings, tensors), target())
    tensors = {**head.state_dict(), "rnn_w.weight": torch.zeros(32, 31)}
    with pytest.raises(DrafterMismatch, match="rnn_w"):
        read_head(put(tmp_path / "shape", settings, tensors), target())


def test_other_heads_and_models_are_not_taken_for_it(tmp_path: Path) -> None:
    block = {"0.0.linear.weight": torch.zeros(32, 32), "0.0.linear.bias": torch.zeros(32)}
    medusa = {**block, "0.1.weight": torch.zeros(VOCAB, 32)}
    found = read_head(put(tmp_path / "medusa", {"medusa_num_heads": 1}, medusa), target())
    assert found.kind == "medusa"
    model = {"lm_head.weight": torch.zeros(VOCAB, 32), "model.embed_tokens.weight": torch.zeros(VOCAB, 32)}
    assert not is_head(put(tmp_path / "model", {"model_type": "llama"}, model))
