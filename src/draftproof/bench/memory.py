"""Peak memory of a generation against what it must hold: weights and preallocated caches.

    python -m draftproof.bench.memory [MODEL] [--assistant-model M] [--new-tokens N] [--random 0.5b]

Resident memory (VmHWM of /proc/self/status), less that of the interpreter with everything imported and one small
generation done and freed; Linux only.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

RANDOM_HALF_BILLION = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
"""Half a billion parameters, shaped as Qwen2-0.5B."""


def main() -> None:
    """Measure in a fresh process and print one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--assistant-model")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--random", choices=["0.5b"], help="measure random weights of this size instead of MODEL")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(_measure(options)))
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", __spec__.name if __spec__ else "draftproof.bench.memory", *sys.argv[1:], "--measure"]
        if options.random:
            subprocess.run([sys.executable, "-c", _MAKE_RANDOM, folder, json.dumps(RANDOM_HALF_BILLION)], check=True)
            command.insert(3, folder)
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    held = found["weights"] + found["caches"]
    name = f"random {options.random}" if options.random else options.model
    print(
        f"{name}: weights {found['weights'] / 2**20:.0f} MiB + caches {found['caches'] / 2**20:.0f} MiB, "
        f"peak {found['peak'] / 2**20:.0f} MiB above the warm interpreter: {100 * (found['peak'] / held - 1):+.1f} %"
    )


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    import draftproof as dp
    from draftproof.model import kv_cache
    from draftproof.model.loading import resolve

    dp.load("demo", assistant_model="demo-draft").generate([[1, 2, 3]], max_new_tokens=8)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)                                   # what the warm-up held goes back to the system
    Path("/proc/self/clear_refs").write_text("5")                      # the peak starts anew
    before = _resident("VmRSS")
    caches: list[int] = []
    make = kv_cache.KVCache.empty

    def counted(*args: Any, **kwargs: Any) -> kv_cache.KVCache:
        made = make(*args, **kwargs)
        caches.append(made.nbytes)
        return made

    engine = dp.load(options.model, assistant_model=options.assistant_model)
    kv_cache.KVCache.empty = counted  # type: ignore[method-assign]
    dice = torch.Generator().manual_seed(0)
    prompt = torch.randint(engine.target.vocab_size, (options.prompt_tokens,), generator=dice).tolist()
    engine.generate([prompt] * options.rows, max_new_tokens=options.new_tokens)
    folders = [resolve(model) for model in (options.model, options.assistant_model) if model]
    weights = sum(file.stat().st_size for folder in folders for file in Path(folder).glob("*.safetensors"))
    return {"weights": weights, "caches": sum(caches), "peak": _resident("VmHWM") - before}


def _resident(field: str) -> int:
    """Bytes of a memory field of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


_MAKE_RANDOM = """
import json, sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
torch.set_default_dtype(torch.bfloat16)
LlamaForCausalLM(LlamaConfig(**json.loads(sys.argv[2]))).save_pretrained(sys.argv[1])
"""


if __name__ == "__main__":
    main()
