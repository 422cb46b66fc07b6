from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import draftproof


@pytest.fixture
def demo() -> tuple[Any, Any]:
    """The embedded model as transformers loads it, and its tokenizer."""
    folder = draftproof.embedded("demo")
    return (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            AutoTokenizer.from_pretrained(folder))  # fmt: skip
