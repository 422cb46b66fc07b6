"""Encoder–decoders: the encoder once, the decoder in chains and trees, the text of the model's own
forward."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers
from tiny import fresh
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

import draftproof
from draftproof.cache.kv_cache import KVCache
from draftproof.cache.kv_layer import LayerShape
from draftproof.cache.source_cache import SourceCache
from draftproof.core.params import Sampling
from draftproof.engine.engine import Engine
from draftproof.engine.load import load
from draftproof.engine.shape_policy import ShapePolicy
from draftproof.errors import BadInput, DraftproofError
from draftproof.model import encoder_decoder
from draftproof.model import module_target as module
from draftproof.model.encoder_decoder import EncoderDecoder

VOCAB, NEW, PAD = 96, 10, 0
MARKS = {"pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
HALVES = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
          "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
BART = {"vocab_size": VOCAB, "d_model": 32, "init_std": 0.4, "max_position_embeddings": 64,
        **HALVES, **MARKS}
T5 = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
      "relative_attention_num_buckets": 8, "relative_attention_max_distance": 10,
      "tie_word_embeddings": False, **MARKS}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "T5": ("T5ForConditionalGeneration", T5),
    "Bart": ("BartForConditionalGeneration", BART),
    "Whisper": ("WhisperForConditionalGeneration",
                {**BART, "max_source_positions": 10, "max_target_positions": 64,
                 "num_mel_bins": 8, "suppress_tokens": None, "begin_suppress_tokens": None}),
}  # fmt: skip


def made(kind: str) -> PreTrainedModel:
    name, values = KINDS[kind]
    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, f"{kind}Config")(**values))
    ours: PreTrainedModel = model.double().eval()
    decoder = ours.get_decoder()
    spread = [ours.get_input_embeddings(), decoder.embed_tokens, ours.get_output_embeddings(),
              getattr(decoder, "embed_positions", None)]
    with torch.no_grad():           # the next token depends on all that it should
        for weight in ours.parameters():
            weight.mul_(1.5).add_(0.1 * torch.randn_like(weight))
        for part in spread:
            if isinstance(getattr(part, "weight", None), nn.Parameter):
                part.weight = nn.Parameter(2 * torch.randn_like(part.weight))
    ours.generation_config = GenerationConfig(pad_token_id=PAD, decoder_start_token_id=3)
    return ours


def near(model: PreTrainedModel) -> PreTrainedModel:
    """A draft model with the same encoder and nearly the same decoder."""
    draft, dice = copy.deepcopy(model), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in draft.get_decoder().parameters():
            noise = torch.randn(weight.shape, generator=dice, dtype=weight.dtype)
            weight.add_(0.01 * noise)
    return draft


def prompts(model: PreTrainedModel) -> list[Any]:
    dice = torch.Generator().manual_seed(1)
    if model.main_input_name == "input_features":
        features = [torch.randn(1, 8, 20, generator=dice) for _ in range(3)]
        return [{"input_features": feature.double()} for feature in features]
    return [torch.randint(4, VOCAB, (size,), generator=dice).tolist() for size in (13, 2, 30)]


@torch.inference_mode()
def own_text(model: PreTrainedModel, prompt: Any) -> list[int]:
    """Greedily, by the model's forward without a cache."""
    settings, text = prompt, [3]
    if not isinstance(prompt, dict):
        settings = {"input_ids": torch.tensor([prompt])}
    known = model.get_encoder()(**settings)
    for _ in range(NEW):
        out = model(encoder_outputs=known, decoder_input_ids=torch.tensor([text]), use_cache=False)
        text.append(int(out.logits[0, -1].argmax()))
    return text[1:]


def texts(engine: Engine, asked: Any, want: Sampling, rows: int) -> list[list[int]]:
    done = engine.generate(asked, sampling=want, max_new_tokens=NEW, batch_size=rows)
    return [completion.checked().tokens for completion in done]


@pytest.mark.parametrize("kind", KINDS)
def test_text_is_independent_of_the_draft(kind: str) -> None:
    """Alone and in ragged batches, in chains and trees."""
    model = made(kind)
    asked, draft = prompts(model), near(model)
    engines = [load(model), load(model, assistant_model=draft, budget=4),
               load(model, assistant_model=draft, draft_tree="2,2,1")]
    assert all(engine.target.reads_trees for engine in engines)
    for want in (Sampling(), Sampling(temperature=0.8, seed=3)):
        plain = texts(load(model, drafter="none"), asked, want, 1)
        assert len({token for text in plain for token in text}) > 2, "a text that says little"
        if want.temperature == 0:
            assert plain == [own_text(model, prompt) for prompt in asked]
        for engine in engines if want.temperature == 0 else engines[1:]:
            assert texts(engine, asked, want, 3) == plain
    assert texts(engines[1], asked[1:], want, 1) == plain[1:]
    assert engines[1].stats.tokens_per_round > 1.2, "what was drafted is never accepted"


