"""Does llama.cpp compute the same logits of the tiny GGUF files that the tests write?

    PYTHONPATH=tests:tests/drafters python recipes/engines/gguf_layouts.py --source llama.cpp
        --build llama.cpp/build

The tests compare our reading of a file with the model that was written, so a mistake that writer
and reader share would go unnoticed. Here llama.cpp reads the same files, in float32, and its logits
are compared with those of transformers' model; those of layers for multi-token prediction with our
drafter's. `--source` is a checkout of llama.cpp, `--build` a build of it with static libraries
(-DBUILD_SHARED_LIBS=OFF). The interface for drafts is that of release b11434.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import gguf_models
import numpy as np
import test_mtp_gguf
import torch
from published import drafted_logits
from torch import Tensor

from draftproof.drafters import mtp

HERE = Path(__file__).resolve().parent
KEYS: dict[str, Any] = {"tokenizer.ggml.model": "no_vocab", ".vocab_size": 96}
LEFT_OUT = ("deepseek2", "longrope")
"""llama.cpp tells DeepSeek V2 Lite by its 27 layers, and rounds a context of 128 up to 256, for
which LongRoPE has other factors."""


def built(source: Path, build: Path, folder: Path) -> Path:
    """The program that prints llama.cpp's logits."""
    program = folder / "gguf_logits"
    libraries = ["src/libllama.a", "ggml/src/libggml.a", "ggml/src/libggml-cpu.a",
                 "ggml/src/libggml-base.a"]  # fmt: skip
    includes = [f"-I{source / part}" for part in ("include", "src", "ggml/include")]
    subprocess.run(
        ["g++", "-std=c++17", "-O1", "-o", program, HERE / "gguf_logits.cpp", *includes,
         *(build / library for library in libraries), "-fopenmp", "-lpthread", "-ldl"],
        check=True,
    )  # fmt: skip
    return program


def logits_of(program: Path, file: Path, tokens: list[int]) -> Tensor:
    """llama.cpp's logits of a file, a row for each token, and one more for a draft."""
    command = [program, file, "96", *map(str, tokens)]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.decode().strip().splitlines()[-1])
    return torch.from_numpy(np.frombuffer(done.stdout, np.float32).copy()).view(-1, 96)


def print_difference(name: str, theirs: Tensor, ours: Tensor) -> None:
    share = float((theirs - ours).abs().max() / ours.abs().max())
    print(f"| {name} | {share:.1e} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--build", type=Path, required=True)
    args = parser.parse_args()
    tokens = torch.randint(3, 96, (1, 40), generator=torch.Generator().manual_seed(1))
    print("| file | largest difference, as a share of the largest logit |\n|---|---|")
    with tempfile.TemporaryDirectory() as place:
        program = built(args.source, args.build, Path(place))
        for name in {**gguf_models.FAMILIES, **gguf_models.BY_TRANSFORMERS}:
            if name in LEFT_OUT:
                continue
            model = gguf_models.tiny(name)
            file = gguf_models.save(model, Path(place) / "model.gguf", **KEYS)
            with torch.no_grad():
                ours = model(tokens).logits[0]
            print_difference(name, logits_of(program, file, tokens[0].tolist()), ours)
        for name in test_mtp_gguf.KINDS:
            _, file = test_mtp_gguf.written(name, Path(place) / name, **KEYS)
            target, text = test_mtp_gguf.target(file), test_mtp_gguf.TEXT
            ours = drafted_logits(target, mtp.load(target), text, [])[0]
            theirs = logits_of(program, file, text)[-1]
            print_difference(f"{name}, MTP layer", theirs, ours)


if __name__ == "__main__":
    main()
