"""Quantised layers: how far they are from the original, that a token's bits are its own, and what
is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import FAMILIES, VOCAB, fresh, model
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from draftproof.core.tree import TokenTree
from draftproof.drafters.prompt_lookup import PromptLookup
from draftproof.engine.engine import Engine
from draftproof.errors import BadInput, UnsupportedModel
from draftproof.model import loading
from draftproof.model.target import Target
from draftproof.model.variants import quantized as quantized_target
from draftproof.verify.small_models import tiny
from draftproof.weights import quantize
from draftproof.weights.block_formats import quantized_blocks
from draftproof.weights.block_linear import BlockLinear
from draftproof.weights.packed_linear import PackedSlice, pack_linears
from draftproof.weights.quantize import (
    is_quantized,
    quantized,
    quantized_and_compared,
    weight_bytes,
)
from draftproof.weights.snapshot import first_layers, shallow_copy

KINDS = ["int8", "int4"]
# Models ---


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_quantised_without_changing_the_original(kind: str, family: str) -> None:
    ours = model(family)
    before = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    kinds = [type(module) for module in ours.modules()]
    text = torch.randint(VOCAB, (32,), generator=torch.Generator().manual_seed(0))
    made, loss = quantized_and_compared(ours, kind, text)
    assert is_quantized(made) and not is_quantized(ours)
    assert [type(module) for module in ours.modules()] == kinds
    assert all(torch.equal(tensor, before[name]) for name, tensor in ours.state_dict().items())
    assert made.get_input_embeddings().weight is ours.get_input_embeddings().weight
    assert loss.kl > 0 and 0 <= loss.agreement <= 1 and loss.tokens == 32
    assert loss.after == weight_bytes(made) < loss.before == weight_bytes(ours)
    target = quantized_target(Target(ours), kind)
    assert target.reads_trees == Target(ours).reads_trees
    tree = TokenTree.chain(text[None, :6])
    with torch.inference_mode():
        logits = target.read(tree, target.new_cache(1, 64)).logits[0]
        torch.testing.assert_close(
            logits, made(input_ids=text[None, :6], use_cache=False).logits[0], rtol=1e-3, atol=1e-3
        )


@pytest.mark.parametrize("kind", KINDS)
def test_layers_multiplied_together_give_the_bits_of_each_alone(kind: str) -> None:
    made = quantized(fresh("qwen2"), kind)
    rows = torch.randn(5, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for part in ("q_proj", "k_proj", "v_proj"):
        place, layer = (getattr(item.model.layers[1].self_attn, part)
                        for item in (made, model("qwen2")))
        assert isinstance(place, PackedSlice)
        assert place.whole is made.model.layers[1].self_attn.q_proj.whole
        name = f"model.layers.1.self_attn.{part}"
        alone = quantized_blocks([name], [layer.weight.detach()], layer.bias.detach(), kind, 2)
        assert torch.equal(place(rows), alone(rows))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [True, False])
def test_originals_can_be_released(kind: str, tied: bool) -> None:
    """A head that is tied to the embeddings gets weights of its own, and these stay."""
    text, form = torch.arange(12)[None], {"hidden_size": 256, "tie_word_embeddings": tied}
    with torch.inference_mode():
        wanted = quantized(fresh("llama", **form), kind)(text).logits
        made = quantized(fresh("llama", **form), kind, give_up=True)
        assert isinstance(made.lm_head, BlockLinear) and torch.equal(made(text).logits, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_layers_are_quantised_as_the_originals(kind: str) -> None:
    plain, packed = fresh("qwen2").bfloat16(), fresh("qwen2").bfloat16()
    if not pack_linears(packed):
        pytest.skip("nothing is packed on this machine")
    text = torch.arange(12)[None]
    with torch.inference_mode():
        ours, theirs = (quantized(item, kind)(text).logits for item in (packed, plain))
    assert torch.equal(ours, theirs)


def test_gates_and_routers_stay_as_they_are() -> None:
    made = fresh("llama")
    made.model.layers[0].mlp.gate = nn.Linear(32, 8, bias=False, dtype=torch.float64)
    gate = made.model.layers[0].mlp.gate
    assert quantized(made, "int8").model.layers[0].mlp.gate.weight is gate.weight


def test_quantisation_loss_is_reported() -> None:
    text, module = torch.arange(16), model("llama")
    made, loss = quantized_and_compared(module, "int8", text)
    with torch.inference_mode():
        item, other = (each(text[None]).logits[0].double().softmax(-1) for each in (module, made))
    assert loss.kl == pytest.approx(float((item * (item / other).log()).sum(1).mean()), rel=1e-2)
    assert loss.tokens == 16 and "of 16 positions" in str(loss)
    assert "KL" not in str(quantized_and_compared(module, "int8", None)[1])


# Copies ---


@pytest.mark.parametrize("family", FAMILIES)
def test_a_shallow_copy_shares_weights_and_nothing_else(family: str) -> None:
    ours, text = fresh(family), torch.arange(8)[None]
    made = shallow_copy(ours)
    assert {id(item) for item in made.parameters()} == {id(item) for item in ours.parameters()}
    with torch.inference_mode():
        wanted = ours(text, output_hidden_states=True)
        result = made(text, output_hidden_states=True)
        assert torch.equal(result.logits, wanted.logits)
        assert len(result.hidden_states) == len(wanted.hidden_states)
        made.set_output_embeddings(nn.Identity())
        assert torch.equal(ours(text).logits, wanted.logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_layers_are_those_of_the_model(family: str) -> None:
    """The hidden state that the model shows at a layer, through its own final norm and head."""
    module, text = model(family), torch.arange(8)[None]
    depth = module.config.num_hidden_layers
    short = first_layers(module, 1)
    assert {id(item) for item in short.parameters()} < {id(item) for item in module.parameters()}
    with torch.inference_mode():
        states = module(text, output_hidden_states=True).hidden_states
        assert torch.equal(short(text, output_hidden_states=True).hidden_states[0], states[0])
        body = next(item for item in short.base_model.modules() if isinstance(item, nn.ModuleList))
        assert len(body) == 1 and module.config.num_hidden_layers == depth == len(states) - 1
        seen: list[Any] = []
        with body[0].register_forward_hook(lambda _, inputs, out: seen.append(out)):
            short(text)
        last = seen[0][0] if isinstance(seen[0], tuple) else seen[0]
        assert torch.equal(last, states[1]) or depth == 1


def test_kinds_of_layers_that_a_configuration_counts_itself_are_left_to_it() -> None:
    assert len(first_layers(tiny("falcon_h1"), 2).config.layer_types) == 2


def test_a_wrapped_model_has_no_shallow_copy() -> None:
    ours = fresh("llama")
    ours.model.layers[0].forward = ours.model.layers[0].forward
    with pytest.raises(UnsupportedModel, match=r"model\.layers\.0 is wrapped"):
        shallow_copy(ours)


# Refusals ---


def test_unsupported_options_raise_a_clear_error() -> None:
    ours = model("llama")
    for item, kind, output in (
        (ours, "int3", "'int3'; choose one of int8, int4, fp8"), (ours, "fp8", "emulated on a CPU"),
        (quantized(ours, "int8"), "int8", "quantised already"),
    ):
        with pytest.raises(BadInput, match=output):
            quantized(item, kind)


# Checkpoints that were quantised elsewhere ---


def wide(**options: Any) -> PreTrainedModel:
    return fresh("llama", hidden_size=128, intermediate_size=256, **options).bfloat16()


def saved(folder: Path, **quantisation: Any) -> PreTrainedModel:
    """A bfloat16 model in `folder` that claims to be quantised so."""
    wider = wide(tie_word_embeddings=False)
    wider.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantisation}))
    return wider


def continued(ours: PreTrainedModel) -> list[int]:
    """What transformers writes after three tokens."""
    how: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    return ours.generate(torch.tensor([[1, 2, 3]]), **how)[0, 3:].tolist()


def drafted(ours: PreTrainedModel) -> list[int]:
    """What we write there, drafted for."""
    engine = Engine(Target(ours), PromptLookup())
    return engine.generate([[1, 2, 3]], max_new_tokens=12)[0].tokens


def test_unknown_quantisation_methods_are_refused(tmp_path: Path) -> None:
    """transformers warns and reads the numbers as they stand, which are not the weights."""
    saved(tmp_path, quant_method="nonsense")
    with pytest.raises(UnsupportedModel, match="nonsense, which transformers does not know"):
        loading.load_model(tmp_path, device="cpu")


def test_float8_checkpoints_match_transformers(tmp_path: Path) -> None:
    """On a CPU transformers undoes the quantisation; what remains is bfloat16, and is packed."""
    pytest.importorskip("accelerate")
    saved(tmp_path, quant_method="fp8", weight_block_size=[128, 128], activation_scheme="dynamic")
    file, tensors = tmp_path / "model.safetensors", {}
    for name, weight in load_file(file).items():
        tensors[name] = weight
        if name.endswith("_proj.weight"):
            blocks = weight.float().unflatten(0, (-1, min(128, len(weight))))
            blocks = blocks.unflatten(2, (-1, 128))
            scale = blocks.abs().amax((1, 3)) / 448
            codes = (blocks / scale[:, None, :, None]).reshape(weight.shape)
            tensors[name] = codes.to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scale
    save_file(tensors, file, {"format": "pt"})
    wanted = continued(AutoModelForCausalLM.from_pretrained(tmp_path, device_map="cpu"))
    loaded = loading.load_model(tmp_path, device="cpu")
    assert not is_quantized(loaded) and drafted(loaded) == wanted


@pytest.mark.parametrize("threshold", [6.0, 0.0])
def test_bitsandbytes_8_bits_are_refused_with_outliers(tmp_path: Path, threshold: float) -> None:
    """A token's numbers then depend on what is read with it; without outliers it is read."""
    pytest.importorskip("bitsandbytes")
    wide().save_pretrained(tmp_path)
    asked = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=threshold)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=asked)
    if threshold:
        with pytest.raises(UnsupportedModel, match="llm_int8_threshold=0"):
            Target(ours)
    else:
        assert drafted(ours) == continued(ours)


