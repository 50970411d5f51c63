"""rope_cache_exact_ on NVIDIA GPUs: _exact/rope.cu, a block a token."""

from __future__ import annotations

import ctypes

from torch import Tensor

from nybble.ops._declare import Implementation
from nybble.ops._exact.launch import INT, POINTER, defines, launch, pointers, refusal

_THREADS = 256


class _Arguments(ctypes.Structure):
    _fields_ = [
        *((n, POINTER) for n in ("qkv", "cos", "sin", "k_cache", "v_cache", "rows", "positions", "q")),
        *((n, INT) for n in ("query_heads", "kv_heads", "half", "capacity")),
    ]


def _supports(qkv: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, *rest: Tensor) -> str | None:
    if not (cos.is_contiguous() and sin.is_contiguous() and k_cache.is_contiguous() and v_cache.is_contiguous()):
        return "takes contiguous tables and caches"
    return refusal(qkv)


def _cuda(
    qkv: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, rows: Tensor, positions: Tensor
) -> Tensor:
    qkv, rows, positions = qkv.contiguous(), rows.contiguous(), positions.contiguous()
    _, kv_heads, capacity, d = k_cache.shape
    heads = qkv.shape[1] // d - 2 * kv_heads
    q = qkv.new_empty((len(qkv), heads, d))
    named = pointers(qkv, cos, sin, k_cache, v_cache, rows, positions, q)
    argument = _Arguments(*named, heads, kv_heads, d // 2, capacity)
    launch(qkv, "rope", "rope_cache_exact", defines(qkv.dtype, THREADS=_THREADS), (len(qkv), 1), _THREADS, argument)
    return q


IMPLEMENTATIONS = (Implementation("rope_cache_exact_cuda_sm80", _cuda, _supports, native=True),)
