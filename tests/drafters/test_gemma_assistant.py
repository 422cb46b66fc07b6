"""Assistants of Gemma 4 over the target's own cache, against transformers' model and by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import drafting
import pytest
import torch
import transformers
from published import keeps_the_text
from safetensors.torch import load_file, save_file

from draftproof.core.tree import TokenTree
from draftproof.drafters import gemma_assistant
from draftproof.drafters.checkpoint import Checkpoint
from draftproof.engine.engine import Engine
from draftproof.engine.load import load
from draftproof.errors import DrafterMismatch
from draftproof.model.target import Target

TEXT: dict[str, Any] = {
    "vocab_size": 40, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "global_head_dim": 8, "num_global_key_value_heads": 2, "sliding_window": 6,
    "hidden_size_per_layer_input": 0, "max_position_embeddings": 256, "initializer_range": 0.3,
    "vocab_size_per_layer_input": 0, "eos_token_id": None, "pad_token_id": None,
    "bos_token_id": None, "enable_moe_block": False,
}  # fmt: skip
KINDS = ["sliding_attention", "full_attention"]


@pytest.fixture(autouse=True)
def transformers_makes_assistants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 5.23 refuses to make a model whose layers all take shared keys."""
    kind = transformers.Gemma4TextConfig
    modes: Any = kind.kv_sharing_modes

    def sharing(self: Any) -> Any:
        every = self.num_kv_shared_layers == self.num_hidden_layers
        return ["reuse"] * self.num_hidden_layers if every else modes.fget(self)

    monkeypatch.setattr(kind, "kv_sharing_modes", property(sharing))


