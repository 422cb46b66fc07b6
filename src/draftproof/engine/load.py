"""Build an engine from options: target, drafter and tokenizer, checked against each other."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, Unpack, cast

from draftproof.core.progress import doing
from draftproof.core.tree import TreeShape
from draftproof.drafters import mtp
from draftproof.drafters.base import Drafter
from draftproof.drafters.checkpoints import is_head, load_drafter, read_head, recognise
from draftproof.drafters.draft_model import SELF, DraftModel, SelfDraft, self_draft_options
from draftproof.drafters.draft_other_tokenizer import OtherTokenizer
from draftproof.drafters.draft_parallel import ParallelDraft
from draftproof.drafters.draft_vocabulary import SharedVocabulary
from draftproof.drafters.medusa import Medusa, MedusaHead
from draftproof.drafters.medusa_trees import CHOICES
from draftproof.drafters.portfolio import Portfolio
from draftproof.engine.config import EngineConfig, LoadOptions
from draftproof.engine.engine import Engine
from draftproof.engine.named_drafters import DRAFTERS, HEADS, default_name, imported
from draftproof.engine.open_model import (
    NATIVE,
    codec_of,
    defaults_of,
    native_file,
    native_source,
    native_target,
    open_model,
    passage_of,
)
from draftproof.engine.shape_policy import ShapePolicy
from draftproof.engine.wrappers import SourceText
from draftproof.errors import (
    BadInput,
    DrafterMismatch,
    ModelNotFound,
    UnsupportedModel,
    reject_unknown_options,
)
from draftproof.gguf.file import GGUFFile
from draftproof.model import loading, variants
from draftproof.model.names import is_import
from draftproof.model.native_load import NativeFolder
from draftproof.model.native_model import NativeModel
from draftproof.model.parallel import ProcessGroup, form_group
from draftproof.model.target import Target, target_of
from draftproof.native.kernels import kernels
from draftproof.tokenizer.codec import Codec
from draftproof.weights.packed_linear import pack_linears
from draftproof.weights.quantize import PASSAGE

if TYPE_CHECKING:
    from draftproof.model.encoder_decoder import EncoderDecoder
    from draftproof.model.loading import PreTrainedModel

log = logging.getLogger("draftproof")

def load(model: str | Path | PreTrainedModel, **options: Unpack[LoadOptions]) -> Engine:
    """Load a model and its drafter.

    A model object may be trained afterwards: the next text uses the changed weights.

    Example:
        ```python
        engine = dp.load("demo", assistant_model="demo-draft")
        print(engine.generate("Once upon a time", max_new_tokens=50)[0].text)
        ```

    Args:
        model: "demo", a folder, a GGUF file, a hub id or a loaded transformers model.
        **options: The other fields of `EngineConfig`, by name.

    Returns:
        The engine.

    Raises:
        TypeError: An option is not known.
        DraftproofError: Something cannot be loaded or does not fit; the message is one sentence.
    """
    reject_unknown_options("load", options, LoadOptions.__annotations__)
    return build(EngineConfig(model, **options))


def build(config: EngineConfig) -> Engine:
    """Load everything that a configuration names, and check that it fits together."""
    self_draft, group = _self_draft(config), _group(config)
    doing(f"reading {_shown(config.model)}")
    with group.raise_on_rank_failure():
        native = native_source(config.model, config)
        codec_later = _codec_of_files(config, native)
        if native is not None:
            assert codec_later is not None
            target = native_target(native, config, codec_later.result)
            codec = codec_later.result()
        else:
            packs = not config.compile and config.quantize is None
            loaded = open_model(config.model, config, packs=packs, group=group)
            doing("comparing it with transformers' own forward")
            target = target_of(loaded, kv_cache=config.kv_cache, group=group)
            codec = codec_later.result() if codec_later is not None else codec_of(
                config.tokenizer, config.model, loaded, config.trust_remote_code
            )
    drafter: Drafter | None = None
    original = target.model
    if self_draft is not None and self_draft.keywords["quantize"]:
        # A copy of the original weights, before they are freed.
        drafter = self_draft(target)
    if config.quantize is not None and target.quantization is None:
        doing(f"quantising to {config.quantize}")
        named = isinstance(config.model, (str, Path))
        passage = passage_of(codec, target.context)
        target = variants.quantized(target, config.quantize, passage, give_up=named)
    if drafter is None:
        doing(f"preparing the drafter {_shown(config.assistant_model or config.drafter or '')}")
        drafter = self_draft(target) if self_draft is not None else _drafter(config, target, codec)
    if config.exact_bits:
        from draftproof.model.exact_target import exact

        if config.compile or config.graphs:
            raise BadInput("--exact-bits runs kernels of its own; leave --compile and "
                           "--use-hpu-graphs out")
        target = exact(target)
    if config.compile or config.graphs:
        from draftproof.model.graph_replay import GraphReplay, compiled

        target = _wrapped(target, drafter, compiled) if config.compile else target
        target = _wrapped(target, drafter, GraphReplay) if config.graphs else target
    shapes = config.shapes
    if shapes is None and (config.graphs or config.compile or config.bucket_size is not None):
        shapes = ShapePolicy(closed=True, bucket=config.bucket_size)
    sampling, stop_tokens = defaults_of(original, config.ignore_generation_config)
    return Engine(
        target, drafter, codec=codec, acceptance=config.acceptance or "match",
        lossy=config.typical, budget=config.budget, sampling=sampling, stop_tokens=stop_tokens,
        shapes=shapes,
    )  # fmt: skip


def _codec_of_files(
    config: EngineConfig, native: NativeFolder | None
) -> Future[Codec | None] | None:
    """The tokenizer of a GGUF file, or of a folder for our own forward, built while another thread
    reads the weights; None for other models."""
    is_file = isinstance(config.model, (str, Path)) and GGUFFile.recognises(config.model)
    if not (is_file or native is not None):
        return None
    if is_file:
        GGUFFile.open(config.model)                     # once, for both
    kernels()                   # it opens many files, and each would wait for the other thread
    pool = ThreadPoolExecutor(1)
    future = pool.submit(
        codec_of, config.tokenizer, config.model, None, config.trust_remote_code
    )
    pool.shutdown(wait=False)
    return future


def _shown(model: object) -> str:
    return str(model) if isinstance(model, (str, Path)) else type(model).__name__


def _self_draft(config: EngineConfig) -> partial[SelfDraft] | None:
    """A function that makes the target's own draft, for self-drafting; else None."""
    if not (isinstance(config.drafter, str) and config.drafter.startswith(SELF)):
        return None
    layers, kind = self_draft_options(config.drafter)
    quantize = config.quantize_draft if config.quantize_draft != "none" else None
    if kind and quantize and kind != quantize:
        both = f"both {config.drafter} and a draft in {quantize}"
        raise BadInput(f"{both} were given; leave one of them out")
    return partial(SelfDraft, layers=layers, quantize=kind or quantize, shape=_shape(config.tree))


