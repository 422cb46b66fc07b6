"""Several models: loaded when they are asked for, unloaded when they rest; adapters by name."""

from __future__ import annotations

import asyncio
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
from asking import PROMPTS
from fastapi.testclient import TestClient

import draftproof as dp
from draftproof.cli.served_models import sources_of
from draftproof.errors import BadInput, Unavailable
from draftproof.model.adapters import MergedAdapter, models_in
from draftproof.model.loading import embedded, load_model
from draftproof.server.api import Server
from draftproof.server.hosted_model import Limits
from draftproof.server.models import Models, Source

BODY = {"prompt": PROMPTS[0], "max_tokens": 12, "temperature": 0}


def small() -> dp.Engine:
    return dp.load("demo-draft", drafter="none")


def hosting(count: int, **options: Any) -> Models:
    """The embedded draft model under so many names, each taking 10 bytes."""
    models = Models(Limits(rows=2, length=128), **options)
    for number in range(count):
        models.add(f"m{number}", Source(small, 10))
    return models


def test_models_are_loaded_on_first_use() -> None:
    models = Models(Limits(rows=2, length=128))
    models.add("small", Source(small, parent="demo"))
    server = Server(dp.load("demo", drafter="none"), "demo", models=models)
    with TestClient(server.app(), base_url="http://127.0.0.1") as client:
        def told() -> dict[str, bool]:
            data = client.get("/v1/models").json()["data"]
            return {about["id"]: about["loaded"] for about in data}

        assert told() == {"demo": True, "small": False}
        assert client.get("/v1/models/small").json()["parent"] == "demo"
        for name, engine in (("demo", server.engine), ("small", small()), (None, server.engine)):
            answer = client.post("/v1/completions", json={**BODY, "model": name}).json()
            assert answer["choices"][0]["text"] == engine.generate(
                PROMPTS[0], max_new_tokens=12)[0].text
            assert answer["model"] == (name or "demo")
        assert told() == {"demo": True, "small": True}
        metrics = client.get("/metrics").text
        assert metrics.count("# TYPE vllm:prompt_tokens_total") == 1
        for name in ("demo", "small"):
            assert f'vllm:num_requests_running{{model_name="{name}"}} 0.0' in metrics
        missing = client.post("/v1/completions", json={**BODY, "model": "gpt"})
        assert missing.status_code == 404 and "demo, small" in missing.json()["error"]["message"]


def test_the_least_recently_used_model_is_evicted_and_freed() -> None:
    models = hosting(3, memory=20)

    async def run() -> None:
        first = weakref.ref((await models.get("m0")).engine)
        await models.get("m1")
        models.loaded["m1"].used_at -= 100
        await models.get("m2")
        assert [*models.loaded] == ["m0", "m2"]
        models.loaded["m2"].readings += 1                       # m2 is at work, m0 goes
        await models.get("m1")
        assert [*models.loaded] == ["m2", "m1"]
        gc.collect()
        assert first() is None
        models.loaded["m1"].readings += 1
        waits = asyncio.create_task(models.get("m0"))
        await asyncio.sleep(0.15)
        assert not waits.done(), "all work: it waits"
        models.loaded["m1"].readings -= 1
        await waits
        assert [*models.loaded] == ["m2", "m0"]

    asyncio.run(run())


def test_idle_models_are_unloaded() -> None:
    models = hosting(2, idle=0.05)

    async def run() -> None:
        for name in ("m0", "m1"):
            await models.get(name)
        models.loaded["m1"].readings += 1
        began = models.loaded["m1"].used_at
        task = asyncio.create_task(models.unload_idle())
        while "m0" in models.loaded:
            await asyncio.sleep(0.02)
        assert [*models.loaded] == ["m1"]
        for _ in range(250):                            # it looks at m1 after it has unloaded m0
            if models.loaded["m1"].used_at > began:
                break
            await asyncio.sleep(0.02)
        assert models.loaded["m1"].used_at > began, "a model in use is not idle"
        task.cancel()

    asyncio.run(run())


def test_load_failures_are_reported_with_the_reason() -> None:
    models = hosting(1)
    models.add("broken", Source(lambda: dp.load("no-such-folder/model.gguf")))
    with pytest.raises(Unavailable, match=r"broken cannot be loaded: .*no-such-folder"):
        asyncio.run(models.get("broken"))


def test_names_of_models_on_the_command_line(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "a" / "x.safetensors").write_bytes(b"12345")
    (tmp_path / "c.gguf").write_bytes(b"123")
    assert [path.name for path in models_in(tmp_path)] == ["a", "b", "c.gguf"]
    result = sources_of(str(tmp_path), None, ["d=demo", "demo"], [], {}, False, 0)
    assert {name: source.size for name, source in result.items()} | {"d": 0, "demo": 0} == {
        "a": 5, "b": 0, "c": 3, "d": 0, "demo": 0}
    assert result["d"].size == result["demo"].size > 0
    for also, lora, word in ((["a=demo"], [], "two models"), ([], ["x=y"], "folder of models")):
        with pytest.raises(BadInput, match=word):
            sources_of(str(tmp_path), None, also, lora, {}, False, 0)
    with pytest.raises(BadInput, match=r"adapter_config\.json"):
        sources_of("demo", None, [], [str(tmp_path)], {}, False, 0)


def test_a_tokenizer_and_a_draft_model_are_those_of_the_first_model() -> None:
    """Texts of another model would be nonsense with them."""
    options: dict[str, object] = {"tokenizer": "demo", "assistant_model": "demo-draft",
                                  "dtype": "float32"}
    sources = sources_of("demo", None, ["demo-draft"], [], options, False, 0)
    engines = [source.load() for source in sources.values()]
    names = [Path(engine.codec.name).name for engine in engines if engine.codec is not None]
    assert names == ["demo", "demo-draft"]
    assert [engine.drafter.name for engine in engines] == ["draft-model", "portfolio"]
    assert engines[0].target.dtype == engines[1].target.dtype


def test_an_adapter_writes_what_peft_writes(tmp_path: Path) -> None:
    peft: Any = pytest.importorskip("peft")
    import torch

    torch.manual_seed(0)
    base = load_model("demo-draft", dtype="float32")
    config = peft.LoraConfig(r=4, lora_alpha=200, target_modules=["q_proj", "down_proj"],
                             init_lora_weights=False)
    adapted = peft.get_peft_model(base, config).eval()
    adapted.save_pretrained(tmp_path / "one")
    merged = MergedAdapter(embedded("demo-draft"), tmp_path / "one")
    assert merged.folder() == merged.folder() and merged.size > 0
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "adapter_config.json").write_text("{}")
    lora = [f"{name}={tmp_path / name}" for name in ("one", "other")]       # each its own
    sources = sources_of(
        str(embedded("demo-draft")), "base", [], lora, {"dtype": "float32"}, False, 0)
    assert sources["one"].parent == "base" and sources["base"].parent is None
    engine = sources["one"].load()
    tokens = engine.codec.encode(PROMPTS[0]) if engine.codec else []
    reference = adapted.merge_and_unload()
    wanted = reference.generate(torch.tensor([tokens]), max_new_tokens=20, do_sample=False)
    assert engine.generate_ids([tokens], max_new_tokens=20)[0] == wanted[0, len(tokens):].tolist()
    plain = dp.load("demo-draft", dtype="float32").generate_ids([tokens], max_new_tokens=20)[0]
    assert plain != wanted[0, len(tokens):].tolist(), "the adapter changes the text"
    with pytest.raises(BadInput, match="GGUF"):
        MergedAdapter("x.gguf", tmp_path / "one")
