"""EAGLE-3 as published, against an independent forward; every flag matters or is refused."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import published
import pytest
import torch
from published import (
    LAYER,
    attend,
    deep,
    drafted_logits,
    no_text_changes,
    norm,
    swiglu,
)
from test_contract import depends_on_the_text_alone
from torch import Tensor

from draftproof.core.acceptance import RULES
from draftproof.core.tree import TreeShape
from draftproof.drafters import eagle3
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
            own = {key: settings.pop(key) for key in (*LAYER, "model_type", "num_hidden_layers")}
            method = {"algorithm": "eagle3", "verifier": {"name_or_path": "target"}}
            settings |= {"architectures": ["Eagle3DraftModel"],
                         "speculators_model_type": extra.get("speculators_model_type", "eagle3"),
                         "speculators_version": "0.9.0", "transformer_layer_config": own,
                         "speculators_config": method, "embed_requires_grad": False}  # fmt: skip
            tensors = {key.replace("midlayer", "layers.0"): one for key, one in tensors.items()}
        return published.write(folder, settings, tensors)


def case(seed: int = 0, **flags: Any) -> Case:
    layers = flags.get("num_hidden_layers", 1)
    own = {"model_type": "llama", "num_hidden_layers": layers, "draft_vocab_size": DRAFT_VOCAB}
    shapes: dict[str, Any] = {
        "fc.weight": (32, 96), "norm.weight": (32,), "lm_head.weight": (DRAFT_VOCAB, 32),
        **published.attention_shapes("midlayer.self_attn", 64),
        **published.mlp_shapes("midlayer.mlp"),
        **{f"midlayer.{name}.weight": (32,) for name in (
            "hidden_norm", "input_layernorm", "post_attention_layernorm")},
    }  # fmt: skip
    for number in range(1, layers):
        shapes |= published.attention_shapes(f"layers.{number}.self_attn")
        shapes |= published.mlp_shapes(f"layers.{number}.mlp")
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"layers.{number}.{name}.weight"] = (32,)
    if flags.get("norm_before_fc"):
        shapes["input_norm.weight"] = (96,)
    if flags.get("fc_norm"):
        shapes |= {f"fc_norm.{one}.weight": (32,) for one in range(3)}
    if flags.pop("own_embeddings", False):
        shapes["embed_tokens.weight"] = (40, 32)
    tensors = published.random_tensors(shapes, seed)
    ids = torch.randperm(40, generator=torch.Generator().manual_seed(seed))[:DRAFT_VOCAB].sort()
    tensors["d2t"] = ids.values - torch.arange(DRAFT_VOCAB)
    tensors["t2d"] = torch.zeros(40, dtype=torch.bool).index_fill(0, ids.values, True)
    return Case({**LAYER, **own, **flags}, tensors)


def forward(one: Case, taps: Tensor, tokens: Tensor, steps: int) -> list[Tensor]:
    """Logits over the target's tokens behind a text [S] and after each of the last `steps` tokens,
    which were drafted: from the definition, one pair after another."""
    w, flags = one.tensors, one.settings
    known = len(tokens) - steps                     # tokens with features of the target
    x = taps[: known].flatten(1)
    if flags.get("norm_before_fc"):
        x = norm(x, w["input_norm.weight"])
    if flags.get("fc_norm"):
        parts = zip(x.split(32, -1), range(3), strict=True)
        x = torch.cat([norm(part, w[f"fc_norm.{tap}.weight"]) for part, tap in parts], -1)
    features = list(x @ w["fc.weight"].T)
    table = w.get("embed_tokens.weight", deep().model.get_input_embeddings().weight.detach())
    found = []
    for end in range(known, len(tokens) + 1):       # the pairs of features :end with tokens 1:end+1
        rows = min(end, len(tokens) - 1)
        g, e = torch.stack(features[:rows]), table[tokens[1 : rows + 1]]
        place, sees = torch.arange(rows), torch.ones(rows, rows, dtype=torch.bool).tril()
        normed = norm(g, w["midlayer.hidden_norm.weight"])
        both = torch.cat([norm(e, w["midlayer.input_layernorm.weight"]), normed], -1)
        h = normed if flags.get("norm_before_residual") else g
        h = h + attend(w, "midlayer.self_attn", both, both, place, place, sees)
        y = norm(h, w["midlayer.post_attention_layernorm.weight"])
        h = h + swiglu(w, "midlayer.mlp", y)
        for number in range(1, flags["num_hidden_layers"]):
            at = f"layers.{number}"
            y = norm(h, w[f"{at}.input_layernorm.weight"])
            h = h + attend(w, f"{at}.self_attn", y, y, place, place, sees)
            y = norm(h, w[f"{at}.post_attention_layernorm.weight"])
            h = h + swiglu(w, f"{at}.mlp", y)
        out = norm(h, w["norm.weight"])
        features.append((out if flags.get("norm_output") else h)[-1])
        logits = torch.full((40,), -torch.inf, dtype=torch.float64)
        own = out[-1] @ w["lm_head.weight"].T * (flags.get("logit_scale") or 1.0)
        found.append(logits.index_copy(0, torch.arange(DRAFT_VOCAB) + w["d2t"], own))
        if end == len(tokens) - 1:
            break
    return found


def loaded(folder: Path, shape: TreeShape | None = None) -> FeatureDrafter:
    return eagle3.load(folder, deep(), 7, shape)


TEXT, DRAFTED = [7, 3, 31, 2, 9, 4, 4, 1, 12], [5, 8, 0]
FORMS = [{}, {"norm_before_residual": True}, {"norm_before_fc": True}, {"fc_norm": True},
         {"norm_output": True}, {"num_hidden_layers": 2}, {"logit_scale": 0.5},
         {"own_embeddings": True}, {"eagle_aux_hidden_state_layer_ids": [1, 2, 6]},
         {"norm_before_fc": True, "fc_norm": True, "norm_output": True,
          "norm_before_residual": True}]  # fmt: skip


@pytest.mark.parametrize("speculators", [False, True], ids=["original", "speculators"])
@pytest.mark.parametrize("flags", FORMS, ids=lambda flags: ", ".join(flags) or "plain")
def test_it_reads_as_an_independent_forward(
    tmp_path: Path, flags: dict[str, Any], speculators: bool
) -> None:
    if speculators and "logit_scale" in flags:
        return
    one = case(**flags)
    drafter = loaded(one.written(tmp_path, speculators))
    taps = tuple(flags.get("eagle_aux_hidden_state_layer_ids", (2, 3, 4)))
    assert drafter.hidden_layers == taps
    found = drafted_logits(deep(), drafter, TEXT, DRAFTED)
    with torch.no_grad():
        states = deep().model(torch.tensor([TEXT]), output_hidden_states=True).hidden_states
    hidden = torch.stack([states[layer][0] for layer in taps], 1)
    wanted = forward(one, hidden[:-1], torch.tensor(TEXT + DRAFTED), len(DRAFTED) + 1)
    assert len(wanted) == len(found)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=3e-5)     # norms are in float32


def test_layers_in_eagle_config_are_outputs(tmp_path: Path) -> None:
    inner = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
             "use_last_layernorm": True, "use_mtp_layernorm": False}  # fmt: skip
    folder = case().written(tmp_path, eagle_config=inner)
    assert loaded(folder).hidden_layers == (2, 3, 4)


TOGGLES: list[dict[str, Any]] = [
    {"norm_before_residual": True}, {"norm_output": True}, {"logit_scale": 2.0},
    {"rope_theta": 77.0}, {"rms_norm_eps": 0.1}, {"hidden_act": "gelu"},
    {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}, {"sliding_window": 3, "model_type": "mistral"},
]  # fmt: skip
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"norm_before_fc": True}, "input_norm"), ({"fc_norm": True}, "fc_norm.0"),
    ({"attention_bias": True}, "bias"), ({"mlp_bias": True}, "bias"),
    ({"use_aux_hidden_state": False}, "fc.weight"), ({"target_hidden_size": 16}, "16"),
    ({"num_hidden_layers": 2}, "layers.1"), ({"draft_vocab_size": 40}, "maps"),
    ({"some_new_norm": True}, "some_new_norm"), ({"is_causal": False}, "is_causal"),
    *(({"eagle_config": {key: 7}}, key) for key in ("another", *eagle3.FIXED)),
    ({"norm_output": "yes"}, "norm_output"), ({"use_aux_hidden_state": 1}, "true or false"),
    ({"logit_scale": "half"}, "half"),
    ({"model_type": "qwen3", "layer_types": ["sliding_attention"]}, "window"),
    ({"eagle_aux_hidden_state_layer_ids": [2, 3, 60]}, "60"), ({"head_dim": 16}, "shape"),
]  # fmt: skip


@pytest.mark.parametrize("flag", TOGGLES, ids=lambda flag: next(iter(flag)))
def test_a_flag_changes_what_is_drafted(tmp_path: Path, flag: dict[str, Any]) -> None:
    one = case()
    folders = one.written(tmp_path / "one"), one.written(tmp_path / "other", **flag)
    found = (drafted_logits(deep(), loaded(folder), TEXT, DRAFTED) for folder in folders)
    both = zip(*found, strict=True)
    assert any(not torch.allclose(ours, theirs, atol=1e-6) for ours, theirs in both)


def test_every_setting_that_is_known_is_examined() -> None:
    examined = [*TOGGLES, *(flag for flag, _ in REFUSED)]
    assert {key for flag in examined for key in flag} >= eagle3.KNOWN


@pytest.mark.parametrize(("flag", "why"), REFUSED, ids=lambda one: str(one)[:30])
def test_what_is_not_understood_is_refused(tmp_path: Path, flag: dict[str, Any], why: str) -> None:
    folder = case().written(tmp_path, **flag)
    with pytest.raises(DrafterMismatch, match=why) as error:
        loaded(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("change", ["extra", "lacking", "twice", "t2d"])
def test_tensors_that_do_not_fit_are_refused(tmp_path: Path, change: str) -> None:
    one = case()
    if change == "extra":
        one.tensors["midlayer.self_attn.q_norm.weight"] = torch.ones(8, dtype=torch.float64)
    elif change == "lacking":
        del one.tensors["norm.weight"]
    elif change == "twice":
        one.tensors["d2t"][1] = one.tensors["d2t"][0] - 1
    else:
        one.tensors["t2d"] = one.tensors["t2d"].roll(1)
    with pytest.raises(DrafterMismatch):
        loaded(one.written(tmp_path))


@pytest.mark.parametrize("shape", [None, TreeShape.branching((2, 2))], ids=["search", "fixed"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_no_text_changes(tmp_path: Path, shape: TreeShape | None, temperature: float) -> None:
    rules = [rule for rule in RULES if rule != "block" or shape is None]
    no_text_changes(loaded(case().written(tmp_path), shape), temperature, rules)


@pytest.mark.parametrize("drawn", [False, True])
def test_a_proposal_depends_on_the_text_alone(tmp_path: Path, drawn: bool) -> None:
    folder = case().written(tmp_path)
    depends_on_the_text_alone(lambda: loaded(folder), drawn, draws=True)


def test_a_folder_says_what_it_is(tmp_path: Path) -> None:
    """`--drafter FOLDER`; another drafter of speculators is refused by its name."""
    deep().model.save_pretrained(tmp_path / "model")
    folder = str(case().written(tmp_path / "drafter", speculators=True))
    engine = load(tmp_path / "model", drafter=folder, budget=5)
    assert engine.drafter.name == "eagle3"
    wanted = load(tmp_path / "model", drafter="none").generate([[1, 2, 3]], max_new_tokens=9)[0]
    assert engine.generate([[1, 2, 3]], max_new_tokens=9)[0].tokens == wanted.tokens
    other = case().written(tmp_path / "other", True, speculators_model_type="peagle")
    with pytest.raises(BadInput, match="peagle"):
        load(tmp_path / "model", drafter=str(other))
