"""decode_attention as two Triton kernels: parts of the cache, then the joining of parts.

The cache is cut into a fixed number of parts, so that a single sequence still fills the machine. Each program takes
one part of one key head, for all query heads of its group, and keeps a running maximum and sum (Milakov and
Gimelshein, arXiv 1805.02867). Parts beyond the current length are empty and cost a launch's share only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nybble.ops._declare import Implementation
from nybble.ops._early import begin, early

_KEYS = 64  # keys a step, at most
_STEP_BYTES = {2: 32768, 4: 16384}  # of its keys, by a value's bytes: float32 stages five times as much, of 99 KB
_PROGRAMS = 264  # enough to fill 132 multiprocessors twice


@triton.jit
def _part_kernel(
    q, k_cache, v_cache, position, part_o, part_ml,
    s, scale,
    GROUP: tl.constexpr, PARTS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BG: tl.constexpr, KEYS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    head, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin(EARLY)
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
    part_o, part_ml, o,
    GROUP: tl.constexpr, PARTS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    head, g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    p, d = tl.arange(0, BP), tl.arange(0, BD)
    row = (head * PARTS + p) * GROUP + g
    begin(EARLY)
    top = tl.load(part_ml + row * 2, p < PARTS, -float("inf"))
    total = tl.load(part_ml + row * 2 + 1, p < PARTS, 0.0)
    weight = tl.exp(top - tl.max(top, 0))
    inside = (p[:, None] < PARTS) & (d[None, :] < D)
    out = tl.sum(tl.load(part_o + row[:, None] * D + d[None, :], inside, 0.0) * weight[:, None], 0)
    tl.store(o + (head * GROUP + g) * D + d, (out / tl.sum(weight * total, 0)).to(o.dtype.element_ty), d < D)


def parts_for(heads: int, s: int) -> int:
    """Into how many parts the cache is cut: enough to fill the machine, none shorter than a step."""
    return max(1, min(64, _PROGRAMS // max(heads, 1), -(-s // _KEYS)))


def step_keys(columns: int, itemsize: int) -> int:
    """Keys of a step whose rows hold `columns` values: what shared memory has room for, 16 (a product's) to 64."""
    return max(16, min(_KEYS, _STEP_BYTES[itemsize] // (columns * itemsize)))


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
        group, parts, d, bd, bg, step_keys(bd, q.element_size()), num_warps=4, **early(q.device),
    )  # fmt: skip
    _join_kernel[(heads, group)](
        part_o, part_ml, o, group, parts, d, bd, triton.next_power_of_2(parts), num_warps=4, **early(q.device)
    )
    return o


def _supports(q: Tensor, k_cache: Tensor, v_cache: Tensor, position: Tensor) -> str | None:
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        return "caches have to be contiguous"
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"takes float32, bfloat16 and float16, got {q.dtype}"
    return f"D = {q.shape[-1]} is above 256" if q.shape[-1] > 256 else None


IMPLEMENTATIONS = (Implementation("decode_attention_triton", _triton, _supports, native=True),)
