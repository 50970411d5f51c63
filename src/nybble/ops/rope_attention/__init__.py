"""rope_attention: rotary positions, the cache and attention for one new token a sequence.

    q = rope_cache_(qkv, ...)                   rotations; the token's key and value go into the caches (ops/rope_cache)
    o = decode_attention(q, ...)                softmax(q k^T / sqrt(D)) v over the valid part (ops/decode_attention)

with the roundings of both, one after the other: the contract is their composition. At a few hundred tokens both cost
their launches and the way to memory and back, in a chain of three kernels; in one kernel the cache is on its way while
the products before are still at work. Bytes: the valid part of the cache, once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nybble.errors import BadInput
from nybble.ops._choose import choose
from nybble.ops._declare import Agreement, Cost, Implementation, Op
from nybble.ops.decode_attention import cost as attention_cost
from nybble.ops.decode_attention import decode_attention, decode_attention_reference
from nybble.ops.rope_cache import query_heads, rope_cache_, rope_cache_reference


def rope_attention_(
    qkv: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, position: Tensor
) -> Tensor:
    """[B, Hq, D] in qkv.dtype; writes entry `position` of the caches.

    Args:
        qkv: [B, (Hq + 2 Hkv) D], float32, bfloat16 or float16.
        cos, sin: [S, D] in qkv's dtype.
        k_cache, v_cache: [B, Hkv, S, D], contiguous, qkv's dtype, Hq a multiple of Hkv.
        position: int32 [1], of the new token, the same for every sequence; below S, which is not checked.

    Raises:
        BadInput: shapes that do not fit.
    """
    (batch, heads, _, d), queries = k_cache.shape, query_heads(qkv, k_cache)
    if qkv.dim() != 2 or len(qkv) != batch or qkv.shape[-1] % d or queries < 1 or queries % heads:
        caches = f"caches {list(k_cache.shape)}, which hold [B, Hkv, S, D]"
        raise BadInput(f"rope_attention_ takes [B, (Hq + 2 Hkv) D], got {list(qkv.shape)} beside {caches}")
    args = (qkv, cos, sin, k_cache, v_cache, position)
    return choose(ROPE_ATTENTION, qkv.device.type, *args).run(*args)


def rope_attention_reference(
    qkv: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, position: Tensor
) -> Tensor:
    """The definition: the definitions of both ops, one after the other."""
    q = rope_cache_reference(qkv[:, None], cos, sin, k_cache, v_cache, position)[:, 0]
    return decode_attention_reference(q, k_cache, v_cache, position)


def composed(qkv: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, position: Tensor) -> Tensor:
    """The two ops one after the other."""
    q = rope_cache_(qkv[:, None], cos, sin, k_cache, v_cache, position)[:, 0]
    return decode_attention(q, k_cache, v_cache, position)


def cases(device: str = "cpu") -> Iterator[tuple[str, tuple[Any, ...]]]:
    """(label, arguments): grouped heads and not, an odd group, the first token, a full cache, long ones; NaN beyond the
    length, which must not be seen."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 9, 3, 64, 200, 77), (2, 4, 4, 40, 65, 0), (3, 8, 1, 64, 120, 119), (0, 2, 1, 64, 8, 1),
              (1, 4, 2, 128, 300, 299), (1, 7, 1, 64, 64, 63), (1, 8, 2, 128, 1500, 1403), (2, 14, 2, 128, 40, 0),
              (5, 3, 3, 64, 33, 17), (1, 4, 2, 256, 70, 69), (1, 4, 1, 256, 90, 41),
              (1, 2, 2, 256, 30, 29))  # fmt: skip
    for number, (batch, hq, hkv, d, s, p) in enumerate(shapes):
        dtype = (torch.float32, torch.bfloat16, torch.float16)[number % 3]
        qkv = torch.randn(batch, (hq + 2 * hkv) * d, generator=generator).to(device, dtype)
        angle = torch.randn(s, d, generator=generator)
        tables = angle.cos().to(device, dtype), angle.sin().to(device, dtype)
        caches = [torch.randn(batch, hkv, s, d, generator=generator).to(device, dtype) for _ in range(2)]
        for cache in caches:
            cache[:, :, p:] = torch.nan
        position = torch.tensor([p], dtype=torch.int32, device=device)
        yield f"B{batch}-H{hq}-{hkv}-D{d}-S{s}-{dtype}", (qkv, *tables, *caches, position)


def cost(qkv: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, position: Tensor) -> Cost:
    """The attention's, in one launch; rotations come to nothing beside it."""
    q = qkv.new_empty((len(qkv), query_heads(qkv, k_cache), k_cache.shape[-1]), device="meta")
    return attention_cost(q, k_cache, v_cache, position)


COMPOSED = Implementation("rope_attention_composed", composed, native=True, note="its two ops, one after the other")

ROPE_ATTENTION = Op(
    name="rope_attention_",
    reference=rope_attention_reference,
    # decode_attention's: the rotations' roundings are the same everywhere.
    agreement=Agreement({torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-18}),
    cases=cases,
    cost=cost,
    homes={"cuda": "nybble.ops.rope_attention.cuda"},
    fallback=COMPOSED,
)

__all__ = ["ROPE_ATTENTION", "rope_attention_"]
