"""Medusa heads in folders: every published layout is read; ours and theirs are written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import MEDUSA_TREE, accepted_share, medusa_head, texts
from layouts import (
    BASE,
    LEGACY,
    SAFE,
    SIZE,
    TABLE,
    TGI,
    VLLM,
    Config,
    Heads,
    Tensors,
    blocks_alone,
    folder_of,
    made,
    merged,
    no_bias,
    numbered,
    ranked,
    vllm,
    vllm_inside,
    weights,
    without,
)
from safetensors.torch import load_file
from tiny import VOCAB, model, prompts, target
from transformers import LlamaConfig, LlamaForCausalLM

from draftproof.core.messages import Features
from draftproof.core.params import Sampling
from draftproof.drafters.checkpoints import is_head, read_head, write_head
from draftproof.drafters.medusa import MedusaConfig, MedusaHead
from draftproof.drafters.medusa_trees import CHOICES
from draftproof.engine import load as loading
from draftproof.engine.load import load
from draftproof.errors import BadInput, DrafterMismatch, ModelNotFound


def assert_says(head: Any, given: Heads, shared: bool = False) -> None:
    """The head's logits are those of these weights, computed plainly."""
    assert isinstance(head, MedusaHead) and head.steps == len(given)
    dice = torch.Generator().manual_seed(1)
    hidden = torch.randn(1, 12, 1, SIZE, generator=dice, dtype=torch.float64)
    features = Features(torch.zeros(1, 12, dtype=torch.int64), hidden, torch.ones(1, 12))
    with torch.no_grad():
        said = head.predict(features, target())
        for (matrices, biases, table), ours in zip(given, said, strict=True):
            state = hidden[0, : ours.shape[1], 0]
            for matrix, bias in zip(matrices, biases, strict=True):
                state = state + torch.nn.functional.silu(state @ matrix.T + bias)
            theirs = target().unembed(state) if shared else state @ table.T
            known = min(theirs.shape[-1], VOCAB)
            torch.testing.assert_close(ours[0, :, :known], theirs[:, :known], rtol=0, atol=1e-12)
            assert (ours[..., known:] == -torch.inf).all()


# Reading Medusa heads -------------------------------------------------------------------------

WRONG = {"base_model_name_or_path": "lmsys/vicuna", "medusa_num_heads": 2, "medusa_num_layers": 1}
SECOND = {"version": "2", "medusa_num_heads": 3, "medusa_num_layers": 1}
TRT = {"num_medusa_heads": 2, "medusa_choices": [[0], [0, 0], [1]]}
OPT = {"model_type": "llama", "vocab_size": VOCAB, "medusa": {"num_medusa_heads": 2}}
REPEATED: Heads = [([one[0]] * 2, [other[0]] * 2, last) for one, other, last in weights()]
ORIGINAL = without(vllm(weights()), "lm_heads") | {"lm_heads.0.weight": TABLE}
KEPT = {**VLLM, "original_lm_head": True}


