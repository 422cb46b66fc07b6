"""GGUF files read by our own forward, against transformers with the same weights."""

from __future__ import annotations

import gc
from pathlib import Path

import gguf
import gguf_models
import pytest
import torch
import torch.nn.functional as F

from draftproof.core.tree import TokenTree
from draftproof.gguf.config import model_of
from draftproof.gguf.file import GGUFFile
from draftproof.model.gguf_model import unpacked
from draftproof.model.gguf_source import native_gguf
from draftproof.model.loading import load_model
from draftproof.model.target import target_of
from draftproof.native.kernels import kernels
from draftproof.weights.block_linear import BlockTable

TYPES = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16"]
"""Those that the package `gguf` writes."""


def both(path: Path, dtype: torch.dtype, unpack: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits by transformers in float32, and by our forward in `dtype`."""
    file = GGUFFile.open(path)
    model, native = model_of(file), native_gguf(path, dtype, unpack=unpack)
    assert model is not None and native is not None
    target = target_of(native)
    tokens = torch.randint(0, 96, (2, 40), generator=torch.Generator().manual_seed(1))
    cache = target.new_cache(2, 64)
    with torch.inference_mode():
        wanted = unpacked(file, model, torch.float32)(tokens).logits
        return wanted, target.read(TokenTree.chain(tokens), cache).logits.float()


@pytest.mark.parametrize("name", gguf_models.FAMILIES)
def test_families_agree_with_transformers_in_float32(name: str, tmp_path: Path) -> None:
    path = gguf_models.save(gguf_models.tiny(name), tmp_path / "model.gguf")
    wanted, logits = both(path, torch.float32)
    assert (wanted - logits).abs().max() < 1e-4 * wanted.abs().max()


@pytest.mark.parametrize("name", gguf_models.BY_TRANSFORMERS)
def test_gguf_files_of_other_architectures_match_the_saved_models(
    name: str, tmp_path: Path
) -> None:
    wrote = gguf_models.tiny(name)
    path = gguf_models.save(wrote, tmp_path / "model.gguf")
    tokens = torch.randint(0, 96, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        wanted = wrote(tokens).logits
        read = load_model(path, "float32", "cpu")(tokens).logits
    torch.testing.assert_close(read, wanted, rtol=0, atol=1e-5)     # decays are stored as exp
    native = native_gguf(path, torch.float32, unpack=True)
    assert (native is not None) == (name == "mistral3-plain")
    if native is not None:
        _, logits = both(path, torch.float32)
        assert (wanted - logits).abs().max() < 1e-4 * wanted.abs().max()


def test_experts_in_mxfp4_are_read_as_they_are(tmp_path: Path) -> None:
    """As every published file of gpt-oss has them: no value of a weight changes."""
    kind, wrote = gguf.GGMLQuantizationType.MXFP4, gguf_models.tiny("gpt-oss")
    for layer in wrote.model.layers:
        for weight in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
            rows = weight.detach().transpose(1, 2).contiguous().numpy()
            rounded = gguf.quants.dequantize(gguf.quants.quantize(rows, kind), kind)
            weight.data = torch.from_numpy(rounded).transpose(1, 2).contiguous()
    types = {"_exps.weight": "MXFP4"}
    path = gguf_models.save(wrote, tmp_path / "model.gguf", types)
    assert {tensor.type for tensor in GGUFFile.open(path).tensors.values()} == {"F32", "MXFP4"}
    read = load_model(path, "float32", "cpu").state_dict()
    assert all(torch.equal(read[name], weight) for name, weight in wrote.state_dict().items())


@pytest.mark.parametrize("type", TYPES)
def test_each_block_type_stays_close_to_its_dequantised_weights(type: str, tmp_path: Path) -> None:
    path = gguf_models.save(gguf_models.tiny("llama"), tmp_path / "model.gguf", type)
    for dtype, unpack, limit in (
        (torch.float32, True, 1e-6), (torch.bfloat16, True, 1e-3), (torch.bfloat16, False, 1e-3)
    ):  # fmt: skip
        wanted, logits = both(path, dtype, unpack)
        kl = F.kl_div(logits.log_softmax(-1), wanted.log_softmax(-1), log_target=True,
                      reduction="none").sum(-1).mean()  # fmt: skip
        assert kl < limit


@pytest.mark.skipif(kernels() is None, reason="blocks are unpacked without kernels")
def test_block_embeddings_match_the_dense_table(tmp_path: Path) -> None:
    path = gguf_models.save(gguf_models.tiny("qwen3"), tmp_path / "model.gguf", "Q5_0")
    native = native_gguf(path, torch.bfloat16)
    assert native is not None
    table = native.decoder.embed
    assert isinstance(table, BlockTable) and table.weight is None and table.shape == (96, 64)
    tokens = torch.tensor([[3, 95], [3, 0]])
    dense = native.source.tensor("model.embed_tokens.weight").bfloat16()
    assert torch.equal(table.rows(tokens), dense[tokens])


def test_logits_are_capped_as_the_file_says(tmp_path: Path) -> None:
    path = gguf_models.save(gguf_models.tiny("gemma3"), tmp_path / "model.gguf",
                            **{".final_logit_softcapping": 3.0})  # fmt: skip
    wanted, logits = both(path, torch.float32)
    assert wanted.abs().max() < 3 and (wanted - logits).abs().max() < 1e-3


@pytest.mark.skipif(kernels() is None, reason="blocks are unpacked without kernels")
def test_block_embeddings_are_never_dequantized_as_a_whole(tmp_path: Path) -> None:
    """Neither for reading tokens, nor for draft heads, which look rows up in both tables."""
    path = gguf_models.save(gguf_models.tiny("qwen3"), tmp_path / "model.gguf", "Q8_0")
    before = {id(tensor) for tensor in _dense_tables()}
    native = native_gguf(path, torch.bfloat16)
    assert native is not None
    target = target_of(native)
    tokens, few = torch.randint(0, 96, (1, 8)), torch.tensor([3, 95])
    reading = target.read(TokenTree.chain(tokens), target.new_cache(1, 16))
    tables, rows = target.native, target.head_rows(few)
    assert tables is not None and rows is not None and reading.logits.shape == (1, 8, 96)
    assert not [tensor for tensor in _dense_tables() if id(tensor) not in before]
    weight = native.source.tensor("model.embed_tokens.weight")
    head = "lm_head" if "lm_head.weight" in native.source else "model.embed_tokens"
    assert torch.equal(rows[0], native.source.tensor(f"{head}.weight").float()[few])
    result = torch.empty(2, weight.shape[1], dtype=torch.bfloat16)
    library = kernels()
    assert library is not None
    library("embed", tables.embeddings, few, 2, result)
    assert torch.equal(result, weight.bfloat16()[few])


def _dense_tables() -> list[torch.Tensor]:
    """Tensors in memory as large as an embedding table of these models, [96, 64]."""
    return [thing for thing in gc.get_objects() if type(thing) is torch.Tensor
            and thing.is_floating_point() and thing.numel() == 96 * 64]
