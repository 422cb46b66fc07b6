"""vLLM's own Medusa class loads heads of layout "vllm", and has our logits.

python vllm_heads.py FOLDER MODEL     (FOLDER is written: random heads of two layers for MODEL)
Without a GPU: pip install --no-deps vllm==0.28.0, and what its import asks for.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.models.medusa import Medusa
from vllm.transformers_utils.configs.medusa import MedusaConfig

import draftproof as dp
from draftproof.drafters.checkpoints import write_head
from draftproof.drafters.medusa import MedusaHead

folder, model = Path(sys.argv[1]), sys.argv[2]
target = dp.load(model, drafter="none", dtype="float32").target
head = MedusaHead.fresh(target, 3, 2).unshared(target)
with torch.no_grad():
    for weight in head.parameters():
        weight += 0.05 * torch.randn_like(weight)
write_head(head, folder, "vllm")

asked = MedusaConfig.from_pretrained(folder)
init_distributed_environment(1, 0, "tcp://127.0.0.1:29533", 0, "gloo")
with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))):
    initialize_model_parallel(1, 1)
    draft = SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=asked))
    theirs = Medusa(vllm_config=SimpleNamespace(speculative_config=draft))
tensors = {name: one for file in folder.glob("*.safetensors") for name, one in
           load_file(file).items()}
loaded = theirs.load_weights(tensors.items())
assert loaded == {name for name, _ in theirs.named_parameters()} and len(loaded) == len(tensors)
hidden = torch.randn(5, asked.hidden_size)
for inner, table, own in zip(theirs(hidden), theirs.lm_heads, head.each(), strict=True):
    logits = own.proj(own(hidden))
    assert torch.equal(logits, torch.nn.functional.linear(inner, table.weight)[:, :logits.shape[1]])
print(f"{len(loaded)} tensors loaded; the logits of {asked.num_heads} heads are the same")
