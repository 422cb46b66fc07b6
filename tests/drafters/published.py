"""Tiny checkpoints of drafters in their published layouts, pieces of a forward, and the rule that
every such drafter keeps.

Nothing here uses the package's own layers: rotation, norms and attention are written out.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import drafting
import torch
import torch.nn.functional as F
from drafting import Watch, texts
from safetensors.torch import save_file
from tiny import prompts, target
from torch import Tensor

from draftproof.core.acceptance import RULES
from draftproof.core.params import Sampling
from draftproof.core.tree import TokenTree
from draftproof.drafters.base import Drafter
from draftproof.drafters.features import FeatureDrafter
from draftproof.engine.engine import Engine

LAYER = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5, "vocab_size": 40,
         "max_position_embeddings": 256, "rope_theta": 1000.0, "hidden_act": "silu"}  # fmt: skip
DEEP = {"num_hidden_layers": 7, "initializer_range": 0.3}
"""Of a target of which several layers are read."""


def deep() -> Any:
    return target(**DEEP)


def no_text_changes(drafter: Drafter, temperature: float, ours: Any = None) -> None:
    """Whatever the rule and the budget; sampled text is the same under the matching rule alone."""
    asked, want = prompts(6, seed=4), Sampling(temperature, seed=3, repetition_penalty=1.1)
    options: dict[str, Any] = {"max_new_tokens": 20, "sampling": want}
    wanted = texts(Engine(ours or deep()), asked, **options)
    for rule in RULES if temperature == 0 else ("match",):
        for budget in (drafting.Fading(9), None) if rule == "match" else (4,):
            engine = Engine(ours or deep(), Watch(drafter), acceptance=rule, budget=budget)
            assert texts(engine, asked, **options, batch_size=4) == wanted, rule


def keeps_the_text(drafter: Drafter, ours: Any = None) -> None:
    """Greedy under every rule, and drawn under the rule by which sampled text stays the same."""
    asked, target_ = prompts(3, seed=4), ours or deep()
    for temperature, rules in ((0.0, RULES), (0.8, ("match",))):
        options: dict[str, Any] = {"max_new_tokens": 9, "sampling": Sampling(temperature, seed=3)}
        wanted = texts(Engine(target_), asked, **options)
        for rule in rules:
            engine = Engine(target_, Watch(drafter), acceptance=rule, budget=5)
            assert texts(engine, asked, **options, batch_size=2) == wanted, (rule, temperature)
    for rule in RULES:                                      # draws by every rule end well
        want = Sampling(0.8, seed=1)
        Engine(target_, Watch(drafter), acceptance=rule, budget=4).generate(
            asked[:1], max_new_tokens=6, sampling=want)  # fmt: skip


def proposal(drafter: Any, text: list[int], budget: int = 5, **changed: Any) -> list[int]:
    """The chain that a drafter drafts after a text, of which it has observed all but the root."""
    ours = drafter.network.vocabulary
    with torch.inference_mode():
        states = ours.read(TokenTree.chain(torch.tensor([text[:-1]])), ours.new_cache(1, 64),
                          hidden_layers=drafter.hidden_layers).hidden  # fmt: skip
        drafter.start(1, 64, drafting.CPU)
        drafter.observe(drafting.commit_of([0], [text[:-1]], states))
        frontier = drafting.frontier_of([text], budget, trees=False)
        return drafter.propose(replace(frontier, **changed)).tokens[0].tolist()


def drafted_logits(
    ours: Any, drafter: FeatureDrafter, text: list[int], drafted: list[int]
) -> list[Tensor]:
    """What the drafter's own reads say after a text and after each drafted token."""
    with torch.inference_mode():
        whole = TokenTree.chain(torch.tensor([text[:-1]]))
        states = ours.read(whole, ours.new_cache(1, 64), hidden_layers=drafter.hidden_layers).hidden
        drafter.start(1, 64, drafting.CPU)
        drafter.observe(drafting.commit_of([0], [text[:-1]], states))
        read = drafter.reader(drafting.frontier_of([text], 6)).read
        chains = (torch.tensor([[text[-1], *drafted[:node]]]) for node in range(len(drafted) + 1))
        return [read(TokenTree.chain(chain), node)[0, 0] for node, chain in enumerate(chains)]


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, Tensor]:
    """Norms near one, the others small."""
    dice = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=dice, dtype=torch.float64)
        norm = len(shape) == 1 and "bias" not in name
        made[name] = 1 + 0.3 * values if norm else 0.2 * values
    return made


def layer_shapes(at: str, wide: int = 32, head_norms: bool = False) -> dict[str, Any]:
    """A decoder layer whose attention reads `wide` numbers."""
    names = {"q_proj": (32, wide), "k_proj": (16, wide), "v_proj": (16, wide), "o_proj": (32, 32)}
    result: dict[str, Any] = {f"self_attn.{name}": shape for name, shape in names.items()}
    result |= dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm") if head_norms else (), (8,))
    result |= {"mlp.gate_proj": (48, 32), "mlp.up_proj": (48, 32), "mlp.down_proj": (32, 48)}
    result |= dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (32,))
    return {f"{at}.{name}.weight": shape for name, shape in result.items()}


def write(folder: Path, settings: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "model.safetensors")
    return folder


def norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotated(x: Tensor, positions: Tensor, theta: float = 1000.0) -> Tensor:
    """x [N, heads, D], all of D rotated."""
    half = x.shape[-1] // 2
    rates = theta ** (-torch.arange(half, dtype=torch.float32) / half)
    angle = (positions[:, None].float() * rates).double()[:, None]
    cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def attend(
    weights: dict[str, Tensor], prefix: str, queries: Tensor, keys_from: Tensor,
    positions: Tensor, key_positions: Tensor, sees: Tensor,
) -> Tensor:  # fmt: skip
    """[N, 32] attention of `queries` [N, .] over `keys_from` [S, .], where `sees` [N, S]."""
    q = (queries @ weights[f"{prefix}.q_proj.weight"].T).view(-1, 4, 8)
    k = (keys_from @ weights[f"{prefix}.k_proj.weight"].T).view(-1, 2, 8)
    v = (keys_from @ weights[f"{prefix}.v_proj.weight"].T).view(-1, 2, 8)
    if f"{prefix}.q_norm.weight" in weights:
        q = norm(q, weights[f"{prefix}.q_norm.weight"])
        k = norm(k, weights[f"{prefix}.k_norm.weight"])
    q, k = rotated(q, positions), rotated(k, key_positions)
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    scores = torch.einsum("nhd,shd->hns", q, k) / 8**0.5
    scores = scores.masked_fill(~sees, -torch.inf).softmax(-1)
    out = torch.einsum("hns,shd->nhd", scores, v).flatten(1)
    return out @ weights[f"{prefix}.o_proj.weight"].T


def swiglu(weights: dict[str, Tensor], prefix: str, x: Tensor) -> Tensor:
    gate, up = (x @ weights[f"{prefix}.{name}_proj.weight"].T for name in ("gate", "up"))
    return (F.silu(gate) * up) @ weights[f"{prefix}.down_proj.weight"].T