LAYOUTS: dict[str, tuple[Config, Tensors, str, Heads, bool]] = {
    "v0.1 says 2 heads": (WRONG, numbered(weights(5)), LEGACY, weights(5), False),
    "v0.1 safetensors": (WRONG, numbered(weights(5)), TGI, weights(5), False),
    "version 2": (SECOND, blocks_alone(weights()), TGI, weights(), True),
    "two blocks alone": (SECOND, blocks_alone(weights(4, 2)), SAFE, weights(4, 2), True),
    "distinct layers": ({}, numbered(weights(2, 3)), SAFE, weights(2, 3), False),
    "repeated layers": ({}, numbered(REPEATED), SAFE, REPEATED, False),
    "vllm": ({**VLLM, "medusa_fc_bias": True}, vllm(weights(3, 2)), SAFE, weights(3, 2), False),
    "vllm, inside": (VLLM, vllm_inside(weights(3, 2)), SAFE, weights(3, 2), False),
    "vllm, no bias": (VLLM, without(vllm(weights()), "bias"), SAFE, no_bias(weights()), False),
    "vllm, original head": (KEPT, ORIGINAL, SAFE, weights(), True),
    "vllm, scaled head": ({**KEPT, "logit_scale": 0.5}, ORIGINAL, SAFE,
                          [(one, other, TABLE * 0.5) for one, other, _ in weights()], False),
    "tensorrt-llm": (TRT, ranked(weights(2, 2)) | BASE, "rank0.safetensors", weights(2, 2), False),
    "modelopt": (OPT, ranked(weights(2, 2)) | BASE, SAFE, weights(2, 2), False),
    "cut table": ({}, numbered(weights(vocab=VOCAB - 3)), SAFE, weights(vocab=VOCAB - 3), False),
    "padded table": ({}, numbered(weights(vocab=VOCAB + 24)), SAFE, weights(vocab=VOCAB + 24),
                     False)
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_published_layouts_are_read(layout: str, tmp_path: Path) -> None:
    config, tensors, file, given, shared = LAYOUTS[layout]
    head = read_head(folder_of(tmp_path, config, tensors, file), target())
    assert_says(head, given, shared)
    assert isinstance(head, MedusaHead) and head.config.bias == (layout != "vllm, no bias")
    assert head.config.base_model == config.get("base_model_name_or_path", "")


def test_pickles_beside_safetensors_and_of_old_formats_are_read(tmp_path: Path) -> None:
    folder_of(tmp_path / "both", {}, {"nonsense": torch.ones(1)}, LEGACY)
    both = folder_of(tmp_path / "both", {}, numbered(weights()))
    assert_says(read_head(both, target()), weights())
    old = folder_of(tmp_path / "old", {}, {}, LEGACY) / LEGACY
    torch.save(numbered(weights()), old, _use_new_zipfile_serialization=False)
    assert_says(read_head(tmp_path / "old", target()), weights())


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_of_a_merged_model_only_the_heads_are_read(tmp_path: Path, kind: str) -> None:
    """medusa-1.0-*: the shard without heads is rubbish, and is not opened."""
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB, "medusa_num_heads": 5}
    heads, stem = merged(weights(5)), "model" if kind == "safetensors" else "pytorch_model"
    first, second = f"{stem}-00001-of-00002.{kind}", f"{stem}-00002-of-00002.{kind}"
    folder_of(tmp_path, config, heads | {"lm_head.weight": torch.ones(VOCAB, SIZE)}, second)
    (tmp_path / first).write_bytes(b"rubbish")
    where = dict.fromkeys(BASE, first) | dict.fromkeys((*heads, "lm_head.weight"), second)
    (tmp_path / f"{stem}.{kind}.index.json").write_text(json.dumps({"weight_map": where}))
    assert is_head(tmp_path)
    assert_says(read_head(tmp_path, target()), weights(5))


def test_vllm_heads_of_a_truncated_vocabulary(tmp_path: Path) -> None:
    """Rows of the mapped tokens alone are spread out; where all rows are there, all are used."""
    given, ids = weights(vocab=6), torch.tensor([1, 4, 9, 16, 25, 36])
    config = {**VLLM, "truncated_vocab_size": 6}
    few = folder_of(tmp_path / "few", config, vllm(given) | {"token_map": ids})
    head = read_head(few, target())
    assert isinstance(head, MedusaHead) and head.config.draft_vocab_size == 6
    assert head.token_map is not None and torch.equal(head.token_map, ids)
    assert torch.equal(head.state_dict()["heads.1.proj.weight"], given[1][2])
    full = folder_of(tmp_path / "all", config, vllm(weights()) | {"token_map": ids})
    assert_says(read_head(full, target()), weights())
    ids = torch.tensor([1, 4, 9, 16, 25, 99])
    folder = folder_of(tmp_path / "foreign", config, vllm(given) | {"token_map": ids})
    with pytest.raises(DrafterMismatch, match=r"up to 99.*has 40"):
        read_head(folder, target())


def test_parts_for_several_devices_are_refused(tmp_path: Path) -> None:
    for rank in (0, 1):
        folder_of(tmp_path, {"num_medusa_heads": 3}, ranked(weights()), f"rank{rank}.safetensors")
    with pytest.raises(ModelNotFound, match=r"rank0.*rank1.*as one"):
        read_head(tmp_path, target())


FORMS: list[Config] = [{}, {"layers": 3}, {"bias": False}, {"share": True},
                       {"share": True, "layers": 2}, {"rows": 7}, {"pairs": True}]  # fmt: skip