@pytest.mark.parametrize("config", [
    "Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig",
])  # fmt: skip
def test_torchao_checkpoints_match_transformers(tmp_path: Path, config: str) -> None:
    ao = pytest.importorskip("torchao.quantization")
    from transformers import TorchAoConfig

    plain, folder = tmp_path / "plain", tmp_path / "quantised"
    wide().save_pretrained(plain)
    asked = TorchAoConfig(getattr(ao, config)())
    AutoModelForCausalLM.from_pretrained(plain, quantization_config=asked).save_pretrained(folder)
    wanted = continued(AutoModelForCausalLM.from_pretrained(folder))
    loaded = loading.load_model(folder, device="cpu")
    assert is_quantized(loaded) and pack_linears(loaded) <= 1      # the head alone is plain
    assert drafted(loaded) == wanted
    with pytest.raises(BadInput, match="quantised already"):
        quantized(loaded, "int8")


def test_torchao_quantises_a_shallow_copy_where_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of accelerators, run on the CPU, where torchao's 8 bits work as well."""
    pytest.importorskip("torchao.quantization")
    mine = wide(tie_word_embeddings=True)
    before = mine.lm_head.weight.clone()
    made = quantize._by_torchao(shallow_copy(mine), "int8")
    assert is_quantized(made) and not is_quantized(mine)
    assert torch.equal(mine.lm_head.weight, before)
    assert weight_bytes(made) < weight_bytes(mine)
    text = torch.arange(16)[None]
    with torch.inference_mode():
        item, other = mine(text).logits.float(), made(text).logits.float()
    assert 0 < float((item - other).norm() / item.norm()) < 0.2
    with pytest.raises(BadInput, match="torchao cannot quantise"):
        quantize._by_torchao(shallow_copy(fresh("llama").bfloat16()), "int4")


def test_without_torchao_an_accelerator_is_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchao"] + ["torchao"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(BadInput, match="int8 on cpu needs torchao: pip install torchao"):
        quantize._by_torchao(shallow_copy(model("llama")), "int8")