def padded(asked: list[Any]) -> dict[str, Tensor]:
    if isinstance(asked[0], dict):
        return {"input_features": torch.cat([request["input_features"] for request in asked])}
    width = max(map(len, asked))
    ids = [[*request, *[PAD] * (width - len(request))] for request in asked]
    mask = [[1] * len(request) + [0] * (width - len(request)) for request in asked]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


@pytest.mark.parametrize("kind", KINDS)
def test_generate_of_transformers_writes_the_same(kind: str) -> None:
    """Theirs, and ours in its place; of a batch, and with an assistant."""
    model = made(kind)
    asked, inputs = prompts(model), padded(prompts(model))
    how: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
    theirs = model.generate(**inputs, **how)
    for more in ({}, {"drafter": near(model)}):
        ours = model.generate(**inputs, **how, custom_generate=draftproof.generate, **more)
        assert torch.equal(ours, theirs)
    whole = texts(load(model), asked, Sampling(), 3)
    start = 0 if kind == "Whisper" else 1           # whose own leaves out what it began with
    assert [row[start:] for row in theirs.tolist()] == whole
    if kind != "Whisper":
        scored = model.generate(
            **inputs, **how, output_scores=True, return_dict_in_generate=True,
            custom_generate=draftproof.generate,
        )  # fmt: skip
        assert torch.equal(torch.stack(scored.scores, 1).argmax(-1), theirs[:, 1:])


def test_generation_config_processors_see_the_right_encoder_or_decoder_text() -> None:
    model = made("Bart")
    asked = prompts(model)[:2]
    model.generation_config.update(
        forced_bos_token_id=7, no_repeat_ngram_size=2, repetition_penalty=1.3, min_length=6,
        encoder_no_repeat_ngram_size=2, max_length=12, forced_eos_token_id=2, eos_token_id=2,
    )  # fmt: skip
    (theirs,) = model.generate(torch.tensor(asked[:1])).tolist()
    done, other = load(model).generate(asked)
    assert [3, *done.tokens] == theirs and theirs[1] == 7 and other.tokens != done.tokens


def test_the_encoder_runs_once_and_a_draft_model_shares_it() -> None:
    model, calls = made("T5"), list[int]()
    draft = near(model)
    for item in (model, draft):
        item.get_encoder().register_forward_hook(lambda *_: calls.append(1))
    engine = load(model, assistant_model=draft, budget=3)
    engine.generate(prompts(model), max_new_tokens=NEW, n=2, sampling=Sampling(temperature=1.0))
    assert len(calls) == 3
    with torch.no_grad():
        draft.get_encoder().block[0].layer[0].layer_norm.weight.mul_(1.1)
    load(model, assistant_model=draft, budget=3).generate(prompts(model), max_new_tokens=NEW)
    assert len(calls) == 9, "another encoder reads for itself"


def test_encoder_outputs_follow_rows_that_join_and_leave() -> None:
    model = made("Bart")
    asked = [*prompts(model), *([token + 1] * 3 for token in (9, 20, 40, 60))]
    wants = [Sampling(temperature=0.7, seed=row, max_new_tokens=3 + 2 * row) for row in range(7)]
    alone = [load(model).generate(item, sampling=want)[0].tokens
             for item, want in zip(asked, wants, strict=True)]
    for options in ({"drafter": "portfolio"}, {"assistant_model": near(model)}):
        done = load(model, **options).generate(asked, sampling=wants, batch_size=3)
        assert [completion.tokens for completion in done] == alone