def _group(config: EngineConfig) -> ProcessGroup:
    """The ranks to run on. Refuses options that a sharded model cannot honour, before loading."""
    needs_one_model = not isinstance(config.model, (str, Path)) or config.quantize is not None
    if config.parallel is not None and (needs_one_model or _self_draft(config) is not None):
        raise BadInput(
            "a parallel run loads a part of the model on each rank: give its name, no "
            "quantisation, and no self-drafting"
        )
    return form_group(config.parallel)


def _drafter(config: EngineConfig, target: Target, codec: Codec | None) -> Drafter:
    """The drafter of the configuration."""
    named = config.assistant_model if config.assistant_model is not None else config.drafter
    if config.assistant_model is not None or _is_model(named):
        assert named is not None and not isinstance(named, Drafter)
        return _draft_model(named, config, target, codec)
    if config.quantize_draft not in (None, "none"):
        wanted = f"a draft model in {config.quantize_draft} was requested"
        raise BadInput(f"{wanted}, but there is none; name a draft model, or leave the option out")
    if isinstance(named, Drafter):
        return named
    name = str(named or default_name(target))
    return SourceText.wrap(_by_name(name, target, config.tree), target)


def _by_name(name: str, target: Target, tree: TreeShape | str | None) -> Drafter:
    """A drafter by its name, folder or file; or several, merged."""
    if name in DRAFTERS:
        return DRAFTERS[name]()
    if name in HEADS or is_head(loading.resolve(name)):
        return _heads(name, target, tree)
    if is_import(name) and not Path(name).exists():
        return imported(name, target)
    published = recognise(name) is not None
    if tree is not None and (name == NATIVE or published):
        raise BadInput(f"a draft tree was given, and {name} shapes its own; leave it out")
    if name == NATIVE:
        return mtp.load(target)
    if published:
        drafter = load_drafter(name, target)
        log.warning("note: drafting with the %s", drafter.description)
        return drafter
    if "+" in name:
        parts = name.split("+")
        alone = next((part for part in parts if _is_model(part)), None)
        if alone is not None:
            raise BadInput(
                f"{alone} is a draft model, which reads its own drafts; name it alone, as an "
                "assistant model"
            )
        drafters = [_by_name(part, target, tree) for part in parts]
        lists = (drafter.members if isinstance(drafter, Portfolio) else (drafter,)
                 for drafter in drafters)
        return Portfolio([member for members in lists for member in members])
    names = ", ".join([*DRAFTERS, *HEADS, NATIVE, "self-int8", "self-int4", "self-layers:N"])
    known = f"{names}, or the folder of draft heads or of a draft model"
    raise BadInput(f"drafter was {name!r}; give {known}")


