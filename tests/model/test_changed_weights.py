"""Weights that change after loading: the next text is that of the model as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import fresh
from torch import Tensor, nn

import draftproof
from draftproof.engine.load import load
from draftproof.errors import BadInput

PROMPT = [5, 9, 3]


def step(ours: Any) -> None:
    dice = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in ours.parameters():
            noise = torch.randn(parameter.shape, generator=dice)
            parameter.add_((0.4 * parameter.abs().mean() * noise).to(parameter.dtype))


def norms(ours: Any) -> None:
    """Through .data, which leaves no trace in version counters."""
    for name, item in ours.named_parameters():
        if "norm" in name or "ln_" in name:
            item.data.mul_(torch.linspace(0.2, 3, item.numel()))


def data(ours: Any) -> None:
    for parameter in ours.parameters():
        parameter.data = parameter.data.roll(1, 0)


def assign(ours: Any) -> None:
    other = {name: item.flip(0) for name, item in ours.state_dict().items()}
    ours.load_state_dict(other, assign=True)


def hook(ours: Any) -> None:
    """As activation steering does."""
    layer = ours.get_input_embeddings()
    layer.register_forward_hook(lambda module, args, out: out + out.flip(-1))


def patch(ours: Any) -> None:
    layer = ours.get_input_embeddings()
    layer.forward = lambda ids: torch.nn.functional.embedding(ids, layer.weight).flip(-1)


@pytest.mark.parametrize("change", [step, norms, data, assign, hook, patch])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_changed_weights_take_effect_in_the_next_text(
    family: str, change: Callable[[Any], None]
) -> None:
    model = fresh(family).float()
    engine = load(model, drafter="prompt-lookup")
    before = engine.generate([PROMPT], max_new_tokens=24)[0].tokens
    change(model)
    again = engine.generate([PROMPT], max_new_tokens=24)[0].tokens
    assert again == load(model).generate([PROMPT], max_new_tokens=24)[0].tokens
    assert again != before


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_adapters_may_be_added_switched_and_merged(family: str) -> None:
    peft = pytest.importorskip("peft")
    model, texts = fresh(family).float(), list[list[int]]()
    engine = load(model)
    targets = ["c_attn"] if family == "gpt2" else ["q_proj", "v_proj"]
    config = peft.LoraConfig(target_modules=targets, init_lora_weights=False, lora_alpha=64)
    tuned = peft.get_peft_model(model, config).eval()
    tuned.add_adapter("other", config)
    for act in (lambda: None, lambda: tuned.set_adapter("other"), tuned.merge_adapter):
        act()
        texts.append(engine.generate([PROMPT], max_new_tokens=24)[0].tokens)
        wanted = load(model).generate([PROMPT], max_new_tokens=24)[0].tokens
        assert texts[-1] == wanted
    assert texts[0] != texts[1]


@pytest.mark.parametrize("change, says", [
    (lambda mine: mine.train(), "training mode"),
    (lambda mine: mine.bfloat16(), "bfloat16 on cpu now"),
])  # fmt: skip
def test_a_model_that_was_cast_or_put_in_training_is_refused(change: Any, says: str) -> None:
    model = fresh("gpt2").float()
    engine = load(model)
    change(model)
    with pytest.raises(BadInput, match=says):
        engine.generate([PROMPT], max_new_tokens=4)


class Tanh(nn.Module):
    """An MLP of the user's own, without the parts of the family's."""

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(hidden) * 2


class Half(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **options: Any) -> Any:
        out = self.inner(*args, **options)
        return (out[0] * 0.5, *out[1:]) if isinstance(out, tuple) else out * 0.5


def own_mlp(ours: Any) -> None:
    ours.model.layers[1].mlp = Tanh()


def wrapped_mlp(ours: Any) -> None:
    ours.model.layers[0].mlp = Half(ours.model.layers[0].mlp)


def wrapped_attention(ours: Any) -> None:
    ours.model.layers[0].self_attn = Half(ours.model.layers[0].self_attn)


def wrapped_norm(ours: Any) -> None:
    ours.model.layers[1].input_layernorm = Half(ours.model.layers[1].input_layernorm)


def wrapped_embedding(ours: Any) -> None:
    ours.model.embed_tokens = Half(ours.model.embed_tokens)


def clamped_mlp(ours: Any) -> None:
    """A subclass with all parts of the family's, that differs where numbers are large."""
    mlp = ours.model.layers[0].mlp
    forward = type(mlp).forward

    class Clamped(type(mlp)):  # type: ignore[misc]
        def forward(self, hidden: Tensor) -> Tensor:
            result: Tensor = forward(self, hidden).clamp(-0.3, 0.3)
            return result

    mlp.__class__ = Clamped


def scaling(ours: Any) -> None:
    for layer in ours.model.layers:
        layer.self_attn.scaling *= 3


def epsilon(ours: Any) -> None:
    for layer in ours.model.layers:
        layer.input_layernorm.variance_epsilon = 3.0


PARTS = [own_mlp, wrapped_mlp, wrapped_attention, wrapped_norm, wrapped_embedding, clamped_mlp,
         scaling, epsilon]  # fmt: skip


@pytest.mark.parametrize("change", PARTS)
@pytest.mark.parametrize("family, dtype", [
    ("llama", torch.float32), ("qwen3", torch.float32), ("llama", torch.bfloat16),
])  # fmt: skip
def test_user_modified_modules_and_constants_take_effect(
    family: str, dtype: torch.dtype, change: Callable[[Any], None]
) -> None:
    ours, ids = fresh(family).to(dtype), torch.tensor([PROMPT])
    length = 12 if dtype == torch.bfloat16 else 24          # torch rounds otherwise: texts part
    engine = load(ours, drafter="prompt-lookup")
    before = engine.generate([PROMPT], max_new_tokens=length)[0].tokens
    change(ours)
    whole = ours.generate(ids, max_new_tokens=length, do_sample=False, pad_token_id=0)
    wanted = whole[0, 3:].tolist()
    assert wanted != before
    for made in (engine, load(ours, drafter="prompt-lookup")):
        assert made.generate([PROMPT], max_new_tokens=length)[0].tokens == wanted


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("size", [30, 50])
def test_resized_vocabulary_is_refused_by_engine_but_accepted_by_custom_generate(
    family: str, size: int
) -> None:
    model, ids = fresh(family).float(), torch.tensor([PROMPT])
    engine = load(model)
    how: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    model.generate(ids, **how, custom_generate=draftproof.generate)
    model.resize_token_embeddings(size, mean_resizing=False)
    with pytest.raises(BadInput, match=f"had 40 tokens when it was loaded here and has {size} now"):
        engine.generate([PROMPT], max_new_tokens=24)
    ours = model.generate(ids, **how, custom_generate=draftproof.generate)
    assert torch.equal(ours, model.generate(ids, **how))
