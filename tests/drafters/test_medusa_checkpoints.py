"""Folders of Medusa heads: every published layout is read, ours and theirs are written, what does not fit is refused."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import MEDUSA_TREE, accepted_share, medusa_head, texts
from safetensors.torch import load_file, save_file
from tiny import VOCAB, model, prompts, target
from torch import Tensor

from draftproof.drafters import weight_files
from draftproof.drafters.checkpoints import is_head, read_head, write_head
from draftproof.drafters.medusa import Medusa, MedusaConfig, MedusaHead
from draftproof.drafters.medusa_trees import CHOICES
from draftproof.engine import load as loading
from draftproof.engine.load import load
from draftproof.errors import BadInput, DrafterMismatch, DraftproofError, ModelNotFound

SIZE = 32
Tensors = dict[str, Tensor]
Heads = list[tuple[list[Tensor], list[Tensor], Tensor]]
"""Of each head the matrices and biases of its layers, and its projection."""


def weights(heads: int = 3, layers: int = 1, vocab: int = VOCAB, size: int = SIZE) -> Heads:
    dice = torch.Generator().manual_seed(heads + 10 * layers)

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=dice, dtype=torch.float64) / 4

    return [
        ([some(size, size) for _ in range(layers)], [some(size) for _ in range(layers)], some(vocab, size))
        for _ in range(heads)
    ]


def foretold(given: Heads, hidden: Tensor, shared: bool = False) -> list[Tensor]:
    """What these heads say, computed plainly."""
    said = []
    for matrices, biases, projection in given:
        state = hidden
        for matrix, bias in zip(matrices, biases, strict=True):
            inner = state @ matrix.T + bias
            state = state + inner * inner.sigmoid()
        said.append(target().unembed(state) if shared else state @ projection.T)
    return said


def assert_says(head: Any, given: Heads, shared: bool = False) -> None:
    hidden = torch.randn(5, SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert isinstance(head, MedusaHead) and head.steps == len(given)
    with torch.no_grad():
        ours = Medusa(head, target())._weights.logits(hidden, len(given), target())
        for step, theirs in enumerate(foretold(given, hidden, shared)):
            known = min(theirs.shape[-1], VOCAB)
            torch.testing.assert_close(ours[:, step, :known], theirs[:, :known], rtol=0, atol=1e-12)
            assert (ours[:, step, known:] == -torch.inf).all()


def folder_of(path: Path, config: dict[str, Any], tensors: Tensors, file: str = "model.safetensors") -> Path:
    path.mkdir(exist_ok=True, parents=True)
    (path / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / file)
    else:
        torch.save(tensors, path / file)
    return path


def numbered(given: Heads, prefix: str = "", projections: bool = True) -> Tensors:
    """The original names: layers by number, then the projection."""
    found: Tensors = {}
    for head, (matrices, biases, projection) in enumerate(given):
        for layer, (matrix, bias) in enumerate(zip(matrices, biases, strict=True)):
            found[f"{prefix}{head}.{layer}.linear.weight"], found[f"{prefix}{head}.{layer}.linear.bias"] = matrix, bias
        if projections:
            found[f"{prefix}{head}.{len(matrices)}.weight"] = projection
    return found


def vllm_names(given: Heads, prefix: str = "") -> Tensors:
    found: Tensors = {}
    for head, (matrices, biases, projection) in enumerate(given):
        for layer, (matrix, bias) in enumerate(zip(matrices, biases, strict=True)):
            found[f"{prefix}blocks.{head}.layers.{layer}.weight"] = matrix
            found[f"{prefix}blocks.{head}.layers.{layer}.bias"] = bias
        found[f"{prefix}lm_heads.{head}.weight"] = projection
    return found


def rank_names(given: Heads) -> Tensors:
    found: Tensors = {}
    for head, (matrices, biases, projection) in enumerate(given):
        for layer, (matrix, bias) in enumerate(zip(matrices, biases, strict=True)):
            found[f"medusa_heads.{head}.medusa_layers.{layer}.linear.weight"] = matrix
            found[f"medusa_heads.{head}.medusa_layers.{layer}.linear.bias"] = bias
        found[f"medusa_heads.{head}.lm_head.weight"] = projection
    return found


def base_names(given: int = 3) -> Tensors:
    return {f"model.layers.{layer}.self_attn.q_proj.weight": torch.ones(SIZE, SIZE) for layer in range(given)}


VLLM = {"model_type": "medusa", "hidden_size": SIZE, "vocab_size": VOCAB, "num_heads": 3, "num_hidden_layers": 1}


# Reading ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
def test_the_first_layout_with_its_wrong_head_count(tmp_path: Path, file: str) -> None:
    """FasterDecoding/medusa-vicuna-*-v1.3: the settings say 2 heads, the file has 5."""
    config = {"base_model_name_or_path": "lmsys/vicuna-7b-v1.3", "medusa_num_heads": 2, "medusa_num_layers": 1}
    head = read_head(folder_of(tmp_path, config, numbered(weights(5)), file), target())
    assert_says(head, weights(5))
    assert isinstance(head, MedusaHead) and head.config.base_model == "lmsys/vicuna-7b-v1.3"


def test_both_files_side_by_side_are_one_checkpoint(tmp_path: Path) -> None:
    folder_of(tmp_path, {}, {"nonsense": torch.ones(1)}, "medusa_lm_head.pt")
    assert_says(read_head(folder_of(tmp_path, {}, numbered(weights()), "medusa_lm_head.safetensors"), target()), weights())


def test_the_format_before_torch_1_6(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {}, {}, "medusa_lm_head.pt")
    torch.save(numbered(weights()), folder / "medusa_lm_head.pt", _use_new_zipfile_serialization=False)
    assert_says(read_head(folder, target()), weights())


@pytest.mark.parametrize("layers", [1, 2])
def test_blocks_alone_share_the_projection(tmp_path: Path, layers: int) -> None:
    """The second version of the original, and that of Text Generation Inference."""
    given = weights(4, layers)
    tensors = numbered(given, projections=False)
    config = {"version": "2", "medusa_num_heads": 4, "medusa_num_layers": layers}
    assert_says(read_head(folder_of(tmp_path, config, tensors, "medusa_lm_head.safetensors"), target()), given, shared=True)


def test_several_layers_and_layers_that_repeat(tmp_path: Path) -> None:
    """Distinct layers stay distinct; the original writes one layer several times."""
    assert_says(read_head(folder_of(tmp_path / "distinct", {}, numbered(weights(2, 3))), target()), weights(2, 3))
    repeated = [([one[0]] * 2, [other[0]] * 2, last) for one, other, last in weights()]
    tensors = {name: tensor.clone() for name, tensor in numbered(repeated).items()}
    assert_says(read_head(folder_of(tmp_path / "same", {}, tensors), target()), repeated)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_of_a_merged_model_only_the_heads_are_read(tmp_path: Path, kind: str) -> None:
    """medusa-1.0-*: the shard without heads is rubbish, and nobody minds."""
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB, "medusa_num_heads": 5, "medusa_num_layers": 1}
    heads, base = numbered(weights(5), "medusa_head."), base_names()
    stem = "model" if kind == "safetensors" else "pytorch_model"
    first, second = f"{stem}-00001-of-00002.{kind}", f"{stem}-00002-of-00002.{kind}"
    folder_of(tmp_path, config, heads | {"lm_head.weight": torch.ones(VOCAB, SIZE)}, second)
    (tmp_path / first).write_bytes(b"rubbish")
    where = dict.fromkeys(base, first) | dict.fromkeys((*heads, "lm_head.weight"), second)
    (tmp_path / f"{stem}.{kind}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    assert is_head(tmp_path)
    assert_says(read_head(tmp_path, target()), weights(5))


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
def test_vllm_heads(tmp_path: Path, prefix: str) -> None:
    given = weights(3, 2)
    config = {**VLLM, "num_hidden_layers": 2, "medusa_fc_bias": True, "truncated_vocab_size": None}
    assert_says(read_head(folder_of(tmp_path, config, vllm_names(given, prefix)), target()), given)


def test_vllm_heads_without_biases(tmp_path: Path) -> None:
    given = [(matrices, [torch.zeros_like(bias) for bias in biases], last) for matrices, biases, last in weights()]
    tensors = {name: tensor for name, tensor in vllm_names(given).items() if not name.endswith("bias")}
    head = read_head(folder_of(tmp_path, VLLM, tensors), target())
    assert_says(head, given)
    assert isinstance(head, MedusaHead) and not head.config.bias


def test_vllm_heads_that_keep_the_original_projection(tmp_path: Path) -> None:
    given, table = weights(), torch.randn(VOCAB, SIZE, dtype=torch.float64)
    tensors = {name: tensor for name, tensor in vllm_names(given).items() if "lm_heads" not in name}
    tensors["lm_heads.0.weight"] = table
    head = read_head(folder_of(tmp_path / "own", {**VLLM, "original_lm_head": True}, tensors), target())
    assert_says(head, given, shared=True)
    head = read_head(folder_of(tmp_path / "scaled", {**VLLM, "original_lm_head": True, "logit_scale": 0.5}, tensors), target())
    assert_says(head, [(matrices, biases, table * 0.5) for matrices, biases, _ in given])


def test_vllm_heads_of_a_truncated_vocabulary(tmp_path: Path) -> None:
    """Rows of the mapped tokens alone are spread out; where all rows are there, all are used."""
    given, known = weights(vocab=6), torch.tensor([1, 4, 9, 16, 25, 36])
    config = {**VLLM, "truncated_vocab_size": 6}
    head = read_head(folder_of(tmp_path / "few", config, vllm_names(given) | {"token_map": known}), target())
    hidden = torch.randn(5, SIZE, dtype=torch.float64)
    assert isinstance(head, MedusaHead) and head.config.draft_vocab_size == 6
    with torch.no_grad():
        logits = Medusa(head, target())._weights.logits(hidden, 3, target())
    for step, theirs in enumerate(foretold(given, hidden)):
        torch.testing.assert_close(logits[:, step, known], theirs, rtol=0, atol=1e-12)
    assert int((logits[0, 0] > -torch.inf).sum()) == 6
    full = read_head(folder_of(tmp_path / "all", config, vllm_names(weights()) | {"token_map": known}), target())
    assert_says(full, weights())
    with pytest.raises(DrafterMismatch, match=r"up to 99.*has 40"):
        tensors = vllm_names(given) | {"token_map": torch.tensor([1, 4, 9, 16, 25, 99])}
        read_head(folder_of(tmp_path / "foreign", config, tensors), target())


def test_tensorrt_llm_and_modelopt(tmp_path: Path) -> None:
    given = weights(2, 2)
    config = {"architecture": "MedusaForCausalLM", "num_medusa_heads": 2, "medusa_choices": [[0], [0, 0], [1]]}
    head = read_head(folder_of(tmp_path / "trt", config, rank_names(given) | base_names(), "rank0.safetensors"), target())
    assert_says(head, given)
    assert isinstance(head, MedusaHead) and head.config.tree == ((0,), (0, 0), (1,))
    config = {"model_type": "llama", "vocab_size": VOCAB, "medusa": {"num_medusa_heads": 2, "num_medusa_layers": 2}}
    assert_says(read_head(folder_of(tmp_path / "modelopt", config, rank_names(given) | base_names()), target()), given)


def test_parts_for_several_devices_are_refused(tmp_path: Path) -> None:
    for rank in (0, 1):
        folder_of(tmp_path, {"num_medusa_heads": 3}, rank_names(weights()), f"rank{rank}.safetensors")
    with pytest.raises(ModelNotFound, match=r"rank0.*rank1.*as one"):
        read_head(tmp_path, target())


@pytest.mark.parametrize("vocab", [VOCAB - 3, VOCAB + 24])
def test_padded_and_cut_tables(tmp_path: Path, vocab: int) -> None:
    """Rows the target lacks are dropped, rows the heads lack are never chosen."""
    assert_says(read_head(folder_of(tmp_path, {}, numbered(weights(vocab=vocab))), target()), weights(vocab=vocab))


# Writing ------------------------------------------------------------------------------------------------------------------


def made(layers: int = 1, share: bool = False, bias: bool = True, rows: int | None = None, pairs: bool = False) -> MedusaHead:
    config = MedusaConfig(3, layers, SIZE, VOCAB, share, bias, "org/base", draft_vocab_size=rows, tree=MEDUSA_TREE)
    head = MedusaHead(config).double()
    torch.manual_seed(layers)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    if rows is not None:
        head.token_map = torch.randperm(VOCAB)[:rows]
    if pairs:
        head.count(torch.tensor([1, 1, 3, 3, 3]), torch.tensor([2, 2, 0, 0, 0]))
    return head


FORMS: list[dict[str, Any]] = [
    {}, {"layers": 3}, {"bias": False}, {"share": True}, {"share": True, "layers": 2}, {"rows": 7}, {"pairs": True}
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_our_layout_keeps_everything(tmp_path: Path, form: dict[str, Any]) -> None:
    head = made(**form)
    write_head(head, tmp_path / "new" / "head")
    again = read_head(tmp_path / "new" / "head", target())
    assert isinstance(again, MedusaHead) and again.config == head.config
    assert again.state_dict().keys() == head.state_dict().keys()
    assert all(torch.equal(tensor, head.state_dict()[name]) for name, tensor in again.state_dict().items())


@pytest.mark.parametrize("layout", ["vllm", "tgi", "legacy"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_other_layouts_keep_every_tensor(tmp_path: Path, form: dict[str, Any], layout: str) -> None:
    head = made(**form)
    roomy = layout == "vllm" or "rows" not in form
    if not roomy or (form.get("share") and (layout != "tgi" or "layers" in form)):
        with pytest.raises(BadInput, match=f"{layout}.*draftproof"):
            write_head(head, tmp_path, layout)
        return
    write_head(head, tmp_path, layout)
    again = read_head(tmp_path, target())
    assert isinstance(again, MedusaHead) and again.config.base_model == "org/base"
    assert again.config.share_lm_head == head.config.share_lm_head
    for name, tensor in again.state_dict().items():
        wanted = head.state_dict().get(name, torch.zeros(SIZE))         # these layouts want a bias
        assert torch.equal(tensor, wanted) and (name in head.state_dict() or name.endswith("bias"))
    lost = set(head.state_dict()) - set(again.state_dict())
    assert lost == {name for name in head.state_dict() if name.startswith("pairs.")}        # nobody else knows of them


def test_vllm_is_told_of_the_biases(tmp_path: Path) -> None:
    """Without the setting vLLM drops them. Its loader renames settings with "num" and "heads", so there is one alone."""
    write_head(made(layers=2), tmp_path, "vllm")
    config, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    assert config["medusa_fc_bias"] is True and config["model_type"] == "medusa" and not config["original_lm_head"]
    assert [key for key in config if "num" in key and "heads" in key] == ["num_heads"]
    assert [key for key in config if "num" in key and "layers" in key] == ["num_hidden_layers"]
    assert tensors["blocks.2.layers.1.bias"].shape == (SIZE,) and tensors["lm_heads.2.weight"].shape == (VOCAB, SIZE)
    write_head(made(rows=7), tmp_path, "vllm")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["truncated_vocab_size"] == 7 and config["vocab_size"] == VOCAB


def test_files_are_called_as_their_readers_expect(tmp_path: Path) -> None:
    for layout, share, file in (
        ("tgi", False, "medusa_lm_head.safetensors"),
        ("tgi", True, "medusa_lm_head.safetensors"),
        ("legacy", False, "medusa_lm_head.pt"),
    ):
        folder = tmp_path / f"{layout}-{share}"
        write_head(made(share=share), folder, layout)
        assert sorted(path.name for path in folder.iterdir()) == ["config.json", file]
        config = json.loads((folder / "config.json").read_text())
        assert config["medusa_num_heads"] == 3 and config["medusa_num_layers"] == 1
        assert config.get("version") == ("2" if share else None)


def test_a_crash_leaves_nothing_that_reads_as_a_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether there was a head before or not, whether weights or settings were being written."""
    write, replace = weight_files.save, weight_files.replace

    def no_weights(tensors: Tensors, file: Path) -> None:
        write(tensors, file)
        raise OSError("the disk is full")

    def no_settings(file: Path, writing: Any) -> None:
        if file.name == "config.json":
            raise OSError("the disk is full")
        replace(file, writing)

    for before in (False, True):
        for name, broken in (("save", no_weights), ("replace", no_settings)):
            folder = tmp_path / f"{before}{name}"
            if before:
                write_head(made(), folder)
            with monkeypatch.context() as patched, pytest.raises(OSError, match="full"):
                patched.setattr(weight_files, name, broken)
                write_head(made(layers=2), folder)
            assert not is_head(folder) and not list(folder.glob(".*"))
            with pytest.raises(ModelNotFound, match="no draft head"):
                read_head(folder, target())
            write_head(made(layers=2), folder)
            assert is_head(folder)


