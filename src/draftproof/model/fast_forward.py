"""A lean forward for the common families: the model's own layers, called without the machinery around them.

The families differ in which of these parts they have (norms over heads and of what layers add, heads that turn in part or not
at all, windows and angles of several kinds, multipliers), so one forward driven by the model's modules serves them. It is
used where a load-time read agrees with the model's own forward, and nowhere else. What `fused` can read it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftproof.core.prefix import Prefix
from draftproof.core.tree import TokenTree
from draftproof.model.fused_forward import FusedForward
from draftproof.model.kv_cache import KVCache
from draftproof.model.masks import tree_mask
from draftproof.model.packed_linear import PackedLinear, PackedSlice, Whole, packable
from draftproof.native.kernels import Chains, DraftSampling
from draftproof.native.structures import Linear as Native
from draftproof.native.structures import Norm

FAMILIES = (
    "Gemma3ForCausalLM", "GraniteForCausalLM", "LlamaForCausalLM", "MinistralForCausalLM", "MistralForCausalLM",
    "Phi3ForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "SeedOssForCausalLM", "SmolLM3ForCausalLM",
)  # fmt: skip
ROTATIONS = ("default", "linear", "llama3", "longrope", "yarn")
"""Ways to turn heads that depend on a position alone: longrope as far as its first limit, where a target's context ends."""

GELU = "gelu_pytorch_tanh"
SHAPES = 64
"""Shapes of one forward that are compiled, at the most."""
QUERIES = 4
"""Attention is never asked for fewer: with AMX one query rounds differently from several, with AVX-512 alone up to three do."""

COPIED = 16 << 20
"""Bytes of a projection that may be held a second time."""

Linear = Callable[[Tensor], Tensor]


class Way(NamedTuple):
    """How heads see: whose angles they turn by, if there are several kinds, how many of their numbers turn, and how many
    positions back they see, if not all."""

    kind: str | None
    turned: int
    window: int | None


class _Layer(NamedTuple):
    before: Linear
    inner: Linear                   # queries, keys and values, one behind the other
    turned_norm: Linear | None      # over each head of queries and keys
    output: Linear
    mixed: Linear | None            # a norm of what attention adds
    after: Linear
    gate_up: Linear
    down: Linear
    fed: Linear | None              # a norm of what gates let through
    heads: int
    key_heads: int
    inner_size: int                 # of gates, and of what they let through
    scale: float
    way: int                        # of the ways its heads see
    weights: tuple[Tensor | None, ...]              # [.] float32, of norms: before, after, query, key, mixed, fed
    places: tuple[int | None, ...]                  # where these lie
    natives: tuple[Native | None, ...]              # inner, output, gate_up and down, where our kernels read them


class Tables(NamedTuple):
    """What lies between tokens and hidden states, as our kernels read it: embeddings [V, H], and the head if they do."""

    embeddings: Tensor
    head: Native | None
    owner: object                   # whose memory the head lies in

    @classmethod
    def of(cls, model: PreTrainedModel, lean: FastForward) -> Tables | None:
        """Of a model in bfloat16 on a CPU that has kernels; a head in another layout is copied if it is small."""
        if lean.fused is None:
            return None
        owner = None if lean.native_head is not None else _copied(model.get_output_embeddings())
        return cls(lean.embed.weight, lean.native_head if owner is None else owner.native, owner or lean)


def _copied(linear: nn.Module) -> PackedLinear | None:
    """A small projection to the vocabulary once more, as our kernels read it."""
    if not isinstance(linear, (nn.Linear, PackedLinear)) or linear.bias is not None:
        return None
    if 2 * linear.in_features * linear.out_features > COPIED:
        return None
    weight = linear.dense() if isinstance(linear, PackedLinear) else linear.weight.detach()
    with torch.device("meta"):
        own = nn.Linear(linear.in_features, linear.out_features, bias=False)
    own.weight = nn.Parameter(weight, requires_grad=False)
    made = PackedLinear(own, free=True) if packable(own) else None
    return made if made is not None and made.native is not None else None


