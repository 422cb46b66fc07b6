"""The target reads trees as the model reads texts, for every family, or refuses in one sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import FAMILIES, VOCAB, build, fresh, model, target
from transformers import (
    Llama4TextConfig,
    LlamaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from draftproof.cache.kv_cache import KVCache
from draftproof.cache.layout import context_of
from draftproof.core.tree import ABSENT, TokenTree, TreeShape
from draftproof.errors import BadInput, BrokenModel, UnsupportedModel
from draftproof.model.target import Target, target_of

SHAPE = TreeShape.from_digits(["0", "1", "00", "01", "10", "000", "0000"])
LENGTHS = (9, 3, 14)
# they weigh attention in float32, whatever the model's dtype
ROUGH = dict.fromkeys(("gemma2", "gptj"), 3e-6)


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.inference_mode():
        yield


def led(ours: Target, seed: int = 0, capacity: int = 48) -> tuple[KVCache, list[list[int]]]:
    """Three ragged rows with committed texts of `LENGTHS` tokens."""
    dice = torch.Generator().manual_seed(seed)
    texts = [torch.randint(VOCAB, (size,), generator=dice).tolist() for size in LENGTHS]
    cache = ours.new_cache(len(texts), capacity)
    for row, text in enumerate(texts):
        view = cache.rows(row, row + 1)
        for piece in (text[:2], text[2:]):
            ours.read(TokenTree.chain(torch.tensor([piece])), view, last_only=True)
            view.keep(None, torch.tensor([len(piece)]))
    return cache, texts


def random_tree(rows: int, seed: int, shape: TreeShape = SHAPE) -> TokenTree:
    tokens = torch.randint(VOCAB, (rows, len(shape)), generator=torch.Generator().manual_seed(seed))
    return TokenTree.shaped(tokens, shape)


def own_logits(ours: Target, text: list[int]) -> torch.Tensor:
    return ours.model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tree_is_read_as_its_paths(family: str) -> None:
    """Ragged rows, texts longer than any window: at every node the logits of the model's own
    forward on its path."""
    ours = target(family)
    assert ours.reads_trees and ours.vocab_size == VOCAB
    cache, texts = led(ours)
    tree = random_tree(3, 1)
    logits = ours.read(tree, cache).logits
    for row, node in [(row, node) for row in range(3) for node in range(len(SHAPE))]:
        path = tree.tokens[row, tree.ancestors[row, node]].tolist()
        wanted = own_logits(ours, texts[row] + path)
        rough = ROUGH.get(family, 1e-9)
        torch.testing.assert_close(logits[row, node], wanted, rtol=0, atol=rough)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "opt", "falcon", "mistral-sliding"])
def test_a_tree_may_be_read_level_by_level(family: str) -> None:
    """With `first`, nodes already in the scratch are not read again; and absent nodes change
    nothing."""
    ours = target(family)
    tree = random_tree(3, 2)
    tree.tokens[1, [2, 5]] = ABSENT  # the second child and its descendants
    cache, _ = led(ours)
    whole = ours.read(tree, cache).logits
    other, _ = led(ours)
    for level in SHAPE.levels:
        cut = TokenTree.shaped(tree.tokens[:, : level.stop], SHAPE.within(level.stop - 1))
        part = ours.read(cut, other, first=level.start).logits
        torch.testing.assert_close(part, whole[:, level.start : level.stop], rtol=0, atol=1e-9)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "qwen3"])
def test_states_and_the_last_logits_are_those_of_whole_texts(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers and training read them; of models, too, that cannot be asked for the last
    logits alone."""
    ours, rough = target(family), ROUGH.get(family, 1e-9)
    cache, texts = led(ours)
    tree, layers = random_tree(3, 3, TreeShape.chain(2)), (1, -1)
    reading = ours.read(tree, cache, hidden_layers=layers)
    assert reading.hidden is not None and ours.read(tree, cache).hidden is None
    whole = [texts[row] + tree.tokens[row].tolist() for row in range(3)]
    tokens = torch.full((3, max(map(len, whole))), ABSENT)
    for row, text in enumerate(whole):
        tokens[row, : len(text)] = torch.tensor(text)
    features = ours.features(tokens, tokens.float(), hidden_layers=layers, logits=True)
    assert features.logits is not None
    for row, text in enumerate(whole):
        out = ours.model(input_ids=torch.tensor([text]), use_cache=False, output_hidden_states=True)
        states = torch.stack([out.hidden_states[layer][0] for layer in layers], 1)
        pairs = ((reading.hidden[row], states[-3:]), (features.hidden[row, : len(text)], states),
                 (features.logits[row, : len(text)], out.logits[0]))
        for result, wanted in pairs:
            torch.testing.assert_close(result, wanted, rtol=0, atol=rough)
    torch.testing.assert_close(ours.unembed(reading.hidden[:, :, 1]), reading.logits)
    assert ours.features(tokens, tokens.float()).logits is None
    assert ours.embed(tokens).shape[-1] == ours.hidden_size == reading.hidden.shape[-1]
    for trims in (True, False):
        monkeypatch.setattr(ours, "_trims", trims)
        last = ours.read(tree, cache, last_only=True).logits
        torch.testing.assert_close(last, reading.logits[:, -1:], rtol=0, atol=1e-12)


def test_the_model_is_left_alone() -> None:
    ours = fresh("gemma3")
    before = {name: value.clone() for name, value in ours.state_dict().items()}
    config = ours.config.to_dict()
    led(Target(ours))
    assert ours.config.to_dict() == config
    assert all(torch.equal(value, before[name]) for name, value in ours.state_dict().items())


