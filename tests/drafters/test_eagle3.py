"""EAGLE-3 as published, against an independent forward; every flag matters or is refused."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import published
import pytest
import torch
from published import LAYER, attend, deep, drafted_logits, no_text_changes, norm, swiglu
from test_contract import depends_on_the_text_alone
from torch import Tensor

from draftproof.core.tree import TreeShape
from draftproof.drafters import eagle3
from draftproof.drafters.checkpoint import Checkpoint
from draftproof.drafters.features import FeatureDrafter
from draftproof.engine.load import load
from draftproof.errors import BadInput, DrafterMismatch

DRAFT_VOCAB = 24


@dataclass
class Case:
    """A checkpoint: its settings and tensors under the names of the original layout."""

    settings: dict[str, Any]
    tensors: dict[str, Tensor]

    def written(self, folder: Path, speculators: bool = False, **extra: Any) -> Path:
        settings, tensors = {**self.settings, **extra}, self.tensors
        if speculators:
            ours = {key: settings.pop(key) for key in (*LAYER, "model_type", "num_hidden_layers")}
            settings |= {"architectures": ["Eagle3DraftModel"], "transformer_layer_config": ours,
                         "speculators_model_type": extra.get("speculators_model_type", "eagle3"),
                         "speculators_config": extra.get("speculators_config", {}),
                         "embed_requires_grad": False}  # fmt: skip
            tensors = {key.replace("midlayer", "layers.0"): item for key, item in tensors.items()}
        return published.write(folder, settings, tensors)


def case(**flags: Any) -> Case:
    layers, ours = flags.get("num_hidden_layers", 1), flags.pop("own_embeddings", False)
    by_name = {"model_type": "llama", "num_hidden_layers": layers, "draft_vocab_size": DRAFT_VOCAB}
    shapes: dict[str, Any] = {
        "fc.weight": (32, 96), "norm.weight": (32,), "lm_head.weight": (DRAFT_VOCAB, 32),
        "midlayer.hidden_norm.weight": (32,), **published.layer_shapes("midlayer", 64),
    }  # fmt: skip
    for number in range(1, layers):
        shapes |= published.layer_shapes(f"layers.{number}")
    if flags.get("norm_before_fc"):
        shapes["input_norm.weight"] = (96,)
    if flags.get("fc_norm"):
        shapes |= {f"fc_norm.{index}.weight": (32,) for index in range(3)}
    if ours:
        shapes["embed_tokens.weight"] = (40, 32)
    tensors = published.random_tensors(shapes)
    ids = torch.randperm(40, generator=torch.Generator().manual_seed(0))[:DRAFT_VOCAB].sort()
    tensors["d2t"] = ids.values - torch.arange(DRAFT_VOCAB)
    tensors["t2d"] = torch.zeros(40, dtype=torch.bool).index_fill(0, ids.values, True)
    return Case({**LAYER, **by_name, **flags}, tensors)


def forward(
    item: Case, states: Tensor, tokens: Tensor, steps: int, last: int = -1
) -> list[Tensor]:
    """Logits over the target's tokens after a text [S] and after each of the last `steps` tokens,
    which were drafted: from the definition, one pair after another. states: [S, 3, 32]. last: 0,
    the logits of every pair at once."""
    w, flags = item.tensors, item.settings
    known = len(tokens) - steps                     # tokens with features of the target
    x = states[:known].flatten(1)
    if flags.get("norm_before_fc"):
        x = norm(x, w["input_norm.weight"])
    if flags.get("fc_norm"):
        parts = enumerate(x.split(32, -1))
        x = torch.cat([norm(part, w[f"fc_norm.{layer}.weight"]) for layer, part in parts], -1)
    features, items = list(x @ w["fc.weight"].T), list[Tensor]()
    table = w.get("embed_tokens.weight", deep().model.get_input_embeddings().weight.detach())
    for end in range(known, len(tokens)):           # the pairs of features :end with tokens 1:end+1
        g, e = torch.stack(features), table[tokens[1 : end + 1]]
        place, sees = torch.arange(end), torch.ones(end, end, dtype=torch.bool).tril()
        normed = norm(g, w["midlayer.hidden_norm.weight"])
        y = torch.cat([norm(e, w["midlayer.input_layernorm.weight"]), normed], -1)
        h = normed if flags.get("norm_before_residual") else g
        for number in range(flags["num_hidden_layers"]):
            at = f"layers.{number}" if number else "midlayer"
            y = norm(h, w[f"{at}.input_layernorm.weight"]) if number else y
            h = h + attend(w, f"{at}.self_attn", y, y, place, place, sees)
            h = h + swiglu(w, f"{at}.mlp", norm(h, w[f"{at}.post_attention_layernorm.weight"]))
        out = norm(h, w["norm.weight"])
        features.append((out if flags.get("norm_output") else h)[-1])
        for state in out[last:]:
            logits = torch.full((40,), -torch.inf, dtype=torch.float64)
            ours = state @ w["lm_head.weight"].T * flags.get("logit_scale", 1.0)
            items.append(logits.index_copy(0, torch.arange(DRAFT_VOCAB) + w["d2t"], ours))
    return items


def loaded(folder: Path) -> FeatureDrafter:
    return eagle3.load(Checkpoint(folder), deep())


TEXT, DRAFTED = [7, 3, 31, 2, 9, 4, 4, 1, 12], [5, 8, 0]
FORMS: list[dict[str, Any]] = [
    {}, {"norm_before_residual": True}, {"norm_before_fc": True}, {"fc_norm": True},
    {"norm_output": True}, {"num_hidden_layers": 2, "own_embeddings": True, "logit_scale": 0.5},
    {"eagle_aux_hidden_state_layer_ids": [1, 2, 6], "norm_before_fc": True, "fc_norm": True,
     "norm_output": True, "norm_before_residual": True},
]  # fmt: skip


@pytest.mark.parametrize("speculators", [False, True], ids=["original", "speculators"])
@pytest.mark.parametrize("flags", FORMS, ids=lambda flags: ", ".join(flags) or "plain")
def test_output_matches_an_independent_forward(
    tmp_path: Path, flags: dict[str, Any], speculators: bool
) -> None:
    checked = case(**flags)
    drafter = loaded(checked.written(tmp_path, speculators))
    layers = tuple(flags.get("eagle_aux_hidden_state_layer_ids", (2, 3, 4)))
    assert drafter.hidden_layers == layers
    drafts = drafted_logits(deep(), drafter, TEXT, DRAFTED)
    with torch.no_grad():
        states = deep().model(torch.tensor([TEXT]), output_hidden_states=True).hidden_states
    hidden = torch.stack([states[layer][0] for layer in layers], 1)
    wanted = forward(checked, hidden[:-1], torch.tensor(TEXT + DRAFTED), len(DRAFTED) + 1)
    for ours, theirs in zip(drafts, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=3e-5)     # norms are in float32


def test_layers_in_eagle_config_are_outputs(tmp_path: Path) -> None:
    inner = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
             "use_last_layernorm": True, "use_mtp_layernorm": False}  # fmt: skip
    folder = case().written(tmp_path, eagle_config=inner)
    assert loaded(folder).hidden_layers == (2, 3, 4)


FIXED = [key for key, kind in eagle3.KNOWN.items() if not isinstance(kind, (type, tuple))]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"norm_before_fc": True}, "input_norm"), ({"fc_norm": True}, "fc_norm.0"),
    ({"attention_bias": True}, "bias"), ({"use_aux_hidden_state": False}, "fc.weight"),
    ({"num_hidden_layers": 2}, "layers.1"), ({"head_dim": 16}, "shape"),
    ({"some_new_norm": True}, "some_new_norm"), ({"is_causal": False}, "is_causal"),
    ({"norm_output": "yes"}, "norm_output"), ({"logit_scale": "half"}, "half"),
    *(({"eagle_config": {key: 7}}, key) for key in ("another", *FIXED)),
    ({"model_type": "qwen3", "layer_types": ["sliding_attention"]}, "window"),
    ({"eagle_aux_hidden_state_layer_ids": [2, 3, 60]}, "60"),
    ({"hidden_size": 16}, "16"),
]  # fmt: skip


@pytest.mark.parametrize(("flag", "why"), REFUSED, ids=lambda item: str(item)[:30])
def test_unsupported_settings_are_refused(tmp_path: Path, flag: dict[str, Any], why: str) -> None:
    folder = case().written(tmp_path, **flag)
    with pytest.raises(DrafterMismatch, match=why) as error:
        loaded(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("change", ["extra", "lacking", "twice", "no d2t", "short d2t"])
def test_tensors_that_do_not_fit_are_refused(tmp_path: Path, change: str) -> None:
    checked = case()
    if change == "extra":
        checked.tensors["midlayer.self_attn.q_norm.weight"] = torch.ones(8, dtype=torch.float64)
    elif change == "short d2t":
        checked.tensors["d2t"] = checked.tensors["d2t"][1:]
    elif change == "twice":
        checked.tensors["d2t"][1] = checked.tensors["d2t"][0] - 1
    else:
        del checked.tensors["norm.weight" if change == "lacking" else "d2t"]
    if change == "no d2t":
        checked.tensors["lm_head.weight"] = torch.ones(7000, 32, dtype=torch.float64)
    with pytest.raises(DrafterMismatch):
        loaded(checked.written(tmp_path))


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_draft_distributions_are_kept(tmp_path: Path, temperature: float) -> None:
    folder = case().written(tmp_path)
    no_text_changes(loaded(folder), temperature)
    depends_on_the_text_alone(lambda: loaded(folder), drawn=temperature > 0, draws=True)


def test_folders_describe_their_drafter(tmp_path: Path) -> None:
    """`--drafter FOLDER`; another drafter of speculators is refused by its name."""
    deep().model.save_pretrained(tmp_path / "model")
    folder = str(case().written(tmp_path / "drafter", speculators=True))
    engine = load(tmp_path / "model", drafter=folder, budget=5)
    assert engine.drafter.name == "eagle3"
    wanted = load(tmp_path / "model", drafter="none").generate([[1, 2, 3]], max_new_tokens=9)[0]
    assert engine.generate([[1, 2, 3]], max_new_tokens=9)[0].tokens == wanted.tokens
    other = case().written(tmp_path / "other", True, speculators_model_type="nobody's")
    with pytest.raises(DrafterMismatch, match="nobody's"):
        load(tmp_path / "model", drafter=str(other))
    with pytest.raises(BadInput, match="shapes its own"):
        load(tmp_path / "model", drafter=folder, draft_tree=TreeShape.branching((2, 2)))


NEMO = {"midlayer": "model.layers.0", "fc.weight": "model.fc.weight",
        "norm.weight": "model.norm.weight", "lm_head": "lm_head",
        "d2t": "model.d2t", "t2d": "model.t2d"}  # fmt: skip


def test_names_of_nemo(tmp_path: Path) -> None:
    """`model.layers.0.*` and `model.fc`, with NVIDIA's `eagle_config`: the same drafts."""
    checked, inner = case(), {"use_aux_hidden_state": True, "use_last_layernorm": True,
                          "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}  # fmt: skip
    plain = loaded(checked.written(tmp_path / "plain"))
    keys = {key: next(key.replace(old, new, 1) for old, new in NEMO.items() if key.startswith(old))
            for key in checked.tensors}  # fmt: skip
    checked.tensors = {keys[key]: tensor for key, tensor in checked.tensors.items()}
    result = loaded(checked.written(tmp_path / "nemo", eagle_config=inner))
    assert result.hidden_layers == plain.hidden_layers
    assert published.proposal(result, TEXT) == published.proposal(plain, TEXT)


MASK, DEPTHS = 38, 4


def parallel(folder: Path, **changed: Any) -> Path:
    """A checkpoint of P-EAGLE, as `speculators` writes it, of two layers."""
    checked = case(num_hidden_layers=2, own_embeddings=True)
    values = torch.randn(1, 1, 96, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    checked.tensors["mask_hidden"] = 0.5 * values
    config = {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": DEPTHS}]}
    by_name = {"speculators_model_type": "peagle", "mask_token_id": MASK, "norm_output": False,
            "speculators_config": config, **changed}  # fmt: skip
    return checked.written(folder, True, **by_name)


def test_parallel_tokens_match_an_independent_forward(tmp_path: Path) -> None:
    """Each mask sees the text and the masks before it, with the learnt feature."""
    result = eagle3.load_parallel(Checkpoint(parallel(tmp_path)), deep())
    item = case(num_hidden_layers=2, own_embeddings=True)
    states = torch.Generator().manual_seed(7)
    feature = 0.5 * torch.randn(1, 1, 96, generator=states, dtype=torch.float64)
    with torch.no_grad():
        hidden = deep().model(torch.tensor([TEXT]), output_hidden_states=True).hidden_states
    taps = torch.stack([hidden[layer][0] for layer in result.hidden_layers], 1)[:-1]
    masks = feature.view(1, 3, 32).expand(DEPTHS - 1, -1, -1)
    tokens = torch.tensor([*TEXT, *[MASK] * (DEPTHS - 1)])
    wanted = forward(item, torch.cat([taps, masks]), torch.cat([tokens[:1], tokens[1:]]), 1, last=0)
    logits = drafted_logits(deep(), result, TEXT, [5, 8, 0])
    for ours, theirs in zip(logits, wanted[-DEPTHS:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=3e-5)
    assert len(published.proposal(result, TEXT, 9)) == DEPTHS + 1
    published.keeps_the_text(result)


def test_settings_of_parallel_tokens(tmp_path: Path) -> None:
    plain = published.proposal(eagle3.load_parallel(Checkpoint(parallel(tmp_path)), deep()), TEXT)
    other = eagle3.load_parallel(Checkpoint(parallel(tmp_path, mask_token_id=3)), deep())
    assert published.proposal(other, TEXT) != plain
    for change in ({"mask_token_id": None}, {"norm_output": True}, {"mask_token_id": 99},
                   {"parallel_draft_step": 4}, {"num_depths": 8}):  # fmt: skip
        with pytest.raises(DrafterMismatch):
            eagle3.load_parallel(Checkpoint(parallel(tmp_path, **change)), deep())
