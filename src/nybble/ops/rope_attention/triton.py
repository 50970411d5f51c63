"""rope_attention_ as one Triton kernel; no second one joins the parts, whoever ends last does.

The cache is cut into parts, so that a single sequence still fills the machine. A program takes one part of one key
head, for all query heads of its group, and keeps a running maximum and sum (Milakov and Gimelshein, arXiv 1805.02867).
The new token is where part 0 starts from, so that nobody waits for an entry of the cache that is being written. Each
part leaves its sums and takes a number; who draws the last one joins them and sets the count back. The length is
spread over as many parts as have work; the rest end at once.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from nybble.ops._declare import Implementation
from nybble.ops._early import begin, early, fetch, fetching, spare

_KEYS, _WARPS = 64, 4  # keys a step
_PROGRAMS = 264  # enough to fill 132 multiprocessors twice
_MOST_PARTS = 16  # joined at once
_JOINED = 8192  # values that a program holds while it joins
_LOG2E = math.log2(math.e)


@triton.jit
def rotated(low, high, cos, sin, HALF: tl.constexpr):
    """Both halves turned, products and sums rounded to their dtype; `cos` and `sin` are the token's rows."""
    d = tl.arange(0, low.shape[-1])
    c0, c1 = tl.load(cos + d, d < HALF, 0.0).to(tl.float32), tl.load(cos + HALF + d, d < HALF, 0.0).to(tl.float32)
    s0, s1 = tl.load(sin + d, d < HALF, 0.0).to(tl.float32), tl.load(sin + HALF + d, d < HALF, 0.0).to(tl.float32)
    dtype = low.dtype
    a, b = low.to(tl.float32), high.to(tl.float32)
    first = (a * c0).to(dtype).to(tl.float32) - (b * s0).to(dtype).to(tl.float32)
    second = (b * c1).to(dtype).to(tl.float32) + (a * s1).to(dtype).to(tl.float32)
    return first.to(dtype), second.to(dtype)


