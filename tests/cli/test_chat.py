"""``draftproof chat``: turns with the model's template; history is read once."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

import draftproof as dp
from draftproof.model.target import Target

TEMPLATE = "{% for one in messages %}{{ one.content }}\n{% endfor %}"


def test_a_conversation(
    call: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer is that of the whole conversation; what was said before is not read again."""
    model = tmp_path / "talker"
    shutil.copytree(str(files("draftproof") / "embedded" / "demo"), model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    read, nodes = Target.read, list[int]()

    def counting(self: Target, tree: Any, *args: Any, **more: Any) -> Any:
        nodes.append(tree.tokens.numel())
        return read(self, tree, *args, **more)

    monkeypatch.setattr(Target, "read", counting)
    first, second = "Lily had a red ball. " * 20, "Tom wants it."
    options = ["--drafter", "none", "--max-new-tokens", "12"]
    said = call("chat", str(model), *options, stdin=f"{first}\n{second}\n/stats\n/reset\n{second}")
    assert said.code == 0 and "tokens" in said.err
    used = sum(nodes)
    engine = dp.load(str(model), drafter="none")
    turns, wanted = [{"role": "user", "content": first.strip()}], []
    for last in (second, None):
        wanted.append(engine.generate(turns, max_new_tokens=12)[0].text)
        turns += [{"role": "assistant", "content": wanted[-1]}, {"role": "user", "content": last}]
    wanted.append(engine.generate([{"role": "user", "content": second}], max_new_tokens=12)[0].text)
    assert "".join(said.out.split()) == "".join("".join(wanted).split())
    once = len(engine.codec.encode(first))
    assert once > 100 and (used < 2 * once or not engine.target.skips_absent)
