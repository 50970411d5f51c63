"""decode_attention: one query token a sequence against a static cache of keys and values.

    o = softmax(q k^T / sqrt(D)) v      over the first `position + 1` entries of the cache

Query heads share key heads in groups (GQA). The cache is cut into a fixed number of parts, so that a single sequence
still fills the machine: each program takes one part of one key head, for all query heads of its group, and keeps a
running maximum and sum (Milakov and Gimelshein, arXiv 1805.02867); a second kernel joins the parts. Parts beyond the
current length are empty and cost a launch's share only; the length is read from device memory, so that one captured
graph serves every step. Bytes: the valid part of the cache, once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nybble.ops._choose import choose
from nybble.ops._declare import Agreement, Cost, Implementation, Op

_KEYS = 64  # keys a step
_PROGRAMS = 264  # enough to fill 132 multiprocessors twice


def decode_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, position: Tensor) -> Tensor:
    """[B, Hq, D] in q.dtype.

    Args:
        q: [B, Hq, D], float32, bfloat16 or float16.
        k_cache, v_cache: [B, Hkv, S, D], contiguous, Hq a multiple of Hkv.
        position: int32 [1], the last valid entry of the cache.
    """
    return choose(DECODE_ATTENTION, q.device.type, q, k_cache, v_cache, position).run(q, k_cache, v_cache, position)


def decode_attention_reference(q: Tensor, k_cache: Tensor, v_cache: Tensor, position: Tensor) -> Tensor:
    """The definition, in float64."""
    batch, kv_heads, s, d = k_cache.shape
    grouped = q.view(batch, kv_heads, q.shape[1] // kv_heads, d).double()
    scores = grouped @ k_cache.double().transpose(-1, -2) / math.sqrt(d)
    beyond = torch.arange(s, device=q.device) > position
    weights = scores.masked_fill(beyond, -math.inf).softmax(-1)
    values = v_cache.double().masked_fill(beyond[:, None], 0)
    return (weights @ values).view(q.shape).to(q.dtype)


@triton.jit
def _part_kernel(
    q: tl.tensor, k_cache: tl.tensor, v_cache: tl.tensor, position: tl.tensor, part_o: tl.tensor, part_ml: tl.tensor,
    s: tl.tensor, scale: tl.tensor,
    GROUP: tl.constexpr, PARTS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BG: tl.constexpr, KEYS: tl.constexpr,
) -> None:  # fmt: skip
    head, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(position) + 1
    span = tl.cdiv(tl.cdiv(length, PARTS), KEYS) * KEYS
    g, d, key = tl.arange(0, BG), tl.arange(0, BD), tl.arange(0, KEYS)
    query = tl.load(q + (head * GROUP + g[:, None]) * D + d[None, :], (g[:, None] < GROUP) & (d[None, :] < D), 0.0)
    top = tl.full([BG], -float("inf"), tl.float32)
    total = tl.zeros([BG], tl.float32)
    out = tl.zeros([BG, BD], tl.float32)
    for start in range(part * span, tl.minimum(length, (part + 1) * span), KEYS):
        valid = start + key < length
        at = (head * s + start + key).to(tl.int64)
        keys = tl.load(k_cache + at[None, :] * D + d[:, None], valid[None, :] & (d[:, None] < D), 0.0)
        scores = tl.dot(query, keys, input_precision="ieee") * scale
        scores = tl.where(valid[None, :], scores, -float("inf"))
        peak = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp(scores - peak[:, None])
        shrink = tl.exp(top - peak)
        values = tl.load(v_cache + at[:, None] * D + d[None, :], valid[:, None] & (d[None, :] < D), 0.0)
        out = out * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        top = peak
    row = (head * PARTS + part) * GROUP + g
    tl.store(part_o + row[:, None] * D + d[None, :], out, (g[:, None] < GROUP) & (d[None, :] < D))
    tl.store(part_ml + row * 2, top, g < GROUP)
    tl.store(part_ml + row * 2 + 1, total, g < GROUP)


@triton.jit
def _join_kernel(
    part_o: tl.tensor, part_ml: tl.tensor, o: tl.tensor,
    GROUP: tl.constexpr, PARTS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BP: tl.constexpr,
) -> None:  # fmt: skip
    head, g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    p, d = tl.arange(0, BP), tl.arange(0, BD)
    row = (head * PARTS + p) * GROUP + g
    top = tl.load(part_ml + row * 2, p < PARTS, -float("inf"))
    total = tl.load(part_ml + row * 2 + 1, p < PARTS, 0.0)
    weight = tl.exp(top - tl.max(top, 0))
    inside = (p[:, None] < PARTS) & (d[None, :] < D)
    out = tl.sum(tl.load(part_o + row[:, None] * D + d[None, :], inside, 0.0) * weight[:, None], 0)
    tl.store(o + (head * GROUP + g) * D + d, (out / tl.sum(weight * total, 0)).to(o.dtype.element_ty), d < D)


def parts_for(heads: int, s: int) -> int:
    """Into how many parts the cache is cut: enough to fill the machine, none shorter than a step."""
    return max(1, min(64, _PROGRAMS // max(heads, 1), -(-s // _KEYS)))


def _triton(q: Tensor, k_cache: Tensor, v_cache: Tensor, position: Tensor) -> Tensor:
    batch, kv_heads, s, d = k_cache.shape
    heads, group = batch * kv_heads, q.shape[1] // kv_heads
    parts = parts_for(heads, s)
    o = torch.empty_like(q, memory_format=torch.contiguous_format)
    if not heads:
        return o
    part_o = torch.empty((heads, parts, group, d), dtype=torch.float32, device=q.device)
    part_ml = torch.empty((heads, parts, group, 2), dtype=torch.float32, device=q.device)
    bd, bg = max(16, triton.next_power_of_2(d)), max(16, triton.next_power_of_2(group))
    _part_kernel[(heads, parts)](
        q.contiguous(), k_cache, v_cache, position, part_o, part_ml, s, d**-0.5,
        group, parts, d, bd, bg, _KEYS, num_warps=4,
    )  # fmt: skip
    _join_kernel[(heads, group)](part_o, part_ml, o, group, parts, d, bd, triton.next_power_of_2(parts), num_warps=4)
    return o


def _supports(q: Tensor, k_cache: Tensor, v_cache: Tensor, position: Tensor) -> str | None:
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        return "caches have to be contiguous"
    return f"D = {q.shape[-1]} is above 256" if q.shape[-1] > 256 else None


def cases(device: str = "cpu") -> Iterator[tuple[str, tuple[Any, ...]]]:
    """(label, arguments): grouped heads, head sizes that are no powers of two, the first token, a full cache; NaN
    beyond the length, which must not be seen."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 9, 3, 64, 200, 77), (2, 4, 4, 40, 65, 0), (3, 8, 1, 72, 128, 127), (0, 2, 1, 64, 8, 1),
              (1, 2, 2, 128, 300, 299), (1, 4, 2, 16, 64, 63))  # fmt: skip
    for number, (batch, hq, hkv, d, s, p) in enumerate(shapes):
        dtype = (torch.float32, torch.bfloat16, torch.float16)[number % 3]
        q = torch.randn(batch, hq, d, generator=generator).to(device, dtype)
        caches = torch.randn(2, batch, hkv, s, d, generator=generator).to(device, dtype)
        caches[..., p + 1 :, :] = math.nan
        position = torch.tensor([p], dtype=torch.int32, device=device)
        yield f"B{batch}-H{hq}-{hkv}-D{d}-S{s}-{dtype}", (q, caches[0], caches[1], position)


def cost(q: Tensor, k_cache: Tensor, v_cache: Tensor, position: Tensor) -> Cost:
    """Both products over the whole cache (the length is on the device), the caches read once."""
    group = q.shape[1] // k_cache.shape[1]
    return Cost(4.0 * group * k_cache.numel(), 2.0 * k_cache.numel() * k_cache.element_size())


DECODE_ATTENTION = Op(
    name="decode_attention",
    reference=decode_attention_reference,
    # Weights are rounded to the values' dtype before the second product, as every flash attention does.
    agreement=Agreement({torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-18}),
    cases=cases,
    cost=cost,
    size=lambda *args: 0.0,
    homes={"cuda": "nybble.ops.decode_attention"},
    fallback=Implementation("decode_attention_torch", decode_attention_reference, lambda *args: None, native=True),
)
IMPLEMENTATIONS = (Implementation("decode_attention_triton", _triton, _supports, native=True),)
