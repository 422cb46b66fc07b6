"""Requests of encoder–decoders: a prompt is what the encoder reads, and the text begins anew.

A prompt is text, token ids, a chat, or what a tokenizer or processor returns: the encoder's inputs
by name (`input_features`, ...) or its output (`encoder_outputs`), and `decoder_input_ids` for what
the text begins with.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from draftproof.engine.prompts import Prompt, several
from draftproof.engine.request_reader import RequestReader
from draftproof.errors import BadInput, first_line
from draftproof.model.encoder_decoder import EncoderDecoder, EncoderOutput, Source

OF_TEXT = {"input_ids", "attention_mask", "token_type_ids"}
"""What tokenizers return."""


class SourceReader(RequestReader):
    """Refuses, before anything runs, what cannot be honoured exactly."""

    def several(self, prompts: Any) -> list[Any]:
        """One prompt or many, as a list."""
        many = [prompts] if isinstance(prompts, Mapping) else prompts
        if not isinstance(many, (list, tuple)) or not many or not all(map(_is_inputs, many)):
            return several(prompts)
        return [row for one in many for row in _rows(one)]

    def begun(self, prompt: Prompt) -> tuple[list[int], Source]:
        """The tokens that the text begins with, and what the encoder reads."""
        target = cast(EncoderDecoder, self.target)
        whole = cast(Any, prompt) if _is_inputs(prompt) else {"input_ids": self.tokens(prompt)}
        given = dict(whole)
        start = given.pop("decoder_input_ids", None)
        mask = given.pop("decoder_attention_mask", None)
        source = self._source(given, target)
        if start is None:
            return _start(target, source), source
        tokens = _present(start, mask, "decoder_input_ids")[0].tolist()
        if not tokens:
            raise BadInput("decoder_input_ids were empty; give one token, or leave them out")
        self._known(tokens, "decoder_input_ids")
        return tokens, source

    def _source(self, given: dict[str, Any], target: EncoderDecoder) -> Source:
        output, mask = given.pop("encoder_outputs", None), given.pop("attention_mask", None)
        known = None
        if output is not None:
            read = inspect.signature(target.model.get_decoder().forward).parameters
            masked = "encoder_attention_mask" in read           # Whisper's sees all, come what may
            known = target.encoder, _present(output, mask, "encoder_outputs", masked)
        if (ids := given.pop("input_ids", None)) is not None:
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
        strange = [name for name in given if name not in takes]
        if strange or not (given or known):
            raise BadInput(
                f"the encoder of {target.name} reads {next(iter(takes))}, and "
                f"{', '.join(strange) or 'nothing'} was given; give what the model's tokenizer or "
                "processor returns"
            )
        inputs = {name: _present(one, mask, name, False) for name, one in given.items()}
        return Source(inputs, (), known)


def _is_inputs(given: object) -> bool:
    """Whether something is what a processor returns, and not a message of a chat."""
    return isinstance(given, Mapping) and "role" not in given and not set(given) <= OF_TEXT


def _rows(inputs: Mapping[str, Any]) -> list[dict[str, Tensor]]:
    """The inputs of each row of a batch."""
    found = dict[str, Tensor]()
    for name, one in inputs.items():
        whole = getattr(one, "last_hidden_state", one[0] if isinstance(one, tuple) else one)
        try:
            found |= {} if whole is None else {name: torch.as_tensor(whole)}
        except (TypeError, ValueError, RuntimeError) as error:
            raise BadInput(
                f"{name} is no tensor: {first_line(error)}; ask the processor for return_tensors="
                "'pt'"
            ) from error
    counts = {len(one) if one.dim() > 1 else 0 for one in found.values()}
    if len(counts) != 1 or 0 in counts:
        raise BadInput(
            f"{', '.join(found)} are not of one batch; give tensors of as many rows each"
        )
    rows = range(counts.pop())
    return [{name: one[row : row + 1] for name, one in found.items()} for row in rows]


def _present(whole: Tensor, mask: Tensor | None, name: str, strict: bool = True) -> Tensor:
    """[1, s, ...] what a mask leaves of [1, S, ...]."""
    if mask is None or bool(mask.bool().all()):
        return whole
    if whole.shape[1] == mask.shape[1]:
        return whole[:, mask[0].bool().to(whole.device)]
    if strict:
        raise BadInput(
            f"the mask of {name} has {mask.shape[1]} places, and they have {whole.shape[1]}; give "
            "rows without padding, one at a time"
        )
    return whole


def _start(target: EncoderDecoder, source: Source) -> list[int]:
    """What a text begins with if nobody says, as transformers' generate begins it."""
    model: Any = target.model
    config = copy.copy(model.generation_config)
    if getattr(config, "return_timestamps", False):
        raise BadInput(
            "the model's generation_config asks for return_timestamps, which is a way of decoding "
            "of its own; call model.generate with custom_generate=draftproof.generate, or give "
            "decoder_input_ids"
        )
    ids = (config.decoder_start_token_id, getattr(model.config, "decoder_start_token_id", None),
           config.bos_token_id)
    start = next((one for one in ids if one is not None), None)
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
        found: Tensor = model._retrieve_init_tokens(
            None, batch_size=1, generation_config=config, config=model.config,
            num_segment_frames=None, kwargs=known,
        )  # fmt: skip
    return [int(token) for token in found[0].tolist()]
