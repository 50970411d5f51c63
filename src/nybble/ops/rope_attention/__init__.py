"""rope_attention_: what a decode step does between the product [q k v] and the output projection, one new token a
sequence.

    rotate(z) = z * cos + (-z_high, z_low) * sin        (Su et al., arXiv 2104.09864, halves as in Llama)
    k_cache[:, :, p] = rotate(k),   v_cache[:, :, p] = v
    o = softmax(rotate(q) k_cache^T / sqrt(D)) v_cache    over the first p + 1 entries

Every product and the sum of a rotation are rounded to the dtype, as transformers' apply_rotary_pos_emb rounds them.
Query heads share key heads in groups (GQA). The position p is read from device memory, so that one captured graph
serves every step. The caches are written in place: that is half of the op's point. Bytes: the valid part of the
caches, once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nybble.ops._choose import choose
from nybble.ops._declare import Agreement, Cost, Implementation, Op


def rope_attention_(
    qkv: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, position: Tensor,
    turns: Tensor | None = None, ahead: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """o [B, Hq, D] in qkv's dtype; writes entry `position` of the caches.

    Args:
        qkv: [B, (Hq + 2 Hkv) D], float32, bfloat16 or float16.
        cos, sin: [D], the tables' rows at `position`, in qkv's dtype.
        k_cache, v_cache: [B, Hkv, S, D], contiguous, qkv's dtype, Hq a multiple of Hkv.
        position: int32 [1], below S, the same for every sequence.
        turns: int32, at least B Hkv of them, all 0 before and after every call; calls that may run at the same time
            need their own. None makes them.
        ahead: memory that will be read next; a hint that no result depends on (ops/_early.py).
    """
    args = (qkv, cos, sin, k_cache, v_cache, position, turns, ahead)
    return choose(ROPE_ATTENTION, qkv.device.type, *args).run(*args)


def rope_attention_reference(
    qkv: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, position: Tensor, *hints: Tensor | None
) -> Tensor:
    """The definition: rotations in the dtype, attention in float64."""
    batch, kv_heads, s, d = k_cache.shape
    heads = qkv.view(batch, qkv.shape[-1] // d, d)

    def rotate(z: Tensor) -> Tensor:
        low, high = z.chunk(2, -1)
        return z * cos + torch.cat([-high, low], -1) * sin

    q, k, v = heads.split([heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], 1)
    k_cache.index_copy_(2, position.long(), rotate(k)[:, :, None])
    v_cache.index_copy_(2, position.long(), v[:, :, None])
    grouped = rotate(q).view(batch, kv_heads, q.shape[1] // kv_heads, d).double()
    scores = grouped @ k_cache.double().transpose(-1, -2) / math.sqrt(d)
    beyond = torch.arange(s, device=q.device) > position
    weights = scores.masked_fill(beyond, -math.inf).softmax(-1)
    values = v_cache.double().masked_fill(beyond[:, None], 0)
    return (weights @ values).view(q.shape).to(q.dtype)


def cases(device: str = "cpu") -> Iterator[tuple[str, tuple[Any, ...]]]:
    """(label, arguments): grouped heads, head sizes that are no powers of two, the first token, a full cache, one part
    and many; NaN beyond the length, which must not be seen."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 9, 3, 64, 200, 77), (2, 4, 4, 40, 65, 0), (3, 8, 1, 72, 120, 119), (0, 2, 1, 64, 8, 1),
              (1, 2, 2, 128, 300, 299), (1, 4, 2, 16, 64, 63), (1, 12, 2, 2, 1100, 1090), (1, 8, 2, 128, 700, 640),
              (1, 4, 1, 256, 600, 513))  # fmt: skip
    for number, (batch, hq, hkv, d, s, p) in enumerate(shapes):
        dtype = (torch.float32, torch.bfloat16, torch.float16)[number % 3]

        def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device, dtype)

        angle = torch.randn(d, generator=generator)
        tables = angle.cos().to(device, dtype), angle.sin().to(device, dtype)
        caches = normal(batch, hkv, s, d), normal(batch, hkv, s, d)
        for cache in caches:
            cache[:, :, p:] = math.nan
        position = torch.tensor([p], dtype=torch.int32, device=device)
        label = f"B{batch}-H{hq}-{hkv}-D{d}-S{s}-{dtype}"
        yield label, (normal(batch, (hq + 2 * hkv) * d), *tables, *caches, position)


def cost(qkv: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, *rest: Tensor | None) -> Cost:
    """Both products over the whole cache (the length is on the device), the caches read once."""
    kv_heads, d = k_cache.shape[1], k_cache.shape[3]
    group = qkv.shape[-1] // d // kv_heads - 2
    return Cost(4.0 * group * k_cache.numel(), 2.0 * k_cache.numel() * k_cache.element_size())


ROPE_ATTENTION = Op(
    name="rope_attention_",
    reference=rope_attention_reference,
    # Weights are rounded to the values' dtype before the second product, as every flash attention does.
    agreement=Agreement({torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-18}),
    cases=cases,
    cost=cost,
    homes={"cuda": "nybble.ops.rope_attention.triton"},
    fallback=Implementation("rope_attention_torch", rope_attention_reference, lambda *args: None, native=True),
)