def test_nothing_else_is_overwritten(tmp_path: Path) -> None:
    """Models, merged models, heads of another layout; a head of the same layout is."""
    merged = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "medusa_num_heads": 3}
    model_folder = folder_of(tmp_path / "model", {"model_type": "llama"}, base_names())
    both = folder_of(tmp_path / "merged", merged, numbered(weights(), "medusa_head.") | base_names())
    write_head(made(), tmp_path / "other", "tgi")
    for folder in (model_folder, both, tmp_path / "other"):
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        with pytest.raises(BadInput, match="something else already"):
            write_head(made(), folder)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    write_head(made(), tmp_path / "mine")
    (tmp_path / "mine" / "optimizer.pt").write_bytes(b"state of a training run")
    write_head(made(layers=2), tmp_path / "mine")
    head = read_head(tmp_path / "mine", target())
    assert isinstance(head, MedusaHead) and head.config.num_layers == 2


def test_unknown_layouts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"gguf.*draftproof, vllm, tgi, legacy"):
        write_head(made(), tmp_path, "gguf")


# Mistakes -----------------------------------------------------------------------------------------------------------------


def refused(folder: Path, kind: type[DraftproofError], *words: str) -> None:
    """One sentence with all words."""
    with pytest.raises(kind) as error:
        read_head(folder, target())
    said = str(error.value)
    assert "\n" not in said and all(word in said for word in words), said


