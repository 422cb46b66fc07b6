"""Folders of draft heads: every published layout is read; crashes, strangers, misfits."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import VOCAB, target
from torch import Tensor

from draftproof.core.messages import Features
from draftproof.drafters.checkpoints import is_head, read_head, write_head
from draftproof.drafters.medusa import MedusaConfig, MedusaHead
from draftproof.drafters.redrafter import ReDrafterHead
from draftproof.errors import BadInput, DrafterMismatch, DraftproofError, ModelNotFound

SIZE = 32
SAFE, TGI, LEGACY = "model.safetensors", "medusa_lm_head.safetensors", "medusa_lm_head.pt"
Config = dict[str, Any]
Tensors = dict[str, Tensor]
Heads = list[tuple[list[Tensor], list[Tensor], Tensor]]
"""Of each head the matrices and biases of its layers, and its projection."""


def weights(heads: int = 3, layers: int = 1, vocab: int = VOCAB, size: int = SIZE) -> Heads:
    torch.manual_seed(heads + 10 * layers)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64) / 4

    return [([random(size, size) for _ in range(layers)], [random(size) for _ in range(layers)],
             random(vocab, size)) for _ in range(heads)]  # fmt: skip


def named(heads: Heads, block: str, projection: str = "", bias: bool = True) -> Tensors:
    """These heads by names made of head H, layer L, kind K, and the number of layers N."""
    result: Tensors = {}
    for head, (matrices, biases, last) in enumerate(heads):
        for layer, (matrix, ours) in enumerate(zip(matrices, biases, strict=True)):
            result[block.format(H=head, L=layer, K="weight")] = matrix.clone()
            if bias:
                result[block.format(H=head, L=layer, K="bias")] = ours.clone()
        if projection:
            result[projection.format(H=head, N=len(matrices))] = last
    return result


alone = partial(named, block="{H}.{L}.linear.{K}")
numbered = partial(alone, projection="{H}.{N}.weight")
merged = partial(named, block="medusa_head.{H}.{L}.linear.{K}",
                 projection="medusa_head.{H}.{N}.weight")
vllm = partial(named, block="blocks.{H}.layers.{L}.{K}", projection="lm_heads.{H}.weight")
inside = partial(named, block="medusa_heads.blocks.{H}.layers.{L}.{K}",
                 projection="medusa_heads.lm_heads.{H}.weight")
ranked = partial(named, block="medusa_heads.{H}.medusa_layers.{L}.linear.{K}",
                 projection="medusa_heads.{H}.lm_head.weight")
BASE = {f"model.layers.{number}.self_attn.q_proj.weight": torch.ones(SIZE, SIZE)
        for number in range(3)}
VLLM = {"model_type": "medusa", "hidden_size": SIZE, "vocab_size": VOCAB, "num_heads": 3}


def folder_of(path: Path, config: Config, tensors: Tensors, file: str = SAFE) -> Path:
    path.mkdir(exist_ok=True, parents=True)
    (path / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / file)
    else:
        torch.save(tensors, path / file)
    return path


def assert_says(head: Any, heads: Heads, shared: bool = False) -> None:
    """The head's logits are those of these weights, computed plainly."""
    assert isinstance(head, MedusaHead) and head.steps == len(heads)
    hidden = torch.randn(1, 12, 1, SIZE, dtype=torch.float64)
    features = Features(torch.zeros(1, 12, dtype=torch.int64), hidden, torch.ones(1, 12))
    with torch.no_grad():
        output = head.predict(features, target())
        for (matrices, biases, table), ours in zip(heads, output, strict=True):
            state = hidden[0, : ours.shape[1], 0]
            for matrix, bias in zip(matrices, biases, strict=True):
                state = state + torch.nn.functional.silu(state @ matrix.T + bias)
            theirs = target().unembed(state) if shared else state @ table.T
            known = min(theirs.shape[-1], VOCAB)
            torch.testing.assert_close(ours[0, :, :known], theirs[:, :known], rtol=0, atol=1e-12)
            assert (ours[..., known:] == -torch.inf).all()


# Medusa heads -----------------------------------------------------------------------------------

