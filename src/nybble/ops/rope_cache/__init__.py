"""rope_cache: rotary positions for q and k, and k and v put into the cache, for one new token a sequence.

From the fused product qkv [B, (Hq + 2 Hkv) D] of a decode step at position p:

    rotate(z) = z * cos[p] + (-z_high, z_low) * sin[p]        (Su et al., arXiv 2104.09864, halves as in Llama)
    q = rotate(q),   k_cache[:, :, p] = rotate(k),   v_cache[:, :, p] = v

Every product and the sum are rounded to the dtype, as transformers' apply_rotary_pos_emb rounds them. p is read from
device memory, so that one captured graph serves every step. The caches are written in place: that is the op's point.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nybble.ops._choose import choose
from nybble.ops._declare import Agreement, Cost, Implementation, Op


def rope_cache_(qkv: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, position: Tensor) -> Tensor:
    """q rotated, [B, Hq, D]; writes position `position` of the caches.

    Args:
        qkv: [B, (Hq + 2 Hkv) D].
        cos, sin: [S, D] in qkv's dtype.
        k_cache, v_cache: [B, Hkv, S, D], contiguous, qkv's dtype.
        position: int32 [1], below S, the same for every sequence.
    """
    args = (qkv, cos, sin, k_cache, v_cache, position)
    return choose(ROPE_CACHE, qkv.device.type, *args).run(*args)


def rope_cache_reference(
    qkv: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, position: Tensor
) -> Tensor:
    """The definition, in plain torch."""
    batch, kv_heads, _, d = k_cache.shape
    heads = qkv.view(batch, qkv.shape[-1] // d, d)
    index = position.long()
    c, s = cos[index], sin[index]

    def rotate(z: Tensor) -> Tensor:
        low, high = z.chunk(2, -1)
        return z * c + torch.cat([-high, low], -1) * s

    q, k, v = heads.split([heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], 1)
    k_cache.index_copy_(2, index, rotate(k)[:, :, None])
    v_cache.index_copy_(2, index, v[:, :, None])
    return rotate(q)


def cases(device: str = "cpu") -> Iterator[tuple[str, tuple[Any, ...]]]:
    """(label, arguments): head sizes that are no powers of two, grouped heads, first and last position."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 9, 3, 64, 5), (2, 4, 4, 40, 0), (3, 8, 1, 72, 15), (0, 2, 1, 64, 1), (1, 2, 2, 2, 3))
    for number, (batch, hq, hkv, d, p) in enumerate(shapes):
        dtype = (torch.float32, torch.bfloat16, torch.float16)[number % 3]

        def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device, dtype)

        angle = torch.randn(16, d, generator=generator)
        tables = angle.cos().to(device, dtype), angle.sin().to(device, dtype)
        caches = normal(batch, hkv, 16, d), normal(batch, hkv, 16, d)
        position = torch.tensor([p], dtype=torch.int32, device=device)
        yield f"B{batch}-H{hq}-{hkv}-D{d}-{dtype}", (normal(batch, (hq + 2 * hkv) * d), *tables, *caches, position)


def cost(qkv: Tensor, *rest: Tensor) -> Cost:
    """Three operations a value; qkv read and written once."""
    return Cost(3.0 * qkv.numel(), 2.0 * qkv.numel() * qkv.element_size())


ROPE_CACHE = Op(
    name="rope_cache_",
    reference=rope_cache_reference,
    agreement=Agreement({torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-20}),
    cases=cases,
    cost=cost,
    homes={"cuda": "nybble.ops.rope_cache.triton"},
    fallback=Implementation("rope_cache_torch", rope_cache_reference, lambda *args: None, native=True),
)
