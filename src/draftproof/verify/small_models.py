"""A tiny random model of any type, with every kind of layer in its published checkpoints, and with
all thresholds on length so small that a short text crosses them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

if TYPE_CHECKING:
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

    from draftproof.requests.prompts import Prompt

VOCAB, CONTEXT, WINDOW, HEADS, LAYERS = 128, 256, 16, 4, 4
SMALL: dict[str, object] = {
    "vocab_size vocab_size_per_layer_input": VOCAB,
    "hidden_size d_model n_embd embedding_size word_embed_proj_dim hidden_dim embed_dim": 32,
    "out_hidden_size hidden_size_per_layer_input moe_intermediate_size expert_ffn_hidden_size": 32,
    "shared_expert_intermediate_size": 32,
    "intermediate_size ffn_dim n_inner d_ff ffn_hidden_size decoder_ffn_dim encoder_ffn_dim": 64,
    "mlp_dim shared_intermediate_size intermediate_size_mlp mamba_d_ssm": 64,
    "num_hidden_layers n_layer num_layers n_layers decoder_layers": LAYERS,
    "num_attention_heads n_head num_heads n_heads decoder_attention_heads": HEADS,
    "num_experts num_local_experts n_routed_experts moe_num_experts": 4,
    "linear_num_value_heads time_step_rank mamba_dt_rank": 4,
    "num_key_value_heads num_kv_heads encoder_attention_heads num_global_key_value_heads": 2,
    "depth encoder_layers num_encoder_layers num_experts_per_tok moe_topk": 2,
    "linear_num_key_heads altup_num_inputs": 2, "index_n_heads": 32,     # fewer scores tie at zero
    "n_group topk_group bos_token_id decoder_start_token_id first_k_dense_replace": 1,
    "mamba_n_groups n_groups mamba_ngroups num_dense_layers num_mem_blocks": 1,
    "max_position_embeddings n_positions n_ctx max_sequence_length max_seq_len": CONTEXT,
    "q_lora_rank kv_lora_rank image_size": 16,
    "head_dim swa_head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim rotary_dim patch_size": 8,
    "global_head_dim index_head_dim linear_key_head_dim linear_value_head_dim laurel_rank": 8,
    "mamba_d_state ssm_state_size state_size mamba_head_dim mamba_d_head mamba_headdim": 8,
    "mamba_n_heads n_mamba_heads mamba_num_heads mamba_chunk_size chunk_size index_topk": 8,
    "pad_token_id eos_token_id": None,
    "sliding_window attention_chunk_size": WINDOW,
    "initializer_range": 0.3, "tie_word_embeddings": False,
}
SIZES = {name: size for names, size in SMALL.items() for name in names.split()}
"""What configurations call their sizes, whichever family they are of, and the small sizes here."""
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
WINDOWS = {"layer_types": [SLIDING, SLIDING, FULL, SLIDING]}
STATES = {"layer_types": [LINEAR, LINEAR, FULL, LINEAR]}
CONVOLUTIONS = {"layer_types": ["conv", "conv", FULL, "conv"]}
SHARED = {"layer_types": [SLIDING, FULL, SLIDING, FULL], "num_kv_shared_layers": 2}
"""The last two layers take the keys of the first two."""
ROPE = {"rope_type": "default", "rope_theta": 1e4}
DOTS_3 = {
    "layer_types": [SLIDING, SLIDING, "indexed_attention", SLIDING], "n_shared_experts": 1,
    "num_key_value_heads": HEADS, "swa_num_attention_heads": HEADS, "swa_head_dim": 16,
    "swa_num_key_value_heads": HEADS, "swa_q_lora_rank": 16, "swa_kv_lora_rank": 16,
    "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8, "shared_experts_intermediate_size": 32,
}  # fmt: skip
QWEN_4 = {"indexer_n_heads": 8, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 16,
          "indexer_compress_ratio": 4}
USED_WINDOWS = {**WINDOWS, "use_sliding_window": True, "max_window_layers": 0}
PAD, DECODER = {"pad_token_id": 0}, {"is_decoder": True}    # an encoder is causal as a decoder
ENDS = {**PAD, "eos_token_id": 2, "init_std": 0.3, "decoder_layers": 2}
T5 = {**PAD, "d_kv": 8, "num_layers": 2, "num_decoder_layers": 2}
SPEECH = {**ENDS, "max_source_positions": 40, "max_target_positions": 64}
T5_GEMMA = {**WINDOWS, **PAD}

ALIKE: dict[str, tuple[Mapping[str, object], ...]] = {
    "bart blenderbot blenderbot-small m2m_100 marian mbart mvp pegasus plbart": (ENDS,),
    "seamless_m4t seamless_m4t_v2 speecht5": (ENDS,),
    "longt5 mt5 t5 umt5": (T5,),
    "camembert data2vec-text roberta roberta-prelayernorm xlm-roberta xlm-roberta-xl":
        ({"pad_token_id": 1, **DECODER},),
    "bert bert-generation big_bird electra ernie megatron-bert rembert roc_bert roformer xmod":
        (DECODER,),
    "gemma3_text kolibri1 laguna mellum ministral": (WINDOWS,),
    "lfm2 lfm2_moe": (CONVOLUTIONS,),
    "qwen2 qwen2_moe qwen3": ({}, USED_WINDOWS),
}
OF_ONE: dict[str, tuple[Mapping[str, object], ...]] = {
    **{name: settings for names, settings in ALIKE.items() for name in names.split()},
    "bailing_hybrid": (STATES,),
    "bamba": ({"attn_layer_indices": [2]},),
    "bigbird_pegasus": ({**ENDS, "block_size": 4, "num_random_blocks": 1},),
    "blt": ({"encoder_hash_byte_group_vocab": 64},),
    "cohere_compass_text": ({**WINDOWS, "rope_parameters": dict.fromkeys((FULL, SLIDING), ROPE)},),
    "dbrx": ({"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
              "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2}},),
    "dots1": ({**WINDOWS, "n_shared_experts": 1},),
    "doge": ({"keep_window_size": CONTEXT},),       # its context; see `cache.layout.context_of`
    "dots3_note": ({"text_config": DOTS_3},),
    "dots3_note_text": (DOTS_3,),
    "emu3": ({"text_config": PAD},),
    "falcon": ({}, {"alibi": True}, {"new_decoder_architecture": True}),
    "fsmt": ({**ENDS, "src_vocab_size": VOCAB, "tgt_vocab_size": VOCAB, "langs": ["en", "de"]},),
    "gemma3": ({"text_config": WINDOWS},),
    "gemma3n_text": ({**SHARED, "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0]},),
    "gemma4": tuple({"text_config": {**settings, **PAD}} for settings in (SHARED, WINDOWS)),
    "gemma4_unified": ({"text_config": {**WINDOWS, **PAD}},),
    "gemma4_text": (SHARED, WINDOWS),
    "gpt_neo": ({"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},),
    "granitemoehybrid": ({"layer_types": ["mamba", "mamba", "attention", "mamba"]},),
    "hrm_text": ({"initializer_range": 0.1},),      # reads its layers repeatedly: rounding grows
    "jamba": ({"attn_layer_period": 2, "attn_layer_offset": 1},),
    "kimi_linear": (
        {**STATES, "num_key_value_heads": HEADS, "linear_head_dim": 8, "linear_num_heads": 4},
    ),
    "led": ({**ENDS, "attention_window": 8, "max_encoder_position_embeddings": CONTEXT,
             "max_decoder_position_embeddings": CONTEXT},),
    "mamba2": ({"head_dim": 16},),
    "minimax_m3_vl_text": (
        {"layer_types": [FULL, "minimax_m3_sparse", "minimax_m3_sparse", "minimax_m3_sparse"]},
    ),
    "modernbert-decoder": (PAD,),
    "moshi": ({"sliding_window": CONTEXT},),        # its cache crops what the forward sees
    "musicgen": ({"decoder": PAD},),
    "nemotron_h": ({"layers_block_type": [LINEAR, "moe", FULL, LINEAR]},),
    "nllb-moe": ({**ENDS, "encoder_sparse_step": 2, "decoder_sparse_step": 2},),
    "pegasus_x": ({**ENDS, "block_size": 8},),
    "phi3": ({}, {"sliding_window": None}),
    "qwen4_exp": ({"text_config": QWEN_4},),
    "qwen4_exp_text": (QWEN_4,),
    "reformer": ({**DECODER, "axial_pos_embds": False},),
    "smollm3": ({"no_rope_layers": [1, 1, 0, 1]},),
    "speech_to_text": ({**SPEECH, "input_feat_per_channel": 8, "conv_channels": 16,
                        "max_source_positions": CONTEXT},),
    "switch_transformers": (
        {**T5, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    ),
    "t5gemma": ({"encoder": T5_GEMMA, "decoder": T5_GEMMA, **PAD},),
    "whisper": ({**SPEECH, "num_mel_bins": 8},),
    "zamba2": ({"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "num_mem_blocks": 2},),
}  # fmt: skip
"""What a type is made with besides `SIZES`: several, if its checkpoints differ in their layers."""
LARGE = 3e7
"""Models with more parameters are not made."""


def variants(name: str) -> tuple[Mapping[str, object], ...]:
    """The kinds of checkpoints of a type, as settings of their configurations."""
    return OF_ONE.get(name, ({},))


def encoder_decoders() -> dict[str, type[_BaseAutoModelClass]]:
    """The model types of encoder-decoders that write text, and the classes that load them."""
    return {
        kind.model_type: loads for loads in (AutoModelForSpeechSeq2Seq, AutoModelForSeq2SeqLM)
        for kind in loads._model_mapping if getattr(kind, "is_encoder_decoder", False)
    }


def architectures() -> dict[str, type[_BaseAutoModelClass]]:
    """The model types that write text in transformers, and the classes that load them: whole
    encoder-decoders, not only their decoders."""
    alone = {kind.model_type: AutoModelForCausalLM for kind in AutoModelForCausalLM._model_mapping}
    return dict(sorted((alone | encoder_decoders()).items()))


def tiny(name: str, settings: Mapping[str, object] | None = None) -> PreTrainedModel:
    """A random model of this type, in float32; own: one of its variants, None for the first. Raises
    whatever its configuration raises."""
    loads = architectures()[name]
    kind = next(config for config in loads._model_mapping if config.model_type == name)
    config = _config(kind, variants(name)[0] if settings is None else settings)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in loads.from_config(config).parameters())
    if size > LARGE:
        raise ValueError(f"it has {size} parameters, however small its configuration is")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = loads.from_config(config, dtype=torch.float32)
        model: PreTrainedModel = made.eval()
    start = 1 if config.is_encoder_decoder else None
    model.generation_config = GenerationConfig(decoder_start_token_id=start)
    return model


def prompts(model: PreTrainedModel, sizes: Sequence[int]) -> list[Prompt]:
    """Random prompts of these sizes: token ids, or inputs for this model's encoder."""
    dice, config = torch.Generator().manual_seed(1), model.config
    if model.main_input_name == "input_ids" or not config.is_encoder_decoder:
        return [torch.randint(2, VOCAB, (size,), generator=dice).tolist() for size in sizes]
    shapes: list[tuple[int, ...]]
    heard: Any = getattr(config, "encoder_config", None)
    if hasattr(heard, "num_mel_bins"):
        shapes = [(1, 20 + 4 * size, heard.num_mel_bins) for size in sizes]
    elif hasattr(config, "num_mel_bins"):
        shapes = [(1, config.num_mel_bins, 2 * config.max_source_positions) for _ in sizes]
    elif hasattr(config, "input_feat_per_channel"):
        shapes = [(1, 20 + 4 * size, config.input_feat_per_channel) for size in sizes]
    else:
        shapes = [(1, 2000 + 400 * size) for size in sizes]
    inputs = [torch.randn(shape, dtype=torch.float32, generator=dice) for shape in shapes]
    return [{model.main_input_name: value} for value in inputs]


def _config(kind: type[PreTrainedConfig], settings: Mapping[str, Any]) -> PreTrainedConfig:
    """A small configuration, with all `SIZES` that this kind has, or all but one, also in nested
    configurations."""
    usual = kind()
    known = {*usual.to_dict(), *kind.attribute_map, *inspect.signature(kind.__init__).parameters}
    sizes = {key: size for key, size in SIZES.items() if key in known or hasattr(usual, key)}
    if "kv_lora_rank" in known:              # compressed keys need as many heads as queries
        sizes["num_key_value_heads"] = HEADS
    sizes |= settings
    for part in getattr(kind, "sub_configs", {}):
        part_config = getattr(usual, part, None)
        if hasattr(part_config, "model_type"):
            sizes[part] = _config(type(part_config), settings.get(part, {})).to_dict()
    errors: list[Exception] = []
    for unwanted in (None, *sizes):
        try:
            return kind(**{key: value for key, value in sizes.items() if key != unwanted})
        except Exception as raised:                 # validators raise errors of any class
            errors.append(raised)
    raise errors[0]