WRONG = {"base_model_name_or_path": "lmsys/vicuna", "medusa_num_heads": 2, "medusa_num_layers": 1}
SECOND = {"version": "2", "medusa_num_heads": 3}
TRT = {"num_medusa_heads": 2, "medusa_choices": [[0], [0, 0], [1]]}
NO_BIAS: Heads = [(item, [torch.zeros(SIZE).double()], last) for item, _, last in weights()]
LAYOUTS: dict[str, tuple[Config, Tensors, str, Heads, bool]] = {
    "v0.1 says 2 heads": (WRONG, numbered(weights(5)), LEGACY, weights(5), False),
    "v0.1 safetensors": (WRONG, numbered(weights(2, 3)), TGI, weights(2, 3), False),
    "version 2": (SECOND, alone(weights(4, 2)), TGI, weights(4, 2), True),
    "vllm": (VLLM, vllm(weights(3, 2)), SAFE, weights(3, 2), False),
    "vllm, inside": (VLLM, inside(weights(3, 2)), SAFE, weights(3, 2), False),
    "vllm, no bias": (VLLM, vllm(weights(), bias=False), SAFE, NO_BIAS, False),
    "vllm, original head": ({**VLLM, "original_lm_head": True}, vllm(weights()), SAFE, weights(),
                            True),
    "tensorrt-llm": (TRT, ranked(weights(2, 2)) | BASE, "rank0.safetensors", weights(2, 2), False),
    "cut table": ({}, numbered(weights(vocab=VOCAB - 3)), SAFE, weights(vocab=VOCAB - 3), False),
    "padded table": ({}, numbered(weights(vocab=VOCAB + 24)), SAFE, weights(vocab=VOCAB + 24),
                     False),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_published_layouts_are_read(layout: str, tmp_path: Path) -> None:
    config, tensors, file, inputs, shared = LAYOUTS[layout]
    head = read_head(folder_of(tmp_path, config, tensors, file), target())
    assert_says(head, inputs, shared)
    assert head.config.base_model == config.get("base_model_name_or_path", "")


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_only_the_heads_of_a_merged_model_are_read(tmp_path: Path, kind: str) -> None:
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
    inputs, ids = weights(vocab=6), torch.tensor([1, 4, 9, 16, 25, 36])
    few = folder_of(tmp_path / "few", VLLM, vllm(inputs) | {"token_map": ids})
    head = read_head(few, target())
    assert isinstance(head, MedusaHead) and head.config.draft_vocab_size == 6
    assert head.token_map is not None and torch.equal(head.token_map, ids)
    assert torch.equal(head.state_dict()["heads.1.proj.weight"], inputs[1][2])
    full = folder_of(tmp_path / "all", VLLM, vllm(weights()) | {"token_map": ids})
    assert_says(read_head(full, target()), weights())
    ids = torch.tensor([1, 4, 9, 16, 25, 99])
    folder = folder_of(tmp_path / "foreign", VLLM, vllm(inputs) | {"token_map": ids})
    refused(folder, DrafterMismatch, "up to 99", "has 40")


# ReDrafters -------------------------------------------------------------------------------------

FORMS: dict[str, Config] = {
    "published": {}, "two blocks": {"num_layers": 2, "steps": 4}, "narrow": {"exit_dim": 40},
    "shared": {"share_lm_head": True},
}  # fmt: skip
APPLE = {"model_type": "recurrent_drafting_drafter", "num_draft_layers": 9}
"""How many blocks there are is read off the tensors."""


def redrafter(**form: Any) -> ReDrafterHead:
    torch.manual_seed(0)
    head = ReDrafterHead.fresh(target(), **form)
    for weight in head.parameters():
        weight.data.normal_()
    return head


def tensorrt(name: str) -> str:
    parts = name.split(".")
    last = parts[0] == "lm_head" and len(parts) == 3
    return "drafter.lm_head.weight" if last else f"drafter.{name.replace('lm_head.', 'layers.')}"


RENAMES: dict[str, tuple[Callable[[str], str], str, Config]] = {
    "apple": (str, SAFE, {}), "pickled": (str, "model.pt", {}),
    "older": (lambda name: name.replace("_proj.", "_projs.").replace("lm_head.", "lm_heads."), SAFE,
              {}),
    "numbered": (lambda name: name.replace("lm_head.", "0."), SAFE, {}),
    "tensorrt-llm": (tensorrt, "rank0.safetensors",
                     {"rnn_activation": "none", "skip_u_at_first_step": True}),
}  # fmt: skip


@pytest.mark.parametrize("rename", RENAMES)
@pytest.mark.parametrize("form", ["published", "two blocks", "narrow"])
def test_every_family_of_names_is_read(form: str, rename: str, tmp_path: Path) -> None:
    """TensorRT-LLM's next to the base model's tensors, and run as that engine runs them."""
    head, (theirs, file, runs) = redrafter(**FORMS[form]), RENAMES[rename]
    tensors = {theirs(name): tensor for name, tensor in head.state_dict().items()}
    settings = {**APPLE, "redrafter_draft_len_per_beam": head.steps}
    folder = folder_of(tmp_path, settings, tensors | BASE, file)
    result, inputs = read_head(folder, target()), head.state_dict()
    assert result.config == replace(head.config, base_model="", **runs)
    assert result.state_dict().keys() == inputs.keys()
    assert all(torch.equal(item, inputs[name]) for name, item in result.state_dict().items())


@pytest.mark.parametrize("form", ["published", "two blocks", "narrow"])
@pytest.mark.parametrize("says", ["rnn", "redrafter_is_rnn"])
def test_without_a_recurrence_embeddings_are_summed(form: str, says: str, tmp_path: Path) -> None:
    head = redrafter(**FORMS[form])
    tensors = {key: each for key, each in head.state_dict().items() if "rnn" not in key}
    folder_of(tmp_path, {**APPLE, says: False}, tensors)
    result = read_head(tmp_path, target())
    write_head(result, tmp_path / "ours")
    for item in (result, read_head(tmp_path / "ours", target())):
        assert is_head(tmp_path) and isinstance(item, ReDrafterHead)
        assert all(torch.equal(item.state_dict()[key], tensors[key]) for key in tensors)
        state, summed = None, torch.zeros(3, SIZE).double()
        for embedded in torch.randn(3, 3, SIZE).double():
            state, summed = item.advance(embedded, state), summed + embedded
            torch.testing.assert_close(state, summed, rtol=0, atol=1e-12)


# Written and read again -------------------------------------------------------------------------


def medusa(share: bool, layers: int = 1, rows: int | None = None) -> MedusaHead:
    form = MedusaConfig(num_heads=3, num_layers=layers, hidden_size=SIZE, vocab_size=VOCAB,
                        share_lm_head=share, base_model="org/base")  # fmt: skip
    head = MedusaHead(form).double()
    torch.manual_seed(layers)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    if rows is not None:
        head.limit_vocabulary(torch.randperm(VOCAB)[:rows], target())
    head.count(torch.tensor([1, 1, 3, 3, 3]), torch.tensor([2, 2, 0, 0, 0]))
    return head


WRITTEN: dict[str, Callable[[], Any]] = {
    "medusa": lambda: medusa(False, 3), "medusa, shared": lambda: medusa(True),
    "medusa, few tokens": lambda: medusa(True, rows=7), "half": lambda: redrafter().bfloat16(),
    **{name: partial(redrafter, **form) for name, form in FORMS.items()},
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_heads_round_trip_bit_for_bit(name: str, tmp_path: Path) -> None:
    """To the bit; nothing that the target has is written."""
    head, folder = WRITTEN[name](), tmp_path / "new" / "head"
    write_head(head, folder)
    again, inputs = read_head(folder, target()), head.state_dict()
    assert again.config == head.config and again.state_dict().keys() == inputs.keys()
    assert all(torch.equal(each, inputs[name]) for name, each in again.state_dict().items())
    held = load_file(folder / SAFE)
    assert not any(name.startswith("projection") for name in held)
    for item, other in zip(getattr(head, "pairs", None) or (), getattr(again, "pairs", None) or (),
                          strict=True):
        assert item == other if isinstance(item, int) else torch.equal(item, other)


def test_a_crash_leaves_no_readable_partial_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether there was a head before or not, whether weights or settings were being written."""
    write, broken = Path.write_bytes, ""

    def full(file: Path, content: bytes) -> int:
        if broken in file.name:
            raise OSError("the disk is full")
        return write(file, content)

    for broken in (SAFE, "config.json"):
        for layers in (1, 2):
            with monkeypatch.context() as patched, pytest.raises(OSError, match="full"):
                patched.setattr(Path, "write_bytes", full)
                write_head(medusa(False, layers), tmp_path / broken)
            assert not is_head(tmp_path / broken)
            write_head(medusa(False, layers), tmp_path / broken)
            assert is_head(tmp_path / broken)


def test_nothing_else_is_overwritten(tmp_path: Path) -> None:
    """Models, merged models, heads of another layout or kind; a head of the same kind is."""
    folder_of(tmp_path / "model", {"model_type": "llama"}, BASE)
    folder_of(tmp_path / "merged", {"model_type": "llama"}, merged(weights()) | BASE)
    folder_of(tmp_path / "vllm", VLLM, vllm(weights()))
    write_head(redrafter(), tmp_path / "other")
    for folder in tmp_path.iterdir():
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        with pytest.raises(BadInput, match="something else already"):
            write_head(medusa(False), folder)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    write_head(medusa(False), tmp_path / "mine")
    (tmp_path / "mine" / "optimizer.pt").write_bytes(b"state of a training run")
    write_head(medusa(False, 2), tmp_path / "mine")
    assert read_head(tmp_path / "mine", target()).config.num_layers == 2


# Mistakes ---------------------------------------------------------------------------------------


def refused(folder: Path, kind: type[DraftproofError], *words: str) -> None:
    """One sentence with all words."""
    with pytest.raises(kind) as error:
        read_head(folder, target())
    text = str(error.value)
    assert "\n" not in text and all(word in text for word in words), text


@pytest.mark.parametrize("name", [
    "heads.999999999.blocks.0.weight", "heads.0.blocks.999999999.weight",
    f"heads.{'9' * 30}.blocks.0.weight", f"heads.{'9' * 9000}.blocks.0.weight"],
    ids=["head", "block", "30 digits", "9000 digits"])  # fmt: skip
def test_huge_numbers_in_tensor_names_allocate_nothing(name: str, tmp_path: Path) -> None:
    write_head(medusa(False), tmp_path)
    tensors = load_file(tmp_path / SAFE)
    save_file({**tensors, name: torch.zeros(SIZE, SIZE)}, tmp_path / SAFE)
    with pytest.raises(DraftproofError):
        read_head(tmp_path, target())


@pytest.mark.parametrize("name", ["vocab_size", "steps", "num_hidden_layers"])
def test_huge_numbers_in_settings_allocate_nothing(name: str, tmp_path: Path) -> None:
    write_head(redrafter(), tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    for number in (10**12, 10**400, -5):
        text = json.dumps({**settings, name: number})
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
        with pytest.raises(DrafterMismatch, match=f"the setting {name} of"):
            read_head(tmp_path, target())


@pytest.mark.parametrize("column", ["starts", "tokens", "gains", "rest"])
def test_a_broken_table_of_pairs_is_refused(column: str, tmp_path: Path) -> None:
    """C reads it: of the wrong lengths, of other kinds, out of order, not finite."""
    head = medusa(False)
    tokens = torch.tensor([1, 1, 2, 2, 3, 3])
    head.count(tokens, tokens.roll(1))
    head.count(torch.tensor([1, 1, 1, 1, 2, 2]), torch.tensor([2, 2, 3, 3, 4, 4]))
    write_head(head, tmp_path)
    sound = load_file(tmp_path / SAFE)
    key = f"pairs.{column}"
    good = sound[key]
    assert isinstance(read_head(tmp_path, target()), MedusaHead) and len(sound["pairs.tokens"]) > 2
    wrong = [good[:0], good[:2], torch.cat([good, good]), good[None], good.sum()]
    if good.is_floating_point():
        wrong += [good.long(), torch.full_like(good, torch.nan), torch.full_like(good, torch.inf)]
    else:
        wrong += [good.float(), torch.full_like(good, -1), torch.full_like(good, 1 << 30)]
    for tensor in wrong:
        save_file({**sound, key: tensor.clone()}, tmp_path / SAFE)
        with pytest.raises(DrafterMismatch):
            read_head(tmp_path, target())
    save_file({name: item for name, item in sound.items() if name != key}, tmp_path / SAFE)
    if column == "tokens":                                  # heads without pairs
        assert read_head(tmp_path, target()).pairs is None
    else:
        with pytest.raises(DrafterMismatch, match=f"lack {key}"):
            read_head(tmp_path, target())


def test_mismatched_or_broken_heads_are_reported_in_one_sentence(tmp_path: Path) -> None:
    tensors, head = numbered(weights()), {"speculator_type": "medusa"}
    gap = {name: tensor for name, tensor in tensors.items() if name[:2] != "1."}
    whole = redrafter(num_layers=2).state_dict()
    lacks = [{item: tensor for item, tensor in whole.items() if item != name}
             for name in ("rnn_u.bias", "lm_head.0.linear.bias", "lm_head.2.weight")]  # fmt: skip
    wide = ReDrafterHead.fresh(target(hidden_size=64)).state_dict()
    cases: dict[str, tuple[Config, Tensors, tuple[str, ...]]] = {
        "wide": ({}, numbered(weights(size=48)), ("48", "32")),
        "large": ({}, numbered(weights(vocab=4096)), ("4096", "40")),
        "shared": ({"vocab_size": 4096}, alone(weights()), ("4096", "40")),
        "gap": ({}, gap, ("lack", "heads.1")),
        "odd": ({}, tensors | {"2.0.linear.bias": torch.zeros(7)}, ("(7,)", "(32,)")),
        "no bias": (APPLE, lacks[0], ("rnn_u.bias",)),
        "no block": (APPLE, lacks[1], ("lm_head.0",)),
        "no projection": (APPLE, lacks[2], ("lacks its projection",)),
        "shape": (APPLE, {**whole, "rnn_w.weight": torch.zeros(SIZE, 31)}, ("rnn_w", "31")),
        "wide redrafter": (APPLE, wide, ("64 numbers", "32")),
    }
    for name, (config, inputs, words) in cases.items():
        refused(folder_of(tmp_path / name, config, inputs), DrafterMismatch, *words)
    file = folder_of(tmp_path / "cut", head, tensors) / SAFE
    file.write_bytes(file.read_bytes()[:200])
    assert is_head(tmp_path / "cut")                            # reading says what is wrong
    refused(tmp_path / "cut", ModelNotFound, SAFE, "cannot be read")
    (folder_of(tmp_path / "settings", {}, tensors) / "config.json").write_text("{")
    refused(tmp_path / "settings", ModelNotFound, "config.json", "cannot be read")
    folder_of(tmp_path / "words", {**head, "vocab_size": "many"}, alone(weights()))
    refused(tmp_path / "words", ModelNotFound, "config.json", "many")
    for rank in (0, 1):
        folder_of(tmp_path / "parts", {}, ranked(weights()), f"rank{rank}.safetensors")
    refused(tmp_path / "parts", ModelNotFound, "rank0", "rank1", "as one")
    models = {"model": BASE, "table": BASE | {"lm_head.weight": torch.zeros(VOCAB, SIZE)}}
    for name, inputs in models.items():
        assert not is_head(folder_of(tmp_path / name, {"model_type": "llama"}, inputs))
    assert not is_head(folder_of(tmp_path / "eagle", {"speculator_type": "eagle"}, tensors))
    refused(tmp_path / "nowhere", ModelNotFound, "no draft head")


class _Evil:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def test_pickles_are_never_executed(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "evil", {"speculator_type": "medusa"}, {}, LEGACY)
    for write in (partial(pickle.dump, protocol=2), torch.save):
        with (folder / LEGACY).open("wb") as file:
            write({"0.0.linear.weight": _Evil(tmp_path / "run")}, file)
        refused(folder, ModelNotFound, LEGACY, "cannot be read")
        assert not (tmp_path / "run").exists()