def test_sizes_of_sources_move_with_their_rows() -> None:
    """A row sees its own source and no padding, wherever it moves."""
    plain = KVCache.empty([LayerShape(1, 4, 4)], 3, 8, torch.float32, torch.device("cpu"))
    cache = SourceCache.wrap(plain)
    for row, size in enumerate((5, 2, 7)):
        cache.put(row, [torch.full((1, 1, size, 4), float(size))] * 2)
    cache.select([2, 1])
    view = cache.rows(0, 2)
    mask = view.source_mask()
    assert view.source_sizes == [7, 2] and mask is not None and mask.sum(1).tolist() == [7, 2]
    for store in cache.sources.stores:
        assert store[0, 0, :, 0].tolist() == [7] * 7
        assert store[1, 0, :, 0].tolist() == [2] * 2 + [0] * 5


def test_lookup_drafters_search_the_source() -> None:
    """A decoder that copies what it was asked: of the source, what follows is accepted."""
    model = made("T5")
    text = load(model, drafter="none").generate(prompts(model)[0], max_new_tokens=NEW)[0].tokens
    engine = load(model, drafter="prompt-lookup", budget=3)

    class Knows(EncoderDecoder):
        def begin(self, cache: Any, sources: Any) -> None:
            super().begin(cache, [self.asked])

    target: Any = engine.target
    target.__class__ = Knows
    target.asked = encoder_decoder.Source({"input_ids": torch.tensor([prompts(model)[0]])})
    (done,) = engine.generate([[3, *text]], max_new_tokens=NEW)
    assert done.tokens == text and done.stats.tokens_per_round > 2.5


def test_the_load_check_detects_wrong_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder to which nobody can say what is not there, or where its nodes are."""
    for owner, name, wrong in (
        (SourceCache, "source_mask", lambda cache: None),
        (module, "placed", lambda place: nullcontext()),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, wrong)
            with pytest.raises(DraftproofError, match="places tokens"):
                load(made("Bart"))


def test_decoder_can_draft_for_an_encoder_decoder_but_not_vice_versa() -> None:
    model, small = made("T5"), fresh("llama", vocab_size=VOCAB)
    asked = prompts(model)
    engine = load(model, assistant_model=small, budget=2)
    assert texts(engine, asked, Sampling(), 3) == texts(load(model), asked, Sampling(), 1)
    with pytest.raises(DraftproofError, match="encoder-decoder, and the target is none"):
        load(small, assistant_model=model)


def test_unsupported_requests_raise_a_clear_error() -> None:
    model = made("Bart")
    engine, closed = load(model), ShapePolicy(closed=True)
    features = {"input_features": torch.zeros(1, 8, 20)}
    for ask, output in (
        (lambda: load(model, quantize="int8"), "not quantised here"),
        (lambda: load(model, drafter="self-layers:1"), "name another drafter"),
        (lambda: Engine(engine.target, shapes=closed).generate([[5]]), "leave graphs"),
        (lambda: engine.generate(features), "the encoder of .* reads input_ids"),
        (lambda: engine.generate([[5] * 65]), "at most 64"),
        (lambda: engine.generate([[VOCAB]]), "knows 0 to"),
        (lambda: engine.generate({"input_ids": [[5]], "decoder_input_ids": [[VOCAB]]}),
         "knows 0 to"),
        (lambda: engine.generate("words"), "no tokenizer"),
    ):  # fmt: skip
        with pytest.raises(DraftproofError, match=output) as error:
            ask()
        assert "\n" not in str(error.value)


def test_whisper_starts_with_the_tokens_of_its_generation_config() -> None:
    """Language, which it detects, task, and no timestamps; in Python what the processor returns."""
    model = made("Whisper")
    model.generation_config = GenerationConfig(
        pad_token_id=PAD, decoder_start_token_id=3, eos_token_id=2, suppress_tokens=[40, 41],
        begin_suppress_tokens=[42], lang_to_id={"<|en|>": 10, "<|de|>": 11},
        task_to_id={"transcribe": 20}, no_timestamps_token_id=30, is_multilingual=True,
        return_timestamps=False, task="transcribe",
    )  # fmt: skip
    asked = prompts(model)
    theirs = [model.generate(**request, max_new_tokens=NEW)[0].tolist() for request in asked]
    engine = load(model, assistant_model=near(model), budget=3)
    done = engine.generate(asked, max_new_tokens=NEW)
    for item, wanted in zip(done, theirs, strict=True):
        assert item.tokens[: len(wanted)] == wanted
    ids, _ = engine.requests.begun(asked[0])        # type: ignore[arg-type]
    assert ids[0] == 3 and ids[1] in (10, 11) and ids[2:] == [20, 30]
    model.generation_config.return_timestamps = True
    with pytest.raises(BadInput, match="return_timestamps"):
        engine.generate(asked)
