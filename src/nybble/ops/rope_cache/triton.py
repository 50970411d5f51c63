"""rope_cache_ as one Triton kernel: a program for each head of a few tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nybble.ops._declare import Implementation
from nybble.ops._early import begin, early
from nybble.ops.rope_cache import query_heads

_MANY = (16, 4)  # rows and warps of a program where there are many tokens: 16 bytes a thread and access at D = 128


@triton.jit
def _rope_cache_kernel(
    qkv, cos, sin, q, k_cache, v_cache,
    position, s, tokens,
    HQ: tl.constexpr, HKV: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    head, batch = tl.program_id(0), tl.program_id(2).to(tl.int64)
    D: tl.constexpr = 2 * HALF
    column = tl.arange(0, BLOCK)[None, :]
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    inside = (column < HALF) & (row < tokens)
    begin(EARLY)
    p = tl.load(position).to(tl.int64) + row
    source = qkv + ((batch * tokens + row) * (HQ + 2 * HKV) + head) * D + column
    low, high = tl.load(source, inside, 0.0), tl.load(source + HALF, inside, 0.0)
    if head >= HQ + HKV:
        to = v_cache + ((batch * HKV + head - HQ - HKV) * s + p) * D + column
        tl.store(to, low, inside)
        tl.store(to + HALF, high, inside)
    else:
        dtype = low.dtype
        a, b = low.to(tl.float32), high.to(tl.float32)
        angle = p * D + column
        c0 = tl.load(cos + angle, inside, 0.0).to(tl.float32)
        c1 = tl.load(cos + angle + HALF, inside, 0.0).to(tl.float32)
        s0 = tl.load(sin + angle, inside, 0.0).to(tl.float32)
        s1 = tl.load(sin + angle + HALF, inside, 0.0).to(tl.float32)
        first = ((a * c0).to(dtype).to(tl.float32) - (b * s0).to(dtype).to(tl.float32)).to(dtype)
        second = ((b * c1).to(dtype).to(tl.float32) + (a * s1).to(dtype).to(tl.float32)).to(dtype)
        to = q + ((batch * tokens + row) * HQ + head) * D + column
        if head >= HQ:
            to = k_cache + ((batch * HKV + head - HQ) * s + p) * D + column
        tl.store(to, first, inside)
        tl.store(to + HALF, second, inside)


def _triton(qkv: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, position: Tensor) -> Tensor:
    (batch, kv_heads, s, d), tokens = k_cache.shape, qkv.shape[1]
    heads = query_heads(qkv, k_cache)
    q = torch.empty((batch, tokens, heads, d), dtype=qkv.dtype, device=qkv.device)
    rows, warps = (1, 1) if tokens == 1 else _MANY
    if batch and tokens:
        _rope_cache_kernel[(heads + 2 * kv_heads, triton.cdiv(tokens, rows), batch)](
            qkv.contiguous(), cos, sin, q, k_cache, v_cache, position, s, tokens,
            heads, kv_heads, d // 2, triton.next_power_of_2(d // 2), rows,
            # A fused multiply-add would leave out the rounding of a product.
            num_warps=warps, enable_fp_fusion=False, **early(qkv.device),
        )  # fmt: skip
    return q


def _supports(qkv: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, position: Tensor) -> str | None:
    if not (k_cache.is_contiguous() and v_cache.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()):
        return "caches and tables have to be contiguous"
    return f"D = {k_cache.shape[-1]} is odd" if k_cache.shape[-1] % 2 else None


IMPLEMENTATIONS = (Implementation("rope_cache_triton", _triton, _supports, native=True),)