def _heads(name: str, target: Target, tree: TreeShape | str | None) -> Drafter:
    folder = loading.resolve(HEADS.get(name, name))
    if not is_head(folder):
        raise ModelNotFound(
            f"this installation has no {name} heads for the demo model; give a folder of trained "
            "heads"
        )
    head = read_head(folder, target)
    if isinstance(head, MedusaHead):
        return Medusa(head, target, tree.paths if isinstance(tree, TreeShape) else tree)
    if tree is not None:
        raise BadInput(
            f"a draft tree was given, and {head.kind} heads shape their own; leave it out"
        )
    return head.drafter(target)


def _draft_model(
    name: str | Path | PreTrainedModel, config: EngineConfig, target: Target, codec: Codec | None
) -> DraftModel:
    named = isinstance(name, (str, Path))
    device = config.device or str(target.device)
    native = native_source(name, config)
    draft: Any = name
    if native is not None:
        draft = native.model()
    elif isinstance(name, (str, Path)):
        draft = native_file(name, config) or loading.load_model(
            name, config.dtype, device, trust_remote_code=config.trust_remote_code
        )
    draft_codec = codec_of(None, name, draft, config.trust_remote_code)
    wrong = None
    if draft.device != target.device:
        wrong = f"is on {draft.device}, the target on {target.device}; put both on one device"
    elif draft.config.is_encoder_decoder and not target.is_encoder_decoder:
        wrong = "is an encoder-decoder, and the target is none; name another"
    elif codec and draft_codec and not codec.same_ids(draft_codec) and target.is_encoder_decoder:
        wrong = f"has another tokenizer than {codec.name}; an encoder-decoder needs the same"
    if wrong is not None:
        whose = draft.config.name_or_path or type(draft).__name__
        raise DrafterMismatch(f"the draft model {whose} {wrong}")
    reader = _draft_reader(draft, draft_codec or codec, config.quantize_draft, named)
    if reader.is_encoder_decoder and target.is_encoder_decoder:
        cast("EncoderDecoder", reader).shares_encoder(cast("EncoderDecoder", target))
    if codec and draft_codec and not codec.same_ids(draft_codec):
        shared = SharedVocabulary(codec, draft_codec, target.vocab_size, reader.vocab_size)
        log.warning("note: the draft model %s has another tokenizer; %d tokens of the two are "
                    "shared, and drafted", draft_codec.name, shared.count)
        return OtherTokenizer(reader, shared.to(target.device), _shape(config.tree))
    mask = getattr(draft.config, "pard_token", None)
    if mask is not None and not reader.is_encoder_decoder:
        if config.tree is not None:
            why = f"a draft tree was given, and {reader.name} shapes its own; leave it out"
            raise BadInput(why)
        log.warning("note: drafting with the PARD model %s, mask token %s", reader.name, mask)
        return ParallelDraft(reader, target.vocab_size, int(mask), target.reads_trees)
    return DraftModel(reader, target.vocab_size, _shape(config.tree))


def _draft_reader(
    draft: PreTrainedModel, codec: Codec | None, quantize: str | None, named: bool
) -> Target:
    """The target that reads a draft model: quantised as asked. If nothing is asked, in 8 bits if
    it then predicts nearly the same, else unchanged."""
    if quantize is not None and quantize != "none":
        return variants.quantized(target_of(draft), quantize, give_up=named)
    in_file_format = isinstance(draft, NativeModel) and GGUFFile.recognises(draft.name)
    if named and codec is not None and quantize is None and not in_file_format:
        smaller = variants.int8_copy(target_of(draft), codec.encode(PASSAGE))
        if smaller is not None:
            return smaller
    if named and not isinstance(draft, NativeModel):
        pack_linears(draft)
    return target_of(draft)


def _shape(tree: TreeShape | str | None) -> TreeShape | None:
    """The tree shape of a draft model."""
    if isinstance(tree, str) and tree not in CHOICES:
        known = ", ".join(CHOICES)
        raise BadInput(f"the draft tree was {tree!r}; give a TreeShape, or one of {known}")
    return TreeShape(CHOICES[tree]) if isinstance(tree, str) else tree


def _is_model(drafter: object) -> TypeGuard[str | Path]:
    """Whether a drafter's name is a draft model."""
    if not isinstance(drafter, (str, Path)) or str(drafter) in HEADS:
        return False
    folder = loading.resolve(drafter)
    named = Path(folder, "config.json").is_file() and recognise(folder) is None
    return folder.lower().endswith(".gguf") or named


def _wrapped(target: Target, drafter: Drafter, wrap: Callable[[Target], Target]) -> Target:
    """The target with recorded graphs, and the draft model too, if possible. Texts stay the
    same."""
    if isinstance(drafter, DraftModel) and isinstance(drafter.model, Target):
        with suppress(UnsupportedModel):
            drafter.model = wrap(drafter.model)
    return wrap(target)
