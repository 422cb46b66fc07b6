"""What `model.generate(..., custom_generate="org/draftproof", trust_remote_code=True)` runs."""

from __future__ import annotations

from functools import partial
from typing import Any

import draftproof


def generate(
    model: Any, assistant_model: Any = None, drafter: Any = None, streamer: Any = None, **asked: Any
) -> Any:
    """As `model.generate`; see `draftproof.generate`."""
    decode = partial(draftproof.generate, assistant_model=assistant_model, drafter=drafter, streamer=streamer)
    return model.generate(custom_generate=decode, assistant_model=assistant_model, streamer=streamer, **asked)