def test_heads_of_another_width_or_vocabulary_are_refused(tmp_path: Path) -> None:
    wide = numbered(weights(size=48))
    refused(folder_of(tmp_path / "wide", {}, wide), DrafterMismatch, "48", "32")
    refused(folder_of(tmp_path / "large", {}, numbered(weights(vocab=4096))), DrafterMismatch, "4096", "40")
    config = {**made(share=True).config.__dict__, "vocab_size": 4096, "speculator_type": "medusa"}
    folder = tmp_path / "shared"
    write_head(made(share=True), folder)
    (folder / "config.json").write_text(json.dumps(config))
    refused(folder, DrafterMismatch, "4096", "40")


def test_broken_heads_are_one_sentence(tmp_path: Path) -> None:
    tensors = numbered(weights())
    lacking = {name: tensor for name, tensor in tensors.items() if not name.startswith("1.")}
    refused(folder_of(tmp_path / "gap", {}, lacking), DrafterMismatch, "lack", "heads.1")
    odd = tensors | {"2.0.linear.bias": torch.zeros(7)}
    refused(folder_of(tmp_path / "odd", {}, odd), DrafterMismatch, "(7,)", "(32,)")
    uneven = tensors | {"2.1.weight": torch.zeros(9, SIZE)}
    refused(folder_of(tmp_path / "uneven", {}, uneven), DrafterMismatch, "different sizes")
    folder = folder_of(tmp_path / "cut", {"speculator_type": "medusa"}, tensors)
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:200])
    assert is_head(folder)                                              # it says so; reading says what is wrong
    refused(folder, ModelNotFound, "model.safetensors", "cannot be read")
    folder = folder_of(tmp_path / "settings", {}, tensors)
    (folder / "config.json").write_text("{")
    refused(folder, ModelNotFound, "config.json", "cannot be read")
    (folder / "config.json").write_text('{"vocab_size": "many"}')
    folder_of(tmp_path / "words", {"speculator_type": "medusa", "vocab_size": "many"}, numbered(weights(), projections=False))
    refused(tmp_path / "words", ModelNotFound, "config.json", "many")
    refused(tmp_path / "nowhere", ModelNotFound, "no draft head")


