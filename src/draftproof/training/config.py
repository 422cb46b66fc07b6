"""Options of training, for Python and for the command line. Does not import torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from draftproof.engine.config import option
from draftproof.errors import BadInput
from draftproof.training.texts import DataConfig

_loop_option, _text_option = partial(option, panel="Training"), partial(option, panel="Text")
_number = int | None
DRAFTED = 8192
"""The default size of the draft vocabulary, for targets with at least four times as many tokens."""


@dataclass(frozen=True)
class TrainConfig:
    """Options of training; its length is given by steps, or else by epochs."""

    steps: int | None = _loop_option(
        None, "Number of steps. Default: that of --epochs.", metavar="N", type=_number)
    epochs: float = _loop_option(2.0, "Number of epochs.", metavar="N", type=float)
    learning_rate: float | None = _loop_option(
        None, "Peak learning rate. Default: depends on the target's hidden size.",
        flags=("--lr",), metavar="X", type=float | None)  # fmt: skip
    objective: str = _loop_option(
        "ce", "Loss: ce, or kl to distill from the target.", metavar="NAME", type=str
    )
    draft_vocab: int | None = _loop_option(
        None, "Draft only the N most common tokens of the training text. Default: 8192 if the "
        "target has 32,768 or more, else all.",
        metavar="N", type=_number)  # fmt: skip
    length: int | None = _loop_option(
        None, "Tokens per row. Default: 512, or the context of the target.",
        metavar="N", type=_number)  # fmt: skip
    batch: int = _loop_option(4, "Rows per step.", metavar="B", type=int)
    seed: int = _loop_option(0, "The same seed gives the same heads.", metavar="S", type=int)

    def __post_init__(self) -> None:
        numbers = "steps", "epochs", "learning_rate", "batch", "length", "draft_vocab"
        for name in numbers:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise BadInput(f"{name} was {value}; it must be above 0")
        if self.length is not None and self.length < 16:
            raise BadInput(f"length was {self.length}; it must be at least 16")
        if self.objective not in ("ce", "kl"):
            raise BadInput(f"objective was {self.objective!r}; choose ce or kl")

    def for_target(self, hidden_size: int, context: int, vocab_size: int) -> TrainConfig:
        """Fill in a length, a draft vocabulary, and a rate: the published 0.001 for a width of 4096
        and 32 rows per step, higher for smaller widths, lower by the square root for fewer rows.

        Args:
            hidden_size: The target's hidden size.
            context: The number of positions that it supports.
            vocab_size: The size of its vocabulary.

        Returns:
            The configuration with all fields set.
        """
        few = self.draft_vocab
        usual = min(8e-3, 1e-3 * (4096 / hidden_size) ** 0.5) * min(1, self.batch / 32) ** 0.5
        if few is None and vocab_size >= 4 * DRAFTED:
            few = DRAFTED
        return replace(self, learning_rate=self.learning_rate or usual, draft_vocab=few,
                       length=self.length or min(512, context))  # fmt: skip

    def rate_at(self, step: int, steps: int) -> float:
        """The learning rate at a step: highest after a tenth of them, then falling as a cosine.

        Args:
            step: The step, from 0.
            steps: The number of steps.

        Returns:
            The learning rate.
        """
        warmup, highest = max(1.0, 0.1 * steps), self.learning_rate or 1e-3
        if step < warmup:
            return highest * (step + 1) / (warmup + 1)
        return highest / 2 * (1 + math.cos(math.pi * (step - warmup) / max(1.0, steps - warmup)))


@dataclass(frozen=True)
class SelfGenerateConfig:
    """Options for training text that the target writes. file: None is the head's own folder."""

    tokens: int = _text_option(1_000_000, "Number of tokens to generate.", metavar="N", type=int)
    temperatures: Sequence[float] = _text_option(
        (0.0, 0.7), "Cycle through these temperatures.", metavar="T", flags=("--temperature",),
        type=list[float])  # fmt: skip
    rows_at_a_time: int = _text_option(
        32, "Generate B rows at a time.", metavar="B", flags=("--batch-size",), type=int)
    file: Path | None = option(  # noqa: RUF009
        None, "File for the generated text, to train several heads on. Default: in --out.",
        panel="Text", metavar="FILE", flags=("--own-text",), type=Path | None)  # fmt: skip

    def __post_init__(self) -> None:
        tokens, rows, temperatures = self.tokens, self.rows_at_a_time, list(self.temperatures)
        if tokens < 1 or rows < 1:
            raise BadInput(f"{tokens} tokens, {rows} rows at a time: ask for at least 1")
        if not temperatures or min(temperatures) < 0:
            raise BadInput(f"the temperatures were {temperatures}; give some that are 0 or above")


@dataclass(frozen=True)
class TrainRun:
    """The head to train, its data, and its folder.

    head_config: numbers that describe the head, for its card. self_generate: the target writes the
    text. joint: the backbone is trained, too (Medusa-2).
    """

    model: str
    data: DataConfig
    out: Path
    config: TrainConfig = field(default_factory=TrainConfig)
    head_config: Mapping[str, object] = field(default_factory=dict)
    self_generate: SelfGenerateConfig | None = None
    joint: bool = False
    dtype: str | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        if self.joint and find_spec("peft") is None:
            raise BadInput("training the backbone needs another package: pip install peft")

    def settings(self, config: TrainConfig) -> dict[str, object]:
        """Everything that determines the result, except the weights.

        Args:
            config: The configuration for the target.

        Returns:
            The settings by name, as JSON.
        """
        writer, writes = self.self_generate, None
        if writer is not None:
            writes = {"tokens": writer.tokens, "temperatures": list(writer.temperatures)}
        return {**self.head_config, **asdict(config), "data": self.data.hashes(),
                "chat": self.data.chat, "self_generate": writes, "joint": self.joint,
                "dtype": self.dtype}  # fmt: skip
