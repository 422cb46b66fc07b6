"""PEFT, pipelines, rollouts and lm-eval, with `custom_generate=draftproof.generate`."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_generate import NEW, OURS, PAD, batch, both
from tiny import fresh
from transformers import GenerationConfig, pipeline

import draftproof
from draftproof.errors import BadInput

HUB = Path(__file__).parents[2] / "recipes" / "custom_generate"
LORA = {"r": 4, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False,
        "lora_alpha": 32, "task_type": "CAUSAL_LM"}  # fmt: skip


def tuned(kind: str = "LoraConfig", **options: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    return peft.get_peft_model(fresh("llama"), getattr(peft, kind)(**options)).double().eval()


def test_adapters_are_switched_disabled_and_merged() -> None:
    """Text of a PEFT model, by the engine that was made for its first call."""
    peft = pytest.importorskip("peft")
    mine = tuned(**LORA)
    mine.add_adapter("other", peft.LoraConfig(**LORA))
    mine.double()
    texts = []
    for act in (lambda: None, lambda: mine.set_adapter("other"), mine.merge_adapter,
                mine.unmerge_adapter, mine.base_model.disable_adapter_layers):  # fmt: skip
        act()
        theirs, ours = both(mine, batch(3))
        assert torch.equal(theirs, ours)
        texts.append(ours)
    assert torch.equal(texts[1], texts[2]), "merged, the text is the same"
    assert len({str(text.tolist()) for text in texts}) == 3
    assert len(mine.get_base_model()._draftproof) == 1


def test_adapters_by_row_and_learnt_prompts_are_refused() -> None:
    with pytest.raises(BadInput, match="adapter_names"):
        both(tuned(**LORA), batch(3), adapter_names=["default", "__base__", "default"])
    learnt = tuned("PrefixTuningConfig", num_virtual_tokens=4, task_type="CAUSAL_LM")
    with pytest.raises(BadInput, match="prompt-learning adapter"):
        both(learnt, batch(3))


def test_rollouts_between_steps_of_training() -> None:
    """A loop of sampling, loss and step, as trl's: each rollout is of the weights as they are, and
    what is trained stays in training."""
    ours, inputs = tuned(**LORA).train(), batch(2)
    optimizer, texts = torch.optim.SGD(ours.parameters(), 3.0), []
    config = GenerationConfig(max_new_tokens=NEW, do_sample=True, top_k=1, pad_token_id=PAD)
    for _ in range(3):
        how = {**inputs, "generation_config": config}
        completions = ours.generate(**how, **OURS)
        assert ours.training and torch.equal(completions, ours.eval().generate(**how))
        ours.train()
        loss = ours(input_ids=completions, labels=completions).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        texts.append(str(completions.tolist()))
    assert len(set(texts)) == 3


def test_a_pipeline_takes_it_as_an_argument(demo: tuple[Any, Any]) -> None:
    mine, tokenizer = demo
    tokenizer.pad_token = tokenizer.eos_token
    writer = pipeline("text-generation", model=mine, tokenizer=tokenizer)
    how = {"max_new_tokens": 20, "do_sample": False, "batch_size": 2}
    texts = ["Once upon a time", "Lily saw a big dog and", "Tom"]
    theirs, ours = (writer(texts, **how, **more) for more in ({}, {**OURS, "drafter": "suffix"}))
    assert theirs == ours and len(mine._draftproof) == 1


def test_the_hub_folder_takes_stop_strings_and_samples_next_to_an_assistant(
    demo: tuple[Any, Any],
) -> None:
    mine, tokenizer = demo
    inputs = tokenizer("Lily saw a big dog and", return_tensors="pt")
    how = {**inputs, "max_new_tokens": 40, "do_sample": True, "top_k": 1, "tokenizer": tokenizer,
           "stop_strings": ["oved to pl", "an to th"], "num_return_sequences": 2}  # fmt: skip
    ours = mine.generate(**how, custom_generate=str(HUB), trust_remote_code=True,
                        assistant_model=mine)  # fmt: skip
    assert torch.equal(ours, mine.generate(**how)) and ours.shape[1] < 46


def test_an_evaluation_of_lm_eval_gives_its_own_answers(tmp_path: Path) -> None:
    lm_eval = pytest.importorskip("lm_eval")
    importlib.import_module("draftproof.hf.lm_eval")
    task = {
        "task": "stories", "dataset_path": "json", "output_type": "generate_until",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.json")}},
        "test_split": "test", "doc_to_text": "{{text}}", "doc_to_target": "{{end}}",
        "generation_kwargs": {"until": ["."], "max_gen_toks": 24, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    }  # fmt: skip
    lines = [{"text": text, "end": " there"} for text in ("Once upon a time", "Lily", "Tom saw")]
    (tmp_path / "rows.json").write_text("\n".join(map(json.dumps, lines)))
    results = [
        lm_eval.simple_evaluate(
            name, tasks=[task], batch_size=2, log_samples=True, bootstrap_iters=0,
            model_args={"pretrained": str(draftproof.embedded("demo")), "dtype": "float32",
                        "device": "cpu"},
        )["samples"]["stories"]
        for name in ("hf", "draftproof")
    ]  # fmt: skip
    answers = [[row["filtered_resps"] for row in rows] for rows in results]
    assert answers[0] == answers[1] and len(answers[0]) == 3