def test_offloaded_or_non_decoder_models_and_unsupported_attention_are_refused() -> None:
    ours, attends = fresh("llama"), fresh("llama")
    attends.config._attn_implementation = "flex_attention"
    t5 = T5ForConditionalGeneration(T5Config(
        vocab_size=VOCAB, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2
    ))
    partly = fresh("llama")
    partly.model.layers[1].mlp.to("meta")
    sorts = LlamaForSequenceClassification(ours.config)
    for other, output in ((ours.model, "writes no text"), (sorts, "writes no text"),
                        (partly, "not in memory"), (attends, "flex_attention"),
                        (t5, "load it whole"), (ours.to("meta"), "not in memory")):
        with pytest.raises(UnsupportedModel, match=output):
            Target(other)
    with pytest.raises(BadInput, match="the model was 3; give"):
        target_of(3)    # type: ignore[arg-type]


BASE = {"factor": 2.0, "rope_theta": 1e4}
LONG = {**BASE, "rope_type": "longrope", "original_max_position_embeddings": 32,
        "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}  # fmt: skip


@pytest.mark.parametrize(("family", "rope", "context"), [
    ("llama", {**BASE, "rope_type": "dynamic"}, 64), ("llama", {**BASE, "rope_type": "linear"}, 0),
    ("llama", LONG, 32),
    ("gemma3", {"full_attention": LONG, "sliding_attention": {**BASE, "rope_type": "linear"}}, 32),
])  # fmt: skip
def test_rescaled_positions_limit_the_context(
    family: str, rope: dict[str, Any], context: int, caplog: pytest.LogCaptureFixture
) -> None:
    ours = Target(fresh(family, max_position_embeddings=64, rope_parameters=rope))
    assert ours.context == (context or 64) and ("texts end there" in caplog.text) is bool(context)


def test_llama_4_ends_before_its_queries_are_scaled() -> None:
    config = Llama4TextConfig(attn_temperature_tuning=True, floor_scale=32)
    assert context_of(config) == 31


def test_models_that_cannot_be_read_exactly_are_refused() -> None:
    """GPT-Neo, whose local attention is by slots."""
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": 4,
             "attention_types": [[["global", "local"], 1]], "initializer_range": 0.4}
    with pytest.raises(UnsupportedModel, match="GPTNeoForCausalLM") as error:
        Target(build("GPTNeoConfig", vocab_size=VOCAB, bos_token_id=0, eos_token_id=None, **sizes))
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [0.02, 0.4])
def test_a_model_that_reads_only_chains_exactly_says_so(dtype: torch.dtype, spread: float) -> None:
    """MPT's ALiBi counts slots: right for chains, wrong for trees by two or three in a hundred."""
    sizes = {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}
    mpt = build("MptConfig", vocab_size=VOCAB, initializer_range=spread, **sizes)
    ours = Target(mpt.to(dtype))
    assert not ours.reads_trees
    if dtype == torch.float64:
        cache, texts = led(ours)
        tree = random_tree(3, 1, TreeShape.chain(4))
        logits = ours.read(tree, cache).logits
        for row, node in [(row, node) for row in range(3) for node in range(5)]:
            text = texts[row] + tree.tokens[row, : node + 1].tolist()
            torch.testing.assert_close(logits[row, node], own_logits(ours, text), rtol=0, atol=3e-6)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_not_reported_as_an_error(family: str, dtype: torch.dtype) -> None:
    ours = fresh(family).to(dtype)
    if dtype == torch.float32:
        ours.set_attn_implementation("eager")
    assert Target(ours).reads_trees


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_broken_model_is_named(value: float) -> None:
    ours = fresh("llama")
    ours.lm_head.weight.data[:] = value
    with pytest.raises(BrokenModel, match="finite"):
        Target(ours)


def test_the_self_test_detects_small_errors() -> None:
    """A model whose positions, mask or cache are off by a little in float64 is not exact."""

    class Off(type(model("llama"))):  # type: ignore[misc]
        def forward(self, *args: Any, **options: Any) -> Any:
            out = super().forward(*args, **options)
            if options.get("use_cache") and options.get("position_ids") is not None:
                out.logits = out.logits * (1 + 1e-4)
            return out

    ours = fresh("llama")
    ours.__class__ = Off
    with pytest.raises(UnsupportedModel, match="exactly"):
        Target(ours)


@pytest.mark.parametrize(("name", "off"), [
    ("cohere", {"logit_scale": 1.0}), ("granite", {"logits_scaling": 1.0}),
    ("gemma2", {"final_logit_softcapping": None}),
])  # fmt: skip
def test_unembedding_matches_the_model(name: str, off: dict[str, float | None]) -> None:
    """Scaled, divided or capped as the family does; and the family really does it."""
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9]])
    model = fresh(name, **({"final_logit_softcapping": 2.0} if name == "gemma2" else {}))
    subject = Target(model)
    hidden = subject.features(tokens, torch.ones(1, 6), hidden_layers=(-1,)).hidden[:, :, 0]
    output = subject.unembed(hidden)
    torch.testing.assert_close(output, model(tokens).logits, rtol=0, atol=1e-12)
    for setting, value in off.items():
        setattr(model.config, setting, value)
    assert (Target(model).unembed(hidden) - output).abs().max() > 0.1
