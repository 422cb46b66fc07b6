"""The recipes that measure still run with the engine as it is."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from draftproof.core.params import Sampling
from draftproof.errors import BadInput

RECIPES = Path(__file__).parents[2] / "recipes"


def test_never_slower_writes_the_texts_of_plain_decoding(tmp_path: Path) -> None:
    command = [sys.executable, RECIPES / "figures" / "run.py", "never_slower", "--prompts", "1",
               "--rounds", "1", "--new-tokens", "6", "--cases", "always wrong, cold",
               "--json", tmp_path / "rows"]
    subprocess.run(command, check=True, capture_output=True, timeout=280)
    report = json.loads((tmp_path / "rows").read_text())
    assert [row["budget"] for row in report] == ["fixed 5", "adaptive"]
    assert all(row["same"] == "1/1" for row in report)


def test_predictions_are_compared_with_measurements(tmp_path: Path) -> None:
    row = {"model": "demo", "drafter": "portfolio", "budget": 2, "batch": 1, "temperature": 0.0,
           "prompts": 8, "predicted": 1.5, "low": 1.3, "high": 1.7, "measured": 1.2}
    even = {**row, "budget": 5, "predicted": 1.1, "low": 0.9, "high": 1.3}
    wrong = {**row, "budget": "auto", "measured": 0.8}
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in (row, even, wrong)), "utf-8")
    command = [sys.executable, RECIPES / "figures" / "plan_against_measured.py", file]
    report = subprocess.run(command, check=True, capture_output=True, text=True, timeout=280).stdout
    assert [line.endswith("WRONG") for line in report.splitlines()[:3]] == [False, False, True]
    assert report.splitlines()[-1].endswith("| 2 of 3 |")


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_text_written_in_many_rows_is_what_generate_writes(kind: str) -> None:
    spec = importlib.util.spec_from_file_location("write", RECIPES / "smollm2" / "write.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(write := importlib.util.module_from_spec(spec))
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 61,
             "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
    torch.manual_seed(3)
    form = AutoConfig.for_model(kind, **sizes, initializer_range=0.5)
    model = AutoModelForCausalLM.from_config(form).double().eval()
    prompts, stops = [[5 + at, 9, 2 * at, 7][: 2 + at % 3] for at in range(8)], [3, 11, 17, 40]
    wanted = [Sampling(max_new_tokens=6 + at) for at in range(8)]
    settings = {index: (new, why)
             for index, new, why in write.GraphWriter(model, stops, 3, 20)(prompts, wanted, 3)}
    for at, prompt in enumerate(prompts):
        tensor = torch.tensor([prompt])
        out = model.generate(tensor, attention_mask=torch.ones_like(tensor), do_sample=False,
                             max_new_tokens=6 + at, eos_token_id=stops, pad_token_id=0)
        new = out[0, len(prompt) :].tolist()
        assert settings[at] == (new, "stop" if new[-1] in stops else "length")
    assert {why for _, why in settings.values()} == {"stop", "length"}
    other = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **sizes, head_dim=8))
    with pytest.raises(BadInput, match="qwen3"):
        write.GraphWriter(other, stops, 3, 20)


def test_a_comparison_is_drawn_with_its_intervals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import matplotlib

    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    spec = importlib.util.spec_from_file_location("picture", RECIPES / "compare" / "picture.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(picture := importlib.util.module_from_spec(spec))
    rows = [{"engine": engine, "bits": bits, "mode": mode, "speeds": [20.0, 24.0, 31.5]}
            for bits in (16, 4) for engine in ("ours", "llama.cpp")
            for mode in ("plain", "speculating")]  # fmt: skip
    picture.draw(rows, tmp_path / "c.svg", "Qwen, 3 prompts")
    out = (tmp_path / "c.svg").read_text("utf-8")
    assert all(words in out for words in ("Qwen, 3 prompts", "4 bits", "llama.cpp, plain", "24.0"))