@pytest.mark.parametrize("layout", ["draftproof", "vllm"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_what_is_written_is_read(tmp_path: Path, form: Config, layout: str) -> None:
    """Ours keeps everything, vLLM's every tensor but pairs."""
    head, folder, own = made(**form), tmp_path / "new" / "head", layout == "draftproof"
    if not own and ("rows" in form or form.get("share")):
        with pytest.raises(BadInput, match=f"{layout}.*draftproof"):
            write_head(head, folder, layout)
        return
    write_head(head, folder, layout)
    again, given = read_head(folder, target()), head.state_dict()
    assert isinstance(again, MedusaHead) and again.config.base_model == "org/base"
    assert again.config.share_lm_head == head.config.share_lm_head
    assert not own or (again.config == head.config and again.state_dict().keys() == given.keys())
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, given[name])
    assert all(name.startswith("pairs.") for name in given.keys() - again.state_dict().keys())


def test_files_and_settings_are_called_as_their_readers_expect(tmp_path: Path) -> None:
    """Without the setting vLLM drops biases; its loader takes any "num" with "heads" for one."""
    write_head(made(layers=2), tmp_path, "vllm")
    config, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / SAFE)
    assert config["medusa_fc_bias"] is True and config["model_type"] == "medusa"
    assert not config["original_lm_head"] and config["vocab_size"] == VOCAB
    assert [key for key in config if "num" in key] == ["num_heads", "num_hidden_layers"]
    assert tensors["blocks.2.layers.1.bias"].shape == (SIZE,)
    assert tensors["lm_heads.2.weight"].shape == (VOCAB, SIZE)


# From names to engines ------------------------------------------------------------------------


def test_a_folder_of_heads_drafts(tmp_path: Path) -> None:
    """The tree is the one asked for, else drawn anew every round; earlier versions stored one."""
    write_head(medusa_head(), tmp_path / "dynamic")
    config = json.loads((tmp_path / "dynamic" / "config.json").read_text())
    (tmp_path / "dynamic" / "config.json").write_text(json.dumps(config | {"tree": [[0], [1]]}))
    write_head(MedusaHead.fresh(target(), 4), tmp_path / "four")
    plain = texts(load(model(), drafter="none"), prompts(8), max_new_tokens=20)
    for name, tree, nodes in (("dynamic", None, 16),
                              ("dynamic", loading.TreeShape(MEDUSA_TREE), len(MEDUSA_TREE)),
                              ("dynamic", "dynamic", 16),
                              ("four", "zephyr_stage2", len(CHOICES["zephyr_stage2"]))):
        engine = load(model(), drafter=str(tmp_path / name), draft_tree=tree, budget=nodes)
        done = engine.generate(prompts(8), max_new_tokens=20)
        assert [(one.tokens, one.finish_reason) for one in done] == plain
        assert engine.drafter.default_budget == nodes
        assert name == "four" or accepted_share(done) > 0.05


def test_names_that_cannot_be_loaded_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(loading.HEADS, "medusa", "demo-no-such-heads")
    with pytest.raises(ModelNotFound, match="no medusa heads for the demo model"):
        load(model(), drafter="medusa")
    with pytest.raises(BadInput, match=r"oracle.*medusa, redrafter.*folder"):
        load(model(), drafter="oracle")
    write_head(MedusaHead(MedusaConfig(2, 1, 48, VOCAB)), tmp_path / "wide")
    with pytest.raises(DrafterMismatch, match=r"48.*32"):
        load(model(), drafter=tmp_path / "wide")
    write_head(MedusaHead.fresh(target(), 4), tmp_path / "four")
    draft = {"assistant_model": model(num_hidden_layers=1)}
    for options in ({"drafter": tmp_path / "four"}, draft):
        with pytest.raises(BadInput, match="oak"):
            load(model(), draft_tree="oak", **options)
    engine = load(model(), **draft, draft_tree="zephyr_stage2")
    assert engine.budget.most == len(CHOICES["zephyr_stage2"])


@pytest.fixture(scope="module")
def wide() -> LlamaForCausalLM:
    """As wide as SmolLM2-135M, and one layer deep."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=49152, hidden_size=576, intermediate_size=64,
                         num_hidden_layers=1, num_attention_heads=9, num_key_value_heads=3,
                         tie_word_embeddings=True)  # fmt: skip
    return LlamaForCausalLM(config).bfloat16().eval()


@pytest.mark.parametrize("drafter", ["smollm2-135m-medusa", "smollm2-135m-redrafter"])
def test_embedded_heads_draft_for_their_target(wide: LlamaForCausalLM, drafter: str) -> None:
    prompt = [[5, 80, 7], [900, 2]]
    for temperature in (0.0, 0.8):
        wanted = Sampling(temperature=temperature, seed=3, max_new_tokens=12)
        plain, drafted = (load(wide, drafter=name, budget=budget).generate(prompt, sampling=wanted)
                          for name, budget in (("none", None), (drafter, 7)))
        assert [one.tokens for one in drafted] == [one.tokens for one in plain]
        assert all(one.stats.drafted > 0 for one in drafted)
