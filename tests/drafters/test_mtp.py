"""Multi-token prediction from a model's own checkpoint: each layout against whole forwards."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from drafting import Watch, texts
from published import drafted_logits
from safetensors.torch import load_file, save_file
from tiny import prompts
from torch import Tensor

from draftproof.core.acceptance import RULES
from draftproof.core.params import Sampling
from draftproof.drafters import mtp
from draftproof.engine.engine import Engine
from draftproof.engine.load import load
from draftproof.engine.prefix_cache import PrefixCache
from draftproof.errors import DrafterMismatch, ModelNotFound
from draftproof.model.target import Target

SIZES: dict[str, Any] = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48,
                         "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                         "max_position_embeddings": 512, "eos_token_id": None, "pad_token_id": None,
                         "bos_token_id": None, "initializer_range": 0.3}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
FULL = {"layer_types": ["full_attention"] * 2, "head_dim": 8}
KINDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "qwen3.5": ("Qwen3_5TextConfig", {
        "layer_types": ["linear_attention"] * 3 + ["full_attention"], "num_hidden_layers": 4,
        "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "mtp_num_hidden_layers": 1}, "qwen"),
    "qwen3-next": ("Qwen3NextConfig", {
        **FULL, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16,
        "mtp_num_hidden_layers": 1}, "qwen"),
    "mimo": ("Qwen2Config", {"num_nextn_predict_layers": 1}, "mimo"),
    "glm-4.5": ("Glm4MoeConfig", {
        **EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1, "head_dim": 8,
        "num_nextn_predict_layers": 1}, "deepseek"),
    "deepseek-v3": ("DeepseekV3Config", {
        **EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1, "q_lora_rank": 16,
        "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
        "n_group": 2, "topk_group": 1, "num_key_value_heads": 4,
        "num_nextn_predict_layers": 1}, "deepseek"),
}  # fmt: skip
PUBLISHED: dict[str, dict[str, str]] = {
    "qwen": {"embed": "mtp.pre_fc_norm_embedding", "hidden": "mtp.pre_fc_norm_hidden",
             "proj": "mtp.fc", "norm": "mtp.norm", "layer": "mtp.layers.0."},
    "mimo": {"embed": "model.mtp_layers.0.token_layernorm", "layer": "model.mtp_layers.0.",
             "hidden": "model.mtp_layers.0.hidden_layernorm",
             "proj": "model.mtp_layers.0.input_proj", "norm": "model.mtp_layers.0.final_layernorm"},
    "deepseek": {"embed": "model.layers.2.enorm", "hidden": "model.layers.2.hnorm",
                 "proj": "model.layers.2.eh_proj", "layer": "model.layers.2.",
                 "norm": "model.layers.2.shared_head.norm"}
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A model's folder, with the layer for prediction in it as its publishers have it."""
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind] = _written(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return make


def _written(kind: str, folder: Path) -> Path:
    name, options, layout = KINDS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**{**SIZES, **options})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    layer, part = _layer(model), PUBLISHED[layout]
    with torch.no_grad():
        for key, weight in [*model.named_parameters(), *layer.named_parameters()]:
            if "norm" in key:
                weight += 0.3 * torch.randn_like(weight)
            elif key.endswith("e_score_correction_bias") or "experts" in key or weight.dim() == 1:
                weight.copy_(0.2 * torch.randn_like(weight))
        for weight in layer.parameters():
            if weight.dim() == 2:
                weight.copy_(0.3 * torch.randn_like(weight))
    model.save_pretrained(folder)
    own = {f"{part['layer']}{key}": one for key, one in _apart(layer.state_dict()).items()}
    zero = layout == "qwen"                                  # norms that count from one
    for what in ("embed", "hidden", "norm"):
        own[f"{part[what]}.weight"] = (0.0 if zero else 1.0) + 0.3 * torch.randn(32)
    own[f"{part['proj']}.weight"] = 0.3 * torch.randn(32, 64)
    if layout == "deepseek":
        own["model.layers.2.embed_tokens.weight"] = model.get_input_embeddings().weight.detach()
        own["model.layers.2.shared_head.head.weight"] = model.lm_head.weight.detach()
    file = folder / "model.safetensors"
    whole = {**load_file(file), **{key: one.contiguous().clone() for key, one in own.items()}}
    save_file(whole, file, metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text()) | {
        key: value for key, value in options.items() if key.endswith(("_layers", "hidden_layers"))
    }
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def _layer(model: Any) -> Any:
    """A further layer of a model's kind, of the kind that has experts if any."""
    config = copy.deepcopy(model.config)
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"]
    if hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = 0
    return type(model.model.layers[-1])(config, 0).eval()


