"""DSpark as published: Markov heads and the confidence head against their definitions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import published
import pytest
import torch
from published import deep, keeps_the_text
from test_dflash import BLOCK, TEXT, forward, observed, weights, written
from torch import Tensor

from draftproof.drafters import beams, dflash
from draftproof.drafters.checkpoint import Checkpoint
from draftproof.drafters.dflash import DFlash
from draftproof.errors import DrafterMismatch

RANK = 6
HEADS = {"vanilla": {}, "gated": {"gate_proj": (RANK, 32 + RANK)},
         "rnn": {"joint_proj": (3 * RANK, 32 + 2 * RANK)}}  # fmt: skip
SAID = {"markov_rank": RANK, "markov_head_type": "vanilla", "enable_confidence_head": True,
        "confidence_head_with_markov": True}  # fmt: skip


def spark_weights(kind: str, confident: int = 32 + RANK) -> dict[str, Tensor]:
    shapes: dict[str, Any] = {"markov_head.markov_w1.weight": (40, RANK),
                              "markov_head.markov_w2.weight": (40, RANK)}  # fmt: skip
    for name, shape in HEADS[kind].items():
        shapes |= {f"markov_head.{name}.weight": shape, f"markov_head.{name}.bias": shape[:1]}
    if confident:
        shapes |= {"confidence_head.proj.weight": (1, confident), "confidence_head.proj.bias": (1,)}
    made = published.random_tensors(shapes, seed=3)
    made = {key: 2 * item if "markov" in key else 0.3 * item for key, item in made.items()}
    if confident:
        made["confidence_head.proj.bias"] += 1
    return {**weights(), **made}


def folder_of(folder: Path, w: dict[str, Tensor], place: str, **changed: Any) -> Path:
    """Settings in `place`: speculators, dflash_config, dspark_config, or next to everything."""
    settings = {**SAID, "sample_from_anchor": True, **changed}
    if place == "speculators":
        settings = {"speculators_model_type": "dspark", "projector_type": None, **settings}
        return written(folder, w, True, **settings)
    inner = settings if place == "dflash_config" else {}
    extra = {"architectures": ["Qwen3DSparkModel"]}
    if place == "dspark_config":
        extra["dspark_config"] = settings
    elif place == "":
        extra |= settings
    return written(folder, w, ours=inner, **extra)


def loaded(folder: Path) -> DFlash:
    return dflash.load_dspark(Checkpoint(folder), deep())


def bias(w: dict[str, Tensor], kind: str, token: int, hidden: Tensor, state: Tensor
         ) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What a token adds to the logits of the next place, and the state after it: by definition."""
    embedded = w["markov_head.markov_w1.weight"][token]
    if kind == "gated":
        at = "markov_head.gate_proj"
        gate = w[f"{at}.weight"] @ torch.cat([hidden, embedded]) + w[f"{at}.bias"]
        embedded = gate.sigmoid() * embedded
    elif kind == "rnn":
        at = "markov_head.joint_proj"
        joint = w[f"{at}.weight"] @ torch.cat([state, embedded, hidden]) + w[f"{at}.bias"]
        gate, candidate, out = joint.chunk(3)
        state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
        embedded = out.tanh()
    return w["markov_head.markov_w2.weight"] @ embedded, state


@pytest.mark.parametrize("place", ["speculators", "dflash_config", "dspark_config", ""])
@pytest.mark.parametrize("kind", HEADS)
def test_each_position_sees_the_previous_token(tmp_path: Path, kind: str, place: str) -> None:
    w = spark_weights(kind)
    drafter = loaded(folder_of(tmp_path, w, place, markov_head_type=kind))
    with torch.inference_mode():
        hidden, frontier = observed(drafter)
        states, logits = forward(w, {"layers": [(False, None)] * 2}, hidden, TEXT[-1])
        frontier = published.replace(frontier, trees=False, max_draft_tokens=BLOCK)
        path, sure = drafter.propose(frontier).tokens[0].tolist(), 0.0
        state, before, right = torch.zeros(RANK, dtype=torch.float64), TEXT[-1], [TEXT[-1]]
        for slot in range(BLOCK):
            added, state = bias(w, kind, before, states[slot], state)
            embedded = w["markov_head.markov_w1.weight"][before]
            score = w["confidence_head.proj.weight"] @ torch.cat([states[slot], embedded])
            sure += float(torch.nn.functional.logsigmoid(score + w["confidence_head.proj.bias"]))
            if sure < torch.tensor(beams.LEAST).log():
                break
            before = int((logits[slot] + added).argmax())
            right.append(before)
    assert [token for token in path if token >= 0] == right and len(right) > 2


@pytest.mark.parametrize("kind", HEADS)
def test_text_is_unchanged_and_trees_agree_with_chains(tmp_path: Path, kind: str) -> None:
    drafter = loaded(folder_of(tmp_path, spark_weights(kind), "speculators", markov_head_type=kind))
    keeps_the_text(drafter)


def test_every_setting_matters_or_is_refused(tmp_path: Path) -> None:
    w = spark_weights("vanilla")
    plain = published.proposal(loaded(folder_of(tmp_path / "plain", w, "speculators")), TEXT, BLOCK)
    other = loaded(folder_of(tmp_path / "shift", w, "speculators", sample_from_anchor=False))
    assert published.proposal(other, TEXT, BLOCK) != plain
    bare = {key: item for key, item in w.items() if "confidence" not in key}
    off = loaded(folder_of(tmp_path / "off", bare, "speculators", enable_confidence_head=False))
    assert len([token for token in published.proposal(off, TEXT, BLOCK) if token >= 0]) == BLOCK + 1
    assert published.proposal(off, TEXT, BLOCK) != plain
    for change in ({"markov_rank": 4}, {"markov_rank": 0}, {"markov_head_type": "gated"},
                   {"markov_head_type": "other"}, {"enable_confidence_head": False},
                   {"confidence_head_with_markov": False}, {"projector_type": "domino"},
                   {"mask_token_id": 99}, {"something_new": 3}):
        with pytest.raises(DrafterMismatch):
            loaded(folder_of(tmp_path / "changed", w, "speculators", **change))
    loaded(folder_of(tmp_path / "new", w, "speculators", something_new=False, another=None))
