"""DFlash as published, in both versions, against an independent forward; settings that matter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import drafting
import published
import pytest
import torch
from published import LAYER, attend, deep, no_text_changes, norm, swiglu
from test_contract import depends_on_the_text_alone
from torch import Tensor

import draftproof as dp
from draftproof.drafters import dflash
from draftproof.drafters.checkpoint import Checkpoint
from draftproof.drafters.dflash import DFlash
from draftproof.errors import DrafterMismatch

BLOCK, MASK, KERNEL, GROUP, RANK, TOP = 6, 39, 2, 8, 4, 5
OWN = {"block_size": BLOCK, "mask_token_id": MASK, "target_layer_ids": [1, 3, 5]}
SECOND = {"conv_kernel_size": KERNEL, "conv_group_size": GROUP, "selector_rank": RANK,
          "selector_top_k": TOP}  # fmt: skip
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}


def weights(second: bool = False, **tables: tuple[int, ...]) -> dict[str, Tensor]:
    shapes: dict[str, Any] = {"fc.weight": (32, 96), "hidden_norm.weight": (32,),
                              "norm.weight": (32,), **tables}  # fmt: skip
    for number in range(2):
        at = f"layers.{number}"
        shapes |= published.layer_shapes(at, head_norms=True)
        for name in ("attention_conv", "mlp_conv") if second else ():
            shapes[f"{at}.{name}.base_kernel"] = (2, KERNEL, 32)
            shapes[f"{at}.{name}.kernel_projection.weight"] = (2 * KERNEL * 32 // GROUP, 32)
    if second:
        shapes |= {f"candidate_selector.{item}_codebook": (40, RANK)
                   for item in ("predecessor", "successor")}  # fmt: skip
        shapes["candidate_selector.hidden_projection.weight"] = (RANK, 32)
    return published.random_tensors(shapes)


def written(
    folder: Path, tensors: dict[str, Tensor], speculators: bool = False, ours: Any = None,
    **extra: Any,
) -> Path:  # fmt: skip
    """extra: next to `dflash_config`, ours: in it."""
    layer = {**LAYER, "model_type": "qwen3", "num_hidden_layers": 2}
    inner = {**OWN, **(ours or {})}
    if not speculators:
        settings = {**layer, "architectures": ["DFlashDraftModel"], "num_target_layers": 7,
                    "dflash_config": inner, **extra}  # fmt: skip
        return published.write(folder, settings, tensors)
    taps = [item + 1 for item in inner.pop("target_layer_ids")]
    layer |= {key: extra.pop(key) for key in ("layer_types", "sliding_window") if key in extra}
    settings = {"sample_from_anchor": False,
                "speculators_model_type": "dflash2" if "selector_rank" in inner else "dflash",
                **inner, "aux_hidden_state_layer_ids": taps, "transformer_layer_config": layer,
                "draft_vocab_size": 40, "projector_type": "dflash", "emb_dim": 256, **extra}
    return published.write(folder, settings, tensors)


def loaded(folder: Path) -> DFlash:
    return dflash.load(Checkpoint(folder), deep())


def convolved(w: dict[str, Tensor], at: str, x: Tensor, number: int, kernels: Tensor) -> Tensor:
    """Place after place: what the last places hold times the kernel of this one."""
    out = torch.zeros_like(x)
    for place in range(len(x)):
        for back in range(min(KERNEL, place + 1)):
            added = kernels[place].view(2, KERNEL, -1)[number, back].repeat_interleave(GROUP)
            out[place] += x[place - back] * (w[f"{at}.base_kernel"][number, back] + added)
    return out


def forward(w: dict[str, Tensor], settings: dict[str, Any], hidden: Tensor, root: int
            ) -> tuple[Tensor, Tensor]:  # fmt: skip
    """States and logits of the block after a text with states [S, T, H] at the layers asked."""
    size, model = len(hidden), deep().model
    context = norm(hidden.flatten(1) @ w["fc.weight"].T, w["hidden_norm.weight"])
    table = w.get("embed_tokens.weight", model.get_input_embeddings().weight.detach())
    x = table[torch.tensor([root] + [MASK] * (BLOCK - 1))] * settings.get("scale", 1.0)
    places, before = torch.arange(size, size + BLOCK), torch.arange(size)
    for number in range(2):
        at, slots = f"layers.{number}", torch.cat([before, places])
        causal, window = settings["layers"][number]
        sees = (slots <= places[:, None]) if causal else torch.ones(BLOCK, len(slots)).bool()
        sees = sees & ((places[:, None] - slots).abs() < (window or 1000))
        for part, norms in (("attention", "input"), ("mlp", "post_attention")):
            y = norm(x, w[f"{at}.{norms}_layernorm.weight"])
            conv, kernels = f"{at}.{part}_conv", w.get(f"{at}.{part}_conv.kernel_projection.weight")
            if kernels is not None:
                kernels = y @ kernels.T
                y = convolved(w, conv, y, 0, kernels)
            mlp = settings.get("mlp", swiglu)
            out = mlp(w, f"{at}.mlp", y) if part == "mlp" else attend(
                w, f"{at}.self_attn", y, torch.cat([context, y]), places, slots, sees)
            x = x + (out if kernels is None else convolved(w, conv, out, 1, kernels))
    x = norm(x, w["norm.weight"])
    head = w.get("lm_head.weight", model.get_output_embeddings().weight.detach())
    logits = x @ head.T * settings.get("output", 1.0)
    cap = settings.get("cap")
    return x, (logits / cap).tanh() * cap if cap else logits


TEXT = [7, 3, 31, 2, 9, 4, 4, 1, 12]


def observed(drafter: DFlash, text: list[int] = TEXT) -> Any:
    """It has seen the text but for its root, in two pieces; and the frontier after it."""
    with torch.no_grad():
        states = deep().model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
    hidden = torch.stack([states[hidden_layer] for hidden_layer in drafter.hidden_layers], 2)
    drafter.start(1, 64, drafting.CPU)
    for part in (slice(5), slice(5, None)):
        piece = text[:-1][part]
        drafter.observe(drafting.commit_of([0], [piece], hidden[:, : len(text) - 1][:, part]))
    return hidden[0], drafting.frontier_of([text], 5)


FORMS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}, {"layers": [(False, None)] * 2}),
    "sliding": (SLIDING, {}, {"layers": [(True, 4), (False, None)]}),
    "is_causal": ({**SLIDING, "is_causal": False}, {}, {"layers": [(False, 4), (False, None)]}),
    "causal": ({}, {"causal": True}, {"layers": [(True, None)] * 2}),
    "use_swa": ({}, {"use_swa": True, "swa_window_size": 5}, {"layers": [(False, 5)] * 2}),
    "scales": ({"logit_scale": 2.0}, {"input_embedding_scale": 3.0, "output_multiplier": 0.25,
                                      "final_logit_softcapping": 2.0},
               {"layers": [(False, None)] * 2, "scale": 3.0, "output": 0.5, "cap": 2.0}),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("second", "speculators"), [(False, True), (True, False)],
                         ids=["1, speculators", "2, z-lab"])  # fmt: skip
def test_output_matches_an_independent_forward(
    tmp_path: Path, form: str, second: bool, speculators: bool
) -> None:
    extra, by_name, settings = FORMS[form]
    w = weights(second)
    by_name = {**by_name, **(SECOND if second else {})}
    drafter = loaded(written(tmp_path, w, speculators, by_name, **extra))
    assert drafter.hidden_layers == (2, 4, 6)
    with torch.inference_mode():
        hidden, frontier = observed(drafter)
        result = drafter._block(frontier.prefix.root[:, None])[0]
        states, wanted = forward(w, settings, hidden, TEXT[-1])
        torch.testing.assert_close(result, states, rtol=0, atol=3e-5)
        torch.testing.assert_close(drafter.network.logits(result), wanted, rtol=0, atol=3e-5)
        path = drafter.propose(replace(frontier, trees=False)).tokens[0].tolist()
    right = _selected(w, states, wanted) if second else wanted[1:].argmax(-1).tolist()
    assert path == [TEXT[-1], *right]


def _selected(w: dict[str, Tensor], states: Tensor, logits: Tensor) -> list[int]:
    """The path that a selector walks, by its definition."""
    path, before = list[int](), TEXT[-1]
    for place in range(1, BLOCK):
        best = logits[place].topk(TOP).indices.tolist()
        gate = w["candidate_selector.hidden_projection.weight"] @ states[place]
        gate = gate * w["candidate_selector.predecessor_codebook"][before]
        codes = w["candidate_selector.successor_codebook"]
        before = max(best, key=lambda token: float(logits[place, token] + gate @ codes[token]))
        path.append(before)
    return path


def test_tables_of_its_own(tmp_path: Path) -> None:
    """Embeddings, a head over some tokens, and a mask embedding next to them."""
    tables = {"embed_tokens.weight": (40, 32), "lm_head.weight": (24, 32)}
    w = weights(**tables)
    ids = torch.randperm(40, generator=torch.Generator().manual_seed(1))[:24].sort().values
    folder = written(tmp_path, {**w, "d2t": ids - torch.arange(24)}, draft_vocab_size=24)
    torch.save({"mask_token_id": MASK, "embedding": torch.ones(32)}, folder / dflash.MASK_FILE)
    drafter, whole = loaded(folder), {**w}
    whole["embed_tokens.weight"] = w["embed_tokens.weight"].clone()
    whole["embed_tokens.weight"][MASK] = 1.0
    with torch.inference_mode():
        hidden, frontier = observed(drafter)
        result = drafter.network.logits(drafter._block(frontier.prefix.root[:, None]))[0]
        _, logits = forward(whole, {"layers": [(False, None)] * 2}, hidden, TEXT[-1])
    wanted = torch.full((BLOCK, 40), -torch.inf, dtype=torch.float64).index_copy(1, ids, logits)
    torch.testing.assert_close(result, wanted, rtol=0, atol=3e-5)


FIXED = [key for key, kind in dflash.KNOWN.items() if not isinstance(kind, (type, tuple))]
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    *(({}, {key: "another"}, key) for key in ("another", *FIXED)),
    ({"is_neox_style": False}, {}, "is_neox_style"), ({"some_flag": True}, {}, "some_flag"),
    ({"num_target_layers": 9}, {}, "9"), ({}, {"target_layer_ids": [1, 3, 11]}, "12"),
    ({}, {"mask_token_id": 99}, "99"), ({}, SECOND, "attention_conv"),
    ({"hidden_size": 16}, {}, "16"),
    ({"layer_types": ["sliding_attention"] * 2}, {}, "window"), ({"vocab_size": 7000}, {}, "d2t"),
    ({}, {"block_size": None}, "block_size"), ({"num_hidden_layers": 3}, {}, "layers"),
    ({"attention_bias": True}, {}, "bias"), ({}, {"causal": "no"}, "causal"),
    ({}, {"output_multiplier": "half"}, "half"), ({}, {"selector_top_k": 4}, "selector_rank"),
    (SLIDING, {"use_swa": False}, "use_swa"), (SLIDING, {"swa_window_size": 5}, "sliding_window"),
    ({}, {"use_swa": True}, "window"), ({"causal": True}, {"is_causal": False}, "is_causal"),
    ({"block_size": 8}, {}, "block_size"),
]  # fmt: skip


@pytest.mark.parametrize(("extra", "ours", "why"), REFUSED, ids=lambda item: str(item)[:30])
def test_unsupported_settings_are_refused(
    tmp_path: Path, extra: dict[str, Any], ours: dict[str, Any], why: str
) -> None:
    folder = written(tmp_path, weights(), ours=ours, **extra)
    with pytest.raises(DrafterMismatch, match=why) as error:
        loaded(folder)
    assert "\n" not in str(error.value)


def test_a_selector_over_mapped_tokens_is_refused(tmp_path: Path) -> None:
    head = weights(second=True, **{"lm_head.weight": (24, 32)})
    w = {**head, "d2t": torch.zeros(24, dtype=torch.long)}
    with pytest.raises(DrafterMismatch, match="maps tokens"):
        loaded(written(tmp_path, w, ours=SECOND, draft_vocab_size=24))


def test_a_malformed_setting_is_reported_in_one_sentence(tmp_path: Path) -> None:
    folder = written(tmp_path, weights(), ours={"target_layer_ids": ["1", "3", "5"]})
    with pytest.raises(DrafterMismatch, match="cannot be read"):
        dp.load(deep().model, drafter=str(folder))


def test_unexpected_tensors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DrafterMismatch, match="which is not supported"):
        loaded(written(tmp_path, weights(second=True)))


@pytest.mark.parametrize("second", [False, True], ids=["1", "2"])
@pytest.mark.parametrize("warm", [False, True])
def test_draft_distributions_are_kept(tmp_path: Path, second: bool, warm: bool) -> None:
    folder = written(tmp_path, weights(second), ours=SECOND if second else {}, **SLIDING)
    no_text_changes(loaded(folder), 0.9 * warm)
    depends_on_the_text_alone(lambda: loaded(folder), drawn=warm, draws=True)


MOE = {"draft_ffn_type": "moe", "num_experts": 4, "num_experts_per_tok": 2,
       "moe_intermediate_size": 8, "shared_expert_intermediate_size": 12,
       "moe_experts_implementation": "grouped_mm"}  # fmt: skip


def experts(w: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights with a mixture of experts in each layer."""
    kept = {key: item for key, item in w.items() if ".mlp." not in key}
    shapes: dict[str, Any] = {}
    for number in range(2):
        at = f"layers.{number}.mlp"
        shapes |= {f"{at}.gate.weight": (4, 32), f"{at}.shared_expert_gate.weight": (1, 32)}
        for name, size in (("shared_expert", 12), *((f"experts.{index}", 8) for index in range(4))):
            shapes |= {f"{at}.{name}.{kind}_proj.weight": (size, 32) for kind in ("gate", "up")}
            shapes[f"{at}.{name}.down_proj.weight"] = (32, size)
    return {**kept, **published.random_tensors(shapes, seed=5)}


