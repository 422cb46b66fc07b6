"""Weights that change after loading: the next text is that of the model as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import fresh

from draftproof.engine.load import load
from draftproof.errors import BadInput

PROMPT = [5, 9, 3]


def step(own: Any) -> None:
    dice = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for one in own.parameters():
            noise = torch.randn(one.shape, generator=dice)
            one.add_((0.4 * one.abs().mean() * noise).to(one.dtype))


def norms(own: Any) -> None:
    """Through .data, which leaves no trace in version counters."""
    for name, one in own.named_parameters():
        if "norm" in name or "ln_" in name:
            one.data.mul_(torch.linspace(0.2, 3, one.numel()))


def data(own: Any) -> None:
    for one in own.parameters():
        one.data = one.data.roll(1, 0)


def assign(own: Any) -> None:
    other = {name: one.flip(0) for name, one in own.state_dict().items()}
    own.load_state_dict(other, assign=True)


def hook(own: Any) -> None:
    """As activation steering does."""
    layer = own.get_input_embeddings()
    layer.register_forward_hook(lambda module, args, out: out + out.flip(-1))


def patch(own: Any) -> None:
    layer = own.get_input_embeddings()
    layer.forward = lambda ids: torch.nn.functional.embedding(ids, layer.weight).flip(-1)


@pytest.mark.parametrize("change", [step, norms, data, assign, hook, patch])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_next_text_is_of_the_weights_as_they_are(
    family: str, change: Callable[[Any], None]
) -> None:
    own = fresh(family).float()
    engine = load(own, drafter="prompt-lookup")
    before = engine.generate([PROMPT], max_new_tokens=24)[0].tokens
    change(own)
    again = engine.generate([PROMPT], max_new_tokens=24)[0].tokens
    assert again == load(own).generate([PROMPT], max_new_tokens=24)[0].tokens
    assert again != before


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_adapters_may_be_added_switched_and_merged(family: str) -> None:
    peft = pytest.importorskip("peft")
    own, texts = fresh(family).float(), list[list[int]]()
    engine = load(own)
    targets = ["c_attn"] if family == "gpt2" else ["q_proj", "v_proj"]
    config = peft.LoraConfig(target_modules=targets, init_lora_weights=False, lora_alpha=64)
    tuned = peft.get_peft_model(own, config).eval()
    tuned.add_adapter("other", config)
    for act in (lambda: None, lambda: tuned.set_adapter("other"), tuned.merge_adapter):
        act()
        texts.append(engine.generate([PROMPT], max_new_tokens=24)[0].tokens)
        wanted = load(own).generate([PROMPT], max_new_tokens=24)[0].tokens
        assert texts[-1] == wanted
    assert texts[0] != texts[1]


@pytest.mark.parametrize("change, says", [
    (lambda own: own.train(), "training mode"), (lambda own: own.bfloat16(), "bfloat16 on cpu now"),
])  # fmt: skip
def test_a_model_that_was_cast_or_put_in_training_is_refused(change: Any, says: str) -> None:
    own = fresh("gpt2").float()
    engine = load(own)
    change(own)
    with pytest.raises(BadInput, match=says):
        engine.generate([PROMPT], max_new_tokens=4)
