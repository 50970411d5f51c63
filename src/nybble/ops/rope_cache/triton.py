"""rope_cache_ as one Triton kernel: a program for each head of each sequence."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nybble.ops._declare import Implementation
from nybble.ops._early import begin, early


@triton.jit
def _rope_cache_kernel(
    qkv, cos, sin, q, k_cache, v_cache,
    position, s,
    HQ: tl.constexpr, HKV: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    D: tl.constexpr = 2 * HALF
    at = tl.arange(0, BLOCK)
    inside = at < HALF
    begin(EARLY)
    p = tl.load(position).to(tl.int64)
    source = qkv + (batch * (HQ + 2 * HKV) + head) * D
    low, high = tl.load(source + at, inside, 0.0), tl.load(source + HALF + at, inside, 0.0)
    if head >= HQ + HKV:
        row = v_cache + ((batch * HKV + head - HQ - HKV) * s + p) * D
        tl.store(row + at, low, inside)
        tl.store(row + HALF + at, high, inside)
    else:
        dtype = low.dtype
        a, b = low.to(tl.float32), high.to(tl.float32)
        c0 = tl.load(cos + p * D + at, inside, 0.0).to(tl.float32)
        c1 = tl.load(cos + p * D + HALF + at, inside, 0.0).to(tl.float32)
        s0 = tl.load(sin + p * D + at, inside, 0.0).to(tl.float32)
        s1 = tl.load(sin + p * D + HALF + at, inside, 0.0).to(tl.float32)
        first = ((a * c0).to(dtype).to(tl.float32) - (b * s0).to(dtype).to(tl.float32)).to(dtype)
        second = ((b * c1).to(dtype).to(tl.float32) + (a * s1).to(dtype).to(tl.float32)).to(dtype)
        row = q + (batch * HQ + head) * D
        if head >= HQ:
            row = k_cache + ((batch * HKV + head - HQ) * s + p) * D
        tl.store(row + at, first, inside)
        tl.store(row + HALF + at, second, inside)


def _triton(qkv: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, position: Tensor) -> Tensor:
    batch, kv_heads, s, d = k_cache.shape
    heads = qkv.shape[-1] // d - 2 * kv_heads
    q = torch.empty((batch, heads, d), dtype=qkv.dtype, device=qkv.device)
    if batch:
        _rope_cache_kernel[(heads + 2 * kv_heads, batch)](
            qkv.contiguous(), cos, sin, q, k_cache, v_cache, position, s,
            heads, kv_heads, d // 2, triton.next_power_of_2(d // 2),
            # A fused multiply-add would leave out the rounding of a product.
            num_warps=1, enable_fp_fusion=False, **early(qkv.device),
        )  # fmt: skip
    return q


def _supports(qkv: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, position: Tensor) -> str | None:
    if not (k_cache.is_contiguous() and v_cache.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()):
        return "caches and tables have to be contiguous"
    return f"D = {k_cache.shape[-1]} is odd" if k_cache.shape[-1] % 2 else None


IMPLEMENTATIONS = (Implementation("rope_cache_triton", _triton, _supports, native=True),)