def _apart(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts one by one, as checkpoints have them."""
    found = dict(state)
    for key in [key for key in state if key.endswith("experts.gate_up_proj")]:
        both, down = found.pop(key), found.pop(key.replace("gate_up", "down"))
        for number in range(len(both)):
            at = f"{key.removesuffix('gate_up_proj')}{number}."
            gate, up = both[number].chunk(2)
            found |= {f"{at}gate_proj.weight": gate, f"{at}up_proj.weight": up}
            found[f"{at}down_proj.weight"] = down[number]
    return found


def opened(folder: Path) -> Target:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return Target(model)


def reference(target: Target, folder: Path, kind: str, text: list[int], drafted: list[int]) -> Any:
    """Logits behind a text and after each drafted token: whole forwards without a cache."""
    layout, model = KINDS[kind][2], target.model
    part, w = PUBLISHED[layout], load_file(folder / "model.safetensors")
    layer, base = _layer(model).float(), model.model
    state = {key.removeprefix(part["layer"]): one for key, one in w.items()
             if key.startswith(part["layer"])}  # fmt: skip
    names = layer.state_dict()
    for key in [key for key in names if key.endswith("experts.gate_up_proj")]:
        at = key.removesuffix("gate_up_proj")
        numbers = range(len(names[key]))
        state[key] = torch.stack([
            torch.cat([state[f"{at}{n}.gate_proj.weight"], state[f"{at}{n}.up_proj.weight"]])
            for n in numbers])  # fmt: skip
        state[f"{at}down_proj"] = torch.stack([state[f"{at}{n}.down_proj.weight"] for n in numbers])
    layer.load_state_dict({key: state[key] for key in names})

    def norm(x: Tensor, what: str) -> Tensor:
        kind = type(base.norm)(32, eps=model.config.rms_norm_eps)
        kind.weight.data = w[f"{part[what]}.weight"]
        return kind(x)

    tokens, found = torch.tensor([text + drafted]), []
    with torch.no_grad():
        states = model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states[-1]
        for end in range(len(text) - 1, len(text) + len(drafted)):
            places = torch.arange(end)[None]
            embedded = model.get_input_embeddings()(tokens[:, 1 : end + 1])
            if layout == "mimo":
                embedded = embedded * (places > 0)[..., None]
            both = [norm(embedded, "embed"), norm(states, "hidden")]
            both = both[::-1] if layout == "mimo" else both
            x = torch.cat(both, -1) @ w[f"{part['proj']}.weight"].T
            mask = torch.full((1, 1, end, end), torch.finfo(x.dtype).min).triu(1)
            angles = base.rotary_emb(x, places)
            x = layer(x, position_embeddings=angles, attention_mask=mask, position_ids=places)
            out = norm(x[0] if isinstance(x, tuple) else x, "norm")
            found.append(model.lm_head(out[0, -1]))
            states = torch.cat([states, out[:, -1:]], 1)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_it_reads_as_whole_forwards(kind: str, checkpoint: Callable[[str], Path]) -> None:
    target, text, drafted = opened(checkpoint(kind)), [7, 3, 31, 2, 9, 4, 12], [5, 8, 0]
    found = drafted_logits(target, mtp.load(target), text, drafted)
    for ours, theirs in zip(found, reference(target, checkpoint(kind), kind, text, drafted),
                            strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("kind", ["glm-4.5", "deepseek-v3"])
def test_it_drafts_what_transformers_would(kind: str, checkpoint: Callable[[str], Path]) -> None:
    """The first drafted token's logits, as `MtpModel` computes them from the same checkpoint."""
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

    target, text = opened(checkpoint(kind)), [7, 3, 31, 2, 9, 4, 12]
    model = target.model
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.2\..*"]     # theirs are of 61
    theirs = MtpModel.from_pretrained(model).eval().float()
    with torch.no_grad():
        states = model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states[-1]
        _, logits, _ = theirs(torch.tensor([text[1:]]), states, None,
                              torch.arange(1, len(text))[None],
                              MtpCache(config=model.config.get_mtp_config()))  # fmt: skip
    found = drafted_logits(target, mtp.load(target), text, [])
    torch.testing.assert_close(found[0], logits[0, 0], rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_no_text_changes(kind: str, checkpoint: Callable[[str], Path]) -> None:
    target = opened(checkpoint(kind))
    drafter, asked = mtp.load(target), prompts(4, seed=4)
    for temperature in (0.0, 0.9):
        want = Sampling(temperature=temperature, seed=3)
        wanted = texts(Engine(target), asked, max_new_tokens=12, sampling=want)
        for rule in RULES if temperature == 0 else ("match",):
            engine = Engine(target, Watch(drafter), acceptance=rule, budget=5)
            assert texts(engine, asked, max_new_tokens=12, sampling=want) == wanted, rule


def test_it_is_named_like_any_drafter(checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint("qwen3.5")
    engine = load(folder, drafter="mtp", budget=4)
    wanted = load(folder, drafter="none").generate([[1, 2, 3]], max_new_tokens=9)[0]
    assert engine.generate([[1, 2, 3]], max_new_tokens=9)[0].tokens == wanted.tokens
    merged = load(checkpoint("mimo"), drafter="mtp+suffix", budget=4)
    plain = load(checkpoint("mimo"), drafter="none")
    both = [one.generate([[1, 2, 3]], max_new_tokens=9)[0].tokens for one in (merged, plain)]
    assert both[0] == both[1]


def test_prompts_are_read_whole_for_it(checkpoint: Callable[[str], Path]) -> None:
    """It needs the states of every token, so that of a known beginning is not left out."""
    target, text = opened(checkpoint("mimo")), [2 + n * n % 29 for n in range(300)]
    drafter, counts = mtp.load(target), []
    for size in (0, 8 << 20):
        engine = Engine(target, drafter, budget=4)
        engine.prefixes = PrefixCache(size) if size else None
        done = [engine.generate([text], max_new_tokens=30)[0] for _ in range(2)][-1]
        counts.append((done.tokens, done.stats.accepted, done.stats.rounds))
    assert counts[0] == counts[1]


CHANGES: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("qwen3.5", {"mtp.layers.0.self_attn.sinks": torch.ones(4)}, {}, "sinks"),
    ("qwen3.5", {"mtp.fc_embedding.weight": torch.ones(32, 32)}, {}, "fc_embedding"),
    ("qwen3.5", {"mtp.norm.weight": None}, {}, "norm.weight"),
    ("qwen3.5", {"mtp.layers.1.input_layernorm.weight": torch.ones(32)}, {}, "2 layers"),
    ("qwen3.5", {}, {"mtp_num_hidden_layers": 3}, "3 layers"),
    ("qwen3.5", {}, {"mtp_use_dedicated_embeddings": True}, "embeddings"),
    ("qwen3.5", {}, {"mtp_hidden_states_first": True}, "mtp_hidden_states_first"),
    ("glm-4.5", {"model.layers.2.shared_head.head.weight": torch.ones(40, 32)}, {}, "differs"),
    ("mimo", {"model.mtp_layers.0.extra.weight": torch.ones(3)}, {}, "extra"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "tensors", "settings", "why"), CHANGES)
def test_what_is_not_understood_is_refused(
    kind: str, tensors: dict[str, Any], settings: dict[str, Any], why: str, tmp_path: Path,
    checkpoint: Callable[[str], Path],
) -> None:  # fmt: skip
    target, folder = opened(checkpoint(kind)), tmp_path / "changed"
    shutil.copytree(checkpoint(kind), folder)
    whole = {**load_file(folder / "model.safetensors"), **tensors}
    kept = {key: one for key, one in whole.items() if one is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    changed = json.loads((folder / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps(changed))
    target.model.config.name_or_path = str(folder)
    with pytest.raises(DrafterMismatch, match=why) as error:
        mtp.load(target)
    assert "\n" not in str(error.value)


def test_a_model_without_one_is_told(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    target = opened(checkpoint("mimo"))
    target.model.save_pretrained(tmp_path)
    with pytest.raises(ModelNotFound, match="multi-token"):
        mtp.load(opened(tmp_path))
