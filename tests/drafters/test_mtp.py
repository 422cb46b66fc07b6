"""Multi-token prediction from a model's own checkpoint: each layout against whole forwards."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from published import drafted_logits, keeps_the_text, no_text_changes
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from draftproof.drafters import mtp
from draftproof.drafters.checkpoints import load_drafter
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


class Made(NamedTuple):
    """A model's folder, and the layer for prediction that is in it as its publishers have it."""

    folder: Path
    layer: Any
    norms: dict[str, Tensor]
    proj: Tensor

    def opened(self) -> Target:
        model = transformers.AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
        return Target(model.eval())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    return lru_cache(lambda kind: _written(kind, tmp_path_factory.mktemp(kind)))


def _written(kind: str, folder: Path) -> Made:
    name, options, layout = KINDS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**{**SIZES, **options})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    single, names = copy.deepcopy(model.config), PUBLISHED[layout]
    if getattr(single, "layer_types", None):
        single.layer_types = ["full_attention"]
    if hasattr(single, "first_k_dense_replace"):
        single.first_k_dense_replace = 0
    layer = type(model.model.layers[-1])(single, 0).eval().requires_grad_(False)
    for key, weight in [*model.named_parameters(), *layer.named_parameters()]:
        if "norm" in key:
            weight.data += 0.3 * torch.randn_like(weight)
        elif key.endswith("e_score_correction_bias") or "experts" in key or weight.dim() == 1:
            weight.data = 0.2 * torch.randn_like(weight)
    for weight in layer.parameters():
        if weight.dim() == 2:
            weight.copy_(0.3 * torch.randn_like(weight))
    model.save_pretrained(folder)
    zero = layout == "qwen"                                  # norms that count from one
    norms = {what: (0.0 if zero else 1.0) + 0.3 * torch.randn(32)
             for what in ("embed", "hidden", "norm")}  # fmt: skip
    made = Made(folder, layer, norms, 0.3 * torch.randn(32, 64))
    by_name = {f"{names['layer']}{key}": item for key, item in _apart(layer.state_dict()).items()}
    by_name |= {f"{names[what]}.weight": item for what, item in norms.items()}
    by_name[f"{names['proj']}.weight"] = made.proj
    if layout == "deepseek":
        by_name["model.layers.2.embed_tokens.weight"] = model.get_input_embeddings().weight.detach()
        by_name["model.layers.2.shared_head.head.weight"] = model.lm_head.weight.detach()
    settings = {key: value for key, value in options.items() if key.endswith("_layers")}
    _change(folder, by_name, settings)
    return made


def _change(folder: Path, tensors: dict[str, Any], settings: dict[str, Any]) -> None:
    """Add to a checkpoint; None takes away."""
    file, config = folder / "model.safetensors", folder / "config.json"
    whole = {**load_file(file), **tensors}
    kept = {key: item.contiguous().clone() for key, item in whole.items() if item is not None}
    save_file(kept, file, metadata={"format": "pt"})
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))


