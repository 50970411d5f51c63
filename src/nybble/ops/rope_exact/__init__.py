"""rope_cache_exact_: rotary positions for q and k, and k and v put into the cache, the same bits on every machine.

For each token n, of sequence rows[n] at position p = positions[n], from the fused product qkv [N, (Hq + 2 Hkv) D]:

    (low, high) -> (low cos - high sin, high cos + low sin)     with the tables' row p (halves, as in Llama)
    q is returned; k and v are written to entry p of the sequence's cache

Products and their sum are float32, each rounded once; the result is rounded to the dtype once. Tables come from
tables.py. Tokens may be those of a decode step, of a prompt, or of several prompts of different lengths.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nybble.errors import BadInput
from nybble.ops._choose import choose
from nybble.ops._declare import Cost
from nybble.ops._exact.arithmetic import DTYPES, check_dtype, narrow
from nybble.ops._exact.declare import exact_op
from nybble.ops.rope_cache import query_heads
from nybble.ops.rope_exact.tables import rope_tables

__all__ = ["ROPE_CACHE_EXACT", "rope_cache_exact_", "rope_tables"]


def rope_cache_exact_(
    qkv: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, rows: Tensor, positions: Tensor
) -> Tensor:
    """q rotated, [N, Hq, D]; writes entries `positions` of sequences `rows` of the caches; promise: cross-machine.

    Args:
        qkv: [N, (Hq + 2 Hkv) D], float32, bfloat16 or float16.
        cos, sin: float32 [S, D / 2], contiguous.
        k_cache, v_cache: [B, Hkv, S, D], contiguous, qkv's dtype.
        rows, positions: int32 [N], below B and S; no two tokens alike.

    Raises:
        BadInput: dtypes or shapes that do not fit.
    """
    check_dtype("rope_cache_exact_", qkv, k_cache, v_cache)
    args = (qkv, cos, sin, k_cache, v_cache, rows, positions)
    _, kv_heads, length, d = k_cache.shape
    heads = query_heads(qkv, k_cache)
    table = (length, d // 2)
    fits = qkv.shape[-1] == (heads + 2 * kv_heads) * d and heads > 0 and d % 2 == 0 and v_cache.shape == k_cache.shape
    if not fits or cos.shape != table or sin.shape != table or len({len(qkv), len(rows), len(positions)}) > 1:
        raise BadInput(f"rope_cache_exact_: shapes do not fit: {', '.join(str(tuple(a.shape)) for a in args)}")
    if cos.dtype != torch.float32 or sin.dtype != torch.float32:
        raise BadInput(f"rope_cache_exact_ takes float32 tables, got {cos.dtype} and {sin.dtype}")
    return choose(ROPE_CACHE_EXACT, qkv.device.type, *args).run(*args)


def rope_cache_exact_reference(
    qkv: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, rows: Tensor, positions: Tensor
) -> Tensor:
    """The definition, and the twin on a CPU."""
    kv_heads, d = k_cache.shape[1], k_cache.shape[3]
    heads = qkv.view(len(qkv), qkv.shape[-1] // d, d)
    row, at = rows.long(), positions.long()
    c, s = cos[at][:, None], sin[at][:, None]
    turned = heads.shape[1] - kv_heads
    low, high = heads[:, :turned].to(torch.float32).chunk(2, -1)
    both = narrow(torch.cat([low * c - high * s, high * c + low * s], -1), qkv.dtype)
    k_cache[row, :, at] = both[:, turned - kv_heads :]
    v_cache[row, :, at] = heads[:, turned:]
    return both[:, : turned - kv_heads].contiguous()


def cases(device: str = "cpu") -> Iterator[tuple[str, tuple[Any, ...]]]:
    """(label, arguments): odd head counts, small and uneven head sizes, a prompt, several sequences, no tokens."""
    generator = torch.Generator().manual_seed(0)
    shapes = (((0,), 9, 3, 64, 16), ((0, 0, 0), 4, 4, 40, 9), ((0, 1, 2), 8, 1, 72, 16), ((), 2, 1, 64, 4),
              ((0, 1, 1, 1, 0), 2, 2, 2, 8), ((0, 0), 6, 2, 128, 5))  # fmt: skip
    for number, (rows, hq, hkv, d, s) in enumerate(shapes):
        dtype = DTYPES[number % 3]

        def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device, dtype)

        tables = (t.to(device) for t in rope_tables(d, s, {"rope_theta": 10000.0}))
        batch, count = max(rows, default=0) + 1, len(rows)
        caches = normal(batch, hkv, s, d), normal(batch, hkv, s, d)
        at = torch.tensor([s - 1 - n for n in range(count)], dtype=torch.int32, device=device)
        row = torch.tensor(rows, dtype=torch.int32, device=device)
        yield f"N{count}-H{hq}-{hkv}-D{d}-{dtype}", (normal(count, (hq + 2 * hkv) * d), *tables, *caches, row, at)


def cost(qkv: Tensor, *rest: Tensor) -> Cost:
    """Three operations a value; qkv read and written once."""
    return Cost(3.0 * qkv.numel(), 2.0 * qkv.numel() * qkv.element_size())


ROPE_CACHE_EXACT = exact_op("rope_cache_exact_", rope_cache_exact_reference, cases, cost, "nybble.ops.rope_exact.cuda")
