"""Checkpoints quantised by others: each layout against the weights that its codes stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_checkpoints import CHECKPOINTS, GPTQ, group_config, save, save_gpt_oss, words_of
from safetensors.torch import load_file, save_file

import draftproof as dp
from draftproof.errors import BadInput, ModelNotFound, UnsupportedModel
from draftproof.model import loading
from draftproof.model.diagnosis import paths
from draftproof.model.native_load import native_folder
from draftproof.native.kernels import kernels
from draftproof.weights.block_linear import BlockLinear
from draftproof.weights.quantized_checkpoint import QuantizedSource, layout_of
from draftproof.weights.quantized_layouts import Layout, Parts, read_module
from draftproof.weights.stored_codes import Codes

PROJECTION = "model.layers.1.mlp.down_proj"


def source_of(folder: Path, kind: str | None = None) -> QuantizedSource:
    stated = json.loads((folder / "config.json").read_text())["quantization_config"]
    layout = layout_of(str(folder), stated)
    assert layout is not None
    return QuantizedSource(folder, torch.bfloat16, layout, kind)


def changed(folder: Path, **quantization: Any) -> None:
    """Change the quantization_config of a folder; None removes it."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] |= quantization
    if None in quantization.values():
        del config["quantization_config"]
    file.write_text(json.dumps(config))


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_layout_is_read_with_every_value(name: str, tmp_path: Path) -> None:
    truth = dict(save(tmp_path, name).named_parameters())
    source = source_of(tmp_path)
    layer, format = source.linear([PROJECTION], False), CHECKPOINTS[name][2]
    wanted = truth[f"{PROJECTION}.weight"]
    if kernels() is not None and format != "BF16":
        assert isinstance(layer, BlockLinear) and layer.parts[0].format == format
        assert torch.equal(layer.rows(torch.arange(len(wanted))), wanted)
        assert not source.unpacked_because
    else:
        assert torch.equal(layer.dense().bfloat16(), wanted.bfloat16())
    assert {*source} == {*truth} and all(key in source for key in truth)
    for key, weight in truth.items():
        assert torch.equal(source.tensor(key).bfloat16(), weight.bfloat16()), key