class _Evil:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def test_pickles_are_never_run(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "evil", {"speculator_type": "medusa"}, {}, "medusa_lm_head.pt")
    for write in (partial(pickle.dump, protocol=2), torch.save):
        with (folder / "medusa_lm_head.pt").open("wb") as file:
            write({"0.0.linear.weight": _Evil(tmp_path / "run")}, file)
        refused(folder, ModelNotFound, "medusa_lm_head.pt", "cannot be read")
        assert not (tmp_path / "run").exists()


def test_models_are_no_heads(tmp_path: Path) -> None:
    assert not is_head(folder_of(tmp_path / "model", {"model_type": "llama"}, base_names()))
    assert not is_head(folder_of(tmp_path / "numbers", {}, numbered(weights()) | {"norm.weight": torch.ones(1)}))
    assert not is_head(folder_of(tmp_path / "other", {"speculator_type": "eagle"}, numbered(weights())))
    assert not is_head(tmp_path) and not is_head(tmp_path / "nowhere")


# From names to engines ----------------------------------------------------------------------------------------------------


def test_a_folder_of_heads_drafts(tmp_path: Path) -> None:
    """The tree is the one asked for, else the one in the folder, else drawn anew in every round."""
    calibrated = MedusaHead(replace(medusa_head().config, tree=MEDUSA_TREE)).double()
    calibrated.load_state_dict(medusa_head().state_dict())
    write_head(medusa_head(), tmp_path / "dynamic")
    write_head(calibrated, tmp_path / "calibrated")
    plain = texts(load(model(), drafter="none"), prompts(8), max_new_tokens=20)
    for name, tree, nodes in (
        ("dynamic", None, 16),
        ("dynamic", loading.TreeShape(MEDUSA_TREE), len(MEDUSA_TREE)),
        ("calibrated", None, len(MEDUSA_TREE)),
        ("calibrated", "dynamic", 16),
    ):
        engine = load(model(), drafter=str(tmp_path / name), draft_tree=tree, budget=nodes)
        done = engine.generate(prompts(8), max_new_tokens=20)
        assert [(one.tokens, one.finish_reason) for one in done] == plain and accepted_share(done) > 0.05
        assert engine.drafter.default_budget == nodes


def test_names_that_cannot_be_loaded_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(loading.HEADS, "medusa", "demo-no-such-heads")
    with pytest.raises(ModelNotFound, match="no medusa heads for the demo model"):
        load(model(), drafter="medusa")
    with pytest.raises(BadInput, match=r"oracle.*medusa, redrafter.*folder"):
        load(model(), drafter="oracle")
    write_head(MedusaHead(MedusaConfig(2, 1, 48, VOCAB)), tmp_path)
    with pytest.raises(DrafterMismatch, match=r"48.*32"):
        load(model(), drafter=tmp_path)


def test_published_trees_by_name(tmp_path: Path) -> None:
    """For heads and for draft models alike."""
    write_head(MedusaHead.fresh(target(), 4), tmp_path)
    for options in ({"drafter": tmp_path}, {"assistant_model": model(num_hidden_layers=1)}):
        engine = load(model(), draft_tree="zephyr_stage2", **options)
        done = engine.generate(prompts(2), max_new_tokens=6)
        assert engine.budget.most == len(CHOICES["zephyr_stage2"]) and done[0].stats.drafted % 63 == 0
        with pytest.raises(BadInput, match="oak"):
            load(model(), draft_tree="oak", **options)
