"""attention_exact on NVIDIA GPUs: _exact/attention.cu, a block a run of the cache, then the runs put together.

The grid covers the whole cache, since lengths are on the device; blocks beyond a token's position end at once. So a
captured step serves every position.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from nybble.ops._declare import Implementation
from nybble.ops._exact.launch import FLOAT, INT, POINTER, Defines, defines, launch, pointers, refusal
from nybble.ops.attention_exact import DOT_LANES, SPLIT, VALUE_LANES, scale

_THREADS = 256
_WORKSPACE = 1 << 26  # floats held for the runs of a launch's tokens
_SHARED_BYTES = 48 * 1024


class _Arguments(ctypes.Structure):
    _fields_ = [
        *((n, POINTER) for n in ("q", "k_cache", "v_cache", "rows", "positions", "parts", "most", "sums", "o")),
        *((n, INT) for n in ("kv_heads", "capacity", "runs")),
        ("scale", FLOAT),
    ]


def shared_bytes(d: int, group: int, size: int) -> int:
    """Shared memory of a block; `size` is that of an element in bytes."""
    keys, lanes = SPLIT * (d * size + 4), DOT_LANES + VALUE_LANES * (_THREADS // VALUE_LANES)
    return keys + 4 * group * (d + SPLIT + lanes)


def _supports(q: Tensor, k_cache: Tensor, v_cache: Tensor, *rest: Tensor) -> str | None:
    d, group = q.shape[2], q.shape[1] // k_cache.shape[1]
    if d * q.element_size() % 4 or d > _THREADS or k_cache.data_ptr() % 4:
        return f"D = {d} is odd or above {_THREADS}, or the cache is not aligned to 4 bytes"
    if shared_bytes(d, group, q.element_size()) > _SHARED_BYTES:
        return f"D = {d} with {group} query heads a key head takes more than {_SHARED_BYTES} bytes of shared memory"
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        return "takes contiguous caches"
    return refusal(q)


def definitions(dtype: torch.dtype, d: int, group: int) -> Defines:
    """What attention.cu is compiled with."""
    return defines(dtype, HEAD=d, GROUP=group, SPLIT=SPLIT, DOT_LANES=DOT_LANES, VALUE_LANES=VALUE_LANES)


def _cuda(q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
    q, rows, positions = q.contiguous(), rows.contiguous(), positions.contiguous()
    o = torch.empty_like(q)
    runs = -(-k_cache.shape[2] // SPLIT)
    room = max(1, _WORKSPACE // (q.shape[1] * runs * (q.shape[2] + 2)))
    for first in range(0, len(q), room):
        part = slice(first, first + room)
        _launch(q[part], k_cache, v_cache, rows[part], positions[part], o[part], runs)
    return o


def _launch(q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: Tensor, positions: Tensor, o: Tensor, runs: int) -> None:
    n, heads, d = q.shape
    _, kv_heads, capacity, _ = k_cache.shape
    parts = torch.empty((n, heads, runs, d), dtype=torch.float32, device=q.device)
    most, sums = (torch.empty((n, heads, runs), dtype=torch.float32, device=q.device) for _ in range(2))
    named = pointers(q, k_cache, v_cache, rows, positions, parts, most, sums, o)
    argument = _Arguments(*named, kv_heads, capacity, runs, scale(d))
    given = definitions(q.dtype, d, heads // kv_heads)
    launch(q, "attention", "attention_exact_runs", given, (n * kv_heads, runs), _THREADS, argument)
    launch(q, "attention", "attention_exact_sum", given, (n * heads, 1), _THREADS, argument)


IMPLEMENTATIONS = (Implementation("attention_exact_cuda_sm80", _cuda, _supports, native=True),)
