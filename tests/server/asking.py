"""What the tests of the server ask, and what the right answer is."""

from __future__ import annotations

from typing import Any

import draftproof as dp

PROMPTS = ["Once upon a time", "Lily and Tom", "The dog",
           "One day, a boy found a big red ball in the park and"]
KEY = "secret"
OTHER_KEY = "another"
"""A second key of the server."""
TOOL_TEMPLATE = (
    "{% if tools %}{% endif %}{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] "
    "%}<tool_call>\n{\"name\": \"{{ c.function.name }}\", \"arguments\": "
    "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}{% endfor %}"
)
"""A chat template that writes contents one after the other, and calls in the form of Hermes."""


def alone(server: Any, prompt: str, new: int, **sampling: Any) -> str:
    """The text of a request with nothing running next to it, plainly decoded."""
    engine = server.engine
    plain = dp.Engine(engine.target, codec=engine.codec, stop_tokens=engine.stop_tokens)
    return plain.generate(prompt, max_new_tokens=new, sampling=dp.Sampling(**sampling))[0].text
