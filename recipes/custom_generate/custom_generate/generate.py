"""What `model.generate(..., custom_generate="org/draftproof", trust_remote_code=True)` calls."""

from __future__ import annotations

from functools import partial
from typing import Any

from transformers.generation import StoppingCriteriaList, StopStringCriteria

import draftproof


def generate(
    model: Any, assistant_model: Any = None, drafter: Any = None, streamer: Any = None,
    tokenizer: Any = None, stop_strings: Any = None, stopping_criteria: Any = None, **options: Any,
) -> Any:  # fmt: skip
    """Generate as `model.generate` does; see `draftproof.generate`.

    It also takes `stop_strings` with `tokenizer`, and `num_return_sequences` together with an
    assistant model; a function that is given as `custom_generate=` takes neither.
    """
    criteria = StoppingCriteriaList(stopping_criteria or ())
    if stop_strings is not None:
        criteria.append(StopStringCriteria(tokenizer, stop_strings))
    draft = assistant_model if drafter is None else drafter
    decode = partial(draftproof.generate, drafter=draft, streamer=streamer)
    return model.generate(
        custom_generate=decode, stopping_criteria=criteria, streamer=streamer, **options
    )
