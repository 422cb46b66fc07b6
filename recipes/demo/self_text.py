"""How the target writes the draft's training text, and its next-token distributions are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from data import EOS, Tokens
from tqdm import tqdm  # type: ignore[import-untyped]
from transformers import DynamicCache, LlamaForCausalLM

TOP = 32
CHUNK = 65536  # tokens in a chunk
LENGTHS = (256, 512, 256, 1024)  # of the rows, chunk after chunk
TEMPERATURES, SHARES = (0.0, 0.7, 1.0), (0.45, 0.25, 0.3)


@dataclass(frozen=True)
class Labelled:
    """Rows of tokens and, at each position, the target's most probable next tokens, best first."""

    tokens: torch.Tensor
    ids: torch.Tensor
    logp: torch.Tensor

    def save(self, path: Path) -> None:
        """Write the rows; a crash while writing leaves no file."""
        part = path.with_suffix(".part")
        torch.save({"tokens": self.tokens, "ids": self.ids, "logp": self.logp}, part)
        part.replace(path)

    @staticmethod
    def read(path: Path) -> Labelled:
        """Read what ``save`` wrote."""
        return Labelled(**torch.load(path, weights_only=True))

    def pick(self, rows: torch.Tensor) -> Labelled:
        """Some of the rows."""
        return Labelled(self.tokens[rows], self.ids[rows], self.logp[rows])


def _best(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logp, ids = torch.log_softmax(logits.float(), -1).topk(TOP, dim=-1)
    return ids.to(torch.int16), logp.to(torch.float16)


@torch.inference_mode()
def label(target: LlamaForCausalLM, rows: torch.Tensor, batch: int = 8) -> Labelled:
    """What the target predicts after every token of the rows."""
    parts = [
        _best(target(input_ids=part, use_cache=False).logits) for part in torch.split(rows, batch)
    ]
    ids, logp = (torch.cat(column) for column in zip(*parts, strict=True))
    return Labelled(rows.to(torch.int16), ids, logp)


@torch.inference_mode()
def write(
    target: LlamaForCausalLM,
    prompts: torch.Tensor,
    temperatures: torch.Tensor,
    length: int,
    generator: torch.Generator,
) -> Labelled:
    """Continue every prompt to ``length`` tokens, temperature 0 being greedy; after a first end
    of text a greedy row goes on at 0.7, so that its next story is not always the same one."""
    cache = DynamicCache()
    logits = target(input_ids=prompts, past_key_values=cache, use_cache=True).logits
    tokens, labels = [prompts], [_best(logits)]
    temperatures = temperatures.clone()
    for _ in range(length - prompts.shape[1]):
        scores = logits[:, -1].float()
        mass = (scores / temperatures.clamp(min=1e-3)[:, None]).softmax(-1).cumsum(-1)
        level = torch.rand(len(mass), 1, generator=generator) * mass[:, -1:]
        drawn = torch.searchsorted(mass, level).clamp(max=mass.shape[-1] - 1)
        new = torch.where(temperatures[:, None] == 0, scores.argmax(-1, keepdim=True), drawn)
        temperatures[(new[:, 0] == EOS) & (temperatures == 0)] = 0.7
        logits = target(input_ids=new, past_key_values=cache, use_cache=True).logits
        tokens.append(new)
        labels.append(_best(logits))
    ids, logp = (torch.cat(column, 1) for column in zip(*labels, strict=True))
    return Labelled(torch.cat(tokens, 1).to(torch.int16), ids, logp)


def prompts_of(
    stories: Sequence[Tokens],
    again: Tokens,
    rows: int,
    length: int,
    retell: bool,
    seed: Sequence[int],
) -> torch.Tensor:
    """Prompts of one length: openings of stories, half of them after an end of text; or whole
    stories (their last part) with the request to tell them again."""
    generator = np.random.default_rng(list(seed))
    mark = np.array([EOS], dtype=np.uint16)
    prompts: list[Tokens] = []
    while len(prompts) < rows:
        story = stories[int(generator.integers(len(stories)))]
        if retell:
            prompt = np.concatenate([mark, story, again])[-length:]
        else:
            marked = len(prompts) % 2 == 0 or length == 1
            prompt = (np.concatenate([mark, story]) if marked else story)[:length]
        if len(prompt) == length:
            prompts.append(prompt)
    return torch.from_numpy(np.stack(prompts).astype(np.int64))


def chunk(
    target: LlamaForCausalLM, stories: Sequence[Tokens], again: Tokens, number: int, seed: int
) -> Labelled:
    """A chunk of the target's own text; one in eight retells stories, one begins from nothing."""
    draw = np.random.default_rng([seed, number])
    length = LENGTHS[number % len(LENGTHS)]
    rows = CHUNK // length
    retell, bare = number % 8 == 1, number % 8 == 4
    size = 160 if retell else 1 if bare else int(draw.choice([2, 5, 10, 20, 40, 80]))
    prompts = prompts_of(stories, again, rows, size, retell, [seed, number, 1])
    shares = (0.0, 0.0, 1.0) if bare else SHARES
    temperatures = torch.from_numpy(
        draw.choice(TEMPERATURES, size=rows, p=shares).astype(np.float32)
    )
    return write(
        target, prompts, temperatures, length, torch.Generator().manual_seed(seed * 100003 + number)
    )


def own_text(
    target: LlamaForCausalLM,
    stories: Sequence[Tokens],
    again: Tokens,
    folder: Path,
    chunks: int,
    seed: int,
) -> list[Labelled]:
    """So many chunks of the target's own text, kept in ``folder`` and made once."""
    folder.mkdir(parents=True, exist_ok=True)
    made: list[Labelled] = []
    for number in tqdm(range(chunks), unit="chunk", desc="target's own text"):
        path = folder / f"{number:03d}.pt"
        if not path.exists():
            chunk(target, stories, again, number, seed).save(path)
        made.append(Labelled.read(path))
    return made
