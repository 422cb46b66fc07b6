"""What an editor, mypy and a person at a prompt see of `dp.load` and of an engine."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

import draftproof as dp
from draftproof.engine.config import EngineConfig, LoadOptions


def test_the_options_of_load_are_the_fields_of_the_config() -> None:
    wanted = {field.name: field.type for field in fields(EngineConfig) if field.name != "model"}
    typed = {name: getattr(kind, "__forward_arg__", kind)
             for name, kind in LoadOptions.__annotations__.items()}
    assert typed == wanted


@pytest.mark.parametrize(("option", "words"), [
    ("assistent_model", r"load\(\) .* 'assistent_model'; did you mean assistant_model\?"),
    ("zzz", r"load\(\) got an unexpected keyword argument 'zzz'$"),
])
def test_an_unknown_option_of_load_is_named(option: str, words: str) -> None:
    options: Any = {option: "x"}
    with pytest.raises(TypeError, match=words):
        dp.load("demo", **options)


def test_repr_describes_the_engine_and_unknown_options_name_the_call() -> None:
    engine = dp.load("demo", drafter="suffix")
    assert "demo" in repr(engine) and "drafter='suffix'" in repr(engine)
    assert "acceptance='match'" in repr(engine)
    wrong: Any = {"max_tokens": 5}
    for name in ("generate", "as_completed"):
        with pytest.raises(TypeError, match=rf"Engine\.{name}\(\) .*did you mean max_new_tokens"):
            getattr(engine, name)("Once", **wrong)
