"""A model for lm-eval's harness that generates with our decoding; otherwise its "hf" model.

    python -m draftproof.hf.lm_eval --model draftproof --model_args pretrained=MODEL --tasks gsm8k

`assistant_model`, `drafter`, `num_assistant_tokens` and `acceptance` can be given in
`model_args`. Answers are those of ``--model hf``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from draftproof.hf.generate import generate

DRAFTING = ("assistant_model", "drafter", "num_assistant_tokens", "acceptance")


@register_model("draftproof")
class DraftproofLM(HFLM):  # type: ignore[misc]
    """An `HFLM` that generates text with `draftproof.generate`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        drafting = {name: options.pop(name) for name in DRAFTING if name in options}
        super().__init__(*args, **options)
        self._decode = partial(generate, **drafting)

    def _model_generate(self, *args: Any, **options: Any) -> Any:
        return super()._model_generate(*args, custom_generate=self._decode, **options)


if __name__ == "__main__":
    cli_evaluate()