def mixture(w: dict[str, Tensor], at: str, x: Tensor) -> Tensor:
    """The two most likely experts of four, by their chances, and the one that is always used."""
    chances = (x @ w[f"{at}.gate.weight"].T).float().softmax(-1).double()
    best = chances.topk(2, -1)
    weighed = best.values / best.values.sum(-1, keepdim=True)
    out = torch.stack([sum(weighed[row, rank] * swiglu(w, f"{at}.experts.{best.indices[row, rank]}",
                                                       x[row]) for rank in range(2))
                       for row in range(len(x))])  # fmt: skip
    gate = (x @ w[f"{at}.shared_expert_gate.weight"].T).sigmoid()
    return out + gate * swiglu(w, f"{at}.shared_expert", x)


@pytest.mark.parametrize("second", [False, True], ids=["1", "2"])
def test_blocks_may_predict_from_the_root(tmp_path: Path, second: bool) -> None:
    """`sample_from_anchor`: as many tokens as places; said, or told by `speculative_tokens`."""
    w, ours = weights(second), SECOND if second else {}
    text = written(tmp_path / "said", w, True, ours, sample_from_anchor=True)
    told = written(tmp_path / "told", w, True, ours, sample_from_anchor=None,
                   speculators_config={"proposal_methods": [{"speculative_tokens": BLOCK}]})
    drafter = loaded(text)
    with torch.inference_mode():
        hidden, frontier = observed(drafter)
        states, logits = forward(w, {"layers": [(False, None)] * 2}, hidden, TEXT[-1])
        frontier = replace(frontier, trees=False, max_draft_tokens=BLOCK)
        path = drafter.propose(frontier).tokens[0].tolist()
    logits, states = (torch.cat([part[:1], part]) for part in (logits, states))  # token k: place k
    right = _selected(w, states, logits) if second else logits[1:].argmax(-1).tolist()
    assert path[:BLOCK] == [TEXT[-1], *right[: BLOCK - 1]] and len(path) == BLOCK + 1
    for folder in (text, told):
        assert loaded(folder).network.first == 0
        assert published.proposal(loaded(folder), TEXT, BLOCK) == path
    published.keeps_the_text(loaded(told))
    with pytest.raises(DrafterMismatch, match="sample_from_anchor"):
        config = {"proposal_methods": [{"speculative_tokens": BLOCK}]}
        loaded(written(tmp_path / "both", w, True, ours, speculators_config=config))