@pytest.mark.skipif(kernels() is None, reason="blocks are unpacked without kernels")
@pytest.mark.parametrize("name", ["gptq", "awq", "w8a8", "fp8-blocks"])
def test_a_quantised_folder_is_read_natively_and_says_so(name: str, tmp_path: Path) -> None:
    theirs = save(tmp_path, name, initializer_range=0.2)
    engine = dp.load(tmp_path, drafter="none", device="cpu")
    native = native_folder(str(tmp_path), None, "cpu")
    assert native is not None and engine.target.fast is not None
    sentence, format = paths(engine.target)["weights"], CHECKPOINTS[name][2]
    assert (f"in {format} by our kernels" if format != "BF16" else "is slower") in sentence
    tokens = torch.randint(0, 40, (1, 24), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        wanted = theirs(tokens).logits[0].log_softmax(-1)
        logits = engine.target.features(tokens, torch.ones(1, 24), logits=True).logits
    assert logits is not None
    ours = logits[0].float().log_softmax(-1)
    assert float((wanted.exp() * (wanted - ours)).sum(-1).mean()) < 0.01
    with pytest.raises(BadInput, match="quantised already"):
        dp.load(tmp_path, quantize="int8", device="cpu")


@pytest.mark.parametrize("name", ["gptq-asymmetric", "w4a16"])
def test_other_families_are_unpacked_for_transformers(name: str, tmp_path: Path) -> None:
    theirs = save(tmp_path, name, "olmo2")
    for dtype in ("float32", None):
        ours = loading.load_model(tmp_path, dtype, "cpu")
        weights = dict(ours.named_parameters())
        for key, weight in theirs.named_parameters():
            assert torch.equal(weights[key], weight.to(weights[key].dtype)), key
    engine = dp.load(tmp_path, drafter="none", device="cpu", dtype="float32")
    assert "unpacked to float32" in paths(engine.target)["weights"]


@pytest.mark.parametrize(("change", "words"), [
    ({"checkpoint_format": "marlin"}, "'marlin', which is not read here"),
    ({"quant_method": "awq", "version": "gemv"}, "'gemv', which is not read here"),
    ({"quant_method": "nonsense"}, "nonsense, which transformers does not know"),
    (group_config("marlin-24", 4, "int"), "'marlin-24', which is not read here"),
    (group_config("pack-quantized", 4, "int")
     | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse"),
    (group_config("pack-quantized", 4, "int")
     | {"transform_config": {"config_groups": {"u": {}}}}, "SpinQuant"),
    ({"bits": None}, "does not say how"),
])  # fmt: skip
def test_unreadable_checkpoints_are_refused_in_one_sentence(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    save(tmp_path, "gptq")
    changed(tmp_path, **change)
    with pytest.raises(UnsupportedModel, match=words) as error:
        dp.load(tmp_path, device="cpu")
    assert "\n" not in str(error.value)


def test_groups_of_compressed_tensors_may_have_formats_and_tiles_of_their_own() -> None:
    stated = group_config("float-quantized", 8, "float", block_structure=[16, 32])
    assert layout_of("tiles", stated) == Layout(tile=(16, 32))
    stated |= {"format": "mixed-precision"}
    group = stated["config_groups"]["group_0"]
    assert layout_of("mixed", stated) == Layout(tile=(16, 32))
    assert layout_of("mixed", stated | {"config_groups": {
        "group_0": {**group, "format": "nvfp4-pack-quantized"}}}) == Layout(tile=(16, 32))
    with pytest.raises(UnsupportedModel, match="'marlin-24', which is not read here"):
        layout_of("mixed", stated | {"config_groups": {
            "group_0": group, "group_1": {**group, "format": "marlin-24"}}})


@pytest.mark.parametrize("name", ["w8a8", "fp8-tensor", "mxfp4"])
@pytest.mark.parametrize("family", ["qwen2", "olmo2"])
def test_codes_without_a_configuration_are_never_taken_for_weights(
    name: str, family: str, tmp_path: Path
) -> None:
    save(tmp_path, name, family)
    changed(tmp_path, quant_method=None)
    with pytest.raises(UnsupportedModel, match="does not say how"):
        dp.load(tmp_path, device="cpu")


@pytest.mark.parametrize(("name", "kind", "shape"), [
    ("gptq", "qzeros", None), ("gptq", "scales", None), ("gptq", "qzeros", (1, 3)),
    ("gptq", "g_idx", (5,)), ("awq", "qzeros", (1, 1)), ("w4a16", "weight_shape", None),
    ("w8a8", "weight_scale", None), ("w8a8", "weight_scale", (5, 1)),
    ("fp8-blocks", "weight_scale_inv", (1, 1, 1)), ("fp8-blocks", "weight_scale_inv", None),
    ("fp8-blocks", "weight_scale_inv", (9, 9)), ("mxfp4", "weight_scale", (3, 1)),
])  # fmt: skip
def test_tensors_that_do_not_fit_are_named(
    name: str, kind: str, shape: tuple[int, ...] | None, tmp_path: Path
) -> None:
    save(tmp_path, name)
    file, key = tmp_path / "model.safetensors", f"{PROJECTION}.{kind}"
    tensors = load_file(file)
    dtype = tensors.pop(key).dtype
    if shape is not None:
        tensors[key] = torch.ones(shape).to(dtype)
    save_file(tensors, file, {"format": "pt"})
    if shape == (1, 1, 1):                              # one number is one scale for all
        assert source_of(tmp_path).tensor(f"{PROJECTION}.weight").isfinite().all()
        return
    with pytest.raises(ModelNotFound, match=PROJECTION):
        source_of(tmp_path).linear([PROJECTION], False)


def test_modelopt_settings_are_read_from_hf_quant_config(tmp_path: Path) -> None:
    truth = save(tmp_path, "fp8-tensor")
    changed(tmp_path, quant_method=None)
    stated = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(stated))
    ours = loading.load_model(tmp_path, "float32", "cpu")
    for (key, weight), other in zip(truth.named_parameters(), ours.parameters(), strict=True):
        assert torch.equal(weight, other), key


@pytest.mark.parametrize(("name", "file", "stated"), [
    ("gptq", "quantize_config.json", {"bits": 4, "group_size": 32, "desc_act": False}),
    ("awq", "quant_config.json", {"w_bit": 4, "q_group_size": 32, "version": "GEMM"}),
])  # fmt: skip
def test_older_tools_have_files_of_other_names(
    name: str, file: str, stated: dict[str, Any], tmp_path: Path
) -> None:
    truth = save(tmp_path, name)
    changed(tmp_path, quant_method=None)
    (tmp_path / file).write_text(json.dumps(stated))
    (tmp_path / "model.safetensors").rename(tmp_path / "gptq_model-4bit-32g.safetensors")
    ours = loading.load_model(tmp_path, "float32", "cpu")
    for (key, weight), other in zip(truth.named_parameters(), ours.parameters(), strict=True):
        assert torch.equal(weight, other), key


def test_other_methods_stay_with_transformers() -> None:
    assert layout_of("x", {"quant_method": "mxfp4"}) is None
    assert layout_of("x", {"quant_method": "bitsandbytes"}) is None
    assert layout_of("x", GPTQ) is not None


def test_experts_of_gpt_oss_are_unpacked_from_mxfp4(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    theirs = save_gpt_oss(tmp_path)
    ours = loading.load_model(tmp_path, device="cpu")
    weights = dict(ours.named_parameters())
    for key, weight in theirs.named_parameters():
        assert torch.equal(weights[key], weight), key
    tokens = torch.randint(0, 40, (1, 9))
    with torch.inference_mode():
        assert torch.equal(ours(tokens).logits, theirs(tokens).logits)
    engine = dp.load(tmp_path, drafter="none", device="cpu")
    assert "mxfp4" in paths(engine.target)["weights"]


def test_packed_zero_points_of_a_number_of_outputs_that_fills_no_word() -> None:
    """Eight are in a word: the last of 12 outputs share theirs with padding."""
    dice = torch.Generator().manual_seed(0)
    codes, zeros = (torch.randint(16, (12, size), generator=dice) for size in (64, 2))
    scales = 1 + torch.rand(12, 2, generator=dice)
    padded = torch.nn.functional.pad(zeros, (0, 0, 0, 4))
    stored = {
        "weight_packed": words_of(codes.T, 4).T, "weight_scale": scales,
        "weight_shape": torch.tensor([12, 64]), "weight_zero_point": words_of(padded, 4),
    }  # fmt: skip
    parts = Parts("part", {f"part.{kind}": tensor for kind, tensor in stored.items()}.get)
    values = read_module(parts, Layout())
    assert isinstance(values, Codes)
    groups = torch.arange(64) // 32
    assert torch.equal(values.values(), (codes - zeros[:, groups]) * scales[:, groups])


def test_tiles_of_scales_are_cut_at_the_edges_of_a_matrix() -> None:
    codes = torch.randn(20, 48, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    scales = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    parts = Parts("part", {"part.weight": codes, "part.weight_scale_inv": scales}.get)
    values = read_module(parts, Layout(tile=(16, 32)))
    assert isinstance(values, torch.Tensor)
    rows, columns = torch.arange(20) // 16, torch.arange(48) // 32
    assert torch.equal(values, codes.float() * scales[rows][:, columns])