class FastForward:
    """The decode forward of one model, with the model's own weights.

    windows: how many positions back attention sees, if not all, by kind of layer. context: positions the model knows.
    """

    def __init__(self, model: PreTrainedModel, windows: Mapping[str, int | None], context: int) -> None:
        body: Any = model.model
        self.windows, self.context = windows, context
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.hidden_size: int = model.config.hidden_size
        self.embed, self.rotary = body.embed_tokens, body.rotary_emb
        self.loud = _loud(model.config, body.embed_tokens)
        self.share = float(getattr(model.config, "residual_multiplier", 1.0))
        self.gelu = _gate(model.config) == GELU
        self.norm, self.last_weight = _norm(body.norm), _weight(body.norm)
        self.sums = Norm(_epsilon(body.norm), self.share)
        self.head_dim = int(body.layers[0].self_attn.head_dim)
        ways = [_way(body, number, windows) for number in range(len(body.layers))]
        self.ways = list(dict.fromkeys(ways))
        self.layers = [
            _layer(layer, self.head_dim, self.ways.index(way)) for layer, way in zip(body.layers, ways, strict=True)
        ]
        self.norm_types = {norm.weight.dtype for norm in body.modules() if type(norm) is type(body.norm)}
        self.native = not any(None in layer.natives for layer in self.layers)           # linear layers are our kernels' own
        head = _head(model.lm_head, free=self.native)
        self.head, self.native_head = _bare(head), _native(head)
        self.inner_sizes = sorted({layer.inner_size for layer in self.layers})
        self.sharing = self.layers[0].heads // self.layers[0].key_heads
        self.fused = FusedForward.of(self)
        self.forward: Callable[..., tuple[Tensor, Tensor | None]] = self._forward     # or the same, compiled

    def compile(self, head: nn.Module, backend: str) -> None:
        """Have the forward compiled for each shape it meets; `head` as the model has it, since what is packed is not traced."""
        self.head = _bare(head)
        dynamo: Any = torch._dynamo.config
        dynamo.recompile_limit = max(dynamo.recompile_limit, SHAPES)
        self.fused, self.forward = None, torch.compile(self._forward, backend=backend, dynamic=False, fullgraph=True)

    @staticmethod
    def fits(model: PreTrainedModel) -> bool:
        """Whether the model is built of the parts this forward knows, with nothing hooked into them.

        Never in float64: there the point is to agree with transformers, whose norms compute in float32 inside.
        """
        config = model.config
        return (
            type(model).__name__ in FAMILIES
            and model.dtype != torch.float64
            and _gate(config) in ("silu", GELU)
            and all(scaled in ROTATIONS for scaled in _rotations(config))
            and getattr(config, "attn_logit_softcapping", None) is None
            and not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        )

    def of(self, model: PreTrainedModel) -> FastForward:
        """The same for another model of this kind."""
        other = FastForward(model, self.windows, self.context)
        other.fused = other.fused if self.fused is not None else None
        return other

    def __call__(
        self, tokens: Tensor, tree: TokenTree, first: int, cache: KVCache, last_only: bool, hidden_layers: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """Read the nodes `first:`, whose tokens are `tokens` [B, W], into the scratch of the cache; absent ones as some token.

        Returns logits [B, W, V] (or [B, 1, V]) and tapped hidden states [B, W, T, H], as transformers counts them.
        """
        if self.fused is not None and self.fused.takes(tokens.shape[1], cache):
            cache.reserve(tree.tokens.shape[1])
            return self.fused(tokens, tree, first, cache, last_only, hidden_layers)
        span = cache.write_at(first, tree.tokens.shape[1])
        positions = tree.positions(cache.lengths, self.context)[:, first:]
        windows = dict.fromkeys(way.window for way in self.ways)
        masks = {window: tree_mask(tree, cache.lengths, span, self.dtype, first, window) for window in windows}
        return self.forward(tokens, positions, [masks[way.window] for way in self.ways], cache, last_only, hidden_layers)

    def embedded(self, tokens: Tensor) -> Tensor:
        """[..., H] hidden states before the first layer; of tokens that the model does not know those of some that it knows."""
        hidden = F.embedding(tokens.clamp(0, len(self.embed.weight) - 1), self.embed.weight)
        return hidden if self.loud == 1 else hidden * self.loud

    def angles(self, way: Way, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[B, W, D] cosines and sines of positions [B, W]; what does not turn has the angle 0."""
        cos, sin = self.rotary(hidden, positions, *([way.kind] if way.kind is not None else []))
        rest = self.head_dim - cos.shape[-1]
        return (F.pad(cos, (0, rest), value=1.0), F.pad(sin, (0, rest))) if rest else (cos, sin)

    def chain(self, prefix: Prefix, width: int, cache: KVCache, steps: int, nodes: int, draft_sampling: DraftSampling) -> Chains | None:
        """Of each row the root and a chain of at most `steps` tokens, drafted in one call; None where it cannot be.

        The likeliest `nodes` of all rows are among them; where a chain is not among these it need not go on.
        What rows lack before the root is read and committed, at most `width` tokens with the root. That lies in the scratch
        then, and so do the others, but for the last. The cache is bounded: no row of the prefix is longer.
        """
        if self.fused is None or not self.fused.takes(max(width, steps), cache):
            return None
        return self.fused.chain(prefix, width, cache, steps, nodes, draft_sampling)

    def _forward(
        self, tokens: Tensor, positions: Tensor, masks: list[Tensor], cache: KVCache, last_only: bool, hidden_layers: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]:
        hidden = self.embedded(tokens)
        folded = tokens.shape[1] * self.sharing          # queries of the heads that share keys are read as one head's
        copies = self.sharing * -(-QUERIES // folded)    # few queries take other kernels, which round in their own way
        seen = [
            (*self._turning(way, hidden, positions), mask.repeat(1, 1, copies, 1) if copies > 1 else mask)
            for way, mask in zip(self.ways, masks, strict=True)
        ]
        states = [hidden]
        for layer, store in zip(self.layers, cache.layers, strict=True):
            hidden = hidden + self._shared(self._attend(layer, store, layer.before(hidden), *seen[layer.way]), layer.mixed)
            gate, up = layer.gate_up(layer.after(hidden)).chunk(2, -1)
            opened = F.gelu(gate, approximate="tanh") if self.gelu else F.silu(gate)
            hidden = hidden + self._shared(layer.down(opened * up), layer.fed)
            states.append(hidden)
        states[-1] = hidden = self.norm(hidden)
        logits = self.head(hidden[:, -1:] if last_only else hidden)
        return logits, torch.stack([states[tap] for tap in hidden_layers], 2) if hidden_layers else None

    def _turning(self, way: Way, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[B, 1, W, D] cosines, and sines signed: to swap halves then turns by a quarter."""
        (cos, sin), half = self.angles(way, hidden, positions), way.turned // 2
        return cos[:, None], torch.cat([-sin[..., :half], sin[..., half:]], -1)[:, None]

    def _shared(self, delta: Tensor, norm: Linear | None) -> Tensor:
        """What a layer adds, as much of it as counts."""
        if norm is not None:
            return norm(delta)
        return delta if self.share == 1 else delta * self.share

    def _turned(self, way: Way, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Heads turned to their positions."""
        if not (half := way.turned // 2):
            return heads
        if 2 * half == self.head_dim:
            swapped = heads.roll(half, -1)
        else:
            swapped = torch.cat([heads[..., half : 2 * half], heads[..., :half], heads[..., 2 * half :]], -1)
        return torch.addcmul(heads * cos, swapped, sin)

    def _attend(self, layer: _Layer, store: Any, inputs: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        rows, width, _ = inputs.shape
        inner = layer.inner(inputs).view(rows, width, -1, self.head_dim).transpose(1, 2)    # [B, heads, W, D]
        turned, value = torch.split(inner, [layer.heads + layer.key_heads, layer.key_heads], 1)
        turned = turned if layer.turned_norm is None else layer.turned_norm(turned)
        turned = self._turned(self.ways[layer.way], turned, cos, sin)
        query, key = torch.split(turned, [layer.heads, layer.key_heads], 1)
        keys, values = store.update(key, value)
        folded = width * self.sharing
        query = query.reshape(rows, layer.key_heads, folded, self.head_dim)
        if mask.shape[2] > folded:
            query = query.repeat(1, 1, mask.shape[2] // folded, 1)
        out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=layer.scale)[:, :, :folded]
        out = out.reshape(rows, layer.heads, width, self.head_dim)
        return layer.output(out.transpose(1, 2).reshape(rows, width, -1))


def _way(body: Any, number: int, windows: Mapping[str, int | None]) -> Way:
    """How the heads of a layer see."""
    config, rotary = body.config, body.rotary_emb
    kinds = getattr(config, "layer_types", None)
    kind = str(kinds[number]) if kinds else ""
    window = windows[kind] if kind in windows else next(iter(windows.values()))
    several = not hasattr(rotary, "inv_freq")
    still = not getattr(body.layers[number].self_attn, "use_rope", True)
    angles = getattr(rotary, f"{kind}_inv_freq") if several else rotary.inv_freq
    return Way(kind if several else None, 0 if still else 2 * len(angles), window)


def _layer(layer: Any, head_dim: int, way: int) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    after, mixed, fed = layer.post_attention_layernorm, None, None
    if hasattr(layer, "pre_feedforward_layernorm"):                 # Gemma norms what it adds as well
        after, mixed, fed = layer.pre_feedforward_layernorm, after, layer.post_feedforward_layernorm
    head_norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    weights = tuple(None if one is None else _weight(one) for one in (layer.input_layernorm, after, *head_norms, mixed, fed))
    inner = _parts(attention, "qkv_proj", ("q_proj", "k_proj", "v_proj"))
    gate_up = _parts(mlp, "gate_up_proj", ("gate_proj", "up_proj"))
    heads = int(attention.config.num_attention_heads)
    key_heads = (sum(map(_width, inner)) // head_dim - heads) // 2
    return _Layer(
        before=_norm(layer.input_layernorm),
        inner=_together(*inner),
        turned_norm=_head_norm(attention, heads, key_heads) if hasattr(attention, "q_norm") else None,
        output=_bare(attention.o_proj),
        mixed=_norm(mixed) if mixed is not None else None,
        after=_norm(after),
        gate_up=_together(*gate_up),
        down=_bare(mlp.down_proj),
        fed=_norm(fed) if fed is not None else None,
        heads=heads,
        inner_size=sum(map(_width, gate_up)) // 2,
        key_heads=key_heads,
        scale=attention.scaling,
        way=way,
        weights=weights,
        places=tuple(None if one is None else one.data_ptr() for one in weights),
        natives=tuple(_native(one) for one in (inner[0], attention.o_proj, gate_up[0], mlp.down_proj)),
    )


def _parts(module: nn.Module, whole: str, parts: Sequence[str]) -> list[nn.Module]:
    """Layers that read the same inputs: one of this name where the family has them as one."""
    return [getattr(module, name) for name in ((whole,) if hasattr(module, whole) else parts)]


def _native(module: nn.Module) -> Native | None:
    """A layer, or the whole it is a part of, as our kernels read it."""
    whole = module.whole if isinstance(module, PackedSlice) else module
    return whole.native if isinstance(whole, Whole) else None


def _width(linear: Any) -> int:
    """Output features of a layer, packed or not."""
    return linear.stop - linear.start if isinstance(linear, PackedSlice) else int(linear.out_features)


def _head(linear: nn.Module, free: bool) -> nn.Module:
    """The projection to the vocabulary. Tied to the embeddings it was not packed; a small one is held twice, for speed."""
    if type(linear) is nn.Linear and linear.weight.nbytes <= COPIED and packable(linear):
        return PackedLinear(linear, free=free)
    return linear


def _together(*linears: nn.Module) -> Linear:
    """The outputs of several layers one behind the other; one multiplication where they were packed as one."""
    first = linears[0]
    if isinstance(first, PackedSlice):
        return _bare(first.whole)
    several = [_bare(linear) for linear in linears]
    return lambda inputs: torch.cat([linear(inputs) for linear in several], -1)


def _bare(module: nn.Module) -> Linear:
    """A module's forward without the call protocol around it."""
    if type(module) is nn.Linear and "forward" not in module.__dict__:     # some quantisers wrap it
        weight, bias = module.weight, module.bias
        return lambda inputs: F.linear(inputs, weight, bias)
    if type(module) is PackedLinear and module.native is None:
        packed, added, multiply = module.weight, module.bias, torch.ops.mkldnn._linear_pointwise.default
        return lambda inputs: multiply(inputs, packed, added, "none", [], "")
    forward: Linear = module.forward
    return forward


def _gate(config: Any) -> str | None:
    """What gates are, by name."""
    return getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None)


def _rotations(config: Any) -> list[str]:
    """How heads turn, by name; of each kind of layer where these differ."""
    rope = getattr(config, "rope_parameters", None) or {}
    several = [one for one in rope.values() if isinstance(one, dict)]
    return [one.get("rope_type", "default") for one in several or [rope]]


def _loud(config: Any, embed: Any) -> float:
    """What embeddings are multiplied by, as it is rounded before that."""
    scale = getattr(embed, "embed_scale", None)
    return float(getattr(config, "embedding_multiplier", 1.0) if scale is None else scale.to(embed.weight.dtype))


def _weight(norm: Any) -> Tensor:
    """[.] float32, what a norm multiplies by; Gemma's count from one."""
    weight: Tensor = norm.weight.detach().float()
    return 1.0 + weight if type(norm).__name__.startswith("Gemma") else weight


def _epsilon(norm: Any) -> float:
    return float(norm.eps if hasattr(norm, "eps") else norm.variance_epsilon)


def _norm(norm: Any) -> Linear:
    """Root-mean-square norm over the last dimension."""
    return _scaled(_weight(norm), norm.weight.dtype, norm.weight.shape[-1], _epsilon(norm))


def _head_norm(attention: Any, heads: int, key_heads: int) -> Linear:
    """The norms of queries and keys, each head with the weight of its kind, as one."""
    query, key = attention.q_norm, attention.k_norm
    weight = torch.cat([_weight(query).expand(heads, -1), _weight(key).expand(key_heads, -1)])[:, None]  # [heads, 1, D]
    return _scaled(weight, query.weight.dtype, weight.shape[-1], _epsilon(query))


def _scaled(weight: Tensor, dtype: torch.dtype, size: int, epsilon: float) -> Linear:
    """x / sqrt(mean x² + epsilon) * weight, in `dtype`, in few operators: sqrt(|x|² + n epsilon) is a hypotenuse."""
    if weight.device.type != "cpu" and weight.dim() == 1:
        there = weight.to(dtype)
        return lambda inputs: F.rms_norm(inputs, (size,), there, epsilon)       # one kernel there
    least = torch.tensor([(epsilon * size) ** 0.5], dtype=torch.float32, device=weight.device)
    factor = weight * size**0.5

    def normed(inputs: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(inputs, dim=-1, keepdim=True, dtype=torch.float32)
        return (inputs / length.hypot_(least) * factor).to(dtype)

    return normed
