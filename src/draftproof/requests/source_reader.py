"""Requests of encoder–decoders: the prompt is the encoder's input, and the text starts afresh.

A prompt is text, token ids, a chat, or the result of a tokenizer or processor: the encoder's inputs
by name (`input_features`, ...) or its output (`encoder_outputs`), and `decoder_input_ids` for the
beginning of the text.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from draftproof.errors import BadInput, first_line
from draftproof.model.encoder_decoder import EncoderDecoder, EncoderOutput, Source
from draftproof.requests.prompts import Prompt, split_prompts
from draftproof.requests.reader import RequestReader

OF_TEXT = {"input_ids", "attention_mask", "token_type_ids"}
"""Keys of what tokenizers return."""


class SourceReader(RequestReader):
    """Makes requests, and refuses those that cannot be honoured exactly before anything runs."""

    @staticmethod
    def split_prompts(prompts: object) -> list[Any]:
        """Split one or many prompts into a list."""
        many = [prompts] if isinstance(prompts, Mapping) else prompts
        if not isinstance(many, (list, tuple)) or not many or not all(map(_is_inputs, many)):
            return split_prompts(prompts)
        return [row for prompt in many for row in _rows(prompt)]

    def begun(self, prompt: Prompt) -> tuple[list[int], Source]:
        """The tokens at the beginning of the text, and the encoder's input."""
        target = cast(EncoderDecoder, self.target)
        values = cast(Any, prompt) if _is_inputs(prompt) else {"input_ids": self.tokens(prompt)}
        inputs = dict(values)
        start = inputs.pop("decoder_input_ids", None)
        mask = inputs.pop("decoder_attention_mask", None)
        source = self._source(inputs, target)
        if start is None:
            return _start(target, source), source
        tokens = _present(start, mask, "decoder_input_ids")[0].tolist()
        if not tokens:
            raise BadInput("decoder_input_ids were empty; give one token, or leave them out")
        self._known(tokens, "decoder_input_ids")
        return tokens, source

    def _source(self, values: dict[str, Any], target: EncoderDecoder) -> Source:
        output, mask = values.pop("encoder_outputs", None), values.pop("attention_mask", None)
        known = None
        if output is not None:
            read = inspect.signature(target.model.get_decoder().forward).parameters
            masked = "encoder_attention_mask" in read           # Whisper's encoder ignores masks
            known = target.encoder, _present(output, mask, "encoder_outputs", masked)
        if (ids := values.pop("input_ids", None)) is not None:
            ids = torch.as_tensor(ids).view(1, -1)
            tokens = _present(ids, mask, "input_ids")[0].tolist()
            if len(tokens) > target.source_context:
                raise BadInput(
                    f"the prompt has {len(tokens)} tokens and the encoder of {target.name} reads "
                    f"at most {target.source_context}; shorten the prompt"
                )
            self._known(tokens, "the prompt")
            return Source({"input_ids": torch.tensor([tokens])}, tokens, known)
        takes = inspect.signature(target.encoder.forward).parameters
        strange = [name for name in values if name not in takes]
        if strange or not (values or known):
            raise BadInput(
                f"the encoder of {target.name} reads {next(iter(takes))}, and "
                f"{', '.join(strange) or 'nothing'} was given; give what the model's tokenizer or "
                "processor returns"
            )
        inputs = {name: _present(value, mask, name, False) for name, value in values.items()}
        return Source(inputs, (), known)


def _is_inputs(value: object) -> bool:
    """Whether a value is the result of a processor, and not a message of a chat."""
    return isinstance(value, Mapping) and "role" not in value and not set(value) <= OF_TEXT


def _rows(inputs: Mapping[str, object]) -> list[dict[str, Tensor]]:
    """The inputs of each row of a batch."""
    tensors = dict[str, Tensor]()
    for name, value in inputs.items():
        first = value[0] if isinstance(value, tuple) else value
        tensor = getattr(value, "last_hidden_state", first)
        try:
            tensors |= {} if tensor is None else {name: torch.as_tensor(tensor)}
        except (TypeError, ValueError, RuntimeError) as error:
            raise BadInput(
                f"{name} is no tensor: {first_line(error)}; ask the processor for return_tensors="
                "'pt'"
            ) from error
    counts = {len(part) if part.dim() > 1 else 0 for part in tensors.values()}
    if len(counts) != 1 or 0 in counts:
        raise BadInput(
            f"{', '.join(tensors)} are not of one batch; give tensors of as many rows each"
        )
    rows = range(counts.pop())
    return [{name: part[row : row + 1] for name, part in tensors.items()} for row in rows]


def _present(tensor: Tensor, mask: Tensor | None, name: str, strict: bool = True) -> Tensor:
    """Select the part [1, s, ...] of [1, S, ...] inside a mask."""
    if mask is None or bool(mask.bool().all()):
        return tensor
    if tensor.shape[1] == mask.shape[1]:
        return tensor[:, mask[0].bool().to(tensor.device)]
    if strict:
        raise BadInput(
            f"the mask of {name} has {mask.shape[1]} positions, and they have {tensor.shape[1]}; "
            "give rows without padding, one at a time"
        )
    return tensor


def _start(target: EncoderDecoder, source: Source) -> list[int]:
    """The default beginning of a text, as in transformers' generate."""
    model: Any = target.model
    config = copy.copy(model.generation_config)
    if getattr(config, "return_timestamps", False):
        raise BadInput(
            "the model's generation_config asks for return_timestamps, which needs "
            "transformers' own loop; call model.generate with custom_generate=draftproof.generate, "
            "or give decoder_input_ids"
        )
    ids = (config.decoder_start_token_id, getattr(model.config, "decoder_start_token_id", None),
           config.bos_token_id)
    start = next((token for token in ids if token is not None), None)
    if start is None:
        raise BadInput(
            f"neither {target.name} nor its generation_config names a decoder_start_token_id; give "
            "decoder_input_ids"
        )
    config.decoder_start_token_id, config.return_timestamps = start, False
    if not hasattr(model, "_retrieve_init_tokens"):
        return [int(start)]
    known = dict[str, Any]()
    with torch.inference_mode():                    # Whisper: language, task, and no timestamps
        if hasattr(config, "lang_to_id") and getattr(config, "language", None) is None:
            known["encoder_outputs"] = EncoderOutput(source.encoded(target.encoder))
        tokens: Tensor = model._retrieve_init_tokens(
            None, batch_size=1, generation_config=config, config=model.config,
            num_segment_frames=None, kwargs=known,
        )  # fmt: skip
    return [int(token) for token in tokens[0].tolist()]
