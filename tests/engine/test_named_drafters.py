"""The default drafter: what the package has for these weights is found, in any precision."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from drafting import texts
from tiny import fresh, prompts

from draftproof import Sampling, load
from draftproof.drafters.checkpoints import is_head, write_head
from draftproof.drafters.portfolio import Portfolio
from draftproof.drafters.redrafter import ReDrafterHead
from draftproof.engine.named_drafters import SHIPPED, weights_key
from draftproof.model.loading import resolve
from draftproof.model.target import Target
from draftproof.model.variants import quantized


def test_weights_have_one_name_in_any_precision() -> None:
    model = fresh("llama").to(torch.bfloat16)
    torch.nn.init.normal_(model.model.norm.weight)
    key = weights_key(model)
    packed = quantized(Target(model.float()), "int8").model
    assert key == weights_key(model) == weights_key(packed) != ""
    model.model.norm.weight.data[3] += 1
    assert weights_key(model) != key


def test_heads_that_are_not_installed_are_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = fresh("llama")
    monkeypatch.setitem(SHIPPED, weights_key(model), "heads-of-another-package")
    engine = load(model)
    assert isinstance(engine.drafter, Portfolio) and "draftproof-heads" in caplog.text


def test_heads_made_for_the_weights_draft_with_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert SHIPPED and all(is_head(resolve(name)) for name in SHIPPED.values())
    model = fresh("llama")
    write_head(ReDrafterHead.fresh(Target(model), share_lm_head=True), tmp_path)
    monkeypatch.setitem(SHIPPED, weights_key(model), str(tmp_path))
    written = []
    for name in (None, "portfolio", "none"):
        engine = load(model, drafter=name)
        members = engine.drafter.members if isinstance(engine.drafter, Portfolio) else ()
        assert ("redrafter" in [member.name for member in members]) == (name is None)
        sampling = Sampling(temperature=0.7, seed=3)
        written.append(texts(engine, prompts(3, 5), max_new_tokens=20, sampling=sampling))
    assert written[0] == written[1] == written[2]
