"""add_rmsnorm: a residual addition and the RMSNorm after it, in one pass.

    h = x + residual                      rounded to x.dtype
    y = weight * (h / sqrt(mean(h^2) + eps))

with the mean and the quotient in float32, the quotient rounded to x.dtype before the weight multiplies it, as
transformers' LlamaRMSNorm does (Zhang and Sennrich, arXiv 1910.07467). Unfused, a decode step would read and write
the hidden state four times; here it is read once and written twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nybble.ops._choose import choose
from nybble.ops._declare import Agreement, Cost, Implementation, Op


def add_rmsnorm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(y, h): the normalised sum and the sum itself.

    Args:
        x: [..., H], float32, bfloat16 or float16.
        residual: the shape and dtype of x, or None for zero.
        weight: [H], x's dtype.
        eps: added to the mean of squares.
    """
    return choose(ADD_RMSNORM, x.device.type, x, residual, weight, eps).run(x, residual, weight, eps)


def add_rmsnorm_reference(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The definition, in plain torch."""
    h = x if residual is None else x + residual
    wide = h.to(torch.float32)
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * scaled.to(x.dtype), h


def cases(device: str = "cpu") -> Iterator[tuple[str, tuple[Any, ...]]]:
    """(label, arguments): odd widths, no rows, one row, with and without a residual, every dtype, a strided x."""
    generator = torch.Generator().manual_seed(0)
    for number, (rows, columns) in enumerate(((0, 64), (1, 1), (1, 576), (3, 129), (5, 4096), (2, 1000))):
        dtype = (torch.float32, torch.bfloat16, torch.float16)[number % 3]
        wide = torch.randn(rows, 2 * columns, generator=generator).to(device, dtype)
        x = wide[:, ::2] if number % 2 else wide[:, :columns]
        weight = torch.randn(columns, generator=generator).to(device, dtype)
        residual = torch.randn(rows, columns, generator=generator).to(device, dtype)
        yield f"{rows}x{columns}-{dtype}", (x, None, weight, 1e-5)
        yield f"{rows}x{columns}-{dtype}-residual", (x, residual, weight, 1e-5)


def cost(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Cost:
    """Four operations a value; x and residual read, y and h written."""
    return Cost(4.0 * x.numel(), x.numel() * x.element_size() * (2 if residual is None else 4))


ADD_RMSNORM = Op(
    name="add_rmsnorm",
    reference=add_rmsnorm_reference,
    # The roundings are the definition's own; a sum in another order can move a value across one of them.
    agreement=Agreement({torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-20}),
    cases=cases,
    cost=cost,
    homes={"cuda": "nybble.ops.rmsnorm.triton"},
    fallback=Implementation("add_rmsnorm_torch", add_rmsnorm_reference, native=True),
)
