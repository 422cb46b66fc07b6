"""What an earlier text held is not read again; the same bits, and memory within its limit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import build, target

import draftproof as dp
from draftproof.drafters.base import Plain
from draftproof.drafters.prompt_lookup import PromptLookup
from draftproof.engine.engine import Engine
from draftproof.engine.prefix_cache import PrefixCache
from draftproof.model.loading import load_model
from draftproof.model.target import Target
from draftproof.weights.packed_linear import pack_linears

LONG = "One day, Lily and Tom went to the big park with a red ball and a small dog. " * 4
HERE = "Tom said that he was happy."
DRAFTERS: list[dict[str, str]] = [{"assistant_model": "demo-draft"}, {"drafter": "demo-medusa"},
                                  {"drafter": "demo-redrafter"}, {"drafter": "none"}, {}]


LAYERS = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "head_dim": 8,
          "num_attention_heads": 4, "num_key_value_heads": 2}
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gated delta net": ("Qwen3_5TextConfig", {
        **LAYERS, "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 8,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_value_head_dim": 8}),
    "convolutions": ("Lfm2Config", {**LAYERS, "layer_types": ["conv", "full_attention"]}),
    "Mamba": ("MambaConfig", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}),
    "keys as well": ("FalconH1Config", {
        **LAYERS, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_ssm": 32, "mamba_d_state": 8,
        "mamba_chunk_size": 8, "mamba_n_groups": 1}),
}  # fmt: skip


def build_hybrid(kind: str) -> Any:
    name, values = HYBRIDS[kind]
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return build(name, 0, vocab_size=96, initializer_range=0.4, **ends, **values)


def counted(target: Target, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many tokens it has read since the last question."""
    kind = type(target)
    read, nodes = kind.read, list[int]()

    def counting(self: Target, tree: object, *args: object, **more: object) -> object:
        if self is target:
            nodes.append(tree.tokens.numel())                           # type: ignore[attr-defined]
        return read(self, tree, *args, **more)                          # type: ignore[arg-type]

    def since() -> int:
        count = sum(nodes)
        nodes.clear()
        return count

    monkeypatch.setattr(kind, "read", counting)
    return since


