"""One thread, no network, no host-dependent defaults: the tests mean the same everywhere."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _modest() -> None:
    torch.set_num_threads(1)
