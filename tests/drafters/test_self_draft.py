"""Self-drafts: the target's weights in fewer bits, or its first layers, of which none is copied."""

from __future__ import annotations

import pytest
import torch
from drafting import Watch, accepted_share, texts
from tiny import fresh, model, prompts, target

from draftproof.core.acceptance import RULES
from draftproof.core.params import Sampling
from draftproof.core.tree import TokenTree, TreeShape
from draftproof.drafters.draft_model import SelfDraft, self_draft_options
from draftproof.engine.engine import Engine
from draftproof.engine.load import load
from draftproof.errors import BadInput
from draftproof.model.target import Target
from draftproof.model.variants import first_layers
from draftproof.weights.packed_linear import pack_linears
from draftproof.weights.quantize import weight_bytes
from draftproof.weights.quantized_linear import QuantizedLinear

DRAFTS = [pytest.param({"quantize": "int8"}, id="int8"),
          pytest.param({"quantize": "int4"}, id="int4"),
          pytest.param({"layers": 1}, id="one layer"),
          pytest.param({"layers": 1, "quantize": "int8"}, id="one layer in int8"),
          pytest.param({"layers": 1, "shape": TreeShape.branching((2, 2, 1))},
                       id="one layer, tree"),
          pytest.param({}, id="itself")]


@pytest.mark.parametrize("options", DRAFTS)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.9, seed=3)],
                         ids=["greedy", "sampled"])
def test_self_drafting_does_not_change_the_text(options: dict, sampling: Sampling) -> None:
    asked = prompts(5, seed=3)
    wanted = texts(Engine(target()), asked, max_new_tokens=16, sampling=sampling)
    engine = Engine(target(), Watch(SelfDraft(target(), **options)))
    assert texts(engine, asked, max_new_tokens=16, sampling=sampling) == wanted
    assert texts(engine, asked, max_new_tokens=16, sampling=sampling, batch_size=2) == wanted
    for rule in RULES if sampling.temperature == 0 else ():
        engine = Engine(target(), SelfDraft(target(), **options), acceptance=rule)
        assert texts(engine, asked, max_new_tokens=16) == wanted, rule


def test_self_drafts_in_8_bits_agree_more_than_with_one_layer() -> None:
    asked, shares = prompts(8, seed=5), list[float]()
    for options in ({"quantize": "int8"}, {"layers": 1}, {}):
        engine = Engine(target(), SelfDraft(target(), **options), budget=4)
        shares.append(accepted_share(engine.generate(asked, max_new_tokens=40)))
    assert shares[1] < 0.6 < shares[0] <= shares[2]


@pytest.mark.parametrize("family",
                         ["llama", "qwen3", "gpt2", "gemma3", "opt", "falcon", "qwen2-sliding"])
def test_the_first_layers_read_what_the_target_shows_there(family: str) -> None:
    """Logits of N layers are the target's head and norm after its hidden state at layer N."""
    ours = target(family)
    short = first_layers(ours, 1)
    tree = TokenTree.shaped(torch.tensor([[3, 1, 4, 1, 5]]),
                            TreeShape.from_digits(["0", "1", "10", "11"]))
    with torch.inference_mode():
        wanted = ours.read(tree, ours.new_cache(1, 64), hidden_layers=(1,)).hidden
        result = short.read(tree, short.new_cache(1, 64), hidden_layers=(-1,))
        norm = {"gpt2": "ln_f", "falcon": "ln_f",
                "opt": "decoder.final_layer_norm"}.get(family, "norm")
        normed = ours.model.base_model.get_submodule(norm)(wanted[:, :, 0])
        torch.testing.assert_close(result.hidden[:, :, 0], normed, rtol=0, atol=1e-9)
        torch.testing.assert_close(result.logits, ours.unembed(normed), rtol=0, atol=1e-9)
    assert len(short.new_cache(1, 64).layers) == 1 and short.reads_trees == ours.reads_trees


def test_a_self_draft_shares_what_is_not_quantised() -> None:
    ours = Target(fresh("llama"))
    short, draft = (SelfDraft(ours, **options).model.model
                    for options in ({"layers": 1}, {"quantize": "int8"}))
    assert weight_bytes(torch.nn.ModuleList([ours.model, short])) == weight_bytes(ours.model)
    assert len(ours.model.model.layers) == 2 == ours.model.config.num_hidden_layers
    assert draft.model.embed_tokens.weight is ours.model.model.embed_tokens.weight
    assert draft.model.norm.weight is ours.model.model.norm.weight
    assert isinstance(draft.model.layers[0].mlp.down_proj, QuantizedLinear)
    assert type(ours.model.model.layers[0].mlp.down_proj) is torch.nn.Linear


def test_a_packed_target_drafts_for_itself() -> None:
    packed = fresh("llama").bfloat16()
    if not pack_linears(packed):
        pytest.skip("nothing is packed on this machine")
    ours, asked = Target(packed), prompts(4, seed=6)
    for options in ({"quantize": "int8"}, {"layers": 1}):
        engine = Engine(ours, Watch(SelfDraft(ours, **options)), budget=3)
        done = engine.generate(asked, max_new_tokens=20)
        assert sum(completion.stats.accepted for completion in done) > 0


def test_names() -> None:
    assert self_draft_options("self-layers:4") == (4, None)
    assert [self_draft_options(f"self-{kind}") for kind in ("int8", "int4")] == [(None, "int8"),
                                                                                (None, "int4")]
    for wrong in ("self-", "self-layers", "self-layers:", "self-layers:-1", "self-int8:3",
                  "self-int3", "self-draft"):
        with pytest.raises(BadInput, match="self-int8, self-int4, or self-layers:N"):
            self_draft_options(wrong)
    for count in (0, 2, 9):
        with pytest.raises(BadInput, match=f"{count} layers were asked for"):
            SelfDraft(target(), layers=count)
    shape = TreeShape.branching((2, 1))
    loaded = load(model("llama"), drafter="self-layers:1", budget=3, draft_tree=shape)
    assert isinstance(loaded.drafter, SelfDraft) and loaded.drafter.shape == shape
    assert load(model("llama"), drafter="self-int8").drafter.name == "self-draft"
