"""decode_attention: one query token a sequence against a static cache of keys and values.

    o = softmax(q k^T / sqrt(D)) v      over the first `position + 1` entries of the cache

Query heads share key heads in groups (GQA). The length is read from device memory, so that one captured graph serves
every step. Bytes: the valid part of the cache, once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nybble.ops._choose import choose
from nybble.ops._declare import Agreement, Cost, Implementation, Op


def decode_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, position: Tensor) -> Tensor:
    """[B, Hq, D] in q.dtype.

    Args:
        q: [B, Hq, D], float32, bfloat16 or float16.
        k_cache, v_cache: [B, Hkv, S, D], contiguous, Hq a multiple of Hkv.
        position: int32 [1], the last valid entry of the cache.
    """
    return choose(DECODE_ATTENTION, q.device.type, q, k_cache, v_cache, position).run(q, k_cache, v_cache, position)


def decode_attention_reference(q: Tensor, k_cache: Tensor, v_cache: Tensor, position: Tensor) -> Tensor:
    """The definition, in float64."""
    batch, kv_heads, s, d = k_cache.shape
    grouped = q.view(batch, kv_heads, q.shape[1] // kv_heads, d).double()
    scores = grouped @ k_cache.double().transpose(-1, -2) / math.sqrt(d)
    beyond = torch.arange(s, device=q.device) > position
    weights = scores.masked_fill(beyond, -math.inf).softmax(-1)
    values = v_cache.double().masked_fill(beyond[:, None], 0)
    return (weights @ values).view(q.shape).to(q.dtype)


def cases(device: str = "cpu") -> Iterator[tuple[str, tuple[Any, ...]]]:
    """(label, arguments): grouped heads, head sizes that are no powers of two, the first token, a full cache; NaN
    beyond the length, which must not be seen."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 9, 3, 64, 200, 77), (2, 4, 4, 40, 65, 0), (3, 8, 1, 72, 120, 119), (0, 2, 1, 64, 8, 1),
              (1, 2, 2, 128, 300, 299), (1, 4, 2, 16, 64, 63), (1, 2, 1, 256, 70, 69))  # fmt: skip
    for number, (batch, hq, hkv, d, s, p) in enumerate(shapes):
        dtype = (torch.float32, torch.bfloat16, torch.float16)[number % 3]
        q = torch.randn(batch, hq, d, generator=generator).to(device, dtype)
        caches = torch.randn(2, batch, hkv, s, d, generator=generator).to(device, dtype)
        caches[..., p + 1 :, :] = math.nan
        position = torch.tensor([p], dtype=torch.int32, device=device)
        yield f"B{batch}-H{hq}-{hkv}-D{d}-S{s}-{dtype}", (q, caches[0], caches[1], position)


def cost(q: Tensor, k_cache: Tensor, v_cache: Tensor, position: Tensor) -> Cost:
    """Both products over the whole cache (the length is on the device), the caches read once."""
    group = q.shape[1] // k_cache.shape[1]
    return Cost(4.0 * group * k_cache.numel(), 2.0 * k_cache.numel() * k_cache.element_size())


DECODE_ATTENTION = Op(
    name="decode_attention",
    reference=decode_attention_reference,
    # Weights are rounded to the values' dtype before the second product, as every flash attention does.
    agreement=Agreement({torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-18}),
    cases=cases,
    cost=cost,
    homes={"cuda": "nybble.ops.decode_attention.triton"},
    fallback=Implementation("decode_attention_torch", decode_attention_reference, native=True),
)