@triton.jit
def _attend(
    q_low, q_high, k_cache, v_cache, base, first, last, scale, top, total, low, high,
    D: tl.constexpr, BH: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The running maximum, sum and values after keys [first, last) of the cache's rows from `base` on."""
    d, key = tl.arange(0, BH), tl.arange(0, KEYS)
    HALF: tl.constexpr = D // 2
    for start in range(first, last, KEYS):
        valid = start + key < last
        at = (base + start + key) * D
        across, along = valid[None, :] & (d[:, None] < HALF), valid[:, None] & (d[None, :] < HALF)
        k_low = tl.load(k_cache + at[None, :] + d[:, None], across, 0.0)
        k_high = tl.load(k_cache + at[None, :] + HALF + d[:, None], across, 0.0)
        scores = tl.dot(q_low, k_low, input_precision="ieee")
        scores = tl.dot(q_high, k_high, scores, input_precision="ieee") * scale
        scores = tl.where(valid[None, :], scores, -float("inf"))
        peak = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - peak[:, None])
        shrink = tl.exp2(top - peak)
        v_low = tl.load(v_cache + at[:, None] + d[None, :], along, 0.0)
        v_high = tl.load(v_cache + at[:, None] + HALF + d[None, :], along, 0.0)
        low = tl.dot(weights.to(v_low.dtype), v_low, low * shrink[:, None], input_precision="ieee")
        high = tl.dot(weights.to(v_high.dtype), v_high, high * shrink[:, None], input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        top = peak
    return top, total, low, high


@triton.jit
def _join(part_o, part_ml, o, head, parts, GROUP: tl.constexpr, PARTS: tl.constexpr, D: tl.constexpr,
          BG: tl.constexpr, BD: tl.constexpr, JOIN: tl.constexpr):  # fmt: skip
    """The sums of `parts` parts of a head, JOIN at a time, and their quotient. Read past the L1 cache: others wrote."""
    p, g, d = tl.arange(0, JOIN), tl.arange(0, BG), tl.arange(0, BD)
    top = tl.full([BG], -float("inf"), tl.float32)
    total = tl.zeros([BG], tl.float32)
    out = tl.zeros([BG, BD], tl.float32)
    for start in range(0, parts, JOIN):
        row = (head * PARTS + start + p)[:, None] * GROUP + g[None, :]
        inside = (start + p < parts)[:, None] & (g < GROUP)[None, :]
        tops = tl.load(part_ml + row * 2, inside, -float("inf"), cache_modifier=".cg")
        totals = tl.load(part_ml + row * 2 + 1, inside, 0.0, cache_modifier=".cg")
        whole = inside[:, :, None] & (d < D)[None, None, :]
        values = tl.load(part_o + row[:, :, None] * D + d[None, None, :], whole, 0.0, cache_modifier=".cg")
        peak = tl.maximum(top, tl.max(tops, 0))
        weights = tl.where(inside, tl.exp2(tops - peak[None, :]), 0.0)
        shrink = tl.exp2(top - peak)
        out = out * shrink[:, None] + tl.sum(values * weights[:, :, None], 0)
        total = total * shrink + tl.sum(totals * weights, 0)
        top = peak
    at = (head * GROUP + g)[:, None] * D + d[None, :]
    tl.store(o + at, (out / total[:, None]).to(o.dtype.element_ty), (g < GROUP)[:, None] & (d < D)[None, :])


@triton.jit
def _part(
    head, part, qkv, cos, sin, k_cache, v_cache, position, turns, part_o, part_ml, o, s, scale, kv_heads,
    EARLY: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr, D: tl.constexpr, BG: tl.constexpr, BJ: tl.constexpr,
    BH: tl.constexpr, BD: tl.constexpr, KEYS: tl.constexpr, JOIN: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = D // 2
    g, d = tl.arange(0, BG), tl.arange(0, BH)
    within = d < HALF
    token = qkv + (head // kv_heads) * ((GROUP + 2) * kv_heads * D)
    queries, k_new = token + (head % kv_heads) * (GROUP * D), token + (GROUP * kv_heads + head % kv_heads) * D
    v_new = k_new + kv_heads * D
    rows = (g[:, None] < GROUP) & within[None, :]
    begin(EARLY)
    length = tl.load(position)
    q_low = tl.load(queries + g[:, None] * D + d[None, :], rows, 0.0)
    q_high = tl.load(queries + g[:, None] * D + HALF + d[None, :], rows, 0.0)
    k_low, k_high = tl.load(k_new + d, within, 0.0), tl.load(k_new + HALF + d, within, 0.0)
    v_low, v_high = tl.load(v_new + d, within, 0.0), tl.load(v_new + HALF + d, within, 0.0)
    q_low, q_high = rotated(q_low, q_high, cos, sin, HALF)
    k_low, k_high = rotated(k_low, k_high, cos, sin, HALF)
    span = tl.maximum(tl.cdiv(tl.cdiv(length, PARTS), KEYS), 1) * KEYS
    parts = tl.maximum(tl.cdiv(length, span), 1)
    if part < parts:
        own = part == 0
        if own:
            entry = (head * s + length) * D + d
            tl.store(k_cache + entry, k_low, within)
            tl.store(k_cache + entry + HALF, k_high, within)
            tl.store(v_cache + entry, v_low, within)
            tl.store(v_cache + entry + HALF, v_high, within)
        score = tl.sum(q_low.to(tl.float32) * k_low.to(tl.float32)[None, :], 1)
        score += tl.sum(q_high.to(tl.float32) * k_high.to(tl.float32)[None, :], 1)
        top = tl.where(own, score * scale, -float("inf"))
        total = tl.where(own, 1.0, 0.0) + tl.zeros([BG], tl.float32)
        low = tl.where(own, v_low.to(tl.float32), 0.0)[None, :] + tl.zeros([BG, BH], tl.float32)
        high = tl.where(own, v_high.to(tl.float32), 0.0)[None, :] + tl.zeros([BG, BH], tl.float32)
        top, total, low, high = _attend(
            q_low, q_high, k_cache, v_cache, head * s, part * span, tl.minimum(length, (part + 1) * span), scale,
            top, total, low, high, D, BH, KEYS,
        )  # fmt: skip
        if parts == 1:
            at = (head * GROUP + g)[:, None] * D + d[None, :]
            tl.store(o + at, (low / total[:, None]).to(o.dtype.element_ty), rows)
            tl.store(o + at + HALF, (high / total[:, None]).to(o.dtype.element_ty), rows)
        else:
            row = (head * PARTS + part) * GROUP + g
            tl.store(part_o + row[:, None] * D + d[None, :], low, rows)
            tl.store(part_o + row[:, None] * D + HALF + d[None, :], high, rows)
            tl.store(part_ml + row * 2, top, g < GROUP)
            tl.store(part_ml + row * 2 + 1, total, g < GROUP)
            tl.debug_barrier()  # every thread's sums are stored before one of them takes the number
            if tl.atomic_add(turns + head, 1) == parts - 1:
                _join(part_o, part_ml, o, head, parts, GROUP, PARTS, D, BJ, BD, JOIN)
                tl.store(turns + head, 0)


@triton.jit
def _rope_attention_kernel(
    qkv, cos, sin, k_cache, v_cache, position, turns, part_o, part_ml, o,
    programs, s, scale, kv_heads, ahead, ahead_bytes, step, pieces,
    GROUP: tl.constexpr, PARTS: tl.constexpr, D: tl.constexpr, BG: tl.constexpr, BJ: tl.constexpr,
    BH: tl.constexpr, BD: tl.constexpr, KEYS: tl.constexpr, JOIN: tl.constexpr,
    EARLY: tl.constexpr, KIND: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program < programs:
        _part(
            (program // PARTS).to(tl.int64), program % PARTS, qkv, cos, sin, k_cache, v_cache, position, turns,
            part_o, part_ml, o, s, scale, kv_heads, EARLY, GROUP, PARTS, D, BG, BJ, BH, BD, KEYS, JOIN,
        )  # fmt: skip
    elif KIND:
        fetch(ahead, ahead_bytes, step, program - programs, pieces, KIND, LANES)


def parts_for(heads: int, s: int) -> int:
    """Into how many parts the cache is cut: enough to fill the machine, none shorter than a step."""
    return max(1, min(_MOST_PARTS, _PROGRAMS // max(heads, 1), -(-s // _KEYS)))


def _triton(
    qkv: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, position: Tensor,
    turns: Tensor | None = None, ahead: Tensor | None = None,
) -> Tensor:  # fmt: skip
    batch, kv_heads, s, d = k_cache.shape
    heads, group, device = batch * kv_heads, qkv.shape[-1] // d // kv_heads - 2, qkv.device
    parts = parts_for(heads, s)
    o = torch.empty((batch, group * kv_heads, d), dtype=qkv.dtype, device=device)
    if not heads:
        return o
    part_o = torch.empty((heads, parts, group, d), dtype=torch.float32, device=device)
    part_ml = torch.empty((heads, parts, group, 2), dtype=torch.float32, device=device)
    turns = torch.zeros(heads, dtype=torch.int32, device=device) if turns is None else turns
    bj, bd = triton.next_power_of_2(group), triton.next_power_of_2(d)
    _rope_attention_kernel[(heads * parts + spare(ahead, device),)](
        qkv.contiguous(), cos, sin, k_cache, v_cache, position, turns, part_o, part_ml, o,
        heads * parts, s, d**-0.5 * _LOG2E, kv_heads,
        GROUP=group, PARTS=parts, D=d, BG=max(16, bj), BJ=bj, BH=max(16, triton.next_power_of_2(d // 2)),
        BD=bd, KEYS=_KEYS, JOIN=max(1, min(_MOST_PARTS, _JOINED // (bj * bd))),
        # A fused multiply-add would leave out the rounding of a rotation's products.
        enable_fp_fusion=False, num_warps=_WARPS, **early(device), **fetching(ahead, device, _WARPS),
    )  # fmt: skip
    return o


def _supports(
    qkv: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, position: Tensor,
    turns: Tensor | None = None, ahead: Tensor | None = None,
) -> str | None:  # fmt: skip
    if not all(t.is_contiguous() for t in (cos, sin, k_cache, v_cache)):
        return "caches, cos and sin have to be contiguous"
    d = k_cache.shape[-1]
    return f"D = {d} is above 256 or odd" if d > 256 or d % 2 else None


IMPLEMENTATIONS = (Implementation("rope_attention_triton", _triton, _supports, native=True),)
