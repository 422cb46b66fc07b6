"""A target that is a transformers module: read by our forward where that agrees with the module's
own, and otherwise by the module's own."""

from __future__ import annotations

import inspect
import weakref
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftproof.cache.current_read import forget_handed, recording
from draftproof.cache.kv_cache import KVCache, key_depths, tree_mask
from draftproof.cache.kv_layer import KVLayer
from draftproof.cache.layout import FAILURES, STATES, Layout, LogitScaling
from draftproof.cache.state_cache import BLOCK, StateCache
from draftproof.cache.text_order import TextOrder
from draftproof.cache.transformers_patches import Place, patch_decoder, placed
from draftproof.core.messages import Features, Reading
from draftproof.core.tree import TokenTree
from draftproof.errors import BadInput
from draftproof.forward.fast_forward import FastForward
from draftproof.forward.module_decoder import decoder_of, fits
from draftproof.model import inspection
from draftproof.model.autocast import reject_autocast, watch_autocast, without_autocast
from draftproof.model.facts import Facts
from draftproof.model.module_layout import layout_of
from draftproof.model.parallel import ALONE, ProcessGroup
from draftproof.model.target import Target
from draftproof.native.threads import torch_alone
from draftproof.weights.disk_cache import was_loaded_by_name
from draftproof.weights.packed_linear import JointLinear
from draftproof.weights.snapshot import Snapshot


