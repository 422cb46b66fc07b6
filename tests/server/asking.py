"""What the tests of the server ask, and what the right answer is."""

from __future__ import annotations

from typing import Any

import draftproof as dp

PROMPTS = ["Once upon a time", "Lily and Tom", "The dog",
           "One day, a boy found a big red ball in the park and"]
KEY = "secret"


def alone(server: Any, prompt: str, new: int, **sampling: Any) -> str:
    """The text of a request with nothing beside it, plainly decoded."""
    engine = server.engine
    plain = dp.Engine(engine.target, codec=engine.codec, stop_tokens=engine.stop_tokens)
    return plain.generate(prompt, max_new_tokens=new, sampling=dp.Sampling(**sampling))[0].text
