"""From the names and folders of draft heads to engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from drafting import MEDUSA_TREE, accepted_share, medusa_head, texts
from tiny import VOCAB, model, prompts, target
from transformers import LlamaConfig, LlamaForCausalLM

from draftproof.core.params import Sampling
from draftproof.drafters.checkpoints import write_head
from draftproof.drafters.medusa import MedusaConfig, MedusaHead
from draftproof.drafters.medusa_trees import CHOICES
from draftproof.engine import load as loading
from draftproof.engine.load import load
from draftproof.errors import BadInput, DrafterMismatch, ModelNotFound


def test_a_folder_of_heads_drafts(tmp_path: Path) -> None:
    """The tree is the one asked for, else drawn again in every round; earlier versions stored
    one."""
    write_head(medusa_head(), tmp_path / "old")
    file = tmp_path / "old" / "config.json"
    old = {"tree": [[0], [1]], "bias": True, "pairs": 0}
    file.write_text(json.dumps(json.loads(file.read_text()) | old))
    write_head(MedusaHead.fresh(target(), 4), tmp_path / "four")
    plain = texts(load(model(), drafter="none"), prompts(8), max_new_tokens=20)
    for name, tree, nodes in (("old", None, 16), ("old", loading.TreeShape(MEDUSA_TREE), 7),
                              ("four", "zephyr_stage2", len(CHOICES["zephyr_stage2"]))):
        engine = load(model(), drafter=str(tmp_path / name), draft_tree=tree, budget=nodes)
        done = engine.generate(prompts(8), max_new_tokens=20)
        assert [(completion.tokens, completion.finish_reason) for completion in done] == plain
        assert engine.drafter.max_draft_tokens == nodes
        assert name == "four" or accepted_share(done) > 0.05


def test_names_that_cannot_be_loaded_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(loading.HEADS, "medusa", "demo-no-such-heads")
    with pytest.raises(ModelNotFound, match="no medusa heads for the demo model"):
        load(model(), drafter="medusa")
    with pytest.raises(BadInput, match=r"oracle.*medusa, redrafter.*folder"):
        load(model(), drafter="oracle")
    form = MedusaConfig(num_heads=2, hidden_size=48, vocab_size=VOCAB)
    write_head(MedusaHead(form), tmp_path / "wide")
    with pytest.raises(DrafterMismatch, match=r"48.*32"):
        load(model(), drafter=tmp_path / "wide")
    write_head(MedusaHead.fresh(target(), 4), tmp_path / "four")
    draft = {"assistant_model": model(num_hidden_layers=1)}
    for options in ({"drafter": tmp_path / "four"}, draft):
        with pytest.raises(BadInput, match="oak"):
            load(model(), draft_tree="oak", **options)
    engine = load(model(), **draft, draft_tree="zephyr_stage2")
    assert engine.budget.max_draft_tokens == len(CHOICES["zephyr_stage2"])


@pytest.fixture(scope="module")
def wide() -> LlamaForCausalLM:
    """As wide as SmolLM2-135M, and one layer deep."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=49152, hidden_size=576, intermediate_size=64,
                         num_hidden_layers=1, num_attention_heads=9, num_key_value_heads=3,
                         tie_word_embeddings=True)  # fmt: skip
    return LlamaForCausalLM(config).bfloat16().eval()


@pytest.mark.parametrize("drafter", ["smollm2-135m-medusa", "smollm2-135m-redrafter"])
def test_embedded_heads_draft_for_their_target(wide: LlamaForCausalLM, drafter: str) -> None:
    prompt = [[5, 80, 7], [900, 2]]
    for temperature in (0.0, 0.8):
        wanted = Sampling(temperature=temperature, seed=3, max_new_tokens=12)
        plain, drafted = (load(wide, drafter=name, budget=budget).generate(prompt, sampling=wanted)
                          for name, budget in (("none", None), (drafter, 7)))
        assert [draft.tokens for draft in drafted] == [completion.tokens for completion in plain]
        assert all(draft.stats.drafted > 0 for draft in drafted)
