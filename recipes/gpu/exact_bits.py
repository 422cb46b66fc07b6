"""Matrix products and attention whose bits for a token do not depend on how many are read with it.

Libraries choose tile shapes and split sums by the number of rows, so a token gets other bits when
it is verified among drafts than when it is decoded alone. Here every tile has one shape, every sum
runs over blocks in one order, and nothing is split between programs. The kernels are written in
Triton. They were run by its interpreter on a CPU (TRITON_INTERPRET=1) and never on a GPU; no engine
uses them yet. `first_contact.py` checks them on a GPU and measures what they cost.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS, INNER = 16, 64, 64
"""The tile of a product, whatever its shape: tensor cores take at least 16 rows."""
WIDEN = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton's interpreter multiplies no bfloat16; products of them are exact in float32."""
KEYS = 64
"""Keys that attention reads at a time."""


@triton.jit
def _product(
    left, right, out, rows, columns, inner, left_stride, right_stride, out_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, WIDEN: tl.constexpr,
) -> None:  # type: ignore[no-untyped-def]  # fmt: skip
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
    query, key, value, mask, out, queries, keys, group, scale, heads,
    WIDTH: tl.constexpr, KEYS: tl.constexpr,
) -> None:  # type: ignore[no-untyped-def]  # fmt: skip
    place, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at = tl.arange(0, WIDTH)
    q = tl.load(query + ((row * heads + head) * queries + place) * WIDTH + at).to(tl.float32)
    shared = (row * (heads // group) + head // group) * keys * WIDTH
    highest = tl.full((), float("-inf"), dtype=tl.float32)
    mass = tl.zeros((), dtype=tl.float32)
    total = tl.zeros((WIDTH,), dtype=tl.float32)
    for start in range(0, keys, KEYS):
        slot = start + tl.arange(0, KEYS)
        there = slot < keys
        seen = tl.load(mask + (row * queries + place) * keys + slot, mask=there, other=0) != 0
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


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Attention in which a program computes one query, so its bits depend on no other query.

    The sum runs over the slots of the cache in order. A token therefore gets the same bits alone
    and in a chain; a branch of a tree lies in other slots, and may round otherwise.

    Args:
        query: [B, heads, N, width]; the width is a power of two.
        key: [B, heads of the cache, S, width].
        value: As `key`.
        mask: Bool [B, N, S], true where a query may look.

    Returns:
        [B, heads, N, width].
    """
    rows, heads, queries, width = query.shape
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    seen = mask.to(torch.uint8).contiguous()
    _attend[(queries, heads, rows)](
        query.contiguous(), key.contiguous(), value.contiguous(), seen, out, queries, key.shape[2],
        heads // key.shape[1], width**-0.5, heads, width, KEYS)
    return out


def invariance(device: str, dtype: torch.dtype, widths: tuple[int, ...] = (1, 2, 17)) -> Any:
    """Largest differences of the first row's bits when others are read with it: of our product, of
    torch's, and of our attention; and the error of each against float64."""
    dice = torch.Generator().manual_seed(0)
    x = torch.randn(max(widths), 192, generator=dice).to(device, dtype)
    weight = torch.randn(100, 192, generator=dice).to(device, dtype)
    query, key, value = (torch.randn(1, heads, length, 32, generator=dice).to(device, dtype)
                         for heads, length in ((2, max(widths)), (1, 90), (1, 90)))
    mask = torch.ones(1, max(widths), 90, dtype=torch.bool, device=device).tril(70)
    alone = linear(x[:1], weight), x[:1] @ weight.T, attention(query[:, :, :1], key, value,
                                                               mask[:, :1])
    gaps = [0.0, 0.0, 0.0]
    for width in widths:
        among = (linear(x[:width], weight)[:1], (x[:width] @ weight.T)[:1],
                 attention(query[:, :, :width], key, value, mask[:, :width])[:, :, :1])
        gaps = [max(gap, float((before - after).abs().max()))
                for gap, before, after in zip(gaps, alone, among, strict=True)]
    exact = x.double() @ weight.double().T
    repeated = (part.double().repeat_interleave(2, 1) for part in (key, value))
    wanted = torch.nn.functional.scaled_dot_product_attention(
        query.double(), *repeated, attn_mask=mask[:, None])
    return {"our product": gaps[0], "torch's product": gaps[1], "our attention": gaps[2],
            "error of product": float((linear(x, weight).double() - exact).abs().max()),
            "error of attention": float(
                (attention(query, key, value, mask).double() - wanted).abs().max())}