def test_a_mixture_of_experts(tmp_path: Path) -> None:
    w = experts(weights(second=True))
    drafter = loaded(written(tmp_path / "moe", w, True, SECOND, **MOE))
    with torch.inference_mode():
        hidden, frontier = observed(drafter)
        result = drafter._block(frontier.prefix.root[:, None])[0]
        settings = {"layers": [(False, None)] * 2, "mlp": mixture}
        states, _ = forward(w, settings, hidden, TEXT[-1])
    torch.testing.assert_close(result, states, rtol=0, atol=3e-5)
    published.keeps_the_text(drafter)
    few = {**MOE, "num_experts_per_tok": 1}
    other = loaded(written(tmp_path / "few", w, True, SECOND, **few))
    assert not torch.equal(_block_of(other), _block_of(drafter))
    for change, why in (({"draft_ffn_type": "dense"}, "mlp"), ({"num_experts": 5}, "shape"),
                        ({"num_experts": None}, "num_experts"),
                        ({"draft_ffn_type": "wide"}, "wide")):
        with pytest.raises(DrafterMismatch, match=why):
            loaded(written(tmp_path / "changed", w, True, SECOND, **{**MOE, **change}))


def _block_of(drafter: DFlash) -> Tensor:
    with torch.inference_mode():
        _, frontier = observed(drafter)
        return drafter._block(frontier.prefix.root[:, None])