class ModuleTarget(Target):
    """A target around a transformers module, which still belongs to the user and may be trained.

    Reads are checked at load: a small tree is compared with the model's own forward.
    """

    model: PreTrainedModel

    def __init__(
        self, model: PreTrainedModel, *, kv_cache: str | None = None, group: ProcessGroup = ALONE
    ) -> None:
        super().__init__(model.eval(), kv_cache=kv_cache, group=group)
        self.tolerance = inspection.tolerance_of(model)
        self._trims = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._takes_place = patch_decoder(model)
        self._packed = any(isinstance(module, JointLinear) for module in model.modules())
        self._seen, self._by_name = Snapshot.of(model), was_loaded_by_name(model)
        with torch.inference_mode(), self._as_loaded():
            # before the check, its own forward reads it
            self._adopt(Facts(self._learn_layout(), reads_trees=True), None)
            facts = inspection.inspect(self)
        self._adopt(facts, self.fast_forward(facts))
        self._seen = Snapshot.of(model)

    def _as_loaded(self) -> AbstractContextManager[object]:
        """A block that ignores the caller's autocast for a model that we loaded; the caller's own
        models are read as the caller would read them."""
        return without_autocast(self.device) if self._by_name else nullcontext()

    def fast_forward(self, facts: Facts) -> FastForward | None:
        """Our forward of the module if it fits and these facts allow it; otherwise None."""
        if not (facts.fast and self.group.is_single and fits(self.model)):
            return None
        try:
            decoder = decoder_of(self.model, facts.layout.windows, self.context)
        except FAILURES:                # an unusual part: the module's own forward runs
            return None
        return FastForward(decoder, use_kernels=facts.fused)

    def with_facts(self, facts: Facts) -> ModuleTarget:
        """This target with other facts."""
        other = self._copy()
        other._adopt(facts, self.fast_forward(facts))
        return other

    def hold_weakly(self) -> None:
        """Hold the module weakly from now on: an engine that is attached to a module must not keep
        it alive."""
        self._weak_model = weakref.ref(self.__dict__.pop("model"))

    def __getattr__(self, name: str) -> PreTrainedModel:
        held = self.__dict__.get("_weak_model") if name == "model" else None
        if held is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        model = held()
        if model is None:
            raise BadInput(f"the model {self.name} was deleted, which this engine ran; load it")
        return model

    def _learn_layout(self) -> Layout:
        """Find what each layer stores; refuse a model whose forward runs under autocast."""
        with watch_autocast(self.model) as dtypes:
            layout = self.find_layout()
        for dtype in dtypes:
            reject_autocast(self.name, self.dtype, self.device, dtype)
        return layout

    def find_layout(self) -> Layout:
        """Find what each layer stores."""
        return layout_of(self.model)

    def own_logits(self, tokens: Tensor) -> Tensor:
        """[B, S, V] the exact logits, from the model's own forward without a cache."""
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits

    def check_text(self, size: int) -> Tensor:
        """[size] random tokens, for the check at load."""
        dice = torch.Generator().manual_seed(0)
        return torch.randint(self.vocab_size, (size,), generator=dice).to(self.device)

    def check_cache(self, size: int) -> KVCache:
        """A cache of one row, for the check at load."""
        return self.plain_cache(1, size)

    def with_model(self, model: PreTrainedModel) -> ModuleTarget:
        other = self._copy()
        other.model, other._seen = model, Snapshot.of(model)
        if self.fast is not None:
            decoder = decoder_of(model, self.layout.windows, self.context)
            other.fast = self.fast.with_decoder(decoder)
        return other

    def refresh(self) -> None:
        """Adopt weights that were changed by a training step, a merged adapter or a loaded state.
        Raises BadInput for a model that was cast, moved, or put in training mode."""
        model, now = self.model, Snapshot.of(self.model)
        if model.training:
            raise BadInput(
                f"{self.name} was put in training mode, in which dropout changes what it writes; "
                "call its eval() first"
            )
        if (model.dtype, model.device) != (self.dtype, self.device):
            raise BadInput(
                f"{self.name} was {self.dtype} on {self.device} when it was loaded here and is "
                f"{model.dtype} on {model.device} now; load it here again"
            )
        if not self._by_name:
            reject_autocast(self.name, self.dtype, self.device)
        if self._seen.same(now):
            return
        self.__dict__.pop("native", None)
        if not now.same_structure(self._seen):
            with torch.inference_mode():
                layout = self._learn_layout()
                self._reject_other_vocabulary(layout)
                self._scaling = LogitScaling.of(model.config.get_text_config())
                self._adopt(Facts(layout, reads_trees=True), None)
                facts = inspection.for_its_cache(self, inspection.verify_forward(self))
            self._adopt(facts, self.fast_forward(facts))
        elif self.fast is not None:
            if now.hooks == self._seen.hooks and fits(model):
                decoder = decoder_of(model, self.layout.windows, self.context)
                self.fast = self.fast.with_decoder(decoder)
            else:
                with torch.inference_mode():
                    facts = inspection.for_its_cache(self, inspection.verify_forward(self))
                self._adopt(facts, self.fast_forward(facts))
        self._seen = now

    def _reject_other_vocabulary(self, layout: Layout) -> None:
        """Raise BadInput for a model whose vocabulary changed, since drafters know the old one."""
        if layout.vocab != self.vocab_size:
            raise BadInput(
                f"{self.name} had {self.vocab_size} tokens when it was loaded here and has "
                f"{layout.vocab} now; load it here again"
            )

    @property
    def weights_version(self) -> object:
        return self._seen

    def read(
        self, tree: TokenTree, cache: KVCache, *, first: int = 0, last_only: bool = False,
        hidden_layers: tuple[int, ...] = (),
    ) -> Reading:
        with self._as_loaded():
            return self._read(tree, cache, first, last_only, hidden_layers)

    def _read(
        self, tree: TokenTree, cache: KVCache, first: int, last_only: bool,
        hidden_layers: tuple[int, ...]
    ) -> Reading:
        if isinstance(cache, StateCache):
            return self._read_after_states(tree, cache, first, last_only, hidden_layers)
        if self.fast is not None:
            return super().read(
                tree, cache, first=first, last_only=last_only, hidden_layers=hidden_layers
            )
        tokens = tree.tokens[:, first:] if first else tree.tokens
        span, lengths = cache.write_at(first, tree.tokens.shape[1]), cache.lengths
        positions, place = tree.positions(lengths, self.context)[:, first:], None
        masks = self._masks(tree, lengths, span, first)
        if self._takes_place:
            keys = lengths[:, None] + key_depths(tree, lengths, span)[1]
            place = Place(positions, keys, self.context)
        with placed(place):
            return self._forward(tokens, masks, positions, cache, int(last_only), hidden_layers)

    def _read_after_states(
        self, tree: TokenTree, cache: StateCache, first: int, last_only: bool,
        hidden_layers: tuple[int, ...]
    ) -> Reading:
        """As `read`: read a block of every row, and take the requested nodes from it."""
        short = self._packed and tree.tokens.shape[1] - first <= BLOCK
        with torch_alone() if short else nullcontext():
            return self._read_block(tree, cache, first, last_only, hidden_layers)

    def _read_block(
        self, tree: TokenTree, cache: StateCache, first: int, last_only: bool,
        hidden_layers: tuple[int, ...]
    ) -> Reading:
        block = cache.block(tree, first)
        nodes, width = block.tree, block.tree.tokens.shape[1]
        positions = nodes.positions(block.start, self.context)
        masks = self._masks(nodes, block.start, cache.reserve(width), 0)
        parents, attention = None if nodes.is_chain else nodes.parents, None
        if set(self.layout.windows.values()) == {None}:
            attention = TextOrder.of(cache.kv_layers, block.start, nodes)
        offsets = torch.arange(tree.tokens.shape[1] - first)
        place = (block.skipped[:, None] + offsets).clamp(max=width - 1)
        last = place[:, -1:] if last_only else place
        kept = width - int(last.min()) if self._trims else width
        try:
            with recording(width, parents, attention):
                reading = self._forward(nodes.tokens, masks, positions, cache, kept, hidden_layers)
        finally:
            forget_handed()
        cache.was_read(block, first)
        last = last - (width - reading.logits.shape[1])
        return reading.gather(last.to(self.device), place.to(self.device))

    def _inputs(
        self, tokens: Tensor, masks: object, positions: Tensor, cache: KVCache
    ) -> dict[str, object]:
        """The arguments of the model's own forward for a read."""
        return {"input_ids": tokens, "attention_mask": masks, "position_ids": positions,
                self.layout.cache_name: cache.for_module()}

    def _forward(
        self, tokens: Tensor, masks: object, positions: Tensor, cache: KVCache, last: int,
        hidden_layers: tuple[int, ...]
    ) -> Reading:
        """Run the model's own forward; last: the number of last tokens with logits; 0: all."""
        out = self.model(
            **self._inputs(tokens.clamp(0, self.vocab_size - 1), masks, positions, cache),
            use_cache=True, output_hidden_states=bool(hidden_layers),
            **({"logits_to_keep": last} if last and self._trims else {})
        )
        hidden = out.decoder_hidden_states if self.is_encoder_decoder else out.hidden_states
        states = [hidden[layer] for layer in hidden_layers]
        logits = out.logits[:, -last:] if last else out.logits
        return Reading(logits, torch.stack(states, 2) if states else None)

    def features(
        self, tokens: Tensor, weights: Tensor, *, hidden_layers: tuple[int, ...] = (-1,),
        logits: bool = False
    ) -> Features:
        """Read whole texts without a cache, for training: tokens [B, S], padded on the right.

        weights: [B, S] passed through. hidden_layers: as in `read`. logits: also return logits
        after every token.
        """
        out = self.model(
            input_ids=tokens.clamp(0, self.vocab_size - 1), use_cache=False,
            output_hidden_states=True,
            **({"logits_to_keep": 1} if not logits and self._trims else {})
        )
        hidden = torch.stack([out.hidden_states[layer] for layer in hidden_layers], 2)
        return Features(tokens, hidden, weights, out.logits if logits else None)

    def embed(self, tokens: Tensor, raw: bool = False) -> Tensor:
        """[..., H] the model's own token embeddings, before later steps of some families; raw: as
        stored in the table."""
        table = self.model.get_input_embeddings()
        tokens = tokens.clamp(0, self.vocab_size - 1)
        return torch.nn.functional.embedding(tokens, table.weight) if raw else table(tokens)

    def unembed(self, hidden: Tensor, raw: bool = False) -> Tensor:
        """[..., V] logits of hidden states after the final norm, scaled or capped like the model's
        own; raw: as the head computes them."""
        # packed weights have no gradients
        packed = self.fast if torch.is_inference_mode_enabled() else None
        head = packed.head if packed is not None else self.model.get_output_embeddings()
        # DeepSpeed's need three dimensions
        wide = hidden if self.group.is_single else hidden.reshape(1, -1, hidden.shape[-1])
        logits = head(wide) if raw else self._scaling.apply(head(wide))
        if self.group.is_single:
            return logits
        return logits.reshape(*hidden.shape[:-1], logits.shape[-1])

    def plain_cache(self, rows: int, size: int, layer: type[KVLayer] = KVLayer) -> KVCache:
        if not self.has_states:
            return super().plain_cache(rows, size, layer)
        layout, single = self.layout, self.facts.single_steps
        return StateCache.for_states(
            layout.shapes, layout.states, rows, size, layout.dtype, self.device, layer, single
        )

    def _masks(
        self, tree: TokenTree, lengths: Tensor, span: int, first: int
    ) -> Tensor | dict[str, Tensor | None] | None:
        kinds: dict[str, Tensor | None] = {
            kind: tree_mask(tree, lengths, span, self.dtype, first, window,
                            kind == "chunked_attention")
            for kind, window in self.layout.windows.items()
        }
        if len(kinds) < 2:
            return next(iter(kinds.values()), None)
        return kinds | dict.fromkeys(STATES) if self.has_states else kinds
