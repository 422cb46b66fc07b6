"""Row-invariant kernels, by Triton's interpreter: the bits of a row depend on no other row."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
from tiny import build, target

import draftproof as dp
from draftproof.errors import BadInput
from draftproof.native.kernels import kernels

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

CHECK = """
import json, torch
from draftproof.forward import exact_bits
print(json.dumps({str(kind): exact_bits.invariance("cpu", kind)
                  for kind in (torch.float32, torch.bfloat16)}))
"""


@needs_triton
def test_bits_of_a_row_depend_on_no_other_row() -> None:
    import json

    done = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, check=True,
                          env={**os.environ, "TRITON_INTERPRET": "1"})
    for kind, gaps in json.loads(done.stdout).items():
        assert gaps["our product"] == gaps["our attention"] == 0.0, kind
        bound = 1e-4 if kind == "torch.float32" else 0.5
        assert gaps["error of product"] < bound and gaps["error of attention"] < bound

READ = """
import torch, transformers
from draftproof.core.tree import TokenTree, TreeShape
from draftproof.model.exact_target import ExactTarget, exact
from draftproof.model.target import Target

torch.manual_seed(0)
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8,
             num_attention_heads=4, num_key_value_heads=2, sliding_window=6,
             layer_types=["full_attention", "sliding_attention"])
config = transformers.Qwen3Config(**sizes, use_sliding_window=True)
own = Target(transformers.AutoModelForCausalLM.from_config(config).eval())
target = exact(own)
assert isinstance(target, ExactTarget)
text = torch.arange(3, 15)
shape = TreeShape.from_digits(["0", "1", "10", "100", "00"])

def read(width, branch=False):
    cache, parts = target.new_cache(1, 64), []
    target.read(TokenTree.chain(text[None, :5]), cache)
    cache.keep(None, torch.tensor([5]))
    for start in range(5, 9, width):
        if branch:                          # the second child of the root begins the true path
            tokens = torch.zeros(1, len(shape), dtype=torch.int64)
            path = [0, 2, 4, 5]
            tokens[0, path] = text[start : start + 4]
            parts.append(target.read(TokenTree.shaped(tokens, shape), cache).logits[:, path])
        else:
            parts.append(target.read(TokenTree.chain(text[None, start : start + width]),
                                     cache).logits)
        cache.keep(None, torch.tensor([width]))
    return torch.cat(parts, 1)

with torch.inference_mode():
    alone = read(1)
    assert all(torch.equal(read(width), alone) for width in (2, 4)), "a chain has other bits"
    assert torch.equal(read(4, branch=True), alone), "a branch has other bits"
    wanted = own.own_logits(text[None, :9])[:, 5:]
    torch.testing.assert_close(alone, wanted, rtol=1e-4, atol=1e-4)
print("equal")
"""


@needs_triton
def test_a_model_gives_a_token_the_same_bits_alone_in_a_chain_and_in_a_tree() -> None:
    done = subprocess.run(
        [sys.executable, "-c", READ], capture_output=True, text=True, check=False,
        env={**os.environ, "TRITON_INTERPRET": "1", "DRAFTPROOF_KERNELS": "0"})
    assert done.stdout.strip() == "equal", done.stderr


def test_exact_bits_are_native_on_cpu_and_refused_where_impossible() -> None:
    if kernels() is not None:
        assert dp.load("demo", exact_bits=True).generate("Once", max_new_tokens=2)
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    hybrid = build("MambaConfig", hidden_size=32, num_hidden_layers=2, state_size=8, vocab_size=96,
                   **ends)
    for model, reason in ((hybrid, "attention alone"), (target().model, "on this CPU")):
        with pytest.raises(BadInput, match=f"exact bits: .*{reason}.*leave --exact-bits out"):
            dp.load(model, exact_bits=True)
    with pytest.raises(BadInput, match="leave --compile"):
        dp.load("demo", exact_bits=True, compile=True)