@lru_cache(maxsize=1)
def target() -> Target:
    torch.manual_seed(0)
    config = transformers.Gemma4TextConfig(**TEXT, hidden_size=24, num_hidden_layers=4,
                                           layer_types=KINDS * 2, num_kv_shared_layers=0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    for key, weight in model.named_parameters():
        weight.requires_grad_(False)
        weight += 0.3 * torch.randn_like(weight) if "norm" in key else 0
    model.generation_config = transformers.GenerationConfig()
    return Target(model)


def assistant(**changed: Any) -> Any:
    torch.manual_seed(1)
    text = transformers.Gemma4TextConfig(**TEXT, hidden_size=16, num_hidden_layers=2,
                                         layer_types=KINDS, num_kv_shared_layers=2)
    config = transformers.Gemma4AssistantConfig(text_config=text, backbone_hidden_size=24,
                                                num_centroids=8, centroid_intermediate_top_k=3,
                                                **changed)
    model = transformers.Gemma4AssistantForCausalLM(config).double().eval()
    for weight in model.parameters():
        weight.data = (1 + 0.3 * torch.randn_like(weight) if weight.dim() == 1
                       else 0.3 * torch.randn_like(weight))
    if model.masked_embedding is not None:
        model.masked_embedding.token_ordering.copy_(torch.randperm(40))
    return model


def written(folder: Path, **changed: Any) -> Path:
    assistant(**changed).save_pretrained(folder)
    return folder


def loaded(folder: Path) -> Any:
    return gemma_assistant.load(Checkpoint(folder), target())


SEEN = [7, 3, 31, 2, 9, 4, 4, 1, 12, 22, 5]


def observed(drafter: Any) -> Any:
    model = target()
    with torch.inference_mode():
        cache = model.new_cache(1, 64)
        states = model.read(TokenTree.chain(torch.tensor([SEEN[:-1]])), cache, hidden_layers=(-1,))
        cache.keep(None, torch.tensor([len(SEEN) - 1]))
        drafter.start(1, 64, drafting.CPU)
        drafter.observe(drafting.commit_of([0], [SEEN[:-1]], states.hidden))
        return replace(drafting.frontier_of([SEEN], 4), cache=cache)


@pytest.mark.parametrize("ordered", [False, True], ids=["whole head", "centroids"])
def test_output_matches_transformers(tmp_path: Path, ordered: bool) -> None:
    """Keys and values come from a forward of transformers, drafted tokens from a fixed list."""
    drafter = loaded(written(tmp_path, use_ordered_embeddings=ordered))
    reader, drafted = drafter.reader(observed(drafter)), [5, 8, 0]
    model: Any = target().model
    theirs, results = assistant(use_ordered_embeddings=ordered), []
    with torch.inference_mode():
        cache = transformers.DynamicCache()                     # keeps all, of every layer
        out = model(torch.tensor([SEEN[:-1]]), output_hidden_states=True, past_key_values=cache)
        shared = {kind: (cache.layers[number].keys, cache.layers[number].values)
                  for number, kind in ((2, KINDS[0]), (3, KINDS[1]))}  # fmt: skip
        hidden, place = out.hidden_states[-1][:, -1:], torch.tensor([[len(SEEN) - 1]])
        for depth, token in enumerate([SEEN[-1], *drafted]):
            chain = TokenTree.chain(torch.tensor([[SEEN[-1], *drafted[:depth]]]))
            results.append(reader.read(chain, depth)[0, 0])
            embedded = model.get_input_embeddings()(torch.tensor([[token]]))
            made = theirs(inputs_embeds=torch.cat([embedded, hidden], -1), position_ids=place,
                          shared_kv_states=shared)
            hidden, wanted = made.last_hidden_state, made.logits[0, 0]
            there = results[-1] > -torch.inf
            assert there.sum() == (15 if ordered else 40)
            torch.testing.assert_close(results[-1][there], wanted[there], rtol=0, atol=3e-5)


@pytest.mark.parametrize("ordered", [False, True], ids=["whole head", "centroids"])
def test_text_is_unchanged(tmp_path: Path, ordered: bool) -> None:
    keeps_the_text(loaded(written(tmp_path, use_ordered_embeddings=ordered)), target())


def test_a_quantised_cache_is_read_as_the_target_reads_it(tmp_path: Path) -> None:
    target().model.save_pretrained(tmp_path / "model")
    written(tmp_path / "assistant")
    engines = [load(tmp_path / "model", drafter=name, kv_cache="int8", budget=3, dtype="float64")
               for name in (str(tmp_path / "assistant"), "none")]
    drafted, plain = (engine.generate([SEEN], max_new_tokens=9)[0] for engine in engines)
    assert drafted.tokens == plain.tokens and drafted.stats.drafted > 0


CHANGES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"backbone_hidden_size": 20}, {}, "20 numbers"), ({"num_centroids": 4}, {}, "shape"),
    ({"some_new_thing": 3}, {}, "some_new_thing"),
    ({"use_ordered_embeddings": False}, {}, "not supported"),
    ({}, {"num_key_value_heads": 4}, "4 key heads"), ({}, {"vocab_size": 9000}, "9000 tokens"),
    ({}, {"num_hidden_layers": 3}, "cannot be made"), ({}, {"another": 1}, "another"),
]  # fmt: skip


@pytest.mark.parametrize(("outer", "inner", "why"), CHANGES)
def test_mismatched_drafters_are_refused(
    tmp_path: Path, outer: dict[str, Any], inner: dict[str, Any], why: str
) -> None:
    written(tmp_path, use_ordered_embeddings=True)
    settings = json.loads((tmp_path / "config.json").read_text()) | outer
    settings["text_config"] |= inner
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(DrafterMismatch, match=why):
        loaded(tmp_path)


def test_settings_that_change_drafts(tmp_path: Path) -> None:
    written(tmp_path, use_ordered_embeddings=True)
    plain, drafts = json.loads((tmp_path / "config.json").read_text()), []
    for change in ({}, {"centroid_intermediate_top_k": 1}):
        (tmp_path / "config.json").write_text(json.dumps(plain | change))
        drafter = loaded(tmp_path)
        frontier = observed(drafter)
        with torch.inference_mode():
            drafts.append(drafter.propose(frontier).tokens.tolist())
    assert drafts[0] != drafts[1]
    order = load_file(tmp_path / "model.safetensors")
    order["masked_embedding.token_ordering"][0] = order["masked_embedding.token_ordering"][1]
    save_file(order, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(DrafterMismatch, match="token_ordering"):
        loaded(tmp_path)


def test_the_format_is_described(tmp_path: Path) -> None:
    written(tmp_path / "assistant")
    engine = Engine(target(), loaded(tmp_path / "assistant"), budget=3)
    assert engine.drafter.name == "gemma-assistant"