@pytest.mark.needs_kernels
@pytest.mark.parametrize("options", DRAFTERS)
def test_a_conversation_is_the_same_and_read_once(
    options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each turn is the last one's text with more after it; then several side by side."""
    with_it, without = (dp.load("demo", budget=5, **options) for _ in range(2))
    with_it.prefixes = PrefixCache(64 << 20)
    sampling = dp.Sampling(temperature=0.8, seed=3, logprobs=True)
    since, text = counted(with_it.target, monkeypatch), with_it.codec.encode(LONG)
    for turn in range(3):
        since()
        done, alone = (item.generate(text, max_new_tokens=10, sampling=sampling)[0]
                       for item in (with_it, without))
        assert done.tokens == alone.tokens and done.logprobs == alone.logprobs
        if turn and with_it.target.ragged_batches:
            assert 0 < since() < 10 * 6 + 20 < len(text)
        text = [*text, *done.tokens, *with_it.codec.encode(HERE)]
    several = [[5, 6, 7, 8], text[:60], [*text, 5, 6, 7], text[:100], [*text[:90], *text[:80]]]
    several.append(text)
    result, wanted = ([(completion.tokens, completion.logprobs) for completion in engine.generate(
        several, max_new_tokens=12, sampling=sampling, n=2, batch_size=4)]
        for engine in (with_it, without))
    assert result == wanted
    assert with_it.prefixes.hits >= 2 and with_it.prefixes.nbytes <= with_it.prefixes.limit


def test_only_whole_prompt_chunks_are_cached_where_reads_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model without kernels of its own: the same reads are left out, none has another shape."""
    model = target().model
    engine, plain = (Engine(Target(model, kv_cache="int8")) for _ in range(2))
    monkeypatch.setattr(Target, "ragged_batches", False)
    for item in (engine, plain):
        monkeypatch.setattr(item.target, "context", 700)
    engine.prefixes, text = PrefixCache(64 << 20), [2 + n * n % 29 for n in range(600)]
    since, lengths = counted(engine.target, monkeypatch), [600, 600, 520, 300, 255]
    for length, read in zip(lengths, [600, 88, 8, 44, 255], strict=True):
        since()
        done = engine.generate(text[:length], max_new_tokens=1)[0]
        assert since() == read
        assert done.tokens == plain.generate(text[:length], max_new_tokens=1)[0].tokens


@pytest.mark.parametrize("kind", ["gated delta net", "convolutions", "Mamba", "keys as well"])
def test_hybrids_resume_from_states_at_chunk_borders(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns of a conversation, then a text that begins alike: the same text, less is read."""
    target = Target(build_hybrid(kind))
    texts, text = list[list[int]](), [2 + n * n % 29 for n in range(400)]
    texts += [text, [*text, *text[:90]], [*text[:300], 7, 7], [*text[:129], 9], text[:128]]
    since = counted(target, monkeypatch)
    plain = [Engine(target).generate([each], max_new_tokens=9)[0].tokens for each in texts]
    for drafter in (Plain(), PromptLookup()):
        engine, read = Engine(target, drafter, budget=3), list[int]()
        engine.prefixes = PrefixCache(64 << 20)
        since()
        for each, wanted in zip(texts, plain, strict=True):
            assert engine.generate([each], max_new_tokens=9)[0].tokens == wanted
            read.append(since())
        first, *others = engine.prefixes.known
        assert engine.prefixes.hits == 3 and engine.prefixes.reused == 384 + 256 + 128
        assert read[1] < read[0] - 256 and engine.prefixes.nbytes == sum(
            entry.nbytes for entry in (first, *others))
        assert all(set(entry.states or {}) <= {128, 256, 384} for entry in (first, *others))


def test_states_after_the_common_beginning_are_not_taken_over() -> None:
    """They are of another text, and would be held with this one for nothing."""
    target, text = Target(build_hybrid("convolutions")), [2 + n * n % 29 for n in range(400)]
    engine = Engine(target)
    engine.prefixes = PrefixCache(64 << 20)
    engine.generate([text], max_new_tokens=1)
    assert set(engine.prefixes.known[0].states or {}) == {128, 256, 384}
    row = target.new_cache(1, 512)
    count, states = engine.prefixes.reuse([*text[:200], *[7] * 100], row, 128)
    assert count == 128 and set(states) == {128}


@pytest.mark.needs_kernels
def test_memory_has_a_limit_and_other_weights_are_not_mixed_up() -> None:
    model = load_model("demo")  # a module, whose weights may change
    pack_linears(model)
    engine = dp.load(model, drafter="none")
    texts = [engine.codec.encode(f"{name} and " + LONG) for name in ("Tom", "Lily", "Max", "Sue")]
    engine.prefixes = PrefixCache(1 << 40)
    engine.generate(texts[0], max_new_tokens=2)
    each = engine.prefixes.nbytes
    engine.prefixes = cache = PrefixCache(2 * each + each // 2)
    for text in (*texts[:2], texts[0], texts[2]):  # the second was not used longest
        engine.generate(text, max_new_tokens=2)
        assert 0 < cache.nbytes <= cache.limit
    assert [cache.length(text, 1) > 50 for text in texts] == [True, False, True, False]
    small = PrefixCache(each // 2)
    engine.prefixes = small
    engine.generate(texts[0], max_new_tokens=2)
    assert small.nbytes == 0
    engine.prefixes = cache
    with torch.no_grad():
        engine.target.model.model.layers[0].input_layernorm.weight.mul_(1.5)
    plain = Engine(engine.target, codec=engine.codec, stop_tokens=engine.stop_tokens)
    hits = cache.hits
    done, alone = (item.generate(texts[0], max_new_tokens=20)[0] for item in (engine, plain))
    assert done.tokens == alone.tokens and cache.hits == hits


@pytest.mark.needs_kernels
@pytest.mark.parametrize("drafter", ["none", "suffix", "recycling"])
def test_owners_do_not_share_prefixes_or_drafts(
    drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither what is read of a prompt, nor what is drafted; its own repetition is quick."""
    engine = dp.load("demo", drafter=drafter, budget=0 if drafter == "none" else 6)
    engine.prefixes = PrefixCache(64 << 20)
    since = counted(engine.target, monkeypatch)
    seen = []
    for owner in (1, 2, 2, 3 << 40):
        (request,) = engine.read(LONG, max_new_tokens=30, sampling=dp.Sampling())
        request.owner = owner
        scheduler = engine.new_scheduler(1)
        scheduler.add(request)
        while scheduler.has_unfinished_requests():
            scheduler.step()
        stats = request.sequences[0].stats
        seen.append((since(), stats.rounds, stats.drafted, request.sequences[0].text))
    first, other, again, third = seen
    assert first == other == third, "each was the first text of its owner"
    assert again[0] < first[0] and again[-1] == first[-1]


@pytest.mark.needs_kernels
def test_a_prompt_whose_text_failed_is_read_again() -> None:
    """Its keys and values were cleared."""
    engine, plain = (dp.load("demo", drafter="none") for _ in range(2))
    engine.prefixes = PrefixCache(64 << 20)
    text = engine.codec.encode(LONG)[:40]
    nothing = dp.Sampling(processors=[lambda text, scores: torch.full_like(scores, -torch.inf)])
    (failed,) = engine.generate([text], max_new_tokens=8, sampling=nothing)
    assert failed.finish_reason == "error"
    done, alone = (item.generate([text], max_new_tokens=8)[0] for item in (engine, plain))
    assert done.tokens == alone.tokens