def _apart(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts one by one, as checkpoints have them."""
    result = dict(state)
    for key in [key for key in state if key.endswith("experts.gate_up_proj")]:
        both, down = result.pop(key), result.pop(key.replace("gate_up", "down"))
        for number in range(len(both)):
            at = f"{key.removesuffix('gate_up_proj')}{number}."
            gate, up = both[number].chunk(2)
            result |= {f"{at}gate_proj.weight": gate, f"{at}up_proj.weight": up}
            result[f"{at}down_proj.weight"] = down[number]
    return result


def reference(target: Target, made: Made, first: bool, text: list[int], drafted: list[int]) -> Any:
    """Logits after a text and after each drafted token: whole forwards without a cache.

    first: the state comes first, and the embedding after the first token is zero (MiMo)."""
    model: Any = target.model
    base, tokens, results = model.model, torch.tensor([text + drafted]), []

    def norm(x: Tensor, what: str) -> Tensor:
        module = type(base.norm)(32, eps=model.config.rms_norm_eps)
        module.weight.data = made.norms[what]
        return module(x)

    with torch.no_grad():
        states = model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states[-1]
        for end in range(len(text) - 1, len(text) + len(drafted)):
            places = torch.arange(end)[None]
            embedded = model.get_input_embeddings()(tokens[:, 1 : end + 1])
            if first:
                embedded = embedded * (places > 0)[..., None]
            both = [norm(embedded, "embed"), norm(states, "hidden")]
            x = torch.cat(both[::-1] if first else both, -1) @ made.proj.T
            mask = torch.full((1, 1, end, end), torch.finfo(x.dtype).min).triu(1)
            angles = base.rotary_emb(x, places)
            x = made.layer(x, position_embeddings=angles, attention_mask=mask, position_ids=places)
            out = norm(x[0] if isinstance(x, tuple) else x, "norm")
            results.append(model.lm_head(out[0, -1]))
            states = torch.cat([states, out[:, -1:]], 1)
    return results


@pytest.mark.parametrize("kind", KINDS)
def test_incremental_reads_match_whole_forwards(kind: str, made: Callable[[str], Made]) -> None:
    target, text, drafted = made(kind).opened(), [7, 3, 31, 2, 9, 4, 12], [5, 8, 0]
    drafts = drafted_logits(target, mtp.load(target), text, drafted)
    wanted = reference(target, made(kind), kind == "mimo", text, drafted)
    for ours, theirs in zip(drafts, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("kind", ["glm-4.5", "deepseek-v3"])
def test_it_drafts_what_transformers_would(kind: str, made: Callable[[str], Made]) -> None:
    """The first drafted token's logits, as `MtpModel` computes them from the same checkpoint."""
    target, text = made(kind).opened(), [7, 3, 31, 2, 9, 4, 12]
    model: Any = target.model
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.2\..*"]     # theirs are of 61
    theirs = MtpModel.from_pretrained(model).eval().float()
    cache, places = MtpCache(config=model.config.get_mtp_config()), torch.arange(1, len(text))[None]
    with torch.no_grad():
        states = model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states[-1]
        _, logits, _ = theirs(torch.tensor([text[1:]]), states, None, places, cache)
    drafts = drafted_logits(target, mtp.load(target), text, [])
    torch.testing.assert_close(drafts[0], logits[0, 0], rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("kind", ["qwen3.5", "deepseek-v3"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_text_is_unchanged(
    kind: str, temperature: float, made: Callable[[str], Made]
) -> None:
    target = made(kind).opened()
    no_text_changes(mtp.load(target), temperature, ours=target)


@pytest.mark.parametrize(("kind", "name"), [("qwen3.5", "mtp"), ("mimo", "mtp+suffix")])
def test_it_can_be_chosen_by_name(
    kind: str, name: str, made: Callable[[str], Made]
) -> None:
    engines = (load(made(kind).folder, drafter=item, budget=4) for item in (name, "none"))
    texts = [engine.generate([[1, 2, 3]], max_new_tokens=9)[0].tokens for engine in engines]
    assert texts[0] == texts[1]


def test_prompts_are_read_whole_for_it(made: Callable[[str], Made]) -> None:
    """It needs the states of every token, so that of a known beginning is not left out."""
    target, text = made("mimo").opened(), [2 + n * n % 29 for n in range(300)]
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
    ("qwen3.5", {"mtp.layers.1.input_layernorm.weight": torch.ones(32)}, {}, "states 1 layers"),
    ("qwen3.5", {}, {"mtp_num_hidden_layers": 3}, "states 3 layers"),
    ("qwen3.5", {}, {"mtp_use_dedicated_embeddings": True}, "dedicated_embeddings"),
    ("qwen3.5", {}, {"mtp_hidden_states_first": True}, "mtp_hidden_states_first"),
    ("mimo", {"model.mtp_layers.0.extra.weight": torch.ones(3)}, {}, "extra"),
    ("mimo", {"model.mtp_layers.1.extra.weight": torch.ones(3)}, {}, "states 1 layers"),
    ("glm-4.5", {"model.layers.3.enorm.weight": torch.ones(32)}, {}, "2 projections"),
    ("glm-4.5", {"model.layers.2.shared_head.head.weight": torch.ones(40, 32)}, {}, "differs"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "tensors", "settings", "why"), CHANGES)
def test_unsupported_settings_are_refused(
    kind: str, tensors: dict[str, Any], settings: dict[str, Any], why: str, tmp_path: Path,
    made: Callable[[str], Made],
) -> None:  # fmt: skip
    target, folder = made(kind).opened(), tmp_path / "changed"
    shutil.copytree(made(kind).folder, folder)
    _change(folder, tensors, settings)
    target.model.config.name_or_path = str(folder)
    with pytest.raises(DrafterMismatch, match=why) as error:
        mtp.load(target)
    assert "\n" not in str(error.value)


def test_a_model_without_mtp_layers_raises_a_clear_error(
    made: Callable[[str], Made], tmp_path: Path
) -> None:
    target = made("mimo").opened()
    target.model.save_pretrained(tmp_path)
    target.model.config.name_or_path = str(tmp_path)
    with pytest.raises(ModelNotFound, match="multi-token"):
        mtp.load(target)


def alone(made: Made, folder: Path, prefix: str, settings: dict[str, Any] | None,
          name: str = "model.safetensors", **more: Tensor) -> Path:  # fmt: skip
    """The head of a Qwen model in a folder of its own, its names after `prefix`."""
    whole = load_file(made.folder / "model.safetensors")
    by_name = {key.replace("mtp.", prefix): item for key, item in whole.items() if "mtp." in key}
    folder.mkdir(exist_ok=True)
    save_file({**by_name, **more}, folder / name)
    if settings is not None:
        (folder / "config.json").write_text(json.dumps(settings))
    return folder


def bare(made: Made, folder: Path) -> Target:
    """The model without its head, as quantised copies have it."""
    shutil.copytree(made.folder, folder)
    whole = load_file(folder / "model.safetensors")
    save_file({key: item for key, item in whole.items() if "mtp" not in key},
              folder / "model.safetensors", metadata={"format": "pt"})  # fmt: skip
    return made._replace(folder=folder).opened()


MLX = {"model_type": "qwen3_5_mtp", "block_size": 3}


def test_standalone_heads_draft_like_heads_in_the_model(
    tmp_path: Path, made: Callable[[str], Made]
) -> None:
    """A folder with and without `mtp.`, a bare file, and the layout of `speculators`."""
    whole, text, drafted = made("qwen3.5"), [7, 3, 31, 2, 9, 4, 12], [5, 8]
    wanted = drafted_logits(whole.opened(), mtp.load(whole.opened()), text, drafted)
    target = bare(whole, tmp_path / "bare")
    config = json.loads((whole.folder / "config.json").read_text())
    layer = {key: value for key, value in config.items() if key != "mtp_num_hidden_layers"}
    theirs = {"fc": "input_proj", "norm": "final_layernorm", "pre_fc_norm_hidden":
              "hidden_layernorm", "pre_fc_norm_embedding": "token_layernorm"}  # fmt: skip
    tensors = {}
    for key, item in load_file(whole.folder / "model.safetensors").items():
        if key.startswith("mtp."):
            part = key.removeprefix("mtp.").removesuffix(".weight")
            part = theirs.get(part, part.removeprefix("layers.0."))
            tensors[f"mtp_layers.0.{part}.weight"] = item
    (tmp_path / "speculators").mkdir()
    save_file(tensors, tmp_path / "speculators" / "model.safetensors")
    settings = {"speculators_model_type": "mtp", "transformer_layer_config": layer,
            "num_nextn_predict_layers": 1, "speculators_config": {
                "proposal_methods": [{"speculative_tokens": 2}]}}  # fmt: skip
    (tmp_path / "speculators" / "config.json").write_text(json.dumps(settings))
    paths = {
        alone(whole, tmp_path / "mlx", "", MLX): 3, tmp_path / "speculators": 2,
        alone(whole, tmp_path / "named", "mtp.", MLX): 3,
        alone(whole, tmp_path / "file", "language_model.mtp.", None, "mtp.safetensors"): 7,
        tmp_path / "file" / "mtp.safetensors": 7,
    }  # fmt: skip
    for path, deepest in paths.items():
        drafter = load_drafter(path, target)
        assert drafter.deepest == deepest and "MTP head" in drafter.description
        for ours, want in zip(drafted_logits(target, drafter, text, drafted), wanted, strict=True):
            torch.testing.assert_close(ours, want, rtol=0, atol=1e-5)
    keeps_the_text(load_drafter(tmp_path / "mlx", target), target)
    for change, why in (({"hidden_size": 64}, "hidden_size"), ({"some_flag": True}, "some_flag"),
                        ({"rms_norm_eps": 0.1}, "rms_norm_eps"),
                        ({"num_nextn_predict_layers": 2}, "states 2 layers")):
        alone(whole, tmp_path / "mlx", "", {**MLX, **change})
        with pytest.raises(DrafterMismatch, match=why):
            load_drafter(tmp_path / "mlx", target)
    alone(whole, tmp_path / "mlx", "", MLX, extra=torch.ones(2))
    with pytest.raises(DrafterMismatch, match="extra"):
        load_drafter(tmp_path / "mlx", target)


def test_several_layers_draft_one_token_each(
    tmp_path: Path, made: Callable[[str], Made]
) -> None:
    """Layer k reads what layer k - 1 made one token before; against whole forwards."""
    whole, text, drafted = made("qwen3.5"), [7, 3, 31, 2, 9, 4, 12], [5, 8]
    torch.manual_seed(5)
    layers = [whole.layer, *(copy.deepcopy(whole.layer) for _ in range(2))]
    more: dict[str, Tensor] = {}
    for number, layer in enumerate(layers[1:], start=1):
        for weight in layer.parameters():
            weight.data = weight + 0.3 * torch.randn_like(weight)
        more |= {f"layers.{number}.{key}": item.clone() for key, item in layer.state_dict().items()}
    target = whole.opened()
    drafter = load_drafter(alone(whole, tmp_path / "three", "", MLX, **more), target)
    drafts, model = drafted_logits(target, drafter, text, drafted), target.model
    base: Any = model.model

    def norm(x: Tensor, what: str) -> Tensor:
        module = type(base.norm)(32, eps=model.config.rms_norm_eps)
        module.weight.data = whole.norms[what]
        return module(x)

    tokens = torch.tensor([[*text, *drafted]])
    with torch.no_grad():
        states = model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states[-1]
        for number, layer in enumerate(layers):
            count = states.shape[1]                         # state i with token i + 1 + number
            embedded = model.get_input_embeddings()(tokens[:, number + 1 : number + 1 + count])
            x = torch.cat([norm(embedded, "embed"), norm(states, "hidden")], -1) @ whole.proj.T
            places = torch.arange(count)[None]
            mask = torch.full((1, 1, count, count), torch.finfo(x.dtype).min).triu(1)
            out = layer(x, position_embeddings=base.rotary_emb(x, places), attention_mask=mask,
                        position_ids=places)
            states = norm(out[0] if isinstance(out, tuple) else out, "norm")
            torch.testing.assert_close(drafts[number], model.lm_head(states[0, -1]), rtol=1e-4,
                                       atol=2e-4)
    keeps_the_text(drafter, target)
