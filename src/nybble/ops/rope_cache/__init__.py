"""rope_cache: rotary positions for q and k, and k and v put into the cache: a step's one token, or a prompt's many.

From the fused product qkv [B, T, (Hq + 2 Hkv) D] of the tokens at positions p = position to position + T - 1:

    rotate(z) = z * cos[p] + (-z_high, z_low) * sin[p]        (Su et al., arXiv 2104.09864, halves as in Llama)
    q = rotate(q),   k_cache[:, :, p] = rotate(k),   v_cache[:, :, p] = v

Every product and the sum are rounded to the dtype, as transformers' apply_rotary_pos_emb rounds them. The position is
read from device memory, so that one captured graph serves every step. The caches are written in place: that is the
op's point.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nybble.errors import BadInput
from nybble.ops._choose import choose
from nybble.ops._declare import Agreement, Cost, Implementation, Op

_CAPACITY = 40  # of the cases' caches


def rope_cache_(qkv: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, position: Tensor) -> Tensor:
    """q rotated, [B, T, Hq, D]; writes T positions of the caches from `position` on.

    Args:
        qkv: [B, T, (Hq + 2 Hkv) D].
        cos, sin: [S, D] in qkv's dtype.
        k_cache, v_cache: [B, Hkv, S, D], contiguous, qkv's dtype.
        position: int32 [1], of the first token, the same for every sequence; at most S - T, which is not checked.

    Raises:
        BadInput: shapes that do not fit.
    """
    (batch, _, capacity, d), width = k_cache.shape, qkv.shape[-1]
    fits = qkv.dim() == 3 and len(qkv) == batch and qkv.shape[1] <= capacity
    if not fits or width % d or query_heads(qkv, k_cache) < 1:
        caches = f"caches {list(k_cache.shape)}, which hold [B, Hkv, S, D]"
        raise BadInput(f"rope_cache_ takes [B, T, (Hq + 2 Hkv) D], T up to S, got {list(qkv.shape)} beside {caches}")
    args = (qkv, cos, sin, k_cache, v_cache, position)
    return choose(ROPE_CACHE, qkv.device.type, *args).run(*args)


def query_heads(qkv: Tensor, k_cache: Tensor) -> int:
    """Hq of [..., (Hq + 2 Hkv) D] beside caches [B, Hkv, S, D]."""
    return qkv.shape[-1] // k_cache.shape[-1] - 2 * k_cache.shape[1]


def rope_cache_reference(
    qkv: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, position: Tensor
) -> Tensor:
    """The definition, in plain torch."""
    (batch, kv_heads, _, d), tokens = k_cache.shape, qkv.shape[1]
    heads = qkv.view(batch, tokens, qkv.shape[-1] // d, d)
    index = position.long() + torch.arange(tokens, device=qkv.device)
    c, s = cos[index][:, None], sin[index][:, None]

    def rotate(z: Tensor) -> Tensor:
        low, high = z.chunk(2, -1)
        return z * c + torch.cat([-high, low], -1) * s

    q, k, v = heads.split([query_heads(qkv, k_cache), kv_heads, kv_heads], 2)
    k_cache.index_copy_(2, index, rotate(k).transpose(1, 2))
    v_cache.index_copy_(2, index, v.transpose(1, 2))
    return rotate(q)


def cases(device: str = "cpu") -> Iterator[tuple[str, tuple[Any, ...]]]:
    """(label, arguments): head sizes that are no powers of two, grouped heads, first and last position, prompts."""
    generator = torch.Generator().manual_seed(0)
    steps = ((1, 1, 9, 3, 64, 5), (2, 1, 4, 4, 40, 0), (3, 1, 8, 1, 72, 15), (0, 1, 2, 1, 64, 1), (1, 1, 2, 2, 2, 3))
    prompts = ((2, 37, 3, 1, 40, 0), (1, 40, 4, 2, 64, 0), (2, 16, 2, 2, 128, 24), (1, 0, 2, 1, 64, 0))
    for number, (batch, tokens, hq, hkv, d, p) in enumerate(steps + prompts):
        dtype = (torch.float32, torch.bfloat16, torch.float16)[number % 3]

        def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device, dtype)

        angle = torch.randn(_CAPACITY, d, generator=generator)
        tables = angle.cos().to(device, dtype), angle.sin().to(device, dtype)
        caches = normal(batch, hkv, _CAPACITY, d), normal(batch, hkv, _CAPACITY, d)
        position = torch.tensor([p], dtype=torch.int32, device=device)
        label = f"B{batch}-T{tokens}-H{hq}-{hkv}-D{d}-{dtype}"
        yield label, (normal(batch, tokens, (hq + 2 * hkv) * d), *tables, *caches, position)


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
    fallback=Implementation("rope_cache_torch", rope_cache_reference, native=True),
)
