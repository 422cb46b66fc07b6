"""Write training text with a Llama or Qwen2 on a GPU, a thousand rows at a time.

    python recipes/smollm2/write.py MODEL --data text/prompts.jsonl --tokens 4000000 --out own.jsonl

`draftproof train ... --self-generate --own-text own.jsonl` reads the file. When a row has ended,
the next prompt takes its place. A step of all rows is one CUDA graph; a CPU takes the same steps
without a graph, slowly.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from draftproof.core.params import Sampling
from draftproof.errors import BadInput
from draftproof.model import loading
from draftproof.tokenizer.codec import Codec
from draftproof.training.config import SelfGenerateConfig
from draftproof.training.self_generate import SelfGeneratedText
from draftproof.training.texts import DataConfig
from draftproof.training.train_run import fingerprint

KINDS = ("llama", "qwen2")
STEPS = 8
"""Tokens that each row gets between two checks for rows that have ended."""
READ = 64
"""Prompts that are read at a time."""


class GraphWriter:
    """A `training.self_generate.Writer` with `rows` rows of `length` tokens, prompt included."""

    def __init__(self, model: Any, stops: Sequence[int], rows: int, length: int) -> None:
        form, device = model.config, model.device
        rope, sliding = form.rope_parameters, getattr(form, "use_sliding_window", False)
        if form.model_type not in KINDS or rope["rope_type"] != "default" or sliding:
            raise BadInput(
                f"{form.model_type} with {rope['rope_type']} positions was given; write.py needs "
                f"{' or '.join(KINDS)} with default positions and no sliding window: use "
                "`draftproof train --self-generate` instead"
            )
        self.heads, self.groups = form.num_attention_heads, form.num_key_value_heads
        self.size = getattr(form, "head_dim", None) or form.hidden_size // self.heads
        self.rows, self.length = rows, length
        self.model, self.device = model.model, device
        self.table, self.stops = model.lm_head.weight, torch.tensor(sorted(stops), device=device)
        half = torch.arange(0, self.size, 2, device=device).float() / self.size
        places = torch.arange(length, device=device)
        angles = torch.outer(places.float(), rope["rope_theta"] ** -half)
        self.turn = torch.stack([angles.cos(), angles.sin()]).repeat(1, 1, 2).to(model.dtype)
        shape = (form.num_hidden_layers, 2, rows, self.groups, length, self.size)
        self.kv = torch.zeros(shape, dtype=model.dtype, device=device)
        self.tokens = torch.zeros(rows, length, dtype=torch.int64, device=device)
        self.at, self.end, self.sizes = torch.zeros(3, rows, dtype=torch.int64, device=device)
        self.done = torch.ones(rows, dtype=torch.bool, device=device)
        self.temperatures = torch.zeros(rows, 1, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None

    @torch.inference_mode()
    def __call__(
        self, prompts: Sequence[list[int]], samplings: Sequence[Sampling], rows: int
    ) -> Iterator[tuple[int, list[int], str]]:
        waiting, owner = list(reversed(range(len(prompts)))), [-1] * self.rows
        self.done.fill_(True)
        while waiting or max(owner) >= 0:
            free = [row for row, prompt in enumerate(owner) if prompt < 0]
            while waiting and free:
                chosen, free = free[:READ][: len(waiting)], free[READ:]
                for row in chosen:
                    owner[row] = waiting.pop()
                indices = [owner[row] for row in chosen]
                self._read(chosen, [prompts[index] for index in indices],
                           [samplings[index] for index in indices])
            for _ in range(STEPS):
                self._replay()
            ended = [row for row in self.done.nonzero()[:, 0].tolist() if owner[row] >= 0]
            for row, text, size in zip(ended, self.tokens[ended].tolist(),
                                       self.sizes[ended].tolist(), strict=True):
                new = text[len(prompts[owner[row]]) : size]
                yield owner[row], new, "stop" if new[-1] in self.stops.tolist() else "length"
                owner[row] = -1

    def _read(
        self, rows: list[int], prompts: list[list[int]], samplings: list[Sampling]
    ) -> None:
        """Compute keys and values of prompts; the next step reads the last token of each."""
        where, sizes = torch.tensor(rows, device=self.device), [len(prompt) for prompt in prompts]
        width = max(sizes)
        text = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts])
        self.tokens[where, :width] = text.to(self.device)
        states = self.model.embed_tokens(self.tokens[where, :width])
        turn = self.turn[:, None, None, :width]
        for number, layer in enumerate(self.model.layers):
            query, key, value = self._query_key_value(layer, states, turn)
            self.kv[number, 0, where, :, :width], self.kv[number, 1, where, :, :width] = key, value
            mixed = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=True)
            states = self._finished(layer, states, mixed)
        new = [sampling.max_new_tokens or 1 for sampling in samplings]
        ends = [min(self.length, size + more) for size, more in zip(sizes, new, strict=True)]
        temperatures = [[sampling.temperature] for sampling in samplings]
        self.at[where] = torch.tensor(sizes, device=self.device) - 1
        self.end[where] = torch.tensor(ends, device=self.device)
        self.temperatures[where] = torch.tensor(
            temperatures, dtype=torch.float32, device=self.device)
        self.done[where] = False

    def _step(self) -> None:
        """Write a token in each row; rows that are done are computed too, but do not change."""
        every = torch.arange(self.rows, device=self.device)
        states = self.model.embed_tokens(self.tokens.gather(1, self.at[:, None]))
        turn = self.turn[:, self.at][:, :, None, None]                          # [2, B, 1, 1, D]
        seen = torch.arange(self.length, device=self.device) <= self.at[:, None]
        hidden = torch.zeros_like(seen, dtype=states.dtype).masked_fill(~seen, -torch.inf)
        for number, layer in enumerate(self.model.layers):
            query, key, value = self._query_key_value(layer, states, turn)
            keys, values = self.kv[number]
            keys[every, :, self.at], values[every, :, self.at] = key[:, :, 0], value[:, :, 0]
            query = query.view(self.rows, self.groups, -1, self.size) * self.size**-0.5
            scores = query @ keys.mT + hidden[:, None, None]
            mixed = scores.float().softmax(-1).to(states.dtype) @ values
            states = self._finished(layer, states, mixed.view(self.rows, self.heads, 1, self.size))
        logits = F.linear(self.model.norm(states[:, 0]), self.table).float()
        noise = -torch.empty_like(logits).exponential_().log()                  # Gumbel noise
        new, place = torch.addcmul(logits, noise, self.temperatures).argmax(-1), self.at + 1
        place = torch.where(self.done, self.at, place)
        kept = self.tokens.gather(1, place[:, None])[:, 0]
        self.tokens.scatter_(1, place[:, None], torch.where(self.done, kept, new)[:, None])
        over = (new[:, None] == self.stops).any(-1) | (place + 1 >= self.end)
        self.sizes.copy_(torch.where(self.done, self.sizes, place + 1))
        self.at.copy_(torch.where(self.done | over, self.at, place))
        self.done.logical_or_(over)

    def _query_key_value(self, layer: Any, states: Tensor, turn: Tensor) -> tuple[Tensor, ...]:
        """[B, heads, S, D] each, of states [B, S, H], rotated by their positions."""
        attention, inner = layer.self_attn, layer.input_layernorm(states)
        shape = (*states.shape[:2], -1, self.size)
        parts = (attention.q_proj(inner), attention.k_proj(inner), attention.v_proj(inner))
        query, key, value = (part.view(shape).transpose(1, 2) for part in parts)
        cos, sin = turn
        (a, b), (c, d) = query.chunk(2, -1), key.chunk(2, -1)
        query = query * cos + torch.cat([-b, a], -1) * sin
        return query, key * cos + torch.cat([-d, c], -1) * sin, value

    def _finished(self, layer: Any, states: Tensor, mixed: Tensor) -> Tensor:
        """States [B, S, H] after a layer whose attention gave `mixed` [B, heads, S, D]."""
        states = states + layer.self_attn.o_proj(mixed.transpose(1, 2).flatten(2))
        return states + layer.mlp(layer.post_attention_layernorm(states))

    def _replay(self) -> None:
        if self.device.type != "cuda":
            self._step()
            return
        if self.graph is None:
            stream = torch.cuda.Stream()            # capture needs a first step on another stream
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._step()
            torch.cuda.current_stream().wait_stream(stream)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._step()
        self.graph.replay()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--data", type=Path, action="append", required=True)
    parser.add_argument("--tokens", type=int, default=4_000_000)
    parser.add_argument("--rows", type=int, default=1024, help="rows that are written at a time")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row, as in `train`")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    model = loading.load_model(options.model, "bfloat16", options.device)
    tokenizer = loading.load_tokenizer(options.model)
    assert tokenizer is not None, "the folder has no tokenizer"
    codec, data = Codec(tokenizer), DataConfig(tuple(options.data))
    config = SelfGenerateConfig(
        tokens=options.tokens, rows_at_a_time=options.rows, file=options.out)
    identity = {"model": fingerprint(model), "data": data.hashes(), "chat": False}
    texts = SelfGeneratedText(options.out, identity, config, options.length)
    writer = GraphWriter(model, loading.stop_tokens(model), options.rows, options.length)
    context = model.config.max_position_embeddings
    for held_out, documents in zip((False, True), data.split(0, print), strict=True):
        with tqdm(total=options.tokens if not held_out else None, unit=" tokens") as bar:

            def show_progress(tokens: int, total: int, bar: Any = bar) -> None:
                bar.update(tokens - bar.n)

            texts.write(writer, codec, context, documents, held_out, show_progress)


if __name__ == "__main__":
    try:
        main()
    except BadInput as error:
        sys.exit(f"write.py: {error}")
