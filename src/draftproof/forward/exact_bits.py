# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator,no-untyped-def"
"""Products, attention and norms that give a token the same bits however many are read with it.

Libraries choose tile shapes and split sums by the number of rows, so a token gets different bits
when it is verified among drafts and when it is decoded alone. Here all tiles have one shape, every
sum runs over blocks in a fixed order, and no sum is split between programs. Attention sums over the
keys that a query sees in text order, wherever a tree put them. The kernels are written in
Triton. They were run by its interpreter on a CPU (TRITON_INTERPRET=1) and never on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.overrides import TorchFunctionMode

from draftproof.errors import UnsupportedModel

ROWS, COLUMNS, INNER = 16, 64, 64
"""The tile of a product, whatever its shape: tensor cores take at least 16 rows."""
WIDEN = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton's interpreter multiplies no bfloat16; products of them are exact in float32."""
KEYS = 64
"""Keys that attention reads at a time."""
Dims = int | Sequence[int] | None
"""Dimensions to sum over, as torch takes them; None: all."""


@triton.jit
def _product(
    left, right, out, rows, columns, inner, left_stride, right_stride, out_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, WIDEN: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, inner, INNER):
        place = start + tl.arange(0, INNER)
        a = tl.load(left + row[:, None] * left_stride + place[None, :],
                    mask=(row[:, None] < rows) & (place[None, :] < inner), other=0.0)
        b = tl.load(right + column[None, :] * right_stride + place[:, None],
                    mask=(column[None, :] < columns) & (place[:, None] < inner), other=0.0)
        if WIDEN:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, b, total, input_precision="ieee")
    tl.store(out + row[:, None] * out_stride + column[None, :],
             total.to(out.dtype.element_ty),
             mask=(row[:, None] < rows) & (column[None, :] < columns))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`; the bits of a row depend on that row and the weights alone.

    Args:
        x: [..., inner].
        weight: [columns, inner].
        bias: [columns], or None.

    Returns:
        [..., columns], in the dtype of `x`; sums are in float32.
    """
    flat, columns = x.reshape(-1, x.shape[-1]).contiguous(), len(weight)
    weight = weight.contiguous()
    out = torch.empty(len(flat), columns, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(len(flat), ROWS), triton.cdiv(columns, COLUMNS))
    _product[grid](flat, weight, out, len(flat), columns, flat.shape[1], flat.stride(0),
                   weight.stride(0), out.stride(0), ROWS, COLUMNS, INNER, WIDEN)
    out = out if bias is None else out + bias
    return out.reshape(*x.shape[:-1], columns)


@triton.jit
def _attend(
    query, key, value, order, count, out, queries, keys, group, scale, heads,
    WIDTH: tl.constexpr, KEYS: tl.constexpr,
) -> None:  # fmt: skip
    place, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at = tl.arange(0, WIDTH)
    q = tl.load(query + ((row * heads + head) * queries + place) * WIDTH + at).to(tl.float32)
    shared = (row * (heads // group) + head // group) * keys * WIDTH
    highest = tl.full((), float("-inf"), dtype=tl.float32)
    mass = tl.zeros((), dtype=tl.float32)
    total = tl.zeros((WIDTH,), dtype=tl.float32)
    visible = tl.load(count + row * queries + place)
    for start in range(0, keys, KEYS):
        number = start + tl.arange(0, KEYS)
        there = number < keys
        seen = number < visible
        slot = tl.load(order + (row * queries + place) * keys + number, mask=there, other=0)
        where = shared + slot[:, None] * WIDTH + at[None, :]
        k = tl.load(key + where, mask=there[:, None], other=0.0).to(tl.float32)
        v = tl.load(value + where, mask=there[:, None], other=0.0).to(tl.float32)
        score = tl.where(seen, tl.sum(k * q[None, :], axis=1) * scale, float("-inf"))
        top = tl.maximum(highest, tl.max(score, axis=0))
        safe = tl.where(top == float("-inf"), 0.0, top)
        weight = tl.exp(score - safe)
        fade = tl.exp(highest - safe)
        mass = mass * fade + tl.sum(weight, axis=0)
        total = total * fade + tl.sum(weight[:, None] * v, axis=0)
        highest = top
    tl.store(out + ((row * heads + head) * queries + place) * WIDTH + at,
             (total / mass).to(out.dtype.element_ty))


def in_order(mask: Tensor) -> tuple[Tensor, Tensor]:
    """The slots that each query sees, in text order: a path of a tree lies in ascending slots, as
    the text before it does.

    Args:
        mask: Bool [B, N, S], true where a query may look.

    Returns:
        [B, N, S] slots, with visible ones first, and [B, N] the numbers of visible slots.
    """
    order = mask.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
    return order, mask.sum(-1)


def attention(
    query: Tensor, key: Tensor, value: Tensor, order: Tensor, count: Tensor, scale: float
) -> Tensor:
    """Attention in which a program computes one query, so its bits depend on no other query.

    Args:
        query: [B, heads, N, width]; the width is a power of two.
        key: [B, heads of the cache, S, width].
        value: As `key`.
        order: [B, N, S] slots from `in_order`, in which the sum runs.
        count: [B, N] counts from `in_order`.
        scale: The factor of the scores.

    Returns:
        [B, heads, N, width].
    """
    rows, heads, queries, width = query.shape
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    _attend[(queries, heads, rows)](
        query.contiguous(), key.contiguous(), value.contiguous(), order.contiguous(),
        count.contiguous(), out, queries, key.shape[2], heads // key.shape[1], scale, heads,
        width, KEYS)
    return out


@triton.jit
def _sum(numbers, out, size, WIDTH: tl.constexpr) -> None:
    row, at = tl.program_id(0), tl.arange(0, WIDTH)
    part = tl.load(numbers + row * size + at, mask=at < size, other=0.0)
    tl.store(out + row, tl.sum(part, axis=0))


def row_sum(x: Tensor) -> Tensor:
    """[..., 1] sums over the last dimension, in float32, each row by itself."""
    size = x.shape[-1]
    flat = x.float().reshape(-1, size).contiguous()
    out = torch.empty(len(flat), 1, dtype=torch.float32, device=x.device)
    _sum[(len(flat),)](flat, out, size, triton.next_power_of_2(size))
    return out.reshape(*x.shape[:-1], 1)


def _mean(x: Tensor, dim: Dims = -1, keepdim: bool = False, **more: torch.dtype | None) -> Tensor:
    _last_alone("mean", x, dim)
    out = (row_sum(x) / x.shape[-1]).to(more.get("dtype") or x.dtype)
    return out if keepdim else out[..., 0]


def _total(x: Tensor, dim: Dims = -1, keepdim: bool = False, **more: torch.dtype | None) -> Tensor:
    _last_alone("sum", x, dim)
    out = row_sum(x).to(more.get("dtype") or x.dtype)
    return out if keepdim else out[..., 0]


def _length(
    x: Tensor, ord: float = 2, dim: Dims = -1, keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    _last_alone("vector_norm", x, dim)
    out = row_sum(x.float().square()).sqrt().to(dtype or x.dtype)
    return out if keepdim and ord == 2 else out[..., 0]


def _rms_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    least = torch.finfo(x.dtype).eps if eps is None else eps
    normed = x.float() * (row_sum(x.float().square()) / x.shape[-1] + least).rsqrt()
    return (normed if weight is None else normed * weight.float()).to(x.dtype)


def _layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5
) -> Tensor:  # fmt: skip
    middle = x.float() - row_sum(x) / x.shape[-1]
    normed = middle * (row_sum(middle.square()) / x.shape[-1] + eps).rsqrt()
    normed = normed if weight is None else normed * weight.float()
    return (normed if bias is None else normed + bias.float()).to(x.dtype)


def _last_alone(name: str, x: Tensor, dim: Dims) -> None:
    dims = [dim] if isinstance(dim, int) else list(dim or range(x.dim()))
    if [place % x.dim() for place in dims] != [x.dim() - 1]:
        raise UnsupportedModel(f"a {name} over other dimensions than the last would not keep bits")


def _matmul(left: Tensor, right: Tensor, *args: object, **more: object) -> Tensor:
    """The product of a column and a row, such as positions and frequencies, which sums nothing."""
    if left.shape[-1] != 1:
        raise UnsupportedModel("a matrix product other than of a linear layer would not keep bits")
    return left * right


class ExactBits(TorchFunctionMode):
    """A block in which these kernels compute a forward's sums. An operator without a kernel here,
    whose order of summing may depend on other rows, raises UnsupportedModel."""

    def __init__(self) -> None:
        super().__init__()
        self._orders = dict[int, tuple[Tensor, Tensor, Tensor]]()      # by mask, which is kept

    def __torch_function__(
        self, function: Callable[..., object], types: object, args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:  # fmt: skip
        if function is F.scaled_dot_product_attention:
            return self._attention(*args, **(kwargs or {}))
        if (exact := REPLACED.get(function)) is not None:
            return exact(*args, **(kwargs or {}))
        if getattr(function, "__name__", "") in REFUSED:
            raise UnsupportedModel(f"its forward calls {function.__name__}, which sums in an order "
                                   "that depends on what else is read")
        return function(*args, **(kwargs or {}))

    def _attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if attn_mask is None or attn_mask.shape[1] != 1:
            raise UnsupportedModel("attention without a mask, or with one for each head, would not "
                                   "keep bits")
        if id(attn_mask) not in self._orders:
            mask = attn_mask if attn_mask.dtype == torch.bool else attn_mask == 0
            mask = mask[:, 0].expand(len(query), -1, -1)
            self._orders[id(attn_mask)] = (attn_mask, *in_order(mask))
        _, order, count = self._orders[id(attn_mask)]
        return attention(query, key, value, order, count, scale or query.shape[-1] ** -0.5)


REPLACED: dict[Callable[..., object], Callable[..., Tensor]] = {
    F.linear: linear, F.rms_norm: _rms_norm, F.layer_norm: _layer_norm,
    torch.linalg.vector_norm: _length, torch.mean: _mean, Tensor.mean: _mean, torch.sum: _total,
    Tensor.sum: _total, torch.matmul: _matmul, Tensor.matmul: _matmul, Tensor.__matmul__: _matmul,
}
"""Functions of torch, and what computes them here."""
REFUSED = {"bmm", "baddbmm", "mm", "addmm", "einsum", "conv1d", "softmax", "log_softmax",
           "_grouped_mm", "index_add", "index_add_", "scatter_add", "logsumexp", "var", "norm"}
"""Functions of torch that a forward may not call."""


def invariance(
    device: str, dtype: torch.dtype, widths: tuple[int, ...] = (1, 2, 17)
) -> dict[str, float]:
    """Measure the largest change of the first row when others are read with it, for our product,
    torch's, and our attention; and the error of each against float64."""
    dice = torch.Generator().manual_seed(0)
    x = torch.randn(max(widths), 192, generator=dice, dtype=torch.float32).to(device, dtype)
    weight = torch.randn(100, 192, generator=dice, dtype=torch.float32).to(device, dtype)
    query, key, value = (
        torch.randn(1, heads, length, 32, generator=dice, dtype=torch.float32).to(device, dtype)
        for heads, length in ((2, max(widths)), (1, 90), (1, 90)))
    mask = torch.ones(1, max(widths), 90, dtype=torch.bool, device=device).tril(70)
    scale = query.shape[-1] ** -0.5

    def attended(width: int) -> Tensor:
        return attention(query[:, :, :width], key, value, *in_order(mask[:, :width]), scale)

    alone = linear(x[:1], weight), x[:1] @ weight.T, attended(1)
    gaps = [0.0, 0.0, 0.0]
    for width in widths:
        among = (linear(x[:width], weight)[:1], (x[:width] @ weight.T)[:1],
                 attended(width)[:, :, :1])
        gaps = [max(gap, float((before - after).abs().max()))
                for gap, before, after in zip(gaps, alone, among, strict=True)]
    exact = x.double() @ weight.double().T
    keys, values = (part.double().repeat_interleave(2, 1) for part in (key, value))
    wanted = torch.nn.functional.scaled_dot_product_attention(
        query.double(), keys, values, attn_mask=mask[:, None])
    return {"our product": gaps[0], "torch's product": gaps[1], "our attention": gaps[2],
            "error of product": float((linear(x, weight).double() - exact).abs().max()),
            "error of attention": float(
                (attended(max(widths)).double() - wanted).abs().max())}
