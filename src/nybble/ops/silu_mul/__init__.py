"""silu_mul: the gate of a gated MLP, y = silu(gate) * up, on the fused product [gate | up].

silu(g) = g / (1 + exp(-g)) in float32, rounded to the input's dtype before it multiplies, as transformers' LlamaMLP
does (Shazeer, arXiv 2002.05202). Reads 2I values a token and writes I.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nybble.errors import BadInput
from nybble.ops._choose import choose
from nybble.ops._declare import Agreement, Cost, Implementation, Op


def silu_mul(x: Tensor) -> Tensor:
    """[..., 2I] -> [..., I] in x.dtype (float32, bfloat16 or float16): silu(x[..., :I]) * x[..., I:]."""
    if x.shape[-1] % 2:
        raise BadInput(f"silu_mul takes gate and up side by side, an even width; got {tuple(x.shape)}")
    return choose(SILU_MUL, x.device.type, x).run(x)


def silu_mul_reference(x: Tensor) -> Tensor:
    """The definition, in plain torch."""
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def cases(device: str = "cpu") -> Iterator[tuple[str, tuple[Any, ...]]]:
    """(label, arguments): odd widths, no rows, every dtype, a strided x, large magnitudes."""
    generator = torch.Generator().manual_seed(0)
    for number, (rows, columns) in enumerate(((0, 8), (1, 1), (1, 1536), (3, 129), (4, 3000), (2, 65))):
        dtype = (torch.float32, torch.bfloat16, torch.float16)[number % 3]
        wide = (torch.randn(rows, 4 * columns, generator=generator) * 8).to(device, dtype)
        yield f"{rows}x{columns}-{dtype}", ((wide[:, ::2] if number % 2 else wide[:, : 2 * columns]),)


def cost(x: Tensor) -> Cost:
    """Four operations a value of the result; three values moved for one."""
    return Cost(2.0 * x.numel(), 1.5 * x.numel() * x.element_size())


SILU_MUL = Op(
    name="silu_mul",
    reference=silu_mul_reference,
    agreement=Agreement({torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-20}),
    cases=cases,
    cost=cost,
    homes={"cuda": "nybble.ops.silu_mul.triton"},
    fallback=Implementation("silu_mul_torch", silu_mul_reference, native=True),
)
